"""What LRU costs a chunk, as ratios within one run: pieces against whole requests, and against a plain list."""

from __future__ import annotations

import gc
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pytest

from tests.gate import NOISE, hold
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

    def by_pieces() -> dict[tuple[str, int], float]:
        inserts: dict[int, float] = {}
        accesses: dict[int, float] = {}
        for size in (LENGTH, 16, 1):
            policy, parts = LRU(), pieces(chains, size)
            inserts[size] = min(seconds_of_inserts(lambda: LRU().on_insert, parts), seconds(policy.on_insert, parts))
            accesses[size] = min(seconds(policy.on_access, parts) for _ in range(3))
        return {
            (what, size): spent[size] / spent[LENGTH]
            for what, spent in (("insert", inserts), ("access", accesses))
            for size in (16, 1)
        }

    hold(by_pieces, dict.fromkeys(itertools.product(("insert", "access"), (16, 1)), 5.0))


def test_cost_beside_a_plain_list() -> None:
    """Order of leaves costs 5 x (insert), 1.5 x (access) of an OrderedDict that is touched tail first: not 2 x that."""
    parts = pieces(requests(), 16)
    policy, plain = LRU(), OrderedDict[ChunkKey, None]()
    touch = partial(touch_tail_first, plain)

    everything = [chunk for part in parts for chunk in part]
    policy.on_insert(everything)
    touch(everything)

    def by_calls() -> dict[str, float]:
        ours = seconds_of_inserts(lambda: LRU().on_insert, parts)
        theirs = seconds_of_inserts(lambda: partial(touch_tail_first, OrderedDict[ChunkKey, None]()), parts)
        used = [(seconds(policy.on_access, parts), seconds(touch, parts)) for _ in range(3)]
        return {"insert": ours / theirs, "access": min(our for our, _ in used) / min(their for _, their in used)}

    hold(by_calls, {"insert": 6 * NOISE, "access": 2.5 * NOISE})
