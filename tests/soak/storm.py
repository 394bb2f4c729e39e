"""What goes wrong meanwhile: a tier with moods, and a disk with weather."""

from __future__ import annotations

import errno
import random
from collections import Counter
from typing import Any

from tests.faults import Faults, Rule
from tierkv.protocols import Tier
from tierkv.testing import Does, Fault, FaultTier

_MOODS: dict[str, tuple[Does, ...]] = {
    "read": (Does.SLOW, Does.HANG, Does.RAISE, Does.FAIL, Does.RAISE_AFTER, Does.MISS, Does.SHORT, Does.REORDER),
    "write": (Does.SLOW, Does.HANG, Does.RAISE, Does.FAIL, Does.MISS),
    # Done and told otherwise is allowed of a deletion: it is tried again, and finds nothing to delete.
    "delete": (Does.SLOW, Does.HANG, Does.RAISE, Does.RAISE_AFTER),
}


class MoodyTier(FaultTier):
    """Misbehaves in one call of so many, at random; remembers only how often."""

    def __init__(self, inner: Tier, rng: random.Random) -> None:
        super().__init__(inner)
        self.rng = rng
        self.rate = 0.0
        self.n_struck: Counter[str] = Counter()

    def _fault(self, verb: str) -> Fault | None:
        if self.rng.random() >= self.rate or verb not in _MOODS:
            return None
        does = self.rng.choice(_MOODS[verb])
        self.n_struck[does.value] += 1
        return Fault(verb, does, delay_s=self.rng.random() * 0.02)


_CHANGES = ("write", "rename", "mkdir", "unlink", "sync")
_WEATHER: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("full", ("write",), {"error": errno.ENOSPC}),
    ("read-only", _CHANGES, {"error": errno.EROFS}),
    ("failing", ("read", "write", "open", "unlink", "rename"), {"error": errno.EIO}),
    ("stale", ("open", "read", "stat"), {"error": errno.ESTALE}),
    ("out of descriptors", ("open",), {"error": errno.EMFILE}),
    ("short", ("read", "write"), {"at_most": 1000}),
    ("done and denied", ("rename", "write"), {"error": errno.EIO, "after": True}),
    # Not rows: what stands there is what a name is elsewhere, and comes from the page cache.
    ("rotten", ("read",), {"flip": True, "path": ".slab"}),
    ("slow", ("read", "write", "rename", "unlink"), {"delay_s": 0.001}),
    ("hung", ("read", "write", "unlink"), {"hang": True}),
)


class Weather:
    """One thing at a time is wrong with a disk, then nothing for a while.

    Args:
        faults: the rules of this process; None leaves the disk alone.
        root: what they are about.
    """

    def __init__(self, faults: Faults | None, root: str, rng: random.Random) -> None:
        self._faults = faults
        self._root = root
        self._rng = rng
        self._rule: Rule | None = None
        self.n_turns: Counter[str] = Counter()

    def turn(self) -> None:
        """Something else."""
        was_fine = self._rule is None
        self.clear()
        if self._faults is None or not was_fine:
            return
        what, calls, how = self._rng.choice(_WEATHER)
        # Also only every so many calls, so that a batch fails in part.
        count = self._rng.choice((0, 0, 1, 3))
        rule: dict[str, Any] = {"path": f"{self._root}/", "count": count} | how
        self._rule = self._faults.add(*calls, **rule)
        self.n_turns[what] += 1

    def clear(self) -> None:
        if self._rule is not None:
            self._rule.let_go()
            self._rule.remove()
            self._rule = None
