"""A4, A5, A8, A9: slots, pins and counters that must come back, whoever shares, fails or is cancelled."""

# ruff: noqa: B023 - functions made in a loop are used up in the same turn

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any, cast

import pytest

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
)
from tests.toys import NBYTES, STRIDE, ThreadTier, ToyChunker, prompt
from tests.unit.test_hierarchy import chain, disk, over
from tierkv import Chunk, ChunkKey, EventKind, MemoryTier, Outcome, Reason, Status, Writes
from tierkv._hierarchy import Hierarchy
from tierkv._ledger import READY, Entry
from tierkv.testing import Does, Fault, FaultTier
from tierkv.types import Transfer


async def test_a04_lookups_pin_nothing_for_good() -> None:
    """Lookups pinned chunks that nobody ever released, until nothing could be evicted.

    https://github.com/LMCache/LMCache/issues/2017

    Of the kind: a thousand requests that are dropped after the lookup, cancelled before or while their load reads, or
    whose reads raise, miss, or answer too few keys. No timer helps.
    """
    rng = random.Random(4)
    tier = FaultTier(MemoryTier(name="lower"))
    limits = LIMITS._replace(breaker_failures=10**6, breaker_cooldown_s=0.0)
    async with opened(cache_over(tier, n_slots=6, limits=limits)) as cache:
        await keep(cache, prompt(1, 3))
        for turn in range(1000):
            if rng.random() < 0.3:
                await forget_primary(cache)
            hit = await cache.lookup(prompt(1, 3))
            if hit.stop is not hit.stop.COMPLETE:  # a read that missed made it one: the next request stores it again
                await keep(cache, prompt(1, 3))
                continue
            does = rng.choice([None, None, Does.RAISE, Does.MISS, Does.SHORT, Does.HANG])
            tier.faults[:] = [Fault("read", does)] if does else []
            load = start(cache.load(hit, [bytearray(NBYTES) for _ in hit.chunks]))
            if turn % 3 == 0:
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                load.cancel()
            elif does is Does.HANG and set(hit.levels) != {0}:
                await turns_until(lambda: tier.gate.n_waiting or load.done())
                load.cancel()
            await asyncio.gather(load, return_exceptions=True)
            assert cache.statistics()["primary"].n_pinned == 0
            tier.gate.open()
            await asyncio.sleep(0)
            tier.gate.close()
        tier.faults.clear()
        tier.gate.open()
        await settle(cache)
        await keep(cache, prompt(2, 6))
        assert await fetch(cache, prompt(2, 6)) == 6
        assert cache.statistics()["primary"].n_chunks == 6, "the whole pool was replaced"


def _recount(h: Hierarchy) -> None:
    """The counters against the index: free + ready + pending + quarantined = capacity, slots all different."""
    h.check()
    for level in h.levels:
        ledger = level.ledger
        entries = [*ledger, *(entry for entry in ledger.gone() if entry.owned)]
        charged = sum(entry.charge_nbytes for entry in entries)
        assert ledger.free_nbytes + charged == ledger.capacity_nbytes and ledger.free_nbytes >= 0
        assert ledger.ready_nbytes == sum(e.charge_nbytes for e in entries if e.state is READY)
    slots = [entry.slot for entry in [*h.primary, *h.primary.gone()]]
    assert len(set(slots)) == len(slots)


def test_a05_counters_equal_a_recount() -> None:  # noqa: C901 - a list of what may happen
    """The free-slot counter went above the pool's size: a move was charged to the wrong one of two pools.

    https://github.com/NVIDIA/TensorRT-LLM/pull/12834

    Of the kind: ten thousand stores, promotions, demotions, evictions, failures, deletions, resets and late ends over
    three levels of 3 to 8 slots, write-through and write-back, recounted after each; one key twice in each offer.
    """
    rng = random.Random(5)
    for writes in Writes:
        h = over(rng.randrange(3, 9), disk(rng.randrange(3, 9), writes=writes), disk(rng.randrange(3, 9)))
        requests = [chain(name, 4) for name in "abcdef"]
        flying, filling, held = list[Transfer](), list[list[Entry]](), list[Entry]()
        for _ in range(5000):
            request = rng.choice(requests)[: rng.randrange(1, 5)]
            match rng.randrange(8):
                case 0 | 1:
                    offer = h.offer([*request, request[0]])
                    assert len({entry.slot for entry in offer.reserved}) == len(offer.reserved)
                    filling.append(offer.reserved)
                case 2 if filling:
                    h.commit_store(filling.pop(rng.randrange(len(filling))))
                case 3 if filling:
                    h.abort_store(filling.pop(rng.randrange(len(filling))), Reason.DEVICE_ERROR)
                case 4:
                    h.promote(request)
                case 5 if held and rng.random() < 0.5:
                    h.release(held.pop())
                case 5 if (entry := h.primary.get(request[0].key)) is not None and len(held) < 2:
                    h.hold(entry)
                    held.append(entry)
                case 6 if rng.random() < 0.1:
                    h.delete([rng.choice(request).key]) if rng.random() < 0.8 else h.reset([rng.randrange(3)])
            _recount(h)
            flying += h.take_transfers()
            rng.shuffle(flying)
            for transfer in flying[: rng.randrange(3)]:
                flying.remove(transfer)
                status = rng.choice([Status.OK] * 6 + [Status.FAILED, Status.MISSING, Status.CORRUPT])
                h.finish(transfer.id, Outcome(transfer.chunk.key, status))
                _recount(h)
        for entries in filling:
            h.commit_store(entries)
        for entry in held:
            h.release(entry)
        for _ in range(100):
            while flying := [*flying, *h.take_transfers()]:
                transfer = flying.pop()
                h.finish(transfer.id, Outcome(transfer.chunk.key, Status.OK))
            h.refresh()  # deletions that failed are tried again, one at a time
        _recount(h)
        assert h.at_rest and h.primary.n_held == 0


