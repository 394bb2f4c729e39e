"""Bugs planted one at a time, to see that a state machine, or else an example, dies of each.

Run by hand before a release::

    python -m tests.property.mutants [word ...]

Each bug is a textual patch to a copy of the package; one that no longer applies is an error, so the list stays true.
The machines run as in the ``ci`` profile, without shrinking. Words choose the bugs whose names contain one of them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

RUN = """
import subprocess, sys
from hypothesis import HealthCheck, Phase, settings
settings.register_profile("hunt", max_examples=200, deadline=None, derandomize=True, database=None,
    phases=[Phase.generate], suppress_health_check=list(HealthCheck))
settings.load_profile("hunt")
from tests.property.test_hierarchy_machine import test_three_levels, test_two_levels
from tests.property.test_ledger_machine import test_ledger_agrees_with_its_model
from tierkv._level import Writes
def examples():
    run = ["-x", "-q", "-p", "no:cacheprovider", "tests/unit/test_hierarchy.py"]
    assert not subprocess.run([sys.executable, "-m", "pytest", *run], capture_output=True).returncode

hunts = [("an example", examples),
    ("two levels, cascade", lambda: test_two_levels(Writes.CASCADE)),
    ("two levels, demote", lambda: test_two_levels(Writes.DEMOTE)),
    ("three levels, mixed", lambda: test_three_levels(None)),
    ("three levels, demote", lambda: test_three_levels(Writes.DEMOTE)),
    ("ledger, slots", lambda: test_ledger_agrees_with_its_model("lru", True, False)),
    ("ledger, bytes", lambda: test_ledger_agrees_with_its_model("in_order", False, False)),
    ("ledger, seats", lambda: test_ledger_agrees_with_its_model("lru_seats", True, True))]
for name, hunt in hunts:
    try:
        hunt()
    except BaseException as error:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        print(f"{name}: {type(error).__name__} {str(error).splitlines()[0][:70] if str(error) else ''}")
        sys.exit(1)
