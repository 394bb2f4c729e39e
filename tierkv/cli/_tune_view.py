"""What ``tierkv tune`` shows: a bar on the error output while it runs, then tables and what to set."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tierkv.cli._console import Console
from tierkv.sizes import format_size

_FILE_WIDTH = 140
"""Columns where the output goes to a file or a pipe."""


class View:
    """Shows one run."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(highlight=False, quiet=quiet)
        if not self._console.is_terminal:
            self._console.width = _FILE_WIDTH
        self._console.soft_wrap = not self._console.is_terminal
        errors = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("replaying"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
            console=errors, transient=True, disable=not errors.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def start(self, total: int) -> None:
        """So many requests are going to be served, over all replays."""
        self._progress.update(self._task, total=total)

    def advance(self, n: int) -> None:
        self._progress.advance(self._task, n)

    def show(self, report: Mapping[str, Any]) -> None:
        """The whole report."""
        say, trace = self._console.print, report["trace"]
        say(
            f"{trace['n_requests']:,} requests of {trace['n_tokens']:,} prompt tokens in {trace['duration_s']:,.0f} s; "
            f"{trace['n_unique_blocks']:,} different blocks of {trace['tokens_per_block']} tokens; "
            f"an endless cache hits {trace['endless_token_hit_percent']:.2f} % of the tokens"
        )
        say("\nPercent of prompt tokens found, by what the level holds; best: with knowledge of the future")
        say(self._orders(report, "token_hit_percent", best=report["min"]))
        say("Percent of blocks found, wherever in the prompt")
        say(self._orders(report, "block_hit_percent"))
        say("Two levels")
        say(_two_levels(report))
        say("Larger chunks in the same memory (only whole chunks are stored)")
        say(_chunks(report))
        say("What to set in kv_connector_extra_config")
        say(json.dumps(report["settings"], indent=4))
        for sentence in report["why"]:
            say(f"- {sentence}")

    def _orders(self, report: Mapping[str, Any], what: str, best: Any = None) -> Table:
        table = _table("order", *(each["text"] for each in report["capacities"]))
        if best is not None:
            table.add_row("best", *(f"{value:.2f}" for value in best))
        for each in report["policies"]:
            table.add_row(each["policy"], *(f"{value:.2f}" for value in each[what]))
        return table


def _two_levels(report: Mapping[str, Any]) -> Table:
    table = _table(
        "order", "memory", "disk", "writes", "tokens %", "from disk %", "chunks written", "bytes", "per 1,000"
    )
    for each in report["two_levels"]:
        nbytes = each["written_nbytes"]
        table.add_row(
            each["policy"], each["memory"], each["disk"], each["writes"], f"{each['token_hit_percent']:.2f}",
            f"{each['below_token_percent']:.2f}", f"{each['n_written']:,}",
            "" if nbytes is None else format_size(nbytes), f"{each['written_per_1000_blocks']:.1f}",
        )  # fmt: skip
    return table


def _chunks(report: Mapping[str, Any]) -> Table:
    table = _table("blocks of the trace", *(str(each["blocks_per_chunk"]) for each in report["chunks"]))
    table.add_row("tokens %", *(f"{each['token_hit_percent']:.2f}" for each in report["chunks"]))
    return table


def _table(*columns: str) -> Table:
    table = Table(*columns, box=SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    return table
