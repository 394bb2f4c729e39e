"""A real engine on vLLM's own tiered spec, with an order of ours in its primary and a tier of ours below."""

from __future__ import annotations

from pathlib import Path

from tests.fs_kit import PAGE, rows_under
from tests.vllm.engine import offloading, prompts, run_once

PROMPTS = prompts(4)
HIT = 480
"""Tokens of a prompt that whole blocks cover."""


def config(root: Path) -> dict:
    """A primary of 24 blocks, of which one prompt needs 15: what is served again comes from disk."""
    tier = {"type": "TierKVSecondaryTier", "module_path": "tierkv.vllm", "tier": "fs", "root_dir": str(root),
            "capacity": "16MiB", "queue_bytes": "16MiB"}  # fmt: skip
    return offloading(
        "UpstreamTieringSpec", module="tests.vllm.upstream", cpu_bytes_to_use=24 * (32 << 10), secondary_tiers=[tier],
        eviction_policy="leaf_first > mq", cache_policy_module_path="tierkv.vllm",
    )  # fmt: skip


def test_served_from_disk_before_and_after_a_restart(models, tmp_path):
    """Tokens are those of an engine without offloading, prompts come from disk, a damaged root costs only hits."""
    expected = run_once(models(), PROMPTS).rounds[0].tokens
    first = run_once(models(), PROMPTS, config(tmp_path), n_rounds=2)
    assert [answers.tokens for answers in first.rounds] == [expected] * 2
    assert first.rounds[1].cached == [HIT] * 4
    again = run_once(models(), PROMPTS, config(tmp_path))
    assert again.rounds[0].tokens == expected
    assert sum(cached == HIT for cached in again.rounds[0].cached) >= 2, again.rounds[0].cached
    assert again.metrics["prompt_tokens_cached_by_source{disk}"] > 0
    for _, slot in rows_under(tmp_path):
        data = bytearray(slot.read_bytes())
        data[PAGE + 100] ^= 1
        slot.write_bytes(data)
    damaged = run_once(models(), PROMPTS, config(tmp_path))
    assert damaged.rounds[0].tokens == expected
    assert damaged.metrics["kv_offload_tierkv_chunks_dropped{corrupt,1:TierKVSecondaryTier}"] > 0
