"""Copies to and from pageable host memory by way of a little pinned memory, one piece on its way as another is moved.

A device copies pageable memory piece by piece through a buffer of its driver's, blocking whoever asks. Going through
pinned memory of our own costs one more copy by the host, but the device sees few and whole batches, at its full speed.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from tierkv.device.runtime import CopyBatch, DeviceRuntime, Direction, Event, HostWatcher, Memory, Pin, Stream, Strip

HALF_NBYTES = 16 << 20
"""Of each half of each direction's ring: 64 MiB of pinned memory in all."""

_ALIGN_NBYTES = 64
_N_HALVES = 2


class _Part(NamedTuple):
    """As much of a batch as a half of the ring holds: the same pairs, and where each lies in the half."""

    strips: list[tuple[Strip, int, int, int]]
    """(strip, first, stop, offset in the half)."""
    n_pairs: int


class _Half:
    """One half of a ring, and the event of the last copy that touches it."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.event: Event | None = None

    def wait(self) -> None:
        event, self.event = self.event, None
        if event is not None:
            event.synchronize()


class StagedRuntime:
    """A :class:`~tierkv.device.runtime.DeviceRuntime` whose batches on pageable memory go through a pinned ring.

    ``copy_batch`` blocks, as it does on pageable memory anyway: the engine calls it from a thread for each direction.

    Args:
        inner: the device.
        half_nbytes: of each half of each direction's ring; a pair that is longer is left to ``inner``.

    Raises:
        TierError: the device has not that much pinned memory.
    """

    blocks_on_pageable = True

    def __init__(self, inner: DeviceRuntime, *, half_nbytes: int = HALF_NBYTES) -> None:
        self._inner = inner
        self._half_nbytes = half_nbytes
        self._rings = {
            direction: [_Half(inner.alloc_host(half_nbytes)) for _ in range(_N_HALVES)] for direction in Direction
        }

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def path(self) -> str:
        return f"{self._inner.path}, staged through pinned memory"

    def memory(self, tensor: Any) -> Memory:
        return self._inner.memory(tensor)

    def new_stream(self) -> Stream:
        return self._inner.new_stream()

    def new_event(self) -> Event:
        return self._inner.new_event()

    def current_stream(self) -> Stream:
        return self._inner.current_stream()

    def use(self, stream: Any, /) -> AbstractContextManager[Any]:
        return self._inner.use(stream)

    def copy_batch(self, batch: CopyBatch, /) -> Any:
        if any(strip.nbytes > self._half_nbytes for strip in batch.strips):
            return self._inner.copy_batch(batch)
        held: list[Any] = []
        ring = self._rings[batch.direction]
        landing: tuple[_Half, _Part] | None = None
        for i, part in enumerate(_parts(batch, self._half_nbytes)):
            half = ring[i % _N_HALVES]
            half.wait()
            if batch.direction is Direction.LOAD:
                self._move(batch, part, half)
            self._launch(batch, part, half, held)
            if batch.direction is Direction.STORE:
                if landing is not None:  # the part before, while this one is on its way
                    self._land(batch, *landing)
                landing = (half, part)
        if landing is not None:
            self._land(batch, *landing)
        return held

    def copy_plain(self, batch: CopyBatch, /) -> None:
        self._inner.copy_plain(batch)

    def alloc_host(self, nbytes: int, /) -> Memory:
        return self._inner.alloc_host(nbytes)

    def pin(self, memory: Memory, /) -> Pin | None:
        return self._inner.pin(memory)

    def close(self) -> None:
        self._rings = {}
        self._inner.close()

    def _launch(self, batch: CopyBatch, part: _Part, half: _Half, held: list[Any]) -> None:
        """Queue one part between the device and the ring; what was queued of it ends at the half's event."""
        staged = _staged(batch, part, half.memory)
        held.append(staged)
        try:
            held.append(self._inner.copy_batch(staged))
        finally:
            self._mark(half)

    def _mark(self, half: _Half) -> None:
        stream, event = self._inner.current_stream(), self._inner.new_event()
        try:
            event.record(stream)
        except Exception:
            stream.synchronize()  # or the half would be written while this copy still reads it
            raise
        half.event = event

    def _land(self, batch: CopyBatch, half: _Half, part: _Part) -> None:
        half.wait()
        self._move(batch, part, half)

    def _move(self, batch: CopyBatch, part: _Part, half: _Half) -> None:
        """The host's own copy, between the slots and the ring. Lets other threads run."""
        is_load = batch.direction is Direction.LOAD
        for strip, first, stop, offset in part.strips:
            slots = batch.host[first:stop].tolist()
            ring = range(half.memory.address + offset, half.memory.address + half.memory.nbytes, _aligned(strip.nbytes))
            if isinstance(self._inner, HostWatcher):
                for address in ring[: stop - first] if is_load else slots:
                    self._inner.host_writes(address, strip.nbytes)
            targets, sources = (ring, slots) if is_load else (slots, ring)
            deque(map(ctypes.memmove, targets, sources, repeat(strip.nbytes, stop - first)), maxlen=0)


def _parts(batch: CopyBatch, half_nbytes: int) -> Iterator[_Part]:
    """The batch cut into parts that fit."""
    strips: list[tuple[Strip, int, int, int]] = []
    used = n_pairs = 0
    for strip in batch.strips:
        step, first = _aligned(strip.nbytes), strip.first
        while first < strip.stop:
            # The last pair needs no padding behind it.
            n = min(strip.stop - first, (half_nbytes - used - strip.nbytes) // step + 1)
            if n > 0:
                strips.append((strip, first, first + n, used))
                first, used, n_pairs = first + n, used + n * step, n_pairs + n
            else:
                yield _Part(strips, n_pairs)
                strips, used, n_pairs = [], 0, 0
    if strips:
        yield _Part(strips, n_pairs)


def _staged(batch: CopyBatch, part: _Part, ring: Memory) -> CopyBatch:
    """The part's pairs with the ring in the slots' place."""
    arrays: Any = np.empty((3, part.n_pairs), np.int64)
    device, host, nbytes = arrays
    strips, at = [], 0
    for strip, first, stop, offset in part.strips:
        end = at + stop - first
        device[at:end] = batch.device[first:stop]
        host[at:end] = ring.address + offset + _aligned(strip.nbytes) * np.arange(stop - first)
        nbytes[at:end] = strip.nbytes
        strips.append(Strip(at, end, strip.nbytes, strip.device, ring))
        at = end
    return CopyBatch(batch.direction, device, host, nbytes, tuple(strips))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES
