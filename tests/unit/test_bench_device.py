"""``tierkv bench device``: on this machine's host memory, and its way through kinds of memory that only others have."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy", reason="devices need numpy")

from tests.patience import PATIENCE_S
from tierkv.cli import _bench_device
from tierkv.cli._bench_device import Measured, choose, measure, plan_from, report_of
from tierkv.cli._bench_report import BenchReport
from tierkv.cli._main import _parser
from tierkv.device import measure as device_measure
from tierkv.device.cpu import CpuRuntime
from tierkv.device.measure import Speeds
from tierkv.device.runtime import HostKind
from tierkv.errors import ConfigError, TierError

ROOT = Path(__file__).parents[2]
SMALL = ("--device", "cpu", "--chunks", "16KiB,64KiB", "--page", "4KiB", "--size", "256KiB", "--rounds", "2")
KIB = 1 << 10


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "tierkv.cli", "bench", "device", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip


def _plan(*arguments: str) -> _bench_device.DevicePlan:
    return plan_from(_parser().parse_args(["bench", "device", *(arguments or SMALL)]))


def _measure(plan: _bench_device.DevicePlan) -> list[Measured]:
    return measure(plan, lambda _: None, lambda _: None)


def test_it_measures_the_cpu_runtime_and_says_which_path_was_taken() -> None:
    """As a user runs it where no accelerator is: a row for each size, the path, and the size to take."""
    run = _run(*SMALL, "--block", "10KiB")
    assert run.returncode == 0, run.stdout + run.stderr
    assert sum(line.split()[:2] in (["16", "KiB"], ["64", "KiB"]) for line in run.stdout.splitlines()) == 2
    assert (
        "Copied by numpy rows; offered: pageable. In vLLM a private pool (CPUOffloadingSpec) is pageable" in run.stdout
    )
    assert '"blocks_per_chunk": ' in run.stdout


def test_its_json_is_what_tune_reads() -> None:
    """Nothing but the report on the standard output: a speed each way for every size of a chunk."""
    run = _run(*SMALL, "--json")
    assert run.returncode == 0, run.stderr
    report = BenchReport.from_json(run.stdout)
    assert report.what == "device"
    assert report.where == "cpu, pageable host memory, numpy rows"
    assert [(speed.name, speed.chunk_nbytes) for speed in report.tiers] == [("device", 16 * KIB), ("device", 64 * KIB)]
    for speed, one in zip(report.tiers, report.details["runs"], strict=True):
        assert speed.read_nbytes_per_s == one["nbytes_per_s"]["load"]
        assert speed.write_nbytes_per_s == one["nbytes_per_s"]["store"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--chunks", "100KB"], "--chunks is '97.7 KiB', but must be multiples of 4 KiB"),
        (["--page", "24KiB"], "must be a divisor of each of --chunks, such as of 64 KiB; nearest valid value"),
        (["--page", "0"], "--page is '0', but must be"),
        (["--rounds", "0"], "--rounds is 0, but must be a whole number from 1"),
        (
            ["--size", "1MiB"],
            "--size is '1MiB', but must be at least the largest of --chunks; nearest valid value: 8 M",
        ),
        (["--size", "7EiB"], "--size is "),
        (["--block", "0"], "--block is '0', but must be"),
    ],
)
def test_a_wrong_option_is_one_sentence(arguments: list[str], sentence: str) -> None:
    """Refused by name before any memory is taken."""
    with pytest.raises(ConfigError) as caught:
        _plan("--device", "cpu", *arguments)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["abacus", "cuda:99", "npu:0"])
def test_a_device_that_is_not_there_is_one_sentence(device: str) -> None:
    """No runtime for it, or no such device on this machine: exit code 1 or 2, and no traceback."""
    run = _run("--device", device, *SMALL[2:])
    assert run.returncode in (1, 2), run.stdout + run.stderr
    assert len(run.stderr.splitlines()) == 1, run.stderr
    assert run.stderr.startswith("tierkv bench device: ")


class Accelerator(CpuRuntime):
    """Host memory that claims to be a device which blocks on pageable memory; what it offers is the test's."""

    offers: frozenset[HostKind] = frozenset()
    blocks_on_pageable = True
    path = "a planted path"

    def alloc_host(self, nbytes: int, /) -> Any:
        if HostKind.PINNED not in self.offers:
            raise TierError("device", "no such memory")
        return super().alloc_host(nbytes)

    def pin(self, memory: Any, /) -> Any:
        return _Pin() if HostKind.REGISTERED in self.offers else None


class _Pin:
    def release(self) -> None:
        """Nothing was locked."""


@pytest.mark.parametrize("offers", [(), ("pinned",), ("registered",), ("pinned", "registered")])
def test_what_a_device_does_not_offer_is_left_out(monkeypatch: pytest.MonkeyPatch, offers: Sequence[str]) -> None:
    """Pinned, registered, staged and pageable, as offered; the first of them is what an engine uses."""
    monkeypatch.setattr(Accelerator, "offers", frozenset(map(HostKind, offers)))
    monkeypatch.setattr(device_measure, "open_runtime", lambda device: Accelerator())
    plan = _plan()
    measured = _measure(plan)
    expected = [*offers, *(["staged"] if "pinned" in offers else []), "pageable"]
    assert [(one.chunk_nbytes, one.kind) for one in measured] == [
        (size, kind) for size in (16 * KIB, 64 * KIB) for kind in expected
    ]
    assert choose(measured).kind == expected[0]
    path = "a planted path"
    assert report_of(plan, measured).where == f"cpu, {expected[0]} host memory, {path}"
    assert {one.path for one in measured if one.kind == "staged"} <= {f"{path}, staged through pinned memory"}
    assert len(report_of(plan, measured).tiers) == 2


def test_a_device_that_copies_wrong_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit that does not come back ends the run: a speed of wrong copies is none."""

    class Wrong(CpuRuntime):
        def copy_batch(self, batch: Any, /) -> None:
            batch.nbytes[-1] -= 1
            self.copy_plain(batch)

    monkeypatch.setattr(device_measure, "open_runtime", lambda device: Wrong())
    with pytest.raises(TierError, match="other bytes came back"):
        _measure(_plan())


def test_a_copy_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that raises is told in one sentence."""

    class Broken(CpuRuntime):
        def copy_batch(self, batch: Any, /) -> None:
            raise RuntimeError("planted")

    monkeypatch.setattr(device_measure, "open_runtime", lambda device: Broken())
    with pytest.raises(TierError, match="a copy failed: planted"):
        _measure(_plan())


def test_the_smallest_chunk_that_is_nearly_the_fastest_is_chosen() -> None:
    """Among the kind that is used: 80 % of its best both ways; else the largest."""

    def one(size: int, kind: str, store: float, load: float) -> Measured:
        return Measured(size, kind, "", Speeds(store, load), Speeds(1, 1), 1, 1)

    assert choose([one(1, "pinned", 79, 100), one(2, "pinned", 80, 99), one(4, "pinned", 100, 90)]).chunk_nbytes == 2
    assert choose([one(1, "pinned", 50, 50), one(1, "pageable", 100, 100)])[:2] == (1, "pinned")
    assert choose([one(1, "pinned", 100, 10), one(2, "pinned", 10, 100)]).chunk_nbytes == 2
