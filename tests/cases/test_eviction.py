"""A1-A3: who leaves, and who must not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import fs_kit
from tests.cases.kit import cache_over, ear, fetch, keep, opened, store
from tests.fs_kit import chunk_of
from tests.toys import ToyChunker, prompt
from tests.unit.test_hierarchy import chain, disk, over, run
from tierkv import Chunk, ChunkKey, EventKind, Reason, Status
from tierkv._hierarchy import Hierarchy
from tierkv.policies import ARC, FIFO, LFU, LRU, MQ, S3FIFO, SIEVE, TTL, LeafFirst, Quota, TwoQ

ORDERS: dict[str, Callable[[], Any]] = {
    "lru": LRU,
    "fifo": FIFO,
    "lfu": LFU,
    "arc": ARC,
    "s3fifo": S3FIFO,
    "sieve": SIEVE,
    "two_q": TwoQ,
    "mq": MQ,
    "leaf_first": lambda: LeafFirst(ARC()),
    "ttl": lambda: TTL(ARC(), 3600),
    "quota": lambda: Quota({"tenant": 1 << 30}, ARC()),
}


async def test_a01_idle_chunks_leave_when_all_others_are_pinned() -> None:
    """The adaptive policy said "cannot evict" while idle chunks existed.

    https://github.com/vllm-project/vllm/pull/55461

    Of the kind: every order and wrapper, after ghost hits have moved ARC's target; each pair of residents pinned in
    turn; one idle chunk for two (the leading one is taken); none idle (nothing at all changes).
    """
    for make in ORDERS.values():
        for pinned in itertools.combinations(range(4), 2):
            async with opened(cache_over(policy=make(), n_slots=4)) as cache, AsyncExitStack() as leases:
                policy: Any = cache._opened().hierarchy.primary.policy
                for i in (1, 2, 1, 2, 3, 4, 5, 3, 6, 7, 4, 5):  # ghosts of what has left come back
                    await keep(cache, [i, i])
                for i in (8, 9):
                    await keep(cache, [i, i])
                if isinstance(policy, ARC):
                    policy._target = 4.0  # as far as ghost hits can move it
                residents = sorted(key for level, key in ear(cache).known if level == 0)
                tokens = {cache.chunks([i, i])[0].key: [i, i] for i in range(1, 10)}
                for i in pinned:
                    await leases.enter_async_context(cache.lease(await cache.lookup(tokens[residents[i]])))
                idle = {residents[i] for i in range(4) if i not in pinned}
                await keep(cache, prompt(99, 2))
                assert set(ear(cache).removed()[-2:]) == idle
                await leases.enter_async_context(cache.lease(await cache.lookup(prompt(99, 1))))
                assert [outcome.reason for outcome in await store(cache, [88] * 4)] == [None, Reason.FULL]
                await leases.enter_async_context(cache.lease(await cache.lookup([88, 88])))
                order, n_events = list(policy.victims()), len(ear(cache).events)
                assert [outcome.reason for outcome in await store(cache, [77] * 4)] == [Reason.FULL] * 2
                assert (list(policy.victims()), len(ear(cache).events)) == (order, n_events)


class _Family:
    """Listens to a hierarchy: no chunk is evicted while a child of it is resident at the same level (invariant 7)."""

    def __init__(self, requests: list[list[Chunk]]) -> None:
        self.children: dict[ChunkKey | None, set[ChunkKey]] = {}
        for chunk in itertools.chain(*requests):
            self.children.setdefault(chunk.parent, set()).add(chunk.key)
        self.known: set[tuple[int, ChunkKey]] = set()

    def listen(self, h: Hierarchy) -> None:
        for event in h.take_events():
            if event.kind is EventKind.STORED:
                self.known.add((event.level, event.key))
                continue
            self.known.remove((event.level, event.key))
            left_behind = [k for k in self.children.get(event.key, ()) if (event.level, k) in self.known]
            assert not left_behind, (event, left_behind)


def _leaf_first(inner: str) -> LeafFirst:
    return LeafFirst(ORDERS[inner]())


async def test_a02_a_prefix_loses_its_tail_before_its_head() -> None:
    """The head of a prefix was evicted before its tail, so that the rest was resident but unreachable.

    https://github.com/novitalabs/pegaflow/issues/396

    Of the kind: pieces of a request that still runs, a request that has ended, shared heads, each under LRU and under
    LeafFirst over every order; a random run with pins, promotions and a level below, in which the resident part of
    every chain is one run from its head, and no level evicts a chunk whose child it keeps.
    """
    makers: list[Callable[[], Any]] = [LRU]
    makers += [partial(_leaf_first, inner) for inner in ("fifo", "lfu", "arc", "mq")]
    for make in makers:
        async with opened(cache_over(policy=make(), n_slots=4)) as cache:
            await keep(cache, prompt(1, 2))
            await keep(cache, prompt(1, 4))
            await keep(cache, [9, 9])
            assert ear(cache).removed() == [cache.chunks(prompt(1))[3].key]
            assert await fetch(cache, prompt(1)) == 3
            await cache.delete(cache.chunks([9, 9]))
            await keep(cache, prompt(3, 2))  # it shares the head
            await keep(cache, [8, 8, 8, 8, 8, 8])
            assert await fetch(cache, prompt(1)) == await fetch(cache, prompt(3)) == 1
    rng = random.Random(396)
    h = over(10, disk(16))
    shared = chain("s", 2)
    requests = [[*shared, *chain(f"r{i}", 4, parent=shared[1])] for i in range(3)] + [chain(f"a{i}", 5) for i in "bcd"]
    family, held = _Family(requests), list[Any]()
    for _ in range(3000):
        request = rng.choice(requests)
        piece = request[: rng.randrange(1, len(request) + 1)]
        act = rng.randrange(4)
        if act == 0:
            h.promote(piece, limit=4)
        elif act == 1 and len(held) < 3 and (entry := h.primary.get(piece[-1].key)) is not None:
            h.hold(entry)
            held.append(entry)
        elif act == 2 and held:
            h.release(held.pop(0))
        else:
            offer = h.offer(piece)
            h.access([entry.chunk for entry in offer.present])  # as TieredCache.store does
            h.commit_store(offer.reserved)
        run(h)
        family.listen(h)
        for request in requests:
            there = [h.primary.get(chunk.key) is not None for chunk in request]
            assert there == sorted(there, reverse=True), "one run from the head"
    assert h.levels[0].counts.evicted > 500 < h.levels[1].counts.evicted


class _Ragged(ToyChunker):
    """Chunks of different lengths: as many bytes as the last token says."""

    def chunks(self, tokens: Any, *, extra: bytes = b"") -> Any:
        made = super().chunks(tokens, extra=extra)
        return [chunk._replace(nbytes=1 + tokens[chunk.end_token - 1]) for chunk in made]


@pytest.mark.usefixtures("layout")
async def test_a03_a_larger_rewrite_costs_no_neighbour(tmp_path: Path) -> None:
    """Replacing an entry with a bigger one evicted an innocent neighbour: the old size still counted.

    https://github.com/tkem/cachetools/issues/405

    Equal keys mean equal bytes, so for the cache a second store of a chunk is none, whatever its length: nothing moves.
    The fs tier by itself does replace: growing, shrinking, at the brim, and far too large.
    """
    async with opened(cache_over(chunker=_Ragged(), n_slots=4)) as cache:
        for last in (3, 4):
            assert (await cache.store([1, last], [bytes(1 + last)]))[0].ok
        before = cache.statistics()["primary"]
        assert (await cache.store([1, 4], [bytes(5)]))[0].ok
        after = cache.statistics()["primary"]
        assert (after.ready_nbytes, after.n_chunks, after.n_present) == (before.ready_nbytes, 2, before.n_present + 1)
    longest = fs_kit.LONGEST
    async with fs_kit.opened(tmp_path / "root", n_chunks=4) as tier:
        a, small, large = chunk_of(1), chunk_of(2, 100), chunk_of(2, longest)
        for chunk in (a, small, large, small):
            await fs_kit.store(tier, chunk)
            others = 0 if chunk is a else fs_kit.CHARGE
            assert tier.usage()["chunks_nbytes"] == others + fs_kit.charge_of(chunk.nbytes)
            assert await fs_kit.fetch(tier, a) == [Status.OK]
            assert await fs_kit.fetch(tier, chunk) == [Status.OK]
        await fs_kit.store(tier, chunk_of(3), chunk_of(4))
        assert tier.usage()["chunks_nbytes"] == 3 * fs_kit.CHARGE + fs_kit.charge_of(100)
        for refused, reason in (
            (large, Reason.FULL),
            (chunk_of(2, longest + 4097), Reason.TOO_LARGE),
        ):
            (outcome,) = await tier.write([(refused, memoryview(bytes(refused.nbytes)))])
            assert (outcome.status, outcome.reason) == (Status.REFUSED, reason)
            assert await fs_kit.fetch(tier, a, small, chunk_of(3), chunk_of(4)) == [Status.OK] * 4
        assert (tier.counters()["deleted"], tier.counters()["vanished"]) == (0, 0)
