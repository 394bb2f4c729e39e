"""A bad tier is never worse than no tier: its faults are misses and counted drops, and the other levels go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from tests.cases.kit import virtual_time
from tests.patience import PATIENCE_S
from tests.toys import STRIDE, ToyChunker, buffers, loop_time, payload, prompt
from tierkv import Chunk, ChunkKey, Level, MemoryTier, MoverLimits, TieredCache, Writes
from tierkv.errors import ConfigError
from tierkv.policies import LRU
from tierkv.protocols import HostTier, TierContext
from tierkv.testing import Does, Fault, FaultTier
from tierkv.types import Found

LIMITS = MoverLimits(deadline_s=5.0, breaker_failures=2, breaker_cooldown_s=60.0)
SHORT_LIMITS = LIMITS._replace(deadline_s=0.3)
QUEUE = 2 * STRIDE
"""What a tier that hangs may pin of the primary."""
VERBS = ["read", "write", "delete"]
WRONG = [Does.RAISE, Does.RAISE_AFTER, Does.FAIL, Does.MISS, Does.SHORT, Does.HANG, Does.SLOW]


def faulty(*faults: Fault, name: str = "bad") -> FaultTier:
    return FaultTier(MemoryTier(name=name), *faults)


def cache_over(
    *tiers: FaultTier | MemoryTier,
    n_slots: int = 6,
    writes: Writes = Writes.CASCADE,
    limits: MoverLimits = LIMITS,
    queue: int = 64 * STRIDE,
) -> TieredCache:
    return TieredCache(
        chunker=ToyChunker(),
        namespace=b"toy",
        limits=limits,
        clock=loop_time,
        levels=[
            Level(MemoryTier(name="primary"), LRU(), capacity=n_slots * STRIDE),
            *(Level(tier, LRU(), capacity=64 * STRIDE, writes=writes, queue=queue) for tier in tiers),
        ],
    )


async def store(cache: TieredCache, tokens: Sequence[int]) -> list[bool]:
    chunks = cache.chunks(tokens)
    return [outcome.ok for outcome in await cache.store(tokens, buffers(chunks))]


async def served(cache: TieredCache, tokens: Sequence[int]) -> int:
    """How many leading chunks come back; every byte of them is right."""
    async with cache.lease(await cache.lookup(tokens)) as lease:
        for chunk in lease.chunks:
            assert bytes(lease.view(chunk)) == payload(chunk), "never wrong bytes"
        return len(lease.chunks)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("does", WRONG, ids=lambda does: does.value)
@pytest.mark.parametrize("writes", Writes, ids=lambda writes: writes.name.lower())
@virtual_time
async def test_the_primary_serves_as_if_there_were_no_tier_below(verb: str, does: Does, writes: Writes) -> None:
    """Whatever the tier below does with a verb, stores go in, recent prompts come back whole, and closing ends."""
    tier = faulty(Fault(verb, does, delay_s=0.01))
    # Room for what a hung copy pins (two chunks, and their prefixes) beside what is being stored.
    async with cache_over(tier, n_slots=12, writes=writes, limits=SHORT_LIMITS, queue=QUEUE) as cache:
        for branch in range(12):
            tokens = prompt(branch)
            while not all(await store(cache, tokens)):  # refused while a demotion is under way, for a deadline at most
                await cache.wait_idle(0.1)
            assert await served(cache, tokens) == 4
        await cache.wait_idle(0.1)
        assert await served(cache, prompt(11)) == 4
        await cache.aclose(0.1)


async def until_written(cache: TieredCache, branch: int, n_chunks: int) -> None:
    """Until the good tier has all that was stored of a branch; of all branches the head is one and the same."""
    async with asyncio.timeout(PATIENCE_S):
        while cache.statistics()["good"].n_stored < 1 + 3 * (branch // 2) + n_chunks - 1:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("does", [Does.RAISE, Does.HANG], ids=lambda does: does.value)
@virtual_time
async def test_the_other_tier_gets_everything(does: Does) -> None:
    """One raises or hangs and is left alone; the one beside it holds every chunk and serves what was evicted (A12)."""
    bad, good = faulty(Fault("write", does)), MemoryTier(name="good")
    async with cache_over(bad, good, n_slots=12, limits=LIMITS._replace(deadline_s=1.0), queue=QUEUE) as cache:
        for branch in range(0, 12, 2):
            for n_chunks in (2, 4):  # in pieces that the good tier's queue holds
                assert all(await store(cache, prompt(branch)[: 2 * n_chunks]))
                await until_written(cache, branch, n_chunks)
        while not cache.statistics()["bad"].broken:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await served(cache, prompt(0)) == 4
        assert cache.statistics()["good"].n_read >= 1
        await cache.aclose(0.1)


@virtual_time
async def test_a_failing_read_is_a_shorter_hit_and_then_a_miss() -> None:
    """One read of a batch fails: what leads up to it is served; nobody waits for the rest (A6)."""
    tier = faulty()
    async with cache_over(tier) as cache:
        for branch in (0, 2, 4):
            await store(cache, prompt(branch))
            await cache.wait_idle()
        tier.faults.append(Fault("read", Does.MISS))
        assert (await cache.lookup(prompt(0))).n_tokens == 8
        assert await served(cache, prompt(0)) == 0 + 1, "the shared head is in the primary"
        n_reads = tier.n_calls["read"]
        assert await served(cache, prompt(0)) == 1
        assert tier.n_calls["read"] == n_reads, "a key that turned out to be missing is not read again"
        assert all(await store(cache, prompt(0)))
        assert await served(cache, prompt(0)) == 4


@virtual_time
async def test_a_tier_that_answers_short_serves_nothing_wrong() -> None:
    """Answers that cannot be told apart are no answers (and the breaker counts them)."""
    tier = faulty(Fault("read", Does.SHORT))
    async with cache_over(tier) as cache:
        for branch in (0, 2, 4):
            await store(cache, prompt(branch))
            await cache.wait_idle()
        assert await served(cache, prompt(0)) <= 1


@virtual_time
async def test_answers_in_the_wrong_order_serve_nothing_wrong() -> None:
    """A batch of which one key is missing is answered back to front: no other chunk's outcome counts for a chunk."""
    tier = faulty(Fault("read", Does.REORDER))
    async with cache_over(tier) as cache:
        for branch in (0, 2, 4):
            await store(cache, prompt(branch))
            await cache.wait_idle()
        await tier.inner.delete([cache.chunks(prompt(0))[1].key])
        assert await served(cache, prompt(0)) <= 1


@virtual_time
async def test_a_write_that_never_happened_is_a_miss() -> None:
    """The tier says that it took the chunks and it did not: they are lost, never replaced by other bytes."""
    tier = faulty(Fault("write", Does.LIE))
    async with cache_over(tier) as cache:
        for branch in (0, 2, 4):
            await store(cache, prompt(branch))
            await cache.wait_idle()
        assert await served(cache, prompt(0)) == 1
        await cache.wait_idle()
        assert cache.statistics()["bad"].dropped["vanished"] >= 1


@virtual_time
async def test_a_late_read_touches_nobody_elses_slot() -> None:
    """A read hangs past its deadline and its asker; when it fills its slot at last, the slot is still its own (A10)."""
    tier = faulty()
    async with cache_over(tier, n_slots=8) as cache:
        for branch in (0, 2, 4):
            await store(cache, prompt(branch))
            await cache.wait_idle()
        tier.faults.append(Fault("read", Does.HANG))
        asker = asyncio.create_task(served(cache, prompt(0)))
        await tier.gate.arrived()
        asker.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asker
        for branch in (6, 8, 10):
            await store(cache, prompt(branch))
        tier.gate.open()
        await cache.wait_idle()
        assert await served(cache, prompt(10)) == 4
        assert cache.statistics()["primary"].n_quarantined == 0


class Telling(MemoryTier):
    """It can be scanned and probed, and tells of something."""

    writable = True

    def __init__(self, told: Any) -> None:
        super().__init__(name="bad")
        self.told = told

    async def scan(self) -> AsyncIterator[Any]:
        yield self.told

    def settled(self, key: ChunkKey) -> bool:
        return False

    async def probe(self, keys: Sequence[ChunkKey]) -> Any:
        return self.told

    async def save_order(self, order: Sequence[Chunk]) -> None:
        pass


@pytest.mark.parametrize(
    "told",
    [
        None,
        7,
        "abcd",
        [1],
        [None, ("key", 4096)],
        [Found(None, STRIDE)],  # type: ignore[arg-type]
        [Found(ChunkKey(b"k" * 32), "many")],  # type: ignore[arg-type]
        [Found(ChunkKey(b"k" * 32), -STRIDE)],
        [Found(ChunkKey(b"k" * 32), STRIDE, chunk=7)],  # type: ignore[arg-type]
    ],
)
async def test_nonsense_from_a_scan_or_a_probe_is_a_miss(told: Any) -> None:
    """It reached whoever looked up; and a chunk of fewer bytes than none made room that is not there."""
    async with cache_over(Telling(told)) as cache:
        assert await served(cache, prompt(1)) == 0
        assert all(await store(cache, prompt(1)))
        assert await served(cache, prompt(1)) == len(cache.chunks(prompt(1)))
        await cache.wait_idle(PATIENCE_S)
        record = cache.statistics()["bad"]
        assert record.free_nbytes + record.ready_nbytes == record.capacity_nbytes


class Lasting(MemoryTier):
    """Its open, or its end, takes until it is let go."""

    def __init__(self, name: str, *, hangs: bool = False) -> None:
        super().__init__(name=name)
        self.hangs = hangs
        self.opens, self.closes, self.go = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.closed = False

    async def open(self, ctx: TierContext) -> None:
        self.opens.set()
        if self.hangs:
            await self.go.wait()
        await super().open(ctx)

    async def aclose(self) -> None:
        self.closes.set()
        if self.hangs:
            await self.go.wait()
        await super().aclose()
        self.closed = True


async def test_an_open_that_is_cancelled_twice_closes_every_tier() -> None:
    """The second cancellation ended the wait for the first tier's close, and the others stayed open."""
    tiers = [Lasting("good"), Lasting("bad", hangs=True)]
    opening = asyncio.create_task(cache_over(*tiers).__aenter__())
    await tiers[1].opens.wait()
    opening.cancel()
    await tiers[1].closes.wait()
    opening.cancel()
    await asyncio.sleep(0)
    tiers[1].go.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert [tier.closed for tier in tiers] == [True, True]


async def test_a_port_that_does_not_take_the_primary_closes_every_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's refuses slots that do not lie in one piece: all tiers stayed open, and could not be closed."""
    tier = Lasting("good")
    cache = cache_over(tier)

    def attach(primary: HostTier, stride_nbytes: int) -> None:
        raise ConfigError("slots in pieces")

    monkeypatch.setattr(cache._port, "attach", attach)
    with pytest.raises(ConfigError, match="in pieces"):
        await cache.__aenter__()
    assert tier.closed
