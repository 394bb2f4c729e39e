"""``tierkv bench fs``: what it measures, what it says, and that it leaves a disk as it found it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tierkv.cli import _bench_fs
from tierkv.cli._bench import fs_plan_from, fs_report
from tierkv.cli._bench_fs import bench_folder, measure
from tierkv.cli._bench_plan import BenchError, Cell, Choice, FSPlan, Measured, Round, Speeds, choose, summary
from tierkv.cli._bench_report import BenchReport
from tierkv.cli._main import _parser
from tierkv.errors import ConfigError
from tierkv.tiers.fs import FSTier
from tierkv.types import Chunk, Outcome, Status

ROOT = Path(__file__).parents[2]
SMALL = ("--chunks", "16KiB,64KiB", "--threads", "1,2", "--size", "256KiB", "--rounds", "2")
KIB = 1 << 10


def _command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-W", "error", "-m", "tierkv.cli", "bench", "fs", str(folder), *arguments]


def _plan(folder: Path, *arguments: str) -> FSPlan:
    return fs_plan_from(_parser().parse_args(["bench", "fs", str(folder), *(arguments or SMALL)]))


def _measure(plan: FSPlan) -> list[Measured]:
    return measure(plan, lambda _: None, lambda _: None)


def test_it_ends_in_values_to_set_and_leaves_the_directory_as_it_was(tmp_path: Path) -> None:
    """As a user runs it: a row for each cell, JSON for vLLM at the end, and nothing of it left."""
    (tmp_path / "foreign").write_text("mine")
    run = subprocess.run(
        _command(Path(os.path.relpath(tmp_path)), *SMALL, "--block", "10KiB"),
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    settings = json.loads(run.stdout[run.stdout.index("\n{") :])
    assert settings["blocks_per_chunk"] in (2, 7), "the chosen chunk over the block, rounded up"
    (tier,) = settings["secondary_tiers"]
    assert tier["root_dir"] == str(tmp_path)
    assert {tier["n_read_threads"], tier["n_write_threads"]} <= {1, 2}
    assert sum(line.split()[:2] in (["16", "KiB"], ["64", "KiB"]) for line in run.stdout.splitlines()) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["foreign"]


def test_its_json_is_what_tune_reads(tmp_path: Path) -> None:
    """Nothing but the report on the standard output: a speed each way for every size, and every measurement."""
    run = subprocess.run(
        _command(tmp_path, *SMALL, "--json"),
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    report = BenchReport.from_json(run.stdout)
    assert [(speed.name, speed.chunk_nbytes) for speed in report.tiers] == [("fs", 16 * KIB), ("fs", 64 * KIB)]
    assert [(cell["chunk_nbytes"], cell["n_threads"]) for cell in report.details["runs"]] == [
        (16 * KIB, 1), (16 * KIB, 2), (64 * KIB, 1), (64 * KIB, 2),
    ]  # fmt: skip
    tier = report.settings["secondary_tiers"][0]
    for speed in report.tiers:
        of_threads = {
            one["n_threads"]: one["tier_nbytes_per_s"]
            for one in report.details["runs"]
            if one["chunk_nbytes"] == speed.chunk_nbytes
        }
        assert speed.read_nbytes_per_s == of_threads[tier["n_read_threads"]]["read"]
        assert speed.write_nbytes_per_s == of_threads[tier["n_write_threads"]]["write"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--chunks", "100KB"], "--chunks is '97.7 KiB', but must be multiples of 4 KiB, as direct I/O needs; nearest"),
        (["--chunks", "0"], "--chunks is '0', but must be"),
        (["--chunks", "64KiB,"], "--chunks is '', but must be"),
        (["--chunks", "64 parsecs"], "--chunks is '64 parsecs', but must be"),
        (["--threads", "0"], "--threads is 0, but must be a whole number from 1 to 256; nearest valid value: 1"),
        (["--threads", "1,many"], "--threads is 'many', but must be a whole number from 1 to 256"),
        (["--threads", ",".join("1" * 17)], "but must be at most 16 values"),
        (["--rounds", "0"], "--rounds is 0, but must be a whole number from 1"),
        (
            ["--size", "1MiB"],
            "--size is '1MiB', but must be at least the largest of --chunks; nearest valid value: 8 M",
        ),
        (["--size", "7EiB"], "--size is '7 EiB', but must be so small that the most there is at one time ("),
        (["--block", "0"], "--block is '0', but must be"),
    ],
)
def test_a_wrong_option_is_one_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    """Refused by name, with nothing created."""
    with pytest.raises(ConfigError) as caught:
        _plan(tmp_path, *arguments)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["absent", "file", "link"])
def test_what_is_no_directory_is_refused(tmp_path: Path, kind: str) -> None:
    """An absent path, a file, a link that leads nowhere: one sentence."""
    path = tmp_path / kind
    if kind == "file":
        path.write_text("")
    elif kind == "link":
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"DIR is '.*', but must be a directory that is there"):
        _plan(path)


def test_more_than_the_disk_has_is_refused_with_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak and free space are named, and the size named as the nearest is accepted; a reserve is left free."""
    monkeypatch.setattr(_bench_fs, "_spare_nbytes", lambda path: 40 << 20)
    arguments = ("--chunks", "64KiB,1MiB", "--threads", "1")
    with pytest.raises(ConfigError, match="fits into the 40 MiB that are free") as caught:
        _plan(tmp_path, *arguments, "--size", "100MiB")
    nearest = str(caught.value).partition("nearest valid value: ")[2]
    assert nearest == "32 MiB"
    assert _plan(tmp_path, *arguments, "--size", nearest).peak_nbytes <= 40 << 20


