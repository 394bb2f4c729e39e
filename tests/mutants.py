"""Bugs planted one at a time, all over the package, to see that a test dies of each. ``nox -s mutants`` runs this.

    python -m tests.mutants [--ci] [--list] [word ...]

Each bug is a textual patch to a private copy of the tree; a patch that does not apply exactly once is an error, so that
the list stays true while the code changes. What hunts it are the tests that should find it: the conformance kit, the
state machines, or a test by name; with a fixed choice of examples, without shrinking. The core's own bugs are in
:mod:`tests.property.mutants` and are run from here, too. ``--ci`` runs the twelve that a cache of this kind must not
have; words choose the bugs whose names contain one of them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.cases import mutants as cases
from tests.device import mutants as device
from tests.property import mutants as core

ROOT: Final = Path(__file__).parents[1]
TIMEOUT_S: Final = 300.0

PRELUDE: Final = """
import sys, warnings
from hypothesis import HealthCheck, Phase, settings
HUNT = settings(max_examples=200, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck))
settings.register_profile("hunt", HUNT)
settings.load_profile("hunt")
from pathlib import Path
from tierkv import *
from tierkv.policies import *
from tierkv.admission import All, DropPartialTail, SecondTouch, TinyLFU, WriteBudget
from tierkv.testing import *
clock = ManualClock()
"""
"""What every hunt starts with. A hunt fails by raising."""


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    hunt: str
    """Python that raises if the bug is there, or the tests to run: ``pytest <arguments>``."""


LEDGER: Final = "tierkv/_ledger.py"
SLOTS: Final = "tierkv/_slots.py"
HIERARCHY: Final = "tierkv/_hierarchy.py"
POLICIES: Final = "tierkv/policies/"
ADMISSION: Final = "tierkv/admission.py"
CHUNKERS: Final = "tierkv/chunkers.py"
MEMORY: Final = "tierkv/tiers/memory.py"

AGING: Final = "check_policy(lambda: TTL(LRU(), 5, clock), clock=clock, ttl_s=5.0)"
HINTED: Final = "from tierkv._turns import hint_aware\ncheck_policy(lambda: hint_aware(FIFO()))"
MEMORY_TIER: Final = (
    "from tests.conformance.doors import MemoryDoor\ncheck_tier(lambda _: MemoryTier(), raw=MemoryDoor)"
)
PREFIXES: Final = (
    "check_chunker(lambda: PrefixChunker(namespace=Namespace(model='m'), tokens_per_block=2, partial=True))"
)

OURS: Final = [
    Mutant(
        "bytes are not returned",
        LEDGER,
        "        self.quarantined_nbytes -= entry.charge_nbytes\n",
        "",
        core.RUN,
    ),
    Mutant(
        "capacity is off by one chunk",
        SLOTS,
        "        if free_nbytes < 0:\n",
        "        if free_nbytes < -64:\n",
        core.RUN,
    ),
    Mutant(
        "bytes that are leaving count as free",
        LEDGER,
        " - self.ready_nbytes - self.quarantined_nbytes\n",
        " - self.ready_nbytes\n",
        core.RUN,
    ),
    Mutant(
        "a leased chunk is dropped because it has expired",
        "tierkv/_room.py",
        "            if entry is not None and self.primary.expired(entry) and not entry.holds:\n",
        "            if entry is not None and self.primary.expired(entry):\n",
        "pytest tests/unit/test_expired_leases.py",
    ),
    Mutant(
        "a key is named twice",
        POLICIES + "_queues.py",
        "        yield from self._old.victims()\n        yield from young\n",
        "        yield from self._old.victims()\n        yield from self._young.victims()\n",
        "check_policy(ARC)",
    ),
    Mutant(
        "a held key is named",
        POLICIES + "_line_order.py",
        "            if item.held:\n                met.append(item)\n",
        "            if False:\n                met.append(item)\n",
        "check_policy(FIFO)",
    ),
    Mutant(
        "a held leaf is climbed past",
        POLICIES + "_leaf_order.py",
        "            if parent.n_children or parent.holds or number",
        "            if parent.n_children or number",
        "pytest tests/property/test_lru.py -k up_to_what_is_held",
    ),
    Mutant(
        "a climb overtakes an older leaf",
        POLICIES + "_leaf_order.py",
        "            if parent.stamp != stamp or len(gone) >= n_chunks:\n",
        "            if len(gone) >= n_chunks:\n",
        "pytest tests/property/test_lru.py -k overtakes_nobody",
    ),
    Mutant(
        "places behind a climb are lost",
        POLICIES + "_leaf_order.py",
        "                    line.extendleft(reversed(places[len(places) - n_left :]))\n",
        "",
        "pytest tests/property/test_lru.py -k behind_a_climb",
    ),
    Mutant(
        "an entry that is used again keeps its parent",
        "tierkv/_slots.py",
        "            entry.parent = parent\n            entry.link = None\n",
        "            entry.parent = parent\n            entry.link = getattr(entry, 'link', None)\n",
        "pytest tests/unit/test_recycled_entries.py -k remembers_nothing",
    ),
    Mutant(
        "a removed entry is used again while somebody holds it",
        "tierkv/_ledger.py",
        "            self._slots.give_back((entry,))\n",
        "            self._slots.spare.append(entry)\n",
        "pytest tests/unit/test_recycled_entries.py",
    ),
    Mutant(
        "a pin on what is being written ends with the writing",
        "tierkv/_ledger.py",
        "            entry.holds -= WRITER\n        nbytes",
        "            entry.holds = 0\n        nbytes",
        "pytest tests/unit/test_recycled_entries.py -k told_from_the_writer",
    ),
    Mutant(
        "a place in the line is not handed on to a parent",
        POLICIES + "_leaf_order.py",
        "            self._line[place] = parent\n",
        "            pass\n",
        "pytest tests/property/test_lru.py -k hands_its_place_on",
    ),
    Mutant(
        "a line grows with every use",
        POLICIES + "_leaf_order.py",
        "        self._pass(self._front + n_over - 1)\n",
        "",
        "pytest tests/property/test_lru.py -k line_stays_short",
    ),
    Mutant(
        "who loses a place in a long line is lost",
        POLICIES + "_leaf_order.py",
        "            if seat.stamp == passed:\n                self.readmit((seat,))\n",
        "",
        "pytest tests/property/test_lru.py -k line_stays_short",
    ),
    Mutant(
        "a chunk forgets the children that came before it",
        POLICIES + "lru.py",
        "                if absent:\n                    seat.n_children = absent.pop(seat.key, 0)\n",
        "",
        "pytest tests/property/test_lru.py -k finds_the_children",
    ),
    Mutant(
        "a chunk let go while it has no place never leaves",
        LEDGER,
        "            self._order.release(idle)\n",
        "            pass\n",
        core.RUN,
    ),
    Mutant(
        "a hold is not passed on to the inner order",
        POLICIES + "_wrapper.py",
        "                self._pins.hold(key)\n",
        "                pass\n",
        AGING,
    ),
    Mutant(
        "a hold outlives its chunk",
        POLICIES + "_wrapper.py",
        "        self._held.discard(key)\n        self._order.on_remove(key, evicted=evicted)\n",
        "        self._order.on_remove(key, evicted=evicted)\n",
        "from tests.property.world import InOrder\n" + AGING.replace("LRU()", "InOrder()"),
    ),
    Mutant(
        "a head leaves before its tail",
        POLICIES + "_leaves.py",
        "            if n_left.get(key, n_children.get(key, 0)):\n",
        "            if False:\n",
        "check_policy(lambda: LeafFirst(FIFO()), leaves=True, pure=False)",
    ),
    Mutant(
        "a parent that is known late is not linked",
        POLICIES + "lru.py",
        "            if seat.link is None:\n                seat.parent = parent_key\n",
        "            if False:\n                seat.parent = parent_key\n",
        "check_policy(LRU, leaves=True)",
    ),
    Mutant(
        "the order depends on hashes",
        POLICIES + "fifo.py",
        "        for chunk in reversed(chunks):\n",
        "        for chunk in set(chunks):\n",
        "check_policy(FIFO)",
    ),
    Mutant(
        "being asked ages a chunk",
        POLICIES + "_heap_order.py",
        "            yield item.key\n",
        "            item.stamp += 1 << 50\n            yield item.key\n",
        "check_policy(LFU)",
    ),
    Mutant(
        "a deleted chunk leaves a ghost",
        POLICIES + "arc.py",
        "        if evicted:\n            ghosts.add(key)\n",
        "        ghosts.add(key)\n",
        "check_policy(ARC)",
    ),
    Mutant(
        "ghosts are never forgotten",
        POLICIES + "mq.py",
        "                if len(self._ghosts) > _GHOSTS_PER_CHUNK * self._life:\n",
        "                if False:\n",
        "check_policy(MQ)",
    ),
    Mutant("ages go by wall clock", POLICIES + "ttl.py", "self._clock = clock", "self._clock = time.time", AGING),
    Mutant(
        "an age counts from the reservation",
        POLICIES + "ttl.py",
        "        if key in self:\n            self._forget_age(key)\n            self._born[key] = self._clock()\n",
        "",
        AGING,
    ),
    Mutant(
        "what has expired is named again in its place",
        POLICIES + "ttl.py",
        "            if key not in due:\n                yield key\n",
        "            yield key\n",
        AGING,
    ),
    Mutant(
        "a quota is off by one",
        POLICIES + "quota.py",
        "                over_nbytes -= chunks[key].nbytes\n                if over_nbytes <= 0:\n",
        "                over_nbytes -= chunks[key].nbytes\n                if over_nbytes < 0:\n",
        "pytest tests/conformance/test_policies.py -k quota_takes",
    ),
    Mutant(
        "a removed chunk counts towards its tenant's quota",
        POLICIES + "quota.py",
        "            self._used_nbytes[chunk.tenant] -= chunk.nbytes\n",
        "            pass\n",
        "pytest tests/conformance/test_policies.py -k quota_takes",
    ),
    Mutant(
        "a dead chunk that is used stays dead",
        "tierkv/_turns.py",
        "            for key in keys:\n                self._first.discard(key)\n",
        "            pass\n",
        HINTED,
    ),
    Mutant(
        "a kept chunk is pinned",
        "tierkv/_turns.py",
        "        yield from (key for key in last if key not in early)\n",
        "",
        HINTED,
    ),
    Mutant(
        "a kept chunk that leaves makes its head last",
        POLICIES + "_leaf_order.py",
        "        parent.stamp = stamp if stamp < LAST else max(stamp - LAST, parent.stamp)\n",
        "        parent.stamp = stamp\n",
        "pytest tests/unit/test_hints.py -k takes_no_keep",
    ),
    Mutant(
        "a dead hint kills what others keep",
        "tierkv/_hints.py",
        "                if not self._order(index).is_kept(key):\n",
        "                if True:\n",
        "pytest tests/unit/test_hints.py -k kept_prompt",
    ),
    Mutant(
        "a lifetime ends with the copy",
        "tierkv/_hinted.py",
        "                self.limit(key, until_s, held=False)\n",
        "                pass\n",
        "pytest tests/unit/test_hints.py -k lifetime_goes",
    ),
    Mutant(
        "second touch never forgets",
        ADMISSION,
        "        if len(seen) > self._window:\n",
        "        if False:\n",
        "check_admission(SecondTouch)",
    ),
    Mutant(
        "what is admitted depends on the hash seed",
        ADMISSION,
        "        digest = hashlib.blake2b(chunk.key, digest_size=8 * _ROWS).digest()\n",
        "        digest = (hash(chunk.key) % 2**64).to_bytes(8, 'little') * _ROWS\n",
        "check_admission(lambda: TinyLFU(window=16))",
    ),
    Mutant(
        "only partial tails are admitted",
        ADMISSION,
        "return not chunk.partial",
        "return chunk.partial",
        "check_admission(DropPartialTail)",
    ),
    Mutant(
        "writes are not charged to their budget",
        ADMISSION,
        "        self._left_nbytes -= chunk.nbytes\n",
        "",
        "pytest tests/conformance/test_admission.py -k wears",
    ),
    Mutant(
        "a key does not depend on what came before",
        CHUNKERS,
        '            key = digest(b"".join((_CHUNK, key, ids',
        '            key = digest(b"".join((_CHUNK, ids',
        PREFIXES,
    ),
    Mutant(
        "extra is no part of a key",
        CHUNKERS,
        "        key = self._seed(extra)\n",
        "        key = self._seed(b'')\n",
        PREFIXES,
    ),
    Mutant(
        "a key does not depend on the chunk's last token",
        CHUNKERS,
        "ids[(end - size) * 8 : end * 8]",
        "ids[(end - size) * 8 : end * 8 - 8]",
        PREFIXES,
    ),
    Mutant(
        "bytes behind a chunk are another's",
        MEMORY,
        "        buffer[len(stored) :] = bytes(len(buffer) - len(stored))\n",
        "",
        MEMORY_TIER,
    ),
    Mutant(
        "a tier keeps the whole slot",
        MEMORY,
        "= bytes(buffer[: chunk.nbytes])\n",
        "= bytes(buffer)\n",
        MEMORY_TIER,
    ),
    Mutant(
        "a full tier takes one more",
        MEMORY,
        "len(self._chunks) >= self._n_slots:",
        "len(self._chunks) > self._n_slots:",
        MEMORY_TIER,
    ),
]

CI: Final = (
    "bytes are not returned",
    "a held chunk is a victim",
    "a key is named twice",
    "an offered key is evicted",
    "capacity is off by one chunk",
    "bytes that are leaving count as free",
    "the policy is not told of a hold",
    "a leased chunk is dropped because it has expired",
    *cases.CI,
)
"""Once bugs of real caches. Of the first eight the last two are what "a pin does not rescue" and "a rescued key is
dropped" have become: here a chunk that is being demoted stays until its copy has ended, and a lease keeps it."""


