"""The runtime for KV tensors in host memory: one thread a stream, vectorised copies.

A real backend: its streams run beside the submitter and late, as an accelerator's do. What runs on the host itself (the
model's layers) is done by the time anybody can ask, so the host's own stream is always empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any

import numpy as np

from tierkv.device._rows import copy_rows
from tierkv.device.runtime import CopyBatch, HostKind, Memory
from tierkv.errors import TierError

__all__ = ["CpuEvent", "CpuRuntime", "CpuStream", "HostStream", "copy_rows"]

_ALIGN = 4096


class CpuEvent:
    """A point in a :class:`CpuStream`. Fails if a copy between the event before it and itself did."""

    def __init__(self) -> None:
        self._recorded = False
        self._happened = threading.Event()
        self._error: Exception | None = None
        self.took_s: float | None = None
        """How long the copies since the event before ran."""

    def record(self, stream: CpuStream | HostStream, /) -> None:
        self._recorded = True
        stream.mark(self)

    def is_past(self) -> bool:
        """Whether nothing is left to wait for, well or not."""
        return not self._recorded or self._happened.is_set()

    def query(self) -> bool:
        if not self.is_past():
            return False
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        if self._recorded:
            self._happened.wait()
        self.query()

    def happen(self, error: Exception | None, took_s: float) -> None:
        """Called by the stream."""
        self._error, self.took_s = error, took_s
        self._happened.set()


class HostStream:
    """The host itself: whatever it did before a call is done."""

    def mark(self, event: CpuEvent) -> None:
        event.happen(None, 0.0)

    def wait_event(self, event: CpuEvent, /) -> None:
        """Blocks: the host has no later."""
        with contextlib.suppress(Exception):  # a failed copy is told to whoever asks its event
            event.synchronize()

    def synchronize(self) -> None:
        """Nothing is ever queued."""


class CpuStream:
    """A queue of copies and the daemon thread that runs them; the thread starts with the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: SimpleQueue[CopyBatch | tuple[str, CpuEvent] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, work: CopyBatch | tuple[str, CpuEvent]) -> None:
        self._work.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def mark(self, event: CpuEvent) -> None:
        self.put(("happen", event))

    def wait_event(self, event: CpuEvent, /) -> None:
        if not event.is_past():  # the host's own always is: an entry would wake the thread for nothing
            self.put(("wait", event))

    def synchronize(self) -> None:
        event = CpuEvent()
        event.record(self)
        with contextlib.suppress(Exception):
            event.synchronize()

    def close(self) -> None:
        """Wait for what is queued."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._work.put(None)
            thread.join()

    def _run(self) -> None:
        error: Exception | None = None
        took_s = 0.0
        while (work := self._work.get()) is not None:
            if isinstance(work, CopyBatch):
                began_s = time.perf_counter()
                try:
                    copy_rows(work)
                except Exception as caught:  # noqa: BLE001 - told by the next event; a lost thread would hang all later ones
                    error = caught
                took_s += time.perf_counter() - began_s
                continue
            verb, event = work
            if verb == "happen":
                event.happen(error, took_s)
                error, took_s = None, 0.0
            else:
                with contextlib.suppress(Exception):  # the failure of other work is told where that is asked for
                    event.synchronize()


class CpuRuntime:
    """Host memory as a device; see :class:`tierkv.device.runtime.DeviceRuntime`.

    Tensors are torch's in host memory, or anything that exports a writable buffer, such as numpy's arrays.
    """

    name = "cpu"
    path = "numpy rows"
    blocks_on_pageable = False

    def __init__(self) -> None:
        self._host = HostStream()
        self._streams: list[CpuStream] = []
        self._in_use = threading.local()

    def memory(self, tensor: Any) -> Memory:
        array = tensor.detach().numpy() if hasattr(tensor, "detach") else np.asarray(tensor)
        address = array.__array_interface__["data"][0]
        nbytes = sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)) + array.itemsize
        return Memory(address, nbytes, tensor)

    def new_stream(self) -> CpuStream:
        stream = CpuStream(f"tierkv-copy-{len(self._streams)}")
        self._streams.append(stream)
        return stream

    def new_event(self) -> CpuEvent:
        return CpuEvent()

    def current_stream(self) -> CpuStream | HostStream:
        return getattr(self._in_use, "stream", self._host)

    @contextlib.contextmanager
    def _using(self, stream: Any) -> Iterator[None]:
        before = self.current_stream()
        self._in_use.stream = stream
        try:
            yield
        finally:
            self._in_use.stream = before

    def use(self, stream: Any, /) -> AbstractContextManager[None]:
        return self._using(stream)

    def copy_batch(self, batch: CopyBatch, /) -> None:
        stream = self.current_stream()
        if isinstance(stream, HostStream):
            copy_rows(batch)
        else:
            stream.put(batch)

    def copy_plain(self, batch: CopyBatch, /) -> None:
        for target, source, nbytes in zip(
            batch.targets.tolist(), batch.sources.tolist(), batch.nbytes.tolist(), strict=True
        ):
            ctypes.memmove(target, source, nbytes)

    def alloc_host(self, nbytes: int, /) -> Memory:
        try:
            whole: Any = np.zeros(nbytes + _ALIGN, np.uint8)
        except MemoryError as error:
            raise TierError("device", f"{nbytes} bytes of host memory are not to be had") from error
        skip = -whole.__array_interface__["data"][0] % _ALIGN
        part = whole[skip : skip + nbytes]
        return Memory(part.__array_interface__["data"][0], nbytes, part, HostKind.PINNED)

    def pin(self, memory: Memory, /) -> None:  # noqa: ARG002 - nothing to gain: the copying thread reads any memory
        return None

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams = []
