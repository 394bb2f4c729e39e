"""A small server over a rig: it writes blocks, stores and loads chunks, reuses what it may, and looks at every byte."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.device.contract.rigs import DIRT, Rig, fresh_bytes, slots_of
from tierkv.device.engine import CopyDone, CopyJob, TransferEngine
from tierkv.device.layout import DeviceLayout, GroupCopy, PageRef
from tierkv.device.runtime import Direction, HostKind
from tierkv.device.staging import StagedRuntime

STORE, LOAD = Direction.STORE, Direction.LOAD
_ALIGN = 4096


@dataclass(frozen=True)
class Shape:
    """Tensors as (padded, used) page bytes, the tensors of each group, and how far rows are apart beyond a page."""

    pages: tuple[tuple[int, int], ...]
    groups: tuple[tuple[int, ...], ...]
    blocks_per_chunk: int
    row_gap: int = 0
    n_blocks: int = 24
    n_slots: int = 6

    @property
    def stride_nbytes(self) -> int:
        nbytes = sum(padded for padded, _ in self.pages) * self.blocks_per_chunk
        return -(-nbytes // _ALIGN) * _ALIGN

    def layout(self) -> DeviceLayout:
        refs = [[PageRef(tensor, self.pages[tensor][1]) for tensor in group] for group in self.groups]
        padded = [padded for padded, _ in self.pages]
        return DeviceLayout.direct(padded, refs, blocks_per_chunk=self.blocks_per_chunk, stop_nbytes=self.stride_nbytes)


class Place(NamedTuple):
    """Where a block of a chunk lies."""

    tensor: int
    block: int
    slot: int
    offset: int
    nbytes: int


@dataclass
class Flying:
    """A job whose end was not told, and what must be true then."""

    job: CopyJob
    blocks: set[int]
    slots: set[int]
    expected: dict[int, bytes] = field(default_factory=dict)
    """Slot contents after a store."""
    arriving: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Page contents after a load, by tensor and block."""
    read_early: bool = False