def everything() -> list[Mutant]:
    """Ours, the core's, hunted by its machines, the behaviours that the cases guard, and the device tier's."""
    planted = [Mutant(*planted, core.RUN) for planted in core.MUTANTS]
    return OURS + planted + [Mutant(*planted) for planted in cases.GUARDED + device.GUARDED]


def killed_by(mutant: Mutant) -> str | None:
    """What died of the bug, in a line; None if nothing did. Exits if the patch does not apply."""
    with _copy() as tree:
        file = tree / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            sys.exit(f"{mutant.name}: its patch applies {text.count(mutant.old)} times to {mutant.file}")
        text = text.replace(mutant.old, mutant.new)
        compile(text, mutant.file, "exec")
        file.write_text(text)
        return _hunt(mutant.hunt, tree)


def died_without_a_bug(hunt: str) -> str | None:
    """What a hunt says of the tree as it is: who dies of that finds nothing."""
    with _copy() as tree:
        return _hunt(hunt, tree)


@contextlib.contextmanager
def _copy() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tierkv-mutant-") as folder:
        tree = Path(folder)
        for name in ("tierkv", "tests"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        yield tree


def _hunt(hunt: str, tree: Path) -> str | None:
    if hunt.startswith("pytest "):
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *hunt.split()[1:]]
    else:
        command = [sys.executable, "-c", hunt if hunt is core.RUN else PRELUDE + hunt]
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
    try:
        run = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"hung for {TIMEOUT_S:g} s"
    if run.returncode == 0:
        return None
    assert "no tests ran" not in run.stdout, f"the hunt {hunt!r} hunts nothing"
    said = (run.stdout if hunt is core.RUN or hunt.startswith("pytest ") else run.stderr).strip().splitlines()
    telling = [line for line in said if line.startswith(("FAILED", "tierkv.testing", "E  "))] or said[-1:]
    return telling[-1].removeprefix("tierkv.testing._rules.").removeprefix("FAILED ")[:110] if telling else "died"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--ci", action="store_true", help="only the twelve that must never be")
    parser.add_argument("--list", action="store_true", help="say what there is and run nothing")
    parser.add_argument("words", nargs="*", help="only bugs whose names contain one of these")
    asked = parser.parse_args(arguments)
    chosen = [mutant for mutant in everything() if not asked.words or any(word in mutant.name for word in asked.words)]
    if asked.ci:
        chosen = [mutant for mutant in everything() if mutant.name in CI]
        assert len(chosen) == len(CI), "each of the twelve is in the list, once"
    survivors = []
    for hunt in () if asked.list else dict.fromkeys(mutant.hunt for mutant in chosen):
        if death := died_without_a_bug(hunt):
            sys.exit(f"without a bug {hunt.splitlines()[0]!r} ends with: {death}")
    for mutant in chosen:
        if asked.list:
            print(f"{mutant.name:58} {mutant.file}")
            continue
        began_s = time.monotonic()
        death = killed_by(mutant)
        print(f"{mutant.name:58} {time.monotonic() - began_s:5.1f} s  {death or 'SURVIVED'}", flush=True)
        if death is None:
            survivors.append(mutant.name)
    if not asked.list:
        print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed")
    return min(len(survivors), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
