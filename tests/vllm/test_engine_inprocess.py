"""Real vLLM engines in this process: every way to offload gives the tokens of a run without offloading.

Each test compares tokens, asserts from counters that the tiers served, and the controls show that wrong bytes are seen.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from tests.fs_kit import recount
from tests.patience import PATIENCE_S
from tests.vllm import faults
from tests.vllm.engine import Outcome, Prompt, engine, offloading, prompts, run_once
from tests.vllm.model import QWEN3, ModelSpec, make_model
from tierkv.device import Direction
from tierkv.vllm import _compat

PRIMARY_NBYTES = 16 << 20
PROMPTS = prompts()
LONGER = prompts(8, 600, 96, seed=3)
"""vLLM asks for a chunk only if that spares a whole chunk's tokens: chunks of 256 take prompts longer than PROMPTS."""
LONG = prompts(4, 600, 96, seed=5)
MANY = prompts(16, 600, 96, seed=77)
OTHERS = prompts(4, 500, 0, seed=99)
"""Nothing in common, so that they are computed and stored at once whatever else is found."""
HYBRID_BLOCKS = {"num_gpu_blocks_override": 80}
"""The hybrid's two groups take a block each where the other model takes one."""

# The JSON of the vLLM Ascend guide, word for word but for sizes and the folder.
GUIDE_CPU = """{
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 16777216,
            "blocks_per_chunk": 8,
            "spec_name": "CPUOffloadingSpec"
        }
    }"""
GUIDE_MULTI_TIER = """{
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 16777216,
        "blocks_per_chunk": 8,
        "spec_name": "TieringOffloadingSpec",
        "secondary_tiers": [
            {
                "type": "fs",
                "root_dir": "ROOT_DIR"
            }
        ]
    }
}"""


@functools.cache
def baseline(
    model: str, n_tokens: int = 24, which: str = "PROMPTS", *, at_once: bool = False, blocks: int = 64
) -> Outcome:
    """What the model says without offloading; one engine for each distinct question in the whole session."""
    batch: list[Prompt] = globals()[which]
    return run_once(model, batch, n_tokens=n_tokens, at_once=at_once, num_gpu_blocks_override=blocks)


def tiered(root: Path, **extra: object) -> dict:
    tier = {"type": "fs", "root_dir": str(root), "n_read_threads": 2, "n_write_threads": 2}
    usual = {"cpu_bytes_to_use": PRIMARY_NBYTES, "secondary_tiers": [tier], "lookup_deadline_s": PATIENCE_S}
    return offloading(**usual | extra)


def cached_from(outcome: Outcome, source: str) -> float:
    """Prompt tokens that came from a medium, all rounds together."""
    return outcome.metrics.get(f"prompt_tokens_cached_by_source{{{source}}}", 0)


def assert_served(outcome: Outcome, base: Outcome, per_prompt: int, *, at: int = -1) -> None:
    """Every round has the baseline's tokens; round ``at`` found ``per_prompt`` tokens of each prompt."""
    for answers in outcome.rounds:
        assert answers.tokens == base.rounds[0].tokens
    assert outcome.rounds[at].cached == [per_prompt] * len(base.rounds[0].cached)


class TestGuide:
    """The configurations of the vLLM Ascend guide, as they are."""

    def test_cpu_only(self, models):
        """Second round from host memory: two chunks of 256 tokens of each prompt."""
        got = run_once(models(), LONGER, json.loads(GUIDE_CPU), n_rounds=2)
        assert_served(got, baseline(models(), which="LONGER"), 512)
        assert cached_from(got, "host") == 8 * (512 - 96)

    def test_multi_tier_and_restart(self, models, tmp_path):
        """Second round from host memory, and a new engine on the same folder is served from disk at once."""
        config = json.loads(GUIDE_MULTI_TIER.replace("ROOT_DIR", str(tmp_path)))
        base = baseline(models(), which="LONGER")
        first = run_once(models(), LONGER, config, n_rounds=2)
        assert_served(first, base, 512)
        assert cached_from(first, "host") == 8 * (512 - 96)
        again = run_once(models(), LONGER, config)
        assert_served(again, base, 512)
        assert cached_from(again, "disk") == 512 + 7 * (512 - 96)


