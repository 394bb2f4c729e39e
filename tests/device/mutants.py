"""Bugs planted in the text of the device tier; see :mod:`tests.mutants`. Needs numpy, not torch."""

from __future__ import annotations

from typing import Final

ENGINE, STAGING, SLOTS = "tierkv/device/engine.py", "tierkv/device/staging.py", "tierkv/device/slots.py"
ROWS, LOWERING, CPU, TIER = (
    "tierkv/device/_rows.py",
    "tierkv/device/lowering.py",
    "tierkv/device/cpu.py",
    "tierkv/device/tier.py",
)
RACES, SIM = "tierkv/testing/_sim_races.py", "tierkv/testing/_sim_device.py"

RULES = "pytest tests/device/test_rules.py"
BYTES = "pytest tests/device/test_layout.py tests/device/test_cpu.py"
MACHINE = "pytest tests/device/test_simdevice.py"
IN_ONE_CALL = "pytest tests/device/test_rows.py"


GUARDED: Final = [
    ("copies do not wait for the producer", ENGINE, "            stream.wait_event(flight.ready)\n", "", RULES),
    (
        "a partly queued batch is taken for one that was not",
        ENGINE,
        "                flight.touched = True\n",
        "",
        RULES,
    ),
    (
        "descriptors go back to the pool at once",
        ENGINE,
        "                    flight.event = event\n",
        "                    flight.event = event\n                    self._pool.give_back(flight.descriptors)\n",
        RULES,
    ),
    (
        "younger jobs are asked before the oldest has ended",
        ENGINE,
        "        while flights and self._has_ended(flights[0]):\n",
        "        for _ in range((*[self._has_ended(one) for one in flights], False).index(False)):\n",
        RULES,
    ),
    (
        "a failed load is not tried again",
        ENGINE,
        "            flight.error = self._once_more(flight)\n",
        "            pass\n",
        BYTES,
    ),
    ("gaps of a slot are left as they were", ENGINE, "        zero.fill()\n", "        pass\n", BYTES),
    ("a ring's half is used again at once", STAGING, "            half.wait()\n", "", RULES),
    (
        "a staged store lands before it has arrived",
        STAGING,
        "        half.wait()\n        self._move(batch, part, half)\n",
        "        self._move(batch, part, half)\n",
        RULES,
    ),
    (
        "page locks are kept when a later one fails",
        SLOTS,
        "                if pin is None:\n                    _release(pins)\n",
        "                if pin is None:\n",
        RULES,
    ),
    (
        "slots in a later piece are addressed from the first",
        LOWERING,
        "(part.slots - part.piece * self._slots.slots_per_piece)",
        "part.slots",
        RULES,
    ),
    (
        "blocks are not checked against the tensor",
        LOWERING,
        "            if ids.min() < 0 or ids.max() >= n:\n",
        "            if ids.min() < 0:\n",
        BYTES,
    ),
    (
        "a gap between two slots is taken for a part of them",
        ROWS,
        "host[1:] != host[:-1] + nbytes[:-1]",
        "host[1:] < host[:-1]",
        IN_ONE_CALL,
    ),
    (
        "only tensors below the slots are copied",
        ROWS,
        "for side in (below, ~below):",
        "for side in (below,):",
        IN_ONE_CALL,
    ),
    (
        "a failed copy fails the next job too",
        CPU,
        "                error, took_s = None, 0.0\n",
        "                took_s = 0.0\n",
        BYTES,
    ),
    (
        "a cancelled copy returns at once",
        TIER,
        "    while not future.done():\n        try:\n            await asyncio.wait({future})\n",
        "    if not future.done():\n        try:\n            await asyncio.wait({future})\n",
        BYTES,
    ),
    (
        "the race check forgets what is in flight",
        RACES,
        "self.host.get(access.who, 0) < access.tick]",
        "self.host.get(access.who, 0) < access.tick - 1]",
        MACHINE,
    ),
    (
        "an event orders what comes after it",
        SIM,
        "            self.clock = dict(stream.clock)\n",
        "            self.clock = stream.clock\n",
        MACHINE,
    ),
]
