"""One engine for every device: which copy is queued behind what, what is held until when, and when a job has ended.

Written against :mod:`tierkv.device.runtime` alone. The order of things is told in the explanation "The device tier".
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from queue import SimpleQueue
from typing import Any

from tierkv.device.layout import DeviceLayout, GroupCopy
from tierkv.device.lowering import DescriptorPool, Lowering, Pages, Zeroes
from tierkv.device.runtime import (
    CopyBatch,
    DeviceLostError,
    DeviceRuntime,
    Direction,
    Event,
    HostKind,
    HostWatcher,
    Stream,
)
from tierkv.device.slots import HostSlots
from tierkv.errors import ClosedError

logger = logging.getLogger(__name__)

_INLINE_ZERO_NBYTES = 256 << 10
"""Up to here the submitting thread sets a slot's gaps to zero itself: about 20 us, what a hop to a thread costs."""

_abandoned: list[object] = []
"""What a device may still touch although it can no longer be asked: kept to the end of the process, on purpose."""


@dataclass(frozen=True, slots=True)
class CopyJob:
    """One copy in one direction. ``id`` is unique among the jobs of that direction that have not ended."""

    id: int
    direction: Direction
    copies: Sequence[GroupCopy]
    tag: Any = None
    """The submitter's; handed back untouched."""


@dataclass(frozen=True, slots=True)
class CopyDone:
    """A copy that has ended: no thread and no DMA touches its blocks or slots any more."""

    job: CopyJob
    nbytes: int
    """Copied; 0 if it failed."""
    duration_s: float
    """By the device's own account where that costs nothing (cpu), else by the host's clock: from the submission, or the
    end of the copy before it, to the poll that saw its end."""
    error: Exception | None = None
    """Set if it failed: then its target holds anything."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine has done so far, and how."""

    device: str
    path: str
    """How batches are copied: the runtime's choice at start."""
    slots: HostKind
    """Pageable ones are copied from a thread of the engine, because that blocks."""
    n_jobs: dict[Direction, int]
    """Ended, well or not."""
    nbytes: dict[Direction, int]
    n_failed: dict[Direction, int]
    n_retried: int
    """Loads that failed and were copied once more, plainly."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A job and everything that must not be reused or freed before its event was seen."""

    job: CopyJob
    began_s: float
    batch: CopyBatch | None = None
    descriptors: Any = None
    held: Any = None
    ready: Event | None = None
    event: Event | None = None
    error: Exception | None = None
    touched: bool = False
    """Whether anything may have been queued."""
    lost: bool = False
    """Nobody can say whether its copies have ended."""
    waits: list[threading.Event] = field(default_factory=list)
    """Set when threads of the engine are done with it: the one that submits, the one that zeroes."""


