"""Kinds of device under one contract: their memory, their streams, and what stands for a server's kernels on them."""

from __future__ import annotations

import contextlib
import itertools
import mmap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from tierkv.device.lowering import Pages
from tierkv.device.runtime import DeviceRuntime, HostKind, Memory
from tierkv.device.slots import HostSlots

DIRT = 0x5A
"""What ordinary host memory holds before a store: somebody else's bytes."""


class Rig(Protocol):
    """One device for one example."""

    runtime: DeviceRuntime
    submits_block: bool
    """Set by the server: slots are pageable."""

    def pages(self, n_blocks: int, page_nbytes: int, row_nbytes: int) -> Pages:
        """Device memory of unknown content."""
        ...

    def ordinary(self, nbytes: int) -> Memory:
        """Host memory that nobody has told the device about, full of :data:`DIRT`."""
        ...

    def write(self, pages: Pages, block: int, data: bytes) -> None:
        """Queue a kernel on the current stream that writes the beginning of a page."""
        ...

    def read(self, pages: Pages, block: int, nbytes: int) -> Callable[[], bytes]:
        """Queue one that reads it; call the result after :meth:`synchronize`."""
        ...

    def host_looks(self, address: int, nbytes: int) -> None:
        """The host is about to read these bytes."""
        ...

    def holds(self, kind: HostKind) -> bool:
        """Whether :meth:`late` can keep the current stream from running at all while slots of this kind are in use."""
        ...

    def late(self, stream: Any = None) -> AbstractContextManager[None]:
        """Meanwhile a stream (None: the current one) runs late, or not at all."""
        ...

    def settle(self) -> None:
        """Let the device do what it can do now."""
        ...

    def synchronize(self) -> None: ...

    def fail(self, what: str, kind: HostKind) -> bool:
        """Let the next copy of slots of this kind fail, when it is submitted or when it runs (``submit``, ``run``).

        Or the next ``query`` of an event, or the next ``plain`` copy. False if this rig cannot.
        """
        ...

    def close(self) -> None: ...


def slots_of(rig: Rig, kind: HostKind, n_slots: int, stride_nbytes: int, *, per_piece: int) -> HostSlots:
    """Slots of the wanted kind, full of dirt; of another kind where the device has nothing better."""
    if kind is HostKind.PINNED:
        slots = HostSlots.allocate(rig.runtime, n_slots, stride_nbytes, piece_nbytes=per_piece * stride_nbytes)
        for slot in range(n_slots):
            slots.view(slot)[:] = bytes([DIRT]) * stride_nbytes
        return slots
    slots = HostSlots([rig.ordinary(n_slots * stride_nbytes)], stride_nbytes, n_slots)
    if kind is HostKind.REGISTERED:
        slots.register(rig.runtime, piece_nbytes=per_piece * stride_nbytes)
    return slots