def test_vllms_own_option_without_any_json(models):
    """``kv_offloading_size`` (GiB) alone: vLLM asks for its CPU spec by name, and that is tierkv's here."""
    got = run_once(models(), PROMPTS, n_rounds=2, kv_offloading_size=0.0157, kv_offloading_backend="native")
    assert_served(got, baseline(models()), 480)
    assert got.metrics["kv_offload_tierkv_level_capacity_bytes{0:primary}"] == 514 << 15


@pytest.mark.parametrize(
    ("chunk", "per_prompt"),
    [({}, 480), ({"blocks_per_chunk": 4}, 384), ({"block_size": 64}, 448)],
    ids=["1 block", "4 blocks", "64 tokens"],
)
def test_chunk_sizes_through_both_tiers(models, tmp_path, chunk, per_prompt):
    """A chunk of one block, of four, or given in tokens: from memory in the second round, from disk after a restart."""
    config = tiered(tmp_path, **chunk)
    first = run_once(models(), PROMPTS, config, n_rounds=2)
    assert_served(first, baseline(models()), per_prompt)
    again = run_once(models(), PROMPTS, config)
    assert_served(again, baseline(models()), per_prompt)
    if _compat.CacheHitSource is not None:  # before 0.32 vLLM does not say where from
        assert cached_from(first, "host") == 8 * (per_prompt - 96)
        assert cached_from(again, "disk") > 0
        assert cached_from(again, "host") == 0


class TestControls:
    """Wrong bytes change the tokens: so equal tokens mean right bytes."""

    @pytest.mark.parametrize("group", [0, 1])
    def test_corrupt_loads_of_one_group(self, models, monkeypatch, group):
        """Two groups, one of them given other bytes on its way back from host memory."""
        faults.corrupt_loads(monkeypatch, group)
        config = offloading(cpu_bytes_to_use=PRIMARY_NBYTES)
        got = run_once(models("hybrid"), PROMPTS, config, n_rounds=2, **HYBRID_BLOCKS)
        base = baseline(models("hybrid"), blocks=80)
        assert got.rounds[0].tokens == base.rounds[0].tokens
        assert got.rounds[1].cached == [480] * 8
        assert got.rounds[1].tokens != base.rounds[0].tokens

    def test_corrupt_loads_of_the_only_group(self, models, monkeypatch):
        """The model with one group."""
        faults.corrupt_loads(monkeypatch)
        got = run_once(models(), PROMPTS, offloading(cpu_bytes_to_use=PRIMARY_NBYTES), n_rounds=2)
        assert got.rounds[0].tokens == baseline(models()).rounds[0].tokens != got.rounds[1].tokens

    def test_corrupt_reads_from_disk(self, models, tmp_path, monkeypatch):
        """Right bytes on disk, changed between the tier and the primary: past every checksum, and seen."""
        run_once(models(), PROMPTS, tiered(tmp_path))
        faults.corrupt_reads(monkeypatch)
        got = run_once(models(), PROMPTS, tiered(tmp_path))
        assert cached_from(got, "disk") > 0
        assert got.rounds[0].tokens != baseline(models()).rounds[0].tokens


@pytest.mark.parametrize(("per_chunk", "per_prompt"), [(1, 480), (4, 384)])
def test_two_groups(models, tmp_path, per_chunk, per_prompt):
    """Full and sliding-window layers that overlay each other's blocks: from memory, then from disk."""
    config = tiered(tmp_path, blocks_per_chunk=per_chunk)
    base = baseline(models("hybrid"), blocks=80)
    first = run_once(models("hybrid"), PROMPTS, config, n_rounds=2, **HYBRID_BLOCKS)
    assert_served(first, base, per_prompt)
    assert cached_from(first, "host") > 0
    again = run_once(models("hybrid"), PROMPTS, config, **HYBRID_BLOCKS)
    assert_served(again, base, per_prompt)
    assert cached_from(again, "disk") > 0


@pytest.mark.parametrize("prompt_only", [True, False], ids=["prompts", "prompts and answers"])
def test_preemption(models, tmp_path, prompt_only):
    """Four long requests outgrow the device and push each other out; what comes back is right, twice."""
    config = tiered(tmp_path, offload_prompt_only=prompt_only)
    base = baseline(models(), 380, "LONG", at_once=True)
    got = run_once(models(), LONG, config, n_rounds=2, n_tokens=380, at_once=True)
    assert got.metrics["num_preemptions"] > 0
    assert [answers.tokens for answers in got.rounds] == [base.rounds[0].tokens] * 2
    assert min(got.rounds[1].cached) >= 576


