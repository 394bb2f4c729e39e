"""What ``tierkv bench`` shows: progress on the error output, tables and advice on the other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tierkv.cli._bench_device import N_KINDS, DevicePlan
from tierkv.cli._bench_device import Measured as DeviceMeasured
from tierkv.cli._bench_plan import CHUNK_PART, THREADS_PART, Cell, Choice, FSPlan, Measured, Speeds
from tierkv.cli._console import Console
from tierkv.cli._words import counted
from tierkv.sizes import format_size


class ProgressView:
    """A bar on the error output while a plan runs; a line for each step where that is no terminal."""

    def __init__(self, n_steps: int, *, quiet: bool) -> None:
        self.console = Console(highlight=False, quiet=quiet)
        self.console.soft_wrap = not self.console.is_terminal
        self._errors = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=self._errors, transient=True, disable=not self._errors.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task("starting", total=n_steps)
        self._n_begun = 0
        self._told = ""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, text: str) -> None:
        """A step begins; the one before has ended."""
        self._progress.update(self._task, description=text, completed=self._n_begun)
        self._n_begun += 1
        if text != self._told and not self._errors.is_terminal:
            self._errors.print(f"... {text}")
        self._told = text


class FSView(ProgressView):
    """Shows one run of ``tierkv bench fs``."""

    def __init__(self, plan: FSPlan, *, quiet: bool) -> None:
        super().__init__(len(plan.cells) * plan.n_rounds, quiet=quiet)
        self._plan = plan
        self._results: list[Measured] = []
        self.console.print(
            f"{plan.root}: at most {format_size(plan.payload_nbytes)} a measurement, "
            f"{counted(plan.n_rounds, 'round')}; GB/s of 10^9 bytes; x is the tier's part of plain files in the same "
            "round"
        )

    def step(self, cell: Cell) -> None:
        self.begin(f"chunks of {format_size(cell.chunk_nbytes)}, threads: {cell.n_threads}")

    def measured(self, result: Measured) -> None:
        self._results.append(result)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if self._results:
            self.console.print(self._table())

    def advice(self, measured: Sequence[Measured], choice: Choice, settings: str) -> None:
        """What follows from the table."""
        if measured[0].direct is None:
            self.console.print("No direct I/O here: chunks go through the page cache; the times include syncing them.")
        chunk = format_size(choice.chunk_nbytes)
        self.console.print(
            f"Chunks of {chunk} are the smallest with {CHUNK_PART:.0%} of the best speed; for them n_read_threads "
            f"{choice.n_read_threads} and n_write_threads {choice.n_write_threads} are the least with "
            f"{THREADS_PART:.0%} of it."
        )
        if self._plan.block_nbytes is None:
            self.console.print(
                f"blocks_per_chunk is {chunk} divided by the bytes of one KV block in all layers, rounded up; --block "
                "tells them to this command."
            )
        self.console.print("In vLLM's kv_connector_extra_config:")
        self.console.print(settings, markup=False)

    def _table(self) -> Table:
        table = Table(box=SIMPLE_HEAD)
        for name in ("chunk", "threads", "store", "x", "load", "x", "direct w/r", "buffered w/r"):
            table.add_column(name, justify="right", no_wrap=True)
        for one in self._results:
            table.add_row(
                format_size(one.cell.chunk_nbytes),
                str(one.cell.n_threads),
                gb_per_s(one.tier.write),
                f"{one.write_part:.2f}",
                gb_per_s(one.tier.read),
                f"{one.read_part:.2f}",
                "-" if one.direct is None else _both(one.direct),
                _both(one.buffered),
            )
        return table


class DeviceView(ProgressView):
    """Shows one run of ``tierkv bench device``."""

    def __init__(self, plan: DevicePlan, *, quiet: bool) -> None:
        super().__init__(N_KINDS * len(plan.chunks_nbytes), quiet=quiet)
        self._results: list[DeviceMeasured] = []
        self.console.print(
            f"{plan.device}: {format_size(plan.size_nbytes)} a measurement, pages of {format_size(plan.page_nbytes)}, "
            f"{counted(plan.n_rounds, 'round')}; GB/s of 10^9 bytes; x is the part of one plain copy in the same round"
        )

    def measured(self, result: DeviceMeasured) -> None:
        self._results.append(result)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if self._results:
            self.console.print(self._table())

    def advice(self, measured: Sequence[DeviceMeasured], choice: DeviceMeasured, settings: Mapping[str, Any]) -> None:
        """What follows from the table."""
        kinds = list(dict.fromkeys(one.kind for one in measured))
        shared = next((kind for kind in kinds if kind != "pinned"), kinds[-1])
        self.console.print(
            f"Copied by {choice.path}; offered: {', '.join(kinds)}. In vLLM a private pool (CPUOffloadingSpec) is "
            f"{kinds[0]} here, a shared one (TieringOffloadingSpec) {shared}."
        )
        chunk = format_size(choice.chunk_nbytes)
        self.console.print(f"Chunks of {chunk} are the smallest with {CHUNK_PART:.0%} of the best speed both ways.")
        if settings:
            self.console.print("In vLLM's kv_connector_extra_config:")
            self.console.print(json.dumps(settings, indent=4), markup=False)
        else:
            self.console.print(
                f"blocks_per_chunk is {chunk} divided by the bytes of one KV block in all layers, rounded up; --block "
                "tells them to this command."
            )

    def _table(self) -> Table:
        table = Table(box=SIMPLE_HEAD)
        for name in ("chunk", "host memory", "store", "x", "load", "x", "plain s/l"):
            table.add_column(name, justify="right", no_wrap=True)
        for one in self._results:
            table.add_row(
                format_size(one.chunk_nbytes),
                one.kind,
                gb_per_s(one.chunks.store),
                f"{one.store_part:.2f}",
                gb_per_s(one.chunks.load),
                f"{one.load_part:.2f}",
                f"{gb_per_s(one.plain.store)}/{gb_per_s(one.plain.load)}",
            )
        return table


def gb_per_s(nbytes_per_s: float) -> str:
    """As people write it: three digits that mean something."""
    value = nbytes_per_s / 1e9
    return f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def _both(speeds: Speeds) -> str:
    return f"{gb_per_s(speeds.write)}/{gb_per_s(speeds.read)}"
