"""A level below that could not be opened, or hangs through a reset: it is there again, and nothing is mixed up."""

from __future__ import annotations

import threading
from asyncio import sleep, to_thread
from typing import Any, ClassVar

import pytest
from vllm.v1.kv_offload.base import LookupResult

from tests.patience import PATIENCE_S
from tests.vllm.manager_kit import Kit, keys_of
from tierkv import MemoryTier
from tierkv.testing import ManualClock
from tierkv.types import ChunkKey


class OneOfMany(MemoryTier):
    """Each instance has a gate of its own, at which its copies and deletions hang while it is shut."""

    made: ClassVar[list[OneOfMany]] = []
    n_refusals: ClassVar[int] = 0
    """So many openings fail first."""

    def __init__(self, **_: Any) -> None:
        super().__init__(n_slots=64, name="below")
        self.gate = threading.Event()
        self.gate.set()
        self.n_waiting = 0
        self.n_deletes = 0
        self.made.append(self)

    async def open(self, ctx: Any) -> None:
        if OneOfMany.n_refusals:
            OneOfMany.n_refusals -= 1
            raise OSError(5, "no disk today")
        await super().open(ctx)

    async def _pass(self) -> None:
        self.n_waiting += 1
        await to_thread(self.gate.wait)
        self.n_waiting -= 1

    async def write(self, items: Any) -> Any:
        outcomes = await super().write(items)
        await self._pass()
        return outcomes

    async def delete(self, keys: Any) -> None:
        await self._pass()
        self.n_deletes += len(keys)
        await super().delete(keys)

    async def aclose(self) -> None:
        await self._pass()
        await super().aclose()

    @property
    def chunks(self) -> dict[ChunkKey, bytes]:
        return self._chunks


@pytest.fixture
def tier():
    OneOfMany.made.clear()
    OneOfMany.n_refusals = 0
    yield {"type": "OneOfMany", "module_path": __name__, "capacity": "1MiB", "breaker_cooldown_s": 7.0}
    for made in OneOfMany.made:
        made.gate.set()


def _engine(tier: dict[str, Any], clock: ManualClock, **extra: Any) -> Kit:
    return Kit(8, [tier], clock=clock, **extra)


def test_a_tier_that_could_not_be_opened_is_tried_again(tier):
    """Two openings fail; after the pause each, and not before, another one is tried, and then all goes its way."""
    OneOfMany.n_refusals = 2
    clock = ManualClock()
    engine = _engine(tier, clock)
    try:
        below, keys = engine.manager._below.levels[0], keys_of("a", 2)
        for n in (1, 2):
            engine.until(lambda n=n: below.n_failed == n)
            clock.now_s += 6.9
            engine.step()
            assert below.state.name == "FAILED"
            assert len(engine.store(keys_of(f"k{n}", 2))) == 2, "host memory serves as if there were no tier"
            clock.now_s += 0.2
            engine.step()
        engine.until(lambda: engine.hierarchy.levels[1].serves)
        assert below.n_failed == 0
        engine.store(keys)
        engine.until(engine.at_rest)
        assert set(OneOfMany.made[-1].chunks) >= set(keys)
    finally:
        engine.close()


def test_a_tier_that_hangs_through_a_reset_is_opened_anew_beside_it(tier, monkeypatch):
    """Copies from before the reset hang: after the deadline another tier opens, and their late end touches nothing."""
    monkeypatch.setattr("tierkv.vllm._loop._CLOSE_S", 0.3)
    clock = ManualClock()
    engine = _engine(tier, clock, transfer_deadline_s=30.0)
    try:
        keys, later = keys_of("a", 5), keys_of("b", 2)
        engine.until(lambda: engine.hierarchy.levels[1].serves)
        old = OneOfMany.made[-1]
        old.gate.clear()
        context = engine.request(keys)
        for key in keys:  # each a batch of its own: more than may run at once
            engine.store([key], context)
        engine.until(lambda: old.n_waiting == 4)
        engine.manager.reset_cache()
        for _ in range(5):
            engine.step()
        clock.now_s += 29.0
        engine.step()
        assert engine.manager._below.levels[0].state.name == "DRAINING", "no sooner than every copy was reported"
        clock.now_s += 2.0
        engine.until(lambda: engine.hierarchy.levels[1].serves, timeout_s=PATIENCE_S)
        new = OneOfMany.made[-1]
        assert new is not old
        assert engine.statistics().n_quarantined == 4, "what the old one may still read"
        engine.store(later)
        engine.until(lambda: set(new.chunks) == set(later))
        old.gate.set()
        engine.until(engine.at_rest)
        assert set(new.chunks) == set(later) and new.n_deletes == 0
        assert engine.statistics().n_quarantined == engine.statistics(1).n_quarantined == 0
        engine.store(keys)
        engine.until(lambda: set(new.chunks) == {*keys, *later})
    finally:
        old.gate.set()
        engine.close()


