"""The runtime for KV tensors in host memory: one thread a direction, plain memory copies.

It stands where an accelerator has copy streams: jobs of a direction run in order, the submitter never waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from tierkv.device.engine import CopyDone, CopyJob
from tierkv.device.layout import DeviceLayout, Place
from tierkv.device.runtime import Direction
from tierkv.errors import ClosedError, TierError

logger = logging.getLogger(__name__)

Array = Any  # numpy.ndarray of int8

_ROW_NBYTES = 8192
"""From here on one assignment a row is faster than a gather and a scatter: 6.0 against 4.5 GB/s at 32 KiB, 0.7 against
1.2 at 1 KiB on the machine that this was measured on."""

_PIECE_NBYTES = 1 << 20
"""Gather and scatter go through a temporary: one of this size stays in the cache."""


class _Bound(NamedTuple):
    """A :class:`Place` bound to memory."""

    pages: Array
    """``[n_blocks, n_fragments, fragment]`` of a device tensor."""
    places: Array
    """``[n_slots, blocks_per_chunk, n_fragments, fragment]`` of the slots."""
    place: Place


class CpuRuntime:
    """Copies pages on two daemon threads, each started by the first job of its direction.

    Concurrency: ``submit``, ``wait`` and ``close`` from any thread but those two. While bytes move the GIL is free.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        layout: DeviceLayout,
        slots: memoryview,
        stride_nbytes: int,
        done: Callable[[CopyDone], None],
    ) -> None:
        """See :func:`tierkv.device.open_runtime`."""
        if layout.span.stop > stride_nbytes:
            raise TierError("device", f"a chunk takes {layout.span.stop} bytes of a slot, but it has {stride_nbytes}")
        n_slots = len(slots) // stride_nbytes
        whole = np.frombuffer(slots, np.int8, n_slots * stride_nbytes).reshape(n_slots, stride_nbytes)
        pages = [_pages(tensor, n, i) for i, (tensor, n) in enumerate(zip(tensors, layout.page_nbytes, strict=True))]
        self._layout = layout
        self._slots: Array = whole
        self._bound = [
            [_bind(place, pages[place.tensor], whole, layout.blocks_per_chunk) for place in group]
            for group in layout.places
        ]
        self._lanes = {direction: _Lane(direction, self.copy, done) for direction in Direction}

    def submit(self, job: CopyJob) -> None:
        self._lanes[job.direction].put(job)

    def wait(self, ids: Collection[tuple[Direction, int]] | None = None) -> None:
        for direction, lane in self._lanes.items():
            lane.wait(None if ids is None else {id_ for of, id_ in ids if of is direction})

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        self._bound = []
        self._slots = None  # or the pool's mapping could not be closed

    def copy(self, job: CopyJob) -> int:
        """Copy now, on the calling thread; returns the bytes copied."""
        return self._copy(job, plain=False)

    def copy_plain(self, job: CopyJob) -> int:
        return self._copy(job, plain=True)

    def _copy(self, job: CopyJob, *, plain: bool) -> int:
        if self._slots is None:
            raise ClosedError("the device runtime is closed")
        n_copied = 0
        for copy in job.copies:
            blocks, slots, subs = (np.asarray(ids, np.intp) for ids in (copy.blocks, copy.slots, copy.subs))
            for bound in self._bound[copy.group]:
                n_row = bound.place.run.fragment_nbytes * bound.place.run.n_fragments
                at_once = 1 if plain or n_row >= _ROW_NBYTES else _PIECE_NBYTES // n_row
                if job.direction is Direction.LOAD:
                    _assign(bound.pages, (blocks,), bound.places, (slots, subs), at_once)
                    n_copied += n_row * len(blocks)
                else:
                    mine = self._turn(bound.place, slots, subs)
                    _assign(bound.places, (slots[mine], subs[mine]), bound.pages, (blocks[mine],), at_once)
                    n_copied += n_row * len(blocks[mine])
            if job.direction is Direction.STORE:
                self._zero(copy.group, np.asarray(copy.touched, np.intp), copy.skipped)
        return n_copied

    def _zero(self, group: int, touched: Array, skipped: Sequence[tuple[int, int]]) -> None:
        """A slot was somebody else's before: what this chunk does not fill must not carry that further."""
        for start, stop in self._layout.gaps[group]:
            self._slots[touched, start:stop] = 0
        if not skipped:
            return
        slots, subs = np.asarray(skipped, np.intp).T
        for bound in self._bound[group]:
            mine = self._turn(bound.place, slots, subs)
            bound.places[slots[mine], subs[mine]] = 0

    def _turn(self, place: Place, slots: Array, subs: Array) -> Array:
        """Which pairs this rank writes, of ranks that hold the same bytes."""
        if place.n_writers == 1:
            return slice(None)
        return (slots * self._layout.blocks_per_chunk + subs) % place.n_writers == place.writer


