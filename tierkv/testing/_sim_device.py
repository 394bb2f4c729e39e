"""A deterministic accelerator in plain Python: streams that run late and out of step, torn copies, a race check."""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeVar

from tierkv.testing._rules import ConformanceError
from tierkv.testing._sim_races import Clock, RaceCheck, Range, merge

POISON = 0xDB
"""What a copy writes into its whole target before the first byte arrives."""

_CHUNK_NBYTES = 64
_MAX_STEPS_PER_CALL = 3


class SimSchedule(StrEnum):
    """Which stream runs next. No schedule shows every fault, which is what the race check is for."""

    RANDOM = "random"
    COPIES_FIRST = "copies_first"
    COMPUTE_FIRST = "compute_first"
    LOADS_LAST = "loads_last"
    STORES_LAST = "stores_last"
    EAGER = "eager"
    """Everything at once, as mocks do it: shows nothing."""


class DeadlockError(ConformanceError):
    """The host waits for what can never happen."""


class SimSpan(NamedTuple):
    """When a task ran, in scheduler steps."""

    name: str
    stream: str
    submitted: int
    began: int
    ended: int


@dataclass
class _Task:
    name: str
    steps: Iterator[None]
    submitted: int
    is_blocked: Callable[[], bool] = lambda: False
    began: int | None = None
    traced: bool = True


_S = TypeVar("_S", bound="SimStream")


class SimStream:
    """A queue of tasks. Make it with :meth:`~tierkv.testing.SimDevice.new_stream`."""

    def __init__(self, device: SimDevice, number: int, name: str) -> None:
        self.device = device
        self.number = number
        self.name = name
        self.tasks: deque[_Task] = deque()
        self.clock: Clock = {}

    def wait_event(self, event: SimEvent, /) -> None:
        """Later tasks start after the event as last recorded; one that never was does not hold them."""
        device = self.device
        with device.lock:
            generation = event.n_recorded
            merge(self.clock, event.clock)
            if generation:
                blocked = lambda: event.n_happened < generation  # noqa: E731
                self.tasks.append(_Task("wait", iter(()), device.step, blocked, traced=False))
            device.progress()

    def synchronize(self) -> None:
        """Run the device until this stream is empty. The host waits, and that is noted."""
        device = self.device
        with device.lock:
            device.run_until(lambda: not self.tasks, f"stream {self.name}")
            merge(device.races.host, self.clock)


class SimEvent:
    """A point in a stream. Make it with :meth:`~tierkv.testing.SimDevice.new_event`."""

    def __init__(self, device: SimDevice) -> None:
        self.device = device
        self.n_recorded = 0
        self.n_happened = 0
        self.clock: Clock = {}

    def record(self, stream: SimStream, /) -> None:
        device = self.device
        with device.lock:
            merge(stream.clock, device.races.host)
            self.n_recorded += 1
            self.clock = dict(stream.clock)
            stream.tasks.append(_Task("record", self._happen(self.n_recorded), device.step, traced=False))
            device.progress()

    def query(self) -> bool:
        with self.device.lock:
            self.device.progress()
            if self.n_happened < self.n_recorded:
                return False
            merge(self.device.races.host, self.clock)
            return True

    def synchronize(self) -> None:
        device = self.device
        with device.lock:
            device.run_until(lambda: self.n_happened >= self.n_recorded, "an event")
            merge(device.races.host, self.clock)

    def _happen(self, generation: int) -> Iterator[None]:
        self.n_happened = generation
        return
        yield


@dataclass(eq=False)
class SimBuffer:
    """Bytes of the device, or of the host; both are ordinary memory."""

    nbytes: int
    array: Any = field(repr=False)
    skip: int = 0

    @property
    def address(self) -> int:
        return ctypes.addressof(self.array) + self.skip

    @property
    def view(self) -> memoryview:
        """Writable. Whoever uses it tells the device, see :meth:`~tierkv.testing.SimDevice.host_access`."""
        return memoryview(self.array).cast("B")[self.skip : self.skip + self.nbytes]