def test_answers_are_offloaded_too(models):
    """With ``offload_prompt_only=false`` a second turn finds the first turn's answer, not only its prompt."""
    answers = baseline(models(), 100).rounds[0].tokens
    turns = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    config = offloading(cpu_bytes_to_use=PRIMARY_NBYTES, offload_prompt_only=False)
    with engine(models(), config) as running:
        first = running.generate(PROMPTS, n_tokens=100)
        second = running.generate(turns)
    with engine(models()) as plain:
        expected = plain.generate(turns)
    assert first.tokens == answers
    assert second.tokens == expected.tokens
    assert second.cached == [576] * 8, "of 600 tokens all but the unfinished block; the prompts alone would give 480"


def test_batches_with_slow_copies(models, tmp_path, monkeypatch):
    """Sixteen prompts at once over a link where each copy takes 20 ms longer."""
    base = baseline(models(), 64, "MANY", at_once=True)
    faults.slow_copies(monkeypatch, 0.02)
    got = run_once(models(), MANY, tiered(tmp_path), n_rounds=2, n_tokens=64, at_once=True)
    assert_served(got, base, 576)


def test_a_primary_too_small_for_its_load(models, tmp_path):
    """Forty slots for sixteen prompts of eighteen chunks at once: what does not fit is computed, and is right."""
    base = baseline(models(), 64, "MANY", at_once=True)
    config = tiered(tmp_path, cpu_bytes_to_use=40 << 15)
    first = run_once(models(), MANY, config, n_rounds=2, n_tokens=64, at_once=True)
    again = run_once(models(), MANY, config, n_tokens=64, at_once=True)
    for answers in (*first.rounds, *again.rounds):
        assert answers.tokens == base.rounds[0].tokens
    assert cached_from(again, "disk") > 0


def test_the_first_request_waits_for_a_tier_that_opens_slowly(models, tmp_path, monkeypatch):
    """A second to open the root after a restart, far more than a probe gets: the first request is a disk hit."""
    run_once(models(), PROMPTS[:1], tiered(tmp_path))
    faults.slow_open(monkeypatch, 1.0)
    got = run_once(models(), PROMPTS[:1], tiered(tmp_path))
    assert got.rounds[0].cached == [480]
    assert got.rounds[0].tokens == baseline(models()).rounds[0].tokens[:1]


def test_a_tier_that_never_opens_costs_one_deadline(models, tmp_path, monkeypatch):
    """The first request waits for ``lookup_deadline_s``, later ones not at all; host memory serves."""
    opened, deferred = faults.hung_open(monkeypatch), faults.deferred(monkeypatch)
    config = tiered(tmp_path, lookup_deadline_s=0.5)
    with engine(models(), config) as running:
        first = running.generate(PROMPTS)
        assert len(deferred) == 1, "one waits, until the deadline, and nobody after it"
        assert running.generate(PROMPTS).cached == [480] * 8
        opened.set()
    assert first.tokens == baseline(models()).rounds[0].tokens


def test_failing_stores_cost_hits_and_nothing_else(models, tmp_path, monkeypatch):
    """Every second store fails on the device: its chunks are dropped, tokens stay right, vLLM lives."""
    failed = faults.fail_copies(monkeypatch, Direction.STORE)
    got = run_once(models(), PROMPTS, tiered(tmp_path), n_rounds=2)
    assert len(failed) >= 4
    assert [answers.tokens for answers in got.rounds] == [baseline(models()).rounds[0].tokens] * 2
    assert 480 in got.rounds[1].cached
    assert any(cached < 480 for cached in got.rounds[1].cached)


def test_failing_loads_are_tried_again_plainly(models, monkeypatch):
    """Every second load fails once; the plain copy brings the bytes, so every prompt is served."""
    failed = faults.fail_copies(monkeypatch, Direction.LOAD)
    got = run_once(models(), PROMPTS, offloading(cpu_bytes_to_use=PRIMARY_NBYTES), n_rounds=2)
    assert len(failed) >= 4
    assert_served(got, baseline(models()), 480)