class TransferEngine:
    """Copies between pages and slots, in order within each direction, the two directions side by side.

    Args:
        runtime: the device; the engine closes it.
        layout: where pages lie in a slot.
        pages: the tensors of the layout.
        slots: the slots; the engine closes them, which unmaps nothing that is another's.

    Concurrency: all methods belong to one thread, the one whose current stream produces what is stored. None waits for
    the device but ``wait``, ``close``, and ``poll`` after a load has failed.

    Raises:
        TierError: pages or slots do not fit the layout.
    """

    def __init__(self, runtime: DeviceRuntime, layout: DeviceLayout, pages: Sequence[Pages], slots: HostSlots) -> None:
        self._runtime = runtime
        self._watcher = runtime if isinstance(runtime, HostWatcher) else None
        self._slots = slots
        self._lowering = Lowering(layout, pages, slots)
        self._pool = DescriptorPool()
        self._keep = [own.memory for own in pages]
        self._streams: dict[Direction, Stream] = {direction: runtime.new_stream() for direction in Direction}
        self._flights: dict[Direction, deque[_Flight]] = {direction: deque() for direction in Direction}
        self._last_end_s = dict.fromkeys(Direction, 0.0)
        self._ended: list[CopyDone] = []
        blocks_caller = slots.kind is HostKind.PAGEABLE and runtime.blocks_on_pageable
        self._lanes = (
            {direction: EngineThread(f"tierkv-{direction.value}") for direction in Direction} if blocks_caller else {}
        )
        self._zeroing = EngineThread("tierkv-zero")
        self._closed = self._lost = False
        self._n_jobs, self._nbytes, self._n_failed = (dict.fromkeys(Direction, 0) for _ in range(3))
        self._n_retried = 0
        self.device_lost: DeviceLostError | None = None
        """Set once a copy has shown that nothing done on this device can be trusted any more."""

    @property
    def n_open(self) -> int:
        """Jobs whose end has not been seen."""
        return sum(map(len, self._flights.values()))

    def stats(self) -> EngineStats:
        return EngineStats(
            self._runtime.name,
            self._runtime.path,
            self._slots.kind,
            dict(self._n_jobs),
            dict(self._nbytes),
            dict(self._n_failed),
            self._n_retried,
        )

    # -- in -----------------------------------------------------------------------------------------------------

    def submit(self, job: CopyJob, *, refused: Exception | None = None) -> None:
        """Queue a copy behind the work of the calling thread's current stream, and return at once. Never raises.

        Blocks and slots are the engine's until the job's end was told. A job that cannot be copied (``refused``, a
        block that does not exist) takes its turn all the same: its end says that those before it have ended.
        """
        if self._closed:
            self._ended.append(CopyDone(job, 0, 0.0, ClosedError("the device tier is closed")))
            return
        flight = _Flight(job, time.perf_counter(), error=refused)
        self._flights[job.direction].append(flight)
        if refused is not None:
            return
        try:
            flight.batch, flight.descriptors = self._lowering.batch(job.direction, job.copies, self._pool)
            if job.direction is Direction.STORE:
                self._zero(flight)
            flight.ready = self._runtime.new_event()
            flight.ready.record(self._runtime.current_stream())
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this job's outcome; nothing was queued
            flight.error = error
            return
        if not len(flight.batch.nbytes):
            return
        if self._lanes:
            flight.waits.append(self._lanes[job.direction].run(self._launch, flight))
        else:
            self._launch(flight)

    def _launch(self, flight: _Flight) -> None:
        """Queue the batch on its direction's stream, on whichever thread may be blocked by that."""
        assert flight.batch is not None
        stream = self._streams[flight.job.direction]
        try:
            stream.wait_event(flight.ready)
            with self._runtime.use(stream):
                flight.touched = True
                try:
                    flight.held = self._runtime.copy_batch(flight.batch)
                finally:  # part of it may have been queued before it failed: that part ends at this event
                    event = self._runtime.new_event()
                    event.record(stream)
                    flight.event = event
        except Exception as error:  # noqa: BLE001 - the outcome of this job
            flight.error = error

    def _zero(self, flight: _Flight) -> None:
        """The slots were other chunks' before: what this one does not fill must not carry their bytes further."""
        zeroes = list(self._lowering.zeroes(flight.job.copies))
        if self._watcher is not None:
            for address, nbytes in chain.from_iterable(zero.ranges() for zero in zeroes):
                self._watcher.host_writes(address, nbytes)
        if sum(zero.nbytes for zero in zeroes) <= _INLINE_ZERO_NBYTES:
            _fill(zeroes)
        else:
            flight.waits.append(self._zeroing.run(_fill, zeroes))

    # -- out ----------------------------------------------------------------------------------------------------

    def poll(self) -> list[CopyDone]:
        """The jobs that have ended since the last call, in order within each direction."""
        for direction in Direction:
            self._settle(direction)
        ended, self._ended = self._ended, []
        return ended

    def wait(self, ids: Collection[tuple[Direction, int]] | None = None) -> None:
        """Block until these jobs (None: all) have ended; the next :meth:`poll` tells their ends. Unknown ones have."""
        for direction, flights in self._flights.items():
            wanted = [i for i, flight in enumerate(flights) if ids is None or (direction, flight.job.id) in ids]
            for flight in list(flights)[: wanted[-1] + 1] if wanted else ():
                self._await(flight)
            if wanted:
                self._settle(direction)

    def consume(self, ids: Collection[int], *, stream: Stream | None = None) -> None:
        """Let a consumer's stream (default: the current one) wait for these loads, without the host waiting.

        Whether they succeeded is still for :meth:`poll` to tell; what the consumer makes of a failed load is garbage.
        """
        target = self._runtime.current_stream() if stream is None else stream
        for flight in self._flights[Direction.LOAD]:
            if flight.job.id in ids:
                for wait in flight.waits:
                    wait.wait()  # pageable slots only: the copy must have been queued to be waited for
                if flight.event is not None:
                    target.wait_event(flight.event)

    def sleeper(self, direction: Direction) -> Callable[[], None] | None:
        """A call that blocks, on any thread, until the oldest open job has ended; None if there is no open job.

        What it ended in is for :meth:`poll` to tell.
        """
        flights = self._flights[direction]
        return partial(_block, flights[0]) if flights else None

    def close(self) -> None:
        """Wait for every copy, then let go of pages and slots. A last :meth:`poll` tells the ends. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.wait()
        for thread in (*self._lanes.values(), self._zeroing):
            thread.close()
        self._lowering.close()
        if (
            self._lost
        ):  # the device cannot be asked: releasing page locks or memory under it could be worse than keeping them
            return
        self._slots.close()
        self._streams.clear()
        self._keep = []
        self._runtime.close()

    def _settle(self, direction: Direction) -> None:
        flights = self._flights[direction]
        while flights and self._has_ended(flights[0]):
            self._ended.append(self._end(flights.popleft()))

    def _has_ended(self, flight: _Flight) -> bool:
        if not all(wait.is_set() for wait in flight.waits):
            return False
        if flight.event is None or flight.lost:
            return self._await(flight)
        try:
            return flight.event.query()
        except Exception as error:  # noqa: BLE001 - that it cannot be asked does not mean that it has ended
            flight.error = flight.error or error
            return self._await(flight)

    def _await(self, flight: _Flight) -> bool:
        """Block until nothing touches the job's memory any more, as far as the device can tell. Always True."""
        for wait in flight.waits:
            wait.wait()
        if not flight.touched or flight.lost:
            return True
        try:
            (flight.event or self._streams[flight.job.direction]).synchronize()
        except Exception as error:  # noqa: BLE001 - the job's outcome
            flight.error = flight.error or error
            if flight.event is None:
                flight.lost = True
        return True

    def _end(self, flight: _Flight) -> CopyDone:
        now_s = time.perf_counter()
        job, batch = flight.job, flight.batch
        _strip(flight.error)
        if flight.lost:
            self._lost = True
            _abandoned.append((flight, self._keep, self._slots, self._runtime))
        elif flight.error is not None and job.direction is Direction.LOAD and batch is not None:
            flight.error = self._once_more(flight)
        if isinstance(flight.error, DeviceLostError) and self.device_lost is None:
            self.device_lost = flight.error
            logger.critical("%s", flight.error)
        nbytes = batch.total_nbytes if batch is not None and flight.error is None else 0
        took_s: float | None = getattr(flight.event, "took_s", None)  # a TimedEvent's
        if took_s is None:
            took_s = now_s - max(flight.began_s, self._last_end_s[job.direction])
        self._last_end_s[job.direction] = now_s
        self._n_jobs[job.direction] += 1
        self._nbytes[job.direction] += nbytes
        self._n_failed[job.direction] += flight.error is not None
        if flight.descriptors is not None and not flight.lost:
            self._pool.give_back(flight.descriptors)
        return CopyDone(job, nbytes, took_s, flight.error)

    def _once_more(self, flight: _Flight) -> Exception | None:
        """A load that failed, by the simplest means; what that raised."""
        assert flight.batch is not None
        logger.warning("Load job %d failed (%r) and is tried once more, plainly", flight.job.id, flight.error)
        self._n_retried += 1
        try:
            self._runtime.copy_plain(flight.batch)
        except Exception as error:  # noqa: BLE001 - the outcome of this job, whatever it is
            return _strip(error)
        return None


class EngineThread:
    """A daemon thread that starts with its first call and runs calls in order; each returns what it sets when done."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[tuple[Any, Any, threading.Event] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, fn: Any, argument: Any) -> threading.Event:
        done = threading.Event()
        self._calls.put((fn, argument, done))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        return done

    def close(self) -> None:
        """Wait for what was given. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._calls.put(None)
            thread.join()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            fn, argument, done = call
            try:
                fn(argument)
            except Exception:  # a lost thread would hang every later job
                logger.exception("%s: a call failed", self._name)
            finally:
                done.set()


def _strip(error: Exception | None) -> Exception | None:
    """Without its frames, which hold the batch and so the slots: whoever kept the error would keep them mapped."""
    return None if error is None else error.with_traceback(None)


def _fill(zeroes: Iterable[Zeroes]) -> None:
    for zero in zeroes:
        zero.fill()


def _block(flight: _Flight) -> None:
    for wait in flight.waits:
        wait.wait()
    if flight.event is not None:
        with contextlib.suppress(Exception):
            flight.event.synchronize()
