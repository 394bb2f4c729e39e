"""Cancelling is safe: no wrong byte, no lost slot, and a caller's buffers are its own again once the call has ended."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.patience import PATIENCE_S
from tests.toys import NBYTES, STRIDE, ThreadTier, buffers, cache_of, payload, prompt
from tierkv import MoverLimits, Scope, TieredCache, Writes

CANARY = b"\xa5" * NBYTES


async def _store(cache: TieredCache, branch: int, n_chunks: int) -> None:
    """Store, and overwrite the source at once when the call ends: what was stored must not change with it."""
    tokens = prompt(branch, n_chunks)
    sources = buffers(cache.chunks(tokens))
    try:
        await cache.store(tokens, sources)
    finally:
        for source in sources:
            source[:] = CANARY


async def _load(cache: TieredCache, branch: int, n_chunks: int, canaries: list[bytearray]) -> None:
    """Load, and reuse the targets at once when the call ends: nobody may write into them any more."""
    hit = await cache.lookup(prompt(branch, n_chunks))
    targets = [bytearray(NBYTES) for _ in hit.chunks]
    try:
        n_tokens = await cache.load(hit, targets)
        arrived = targets[: n_tokens // 2]
        assert arrived == buffers(hit.chunks)[: len(arrived)]
    finally:
        for target in targets:
            target[:] = CANARY
        canaries += targets


async def _lease(cache: TieredCache, branch: int, n_chunks: int) -> None:
    async with cache.lease(await cache.lookup(prompt(branch, n_chunks))) as lease:
        await asyncio.sleep(0)
        for chunk in lease.chunks:
            assert bytes(lease.view(chunk)) == payload(chunk)


async def _one(cache: TieredCache, rng: random.Random, canaries: list[bytearray]) -> None:
    branch, n_chunks = rng.randrange(6), rng.randrange(1, 6)
    what = rng.randrange(10)
    if what < 4:
        await _store(cache, branch, n_chunks)
    elif what < 7:
        await _load(cache, branch, n_chunks, canaries)
    elif what < 8:
        await _lease(cache, branch, n_chunks)
    elif what < 9:
        await cache.delete(cache.chunks(prompt(branch, n_chunks))[-1:])
    else:
        await cache.reset(Scope.ALL)


async def _storm(seed: int, writes: Writes) -> None:
    rng = random.Random(seed)
    canaries: list[bytearray] = []
    limits = MoverLimits(deadline_s=PATIENCE_S)
    async with cache_of(ThreadTier(), n_slots=6, n_chunks=14, writes=writes, limits=limits) as cache:
        for branch in range(4):
            await cache.store(prompt(branch, 3), buffers(cache.chunks(prompt(branch, 3))))
        tasks = [asyncio.create_task(_one(cache, rng, canaries)) for _ in range(40)]
        for task in tasks:
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(rng.choice((0, 0, 0.0005)))
            if rng.random() < 0.6:
                task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result
        assert await cache.wait_idle(PATIENCE_S)
        cache._opened().hierarchy.check()
        for record in cache.statistics().values():
            assert record.n_pending == record.n_pinned == record.n_quarantined == 0
            assert record.free_nbytes + record.ready_nbytes == record.capacity_nbytes
        assert all(canary == CANARY for canary in canaries)
        for branch in range(6):
            await _load(cache, branch, 5, canaries)
        await cache.reset()
        await cache.wait_idle(PATIENCE_S)
        assert cache.statistics()["primary"].free_nbytes == 6 * STRIDE


@pytest.mark.timeout(600)
@pytest.mark.parametrize("writes", list(Writes))
def test_random_cancellation(writes: Writes) -> None:
    """Forty tasks cancelled at random: slots conserved, bytes right, buffers free for reuse at once.

    https://github.com/encode/httpcore/issues/1093
    """

    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 2**32))
    def storm(seed: int) -> None:
        asyncio.run(_storm(seed, writes))

    storm()


async def test_a_cancelled_read_keeps_its_slot_until_the_thread_has_ended() -> None:
    """Cancel a load whose read still runs; other stores must not get the slot that the thread will write.

    https://github.com/python/cpython/issues/107505
    """
    tier = ThreadTier()
    async with cache_of(tier, n_slots=4) as cache:
        await cache.store(prompt(1), buffers(cache.chunks(prompt(1))))
        await cache.wait_idle(PATIENCE_S)
        cache._opened().hierarchy.reset([0])
        tier.gate = asyncio.Event()
        load = asyncio.create_task(_lease(cache, 1, 4))
        await tier.asked.wait()
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        record = cache.statistics()["primary"]
        assert (record.n_pending, record.n_pinned) == (3, 0)
        store = asyncio.create_task(cache.store(prompt(2), buffers(cache.chunks(prompt(2)))))
        await asyncio.sleep(0.01)
        tier.gate.set()
        await store
        await cache.wait_idle(PATIENCE_S)
        for branch in (1, 2):
            hit = await cache.lookup(prompt(branch))
            targets = [bytearray(NBYTES) for _ in hit.chunks]
            n_tokens = await cache.load(hit, targets)
            assert targets[: n_tokens // 2] == buffers(hit.chunks)[: n_tokens // 2]


async def test_a_cancelled_close_still_closes() -> None:
    """Cancelled in mid-close, the tiers are closed all the same before the cancellation goes on."""
    tier = ThreadTier()
    cache = cache_of(tier)
    async with cache:
        await cache.store(prompt(1), buffers(cache.chunks(prompt(1))))
        tier.gate = asyncio.Event()
        closing = asyncio.create_task(cache.aclose(timeout_s=PATIENCE_S))
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.sleep(0)
        tier.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert tier.n_slots == 0
