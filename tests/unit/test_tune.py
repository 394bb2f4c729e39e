"""``tierkv tune``: its figures against independent ones, its advice, and how it ends when the trace is wrong."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import PATIENCE_S
from tests.request_traces import TOKENS, write_chat
from tierkv.cli._bench_report import BenchReport, TierSpeed
from tierkv.cli._main import _parser
from tierkv.cli._tune import tune
from tierkv.cli._tune_advice import choose_order
from tierkv.cli._tune_bound import belady_hit_tokens, endless_hit_tokens
from tierkv.cli._tune_jobs import WorkerError, _worker, run_jobs, save
from tierkv.cli._tune_plan import plan_from
from tierkv.cli._tune_plot import draw
from tierkv.cli._tune_replay import Job, replay
from tierkv.errors import ConfigError
from tierkv.traces import Header, Trace, read_traces
from tierkv.vllm.options import parse_options

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp("trace") / "chat.jsonl")


@pytest.fixture(scope="module")
def trace(chat: Path) -> Trace:
    return read_traces("TRACE", [chat], TOKENS)


def report_of(chat: Path, *arguments: str) -> dict[str, Any]:
    common = ["tune", str(chat), "--tokens-per-block", str(TOKENS), "--jobs", "1"]
    return tune(plan_from(_parser().parse_args([*common, *arguments])))


def run_tune(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "tierkv.cli", "tune", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    return subprocess.run(
        command, env=environment, input=stdin, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


# -- figures ----------------------------------------------------------------------------------------------------------


class PlainLRU:
    """Tail-first LRU, or FIFO, over a plain dict: another implementation of what a replay counts."""

    def __init__(self, n_blocks: int, *, fifo: bool = False) -> None:
        self.n_blocks, self.fifo = n_blocks, fifo
        self.resident: OrderedDict[int, None] = OrderedDict()
        self.n_hit_tokens = self.n_hit_blocks = 0

    def serve(self, n_tokens: int, blocks: Sequence[int], tokens: int) -> None:
        n_hit = sum(1 for _ in itertools.takewhile(self.resident.__contains__, blocks))
        self.n_hit_tokens += min(n_hit * tokens, n_tokens)
        for block in reversed(blocks):
            if block in self.resident:
                self.n_hit_blocks += 1
                if not self.fifo:
                    self.resident.move_to_end(block)
                continue
            if len(self.resident) == self.n_blocks:
                self.resident.popitem(last=False)
            self.resident[block] = None


@pytest.mark.parametrize("percent", [1, 5, 20, 60, 100])
def test_a_replay_counts_what_a_plain_lru_counts(percent: int, trace: Trace) -> None:
    """Tokens and blocks hit by LRU through the real hierarchy are those of a dict touched tail first, exactly."""
    n_blocks = trace.n_unique * percent // 100
    plain = PlainLRU(n_blocks)
    for n_tokens, blocks in trace.requests():
        plain.serve(n_tokens, blocks, TOKENS)
    result = replay(trace, Job("lru", n_blocks))
    assert result.n_hit_tokens == plain.n_hit_tokens > 0
    if n_blocks > 100:  # a prompt that fits: LRU as a leaf order is LRU tail first
        assert result.n_hit_blocks == plain.n_hit_blocks


def test_a_hit_is_no_longer_than_the_prompt() -> None:
    """The last block of a prompt, filled in part, counts for the tokens that are in it."""
    trace = read_traces("TRACE", [io.BytesIO(2 * LINE.encode())])
    assert replay(trace, Job("lru", 2)).n_hit_tokens == endless_hit_tokens(trace) == 600
    assert replay(trace, Job("lru", 2, 2)).n_hit_tokens == 600
    assert replay(trace, Job("lru", 2, whole=True)).n_hit_tokens == 512


@pytest.mark.parametrize("n", [2, 3, 8])
def test_larger_chunks_are_a_coarser_trace(n: int, trace: Trace) -> None:
    """Chunks of n blocks hit what a trace of blocks n times as long hits, in as many bytes."""
    coarse = Trace(Header(TOKENS * n))
    for n_tokens, blocks in trace.requests():
        coarse.blocks.extend(blocks[n - 1 : n_tokens // TOKENS : n])
        coarse.ends.append(len(coarse.blocks))
        coarse.n_tokens.append(n_tokens)
        coarse.times_s.append(0.0)
    fine = replay(trace, Job("arc", 240 // n, blocks_per_chunk=n, whole=True))
    assert fine.n_hit_tokens == replay(coarse, Job("arc", 240 // n)).n_hit_tokens > 0


def test_time_is_the_traces(trace: Trace) -> None:
    """Under a TTL of less than the time between two turns of a session nothing but the shared prompt is found."""
    endless = replay(trace, Job("lru", trace.n_unique))
    short, long = (replay(trace, Job(f"ttl({ttl_s}) > lru", trace.n_unique)) for ttl_s in (1.0, 1e6))
    assert short.n_hit_tokens == 0
    assert long.n_hit_tokens == endless.n_hit_tokens == endless_hit_tokens(trace)


def _stream(requests: Sequence[Sequence[int]]) -> Trace:
    trace = Trace(Header(1), n_unique=10)
    for blocks in requests:
        trace.blocks.extend(blocks)
        trace.ends.append(len(trace.blocks))
        trace.n_tokens.append(len(blocks))
        trace.times_s.append(0.0)
    return trace


def _most_hits(stream: Sequence[int], n_blocks: int) -> int:
    """By trying everything that could leave."""
    states = {frozenset[int](): 0}
    for block in stream:
        after: dict[frozenset[int], int] = {}
        for held, n_hits in states.items():
            grown = held | {block}
            kept = [grown] if len(grown) <= n_blocks else [grown - {gone} for gone in grown]
            for each in kept:
                after[each] = max(after.get(each, 0), n_hits + (block in held))
        states = after
    return max(states.values())


@given(st.lists(st.integers(0, 5), max_size=14), st.integers(1, 3))
def test_the_bound_is_the_best_there_is(stream: list[int], n_blocks: int) -> None:
    """For requests of one block no choice of victims hits more than MIN says, and one hits as much."""
    assert belady_hit_tokens(_stream([[block] for block in stream]), n_blocks) == _most_hits(stream, n_blocks)


@pytest.mark.parametrize("policy", ["lru", "mq", "arc", "2q", "s3fifo", "fifo", "lfu", "sieve", "leaf_first > fifo"])
def test_no_order_beats_the_bound(policy: str, trace: Trace) -> None:
    """At each capacity an order hits at most what MIN does, and with room for all exactly that."""
    for percent in (10, 40):
        n_blocks = trace.n_unique * percent // 100
        assert 0 < replay(trace, Job(policy, n_blocks)).n_hit_tokens <= belady_hit_tokens(trace, n_blocks)
    assert replay(trace, Job(policy, trace.n_unique)).n_hit_tokens == endless_hit_tokens(trace)


def test_demoting_hits_more_and_writes_no_more(trace: Trace) -> None:
    """Two levels hold different chunks under DEMOTE: more hits than CASCADE, without more writes."""
    memory, disk = trace.n_unique // 10, trace.n_unique * 2 // 5
    cascade, demote = (replay(trace, Job("lru", memory, disk, writes)) for writes in ("cascade", "demote"))
    assert demote.n_hit_tokens > cascade.n_hit_tokens > replay(trace, Job("lru", disk)).n_hit_tokens * 0.98
    assert 0 < demote.n_written <= cascade.n_written
    assert cascade.n_below_tokens > 0 and cascade.n_read > 0


PUBLISHED = {
    "lru": ((5.35, 19.96, 28.44, 35.21), 0.005),
    "arc": ((6.62, 21.43, 28.99, 32.64), 0.02),
    "s3fifo": ((6.89, 18.90, 22.87, 27.03), 0.02),
    "mq": ((6.3, 22.6, 30.0, 34.6), 0.5),
}
BEST = (25.12, 37.36, 37.36, 37.36)


@pytest.fixture(scope="module")
def mooncake(traces_dir: Path) -> Path:
    path = traces_dir / "mooncake_conversation.jsonl"
    if not path.exists():
        pytest.skip("TIERKV_TRACES has no mooncake_conversation.jsonl")
    return path


def test_one_capacity_of_a_recorded_trace(mooncake: Path) -> None:
    """On a recorded trace of conversations MIN and, at 5 % of the blocks, LRU are the published ones."""
    trace = read_traces("TRACE", [mooncake])
    assert (len(trace), trace.n_unique) == (12_031, 182_790)
    n_tokens = sum(trace.n_tokens)
    for percent, expected in zip((1, 5, 10, 20), BEST, strict=True):
        hit = belady_hit_tokens(trace, trace.n_unique * percent // 100)
        assert 100 * hit / n_tokens == pytest.approx(expected, abs=0.005)
    lru = replay(trace, Job("lru", trace.n_unique // 20))
    assert 100 * lru.n_hit_tokens / n_tokens == pytest.approx(19.96, abs=0.005)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_whole_of_a_recorded_trace(mooncake: Path) -> None:
    """The command prints the published table; in two levels demoting hits 36.0 %, cascading 35.2 with more writes."""
    arguments = ["--capacities", "1%,5%,10%,20%", "--policies", ",".join(PUBLISHED), "--disk", "20%", "--json"]
    command = [sys.executable, "-m", "tierkv.cli", "tune", str(mooncake), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1700)
    report = json.loads(run.stdout)
    assert report["min"] == pytest.approx(BEST, abs=0.005)
    for each in report["policies"]:
        expected, tolerance = PUBLISHED[each["policy"]]
        assert each["token_hit_percent"] == pytest.approx(expected, abs=tolerance), each["policy"]
    cascade, demote = (each for each in report["two_levels"] if each["policy"] == "lru")
    assert cascade["token_hit_percent"] == pytest.approx(35.2, abs=0.05)
    assert demote["token_hit_percent"] == pytest.approx(36.0, abs=0.1)
    assert demote["n_written"] <= cascade["n_written"]


# -- the command ------------------------------------------------------------------------------------------------------


def test_processes_count_what_one_counts(trace: Trace) -> None:
    """Spread over processes the results are the same, in the same order, and the progress adds up."""
    jobs = [Job(policy, n) for policy in ("lru", "ttl(9) > leaf_first > arc") for n in (30, 100, 300)]
    served: list[int] = []
    assert run_jobs(trace, jobs, 2, served.append) == run_jobs(trace, jobs, 1, lambda _: None)
    assert sum(served) == len(jobs) * len(trace)


def test_a_worker_that_dies_is_an_error(trace: Trace, tmp_path: Path) -> None:
    """A process that is gone in the middle of a replay ends the command in one sentence."""
    path = tmp_path / "trace"
    with path.open("wb") as file:
        save(trace, file)
    with _worker(str(path)) as worker:
        worker._process.kill()
        worker._process.wait()
        worker.send(Job("lru", 1))
        with pytest.raises(WorkerError, match="exit code -9"):
            list(worker.messages())


def test_the_command_ends_in_what_to_set(chat: Path) -> None:
    """Without any option but what its blocks are, it prints every table and ends in settings and their reasons."""
    run = run_tune(str(chat), "--tokens-per-block", str(TOKENS))
    assert run.returncode == 0, run.stderr
    assert not run.stderr
    for word in ("best", "s3fifo", "cascade", "demote", "blocks of the trace", "cpu_bytes_to_use", "- disk: "):
        assert word in run.stdout


def test_a_trace_may_come_through_a_pipe(chat: Path) -> None:
    """- is the standard input, and --json prints JSON and nothing else."""
    arguments = ["-", "--tokens-per-block", str(TOKENS), "--policies", "lru", "--capacities", "10%", "--json"]
    run = run_tune(*arguments, stdin=chat.read_text())
    assert json.loads(run.stdout)["trace"]["n_requests"] == 50
    assert not run.stderr


def test_its_settings_are_settings(chat: Path) -> None:
    """What it advises is taken by the parser of vLLM's configuration, and holds what it says."""
    report = report_of(chat, "--token-size", "112KiB", "--policies", "lru,mq", "--memory", "20%", "--disk", "60%")
    options = parse_options(report["settings"])
    n_memory, n_disk = (report["trace"]["n_unique_blocks"] * percent // 100 for percent in (20, 60))
    block_nbytes = 112 * 1024 * TOKENS
    assert report["trace"]["block_nbytes"] == block_nbytes
    assert n_memory * block_nbytes <= options.cpu_nbytes <= (n_memory + 31) * block_nbytes
    assert options.blocks_per_chunk and options.blocks_per_chunk % (TOKENS // 16) == 0
    assert options.tiers[0].capacity_nbytes and options.tiers[0].capacity_nbytes * 0.95 > n_disk * block_nbytes


def test_more_than_all_blocks_is_all_of_them(chat: Path) -> None:
    """A size far beyond the trace is replayed, and advised, as what the trace can fill."""
    sizes = ["--memory", "7EiB", "--disk", "7EiB", "--capacities", "7EiB", "--token-size", "1KiB"]
    report = report_of(chat, "--policies", "lru", *sizes)
    n_unique = report["trace"]["n_unique_blocks"]
    assert report["policies"][0]["token_hit_percent"] == [report["trace"]["endless_token_hit_percent"]]
    assert report["settings"]["cpu_bytes_to_use"] <= (n_unique + 31) * 1024 * TOKENS


def test_another_order_needs_a_reason() -> None:
    """LRU stays unless another is half a point better; orders that fail elsewhere are never advised."""
    assert choose_order({"lru": 20.0, "mq": 20.4, "lfu": 90.0}) == "lru"
    assert choose_order({"lru": 20.0, "mq": 22.6, "sieve": 90.0}) == "leaf_first > mq"
    assert choose_order({"lru": 20.0, "leaf_first > arc": 23.0}) == "leaf_first > arc"
    assert choose_order({"lfu": 3.0}) == "leaf_first > lfu"


@pytest.mark.parametrize(("read", "pays"), [("100GB", True), ("1MB", False)])
def test_whether_disk_pays_depends_on_its_speed(read: str, pays: bool, chat: Path) -> None:
    """Reading faster than computing pays, reading slower does not, and then no disk is advised."""
    sizes = ["--token-size", "100KB", "--prefill", "5000", "--policies", "lru", "--capacities", "60%"]
    report = report_of(chat, *sizes, "--read", read)
    assert report["disk"]["pays"] is pays
    assert ("secondary_tiers" in report["settings"]) is pays
    assert report["disk"]["prefill_s"] == pytest.approx(report["disk"]["gained_tokens"] / 5000)


def test_the_report_of_bench_says_how_fast_the_disk_is(chat: Path, tmp_path: Path) -> None:
    """--bench takes the speed that was measured with chunks of about the advised size, and the directory."""
    speeds = [TierSpeed("fs", 1 << 20, 1.0, 1.0), TierSpeed("fs", 1 << 24, 5e9, 4e9)]
    (tmp_path / "bench.json").write_text(BenchReport("fs", "/nvme/kv", speeds).to_json())
    arguments = ["--bench", str(tmp_path / "bench.json"), "--token-size", "112KiB", "--prefill", "5000"]
    report = report_of(chat, *arguments, "--policies", "lru", "--capacities", "60%")
    assert report["disk"]["read_s"] == pytest.approx(report["disk"]["read_nbytes"] / 5e9)
    assert report["disk"]["pays"] is True
    assert report["settings"]["secondary_tiers"][0]["root_dir"] == "/nvme/kv"


def test_the_report_of_a_device_is_not_taken_for_a_disk(chat: Path, tmp_path: Path) -> None:
    """Its speeds are others, and it names no directory."""
    (tmp_path / "bench.json").write_text(BenchReport("device", "cpu", [TierSpeed("device", 1, 1.0, 1.0)]).to_json())
    with pytest.raises(ConfigError, match=r"but must be what tierkv bench fs --json wrote, not bench device$"):
        report_of(chat, "--bench", str(tmp_path / "bench.json"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "--prefill and --token-size and --bench (or --read)"),
        (["--read", "1GB/s", "--prefill", "5000"], "--token-size"),
        (["--read", "1GB", "--token-size", "1KiB"], "--prefill"),
        (["--token-size", "1KiB"], "--prefill and --bench (or --read)"),
    ],
)
def test_what_is_left_out_is_named_and_nothing_else(given: list[str], said: str, chat: Path) -> None:
    """Whether disk pays takes three numbers: those that were not given are asked for."""
    report = report_of(chat, *given, "--policies", "lru", "--capacities", "60%")
    assert report["why"][-1].endswith(f"; whether that pays can be told with {said}")


def test_blocks_that_do_not_fit_the_engine_are_said(tmp_path: Path) -> None:
    """With a block of the engine that nobody named and that does not fit, the reasons say why there is no advice."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(LINE.replace("600", "40") for _ in range(3)))
    plan = ["tune", str(path), "--tokens-per-block", "24", "--jobs", "1", "--policies", "lru", "--capacities", "100%"]
    report = tune(plan_from(_parser().parse([*plan, "--memory", "100%"])))
    assert "blocks_per_chunk" not in report["settings"]
    assert any("blocks of 24 tokens are no multiple of 16" in why for why in report["why"])
    report = tune(plan_from(_parser().parse([*plan, "--memory", "100%", "--engine-block", "8"])))
    assert report["settings"]["blocks_per_chunk"] == 3


@pytest.mark.parametrize("name", ["curves.svg", "curves.html"])
def test_the_drawing_has_a_curve_for_each_order(name: str, chat: Path, tmp_path: Path) -> None:
    """Well-formed, one curve an order and the bound, the highest capacity's misses written beside them."""
    report = report_of(chat, "--policies", "lru,leaf_first > mq", "--capacities", "5%,20%,60%")
    draw(report, str(tmp_path / name))
    text = (tmp_path / name).read_text()
    svg = ET.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    lines = svg.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len((line.get("points") or "").split()) for line in lines] == [3, 3, 3]
    assert f"{100 - report['policies'][1]['token_hit_percent'][2]:.1f}" in text
    assert "leaf_first &gt; mq" in text


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_png_without_matplotlib_is_one_sentence(chat: Path) -> None:
    """What is missing is said before the work, with what to do instead."""
    with pytest.raises(ConfigError, match=r"as long as matplotlib is not installed .* nearest valid value: a.html"):
        report_of(chat, "--plot", "a.png")