class SimRig:
    """The simulated device: every schedule, every race."""

    def __init__(self, seed: int, schedule: str) -> None:
        from tierkv.testing.simdevice import SimDevice, SimRuntime, SimSchedule

        self.sim = SimDevice(seed, SimSchedule(schedule))
        self.submits_block = False
        self.runtime: Any = SimRuntime(self.sim)
        self._buffers: dict[int, Any] = {}

    def pages(self, n_blocks: int, page_nbytes: int, row_nbytes: int) -> Pages:
        buffer = self.sim.alloc(n_blocks * row_nbytes)
        self._buffers[buffer.address] = buffer
        return Pages(self.runtime.memory(buffer), n_blocks, page_nbytes, row_nbytes)

    def ordinary(self, nbytes: int) -> Memory:
        buffer = self.sim.alloc(nbytes, fill=DIRT)
        return Memory(buffer.address, nbytes, buffer, HostKind.PAGEABLE)

    def write(self, pages: Pages, block: int, data: bytes) -> None:
        view = self._view(pages, block, len(data))

        def kernel() -> Iterator[None]:
            for at in range(0, len(data), 64):
                view[at : at + 64] = data[at : at + 64]
                yield

        self.sim.launch(kernel, writes=[self._range(pages, block, len(data))], name=f"write {block}")

    def read(self, pages: Pages, block: int, nbytes: int) -> Callable[[], bytes]:
        view, seen = self._view(pages, block, nbytes), bytearray(nbytes)

        def kernel() -> Iterator[None]:
            for at in range(0, nbytes, 64):
                seen[at : at + 64] = view[at : at + 64]
                yield

        self.sim.launch(kernel, reads=[self._range(pages, block, nbytes)], name=f"read {block}")
        return lambda: bytes(seen)

    def host_looks(self, address: int, nbytes: int) -> None:
        self.sim.host_access([(address, nbytes)], "a tier below", is_write=False)

    def holds(self, kind: HostKind) -> bool:
        return kind is not HostKind.PAGEABLE  # the thread that copies such slots would spin, with the device to itself

    @contextlib.contextmanager
    def late(self, stream: Any = None) -> Iterator[None]:
        held = True

        def gate() -> Iterator[None]:
            while held:
                yield

        # On a stream of its own and named like what the schedule puts off: no schedule prefers it for ever.
        late, gated, event = stream or self.sim.current_stream(), self.sim.new_stream("gate"), self.sim.new_event()
        with self.sim.use(gated):
            self.sim.launch(gate, name=self.sim.schedule.value.split("s_")[0].removesuffix("s"))
        event.record(gated)
        late.wait_event(event)
        try:
            yield
        finally:
            held = False

    def settle(self) -> None:
        for _ in range(100):
            self.sim.progress(50)

    def synchronize(self) -> None:
        self.sim.synchronize()

    def fail(self, what: str, kind: HostKind) -> bool:
        call = {"submit": "copy_batch", "query": "query", "plain": "copy_plain"}.get(what)
        if call is None:
            return False
        self.runtime.fail(call, self.runtime.n_calls[call] + 1)
        return True

    def close(self) -> None:
        self.sim.synchronize()

    def _range(self, pages: Pages, block: int, nbytes: int) -> tuple[int, int]:
        return pages.memory.address + block * pages.row_nbytes, nbytes

    def _view(self, pages: Pages, block: int, nbytes: int) -> memoryview:
        return self._buffers[pages.memory.address].view[block * pages.row_nbytes :][:nbytes]


class CpuRig:
    """Host memory as a device: copies run on threads, what stands for kernels has run when it was called."""

    def __init__(self) -> None:
        from tierkv.device.cpu import CpuRuntime

        self.runtime: Any = CpuRuntime()
        self.submits_block = False

    def pages(self, n_blocks: int, page_nbytes: int, row_nbytes: int) -> Pages:
        wide: Any = np.full((n_blocks, row_nbytes), 0xDB, np.uint8)
        return Pages(self.runtime.memory(wide), n_blocks, page_nbytes, row_nbytes)

    def ordinary(self, nbytes: int) -> Memory:
        return mapped(nbytes)

    def write(self, pages: Pages, block: int, data: bytes) -> None:
        pages.memory.owner[block, : len(data)] = np.frombuffer(data, np.uint8)

    def read(self, pages: Pages, block: int, nbytes: int) -> Callable[[], bytes]:
        seen = pages.memory.owner[block, :nbytes].tobytes()
        return lambda: seen

    def host_looks(self, address: int, nbytes: int) -> None: ...

    def holds(self, kind: HostKind) -> bool:
        return False

    def late(self, stream: Any = None) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def settle(self) -> None: ...

    def synchronize(self) -> None: ...

    def fail(self, what: str, kind: HostKind) -> bool:
        return False

    def close(self) -> None: ...


