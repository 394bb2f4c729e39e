"""The tables and the chart of the documentation's page about speed, from the JSON of a run.

``python -m tests.bench.report RESULT.json FOLDER`` writes ``tables.txt`` and ``chart.svg`` there. What the page says
about them is written by hand; no figure of it is.
"""

from __future__ import annotations

import html
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.pairs import Row, spread

TITLES = {
    "scheduler": "The scheduler's half",
    "steps": "A step beside a saturated disk",
    "disk": "The disk",
    "device": "The device tier on host memory",
    "engine": "End to end, vLLM on CPU",
    "index": "The index",
}
BAR, LEFT, WIDTH, TOP = 18, 520, 960, 34
LEAST, MOST = 0.25, 16.0


def main() -> None:
    report, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for part in report["parts"].values() for row in map(_row, part["rows"])]
    (folder / "tables.txt").write_text("\n".join(tables(report)) + "\n")
    (folder / "chart.svg").write_text(chart([row for row in rows if row.must is not None and row.ratio is not None]))


def tables(report: dict[str, Any]) -> list[str]:
    made = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items() if version)
    lines = [
        f"Run of {made['when']} on {made['n_cpus']} processors ({made['cpu']}), {made['memory_gib']} GiB, Linux "
        f"{made['kernel']}, Python {made['python']}, {versions}."
        + (" **A quick run: small sizes, three pairs.**" if report["quick"] else ""),
        "",
    ]
    held = [row for part in report["parts"].values() for row in map(_row, part["rows"]) if row.reached is not None]
    n_reached = sum(bool(row.reached) for row in held)
    lines += [f"{n_reached} of {len(held)} figures that have to reach something do.", ""]
    for name, part in report["parts"].items():
        lines += [f"### {TITLES[name]}", ""]
        ended = "" if part["ended"] == "whole" else f" **This part {part['ended']}.**"
        lines += [f"Load before {part['load_before']}, after {part['load_after']}; {part['took_s']:.0f} s.{ended}", ""]
        rows = list(map(_row, part["rows"]))
        if rows:
            lines += ["| what | tierkv | peer | times as good (quartiles) | must |", "|---|---|---|---|---|"]
            lines += [_line(row) for row in rows]
        lines.append("")
    return lines


def _row(saved: dict[str, Any]) -> Row:
    return Row(**saved)


def _line(row: Row) -> str:
    ours = f"{statistics.median(row.ours):.3g} {row.unit}"
    peer = ratio = ""
    if row.ratio is not None:
        low, high = spread(row.ratios)
        peer = f"{statistics.median(row.peer):.3g}, {row.peer_name}"
        ratio = f"{row.ratio:.2f} ({low:.2f} to {high:.2f})"
    must = ""
    if row.must is not None:
        bound = "at least" if row.ratio is not None or row.higher_is_better else "at most"
        must = f"{bound} {row.must:,g}: {'reached' if row.reached else '**not reached**'}"
    what = row.what + (f" [{row.note}]" if row.note else "")
    return f"| {what} | {ours} | {peer} | {ratio} | {must} |"


def chart(rows: Sequence[Row]) -> str:
    """One bar a row on a logarithmic axis, quartiles as a line, what must be reached as a tick."""
    height = TOP + BAR * len(rows) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
        "<style>text { font: 11px sans-serif }</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for tick in (0.25, 0.5, 1, 2, 4, 8, 16):
        x = _x(tick)
        colour = "#444" if tick == 1 else "#ddd"
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{height - 6}" stroke="{colour}"/>')
        parts.append(f'<text x="{x:.1f}" y="{TOP - 14}" text-anchor="middle" fill="#222">{tick:g} x</text>')
    for number, row in enumerate(rows):
        parts += _bar(row, TOP + BAR * number)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(row: Row, y: int) -> list[str]:
    assert row.ratio is not None and row.must is not None
    low, high = spread(row.ratios)
    middle, one, end, must = y + BAR / 2, _x(1), _x(row.ratio), _x(row.must)
    name = html.escape(f"{row.bench}: {row.what}, by {row.peer_name}")
    colour = "#3a7d44" if row.reached else "#b5452c"
    return [
        f'<text x="{LEFT - 8}" y="{middle + 4:.1f}" text-anchor="end" fill="#222">{name}</text>',
        f'<text x="{WIDTH - 4}" y="{middle + 4:.1f}" text-anchor="end" fill="#222">{row.ratio:.2f}</text>',
        f'<rect x="{min(one, end):.1f}" y="{y + 4}" width="{abs(end - one):.1f}" height="{BAR - 8}" fill="{colour}"/>',
        f'<line x1="{_x(low):.1f}" y1="{middle}" x2="{_x(high):.1f}" y2="{middle}" stroke="#111"/>',
        f'<line x1="{must:.1f}" y1="{y + 1}" x2="{must:.1f}" y2="{y + BAR - 1}" stroke="#1f4e9c" stroke-width="2"/>',
    ]


def _x(ratio: float) -> float:
    part = math.log(min(max(ratio, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
    return LEFT + part * (WIDTH - LEFT - 50)


if __name__ == "__main__":
    main()
