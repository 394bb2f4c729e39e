"""One batch on its way to the disk: which of its chunks go in one call, and what a worker does with them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from tierkv.tiers._fs.books import Books
from tierkv.tiers._fs.format import HEADER_NBYTES
from tierkv.tiers._fs.memory import Scratch, ScratchRing
from tierkv.tiers._fs.ops import Operations, as_bytes
from tierkv.tiers._fs.owners import Seat
from tierkv.tiers._fs.slab import Slab
from tierkv.tiers._fs.slab_io import SlabIO
from tierkv.tiers._fs.slabs import Slabs
from tierkv.types import Chunk, ChunkKey, Outcome, Reason, Status

Reads = Sequence[tuple[ChunkKey, memoryview]]
Writes = Sequence[tuple[Chunk, memoryview]]
Outcomes = list[Outcome | None]
Runs = Sequence[Sequence[int]]
"""Indices into a batch; those of one run go in one call if they can."""


class _Place(NamedTuple):
    owner: int
    nbytes: int
    at: int
    item: int


class Batches:
    """Runs and what is done with them. No run is so long that a worker of the batch would be left without one.

    Args:
        slot_nbytes: of the slab that is written; None for files.

    Concurrency: any thread, on different keys.
    """

    def __init__(
        self, operations: Operations, *, slabs: Slabs, slab_io: SlabIO, books: Books, seat: Seat, ring: ScratchRing,
        slot_nbytes: int | None,
    ) -> None:  # fmt: skip
        self._operations = operations
        self._slabs = slabs
        self._slab_io = slab_io
        self._books = books
        self._seat = seat
        self._ring = ring
        self._slot_nbytes = slot_nbytes

    def plan_reads(self, items: Reads, n_workers: int, *, in_order: bool) -> Runs:
        """Chunks in slots by where they lie, neighbours together; the others each by itself."""
        if in_order or not self._slabs.any:
            return [(i,) for i in range(len(items))]
        runs: list[Sequence[int]] = []
        places: list[_Place] = []
        for i, (key, buffer) in enumerate(items):
            held = self._books.get(key)
            if held is None or held.at is None or not _holds_a_slot(buffer, held.nbytes):
                runs.append((i,))
            else:
                places.append(_Place(held.slot, held.nbytes, held.at, i))
        places.sort()
        most = -(-len(places) // n_workers)
        run: list[int] = [place.item for place in places[:1]]
        for before, place in pairwise(places):
            is_next = place[:2] == before[:2] and place.at == before.at + 1
            if not is_next or len(run) >= min(most, self._slab_io.run_length(place.nbytes)):
                runs.append(run)
                run = []
            run.append(place.item)
        return [*runs, run] if run else runs

    def plan_writes(self, items: Writes, n_workers: int, *, in_order: bool) -> Runs:
        """Neighbours in the batch together, if they go into slots: then they can lie side by side."""
        length = 1
        if self._slot_nbytes is not None and not in_order:
            length = max(1, min(self._slab_io.run_length(self._slot_nbytes), -(-len(items) // n_workers)))
        return [range(at, min(at + length, len(items))) for at in range(0, len(items), length)]

    def read(self, items: Reads, outcomes: Outcomes, runs: Runs, indices: Iterator[int]) -> None:
        """One worker's part: take runs until none is left."""
        scratch = self._ring.take()
        try:
            for number in indices:
                left = runs[number]
                if len(left) > 1:
                    left = self._read_run(items, outcomes, left, scratch)
                self._operations.read_some(items, outcomes, left, scratch)
        finally:
            self._ring.give(scratch)

    def write(self, items: Writes, outcomes: Outcomes, runs: Runs, indices: Iterator[int]) -> None:
        """One worker's part: take runs until none is left."""
        scratch = self._ring.take()
        try:
            for number in indices:
                if self._slot_nbytes is None:
                    self._operations.write_some(items, outcomes, runs[number], scratch)
                else:
                    self._write_run(items, outcomes, runs[number], scratch)
        finally:
            self._ring.give(scratch)

    def _read_run(self, items: Reads, outcomes: Outcomes, run: Sequence[int], scratch: Scratch) -> Sequence[int]:
        """One call for slots side by side. Returns the chunks that must be read each by itself."""
        held = [self._books.get(items[i][0]) for i in run]
        first = held[0]
        if first is None or first.at is None:
            return run
        slab = self._slabs.at(self._seat.ids[first.slot], first)
        places = [(first.slot, first.nbytes, first.at + n) for n in range(len(run))]
        if slab is None or places != [h and h.place for h in held]:
            return run  # removed or written anew since the batch was planned
        right = self._slab_io.read_run(slab, first.at, [(items[i][0], as_bytes(items[i][1])) for i in run], scratch)
        left, now_s = [], time.time()
        for n, (i, is_right) in enumerate(zip(run, right, strict=True)):
            if not is_right:
                left.append(i)
                continue
            outcomes[i] = Outcome(items[i][0], Status.OK)
            with contextlib.suppress(OSError):  # a file system that turned read-only still serves
                slab.renew(first.at + n, items[i][0], now_s)
        return left

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
        errors: list[OSError | None]
        try:
            self._slab_io.write(slab, slots, chunks, scratch)
            errors = self._slab_io.commit(slab, slots, chunks)
        except OSError as error:
            errors = [error] * len(run)
        except BaseException:
            for slot in slots:
                self._slabs.undo(slab, slot)
            raise
        for slot, i, failed in zip(slots, run, errors, strict=True):
            key = items[i][0].key
            if failed is None:
                outcomes[i] = self._operations.written(key, slab.owner, slab.slot_nbytes, slot)
            else:
                self._slabs.undo(slab, slot)
                outcomes[i] = self._operations.failed_write(key, slab.slot_nbytes, failed)


def _holds_a_slot(buffer: memoryview, slot_nbytes: int) -> bool:
    return buffer.nbytes >= slot_nbytes - HEADER_NBYTES