class Server:
    """Blocks and slots with a model of what each holds. Close it: that is when the last bytes are compared.

    With ``half_nbytes`` copies go through a pinned ring with halves of that size.
    """

    def __init__(
        self,
        rig: Rig,
        shape: Shape,
        kind: HostKind,
        seed: int = 0,
        *,
        engine: type[TransferEngine] = TransferEngine,
        half_nbytes: int = 0,
    ) -> None:
        self.rig, self.shape, self.random = rig, shape, random.Random(seed)
        self.layout = shape.layout()
        row = [padded + shape.row_gap for padded, _ in shape.pages]
        self.pages = [rig.pages(shape.n_blocks, p, r) for (p, _), r in zip(shape.pages, row, strict=True)]
        self.slots = slots_of(rig, kind, shape.n_slots, shape.stride_nbytes, per_piece=4)
        rig.submits_block = self.slots.kind is HostKind.PAGEABLE
        runtime = StagedRuntime(rig.runtime, half_nbytes=half_nbytes) if half_nbytes else rig.runtime
        self.engine = engine(runtime, self.layout, self.pages, self.slots)
        self.content: dict[tuple[int, int], bytes] = {}  # by tensor and block: what the next kernel must see
        self.chunks: dict[int, tuple[int, dict[int, bool]]] = {}  # by ready slot: group, subs that were stored
        self.in_slot = {slot: bytes(self.slots.view(slot)) for slot in range(shape.n_slots)}
        self.flying: dict[tuple[Direction, int], Flying] = {}
        self.failed: list[CopyDone] = []
        self.n_jobs = 0
        self._looks: list[tuple[Callable[[], bytes], bytes, str]] = []
        for tensor, (padded, _) in enumerate(shape.pages):
            for block in range(shape.n_blocks):
                self.write(tensor, block, fresh_bytes(padded))

    # -- what a server does -------------------------------------------------------------------------------------

    def write(self, tensor: int, block: int, data: bytes) -> None:
        """A kernel writes a page; it may run much later."""
        self.rig.write(self.pages[tensor], block, data)
        self.content[tensor, block] = data + self.content.get((tensor, block), b"")[len(data) :]

    def free_blocks(self) -> list[int]:
        busy = {block for flying in self.flying.values() for block in flying.blocks}
        return [block for block in range(self.shape.n_blocks) if block not in busy]

    def free_slots(self) -> list[int]:
        busy = {slot for flying in self.flying.values() for slot in flying.slots}
        return [slot for slot in range(self.shape.n_slots) if slot not in busy]

    def store(self, group: int, blocks: list[int], first: int, slots: list[int]) -> Flying:
        """Blocks of one group, the first of which is block ``first`` of its request, into slots."""
        job, places = self._job(STORE, group, blocks, first, slots)
        after = {slot: bytearray(self.in_slot[slot]) for slot in slots}
        for slot in slots:
            after[slot][:] = bytes(self.shape.stride_nbytes)
        for place in places:
            page = self.content[place.tensor, place.block][: place.nbytes]
            after[place.slot][place.offset : place.offset + place.nbytes] = page
        for slot in slots:
            self.chunks.pop(slot, None)
        flying = Flying(job, set(blocks), set(slots), {slot: bytes(data) for slot, data in after.items()})
        return self._fly(flying)

    def load(self, group: int, blocks: list[int], first: int, slots: list[int]) -> Flying:
        """Slots into blocks; the caller saw to it that the slots are ready and hold these places."""
        job, places = self._job(LOAD, group, blocks, first, slots)
        flying = Flying(job, set(blocks), set(slots))
        for place in places:
            page = self.in_slot[place.slot][place.offset : place.offset + place.nbytes]
            flying.arriving[place.tensor, place.block] = page
        return self._fly(flying)

    def poll(self) -> list[CopyDone]:
        """Take the ends that are there, look at what arrived in slots, let kernels read what arrived in blocks."""
        ended = self.engine.poll()
        for done in ended:
            flying = self.flying.pop((done.job.direction, done.job.id))
            if done.error is not None:
                self.failed.append(done)
                self._forget(flying)
                continue
            for slot, expected in flying.expected.items():
                self.in_slot[slot] = expected
                view = self.slots.view(slot)
                self.rig.host_looks(self._address(slot), len(view))
                assert bytes(view) == expected, f"slot {slot} is wrong after store job {done.job.id}"
                self.chunks[slot] = (flying.job.copies[0].group, self._subs(flying.job.copies[0], slot))
            self._arrived(flying)
            if not flying.read_early:
                self._read(flying)
        return ended

    def nothing_ends(self) -> None:
        """Whatever can move has moved, and no end is told. Asked thrice: an end may take two looks (npu)."""
        for _ in range(3):
            self.rig.settle()
            assert self.poll() == []

    def consume(self, flying: Flying) -> None:
        """Kernels read what a load brings, before its end was told."""
        self.engine.consume([flying.job.id])
        flying.read_early = True
        self._read(flying)

    def close(self) -> None:
        """Wait for everything; then every page must hold what the model says, and every kernel must have seen it."""
        self.engine.wait()
        self.poll()
        assert not self.flying
        for (tensor, block), data in self.content.items():
            self._look(tensor, block, data)
        self.rig.synchronize()
        for look, expected, what in self._looks:
            assert look() == expected, what
        for slot, expected in self.in_slot.items():
            self.rig.host_looks(self._address(slot), self.shape.stride_nbytes)
            assert bytes(self.slots.view(slot)) == expected, f"slot {slot} was touched by nobody's job"
        self.abandon()

    def abandon(self) -> None:
        """Close without looking."""
        self.engine.close()
        self.rig.close()

    # -- the model ----------------------------------------------------------------------------------------------

    def _job(
        self, direction: Direction, group: int, blocks: list[int], first: int, slots: list[int]
    ) -> tuple[CopyJob, list[Place]]:
        n_groups = len(self.shape.groups)
        sizes = [len(blocks) if g == group else 0 for g in range(n_groups)]
        firsts = [first if g == group else 0 for g in range(n_groups)]
        copies = self.layout.split(blocks, sizes, firsts, slots)
        self.n_jobs += 1
        per_chunk = self.shape.blocks_per_chunk
        offsets = [sum(p for p, _ in self.shape.pages[:t]) * per_chunk for t in range(len(self.shape.pages))]
        places = []
        for index, block in enumerate(blocks, first):  # counted out one by one, unlike the code under test
            slot, sub = slots[index // per_chunk - first // per_chunk], index % per_chunk
            for tensor in self.shape.groups[group]:
                padded, used = self.shape.pages[tensor]
                places.append(Place(tensor, block, slot, offsets[tensor] + sub * padded, used))
        return CopyJob(self.n_jobs, direction, copies), places

    def _fly(self, flying: Flying) -> Flying:
        self.flying[flying.job.direction, flying.job.id] = flying
        self.engine.submit(flying.job)
        return flying

    def _arrived(self, flying: Flying) -> None:
        for (tensor, block), page in flying.arriving.items():
            self.content[tensor, block] = page + self.content[tensor, block][len(page) :]

    def _read(self, flying: Flying) -> None:
        for (tensor, block), page in flying.arriving.items():
            self._look(tensor, block, page)

    def _look(self, tensor: int, block: int, expected: bytes) -> None:
        look = self.rig.read(self.pages[tensor], block, len(expected))
        self._looks.append((look, expected, f"a kernel read wrong bytes in block {block} of tensor {tensor}"))

    def _forget(self, flying: Flying) -> None:
        """A job that failed: its target holds anything."""
        for slot in flying.expected:
            self.in_slot[slot] = bytes(self.slots.view(slot))
        for page in flying.arriving:
            self.content.pop(page)

    def _subs(self, copy: GroupCopy, slot: int) -> dict[int, bool]:
        return {sub: True for of, sub in zip(copy.slots, copy.subs, strict=True) if of == slot}

    def _address(self, slot: int) -> int:
        piece, row = divmod(slot, self.slots.slots_per_piece)
        return self.slots.pieces[piece].address + row * self.shape.stride_nbytes


__all__ = ["DIRT", "LOAD", "STORE", "Flying", "Place", "Server", "Shape"]
