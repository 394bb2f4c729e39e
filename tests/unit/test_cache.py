"""TieredCache by example: what each verb promises, and the public failures that it must not repeat."""

from __future__ import annotations

import asyncio

import pytest

from tests.cases.kit import virtual_time
from tests.patience import PATIENCE_S
from tests.toys import NBYTES, STRIDE, ThreadTier, ToyChunker, buffers, cache_of, payload, prompt
from tierkv import (
    ChunkSizeError,
    ClosedError,
    ConfigError,
    Event,
    Level,
    MemoryTier,
    MoverLimits,
    PinError,
    Reason,
    Scope,
    Status,
    Stop,
    TieredCache,
    Writes,
)
from tierkv.policies import LRU


async def test_what_was_stored_comes_back() -> None:
    """A prefix is found, leased without a copy, and loaded into buffers, byte for byte."""
    async with cache_of() as cache:
        tokens = prompt(1)
        outcomes = await cache.store(tokens, buffers(cache.chunks(tokens)))
        assert [outcome.status for outcome in outcomes] == [Status.OK] * 4
        hit = await cache.lookup([*tokens, 9, 9])
        assert (hit.n_tokens, hit.stop, list(hit.levels)) == (8, Stop.MISS, [0] * 4)
        async with cache.lease(hit) as lease:
            assert [bytes(lease.view(chunk)) for chunk in lease.chunks] == [payload(chunk) for chunk in hit.chunks]
        targets = [bytearray(NBYTES) for _ in hit.chunks]
        assert await cache.load(hit, targets) == 8
        assert targets == buffers(hit.chunks)


async def test_no_leftovers_behind_a_short_chunk() -> None:
    """What a slot held before does not stay behind a chunk that is shorter than the slot."""
    async with cache_of(n_slots=1) as cache:
        view = cache._opened().primary.slot_view(0)
        view[:] = b"\xee" * STRIDE
        tokens = prompt(1, n_chunks=1)
        await cache.store(tokens, buffers(cache.chunks(tokens)))
        assert bytes(view[NBYTES:]) == bytes(STRIDE - NBYTES)


async def test_extra_separates_prefixes() -> None:
    """The same tokens under another adapter are another prefix."""
    async with cache_of() as cache:
        await cache.store(prompt(1), buffers(cache.chunks(prompt(1), extra=b"lora-a")), extra=b"lora-a")
        assert (await cache.lookup(prompt(1), extra=b"lora-b")).n_tokens == 0
        assert (await cache.lookup(prompt(1), extra=b"lora-a")).n_tokens == 8


@pytest.mark.parametrize("writes", list(Writes))
async def test_a_full_primary_moves_down_and_comes_back_up(writes: Writes) -> None:
    """Ten prompts through eight slots: all of them are served again from the level below, each byte right."""
    async with cache_of(ThreadTier(), writes=writes) as cache:
        for branch in range(10):
            tokens = prompt(branch)
            outcomes = await cache.store(tokens, buffers(cache.chunks(tokens)))
            assert all(outcome.ok for outcome in outcomes)
        for branch in range(10):
            hit = await cache.lookup(prompt(branch))
            targets = [bytearray(NBYTES) for _ in hit.chunks]
            assert await cache.load(hit, targets) == 8
            assert targets == buffers(hit.chunks)
        assert await cache.wait_idle(PATIENCE_S)
        cache._opened().hierarchy.check()
        assert cache.statistics()["lower"].n_read > 20


async def test_an_event_for_each_arrival_and_each_departure() -> None:
    """A set rebuilt from the events is the index, whatever was evicted, reset or deleted (invariant 10).

    https://github.com/llm-d/llm-d-kv-cache/pull/680
    """
    seen: set[tuple[int, bytes]] = set()

    def on_event(event: Event) -> None:
        entry = (event.level, event.key)
        assert (entry in seen) == (event.kind.value == "removed")
        seen.symmetric_difference_update({entry})

    async with cache_of(ThreadTier(), n_chunks=12, on_event=on_event) as cache:
        for branch in range(12):
            tokens = prompt(branch)
            await cache.store(tokens, buffers(cache.chunks(tokens)))
        await cache.delete(cache.chunks(prompt(11))[2:])
        await cache.wait_idle(PATIENCE_S)
        index = {(level.index, entry.key) for level in cache._opened().hierarchy.levels for entry in level.ledger}
        assert seen == index
        await cache.reset(Scope.ALL)
        await cache.wait_idle(PATIENCE_S)
        assert not seen


