"""Every rule of ``tierkv.admission`` passes the kit; planted faults do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any as Anything

import pytest
from hypothesis import Phase, settings

import tierkv.admission
from tierkv.admission import All, Any, DropPartialTail, MaxSize, SecondTouch, TinyLFU, WriteBudget
from tierkv.protocols import Admission
from tierkv.testing import ConformanceError, ManualClock, check_admission
from tierkv.types import Chunk, ChunkKey

pytestmark = pytest.mark.timeout(600)
FEW = settings(max_examples=50)
NO_SHRINKING = settings(max_examples=300, phases=[Phase.generate], database=None, derandomize=True)

CLOCK = ManualClock()
RULES: dict[str, Callable[[], Admission]] = {
    "SecondTouch": SecondTouch,
    "TinyLFU": lambda: TinyLFU(window=1_000),
    "MaxSize": lambda: MaxSize("1MiB"),
    "WriteBudget": lambda: WriteBudget("300GB/day", clock=CLOCK),
    "DropPartialTail": DropPartialTail,
    "All": lambda: All(DropPartialTail(), SecondTouch(100), WriteBudget("1MB/h", burst=5000, clock=CLOCK)),
    "Any": lambda: Any(MaxSize(1), SecondTouch(100)),
}


def test_all_rules_are_tried() -> None:
    """A new rule is missed here until it has a line above."""
    classes = {name for name in tierkv.admission.__all__ if isinstance(getattr(tierkv.admission, name), type)}
    assert classes == set(RULES)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_conforms(name: str) -> None:
    """True or False for any chunk, the same for the same offers, bounded memory, and open to an ordinary chunk."""
    check_admission(RULES[name], clock=CLOCK, settings=FEW)


def test_a_write_budget_wears_no_disk_out() -> None:
    """Whatever is offered over a day, what enters is the rate times the time, a burst and a chunk at most."""
    clock = ManualClock()
    rule = WriteBudget("1MB/h", burst="100kB", clock=clock)
    n_bytes = 0
    for i in range(24 * 60):
        clock.advance(60)
        for _ in range(5):
            chunk = Chunk(ChunkKey(b"%d" % i), nbytes=30_000)
            n_bytes += chunk.nbytes if rule.admits(chunk) else 0
    assert 0.9 * 24e6 <= n_bytes <= 24e6 + 100_000 + 30_000


class Everybody:
    def admits(self, chunk: Chunk) -> bool:
        return True


class Nobody(Everybody):
    def admits(self, chunk: Chunk) -> bool:
        return False


class SaysNothing(Everybody):
    """None is false enough for an if, and no answer."""

    def admits(self, chunk: Chunk) -> Anything:
        return True if chunk.nbytes < 100 else None


class ByHash(Everybody):
    """Admits half of all keys, another half in each process."""

    def admits(self, chunk: Chunk) -> bool:
        return hash(chunk.key) % 2 == 0


class Shared(Everybody):
    """What one rule has seen, all have."""

    seen: set[ChunkKey] = set()  # noqa: RUF012 - that is the fault

    def admits(self, chunk: Chunk) -> bool:
        seen = chunk.key in self.seen
        self.seen.add(chunk.key)
        return seen


class NeverForgets(Everybody):
    def __init__(self) -> None:
        self.seen: set[ChunkKey] = set()

    def admits(self, chunk: Chunk) -> bool:
        self.seen.add(chunk.key)
        return True


class ChokesOnBareChunks(Everybody):
    """Takes for granted what a scan does not know."""

    def admits(self, chunk: Chunk) -> bool:
        assert chunk.parent is not None
        return True


FAULTS: dict[type[Everybody], tuple[type[BaseException], str]] = {
    Nobody: (ConformanceError, "lets an ordinary chunk in some day"),
    SaysNothing: (ConformanceError, "True or False"),
    ByHash: (ConformanceError, "depends on hashes of keys"),
    Shared: (ConformanceError, "the same offers get the same answers"),
    NeverForgets: (ConformanceError, "remembers at most"),
    ChokesOnBareChunks: (AssertionError, "assert None is not None|^$|None"),
}


@pytest.mark.parametrize("rule", FAULTS, ids=lambda rule: rule.__name__)
def test_a_planted_fault_is_found(rule: type[Everybody]) -> None:
    """With the promise that it breaks as the message, or its own exception."""
    error, message = FAULTS[rule]
    with pytest.raises(error, match=message):
        check_admission(rule, settings=NO_SHRINKING, most_keys=10_000)


def test_the_sound_one_passes() -> None:
    """So the faults are found because of what is planted."""
    check_admission(Everybody, settings=FEW, most_keys=1_000)