@pytest.mark.parametrize("with_disk", [False, True], ids=["memory", "memory and disk"])
def test_reset_with_copies_in_both_directions(models, tmp_path, monkeypatch, with_disk):
    """A reset while loads and stores run, and stores straight after it: what was there is gone, nothing is wrong."""
    in_flight = faults.slow_copies(monkeypatch, 0.02)
    config = tiered(tmp_path) if with_disk else offloading(cpu_bytes_to_use=PRIMARY_NBYTES)
    base, fresh = baseline(models()), baseline(models(), which="OTHERS")
    with engine(models(), config) as running:
        for turn in range(2):
            assert running.generate(PROMPTS).tokens == base.rounds[0].tokens
            in_flight.meet()
            mixed = running.begin([*PROMPTS[:2], *OTHERS[2 * turn : 2 * turn + 2]])
            while not in_flight.met.is_set():
                assert not running.answers.keys() >= set(mixed), "the copies never overlapped"
                running.step()
            running.reset_prefix_cache()
            late = running.begin(PROMPTS[4:6])
            assert (
                running.finish(mixed).tokens
                == base.rounds[0].tokens[:2] + fresh.rounds[0].tokens[2 * turn : 2 * turn + 2]
            )
            after = running.finish(late)
            assert after.tokens == base.rounds[0].tokens[4:6]
            assert max(after.cached) <= 96, "only what the device itself still had"
        assert running.generate(PROMPTS).tokens == base.rounds[0].tokens
        last = running.generate(PROMPTS)
        assert last.tokens == base.rounds[0].tokens
        assert last.cached == [480] * 8
        assert running.metrics().get("prompt_tokens_cached_by_source{disk}", 0) == 0


def test_a_root_of_one_mebibyte(models, tmp_path):
    """A disk tier far smaller than what is stored: the root never exceeds it, sampled throughout; tokens are right."""
    root, capacity_nbytes = tmp_path / "root", 1 << 20
    root.mkdir()
    tier = {"type": "fs", "root_dir": str(root), "capacity": "1MiB"}
    config = offloading(cpu_bytes_to_use=40 << 15, secondary_tiers=[tier])
    ended, sampled = threading.Event(), []

    def sample() -> None:
        while not ended.wait(0.005):
            sampled.append(recount(root))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        got = run_once(models(), PROMPTS, config, n_rounds=2)
        # The latest first: the earlier ones' chunks are gone.
        again = run_once(models(), PROMPTS[::-1], config)
    finally:
        ended.set()
        sampler.join()
    sampled.append(recount(root))
    assert capacity_nbytes * 3 // 4 < max(sampled) <= capacity_nbytes
    expected = baseline(models()).rounds[0].tokens
    assert [answers.tokens for answers in got.rounds] == [expected] * 2
    assert again.rounds[0].tokens == expected[::-1]
    assert cached_from(again, "disk") > 0


def test_damaged_files_are_misses(models, tmp_path):
    """A flipped bit, a cut file, two swapped files, a FIFO: none is served, the others are, tokens are right."""
    root = tmp_path / "root"
    config = tiered(root, secondary_tiers=[{"type": "fs", "root_dir": str(root), "layout": "files"}])
    run_once(models(), PROMPTS, config)
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.parent != root)
    assert len(files) == 99
    flipped, cut, one, other, fifo = files[::20]
    body = bytearray(flipped.read_bytes())
    body[20_000] ^= 1
    flipped.write_bytes(body)
    os.truncate(cut, 8192)
    one_body, other_body = one.read_bytes(), other.read_bytes()
    one.write_bytes(other_body)
    other.write_bytes(one_body)
    fifo.unlink()
    os.mkfifo(fifo)
    got = run_once(models(), PROMPTS, config)
    assert got.rounds[0].tokens == baseline(models()).rounds[0].tokens
    assert 0 < cached_from(got, "disk") < 480 + 7 * (480 - 96)
    assert got.metrics["kv_offload_tiering_chunk_hits{1:fs}"] <= 99 - 5


def test_another_checkpoint_under_the_same_path(models, tmp_path):
    """New weights in the old folder find nothing and give their own tokens; the old ones find theirs again."""
    model = tmp_path / "model"
    config = tiered(tmp_path / "kv")
    make_model(model, QWEN3)
    old = run_once(str(model), PROMPTS, config)
    assert old.rounds[0].tokens == baseline(models()).rounds[0].tokens
    shutil.rmtree(model)
    make_model(model, ModelSpec(seed=1))
    plain = run_once(str(model), PROMPTS)
    new = run_once(str(model), PROMPTS, config)
    assert new.rounds[0].tokens == plain.rounds[0].tokens != old.rounds[0].tokens
    assert cached_from(new, "disk") == 0
    shutil.rmtree(model)
    make_model(model, QWEN3)
    back = run_once(str(model), PROMPTS, config)
    assert_served(back, old, 480)
    assert cached_from(back, "disk") > 0
