"""Miss-ratio curves: as SVG, alone or in a page, without any dependency; as PNG with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f")
_BEST = "#000000"
_WIDTH, _HEIGHT = 860, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 170, 46, 52
_LABEL_GAP = 15
_TITLE = "Prompt tokens not found, by what the level holds"
_X_LABEL = "capacity, percent of the trace's different blocks (logarithmic)"


class Curve(NamedTuple):
    """One order: percent of the blocks held, and percent of prompt tokens missed."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]


def draw(report: Mapping[str, Any], path: str) -> None:
    """Write the curves in the format that the file's name ends in. Raises OSError."""
    if path.endswith(".png"):
        _draw_png(report, path)
        return
    svg = to_svg(report)
    text = svg if path.endswith(".svg") else _page(report, svg)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def curves(report: Mapping[str, Any]) -> list[Curve]:
    """The best possible first, then the orders as they were asked for."""
    n_unique = report["trace"]["n_unique_blocks"]
    sizes = [100 * each["n_blocks"] / n_unique for each in report["capacities"]]
    rows = [("best", _BEST, report["min"])]
    for index, each in enumerate(report["policies"]):
        rows.append((each["policy"], _COLOURS[index % len(_COLOURS)], each["token_hit_percent"]))
    return [
        Curve(name, colour, [(x, 100 - y) for x, y in zip(sizes, hits, strict=True)]) for name, colour, hits in rows
    ]


class _Scale:
    """From values to pixels. The vertical axis begins at a round number below what an endless cache misses."""

    def __init__(self, lines: Sequence[Curve], least_miss: float) -> None:
        xs = [x for line in lines for x, _ in line.points]
        self.low, self.high = min(xs), max(xs)
        self.bottom = math.floor(least_miss / 10) * 10

    def x(self, value: float) -> float:
        span = math.log(self.high / self.low)
        part = math.log(value / self.low) / span if span else 0.5
        return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _TOP + (100 - value) / (100 - self.bottom) * (_HEIGHT - _TOP - _BOTTOM)


def to_svg(report: Mapping[str, Any]) -> str:
    """One drawing, each curve named at its right end and with its values as tooltips."""
    lines = curves(report)
    endless = 100 - report["trace"]["endless_token_hit_percent"]
    scale = _Scale(lines, min(endless, 90.0))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'font-family="sans-serif" font-size="12"><title>{_TITLE}</title>'
    )
    floor = (
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{scale.y(endless):.1f}" y2="{scale.y(endless):.1f}" '
        'stroke="#000000" stroke-dasharray="2 4"/>'
    )
    parts = [
        head,
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        _text(_LEFT, 24, _TITLE + " (%)", size=15),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, _X_LABEL, anchor="middle"),
        *_grid(report, scale),
        floor,
        _text(_LEFT + 6, scale.y(endless) - 5, f"endless cache: {endless:.1f}"),
    ]
    for line, label_y in zip(lines, _label_places(lines, scale), strict=True):
        parts += _curve(line, label_y, scale)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _grid(report: Mapping[str, Any], scale: _Scale) -> list[str]:
    parts = []
    for value in range(int(scale.bottom), 101, 10):
        y = scale.y(value)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e5e5"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{value}", anchor="end"))
    n_unique = report["trace"]["n_unique_blocks"]
    for each in report["capacities"]:
        x = scale.x(100 * each["n_blocks"] / n_unique)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" stroke="#f2f2f2"/>')
        parts.append(_text(x, _HEIGHT - _BOTTOM + 18, each["text"], anchor="middle"))
    return parts


def _curve(line: Curve, label_y: float, scale: _Scale) -> list[str]:
    places = [(scale.x(x), scale.y(y)) for x, y in line.points]
    dash = ' stroke-dasharray="6 3"' if line.colour == _BEST else ""
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline points="{way}" fill="none" stroke="{line.colour}" stroke-width="2"{dash}/>']
    for (x, y), (size, miss) in zip(places, line.points, strict=True):
        tip = f"{escape(line.name)}: {miss:.2f} % missed at {size:.2g} % of the blocks"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{line.colour}"><title>{tip}</title></circle>')
    end_x, end_y = places[-1]
    edge = _WIDTH - _RIGHT
    parts.append(
        f'<line x1="{end_x:.1f}" y1="{end_y:.1f}" x2="{edge + 14}" y2="{label_y:.1f}" stroke="{line.colour}" '
        'stroke-width="0.7"/>'
    )
    name = line.name if len(line.name) <= 22 else line.name[:21] + "…"
    parts.append(_text(edge + 18, label_y + 4, f"{name} {line.points[-1][1]:.1f}", colour=line.colour))
    return parts


def _label_places(lines: Sequence[Curve], scale: _Scale) -> list[float]:
    """Heights of the labels: at their curves' ends, but apart from each other."""
    order = sorted(range(len(lines)), key=lambda i: scale.y(lines[i].points[-1][1]))
    places = [0.0] * len(lines)
    lowest = float(_TOP - _LABEL_GAP)
    for index in order:
        lowest = places[index] = max(scale.y(lines[index].points[-1][1]), lowest + _LABEL_GAP)
    over = lowest - (_HEIGHT - 16)
    return [place - over for place in places] if over > 0 else places


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = "#333333") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{escape(text)}</text>'
    )


def _page(report: Mapping[str, Any], svg: str) -> str:
    trace = report["trace"]
    facts = (
        f"{trace['n_requests']:,} requests, {trace['n_tokens']:,} prompt tokens, {trace['n_unique_blocks']:,} blocks"
    )
    why = "\n".join(f"<li>{escape(sentence)}</li>" for sentence in report["why"])
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>tierkv tune</title>\n'
        '<body style="font-family: sans-serif; max-width: 900px; margin: 2em auto">\n'
        f"<p>{escape(', '.join(trace['files']))}: {facts}</p>\n{svg}<ul>\n{why}\n</ul>\n</body></html>\n"
    )


def _draw_png(report: Mapping[str, Any], path: str) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 - the extra plot  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(_WIDTH / 100, _HEIGHT / 100), layout="constrained")
    axes = figure.add_subplot()
    for line in curves(report):
        style = "--" if line.colour == _BEST else "-"
        axes.plot(*zip(*line.points, strict=True), style, marker="o", color=line.colour, label=line.name)
    axes.set_xscale("log")
    axes.set_xlabel(_X_LABEL)
    axes.set_ylabel("percent")
    axes.set_title(_TITLE)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
