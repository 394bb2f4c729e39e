"""What LRU costs a chunk, as ratios within one run: pieces against whole requests, and against a plain list."""

from __future__ import annotations

import gc
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pytest

from tierkv.policies import LRU
from tierkv.types import Chunk, ChunkKey

N_RESIDENT = 100_000
LENGTH = 2_048

pytestmark = pytest.mark.bench


def requests() -> list[list[Chunk]]:
    made = []
    for request in range(N_RESIDENT // LENGTH):
        keys = [ChunkKey(b"%016d%016d" % (request, i)) for i in range(LENGTH)]
        made.append([Chunk(key, parent) for key, parent in zip(keys, [None, *keys[:-1]], strict=True)])
    return made


def pieces(chains: Iterable[Sequence[Chunk]], size: int) -> list[Sequence[Chunk]]:
    return [chain[at : at + size] for chain in chains for at in range(0, len(chain), size)]


def seconds(call: Callable[[Sequence[Chunk]], object], parts: Sequence[Sequence[Chunk]]) -> float:
    """Processor time of this thread: what the neighbours take does not count."""
    gc.collect()
    began = time.thread_time()
    for part in parts:
        call(part)
    return time.thread_time() - began


def seconds_of_inserts(make: Callable[[], Callable[[Sequence[Chunk]], object]], parts: list[Sequence[Chunk]]) -> float:
    """The best of three, each into an order of its own."""
    return min(seconds(make(), parts) for _ in range(3))


def touch_tail_first(order: OrderedDict[ChunkKey, None], chunks: Sequence[Chunk]) -> None:
    for chunk in reversed(chunks):
        order[chunk.key] = None
        order.move_to_end(chunk.key)


def test_cost_does_not_depend_on_the_pieces() -> None:
    """Using and inserting a 2,048-chunk request by single chunks stays within 5 x of doing so at once, per chunk."""
    chains = requests()
    cost: dict[int, tuple[float, float]] = {}
    for size in (LENGTH, 16, 1):
        policy = LRU()
        parts = pieces(chains, size)
        inserted = min(seconds_of_inserts(lambda: LRU().on_insert, parts), seconds(policy.on_insert, parts))
        cost[size] = (inserted, min(seconds(policy.on_access, parts) for _ in range(3)))
    for size in (16, 1):
        assert cost[size][0] < 5 * cost[LENGTH][0], f"insert in pieces of {size}: {cost}"
        assert cost[size][1] < 5 * cost[LENGTH][1], f"access in pieces of {size}: {cost}"


def test_cost_beside_a_plain_list() -> None:
    """Order of leaves costs at most 8 x (insert), 4 x (access) of an OrderedDict that is touched tail first."""
    parts = pieces(requests(), 16)
    policy, plain = LRU(), OrderedDict[ChunkKey, None]()
    touch = partial(touch_tail_first, plain)

    ours = seconds_of_inserts(lambda: LRU().on_insert, parts)
    theirs = seconds_of_inserts(lambda: partial(touch_tail_first, OrderedDict[ChunkKey, None]()), parts)
    assert ours < 8 * theirs
    policy.on_insert([chunk for part in parts for chunk in part])
    touch([chunk for part in parts for chunk in part])
    assert min(seconds(policy.on_access, parts) for _ in range(3)) < 4 * min(seconds(touch, parts) for _ in range(3))
