"""What ``tierkv bench`` measures, as values: the plan, what came out, and the settings that follow from it. No I/O."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from tierkv.cli._bench_report import TierSpeed
from tierkv.errors import TierKVError

CHUNK_PART: Final = 0.8
"""A smaller chunk hits more finely: the smallest with this part of the best speed is the one to use."""
THREADS_PART: Final = 0.95
"""Each thread takes the interpreter from the engine at times: the fewest with this part of the best speed do."""


class BenchError(TierKVError):
    """A measurement could not be finished; what it wrote has been removed."""


class Cell(NamedTuple):
    """One point of the plan."""

    chunk_nbytes: int
    n_threads: int

    def n_chunks(self, size_nbytes: int) -> int:
        """As many as the size holds, and one for each thread at least."""
        return max(self.n_threads, size_nbytes // self.chunk_nbytes)


@dataclass(frozen=True, slots=True)
class FSPlan:
    """One run of ``tierkv bench fs``."""

    root: str
    chunks_nbytes: Sequence[int]
    threads: Sequence[int]
    size_nbytes: int
    n_rounds: int
    block_nbytes: int | None = None
    """Bytes of one KV block in all layers, to turn a chunk's size into ``blocks_per_chunk``."""
    layout: str = "auto"
    """Of the tier; plain files are what they are."""

    @property
    def cells(self) -> list[Cell]:
        return [Cell(chunk_nbytes, n) for chunk_nbytes in self.chunks_nbytes for n in self.threads]

    @property
    def payload_nbytes(self) -> int:
        """The most that lies on disk, and as much in memory, at one time."""
        return max(cell.chunk_nbytes * cell.n_chunks(self.size_nbytes) for cell in self.cells)

    @property
    def peak_nbytes(self) -> int:
        """On disk, with all that lies beside the chunks."""
        return max(peak_nbytes_of(cell.chunk_nbytes, cell.n_chunks(self.size_nbytes)) for cell in self.cells)

    def largest_fitting_nbytes(self, spare_nbytes: int) -> int | None:
        """The largest chunk doubled as often as fits; None if fewer threads are what it takes."""
        size_nbytes = max(self.chunks_nbytes)
        while replace(self, size_nbytes=2 * size_nbytes).peak_nbytes <= spare_nbytes:
            size_nbytes *= 2
        return size_nbytes if replace(self, size_nbytes=size_nbytes).peak_nbytes <= spare_nbytes else None


def peak_nbytes_of(chunk_nbytes: int, n_chunks: int) -> int:
    """With a header for each chunk; and directories, locks, an index and a slab's catalogue beside them."""
    return n_chunks * (chunk_nbytes + 2 * 4096) + (4 << 20)


class Speeds(NamedTuple):
    """Bytes a second."""

    write: float
    read: float


class Measured(NamedTuple):
    """A cell's medians, and the tier's part of the directory's plain limit, taken round by round."""

    cell: Cell
    tier: Speeds
    direct: Speeds | None
    """Plain files with O_DIRECT, where the file system has it."""
    buffered: Speeds
    """Plain files through the page cache, synced, and read back cold."""
    write_part: float
    read_part: float


class Round(NamedTuple):
    """One pass over a cell by everybody who takes part."""

    tier: Speeds
    direct: Speeds | None
    buffered: Speeds

    @property
    def limit(self) -> Speeds:
        return self.buffered if self.direct is None else self.direct


def summary(cell: Cell, rounds: Sequence[Round]) -> Measured:
    """Medians; ratios are medians of the rounds' own, so that a disk that slows down in between does not count."""
    direct = [round_.direct for round_ in rounds if round_.direct is not None]
    return Measured(
        cell,
        tier=_median([round_.tier for round_ in rounds]),
        direct=_median(direct) if direct else None,
        buffered=_median([round_.buffered for round_ in rounds]),
        write_part=statistics.median(round_.tier.write / round_.limit.write for round_ in rounds),
        read_part=statistics.median(round_.tier.read / round_.limit.read for round_ in rounds),
    )


class Choice(NamedTuple):
    """What to set."""

    chunk_nbytes: int
    n_read_threads: int
    n_write_threads: int


def choose(measured: Sequence[Measured]) -> Choice:
    """The smallest chunk, and for it the fewest threads, that are nearly as fast as the fastest, both ways."""

    def write(one: Measured) -> float:
        return one.tier.write

    def read(one: Measured) -> float:
        return one.tier.read

    sizes = sorted({one.cell.chunk_nbytes for one in measured})
    fast = [
        size
        for size in sizes
        if all(_best(_of(measured, size), by) >= CHUNK_PART * _best(measured, by) for by in (write, read))
    ]
    chunk_nbytes = fast[0] if fast else sizes[-1]
    mine = _of(measured, chunk_nbytes)
    return Choice(chunk_nbytes, _fewest_threads(mine, read), _fewest_threads(mine, write))


def speeds_with(measured: Sequence[Measured], choice: Choice) -> list[TierSpeed]:
    """How fast the tier is with these threads, by size of a chunk."""
    by_cell = {one.cell: one.tier for one in measured}
    return [
        TierSpeed(
            "fs",
            size,
            by_cell[Cell(size, choice.n_read_threads)].read,
            by_cell[Cell(size, choice.n_write_threads)].write,
        )
        for size in sorted({cell.chunk_nbytes for cell in by_cell})
    ]


def _median(speeds: Sequence[Speeds]) -> Speeds:
    return Speeds(statistics.median(s.write for s in speeds), statistics.median(s.read for s in speeds))


def _of(measured: Sequence[Measured], chunk_nbytes: int) -> list[Measured]:
    return [one for one in measured if one.cell.chunk_nbytes == chunk_nbytes]


def _best(measured: Sequence[Measured], by: Callable[[Measured], float]) -> float:
    return max(by(one) for one in measured)


def _fewest_threads(measured: Sequence[Measured], by: Callable[[Measured], float]) -> int:
    best = _best(measured, by)
    return min(one.cell.n_threads for one in measured if by(one) >= THREADS_PART * best)
