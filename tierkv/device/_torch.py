"""What torch offers the engine on any accelerator: generic streams, events and pinned memory, and three ways to copy.

Nothing here names a device library; :mod:`tierkv.device.npu` and :mod:`tierkv.device.cuda` do, when they are opened.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from tierkv.device.runtime import CopyBatch, Direction, HostKind, Memory, Strip
from tierkv.errors import TierError

logger = logging.getLogger(__name__)

MAX_PAIRS = 16_384
"""Of one ``_foreach_copy_``: it keeps its arrays on the stack, and some 200,000 pairs overflow 8 MB of it."""

_MAX_VIEWS = 65_536
"""Kept for reuse: making one takes some 2 us, holding one some 0.5 KB."""

_ALIGN_NBYTES = 4096
_PROBE_NBYTES = 256

CopyWay = Callable[[CopyBatch], Any]


class Views:
    """Tensors over pieces of known memories, made once and kept while there is room."""

    def __init__(self) -> None:
        self._flat: dict[int, torch.Tensor] = {}
        self._views: dict[tuple[int, int], torch.Tensor] = {}

    def of(self, batch: CopyBatch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(targets, sources) of a batch."""
        device: list[torch.Tensor] = []
        host: list[torch.Tensor] = []
        for strip in batch.strips:
            pairs = slice(strip.first, strip.stop)
            device += self._pieces(strip.device, batch.device[pairs].tolist(), strip)
            host += self._pieces(strip.host, batch.host[pairs].tolist(), strip)
        return (host, device) if batch.direction is Direction.STORE else (device, host)

    def flat(self, memory: Memory) -> torch.Tensor:
        """The whole memory as bytes."""
        if memory.address not in self._flat:
            self._flat[memory.address] = _flat(memory)
        return self._flat[memory.address]

    def clear(self) -> None:
        self._views.clear()
        self._flat.clear()

    def _pieces(self, memory: Memory, addresses: list[int], strip: Strip) -> Iterator[torch.Tensor]:
        flat, n = self.flat(memory), strip.nbytes
        for address in addresses:
            view = self._views.get((address, n))
            if view is None:
                if len(self._views) >= _MAX_VIEWS:
                    self._views.clear()
                start = address - memory.address
                view = self._views[address, n] = flat[start : start + n]
            yield view


