"""The cpu engine against memcpy: chunks between scattered pages and scattered slots, and the same bytes in one piece.

``python -m tests.bench.device`` prints the table. By processor time of the whole process: a neighbour moves both sides
alike, and what the engine's own threads spend counts against it.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import numpy as np

from tests.bench.pairs import N_PAIRS, Row, alternate, seconds, table
from tierkv.device import CopyJob, DeviceLayout, Direction, HostSlots, PageRef, TransferEngine, open_runtime
from tierkv.device.lowering import Pages
from tierkv.device.slots import address_of

MIB = 1 << 20
PAGES = (4 << 10, 16 << 10, 32 << 10, 128 << 10)
CHUNKS = (MIB, 4 * MIB)
TOTAL_NBYTES = 128 * MIB
"""More than the caches hold."""
JOBS_PAGE_NBYTES = 32 << 10
MUST = 0.8
"""Of memcpy's speed."""


class Rig:
    """Chunks of one block in each of many tensors; beside them as many bytes in one piece for memcpy.

    Memory as torch and the pool have it: ordinary pages, tensors 64 bytes behind a page's beginning.
    """

    def __init__(self, chunk_nbytes: int, page_nbytes: int, n_chunks: int) -> None:
        self.n_chunks, self.chunk_nbytes = n_chunks, chunk_nbytes
        n_tensors = chunk_nbytes // page_nbytes
        slots = mmap.mmap(-1, n_chunks * chunk_nbytes)
        tensors = [_tensor(n_chunks, page_nbytes) for _ in range(n_tensors)]
        self._layout = DeviceLayout.direct(
            [page_nbytes] * n_tensors, [[PageRef(i, page_nbytes) for i in range(n_tensors)]],
            blocks_per_chunk=1, stop_nbytes=chunk_nbytes,
        )  # fmt: skip
        runtime = open_runtime("cpu")
        pages = [Pages(runtime.memory(tensor), n_chunks, page_nbytes, page_nbytes) for tensor in tensors]
        self._engine = TransferEngine(runtime, self._layout, pages, HostSlots.over(memoryview(slots), chunk_nbytes))
        self._plain = _tensor(n_chunks, chunk_nbytes)
        self._slots_at = address_of(memoryview(slots))
        self._keep = slots
        self._rng = random.Random(1)

    def engine(self, direction: Direction, n_at_once: int) -> float:
        """GB a processor second, all chunks in jobs of so many, blocks and slots in random order."""
        blocks, slots = self._shuffled(), self._shuffled()
        spent = seconds(lambda: self._run(direction, blocks, slots, n_at_once), time.process_time)
        return self.n_chunks * self.chunk_nbytes / spent / 1e9

    def memcpy(self, direction: Direction) -> float:
        """The same by one memcpy a chunk, in random order."""
        nbytes, base = self.chunk_nbytes, int(self._plain.__array_interface__["data"][0])
        pairs = list(zip(self._shuffled(), self._shuffled(), strict=True))

        def copy() -> None:
            for block, slot in pairs:
                device, host = base + block * nbytes, self._slots_at + slot * nbytes
                ctypes.memmove(*((host, device) if direction is Direction.STORE else (device, host)), nbytes)

        return self.n_chunks * nbytes / seconds(copy, time.process_time) / 1e9

    def _shuffled(self) -> list[int]:
        return self._rng.sample(range(self.n_chunks), self.n_chunks)

    def _run(self, direction: Direction, blocks: list[int], slots: list[int], n_at_once: int) -> None:
        for first in range(0, self.n_chunks, n_at_once):
            piece = slice(first, first + n_at_once)
            n = len(blocks[piece])
            self._engine.submit(CopyJob(first, direction, self._layout.split(blocks[piece], [n], [0], slots[piece])))
        self._engine.wait()
        for done in self._engine.poll():
            if done.error is not None:
                raise done.error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, frames: TracebackType | None) -> None:
        self._engine.close()


def _tensor(n_blocks: int, page_nbytes: int) -> Any:
    whole = np.frombuffer(mmap.mmap(-1, n_blocks * page_nbytes + 64), np.int8)
    whole[:] = 1
    return whole[64:].reshape(n_blocks, page_nbytes)


def compare(chunk_nbytes: int, page_nbytes: int, direction: Direction, n_pairs: int, n_at_once: int = 0) -> Row:
    """One row. ``n_at_once``: chunks a job; 0 is all of them in one."""
    n_chunks = TOTAL_NBYTES // chunk_nbytes
    with Rig(chunk_nbytes, page_nbytes, n_chunks) as rig:
        per_job = n_at_once or n_chunks
        rig.engine(direction, per_job)
        ours, peer = alternate(lambda: rig.engine(direction, per_job), lambda: rig.memcpy(direction), n_pairs)
    return Row(
        "device",
        f"{direction.value} {chunk_nbytes // MIB} MiB, pages {page_nbytes >> 10} KiB, {per_job} chunks a job",
        "GB/s of CPU",
        ours,
        peer,
        "memcpy a chunk",
        must=MUST if not n_at_once else None,
    )


def run(n_pairs: int = N_PAIRS) -> Iterator[Row]:
    for page_nbytes in PAGES:
        for direction in Direction:
            for chunk_nbytes in CHUNKS:
                yield compare(chunk_nbytes, page_nbytes, direction, n_pairs)
    for n_at_once in (16, 1):
        for direction in Direction:
            yield compare(MIB, JOBS_PAGE_NBYTES, direction, n_pairs, n_at_once)


if __name__ == "__main__":
    for row in run():
        print(table([row]), flush=True)
