"""What the demo shows: a progress bar and a table of the levels while it runs, and plain lines where no terminal is."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tierkv.cli._console import Console
from tierkv.cli._demo_plan import Plan, Tally, Turn
from tierkv.sizes import format_size

_COLUMNS = ("tier", "limit", "holds", "chunks", "hits", "read", "written", "evicted")


class View:
    """Shows one run of the demo. Lines stay, the bar and the table are redrawn below them."""

    def __init__(self, plan: Plan) -> None:
        work = plan.workload
        self._console = Console(highlight=False)
        self._console.soft_wrap = not self._console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("turns"),
            TimeElapsedColumn(),
        )
        self._task = self._progress.add_task("starting", total=work.n_sessions * work.n_turns)
        self._levels: Sequence[dict[str, Any]] = ()
        self._tally = Tally()
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=8, transient=True)
        self._console.print(
            f"{work.n_sessions} sessions of {work.n_turns} turns, a system prompt of {work.n_system_tokens:,} tokens; "
            f"chunks of {plan.tokens_per_chunk} tokens, {format_size(plan.chunk_nbytes)} each"
        )
        sizes = f"host memory {format_size(plan.memory_nbytes)}, disk {format_size(plan.disk_nbytes)}"
        self._console.print(f"{sizes} in {plan.root_dir}")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        if self._levels:
            self._console.print(self._table())

    def phase(self, text: str) -> None:
        """What goes on from now on."""
        self._progress.update(self._task, description=text)
        if not self._console.is_terminal:
            self._console.print(f"... {text}")

    def turn(self, turn: Turn, tally: Tally) -> None:
        """A question was answered."""
        self._levels, self._tally = turn.levels, tally
        if not turn.keys:  # a question that is asked again after the restart is no progress
            self._progress.advance(self._task)

    def killed(self, pid: int, n_on_disk: int) -> None:
        self._console.print(f"worker {pid} was killed with SIGKILL; it had acknowledged {n_on_disk:,} chunks on disk")

    def opened(self, duration_s: float) -> None:
        self._console.print(f"a new worker opened the same directory in {duration_s * 1000:,.0f} ms")

    def restarted(self, tally: Tally) -> None:
        """All that was answered before the kill has been asked for again."""
        memory, disk = tally.by_level
        self._console.print(
            f"asked again: {tally.n_served:,} of {tally.n_tokens:,} tokens served; {disk:,} chunks came from disk, "
            f"{memory:,} from memory, where the first to ask had brought them"
        )

    def verdict(self, text: str, *, right: bool) -> None:
        self._console.print(text, style="bold green" if right else "bold red")

    def _render(self) -> Group:
        tally = self._tally
        words = (
            f"{tally.n_served:,} of {tally.n_tokens:,} tokens served from the cache; "
            f"{tally.n_chunks:,} chunks ({format_size(tally.nbytes)}) compared, {tally.n_wrong} wrong"
        )
        return Group(self._table(), words, self._progress)

    def _table(self) -> Table:
        table = Table(*_COLUMNS, box=SIMPLE_HEAD)
        for column in table.columns[1:]:
            column.justify = "right"
        for index, level in enumerate(self._levels):
            holds_nbytes = level["ready_nbytes"] + level["pending_nbytes"]
            table.add_row(
                level["name"],
                format_size(level["capacity_nbytes"]),
                format_size(holds_nbytes),
                f"{level['n_chunks']:,}",
                f"{level['n_hits']:,}",
                format_size(level["read_nbytes"]) if index else "",  # used in place
                format_size(level["written_nbytes"]) if index else "",
                f"{level['n_evicted']:,}",
            )
        return table
