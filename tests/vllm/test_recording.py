"""``record_trace``: what vLLM's real scheduler does with requests, as a trace that ``tierkv tune`` reads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.manager_kit import Kit, keys_of
from tests.vllm.scheduler_rig import BLOCK, Rig, ShelfTier
from tierkv.cli._tune_replay import Job, replay
from tierkv.errors import ConfigError
from tierkv.traces import read_traces
from tierkv.vllm import _metrics
from tierkv.vllm.options import parse_options


def chats(n_sessions: int, n_turns: int) -> list[list[int]]:
    """Prompts of chats that share a head, turn by turn."""
    rng = random.Random(1)
    head = [rng.randrange(7) for _ in range(3 * BLOCK)]
    histories = [list(head) for _ in range(n_sessions)]
    prompts = []
    for _ in range(n_turns):
        for history in histories:
            history += [rng.randrange(7) for _ in range(rng.randrange(2, 4 * BLOCK))]
            prompts.append(list(history))
    return prompts


@pytest.mark.parametrize("n_per_chunk", [1, 2])
@pytest.mark.parametrize("device_caches", [True, False])
def test_the_scheduler_records_its_requests(n_per_chunk: int, device_caches: bool, tmp_path: Path) -> None:
    """Each prompt once, as long as its whole chunks, equal prefixes under equal ids, cached on the device or not."""
    ShelfTier.shelves.clear()
    path = tmp_path / "trace.jsonl"
    rig = Rig(
        blocks_per_chunk=n_per_chunk, n_slots=60, n_blocks=80, two_groups=True, device_caches=device_caches,
        record_trace=str(path),
    )  # fmt: skip
    prompts = chats(3, 4)
    try:
        for number, prompt in enumerate(prompts):
            rig.add(f"r{number}", prompt, 3)
            rig.settle()
    finally:
        rig.close()
    trace = read_traces("TRACE", [path])
    tokens = BLOCK * n_per_chunk
    n_chunks = [len(prompt) // tokens for prompt in prompts]
    assert list(trace.n_tokens) == [n * tokens for n in n_chunks]
    assert trace.header.tokens_per_block == tokens
    assert trace.header.blocks_per_chunk == n_per_chunk
    numbers: dict[tuple[int, ...], int] = {}
    prefixes = [tuple(p[: (i + 1) * tokens]) for p, n in zip(prompts, n_chunks, strict=True) for i in range(n)]
    assert list(trace.blocks) == [numbers.setdefault(prefix, len(numbers)) for prefix in prefixes]
    assert replay(trace, Job("lru", trace.n_unique)).n_hit_tokens > 0


def test_requests_that_wait_abort_or_come_back_are_recorded_once(tmp_path: Path) -> None:
    """Preempted ones are not recorded again, and those that were aborted before they ran are not recorded at all."""
    ShelfTier.shelves.clear()
    path = tmp_path / "trace.jsonl"
    rig = Rig(n_slots=40, n_blocks=14, two_groups=False, record_trace=str(path))
    n_preempted = 0
    try:
        for number in range(6):
            rig.add(f"r{number}", [number % 7] * 12 + [1] * 8, 12)
        rig.add("gone", [6] * 20, 4)
        rig.abort("gone")
        for _ in range(200):
            n_preempted += sum(request.num_preemptions > 0 for request in rig.scheduler.requests.values())
            rig.runtime.wait()
            rig.pump()
            rig.step()
        rig.settle()
    finally:
        rig.close()
    trace = read_traces("TRACE", [path])
    assert n_preempted
    assert len(trace) == 6
    assert set(trace.n_tokens) == {20}
    assert not rig.manager._recording._arrived


def test_a_recorder_that_fails_is_no_error_of_the_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No such directory: one warning, and the requests are served."""
    kit = Kit(record_trace=str(tmp_path / "none" / "trace.jsonl"))
    try:
        for name in ("a", "b"):
            keys = keys_of(name, 3)
            context = kit.request(keys)
            kit.step(context.req_id)
            assert kit.store(keys, context) == keys
    finally:
        kit.close()
    assert kit.manager._recording.recorder.n_dropped == 2
    assert list(kit.manager.get_stats().data["data"][_metrics.TRACE_DROPPED].values()) == [2]
    assert sum("recording requests" in record.message for record in caplog.records) == 1


def test_what_a_chunk_takes_is_recorded(tmp_path: Path) -> None:
    """The header's bytes are what ``cpu_bytes_to_use`` counts for a chunk of all groups."""
    kit = Kit(n_slots=8, n_groups=2, record_trace=str(tmp_path / "trace.jsonl"))
    try:
        context = kit.request(keys_of("a", 2), keys_of("a", 2, group=1))
        kit.step(context.req_id)
    finally:
        kit.close()
    header, request = map(json.loads, (tmp_path / "trace.jsonl").read_text().splitlines())
    assert header["block_nbytes"] == 2 * kit.spec.options.cpu_nbytes // kit.spec.n_slots
    assert len(request["hash_ids"]) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"record_trace": 7}, "record_trace is 7, but must be the path of a file"),
        ({"record_trace": "/"}, "record_trace is '/', but must be the path of a file"),
        ({"record_trace": "a", "record_trace_bytes": "1KiB"}, "record_trace_bytes is '1KiB'"),
        ({"record_traces": "a"}, "nearest valid value: record_trace"),
    ],
)
def test_wrong_settings_are_one_sentence(settings: dict[str, Any], message: str) -> None:
    """Option, value and what is allowed, before anything is made."""
    with pytest.raises(ConfigError) as caught:
        parse_options({"cpu_bytes_to_use": "1MiB"} | settings)
    assert message in str(caught.value)
