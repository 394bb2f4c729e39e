"""The simulated accelerator as a runtime of the device tier, with faults on order. Needs numpy, as that tier does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from tierkv.errors import TierError
from tierkv.testing._sim_device import SimBuffer, SimDevice, SimEvent, SimStream

if TYPE_CHECKING:
    from tierkv.device.runtime import CopyBatch, Memory

FAULTS = ("copy_batch", "copy_plain", "query", "synchronize", "record", "pin", "alloc_host")


class SimRuntime:
    """A :class:`tierkv.device.runtime.DeviceRuntime` over a :class:`SimDevice`.

    Args:
        device: whose streams, events and race check.
        pins: whether :meth:`pin` can lock memory. A batch on memory that is not locked blocks whoever submits it until
            the stream is empty, as real devices do.

    Attributes:
        n_calls: how often each method that can be made to fail was called.
        n_pinned: page locks that are held.
    """

    name = "sim"
    path = "simulated"
    blocks_on_pageable = True

    def __init__(self, device: SimDevice, *, pins: bool = True) -> None:
        self.device = device
        self.n_calls: Counter[str] = Counter()
        self.n_pinned = 0
        self.closed = False
        self._pins = pins
        self._faults: dict[str, set[int]] = {}

    def fail(self, what: str, *calls: int) -> None:
        """Let the calls of ``what`` with these numbers fail, counted from 1 over the runtime's life.

        Args:
            what: "copy_batch" (half of the pairs are queued all the same), "copy_plain", "query", "synchronize",
                "record", "pin" or "alloc_host".
            calls: their numbers.
        """
        if what not in FAULTS:
            raise ValueError(f"{what!r} cannot be made to fail; what can: {', '.join(FAULTS)}")
        self._faults.setdefault(what, set()).update(calls)

    def memory(self, tensor: SimBuffer) -> Memory:
        from tierkv.device.runtime import Memory  # noqa: PLC0415 - the kit is imported without numpy

        return Memory(tensor.address, tensor.nbytes, tensor)

    def new_stream(self) -> SimStream:
        number = self.device.n_streams
        return self.device.add_stream(_Stream(self, number))

    def new_event(self) -> SimEvent:
        return _Event(self)

    def current_stream(self) -> SimStream:
        return self.device.current_stream()

    def use(self, stream: Any, /) -> AbstractContextManager[Any]:
        return self.device.use(stream)

    def copy_batch(self, batch: CopyBatch, /) -> object:
        """Queues the pairs; their descriptors are read when the copy begins, not before."""
        fails = self.count("copy_batch")
        self._copy(batch, slice(0, len(batch.nbytes) // 2) if fails else slice(None))
        if fails:
            raise _planted("copy_batch")
        if any(strip.host.kind == "pageable" for strip in batch.strips):
            self.current_stream().synchronize()
        return None

    def copy_plain(self, batch: CopyBatch, /) -> None:
        if self.count("copy_plain"):
            raise _planted("copy_plain")
        self._copy(batch, slice(None))
        self.current_stream().synchronize()

    def alloc_host(self, nbytes: int, /) -> Memory:
        from tierkv.device.runtime import HostKind, Memory  # noqa: PLC0415

        if self.count("alloc_host"):
            raise TierError(self.name, f"{nbytes} bytes of host memory are not to be had: a planted failure")
        buffer = self.device.alloc(nbytes, fill=0)
        return Memory(buffer.address, nbytes, buffer, HostKind.PINNED)

    def pin(self, memory: Memory, /) -> Any:  # noqa: ARG002 - simulated memory is locked by being counted
        if self.count("pin") or not self._pins:
            return None
        self.n_pinned += 1
        return _Pin(self)

    def host_writes(self, address: int, nbytes: int, /) -> None:
        self.device.host_access([(address, nbytes)], "the engine, zeroing", is_write=True)

    def close(self) -> None:
        self.closed = True

    def count(self, what: str) -> bool:
        """Count a call; whether it is to fail."""
        self.n_calls[what] += 1
        return self.n_calls[what] in self._faults.get(what, ())

    def _copy(self, batch: CopyBatch, part: slice) -> None:
        arrays = [array[part] for array in (batch.targets, batch.sources, batch.nbytes)]

        def pairs() -> list[tuple[int, int, int]]:
            return list(zip(*(array.tolist() for array in arrays), strict=True))

        self.device.copy(pairs, name=str(batch.direction.value), descriptors=_ranges(arrays))


class _Stream(SimStream):
    def __init__(self, runtime: SimRuntime, number: int) -> None:
        super().__init__(runtime.device, number, f"stream {number}")
        self._runtime = runtime

    def synchronize(self) -> None:
        if self._runtime.count("synchronize"):
            raise _planted("synchronize")
        super().synchronize()


class _Event(SimEvent):
    def __init__(self, runtime: SimRuntime) -> None:
        super().__init__(runtime.device)
        self._runtime = runtime

    def record(self, stream: SimStream, /) -> None:
        if self._runtime.count("record"):
            raise _planted("record")
        super().record(stream)

    def query(self) -> bool:
        if self._runtime.count("query"):
            raise _planted("query")
        return super().query()

    def synchronize(self) -> None:
        if self._runtime.count("synchronize"):
            raise _planted("synchronize")
        super().synchronize()


class _Pin:
    def __init__(self, runtime: SimRuntime) -> None:
        self._runtime = runtime

    def release(self) -> None:
        self._runtime.n_pinned -= 1


def _planted(what: str) -> RuntimeError:
    return RuntimeError(f"{what} failed: a planted failure")


def _ranges(arrays: list[Any]) -> Iterator[tuple[int, int]]:
    return ((array.__array_interface__["data"][0], array.nbytes) for array in arrays)