class SimDevice:
    """A simulated accelerator: no threads, no clock, no sleeps. The same seed and calls replay exactly.

    Queued work runs only while the host is inside one of the calls, a few steps at a time, on streams that the seed
    picks. A copy first poisons its target and then fills it in pieces of 64 bytes, each a step, so a look too early
    sees torn bytes; and every access is checked against all others in flight, so a missing wait is found even if the
    schedule was kind.

    Args:
        seed: of the scheduler.
        schedule: which stream it prefers.
        races: "raise" a :class:`RaceError` at once, "note" it in :attr:`races` ``.found``, or "ignore" it, to see what
            wrong bytes look like.

    Attributes:
        compute: the stream on which kernels run unless another is in use.
        trace: what ran when, in the order in which it ended.
        host_waits: each time the host waited for the device: what for, and in which thread.

    Concurrency: calls from several threads are taken one at a time; all of them count as one host to the race check.
    """

    def __init__(
        self,
        seed: int = 0,
        schedule: SimSchedule = SimSchedule.RANDOM,
        *,
        races: Literal["raise", "note", "ignore"] = "raise",
    ) -> None:
        self.seed = seed
        self.schedule = schedule
        self.races = RaceCheck(raises=races == "raise")
        self.lock = threading.RLock()
        self.step = 0
        self.trace: list[SimSpan] = []
        self.host_waits: list[tuple[str, str]] = []
        self._checks = races != "ignore"
        self._rng = random.Random(seed)  # noqa: S311 - a schedule is no secret
        self._in_use = threading.local()
        self._streams: list[SimStream] = []
        self._buffers: list[SimBuffer] = []
        self.compute = self.new_stream("compute")

    # -- what a program calls -----------------------------------------------------------------------------------

    def new_stream(self, name: str = "") -> SimStream:
        return self.add_stream(SimStream(self, len(self._streams), name or f"stream {len(self._streams)}"))

    def add_stream(self, stream: _S) -> _S:
        """Run a stream of one's own kind, whose number is :attr:`n_streams`, with the others."""
        self._streams.append(stream)
        return stream

    @property
    def n_streams(self) -> int:
        return len(self._streams)

    def new_event(self) -> SimEvent:
        return SimEvent(self)

    def current_stream(self) -> SimStream:
        """The calling thread's; :attr:`compute` unless :meth:`use` says otherwise."""
        stream: SimStream = getattr(self._in_use, "stream", self.compute)
        return stream

    @contextlib.contextmanager
    def use(self, stream: SimStream) -> Iterator[SimStream]:
        """Make a stream the calling thread's current one."""
        before, self._in_use.stream = self.current_stream(), stream
        try:
            yield stream
        finally:
            self._in_use.stream = before

    def alloc(self, nbytes: int, *, fill: int = 0xEE, align: int = 4096) -> SimBuffer:
        """Memory full of ``fill``, at a multiple of ``align``; it lives as long as the device."""
        array = (ctypes.c_ubyte * (nbytes + align))()
        buffer = SimBuffer(nbytes, array, -ctypes.addressof(array) % align)
        ctypes.memset(buffer.address, fill, nbytes)
        self._buffers.append(buffer)  # or its address could be another's while a queued copy still writes there
        return buffer

    def launch(
        self,
        kernel: Callable[[], Iterator[None]],
        *,
        reads: Iterable[Range] = (),
        writes: Iterable[Range] = (),
        name: str = "kernel",
    ) -> None:
        """Queue a kernel on the current stream: a generator function, each ``yield`` a step.

        Args:
            kernel: called when the kernel begins.
            reads: (address, length) of all that it reads.
            writes: and of all that it writes.
            name: for the trace and for messages.
        """
        self._queue(_later(kernel), list(reads), list(writes), name)

    def copy(
        self,
        pairs: Callable[[], Sequence[tuple[int, int, int]]],
        *,
        name: str = "copy",
        descriptors: Iterable[Range] = (),
    ) -> None:
        """Queue copies on the current stream, as a DMA engine makes them.

        Args:
            pairs: gives (target, source, length) of each; called at once for the check and again when the copy begins,
                since a device may read its descriptors late.
            name: for the trace and for messages; schedules know "store" and "load".
            descriptors: (address, length) of the arrays from which ``pairs`` reads. The host counts as having written
                them just now.
        """
        now, arrays = pairs(), list(descriptors)
        with self.lock:
            self.host_access(arrays, f"the host, preparing a {name}", is_write=True)
            reads = [(source, n) for _, source, n in now] + arrays
            self._queue(_later(lambda: _torn(pairs())), reads, [(to, n) for to, _, n in now], name)

    def host_access(self, ranges: Iterable[Range], label: str = "the host", *, is_write: bool) -> None:
        """Say which bytes the host is about to touch; raises RaceError if something may still touch them."""
        with self.lock:
            self.progress()
            if self._checks:
                self.races.host_access(ranges, label, is_write=is_write)

    def synchronize(self) -> None:
        """Run until every stream is empty."""
        for stream in list(self._streams):
            stream.synchronize()

    # -- the scheduler ------------------------------------------------------------------------------------------

    def progress(self, at_most: int = _MAX_STEPS_PER_CALL) -> None:
        """Let the device run a little: up to so many steps, drawn by the seed."""
        with self.lock:
            n = self._rng.randrange(at_most + 1)
            while (self.schedule is SimSchedule.EAGER or n > 0) and self._step():
                n -= 1

    def run_until(self, happened: Callable[[], bool], what: str) -> None:
        """Run until something has happened. Raises DeadlockError if it never can."""
        self.host_waits.append((what, threading.current_thread().name))
        while not happened():
            if not self._step():
                heads = ", ".join(f"{stream.name}: {stream.tasks[0].name}" for stream in self._streams if stream.tasks)
                raise DeadlockError(f"the host waits for {what}, which can never end; at the heads of queues: {heads}")

    def _queue(self, steps: Iterator[None], reads: list[Range], writes: list[Range], name: str) -> None:
        with self.lock:
            stream = self.current_stream()
            if self._checks:
                self.races.task(stream.number, stream.clock, reads, writes, f"{name} on {stream.name}")
            stream.tasks.append(_Task(name, steps, self.step))
            self.progress()

    def _step(self) -> bool:
        stream = self._pick()
        if stream is None:
            return False
        self.step += 1
        task = stream.tasks[0]
        if task.began is None:
            task.began = self.step
        if next(task.steps, self) is self:
            stream.tasks.popleft()
            if task.traced:
                self.trace.append(SimSpan(task.name, stream.name, task.submitted, task.began, self.step))
        return True

    def _pick(self) -> SimStream | None:
        ready = [stream for stream in self._streams if stream.tasks and not stream.tasks[0].is_blocked()]
        preferred = [stream for stream in ready if self._prefers(stream)]
        return self._rng.choice(preferred or ready) if ready else None

    def _prefers(self, stream: SimStream) -> bool:
        match self.schedule:
            case SimSchedule.COPIES_FIRST:
                return stream is not self.compute
            case SimSchedule.COMPUTE_FIRST:
                return stream is self.compute
            case SimSchedule.LOADS_LAST:
                return stream.tasks[0].name != "load"
            case SimSchedule.STORES_LAST:
                return stream.tasks[0].name != "store"
            case _:
                return True


def overlaps(a: SimSpan, b: SimSpan) -> bool:
    """Whether two tasks were both under way at some step."""
    return a.began < b.ended and b.began < a.ended


def _later(make: Callable[[], Iterator[None]]) -> Iterator[None]:
    yield from make()


def _torn(pairs: Sequence[tuple[int, int, int]]) -> Iterator[None]:
    for target, source, nbytes in pairs:
        ctypes.memset(target, POISON, nbytes)
        yield
        for at in range(0, nbytes, _CHUNK_NBYTES):
            ctypes.memmove(target + at, source + at, min(_CHUNK_NBYTES, nbytes - at))
            yield