"""


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str


LEDGER, SLOTS, ORDER, MOVES, FLOW, ROOM, HIERARCHY, LEVEL = (
    f"tierkv/_{name}.py" for name in ("ledger", "slots", "order", "moves", "flow", "room", "hierarchy", "level")
)

MUTANTS = [
    Mutant(
        "a copy down forgets to release its source",
        FLOW,
        "        self._release(above, flight.source)\n        if flight.demote and well:",
        "        if flight.demote and well:",
    ),
    Mutant(
        "a slot is freed before its writer has ended",
        FLOW,
        "            if ended:\n                self._writer_ended(top, entry)",
        "            self._writer_ended(top, entry)",
    ),
    Mutant(
        "a slot is freed while a copy or lease reads it",
        MOVES,
        "if entry.state is not GONE or not entry.settled:",
        "if entry.state is not GONE or entry.writing or entry.holds < 0:",
    ),
    Mutant(
        "a shielded key is evicted",
        ROOM,
        "if entry.key in shielded or entry.key in guarded:",
        "if entry.key in guarded:",
    ),
    Mutant(
        "a guarded key is evicted",
        FLOW,
        "accept: Callable[[Entry], bool] | None = self._unguarded if self.guarded else None",
        "accept: Callable[[Entry], bool] | None = None",
    ),
    Mutant(
        "an offered key is evicted",
        ROOM,
        "protect = {chunk.key for chunk in request}",
        "protect = set()",
    ),
    Mutant(
        "a key that was offered again is evicted at once",
        ROOM,
        "[] if len(wanted) == len(request) else [chunk.key for chunk in request]",
        "[]",
    ),
    Mutant(
        "what was offered displaces its parent",
        ROOM,
        "                keys.append(chunk[1])\n",
        "                pass\n",
    ),
    Mutant(
        "a trim evicts what was just offered",
        FLOW,
        "{*shielded, *(chunk.key for chunk in request)}",
        "{*shielded}",
    ),
    Mutant(
        "a parent leaves before the child that was passed over",
        LEDGER,
        "                    blocked.add(entry.parent)\n",
        "                    pass\n",
    ),
    Mutant(
        "a parent leaves before the child that is being demoted",
        FLOW,
        "                staying.add(entry.parent)\n",
        "                pass\n",
    ),
    Mutant(
        "a pending chunk is a victim",
        LEDGER,
        "may = not entry.holds and ",
        "may = not entry.n_pins and ",
    ),
    Mutant(
        "a held chunk is a victim",
        LEDGER,
        "may = not entry.holds and ",
        "may = not entry.writing and ",
    ),
    Mutant(
        "the policy is not told of a hold",
        ORDER,
        "                if entry.state is READY and entry.owned:\n                    self._pins.hold(entry.key)\n",
        "                pass\n",
    ),
    Mutant(
        "a refusal is not counted",
        FLOW,
        "        if reason is not None:\n            level.counts.refuse(reason)\n",
        "",
    ),
    Mutant("a key given twice is counted once", HIERARCHY, "len(present) + n_twice", "len(present)"),
    Mutant(
        "a stored event is told twice",
        FLOW,
        "            self._emit(level, EventKind.STORED, entry)\n        else:\n            if outcome",
        "            self._emit(level, EventKind.STORED, entry)\n"
        "            self._emit(level, EventKind.STORED, entry)\n        else:\n            if outcome",
    ),
    Mutant(
        "a removal of what was never told",
        MOVES,
        "        if state is READY:\n            if reason is Reason.EVICTED:",
        "        if True:\n            if reason is Reason.EVICTED:",
    ),
    Mutant(
        "a share that shrank is written beyond",
        LEDGER,
        "return self.capacity_nbytes - self.pending_nbytes",
        "return max(self.capacity_nbytes, 300) - self.pending_nbytes",
    ),
    Mutant(
        "bytes are booked at the payload, not at the charge",
        LEDGER,
        "        return chunk.nbytes if self._charge is None else self._charge(chunk.nbytes)",
        "        return chunk.nbytes",
    ),
    Mutant(
        "an answer that is older than a deletion is believed",
        HIERARCHY,
        " or (item.owned and not level.plan.owns(item.key))",
        "",
    ),
    Mutant(
        "a busy key is written again",
        FLOW,
        "if chunk[0] in level.leaving or chunk[0] in level.waiting:",
        "if chunk[0] in level.waiting:",
    ),
    Mutant(
        "a late success stays on the medium",
        FLOW,
        "            if outcome.ok:\n                entry.stored = True\n",
        "",
    ),
    Mutant(
        "an eviction below frees its bytes before the deletion",
        MOVES,
        "        if level.index and entry.owned and entry.stored:\n",
        "        if level.index and entry.owned and entry.stored:\n            level.ledger.quarantined_nbytes -= 1\n",
    ),
    Mutant(
        "a source is read while it is deleted",
        HIERARCHY,
        "            level.ledger.hold(below)  # making",
        "            pass  # making",
    ),
    Mutant(
        "an eviction under demote does not wait for the copy",
        FLOW,
        "return lambda entry: entry.turned_down(n_stored) or",
        "return lambda entry: True or",
    ),
    Mutant(
        "a corrupt source is believed in",
        FLOW,
        "outcome.status in (Status.MISSING, Status.CORRUPT):",
        "outcome.status is Status.MISSING:",
    ),
    Mutant(
        "a write waits for ever behind a demotion",
        FLOW,
        "for level in reversed(self.levels[: lowest + 1] if lowest >= 0 else self.levels):",
        "for level in [self.levels[lowest]]:",
    ),
    Mutant(
        "what a scan finds is written all the same",
        HIERARCHY,
        "            if (waiting := level.waiting.pop(item.key, None)) is not None:  # what should",
        "            if False:  # what should",
    ),
    Mutant(
        "a failed deletion is forgotten",
        FLOW,
        "        if outcome.ok or outcome.status is Status.MISSING:\n            self._free",
        "        if True:\n            self._free",
    ),
    Mutant(
        "on trial everybody is let through",
        "tierkv/_breaker.py",
        "self.traffic is Traffic.TRIAL and not self.trying",
        "self.traffic is Traffic.TRIAL",
    ),
    Mutant(
        "a trial that was called off is waited for",
        FLOW,
        "            self._door(flight.transfer).trying = False\n",
        "            pass\n",
    ),
    Mutant(
        "a broken level answers hits",
        LEVEL,
        "or not self.reads.lets_through or self.ledger.expired(entry)",
        "or self.ledger.expired(entry)",
    ),
    Mutant(
        "a copy that cannot be read now is none",
        LEVEL,
        "any(each.keeps(key) for each in self.lower)",
        "any(each.readable(key) is not None for each in self.lower)",
    ),
    Mutant(
        "an expired chunk answers a hit",
        LEVEL,
        "or not self.reads.lets_through or self.ledger.expired(entry)",
        "or not self.reads.lets_through",
    ),
    Mutant(
        "a foreign chunk is charged to us",
        LEDGER,
        "        if owned:\n            self.ready_nbytes += charge_nbytes",
        "        if True:\n            self.ready_nbytes += charge_nbytes",
    ),
    Mutant(
        "the tail of an offer is taken first",
        HIERARCHY,
        "wanted.sort(key=_end_token)",
        "wanted.sort(key=_end_token, reverse=True)",
    ),
    Mutant(
        "victims depend on the order of the caller's set",
        ROOM,
        "        everybody = droppable is None and",
        "        short += level.plan.slot_nbytes * (next(iter(shielded), b'') > b'b')\n"
        "        everybody = droppable is None and",
    ),
    Mutant(
        "a promotion ignores its limit",
        HIERARCHY,
        "if found is None or (limit is not None and len(sources) >= limit):",
        "if found is None:",
    ),
    Mutant(
        "a slot keeps its generation",
        SLOTS,
        "self.generation = generation = self.generation + 1",
        "self.generation = generation = 1",
    ),
    Mutant("a reset forgets what waits", HIERARCHY, "            self._refuse_waiting(level, Reason.RESET)\n", ""),
    Mutant(
        "what lost its copy below meanwhile leaves too",
        FLOW,
        "if asked else not droppable(entry)",
        "if asked else False",
    ),
    Mutant(
        "an expired chunk is promoted from the primary",
        HIERARCHY,
        "if known is None or self.primary.expired(known):",
        "if known is None:",
    ),
    Mutant(
        "a waiting write is released by another length",
        FLOW,
        "        level.queued_nbytes -= waiting.charge_nbytes\n",
        "        level.queued_nbytes -= level.ledger.charge(waiting.source.chunk)\n",
    ),
    Mutant(
        "a rewritten chunk stays charged for its failed deletion",
        FLOW,
        "        if outcome.ok:\n            self._unstick(level, entry.key)\n",
        "",
    ),
    Mutant(
        "an eviction of many takes what was offered",
        ORDER,
        "        for entry in spared:\n            self._pins.hold(entry.key)\n",
        "",
    ),
    Mutant(
        "what a reset expels waits to be written",
        HIERARCHY,
        "                    self._refuse(level, waiting, Reason.BUSY)\n",
        "                    level.waiting[item.key] = waiting\n",
    ),
    Mutant(
        "one file is deleted and charged twice",
        HIERARCHY,
        "entry = level.stuck.get(chunk.key)  # a deletion",
        "entry = None  # a deletion",
    ),
    Mutant(
        "ends told together stay in the queue",
        FLOW,
        "        level.queued_nbytes -= sum([entry.charge_nbytes for entry in entries])\n",
        "",
    ),
    Mutant(
        "ends told together store what has left",
        FLOW,
        "is_write and target is not None and target.state is PENDING",
        "is_write and target is not None",
    ),
    Mutant(
        "ends told together keep their sources",
        FLOW,
        "        self._release(above, *[source for _, source, _, _ in flights])\n",
        "",
    ),
    Mutant(
        "an end that went badly is told with the good ones",
        FLOW,
        "kind is TransferKind.CASCADE and ended and outcome.ok",
        "kind is TransferKind.CASCADE and ended",
    ),
    Mutant(
        "chunks sent down together overtake the deletion of one",
        FLOW,
        "is_new = is_free and level",
        "is_new = level",
    ),
]


NO_BUG = Mutant("no bug at all", "tierkv/_ledger.py", '"""One level\'s books', '"""One level\'s  books')
"""What dies of this dies of itself, and says nothing of the others."""


def killed_by(mutant: Mutant) -> str | None:
    """What died of the bug, or None if nothing did."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / "pyproject.toml", folder)
        for name in ("tierkv", "tests"):
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        file = Path(folder) / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            sys.exit(f"{mutant.name}: its patch applies {text.count(mutant.old)} times to {mutant.file}")
        text = text.replace(mutant.old, mutant.new)
        compile(text, mutant.file, "exec")
        file.write_text(text)
        run = subprocess.run([sys.executable, "-c", RUN], cwd=folder, capture_output=True, text=True, check=False)
    if not run.returncode:
        return None
    return run.stdout.strip().splitlines()[-1] if run.stdout.strip() else run.stderr.strip().splitlines()[-1]


def main(words: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    survivors = []
    if death := killed_by(NO_BUG):
        sys.exit(f"without a bug: {death}")
    for mutant in chosen:
        began = time.monotonic()
        death = killed_by(mutant)
        print(f"{mutant.name:56} {time.monotonic() - began:5.1f} s  {death or 'SURVIVED'}", flush=True)
        if death is None:
            survivors.append(mutant.name)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed")
    return len(survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
