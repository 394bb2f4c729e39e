"""The seam between one transfer engine and the accelerators: what a device must offer for copies to be right on it.

Needs numpy and nothing else: no device's library is imported here. ``tierkv.device.engine`` is written against this
page alone, so what it proves on a simulated device holds for every runtime that keeps these promises; the contract
suite in ``tests/device`` says whether one does.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tierkv._extras import missing
from tierkv.errors import TierError

Int64Array = Any  # numpy.ndarray of int64, one dimension, contiguous


class DeviceLostError(TierError):
    """The device does no work any more, and may drop what it is given without an error: whoever goes on has garbage."""


class Direction(StrEnum):
    """Which way a copy goes."""

    STORE = "store"
    """Device to slots."""
    LOAD = "load"
    """Slots to device."""


class HostKind(StrEnum):
    """How a device reaches a piece of host memory; decides who may wait for whom."""

    PINNED = "pinned"
    """Allocated by the device's own host allocator: copies run beside the host."""
    REGISTERED = "registered"
    """Ordinary memory, page-locked after the fact: copies run beside the host."""
    PAGEABLE = "pageable"
    """Neither: a copy may block whoever submits it, so the engine submits from a thread of its own."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes in one piece: the storage under a device tensor, or a piece of the slots."""

    address: int
    nbytes: int
    owner: Any = field(repr=False, compare=False)
    """What keeps it alive. Device memory: what the device's framework calls a tensor, flat, one byte an element, whose
    first element lies at ``address``. Host memory: such a tensor in host memory, or a writable buffer."""
    kind: HostKind | None = None
    """None for device memory."""


class Strip(NamedTuple):
    """Pairs ``first <= i < stop`` of a batch: equally long, between one device memory and one piece of host memory."""

    first: int
    stop: int
    nbytes: int
    """Of each pair."""
    device: Memory
    host: Memory


@dataclass(frozen=True, slots=True, eq=False)
class CopyBatch:
    """All bytes of one copy, as pairs of addresses.

    Pair ``i`` is ``nbytes[i]`` bytes at ``device[i]`` and at ``host[i]``. The engine has checked that each lies within
    its strip's memories. Targets do not overlap, so pairs may be copied in any order.

    The arrays are descriptors that a device may read late. They belong to the batch until its event has been seen;
    then the engine uses them for another one. Whoever wants them longer copies them.
    """

    direction: Direction
    device: Int64Array
    host: Int64Array
    nbytes: Int64Array
    strips: tuple[Strip, ...]
    """The same pairs by memory, in order, without gaps."""

    @property
    def sources(self) -> Int64Array:
        """Addresses read."""
        return self.device if self.direction is Direction.STORE else self.host

    @property
    def targets(self) -> Int64Array:
        """Addresses written."""
        return self.host if self.direction is Direction.STORE else self.device

    @property
    def total_nbytes(self) -> int:
        return int(self.nbytes.sum())


class Event(Protocol):
    """A point in a stream's work. ``torch.Event`` is one. Any thread may ask; one thread records."""

    def record(self, stream: Any, /) -> None:
        """Mark the point behind all work queued on ``stream`` so far. The engine records an event at most once."""
        ...

    def query(self) -> bool:
        """Whether the work before the point has ended. Never blocks.

        True also means that the caller sees what that work wrote. Raises if the work failed or nobody can say.
        """
        ...

    def synchronize(self) -> None:
        """Block until the work before the point has ended; lets other Python threads run.

        Raises as :meth:`query`, but not before that work has ended or the device is lost.
        """
        ...


class TimedEvent(Protocol):
    """Optional: an event that knows without asking the device how long the copies before it ran."""

    @property
    def took_s(self) -> float | None:
        """None while that is not known."""
        ...


@runtime_checkable
class HostWatcher(Protocol):
    """Optional: a runtime that checks races, and so wants to know what the host itself writes."""

    def host_writes(self, address: int, nbytes: int, /) -> None: ...


@runtime_checkable
class HostTrimmer(Protocol):
    """Optional: a runtime whose allocator keeps host memory that was let go."""

    def trim_host(self) -> None:
        """Give it back to the machine. Never raises."""
        ...


class Stream(Protocol):
    """A queue of device work, run in order. ``torch.Stream`` is one. Two streams run in no order but an event's."""

    def wait_event(self, event: Any, /) -> None:
        """Work queued from now on starts after ``event``, as last recorded. Never blocks the host."""
        ...

    def synchronize(self) -> None:
        """Block until all work queued so far has ended."""
        ...


