"""Every order on a recorded trace of conversations: published hit rates, and another simulator's counts.

A prefix of the trace by default; all of it in the nightly session, or with TIERKV_WHOLE_TRACE=1.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tierkv.policies import ARC, FIFO, LFU, LRU, MQ, S3FIFO, SIEVE, LeafFirst, TwoQ
from tierkv.types import Chunk, ChunkKey

TOKENS = 512
N_PREFIX = 2_000
WHOLE = os.environ.get("TIERKV_WHOLE_TRACE") == "1"

ORDERS: dict[str, Callable[[int], Any]] = {
    "LRU": lambda _: LRU(), "FIFO": lambda _: FIFO(), "LFU": lambda _: LFU(), "Sieve": lambda _: SIEVE(),
    "ARC": ARC, "TwoQ": TwoQ, "S3FIFO": S3FIFO, "MQ": MQ,
}  # fmt: skip


class Request(NamedTuple):
    n_tokens: int
    blocks: list[Chunk]


class Hits(NamedTuple):
    n_blocks: int
    token_percent: float


def read(path: Path, n: int | None = None) -> list[Request]:
    if not path.exists():
        pytest.skip("TIERKV_TRACES has no mooncake_conversation.jsonl")
    requests = []
    with path.open() as file:
        for _, line in zip(range(n or 10**9), file, strict=False):
            record = json.loads(line)
            keys = [ChunkKey(block.to_bytes(4, "big")) for block in record["hash_ids"]]
            blocks = [Chunk(key, parent) for key, parent in zip(keys, [None, *keys[:-1]], strict=True)]
            requests.append(Request(record["input_length"], blocks))
    return requests


@pytest.fixture(scope="module")
def requests(traces_dir: Path) -> list[Request]:
    return read(traces_dir / "mooncake_conversation.jsonl", None if WHOLE else N_PREFIX)


@pytest.fixture(scope="module")
def n_unique(requests: list[Request]) -> int:
    return len({block.key for request in requests for block in request.blocks})


def replay(order: Any, n_slots: int, requests: list[Request]) -> Hits:
    """Each request's blocks are used or inserted one by one, tail first. Its hit is its longest prefix at arrival."""
    resident: set[ChunkKey] = set()
    n_blocks = n_hit_tokens = n_tokens = 0
    for request in requests:
        n_hit = next((i for i, block in enumerate(request.blocks) if block.key not in resident), len(request.blocks))
        n_hit_tokens += min(n_hit * TOKENS, request.n_tokens)
        n_tokens += request.n_tokens
        for block in reversed(request.blocks):
            # Also where it is a miss: a ghost is asked for before room is made, as the papers have it.
            order.on_access((block,))
            if block.key in resident:
                n_blocks += 1
                continue
            if len(resident) == n_slots:
                victim = next(iter(order.victims()))
                order.on_remove(victim, evicted=True)
                resident.remove(victim)
            order.on_insert((block,))
            resident.add(block.key)
    return Hits(n_blocks, 100 * n_hit_tokens / n_tokens)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("percent", [1, 5, 10, 20])
@pytest.mark.parametrize("name", ["LRU", "FIFO", "LFU", "Sieve", "ARC", "TwoQ", "S3FIFO"])
def test_block_hits_equal_another_simulators(name: str, percent: int, requests: list[Request], n_unique: int) -> None:
    """The simulator libcachesim counts exactly as many hits on the same stream of blocks, at four capacities."""
    try:
        other = importlib.import_module("libcachesim")
    except (ImportError, OSError):
        pytest.skip("libcachesim is not installed")
    n_slots = n_unique * percent // 100
    cache = getattr(other, name)(n_slots)
    expected = 0
    for request in requests:
        for block in reversed(request.blocks):
            asked = other.Request()
            asked.obj_id, asked.obj_size = int.from_bytes(block.key, "big") + 1, 1
            expected += bool(cache.get(asked))
    assert replay(ORDERS[name](n_slots), n_slots, requests).n_blocks == expected


PUBLISHED = {
    "LRU": ((5.35, 19.96, 28.44, 35.21), 0.005),
    "ARC": ((6.62, 21.43, 28.99, 32.64), 0.02),
    "S3FIFO": ((6.89, 18.90, 22.87, 27.03), 0.02),
    "MQ": ((6.31, 22.60, 30.01, 34.64), 0.01),
    "FIFO": ((5.23, 17.93, 25.34, 31.95), 0.01),
    "LFU": ((5.93, 13.01, 19.88, 31.30), 0.01),
    "Sieve": ((5.93, 13.01, 19.88, 31.30), 0.01),
    "TwoQ": ((6.91, 17.97, 25.49, 32.55), 0.01),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if WHOLE else pytest.mark.nightly) for name in PUBLISHED])
def test_token_hits_are_the_published_ones(name: str, traces_dir: Path) -> None:
    """On the whole trace, at 1, 5, 10 and 20 % of its blocks, each order gives the hit rates of the published table."""
    requests = read(traces_dir / "mooncake_conversation.jsonl")
    n_unique = len({block.key for request in requests for block in request.blocks})
    assert n_unique == 182_790
    expected, tolerance = PUBLISHED[name]
    for percent, hit in zip((1, 5, 10, 20), expected, strict=True):
        n_slots = n_unique * percent // 100
        assert replay(ORDERS[name](n_slots), n_slots, requests).token_percent == pytest.approx(hit, abs=tolerance)


@pytest.mark.timeout(900)
def test_a_capacity_that_is_learnt(requests: list[Request], n_unique: int) -> None:
    """ARC, 2Q and MQ need not be told how much the level holds: from the first eviction on they know."""
    n_slots = n_unique // 20
    for order, tolerance in ((ARC, 0), (TwoQ, 0), (MQ, 100)):
        told, learnt = (replay(each, n_slots, requests) for each in (partial(order, n_slots)(), order()))
        assert abs(told.n_blocks - learnt.n_blocks) <= tolerance


@pytest.mark.timeout(900)
def test_leaf_first_costs_no_hits(requests: list[Request], n_unique: int) -> None:
    """Under LeafFirst an order hits as many tokens or more, to 0.1 points: a tail without its head is no hit."""
    n_slots = n_unique // 20
    for name in ("FIFO", "MQ", "ARC", "TwoQ"):
        bare, leafy = ORDERS[name](n_slots), LeafFirst(ORDERS[name](n_slots))
        gain = replay(leafy, n_slots, requests).token_percent - replay(bare, n_slots, requests).token_percent
        print(f"{name}: {gain:+.2f} points")
        assert gain > -0.1