class _Unchained(ToyChunker):
    """The same tokens have the same key wherever they stand."""

    def chunks(self, tokens: object, *, extra: bytes = b"") -> list[Chunk]:
        made = super().chunks(tokens, extra=extra)  # type: ignore[arg-type]
        return [chunk._replace(key=ChunkKey(bytes(tokens[chunk.end_token - 2 : chunk.end_token]))) for chunk in made]  # type: ignore[index]


async def test_a08_a_key_that_is_there_does_not_sink_its_batch() -> None:
    """One chunk that was stored already made a store reject its whole batch, and the fresh ones were never written.

    https://github.com/kvcache-ai/Mooncake/issues/2827

    Of the kind: three overlapping stores at once, again when all is there, one key twice in a store, a first store that
    is cancelled while the second waits for its chunk, and a first store whose copy fails.
    """
    lower = ThreadTier()
    async with opened(cache_over(lower, chunker=_Unchained())) as cache:
        batches = [[1, 1, 2, 2], [2, 2, 3, 3], [3, 3, 4, 4]]
        answers = await asyncio.gather(*(store(cache, batch) for batch in batches))
        assert [[outcome.status for outcome in answer] for answer in answers] == [[Status.OK] * 2] * 3
        primary = cache.statistics()["primary"]
        assert (primary.n_offered, primary.n_stored, primary.n_present) == (6, 4, 2)
        assert primary.free_nbytes == 4 * STRIDE
        stored = [event.key for event in ear(cache).events if event.level == 0 and event.kind is EventKind.STORED]
        assert sorted(stored) == [bytes([n, n]) for n in (1, 2, 3, 4)]
        assert all(outcome.ok for answer in [await store(cache, batch) for batch in batches] for outcome in answer)
        assert [outcome.ok for outcome in await store(cache, [5, 5, 5, 5])] == [True] * 2
        assert cache.statistics()["primary"].free_nbytes == 3 * STRIDE

        port, real = cast("Any", cache._port), cache._port.store_chunks
        copying, go_on = asyncio.Event(), asyncio.Event()

        async def slowly(jobs: Any, *, fails: bool = False) -> Any:
            copying.set()
            await go_on.wait()
            if fails:
                raise OSError("a device error")
            return await real(jobs)

        for fails in (False, True):
            copying.clear()
            go_on.clear()
            key = 6 + fails
            port.store_chunks = lambda jobs, fails=fails: slowly(jobs, fails=fails)
            first = asyncio.create_task(store(cache, [key] * 2))
            await copying.wait()
            port.store_chunks = real
            second = asyncio.create_task(store(cache, [key] * 2 + [8 + fails] * 2))
            await asyncio.sleep(0)
            if not fails:
                first.cancel()
            go_on.set()
            await asyncio.gather(first, return_exceptions=True)
            mine, fresh = await second
            assert fresh.ok, "the fresh chunk is stored whatever became of the other"
            assert mine.ok is not fails
        await settle(cache)
        assert await fetch(cache, [8, 8]) == await fetch(cache, [9, 9]) == 1


async def test_a09_cancelled_waiters_lose_no_slot(caplog: pytest.LogCaptureFixture) -> None:
    """Tasks cancelled at the moment they were handed a slot never gave it back.

    https://github.com/encode/httpcore/issues/1093

    Of the kind: forty tasks at a time that store, load or lease over four slots, each cancelled at a random point of
    its life, under write-through and write-back; then a hundred stores that nobody cancels.
    """
    rng = random.Random(9)
    for writes in Writes:
        async with opened(cache_over(ThreadTier(), n_slots=4, writes=writes)) as cache:

            async def lease(tokens: list[int]) -> None:
                async with cache.lease(await cache.lookup(tokens)):
                    await asyncio.sleep(0)

            for _ in range(12):
                work = []
                for _ in range(40):
                    tokens = prompt(rng.randrange(6), rng.randrange(1, 5))
                    act = rng.choice([store, store, fetch])
                    work.append(asyncio.create_task(lease(tokens) if rng.random() < 0.2 else act(cache, tokens)))
                for task in work:
                    for _ in range(rng.randrange(3)):
                        await asyncio.sleep(rng.choice((0, 0, 0.0005)))
                    task.cancel() if rng.random() < 0.6 else None
                for answer in await asyncio.gather(*work, return_exceptions=True):
                    if isinstance(answer, Exception):
                        raise answer
            await settle(cache)
            for n in range(100):
                await keep(cache, prompt(100 + n))
            primary = cache.statistics()["primary"]
            await settle(cache)
            await cache.reset()
            await settle(cache)
            assert cache.statistics()["primary"].free_nbytes == primary.capacity_nbytes
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], "never retrieved, or worse"
