"""One batch on its way to the disk: which of its chunks go in one call, and what a worker does with them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

from tierkv.tiers._fs.books import Books
from tierkv.tiers._fs.format import HEADER_NBYTES
from tierkv.tiers._fs.memory import Scratch, ScratchRing
from tierkv.tiers._fs.ops import Operations, as_bytes
from tierkv.tiers._fs.owners import Ownership
from tierkv.tiers._fs.slab import Slab
from tierkv.tiers._fs.slab_io import SlabIO
from tierkv.tiers._fs.slabs import Slabs
from tierkv.types import Chunk, ChunkKey, Outcome, Reason, Status

Reads = Sequence[tuple[ChunkKey, memoryview]]
Writes = Sequence[tuple[Chunk, memoryview]]
Outcomes = list[Outcome | None]
Runs = Sequence[Sequence[int]]
"""Indices into a batch; those of one run go in one call if they can."""


class Batches:
    """Runs and what is done with them. No run is so long that a worker of the batch would be left without one.

    Args:
        slot_nbytes: of the slab that is written; None for files.

    Concurrency: any thread, on different keys.
    """

    def __init__(
        self, operations: Operations, *, slabs: Slabs, slab_io: SlabIO, books: Books, ownership: Ownership,
        ring: ScratchRing, slot_nbytes: int | None,
    ) -> None:  # fmt: skip
        self._operations = operations
        self._slabs = slabs
        self._slab_io = slab_io
        self._books = books
        self._ownership = ownership
        self._ring = ring
        self._slot_nbytes = slot_nbytes

    def plan_reads(self, items: Reads, n_workers: int, *, in_order: bool) -> Runs:
        """Chunks in slots by where they lie, neighbours together; the others each by itself."""
        if in_order or not self._slabs.any:
            return [(i,) for i in range(len(items))]
        runs: list[Sequence[int]] = []
        places: list[tuple[int, int]] = []
        for i, (key, _) in enumerate(items):
            place = self._books.place(key)
            if place:
                places.append((place, i))
            else:
                runs.append((i,))
        places.sort()
        for neighbours in _neighbours(places):
            slot_nbytes = self._books.at(neighbours[0][0]).nbytes
            run = [i for _, i in neighbours]
            if min(items[i][1].nbytes for i in run) < slot_nbytes - HEADER_NBYTES:
                runs += [(i,) for i in run]
            else:
                runs += self._shares(run, slot_nbytes, n_workers)
        return runs

    def plan_writes(self, items: Writes, n_workers: int, *, in_order: bool) -> Runs:
        """Neighbours in the batch together, if they go into slots: then they can lie side by side."""
        if self._slot_nbytes is None or in_order:
            return [(i,) for i in range(len(items))]
        return self._shares(range(len(items)), self._slot_nbytes, n_workers)

    def _shares(self, items: Sequence[int], slot_nbytes: int, n_workers: int) -> Runs:
        """Cut into runs of about one length, as many for each worker."""
        n_runs = -(-len(items) // self._slab_io.run_length(slot_nbytes))
        n_runs = min(len(items), -(-n_runs // n_workers) * n_workers)
        ends = [len(items) * n // n_runs for n in range(n_runs + 1)]
        return [items[at:end] for at, end in pairwise(ends)]

    def read(self, items: Reads, outcomes: Outcomes, runs: Iterator[Sequence[int]]) -> None:
        """One worker's part: take runs until none is left."""
        scratch = self._ring.take()
        try:
            for run in runs:
                left = self._read_run(items, outcomes, run, scratch) if len(run) > 1 else run
                self._operations.read_some(items, outcomes, left, scratch)
        finally:
            self._ring.give(scratch)

    def write(self, items: Writes, outcomes: Outcomes, runs: Iterator[Sequence[int]]) -> None:
        """One worker's part: take runs until none is left."""
        scratch = self._ring.take()
        try:
            for run in runs:
                if self._slot_nbytes is None:
                    self._operations.write_some(items, outcomes, run, scratch)
                else:
                    self._write_run(items, outcomes, run, scratch)
        finally:
            self._ring.give(scratch)

    def _read_run(self, items: Reads, outcomes: Outcomes, run: Sequence[int], scratch: Scratch) -> Sequence[int]:
        """One call for slots side by side. Returns the chunks that must be read each by itself."""
        keys = [items[i][0] for i in run]
        places = [self._books.place(key) for key in keys]
        number, nbytes, first, _ = self._books.at(places[0])
        slab = self._slabs.at(self._ownership.ids[number], nbytes)
        if slab is None or first is None or places != list(range(places[0], places[0] + len(run))):
            return run  # removed or written anew since the batch was planned
        buffers = [as_bytes(items[i][1]) for i in run]
        right = self._slab_io.read_run(slab, first, keys, buffers, scratch)
        for i, key, is_right in zip(run, keys, right, strict=True):
            if is_right:
                outcomes[i] = Outcome(key, Status.OK)
        now_s = time.time()
        if slab.are_cold(first, len(run), now_s):
            for n, key in enumerate(keys):
                if right[n]:
                    with contextlib.suppress(OSError):  # a file system that turned read-only still serves
                        slab.renew(first + n, key, now_s)
        return [i for i, is_right in zip(run, right, strict=True) if not is_right]

    def _write_run(self, items: Writes, outcomes: Outcomes, run: Sequence[int], scratch: Scratch) -> None:
        left = []
        for i in run:
            outcomes[i] = self._operations.unfit(*items[i])
            if outcomes[i] is None:
                left.append(i)
        while left:
            try:
                taken = self._slabs.take(len(left))
            except OSError as error:
                for i in left:
                    outcomes[i] = self._operations.failed_write(items[i][0].key, self._slot_nbytes or 0, error)
                return
            if taken is not None:
                n = len(taken[1])
                self._fill(taken, items, outcomes, left[:n], scratch)
                left = left[n:]
            elif not self._operations.make_room():
                # Slots of an id that was taken a moment ago are not known before its scan has ended.
                reason = Reason.SCANNING if self._books.is_scanning else Reason.FULL
                for i in left:
                    outcomes[i] = Outcome(items[i][0].key, Status.REFUSED, reason)
                return

    def _fill(
        self, taken: tuple[Slab, range], items: Writes, outcomes: Outcomes, run: Sequence[int], scratch: Scratch
    ) -> None:
        """Write a run into its slots and let each chunk be found; whatever goes wrong, a slot is used or idle again."""
        slab, slots = taken
        chunks = [(items[i][0], as_bytes(items[i][1])) for i in run]
        keys = [chunk.key for chunk, _ in chunks]
        errors: list[OSError | None]
        try:
            self._slab_io.write(slab, slots, chunks, scratch)
            errors = self._slab_io.commit(slab, slots, keys)
        except OSError as error:
            errors = [error] * len(run)
        except BaseException:
            for slot in slots:
                self._slabs.undo(slab, slot)
            raise
        whole = [n for n, failed in enumerate(errors) if failed is None]
        done = self._operations.all_written([keys[n] for n in whole], slab, [slots[n] for n in whole])
        for n, outcome in zip(whole, done, strict=True):
            outcomes[run[n]] = outcome
        for slot, i, failed in zip(slots, run, errors, strict=True):
            if failed is not None:
                self._slabs.undo(slab, slot)
                outcomes[i] = self._operations.failed_write(items[i][0].key, slab.slot_nbytes, failed)


def _neighbours(places: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
    """Cut what is sorted wherever the next place is not the next one of the same slab."""
    begin = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end][0] != places[end - 1][0] + 1:
            yield places[begin:end]
            begin = end
