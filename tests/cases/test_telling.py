"""A31-A33: what is told of chunks that come, go or are not taken; and what a reset does to those under way."""

# ruff: noqa: B023 - functions made in a loop are used up in the same turn

from __future__ import annotations

import asyncio
import random
from typing import Any

from tests.cases.kit import (
    LIMITS,
    cache_over,
    ear,
    fetch,
    forget_primary,
    keep,
    opened,
    settle,
    start,
    store,
    turns_until,
    virtual_time,
)
from tests.toys import NBYTES, STRIDE, ThreadTier, ToyChunker, prompt
from tierkv import MemoryTier, Reason, Scope, Status, Stop, Writes
from tierkv.admission import MaxSize
from tierkv.testing import Does, Fault, FaultTier


async def test_a31_events_alone_rebuild_the_index() -> None:
    """Repeated announcements made the router forget a resident chunk.

    https://github.com/llm-d/llm-d-kv-cache/pull/680

    Two thousand stores of overlapping prefixes, loads, deletions, resets, failed writes and reads at three levels,
    write-through and write-back: for each level and key, stored and removed alternate, and at rest the set they leave
    is the index. Ten thousand steps of the bare state machine: tests/unit/test_hierarchy.py; vLLM's manager:
    tests/vllm/test_manager.py.
    """
    rng = random.Random(31)
    limits = LIMITS._replace(breaker_failures=10**6)
    for writes in Writes:
        middle, bottom = FaultTier(MemoryTier(name="middle")), FaultTier(MemoryTier(name="bottom"))
        cache = cache_over(middle, bottom, n_slots=6, n_chunks=9, writes=writes, limits=limits)
        async with opened(cache):
            for i in range(1000):
                tokens = prompt(rng.randrange(8), rng.randrange(1, 5))
                if i % 50 == 0:
                    for tier in (middle, bottom):
                        fault = Fault(rng.choice(["read", "write"]), rng.choice([Does.FAIL, Does.RAISE]))
                        tier.faults[:] = [fault]
                        tier.faults *= rng.random() < 0.3
                match rng.randrange(20):
                    case 0:
                        await cache.delete(cache.chunks(tokens)[-1:])
                    case 1 if i % 7 == 0:
                        await cache.reset(rng.choice(list(Scope)))
                    case n if n < 8:
                        await fetch(cache, tokens)
                    case _:
                        await store(cache, tokens)
            middle.faults.clear()
            bottom.faults.clear()
            await turns_until(lambda: cache._opened().idle)
            await settle(cache)
            assert len(ear(cache).events) > 500


