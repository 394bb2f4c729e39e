"""LRU on a recorded conversation trace, against hit rates that an independent simulator gives for it."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from tierkv.policies import LRU
from tierkv.types import Chunk, ChunkKey

_TOKENS = 512


def _chain(hash_ids: list[int]) -> list[Chunk]:
    keys = [ChunkKey(block.to_bytes(4, "big")) for block in hash_ids]
    return [Chunk(key, parent) for key, parent in zip(keys, [None, *keys[:-1]], strict=True)]


def _hit_percent(requests: list[tuple[int, list[Chunk]]], n_slots: int) -> float:
    """Percent of prompt tokens that a resident prefix covers on arrival; then the whole prompt is used or inserted."""
    policy = LRU()
    resident: set[ChunkKey] = set()
    n_hit_tokens = n_tokens = 0
    for length, chain in requests:
        n_hit = next((i for i, chunk in enumerate(chain) if chunk.key not in resident), len(chain))
        n_hit_tokens += min(n_hit * _TOKENS, length)
        n_tokens += length
        policy.on_access(chain[:n_hit])
        policy.on_insert(chain[n_hit:])
        resident.update(chunk.key for chunk in chain)
        leaving = list(islice(policy.victims(), max(len(resident) - n_slots, 0)))
        for key in leaving:
            policy.on_remove(key, evicted=True)
        resident.difference_update(leaving)
    return 100 * n_hit_tokens / n_tokens


def test_hit_rates_on_a_recorded_trace(traces_dir: Path) -> None:
    """The leaf order answers as tail-first LRU does: 5.35, 19.96, 28.44, 35.21 % at 1, 5, 10, 20 % of the blocks."""
    path = traces_dir / "mooncake_conversation.jsonl"
    if not path.exists():
        pytest.skip("TIERKV_TRACES has no mooncake_conversation.jsonl")
    with path.open() as file:
        records = [json.loads(line) for line in file]
    requests = [(record["input_length"], _chain(record["hash_ids"])) for record in records]
    n_unique = len({chunk.key for _, chain in requests for chunk in chain})
    hits = [_hit_percent(requests, n_unique * percent // 100) for percent in (1, 5, 10, 20)]
    assert hits == pytest.approx([5.35, 19.96, 28.44, 35.21], abs=0.005)
