"""Streams and events of an NPU that notice when torch_npu's task queue has ended, of which it tells only once.

torch_npu hands work to a thread of its own, by a queue. When a call fails there, the next call, whosever it is, raises
the error, once. From then on the queue takes work and drops it: copies and kernels do not happen, and nothing says so.
Synchronizing succeeds. An event recorded after the failure never happens, and ``torch.Event.synchronize`` waits for it
in a busy loop. Worst, an event that was in the queue when it failed, behind the copy that failed, *counts as happened*:
torch_npu takes all records for done, and CANN says complete of an event that was never recorded.

So an event of ours has happened only when a second one, recorded after that was seen, has happened too; and whoever
meets an error looks whether the device still does anything. Found with torch_npu 2.13 over a stand-in for CANN.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from tierkv.device.runtime import DeviceLostError

_NAP_S = 0.000_05
_LONGEST_NAP_S = 0.002

_CANARY_S = 5.0
"""What an event on an idle stream may take: microseconds, but for a host that is busy with something else."""

_N_CANARIES = 4
"""Streams come from a pool that wraps round: one or another may be somebody's, and busy; not all."""

_DOUBT_S = 10.0
"""After so long a wait somebody asks whether anything happens at all."""


class Watch:
    """Whether the device still does anything. Any thread may ask."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle = [torch.Stream(device=device) for _ in range(_N_CANARIES)]
        self._lost: str | None = None
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raises DeviceLostError if the device is known to be lost."""
        if self._lost is not None:
            raise DeviceLostError("device", self._lost)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Look into any error raised within; nothing is begun on a lost device."""
        self.check()
        try:
            yield
        except Exception as error:
            self.look(repr(error))
            raise

    def look(self, why: str) -> None:
        """Give streams that nobody uses nothing to do, and see whether that gets done.

        Raises:
            DeviceLostError: it does not.
        """
        with self._lock:
            self.check()
            if not self._is_alive():
                self._lost = f"the NPU drops what it is given since this: {why}"
                self.check()

    def witness(self) -> torch.Event:
        """An event that happens if the device was still there when it was recorded; raises if it shows at once."""
        event = torch.Event(device=self._device)
        event.record(self._idle[0])
        return event

    def _is_alive(self) -> bool:
        try:
            events = [torch.Event(device=self._device) for _ in self._idle]
            for event, stream in zip(events, self._idle, strict=True):
                event.record(stream)
            until_s = time.monotonic() + _CANARY_S
            while not any(event.query() for event in events):
                if time.monotonic() > until_s:
                    return False
                time.sleep(_LONGEST_NAP_S)
        except Exception:  # noqa: BLE001 - as good an answer as none
            return False
        return True


class NpuEvent(torch.Event):
    """An event that has happened only if the device is still there. Make it with :func:`new_event`."""

    watch: Watch
    _refused: Exception | None = None
    _doubt_at_s: float | None = None
    """None: never recorded."""
    _witness: torch.Event | None = None

    def record(self, stream: Any, /) -> None:
        try:
            with self.watch.guard():
                super().record(stream)
        except Exception as error:
            self._refused = error  # for torch it was never recorded, which is as good as ended
            raise
        self._doubt_at_s = time.monotonic() + _DOUBT_S

    def query(self) -> bool:
        if self._refused is not None:
            raise self._refused
        with self.watch.guard():
            if self._has_happened():
                return True
        if self._doubt_at_s is not None and time.monotonic() > self._doubt_at_s:
            self.watch.look(f"an event has not happened for {_DOUBT_S:.0f} s")
            self._doubt_at_s = time.monotonic() + _DOUBT_S
        return False

    def synchronize(self) -> None:
        nap_s = _NAP_S
        while not self.query():
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)

    def _has_happened(self) -> bool:
        witness = self._witness
        if witness is None:
            if not super().query():
                return False
            if self._doubt_at_s is None:
                return True
            witness = self._witness = self.watch.witness()
        happened: bool = witness.query()
        return happened


class NpuStream(torch.Stream):
    """A stream whose errors are looked into. Make it with :func:`new_stream`."""

    watch: Watch

    def wait_event(self, event: Any, /) -> None:
        with self.watch.guard():
            super().wait_event(event)


@contextlib.contextmanager
def using(stream: NpuStream, watch: Watch) -> Iterator[None]:
    """Make a stream the current one. Leaving it, too, may be what raises torch_npu's one error."""
    with watch.guard(), stream:
        yield


def new_event(device: torch.device, watch: Watch) -> NpuEvent:
    """An event on this device."""
    event = NpuEvent(device=device)
    event.watch = watch
    return event


def new_stream(device: torch.device, watch: Watch) -> NpuStream:
    """A stream on this device."""
    stream = NpuStream(device=device)
    stream.watch = watch
    return stream