async def test_fifty_askers_share_one_read() -> None:
    """One physical read a chunk however many ask at once; if it fails all of them see a miss, and none hangs.

    https://github.com/vllm-project/vllm/issues/44294
    """
    tier = ThreadTier()
    async with cache_of(tier, n_slots=16) as cache:
        tokens = prompt(1, n_chunks=6)
        await cache.store(tokens, buffers(cache.chunks(tokens)))
        await cache.wait_idle(PATIENCE_S)
        for n_failing, expected in ((0, 12), (1, 0)):
            cache._opened().hierarchy.reset([0])
            tier.n_reads.clear()
            tier.n_failing = n_failing
            tier.asked.clear()
            tier.gate = asyncio.Event()
            hit = await cache.lookup(tokens)
            loads = [asyncio.create_task(cache.load(hit, [bytearray(NBYTES) for _ in range(6)])) for _ in range(50)]
            await tier.asked.wait()
            tier.gate.set()
            assert await asyncio.gather(*loads) == [expected] * 50
            assert set(tier.n_reads.values()) == {1}


async def test_a_prefix_larger_than_the_primary_comes_in_part() -> None:
    """Eight chunks on disk, six slots: at least five leading chunks arrive, each read once.

    https://github.com/vllm-project/vllm/issues/49902
    """
    tier = ThreadTier()
    async with cache_of(tier, n_slots=6) as cache:
        tokens = prompt(1, n_chunks=8)
        first = cache.chunks(tokens)[:4]
        await cache.store(tokens[:8], buffers(first))
        await cache.wait_idle(PATIENCE_S)
        cache._opened().hierarchy.reset([0])
        outcomes = await cache.store(tokens, buffers(cache.chunks(tokens)))
        assert [outcome.ok for outcome in outcomes] == [True] * 6 + [False] * 2
        await cache.wait_idle(PATIENCE_S)
        cache._opened().hierarchy.reset([0])
        await cache.store(prompt(2, n_chunks=3), buffers(cache.chunks(prompt(2, n_chunks=3))))
        hit = await cache.lookup(tokens)
        async with cache.lease(hit) as lease:
            assert len(lease.chunks) >= 5
            assert all(bytes(lease.view(chunk)) == payload(chunk) for chunk in lease.chunks)
        assert max(tier.n_reads.values()) == 1


async def test_two_stores_of_one_chunk_share_it() -> None:
    """Overlapping stores: every key once, the second waits for the first's bytes instead of failing its batch.

    https://github.com/kvcache-ai/Mooncake/issues/2827
    """
    async with cache_of() as cache:
        tokens = prompt(1, n_chunks=6)
        chunks = cache.chunks(tokens)
        both = await asyncio.gather(
            *(cache.store(tokens[: 2 * n], buffers(chunks[:n])) for n in (2, 4, 6, 6)),
        )
        assert all(outcome.ok for outcomes in both for outcome in outcomes)
        assert cache.statistics()["primary"].n_stored == 6


@virtual_time
async def test_a_hung_tier_is_a_miss_and_then_no_tier() -> None:
    """A read that hangs ends as a miss at its deadline; the breaker answers misses; the primary goes on.

    https://github.com/vllm-project/vllm/issues/50031
    """
    tier = ThreadTier(threads=False)
    limits = MoverLimits(deadline_s=0.05, breaker_cooldown_s=0.1)
    async with cache_of(tier, limits=limits) as cache:
        tokens = prompt(1)
        await cache.store(tokens, buffers(cache.chunks(tokens)))
        await cache.wait_idle(PATIENCE_S)
        cache._opened().hierarchy.reset([0])
        tier.gate = asyncio.Event()
        hit = await cache.lookup(tokens)
        assert await cache.load(hit, [bytearray(NBYTES) for _ in hit.chunks]) == 0
        assert cache.statistics()["lower"].broken
        assert (await cache.lookup(tokens)).n_tokens == 0
        other = await cache.store(prompt(2), buffers(cache.chunks(prompt(2))))
        assert all(outcome.ok for outcome in other)
        assert cache.statistics()["primary"].n_quarantined == 4
        tier.gate.set()
        assert await cache.wait_idle(PATIENCE_S)
        assert cache.statistics()["primary"].n_quarantined == 0
        assert await cache._opened().until(lambda: not cache.statistics()["lower"].broken, PATIENCE_S)
        assert await cache.load(await cache.lookup(tokens), [bytearray(NBYTES) for _ in range(4)]) == 8


async def test_reset_forgets_what_it_says() -> None:
    """After a reset nothing is found, stores in flight included, and the cache works on.

    https://github.com/vllm-project/vllm/pull/48102
    """
    tier = ThreadTier()
    async with cache_of(tier) as cache:
        tokens = prompt(1)
        await cache.store(tokens, buffers(cache.chunks(tokens)))
        tier.gate = asyncio.Event()
        await cache.reset()
        assert (await cache.lookup(tokens)).n_tokens == 0
        tier.gate.set()
        assert await cache.wait_idle(PATIENCE_S)
        assert cache.statistics()["primary"].free_nbytes == 8 * STRIDE
        assert cache.statistics()["lower"].ready_nbytes == 0
        assert all(o.ok for o in await cache.store(tokens, buffers(cache.chunks(tokens))))


async def test_every_refusal_has_a_reason() -> None:
    """Offered = stored + present + refused, and the outcome says which.

    https://github.com/ai-dynamo/dynamo/pull/10930
    """
    async with cache_of(n_slots=4) as cache:
        tokens = prompt(1, n_chunks=6)
        outcomes = await cache.store(tokens, buffers(cache.chunks(tokens)))
        assert [outcome.reason for outcome in outcomes] == [None] * 4 + [Reason.FULL] * 2
        record = cache.statistics()["primary"]
        assert (record.n_offered, record.n_stored, dict(record.refused)) == (6, 4, {"full": 2})


async def test_leases_protect_and_end() -> None:
    """Leased chunks survive any pressure; views die with the lease; nothing stays pinned."""
    async with cache_of(n_slots=4) as cache:
        await cache.store(prompt(1), buffers(cache.chunks(prompt(1))))
        hit = await cache.lookup(prompt(1))
        async with cache.lease(hit) as lease:
            outcomes = await cache.store(prompt(2), buffers(cache.chunks(prompt(2))))
            assert not any(outcome.ok for outcome in outcomes)
            view = lease.view(hit.chunks[3])
            assert bytes(view) == payload(hit.chunks[3])
        with pytest.raises(ValueError, match="released"):
            bytes(view)
        with pytest.raises(PinError):
            lease.view(hit.chunks[0])
        assert cache.statistics()["primary"].n_pinned == 0
        assert all(o.ok for o in await cache.store(prompt(2), buffers(cache.chunks(prompt(2)))))


async def test_prefetch_brings_chunks_up_without_pinning() -> None:
    """After a prefetch the same prefix lies in the primary."""
    async with cache_of(ThreadTier()) as cache:
        await cache.store(prompt(1), buffers(cache.chunks(prompt(1))))
        await cache.wait_idle(PATIENCE_S)
        cache._opened().hierarchy.reset([0])
        assert await cache.prefetch(await cache.lookup(prompt(1))) == 4
        assert await cache.wait_idle(PATIENCE_S)
        assert list((await cache.lookup(prompt(1))).levels) == [0] * 4
        assert cache.statistics()["primary"].n_pinned == 0


async def test_closed_means_closed() -> None:
    """Verbs before and after say so; closing twice is silent."""
    cache = cache_of()
    with pytest.raises(ClosedError):
        await cache.lookup(prompt(1))
    async with cache:
        pass
    with pytest.raises(ClosedError):
        await cache.store(prompt(1), buffers(cache.chunks(prompt(1))))
    await cache.aclose()


async def test_wrong_sizes_are_told_before_anything_is_reserved() -> None:
    """A buffer that is not the chunk's length, and too few buffers."""
    async with cache_of() as cache:
        with pytest.raises(ChunkSizeError, match="4999"):
            await cache.store(prompt(1), [bytearray(NBYTES - 1)] * 4)
        with pytest.raises(ConfigError, match="4 chunks"):
            await cache.store(prompt(1), [bytearray(NBYTES)] * 3)
        assert cache.statistics()["primary"].n_offered == 0


@pytest.mark.parametrize(
    ("levels", "told"),
    [
        ([], "levels"),
        ([Level(MemoryTier(), LRU(), capacity="8 bananas")], "memory.capacity"),
        ([Level(MemoryTier(), LRU(), capacity=-1)], "memory.capacity"),
        ([Level(MemoryTier(), LRU(), capacity=1 << 20)] * 2, "tier name"),
    ],
)
def test_wrong_settings_end_in_one_sentence(levels: list[Level], told: str) -> None:
    """Before anything is opened, naming the option."""
    with pytest.raises(ConfigError, match=told) as caught:
        TieredCache(chunker=ToyChunker(), namespace=b"toy", levels=levels)
    assert "\n" not in str(caught.value)


async def test_a_tier_that_fails_to_open_closes_those_before_it() -> None:
    """One slot too small: the error names the numbers, and the primary is closed again."""
    primary = MemoryTier(name="primary")
    levels = [Level(primary, LRU(), capacity=8 * STRIDE), Level(MemoryTier(name="low"), LRU(), capacity=100)]
    with pytest.raises(ConfigError, match=r"low\.capacity is 100"):
        async with TieredCache(chunker=ToyChunker(), namespace=b"toy", levels=levels):
            pass
    assert primary.n_slots == 0