@virtual_time
async def test_a32_nothing_is_dropped_without_a_trace() -> None:
    """Offloads dropped without a trace: the target pool had no slot, and the success counters looked healthy.

    https://github.com/ai-dynamo/dynamo/pull/10930

    A pool that overflows, a queue that is full, an admission rule, a chunk that is too large, a tier that fails, is
    broken or late, a reset and a close with work under way: each has its reason, and offered = stored + present +
    refused, exactly, at each level.
    """
    lower = FaultTier(MemoryTier(name="lower"))
    limits = LIMITS._replace(deadline_s=0.2, breaker_cooldown_s=0.5)

    def told(reason: Reason, level: str = "lower") -> int:
        return cache.statistics()[level].refused.get(reason.value, 0)

    cache = cache_over(lower, n_slots=4, queue=2 * STRIDE, limits=limits)
    async with cache:
        assert [outcome.reason for outcome in await store(cache, prompt(1, 6))] == [None] * 4 + [Reason.FULL] * 2
        await settle(cache)
        assert (told(Reason.FULL, "primary"), told(Reason.QUEUE_FULL)) == (2, 2)
        lower.faults[:] = [Fault("write", Does.FAIL)]
        for n in range(10, 13):
            await keep(cache, [n, n])
            await settle(cache)
        assert told(Reason.TIER_ERROR) == 3
        assert cache.statistics()["lower"].broken
        await keep(cache, [20, 20])
        assert told(Reason.TIER_BROKEN) == 1
        await turns_until(lambda: not cache.statistics()["lower"].broken)
        lower.faults[:] = [Fault("write", Does.HANG)]
        await keep(cache, [30, 30])
        await turns_until(lambda: told(Reason.DEADLINE) == 1)
        lower.faults.clear()
        lower.gate.open()
        await turns_until(lambda: not cache.statistics()["lower"].broken)
        await settle(cache)
        lower.gate.close()
        lower.faults[:] = [Fault("write", Does.HANG)]
        await keep(cache, [40, 40])
        await cache.reset()
        lower.gate.open()
        await settle(cache)
        assert told(Reason.RESET) == 1
        lower.faults.clear()

    class Large(ToyChunker):
        def chunks(self, tokens: Any, *, extra: bytes = b"") -> Any:
            return [chunk._replace(nbytes=1 + tokens[0] * STRIDE) for chunk in super().chunks(tokens, extra=extra)]

    async with opened(cache_over(n_slots=2, chunker=Large())) as cache:
        assert (await cache.store([0, 0], [b"x"]))[0].ok
        (outcome,) = await cache.store([1, 1], [bytes(1 + STRIDE)])
        assert (outcome.status, outcome.reason) == (Status.REFUSED, Reason.TOO_LARGE)
        assert told(Reason.TOO_LARGE, "primary") == 1
    levels = cache_over(lower)._levels
    refusing = levels[0]._replace(tier=MemoryTier(name="primary"), admission=MaxSize(NBYTES - 1))
    cache = cache_over()
    cache._levels = (refusing,)
    async with opened(cache):
        assert [outcome.reason for outcome in await store(cache, prompt(1, 3))] == [Reason.NOT_ADMITTED] * 3
        assert told(Reason.NOT_ADMITTED, "primary") == 3


@virtual_time
async def test_a33_a_reset_with_copies_under_way() -> None:
    """After a reset, live requests were stuck for ever: it forgot the open jobs, not the references to them.

    https://github.com/vllm-project/vllm/pull/48102

    Requests that store, load, and drain to a tier that hangs, and a reset: it returns at once, all of them end, late
    ends count once, their slots are quarantined until then and free afterwards; all can be stored again meanwhile.
    Twice in a row, and with the tier never letting go until the deadline.
    """
    for waits in (False, True):
        lower = ThreadTier(threads=False)
        limits = LIMITS._replace(deadline_s=0.3, breaker_cooldown_s=30.0) if waits else LIMITS
        async with opened(cache_over(lower, n_slots=12, limits=limits)) as cache:
            await keep(cache, [1] * 4)
            await settle(cache)
            await forget_primary(cache)
            real, copying, go_on = cache._port.store_chunks, asyncio.Event(), asyncio.Event()

            async def slowly(jobs: Any) -> Any:
                copying.set()
                await go_on.wait()
                return await real(jobs)

            lower.gate = asyncio.Event()
            lower.asked.clear()
            loading = start(fetch(cache, [1] * 4))
            await lower.asked.wait()
            await keep(cache, [2] * 4)  # its way down hangs
            cache._port.store_chunks = slowly
            storing = start(store(cache, [5] * 4))
            await copying.wait()
            cache._port.store_chunks = real
            for _ in range(2):
                async with asyncio.timeout(0):
                    await cache.reset()
            for branch in (1, 2, 5):
                hit = await cache.lookup([branch] * 4)
                assert (hit.n_tokens, hit.stop) == (0, Stop.MISS)
            primary = cache.statistics()["primary"]
            assert primary.n_quarantined == 6 and primary.free_nbytes == 6 * STRIDE
            assert await loading == 0, "forgotten while it was read: a miss"
            go_on.set()
            assert [outcome.reason for outcome in await storing] == [Reason.RESET] * 2
            for branch in (1, 2):
                await keep(cache, [branch] * 4)
                assert await fetch(cache, [branch] * 4) == 2
            if waits:
                await turns_until(lambda: cache.statistics()["lower"].broken)
            lower.gate.set()
            await settle(cache)
            assert await fetch(cache, [5] * 4) == 0, "nothing is resurrected"
            assert cache.statistics()["primary"].free_nbytes == 8 * STRIDE