class _Lane:
    """The queue and the thread of one direction."""

    def __init__(self, direction: Direction, copy: Callable[[CopyJob], int], done: Callable[[CopyDone], None]) -> None:
        self._direction = direction
        self._copy = copy
        self._done = done
        self._queue: SimpleQueue[CopyJob | None] = SimpleQueue()
        self._open_ids: set[int] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, job: CopyJob) -> None:
        with self._changed:
            closed = self._closed
            if not closed:
                self._open_ids.add(job.id)
                self._queue.put(job)
                if self._thread is None:
                    name = f"tierkv-{self._direction.value}"
                    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                    self._thread.start()
        if closed:
            self._tell(CopyDone(job, 0, 0.0, ClosedError("the device runtime is closed")))

    def wait(self, ids: set[int] | None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not (self._open_ids if ids is None else self._open_ids & ids))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._queue.put(None)
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            done = self._finish(job)
            self._tell(done)
            with self._changed:
                self._open_ids.discard(job.id)
                self._changed.notify_all()

    def _finish(self, job: CopyJob) -> CopyDone:
        if self._closed:
            return CopyDone(job, 0, 0.0, ClosedError("the device runtime was closed before the copy began"))
        began_s = time.perf_counter()
        try:
            n_copied, error = self._copy(job), None
        except Exception as caught:  # noqa: BLE001 - whatever it is, it is this job's outcome
            n_copied, error = 0, caught
        return CopyDone(job, n_copied, time.perf_counter() - began_s, error)

    def _tell(self, done: CopyDone) -> None:
        try:
            self._done(done)
        except Exception:  # a lost thread would hang every later wait()
            logger.exception("the end of %s job %d could not be reported", done.job.direction.value, done.job.id)


def _pages(tensor: torch.Tensor, page_nbytes: int, index: int) -> Array:
    if tensor.dtype is not torch.int8 or tensor.ndim != 2 or tensor.shape[1] != page_nbytes or tensor.stride(1) != 1:
        raise TierError(
            "device",
            f"tensor {index} is {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}, "
            f"but must be int8 [n_blocks, {page_nbytes}] with pages in one piece",
        )
    return tensor.detach().numpy()


def _bind(place: Place, pages: Array, slots: Array, blocks_per_chunk: int) -> _Bound:
    run = place.run
    shape = (run.n_fragments, run.fragment_nbytes)
    return _Bound(
        as_strided(pages[:, run.page_offset :], (len(pages), *shape), (pages.strides[0], run.page_stride, 1)),
        as_strided(
            slots[:, place.offset + run.place_offset :],
            (len(slots), blocks_per_chunk, *shape),
            (slots.strides[0], place.block_stride, run.place_stride, 1),
        ),
        place,
    )


def _assign(target: Array, to: tuple[Array, ...], source: Array, at: tuple[Array, ...], n_rows_at_once: int) -> None:
    """``target[to] = source[at]``, so many rows at once."""
    if n_rows_at_once == 1:
        pairs = zip(*(ids.tolist() for ids in (*to, *at)), strict=True)
        for pair in pairs:
            target[pair[: len(to)]] = source[pair[len(to) :]]
        return
    for first in range(0, len(to[0]), n_rows_at_once):
        piece = slice(first, first + n_rows_at_once)
        target[tuple(ids[piece] for ids in to)] = source[tuple(ids[piece] for ids in at)]
