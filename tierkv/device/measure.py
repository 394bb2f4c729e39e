"""How fast a device copies chunks to host memory and back, by kind of host memory, beside one plain large copy.

For ``tierkv bench device``. It runs the engine that serves; on host memory it needs numpy alone, elsewhere torch.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tierkv.device.engine import CopyJob, TransferEngine
from tierkv.device.layout import DeviceLayout, PageRef
from tierkv.device.lowering import Pages
from tierkv.device.runtime import DeviceRuntime, Direction, HostKind, open_runtime
from tierkv.device.slots import HostSlots
from tierkv.device.staging import StagedRuntime
from tierkv.errors import TierError


class Speeds(NamedTuple):
    """Bytes a second."""

    store: float
    """Device to host."""
    load: float
    """Host to device."""


def best_device() -> str:
    """The accelerator of this machine, as torch names it; "cpu" if there is none, or no torch."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return "cpu"
    with contextlib.suppress(ImportError, OSError):  # with it torch knows NPUs
        importlib.import_module("torch_npu")
    if not torch.accelerator.is_available():
        return "cpu"
    found = torch.accelerator.current_accelerator()
    return f"{found.type}:{torch.accelerator.current_device_index()}"


STAGED = "staged"
"""Pageable memory by way of a pinned ring: what the device tier does where it can lock no slots."""


def kinds_of(device: str) -> list[str]:
    """The kinds of host memory worth telling apart there; whether each is offered, :func:`open_lane` says."""
    runtime = open_runtime(device)
    try:
        if not runtime.blocks_on_pageable:
            return [HostKind.PAGEABLE]
        return [HostKind.PINNED, HostKind.REGISTERED, STAGED, HostKind.PAGEABLE]
    finally:
        runtime.close()


class Lane:
    """Chunks of one size between a device and one kind of host memory, by the engine.

    A chunk is one block in each of ``chunk_nbytes / page_nbytes`` tensors, as layers make it.
    """

    def __init__(self, runtime: DeviceRuntime, slots: HostSlots, tensors: Sequence[Any], chunk_nbytes: int) -> None:
        self.path = runtime.path
        self.nbytes = len(tensors[0]) * chunk_nbytes
        self._tensors = tensors
        self._n_chunks = len(tensors[0])
        self._slots = slots
        page_nbytes = int(tensors[0].shape[1])
        layout = DeviceLayout.direct(
            [page_nbytes] * len(tensors), [[PageRef(i, page_nbytes) for i in range(len(tensors))]],
            blocks_per_chunk=1, stop_nbytes=slots.stride_nbytes,
        )  # fmt: skip
        pages = [Pages(runtime.memory(tensor), self._n_chunks, page_nbytes, page_nbytes) for tensor in tensors]
        self._engine = TransferEngine(runtime, layout, pages, slots)
        chunks = list(range(self._n_chunks))
        self._copies = layout.split(chunks, [self._n_chunks], [0], chunks)

    def run(self) -> Speeds:
        """All chunks to the host, then all back. Raises TierError if a copy failed."""
        return Speeds(self.nbytes / self._copy(Direction.STORE), self.nbytes / self._copy(Direction.LOAD))

    def check(self) -> None:
        """One round trip whose bytes are compared: a speed of wrong copies is none. Raises TierError."""
        for i, tensor in enumerate(self._tensors):
            tensor[:] = i % 127 + 1
        self._copy(Direction.STORE)
        for tensor in self._tensors:
            tensor[:] = 0
        self._copy(Direction.LOAD)
        for i, tensor in enumerate(self._tensors):
            if not bool((tensor == i % 127 + 1).all()):
                raise TierError("device", "other bytes came back than were stored")

    def close(self) -> None:
        self._engine.close()

    def _copy(self, direction: Direction) -> float:
        began_s = time.perf_counter()
        self._engine.submit(CopyJob(1, direction, self._copies))
        self._engine.wait()
        took_s = time.perf_counter() - began_s
        (done,) = self._engine.poll()
        if done.error is not None:
            raise TierError("device", f"a copy failed: {done.error}") from done.error
        return took_s


def open_lane(device: str, kind: str, *, chunk_nbytes: int, page_nbytes: int, n_chunks: int) -> Lane | None:
    """Memory on both sides, of ``n_chunks`` chunks; None if the device has no such kind of host memory.

    Args:
        device: as for :func:`tierkv.device.open_runtime`.
        kind: the host memory, one of :func:`kinds_of`.
        chunk_nbytes: a multiple of ``page_nbytes`` and of 4096.
        page_nbytes: bytes of a block in one tensor.
        n_chunks: how many.

    Raises:
        TierError: no such device, or not enough of its memory.
    """
    runtime = open_runtime(device)
    slots = None
    try:
        if kind == STAGED:
            try:
                runtime = StagedRuntime(runtime)
            except TierError:
                runtime.close()
                return None
        slots = _slots(runtime, kind, n_chunks, chunk_nbytes)
        if slots is None:
            runtime.close()
            return None
        tensors = [_tensor(device, n_chunks, page_nbytes) for _ in range(chunk_nbytes // page_nbytes)]
        return Lane(runtime, slots, tensors, chunk_nbytes)
    except BaseException:
        if slots is not None:
            slots.close()
        runtime.close()
        raise


class Plain:
    """One large copy of ``nbytes``, by the simplest call that the device has: what chunks are compared with."""

    def __init__(self, device: str, nbytes: int) -> None:
        self._nbytes = nbytes
        self._torch: Any = None
        if device.partition(":")[0] == "cpu":
            self._device: Any = np.ones(nbytes, np.int8)
            self._host: Any = np.ones(nbytes, np.int8)
            return
        self._torch = importlib.import_module("torch")
        self._device = _tensor(device, 1, nbytes)[0]
        self._host = self._torch.ones(nbytes, dtype=self._torch.int8, pin_memory=True)

    def run(self) -> Speeds:
        """To the host, then back."""
        stored_s, loaded_s = self._copy(self._host, self._device), self._copy(self._device, self._host)
        return Speeds(self._nbytes / stored_s, self._nbytes / loaded_s)

    def _copy(self, target: Any, source: Any) -> float:
        began_s = time.perf_counter()
        if self._torch is None:
            target[:] = source
        else:
            target.copy_(source, non_blocking=True)
            self._torch.accelerator.synchronize()
        return time.perf_counter() - began_s


def _slots(runtime: DeviceRuntime, kind: str, n_slots: int, stride_nbytes: int) -> HostSlots | None:
    if kind == HostKind.PINNED:
        try:
            return HostSlots.allocate(runtime, n_slots, stride_nbytes)
        except TierError:
            return None
    mapped = mmap.mmap(-1, n_slots * stride_nbytes)
    slots = HostSlots.over(memoryview(mapped), stride_nbytes)
    if kind == HostKind.REGISTERED and not slots.register(runtime):
        return None
    return slots


def _tensor(device: str, n_blocks: int, page_nbytes: int) -> Any:
    """``int8 [n_blocks, page_nbytes]``, its memory there."""
    if device.partition(":")[0] == "cpu":
        return np.ones((n_blocks, page_nbytes), np.int8)
    torch = importlib.import_module("torch")
    try:
        return torch.ones((n_blocks, page_nbytes), dtype=torch.int8, device=device)
    except RuntimeError as error:
        raise TierError("device", f"{n_blocks * page_nbytes} bytes on {device}: {error}") from error
