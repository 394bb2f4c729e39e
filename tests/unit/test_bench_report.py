"""The file between ``tierkv bench`` and ``tierkv tune``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tierkv.cli._bench_report import BenchReport, TierSpeed
from tierkv.errors import ConfigError

REPORT = BenchReport(
    what="fs",
    where="/nvme/kv",
    tiers=[TierSpeed("fs", 65_536, 1.5e9, 0.5e9), TierSpeed("fs", 1 << 20, 3e9, 1e9)],
    settings={"n_read_threads": 8},
    details={"runs": [{"chunk_nbytes": 65_536}]},
)


def test_a_report_comes_back_as_it_was_written(tmp_path: Path) -> None:
    """Written, read from a file, equal."""
    path = tmp_path / "bench.json"
    path.write_text(REPORT.to_json())
    assert BenchReport.load("--bench", path) == REPORT


def test_keys_that_a_later_version_adds_are_ignored() -> None:
    """A reader lives with what it does not know, at every depth."""
    data = json.loads(REPORT.to_json())
    data["new"] = 1
    data["tiers"][0]["latency_s"] = 0.1
    assert BenchReport.from_json(json.dumps(data)) == REPORT


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tierkv_bench": 2}, "of version 2, but this tierkv reads 1"),
        ({"tiers": {}}, "'tiers' is not a list"),
        ({"tiers": ["fs"]}, "tiers[0] is not an object"),
        ({"tiers": [{"name": ""}]}, "tiers[0].name is ''"),
        ({"tiers": [{"name": "fs", "chunk_nbytes": True}]}, "tiers[0].chunk_nbytes is True"),
        ({"tiers": [{"name": "fs", "chunk_nbytes": 1, "read_nbytes_per_s": 0}]}, "read_nbytes_per_s is 0"),
        (
            {"tiers": [{"name": "fs", "chunk_nbytes": 1, "read_nbytes_per_s": 1, "write_nbytes_per_s": "1"}]},
            "write_nbytes_per_s is '1'",
        ),
    ],
)
def test_what_is_no_report_is_refused_in_one_sentence(tmp_path: Path, change: dict[str, object], why: str) -> None:
    """The sentence names the option, the file and what is wrong in it."""
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(json.loads(REPORT.to_json()) | change))
    with pytest.raises(ConfigError, match=r"--bench is '.*bench\.json', but must be what --json wrote") as caught:
        BenchReport.load("--bench", path)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"[]", b"\xff"])
def test_no_file_and_no_json_are_refused_alike(tmp_path: Path, content: bytes | None) -> None:
    """A file that is absent, empty, something else, or not text."""
    path = tmp_path / "bench.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="but must be what --json wrote"):
        BenchReport.load("--bench", path)