class TorchRig:
    """An accelerator through torch: real, or torch_npu over the stand-in. A kernel is a copy on the current stream.

    Args:
        torch: the module.
        runtime: of this device.
        standin: what holds streams and makes them fail; None with real hardware.
    """

    def __init__(self, torch: Any, runtime: Any, standin: Any = None) -> None:
        self.torch = torch
        self.runtime = runtime
        self.standin = standin
        self.submits_block = False
        """Whether torch_npu's queue may stand still behind a copy of pageable memory: then nobody may wait for it."""
        self._kept: list[Any] = []  # host sides of copies under way

    def pages(self, n_blocks: int, page_nbytes: int, row_nbytes: int) -> Pages:
        wide = self.torch.empty((n_blocks, row_nbytes), dtype=self.torch.int8, device=self.runtime.name)
        return Pages(self.runtime.memory(wide), n_blocks, page_nbytes, row_nbytes)

    def ordinary(self, nbytes: int) -> Memory:
        return mapped(nbytes)

    def write(self, pages: Pages, block: int, data: bytes) -> None:
        source = self._pinned(len(data))
        source.numpy()[:] = np.frombuffer(data, np.int8)
        self._page(pages, block, len(data)).copy_(source, non_blocking=True)

    def read(self, pages: Pages, block: int, nbytes: int) -> Callable[[], bytes]:
        seen = self._pinned(nbytes)
        seen.copy_(self._page(pages, block, nbytes), non_blocking=True)
        return lambda: seen.numpy().tobytes()

    def host_looks(self, address: int, nbytes: int) -> None: ...

    def holds(self, kind: HostKind) -> bool:
        return self.standin is not None

    @contextlib.contextmanager
    def late(self, stream: Any = None) -> Iterator[None]:
        if self.standin is not None:
            self.settle()  # what was queued before is not late
            with self.standin.held((stream or self.torch.accelerator.current_stream()).native_handle):
                yield
            return
        if self.runtime.name == "cuda":
            self.torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
        yield

    def settle(self) -> None:
        if self.standin is None:
            return
        if not self.submits_block:
            # Reading the handle makes torch_npu hand over what is still in its own queue, unseen by the stand-in.
            _ = self.torch.npu.current_stream().npu_stream
        self.standin.settle()

    def synchronize(self) -> None:
        self.torch.accelerator.synchronize()
        self._kept.clear()

    def fail(self, what: str, kind: HostKind) -> bool:
        if self.standin is None:
            return False
        knob = {"submit": "fail_submit", "run": "fail_run", "query": "fail_query"}.get(what)
        if knob is None:
            return False
        if what == "submit" or kind is HostKind.PAGEABLE:  # such a copy runs while it is submitted
            # In torch_npu's own queue a refused submission is the end of the device: test_lost.py.
            self.torch.npu.set_task_queue_enable(0)
        self.standin.set(**{knob: 1})
        return True

    def close(self) -> None:
        if self.standin is not None:
            self.standin.set(fail_submit=0, fail_run=0, fail_query=0, faults_stay=0, register_limit=-1)
            self.torch.npu.set_task_queue_enable(1)
        self.synchronize()

    def _pinned(self, nbytes: int) -> Any:
        self._kept.append(self.torch.empty(nbytes, dtype=self.torch.int8, pin_memory=True))
        return self._kept[-1]

    def _page(self, pages: Pages, block: int, nbytes: int) -> Any:
        flat = pages.memory.owner
        return flat[block * pages.row_nbytes :][:nbytes]


def mapped(nbytes: int) -> Memory:
    mapping = mmap.mmap(-1, nbytes)
    array = np.frombuffer(mapping, np.uint8)
    array[:] = DIRT
    return Memory(array.__array_interface__["data"][0], nbytes, array, HostKind.PAGEABLE)


_counter = itertools.count(1)


def fresh_bytes(nbytes: int) -> bytes:
    """Bytes like no others: a mix-up of two blocks cannot go unseen."""
    n = next(_counter)
    return np.random.default_rng(n).integers(0, 256, nbytes, np.uint8).tobytes()
