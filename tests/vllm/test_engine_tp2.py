"""Two workers by tensor parallelism: one shared pool, or two private ones, and what another topology finds on disk."""

from __future__ import annotations

from tests.patience import PATIENCE_S
from tests.vllm.engine import EngineProcess, Outcome, offloading, prompts, run_once

PROMPTS = prompts(6)
PRIMARY_NBYTES = 8 << 20
CHUNK_NBYTES = 32 << 10
"""Of both workers together: half of the heads each."""


def two_workers(model: str, config: dict, log, n_rounds: int) -> Outcome:
    with EngineProcess(model, PROMPTS, config, log=log, n_rounds=n_rounds, tensor_parallel_size=2) as running:
        return running.outcome()


def gauge(outcome: Outcome, name: str, *labels: str) -> float:
    found = [
        v
        for k, v in outcome.metrics.items()
        if k.startswith(f"kv_offload_tierkv_{name}{{") and all(x in k for x in labels)
    ]
    assert len(found) == 1, (name, labels, sorted(outcome.metrics))
    return found[0]


def assert_tokens(outcome: Outcome, expected: list[list[int]]) -> None:
    assert [answers.tokens for answers in outcome.rounds] == [expected] * len(outcome.rounds)


def tiered(root, **extra) -> dict:
    tiers = [{"type": "fs", "root_dir": str(root)}]
    return offloading(cpu_bytes_to_use=PRIMARY_NBYTES, lookup_deadline_s=PATIENCE_S, secondary_tiers=tiers, **extra)


def test_private_pools(models, tmp_path):
    """Each worker has a pool of its own; ``cpu_bytes_to_use`` is what both hold together."""
    expected = run_once(models(), PROMPTS).rounds[0].tokens
    config = offloading(cpu_bytes_to_use=PRIMARY_NBYTES)
    got = two_workers(models(), config, tmp_path / "log", 2)
    assert_tokens(got, expected)
    assert got.rounds[1].cached == [480] * len(PROMPTS)
    assert gauge(got, "level_capacity_bytes", "0:primary") <= PRIMARY_NBYTES
    assert got.metrics["prompt_tokens_cached_by_source{host}"] >= len(PROMPTS) * (480 - 96)


def test_shared_pool_restart_and_one_worker_on_the_same_root(models, tmp_path):
    """Cold, warm from memory, warm from disk after a restart; then one worker finds nothing it could misread."""
    expected = run_once(models(), PROMPTS).rounds[0].tokens
    config = tiered(tmp_path / "root")
    first = two_workers(models(), config, tmp_path / "first.log", 2)
    assert_tokens(first, expected)
    assert first.rounds[1].cached == [480] * len(PROMPTS)
    assert gauge(first, "level_capacity_bytes", "0:primary") == PRIMARY_NBYTES
    again = two_workers(models(), config, tmp_path / "again.log", 1)
    assert_tokens(again, expected)
    assert again.rounds[0].cached[:-1] == [480] * (len(PROMPTS) - 1)
    assert again.metrics["prompt_tokens_cached_by_source{disk}"] > 0
    alone = run_once(models(), PROMPTS, config)
    assert_tokens(alone, expected)
    assert alone.metrics.get("prompt_tokens_cached_by_source{disk}", 0) == 0, "another layout: a miss, never its bytes"


def test_canonical_pages_are_shared_with_one_worker(models, tmp_path):
    """With ``canonical_layout`` the bytes show no rank: one worker reads from disk what two have written."""
    expected = run_once(models(), PROMPTS).rounds[0].tokens
    config = tiered(tmp_path / "root", canonical_layout=True)
    assert_tokens(two_workers(models(), config, tmp_path / "log", 1), expected)
    alone = run_once(models(), PROMPTS, config)
    assert_tokens(alone, expected)
    assert alone.rounds[0].cached[:-1] == [480] * (len(PROMPTS) - 1)
    assert alone.metrics["prompt_tokens_cached_by_source{disk}"] > 0