class Speechless(MemoryTier):
    """Asked how much it may hold, it raises."""

    def __init__(self, **_: Any) -> None:
        super().__init__(n_slots=64, name="below")

    def share_nbytes(self) -> int:
        raise OSError(5, "no disk today")


def test_a_tier_that_raises_on_the_spot_does_not_end_a_step(tier):
    """Its share is asked for in every step, on the scheduler's thread: what it raised ended the engine."""
    engine = _engine(tier | {"type": "Speechless"}, ManualClock())
    try:
        engine.until(lambda: engine.hierarchy.levels[1].serves)
        keys = keys_of("a", 4)
        engine.store(keys)
        engine.until(engine.at_rest)
        assert engine.statistics(1).n_chunks == 4, "the room that its settings give it"
    finally:
        engine.close()


def test_a_deletion_that_failed_before_a_reset_is_forgotten_with_it(tier):
    """Its entry was kept in a list of what to try again, and the next try met what was no more."""
    clock = ManualClock()
    engine = _engine(tier, clock)
    try:
        keys = keys_of("a", 1)
        engine.until(lambda: engine.hierarchy.levels[1].serves)
        old = OneOfMany.made[-1]
        engine.store(keys)
        engine.until(engine.at_rest)
        real, old.delete = old.delete, _refuse
        engine.hierarchy.delete(keys)
        engine.until(lambda: bool(engine.hierarchy.levels[1].stuck))
        old.delete = real
        engine.manager.reset_cache()
        engine.until(lambda: engine.hierarchy.levels[1].serves)
        for _ in range(3):
            engine.step()
            engine.hierarchy.refresh()
        engine.until(engine.at_rest)
        assert OneOfMany.made[-1].n_deletes == 0
    finally:
        engine.close()


async def _refuse(_keys: Any) -> None:
    raise OSError(30, "read-only")


class Probed(MemoryTier):
    """Its scan never ends, so that every key takes a probe; probes wait at a gate."""

    made: ClassVar[list[Probed]] = []

    def __init__(self, **_: Any) -> None:
        super().__init__(n_slots=64, name="below")
        self.gate = threading.Event()
        self.asked: list[tuple[ChunkKey, ...]] = []
        self.answered: set[ChunkKey] = set()
        self.writable = True
        self.made.append(self)

    def settled(self, key: ChunkKey) -> bool:
        return key in self.answered

    async def scan(self) -> Any:
        while not self.gate.is_set():  # noqa: ASYNC110
            await sleep(0.01)
        yield []

    async def probe(self, keys: Any) -> Any:
        self.asked.append(tuple(keys))
        await to_thread(self.gate.wait)
        self.answered.update(keys)
        return [None] * len(keys)

    async def save_order(self, chunks: Any) -> None:
        pass


def test_a_probe_under_way_is_not_sent_again():
    """An engine that waits asks in every step; the tier hears of each key once, and again only after its answer."""
    Probed.made.clear()
    clock = ManualClock()
    engine = Kit(8, [{"type": "Probed", "module_path": __name__, "capacity": "1MiB"}], clock=clock)
    try:
        engine.until(lambda: engine.hierarchy.levels[1].serves)
        tier = Probed.made[-1]
        keys, more = keys_of("a", 3), keys_of("b", 1)
        context = engine.request(keys)
        for _ in range(20):
            assert engine.lookup(keys, context)[0] is LookupResult.RETRY
            engine.step()
        assert engine.lookup(more, engine.request(more))[0] is LookupResult.RETRY
        engine.step()
        engine.until(lambda: len(tier.asked) == 2)
        assert sorted(key for batch in tier.asked for key in batch) == sorted([*keys, *more])
        tier.gate.set()
        engine.until(lambda: tier.answered >= {*keys, *more} and engine.lookup(keys, context) == [LookupResult.MISS])
        tier.answered.clear()
        other = engine.request(keys)
        assert engine.lookup(keys, other)[0] is LookupResult.RETRY
        engine.until(lambda: len(tier.asked) > 2)
    finally:
        for tier in Probed.made:
            tier.gate.set()
        engine.close()