class TorchRuntime:
    """Streams, events and copies of one torch accelerator; see :class:`tierkv.device.runtime.DeviceRuntime`.

    Args:
        device: ``torch.device`` or its text.

    Raises:
        TierError: no way to copy works here.
    """

    name = "torch"
    blocks_on_pageable = True

    def __init__(self, device: Any) -> None:
        self.device = torch.device(device)
        if self.device.index is None:
            self.device = torch.device(self.device.type, torch.accelerator.current_device_index())
        self._views = Views()
        self._way, self._path = self._choose()

    @property
    def path(self) -> str:
        return self._path

    def memory(self, tensor: Any) -> Memory:
        if tensor.device != self.device:
            raise TierError("device", f"a tensor lies on {tensor.device}, the others on {self.device}")
        nbytes = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        flat = tensor.detach().as_strided((nbytes,), (1,))
        return Memory(tensor.data_ptr(), nbytes, flat)

    def new_stream(self) -> torch.Stream:
        return torch.Stream(device=self.device)

    def new_event(self) -> torch.Event:
        return torch.Event(device=self.device)

    def current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def use(self, stream: Any, /) -> AbstractContextManager[Any]:
        return stream

    def copy_batch(self, batch: CopyBatch, /) -> Any:
        return self._way(batch)

    def copy_plain(self, batch: CopyBatch, /) -> None:
        for target, source in zip(*self._views.of(batch), strict=True):
            target.copy_(source)
        self.current_stream().synchronize()

    def alloc_host(self, nbytes: int, /) -> Memory:
        try:
            # Exactly that much first: torch rounds up to a power of two, and a page on top of 1 GiB would take 2 GiB.
            whole = torch.zeros(nbytes, dtype=torch.int8, pin_memory=True)
            if whole.data_ptr() % _ALIGN_NBYTES:
                whole = torch.zeros(nbytes + _ALIGN_NBYTES, dtype=torch.int8, pin_memory=True)
        except RuntimeError as error:
            raise TierError("device", f"{nbytes} bytes of pinned memory are not to be had: {error}") from error
        skip = -whole.data_ptr() % _ALIGN_NBYTES
        part = whole[skip : skip + nbytes]
        return Memory(part.data_ptr(), nbytes, part, HostKind.PINNED)

    def trim_host(self) -> None:
        with contextlib.suppress(Exception):  # torch before 2.9 has no such call: the memory stays with its allocator
            torch.accelerator.empty_host_cache()

    def pin(self, memory: Memory, /) -> Any:  # noqa: ARG002
        """None: how memory is page-locked is the device library's."""
        return None

    def close(self) -> None:
        self._views.clear()

    # -- ways to copy -------------------------------------------------------------------------------------------

    def batched(self) -> tuple[str, CopyWay] | None:
        """A device library's operator for whole batches, if there is one: (name, how)."""
        return None

    def foreach(self, batch: CopyBatch) -> Any:
        """Torch's copy of lists. It does not note the stream on pinned blocks: the views are held until the event."""
        targets, sources = self._views.of(batch)
        for first in range(0, len(targets), MAX_PAIRS):
            part = slice(first, first + MAX_PAIRS)
            torch._foreach_copy_(targets[part], sources[part], non_blocking=True)
        return targets, sources

    def loop(self, batch: CopyBatch) -> Any:
        targets, sources = self._views.of(batch)
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        return targets, sources

    def _choose(self) -> tuple[CopyWay, str]:
        """The first way that brings a probe's bytes there and back."""
        library = self.batched()
        ways = [library] if library is not None else []
        ways += [("torch._foreach_copy_", self.foreach), ("copy_ one by one", self.loop)]
        refused: list[str] = []
        for path, way in ways:
            try:
                if self._probe(way):
                    if refused:
                        logger.warning("%s: copies by %s, because %s", self.device, path, "; ".join(refused))
                    return way, path
                refused.append(f"{path} gave other bytes back")
            except Exception as error:  # noqa: BLE001 - the next way may work
                refused.append(f"{path} raised {error!r}")
            finally:
                self._views.clear()
        raise TierError("device", f"no way to copy works on {self.device}: {'; '.join(refused)}")

    def _probe(self, way: CopyWay) -> bool:
        """Three pairs of odd places to the device and back, with the events that the engine uses."""
        host = self.alloc_host(4 * _PROBE_NBYTES)
        back = self.alloc_host(4 * _PROBE_NBYTES)
        block = torch.empty(4 * _PROBE_NBYTES, dtype=torch.int8, device=self.device)
        pattern = torch.arange(4 * _PROBE_NBYTES, dtype=torch.int64).remainder(127).to(torch.int8)
        host.owner.copy_(pattern)
        device = Memory(block.data_ptr(), block.numel(), block)
        stream, done = self.new_stream(), self.new_event()
        with self.use(stream):
            held = [
                way(_probe_batch(direction, device, memory))
                for direction, memory in ((Direction.LOAD, host), (Direction.STORE, back))
            ]
            done.record(stream)
        done.synchronize()
        del held
        want = torch.zeros_like(pattern)
        for start in _PROBE_PLACES:
            want[start : start + _PROBE_NBYTES] = pattern[start : start + _PROBE_NBYTES]
        return bool((back.owner == want).all())


_PROBE_PLACES = (0, _PROBE_NBYTES + 64, 2 * _PROBE_NBYTES + 192)


def _probe_batch(direction: Direction, device: Memory, host: Memory) -> CopyBatch:
    places = torch.tensor(_PROBE_PLACES, dtype=torch.int64)
    n = len(_PROBE_PLACES)
    strip = Strip(0, n, _PROBE_NBYTES, device, host)
    sizes = torch.full((n,), _PROBE_NBYTES, dtype=torch.int64)
    arrays = ((places + device.address).numpy(), (places + host.address).numpy(), sizes.numpy())
    return CopyBatch(direction, *arrays, (strip,))


def _flat(memory: Memory) -> torch.Tensor:
    if isinstance(memory.owner, torch.Tensor):
        return memory.owner.view(torch.int8)
    buffer = (ctypes.c_byte * memory.nbytes).from_address(memory.address)
    return torch.frombuffer(buffer, dtype=torch.int8)


def descriptors(batch: CopyBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sources, targets, lengths) as tensors over the batch's own arrays."""
    sources, targets, lengths = (torch.from_numpy(a) for a in (batch.sources, batch.targets, batch.nbytes))
    return sources, targets, lengths
