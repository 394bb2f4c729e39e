"""The arithmetic of the benches: which way a ratio goes, what counts as reached, and a page of any run."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.bench import report
from tests.bench.pairs import Row, alternate, as_json, machine, table
from tests.gate import hold

FASTER = Row("disk", "a speed", "GB/s", [2.0, 3.0, 8.0], [1.0, 1.0, 2.0], "theirs", must=3.0)
CHEAPER = Row("index", "a cost", "us", [1.0, 1.0], [4.0, 2.0], "theirs", higher_is_better=False, must=3.5)


def test_a_ratio_says_how_many_times_as_good_whatever_the_unit():
    """Speeds are ours by theirs, costs theirs by ours, pair by pair; the median is compared with what must be."""
    assert FASTER.ratios == [2.0, 3.0, 4.0] and FASTER.ratio == 3.0 and FASTER.reached is True
    assert CHEAPER.ratios == [4.0, 2.0] and CHEAPER.ratio == 3.0 and CHEAPER.reached is False


@pytest.mark.parametrize(
    ("higher", "must", "reached"), [(True, 5, True), (True, 6, False), (False, 5, True), (False, 4, False)]
)
def test_a_figure_without_a_peer_is_held_to_a_bound(higher, must, reached):
    """Not under it where more is better, else not over it."""
    row = Row("index", "a figure", "s", [5.0], higher_is_better=higher, must=must)
    assert row.ratio is None and row.reached is reached
    assert Row("index", "told", "s", [5.0]).reached is None


def test_sides_take_turns_and_change_who_is_first():
    """Each pair has both once; the first of a pair is the other one each time."""
    order: list[str] = []

    def side(name: str, value: float) -> float:
        order.append(name)
        return value

    ours, peer = alternate(lambda: side("ours", 1.0), lambda: side("peer", 2.0), 3)
    assert (ours, peer) == ([1.0] * 3, [2.0] * 3)
    assert order == ["peer", "ours", "ours", "peer", "peer", "ours"]


@pytest.mark.parametrize(("found", "holds"), [([3, 1], True), ([3, 2, 2, 2, 1.4], True), ([1.6] * 5, False)])
def test_a_gate_opens_once_it_held_and_stays_shut_for_what_never_did(found: list[float], holds: bool):
    """Two ratios may hold in different tries; what is above its limit in all five fails, and nobody asks once more."""
    tries = [{"spoilt once": 1.0 if i else 9.0, "measured": ratio} for i, ratio in enumerate(found)]
    left = iter(tries)
    with nullcontext() if holds else pytest.raises(pytest.fail.Exception, match="in each of 5 tries"):
        hold(lambda: next(left), {"spoilt once": 1.0, "measured": 1.5})
    assert not list(left)


def test_a_page_says_what_was_not_reached_and_what_ended_early(tmp_path: Path, monkeypatch):
    """Every row is in the tables, a chart is an image of the rows that must reach something, names are escaped."""
    odd = Row("disk", "a <b> & c", "GB/s", [1.0], [9.0], "theirs", must=1.0)
    parts = {
        "disk": {"load_before": 1.0, "load_after": 2.0, "took_s": 3.0, "ended": "ended early (out of time)",
                 "rows": [as_json(FASTER), as_json(odd)]},
        "index": {"load_before": 1.0, "load_after": 2.0, "took_s": 3.0, "ended": "whole", "rows": [as_json(CHEAPER)]},
    }  # fmt: skip
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"machine": machine(), "quick": True, "parts": parts}))
    monkeypatch.setattr(sys, "argv", ["report", str(result), str(tmp_path / "made")])
    report.main()
    told = (tmp_path / "made" / "tables.txt").read_text()
    assert told.count("| a ") == 3 and told.count("**not reached**") == 2 and told.count(": reached") == 1
    assert "1 of 3 figures" in told
    assert "This part ended early (out of time)" in told and "A quick run" in told
    image = ET.fromstring((tmp_path / "made" / "chart.svg").read_text())
    bars = [one for one in image.iter("{http://www.w3.org/2000/svg}rect") if "x" in one.attrib]
    assert [bar.get("fill") for bar in bars] == ["#3a7d44", "#b5452c", "#b5452c"]
    assert float(bars[0].get("width", "0")) > 0


def test_a_table_for_people_has_a_line_a_row():
    """With verdicts, and with rows that have no peer."""
    lines = table([FASTER, CHEAPER, Row("index", "alone", "s", [1.0])]).splitlines()
    assert len(lines) == 3 and "reached" in lines[0] and "NOT REACHED" in lines[1]