def test_threads_that_need_more_than_the_disk_has_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has a chunk at least: that counts even if --size itself would fit."""
    monkeypatch.setattr(_bench_fs, "_spare_nbytes", lambda path: 100 << 20)
    with pytest.raises(ConfigError, match=r"\(.*with --chunks times --threads at least\)"):
        _plan(tmp_path, "--chunks", "8MiB", "--threads", "64", "--size", "8MiB")


def test_a_disk_that_fills_up_meanwhile_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else takes the space: it stops before it writes on, and removes what it wrote."""
    plan = _plan(tmp_path)
    spare = iter([plan.peak_nbytes, 0])
    monkeypatch.setattr(_bench_fs, "_spare_nbytes", lambda path: next(spare))
    with pytest.raises(BenchError, match="somebody else is filling the disk"):
        _measure(plan)
    assert not list(tmp_path.iterdir())


def test_a_plan_never_has_more_on_disk_than_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in the directory after each batch of the tier's writes is within the plan's peak."""
    plan = _plan(tmp_path)
    seen: list[int] = []
    write = FSTier.write

    async def counted(tier: FSTier, items: Any) -> Any:
        outcomes = await write(tier, items)
        files = (path for path in tmp_path.rglob("*") if path.is_file())
        seen.append(sum(-(-path.stat().st_size // 4096) * 4096 for path in files))
        return outcomes

    monkeypatch.setattr(FSTier, "write", counted)
    _measure(plan)
    assert len(seen) == len(plan.cells) * plan.n_rounds
    assert plan.size_nbytes < max(seen) <= plan.peak_nbytes


@pytest.mark.parametrize("which", ["write", "read"])
def test_a_chunk_that_fails_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """A tier that refuses a chunk, or does not find it again, ends the run in one sentence, and all is removed."""

    async def refuse(tier: FSTier, items: Sequence[tuple[Any, memoryview]]) -> list[Outcome]:
        keys = [item[0].key if isinstance(item[0], Chunk) else item[0] for item in items]
        return [Outcome(key, Status.OK) for key in keys[1:]] + [Outcome(keys[0], Status.MISSING)]

    plan = _plan(tmp_path)
    monkeypatch.setattr(FSTier, which, refuse)
    with pytest.raises(BenchError, match=f"1 of 16 chunks did not {'store' if which == 'write' else 'load'}: missing"):
        _measure(plan)
    assert not list(tmp_path.iterdir())


def test_it_is_the_tier_that_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that takes half a second longer to read shows it in its speed, and in its part of plain files."""
    read = FSTier.read

    async def slow(tier: FSTier, items: Any) -> Any:
        time.sleep(0.5)  # noqa: ASYNC251 - the cost that is to be seen; nothing waits on it
        return await read(tier, items)

    monkeypatch.setattr(FSTier, "read", slow)
    (one,) = _measure(_plan(tmp_path, "--chunks", "64KiB", "--threads", "1", "--size", "256KiB", "--rounds", "1"))
    assert one.tier.read <= 256 * KIB / 0.5
    assert one.read_part == pytest.approx(one.tier.read / (one.direct or one.buffered).read)


def test_without_direct_io_it_compares_with_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report says that there is none, and the parts are of buffered files."""
    monkeypatch.setattr(_bench_fs, "works_direct", lambda folder: False)
    plan = _plan(tmp_path, "--chunks", "64KiB", "--threads", "2", "--size", "256KiB", "--rounds", "1")
    (one,) = _measure(plan)
    assert one.direct is None
    assert one.write_part == pytest.approx(one.tier.write / one.buffered.write)
    assert fs_report(plan, [one]).details["direct"] is False


@pytest.mark.parametrize("where", ["full", "gone"])
def test_output_that_nobody_takes_is_no_traceback(tmp_path: Path, where: str) -> None:
    """A full disk behind the report is one sentence and a 1, a reader that has gone none and a 141; all is removed."""
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "wb") as full:
        run = subprocess.run(
            _command(tmp_path, *SMALL, "--json"),
            env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=full if where == "full" else writing,
            stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    os.close(writing)
    said = [line for line in run.stderr.splitlines() if not line.startswith("... ")]
    assert run.returncode == (1 if where == "full" else 141)
    full_disk = "tierkv bench fs: standard output cannot be written: No space left on device"
    assert said == ([full_disk] if where == "full" else [])
    assert not list(tmp_path.iterdir())


def test_a_stopped_run_removes_what_it_wrote(tmp_path: Path) -> None:
    """SIGTERM in the middle of it: exit code 130, one sentence, an empty directory."""
    with subprocess.Popen(
        _command(tmp_path, *SMALL, "--rounds", "1000"),
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert process.stderr.readline().startswith("... ")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "tierkv bench fs: interrupted", errors
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_is_removed_by_the_next_and_nothing_else(tmp_path: Path) -> None:
    """A marked directory that nobody holds goes; one that a run holds, one without a mark, and a link stay."""
    for name in ("tierkv-bench-left", "tierkv-bench-held", "tierkv-bench-foreign"):
        (tmp_path / name).mkdir()
        if name != "tierkv-bench-foreign":
            (tmp_path / name / "tierkv-bench.lock").touch()
    (tmp_path / "tierkv-bench-link").symlink_to(tmp_path / "tierkv-bench-left")
    with open(tmp_path / "tierkv-bench-held" / "tierkv-bench.lock", "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with bench_folder(str(tmp_path)) as folder:
            names = {path.name for path in tmp_path.iterdir()}
            with bench_folder(str(tmp_path)):
                assert os.path.isdir(folder), "a run that lives is not a leftover"
    kept = {"tierkv-bench-held", "tierkv-bench-foreign", "tierkv-bench-link"}
    assert names == kept | {os.path.basename(folder)}
    assert {path.name for path in tmp_path.iterdir()} == kept


def _measured(speeds: dict[tuple[int, int], tuple[float, float]]) -> list[Measured]:
    return [
        Measured(Cell(*cell), Speeds(write, read), None, Speeds(1, 1), 1, 1) for cell, (write, read) in speeds.items()
    ]


@pytest.mark.parametrize(
    ("speeds", "choice"),
    [
        ({(1, 1): (100, 100)}, Choice(1, 1, 1)),
        ({(1, 1): (79, 100), (2, 1): (100, 100)}, Choice(2, 1, 1)),
        ({(1, 1): (80, 80), (2, 1): (100, 100)}, Choice(1, 1, 1)),
        ({(1, 1): (10, 100), (1, 4): (100, 96), (2, 1): (50, 50), (2, 4): (60, 60)}, Choice(1, 1, 4)),
        ({(1, 1): (100, 94), (1, 4): (100, 100), (1, 16): (101, 101)}, Choice(1, 4, 1)),
        ({(1, 1): (100, 10), (2, 1): (10, 100), (4, 1): (50, 50)}, Choice(4, 1, 1)),
    ],
)
def test_the_smallest_chunk_and_the_fewest_threads_that_do_are_chosen(
    speeds: dict[tuple[int, int], tuple[float, float]], choice: Choice
) -> None:
    """80 % of the best speed both ways for the chunk (else the largest), 95 % for the threads of each way."""
    assert choose(_measured(speeds)) == choice


def test_a_ratio_is_taken_round_by_round() -> None:
    """A disk that halves its speed between rounds halves everybody's, and the ratio stays."""
    rounds = [Round(Speeds(50 * f, 80 * f), Speeds(100 * f, 100 * f), Speeds(1, 1)) for f in (1, 0.5, 0.25)]
    one = summary(Cell(1, 1), rounds)
    assert (one.write_part, one.read_part) == (0.5, 0.8)
    assert one.tier == Speeds(25, 40)
