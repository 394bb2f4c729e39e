"""What an access costs in each order, as a ratio to cachetools' LRU in the same run. Never an absolute time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import pytest

from tests.gate import NOISE, hold
from tierkv.policies import ARC, FIFO, LFU, LRU, MQ, S3FIFO, SIEVE, TwoQ
from tierkv.protocols import BatchEvicting
from tierkv.types import Chunk, ChunkKey

pytestmark = pytest.mark.bench

N_SLOTS = 100_000
N_PINNED = 50_000
N_ACCESSES = 20_000
N_ROUNDS = 3

ONE = {"LRU": LRU, "FIFO": FIFO, "SIEVE": SIEVE}
THREE = {"LFU": LFU, "ARC": ARC, "S3-FIFO": S3FIFO, "2Q": TwoQ, "MQ": MQ}
LIMITS = {**dict.fromkeys(ONE, 1.0), **dict.fromkeys(THREE, 3.0)}

CHUNKS = [Chunk(ChunkKey(i.to_bytes(16, "big"))) for i in range(2 * N_SLOTS)]


class Piece(NamedTuple):
    """What a level tells its order of a part of a request: who is used, and who comes in for others that leave."""

    used: list[Chunk]
    new: list[Chunk]


def filled(make: Callable[[], Any], n_pinned: int) -> Any:
    order = make()
    for chunk in CHUNKS[:N_SLOTS]:
        order.on_insert((chunk,))
    for chunk in CHUNKS[:n_pinned]:
        order.hold(chunk.key)
    for _ in range(2):  # whoever is pinned at the cold end is met once, and is out of the way from then on
        next(iter(order.victims()))
    return order


def evictor(order: Any) -> Callable[[int], Sequence[ChunkKey]]:
    """How a level makes room."""
    if isinstance(order, BatchEvicting):
        return order.evict
    victims, on_remove = order.victims, order.on_remove

    def evict(n: int) -> list[ChunkKey]:
        leaving = list(islice(victims(), n))
        for key in leaving:
            on_remove(key, evicted=True)
        return leaving

    return evict


def rounds_of(size: int) -> list[list[list[Chunk]]]:
    """Requests of ``size`` chunks, half of them among few keys, the others among twice what fits."""
    rng = random.Random(1)
    few = CHUNKS[N_PINNED : N_PINNED + N_SLOTS // 10]
    picked = [rng.choice(few) if rng.random() < 0.5 else rng.choice(CHUNKS) for _ in range(N_ROUNDS * N_ACCESSES)]
    requests = [picked[i : i + size] for i in range(0, len(picked), size)]
    return [requests[i::N_ROUNDS] for i in range(N_ROUNDS)]


def pieces_of(make: Callable[[], Any], n_pinned: int, rounds: list[list[list[Chunk]]]) -> list[list[Piece]]:
    """What the order is told, found by running it once."""
    order = filled(make, n_pinned)
    evict = evictor(order)
    resident = {chunk.key for chunk in CHUNKS[:N_SLOTS]}

    def serve(request: list[Chunk]) -> Piece:
        used = [chunk for chunk in request if chunk.key in resident]
        new = list(dict.fromkeys(chunk for chunk in request if chunk.key not in resident))
        order.on_access(used)
        resident.difference_update(evict(len(new)))
        order.on_insert(new)
        resident.update(chunk.key for chunk in new)
        return Piece(used, new)

    pieces = [[serve(request) for request in requests] for requests in rounds]
    assert len(resident) == N_SLOTS
    assert all(chunk.key in resident for chunk in CHUNKS[:n_pinned])
    return pieces


def ours(order: Any, pieces: list[Piece]) -> float:
    """Processor seconds spent in the order."""
    on_access, on_insert, evict = order.on_access, order.on_insert, evictor(order)
    start = time.process_time()
    for used, new in pieces:
        if used:
            on_access(used)
        if new:
            evict(len(new))
            on_insert(new)
    return time.process_time() - start


def theirs(cache: Any, requests: list[list[Chunk]]) -> float:
    start = time.process_time()
    for request in requests:
        for chunk in request:
            try:
                cache[chunk.key]
            except KeyError:
                cache[chunk.key] = None
    return time.process_time() - start


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [16, 1])
@pytest.mark.parametrize("name", LIMITS)
def test_cost_of_an_access(name: str, size: int) -> None:
    """LRU, FIFO and SIEVE cost at most what cachetools' LRU does, the others three times that: in pieces, with pins."""
    make, rounds = {**ONE, **THREE}[name], rounds_of(size)
    cachetools = pytest.importorskip("cachetools", reason="cachetools is not installed")
    pieces = {n_pinned: pieces_of(make, n_pinned, rounds) for n_pinned in (0, N_PINNED)}

    def by_pins() -> dict[int, float]:
        ratios = {}
        for n_pinned, parts in pieces.items():
            order, cache = filled(make, n_pinned), cachetools.LRUCache(N_SLOTS)
            cache.update((chunk.key, None) for chunk in CHUNKS[:N_SLOTS])
            spent = [(ours(order, part), theirs(cache, requests)) for part, requests in zip(parts, rounds, strict=True)]
            # The best of each: what others do on the machine only ever adds.
            ratios[n_pinned] = round(min(our for our, _ in spent) / min(their for _, their in spent), 2)
        print(f"{name} in pieces of {size}, by pins: {ratios}")
        return ratios

    hold(by_pins, dict.fromkeys(pieces, LIMITS[name] * NOISE))