class Pin(Protocol):
    """A page-locked range of host memory."""

    def release(self) -> None:
        """Undo it. Called once, after the last copy in that range has ended and before the memory is unmapped."""
        ...


class DeviceRuntime(Protocol):
    """What one kind of device offers the engine. Constructing one imports what it needs and probes what works.

    The engine calls all methods from the thread that submits, but for ``use``, ``copy_batch``, ``new_event`` and the
    methods of streams and events, which its own threads call too where slots are pageable. A raw stream handle is
    never kept between calls: a waiting event may still sit in a queue of the framework's that a raw handle overtakes.
    """

    @property
    def name(self) -> str:
        """The device's kind: ``npu``, ``cuda``, ``cpu`` or the name of a simulated one."""
        ...

    @property
    def path(self) -> str:
        """How :meth:`copy_batch` moves bytes here, as its probe found at start: for logs, statistics and bench."""
        ...

    @property
    def blocks_on_pageable(self) -> bool:
        """Whether ``copy_batch`` may block on pageable memory: True on all accelerators."""
        ...

    def memory(self, tensor: Any) -> Memory:
        """The storage under one of this device's tensors, from the tensor's first byte to its last.

        Args:
            tensor: in the shape ``[n_blocks, page_nbytes]``, one byte an element, rows at any stride.

        Raises:
            TierError: the tensor lies elsewhere.
        """
        ...

    def new_stream(self) -> Stream:
        """A stream that nothing else uses. The engine makes two, once: pools of streams wrap round."""
        ...

    def new_event(self) -> Event:
        """An event without timing. One that was never recorded counts as ended."""
        ...

    def current_stream(self) -> Stream:
        """The stream on which the calling thread's device work runs at this moment. Not to be kept."""
        ...

    def use(self, stream: Stream, /) -> AbstractContextManager[Any]:
        """Make ``stream`` the calling thread's current stream for a while."""
        ...

    def copy_batch(self, batch: CopyBatch, /) -> Any:
        """Queue all pairs on the calling thread's current stream, and return.

        Does not block if every host memory of the batch is pinned or registered.

        Returns:
            What must live until an event recorded behind the copies has ended, besides the batch itself and its
            memories; the engine holds it till then.

        Raises:
            Exception: some pairs may have been queued and others not. The engine still waits for those that were.
        """
        ...

    def copy_plain(self, batch: CopyBatch, /) -> None:
        """Copy now, by the simplest means that the device has, and return when all bytes have arrived.

        After the work of the current stream. For a load whose copy by :meth:`copy_batch` failed.
        """
        ...

    def alloc_host(self, nbytes: int, /) -> Memory:
        """Zeroed host memory of the device's own allocator, ``kind`` PINNED, its address a multiple of 4096.

        Callers ask for at most 1 GiB at a time: larger pieces fail on some drivers with memory to spare.

        Raises:
            TierError: this device has no such memory, or not that much is left.
        """
        ...

    def pin(self, memory: Memory, /) -> Pin | None:
        """Page-lock host memory in place; None if the device cannot or will not. Never raises.

        Args:
            memory: whole slots, at most 1 GiB unless one is longer; its address a multiple of 4096.

        After it copies of that range must really not block: a runtime that cannot tell says None.
        """
        ...

    def close(self) -> None:
        """Keep no reference to any memory and no thread. Idempotent; the engine has waited for every copy."""
        ...


def open_runtime(device: Any) -> DeviceRuntime:
    """The runtime of a device, with what it needs imported and probed.

    Args:
        device: ``torch.device`` or its text: "cpu", "cuda:1", "npu:0".

    Raises:
        TierError: tierkv has no runtime for it, or its libraries are missing.
    """
    kind = str(device).partition(":")[0]
    if kind not in _RUNTIMES:
        raise TierError("device", f"no runtime for {device!s}: tierkv has {', '.join(_RUNTIMES)}")
    module, name = _RUNTIMES[kind]
    try:
        runtime = getattr(importlib.import_module(f"tierkv.device.{module}"), name)
    except ModuleNotFoundError as error:
        raise TierError("device", f"{device!s} needs {missing(error)}") from error
    return runtime() if kind == "cpu" else runtime(device)


_RUNTIMES = {"cpu": ("cpu", "CpuRuntime"), "cuda": ("cuda", "CudaRuntime"), "npu": ("npu", "NpuRuntime")}