def test_a_drawing_for_documents(chat: Path, tmp_path: Path) -> None:
    """With matplotlib, where it is installed, the same curves as PNG."""
    pytest.importorskip("matplotlib")
    draw(report_of(chat, "--policies", "lru", "--capacities", "5%,20%"), str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


# -- errors -----------------------------------------------------------------------------------------------------------

LINE = '{"timestamp": 5, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one request"),
        ("\n\n", "at least one request"),
        ('{"timestamp": 5, "input_length": 0, "hash_ids": []}\n', "at least one request"),
        (LINE + "{not json\n", "line 2 is no JSON"),
        (LINE + "[1]\n", "line 2 is no JSON object"),
        (LINE + LINE.replace("5", "4"), "line 2 has timestamp 4, earlier than 5"),
        (LINE.replace("5", "NaN"), "line 1 has timestamp NaN"),
        (LINE.replace("600", "-1"), "line 1 has input_length -1"),
        (LINE.replace("600", "true"), "line 1 has input_length true"),
        (LINE.replace("600", "6000"), "line 1 has 2 hash_ids for 6,000 tokens, but blocks of 512 tokens make 12"),
        (LINE.replace("[1, 2]", "7"), "line 1 has hash_ids 7"),
        (LINE.replace("[1, 2]", "[1, {}]"), "line 1 has the block id {}"),
        (LINE.replace("[1, 2]", "[" * 100_000), "line 1 is no JSON"),
        ('{"tierkv_trace": 2}\n', "line 1 has tierkv_trace 2, but this tierkv reads 1"),
        ('{"tierkv_trace": 1, "tokens_per_block": 0}\n', "line 1 has tokens_per_block 0"),
        (LINE + '{"tierkv_trace": 1, "tokens_per_block": 16}\n', "line 2 changes what a block is"),
        ("\x00\xff\xfe\n", "line 1 is no JSON"),
    ],
)
def test_what_is_no_trace_is_refused_by_its_line(text: str, message: str, tmp_path: Path) -> None:
    """Whatever is wrong with a trace: one sentence that names file and line."""
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_traces("TRACE", [path])
    assert message in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_torn_last_line_of_a_recorder_is_passed_over() -> None:
    """A trace that is being written may end in half a line; one of Mooncake's may not."""
    header = Header(512).to_line()
    torn = LINE.encode() + LINE.encode()[:30]
    assert len(read_traces("TRACE", [io.BytesIO(header + torn)])) == 1
    with pytest.raises(ConfigError, match="line 2 is no JSON"):
        read_traces("TRACE", [io.BytesIO(torn)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}"], "must be a file of requests that can be read: Is a directory"),
        (["{folder}/none"], "No such file"),
        (["{chat}", "--policies", "lru,leaf_frst > mq"], "nearest valid value: leaf_first"),
        (["{chat}", "--policies", ""], "--policies is ''"),
        (["{chat}", "--capacities", "0.001%"], "room for one of the trace's"),
        (["{chat}", "--capacities", "101%"], "up to 100%"),
        (["{chat}", "--capacities", "8GiB"], "--token-size does not say"),
        (["{chat}", "--memory", "1KiB", "--token-size", "1MiB"], "room for one of the trace's"),
        (["{chat}", "--disk", "ten"], "--disk is 'ten'"),
        (["{chat}", "--capacities", "many%"], "up to 100%; for example: 5%"),
        (["{chat}", "--jobs", "0"], "--jobs is 0, but must be a whole number from 1 to 256; nearest valid value: 1"),
        (["{chat}", "--jobs", "300"], "nearest valid value: 256"),
        (["{chat}", "--jobs", "half"], "--jobs is 'half', but must be a whole number from 1 to 256\n"),
        (["{chat}", "--prefill", "fast"], "--prefill is 'fast', but must be a number of prompt tokens a second"),
        (["{chat}", "--prefill", "0"], "--prefill is '0', but must be a number of prompt tokens a second, over 0"),
        (["{chat}", "--read", "0"], "--read is '0', but must be what the disk moves in a second, over 0; for example"),
        (["{chat}", "--write", "fast"], "--write is 'fast', but must be what the disk moves in a second"),
        (["{chat}", "--engine-block", "7"], "a divisor of the trace's 64 tokens a block; nearest valid value: 8"),
        (["{chat}", "--engine-block", "half"], "--engine-block is 'half', but must be a whole number"),
        (["{chat}", "--tokens-per-block", "half"], "--tokens-per-block is 'half', but must be a whole number"),
        (["{chat}", "--plot", "a.pdf"], ".svg, .png; nearest valid value: a.html"),
        (["{chat}", "--plot", "/none/a.svg"], "--plot is '/none/a.svg'"),
        (["{chat}", "--bench", "{chat}"], "--bench is "),
        (["{chat}", "--polices", "lru"], "there is no option '--polices'"),
    ],
)
def test_a_wrong_option_is_one_sentence(
    arguments: list[str], message: str, chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each wrong setting is refused before anything is replayed, in one sentence."""
    given = [each.format(folder=tmp_path, chat=chat) for each in arguments]
    with pytest.raises((ConfigError, SystemExit)) as caught:
        plan_from(_parser().parse(["tune", "--tokens-per-block", str(TOKENS), *given]))
    said = str(caught.value) if isinstance(caught.value, ConfigError) else capsys.readouterr().err
    assert message in f"{said}\n"
    assert len(said.strip().splitlines()) == 1


def test_an_error_is_the_last_word(tmp_path: Path) -> None:
    """As a user meets it: exit code 2, one line on the error output, nothing on the other."""
    run = run_tune(str(tmp_path))
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("tierkv tune: ") and len(run.stderr.splitlines()) == 1


PIECES = [
    '{"timestamp": 1,',
    '"input_length": 512,',
    '"hash_ids": [',
    "]",
    "}",
    "[",
    "1",
    ",",
    "1e999",
    "-",
    "NaN",
    '"',
    "\n",
]
PIECES += [
    "null",
    "tierkv_trace",
    "\x00",
    "9" * 30,
    LINE,
    LINE[:20],
    "{",
    '{"tierkv_trace": 1, "tokens_per_block": 512}\n',
]


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=12), st.binary(max_size=8))
def test_nonsense_is_never_a_traceback(pieces: list[str], tail: bytes) -> None:
    """Any bytes are a trace or are refused in one sentence."""
    refusal = ""
    n_requests = 0
    try:
        n_requests = len(read_traces("TRACE", [io.BytesIO("".join(pieces).encode() + tail)]))
    except ConfigError as error:
        refusal = str(error)
    assert bool(refusal) != bool(n_requests)
    assert "\n" not in refusal
