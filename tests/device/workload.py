"""A small scheduler over a simulated device: kernels, stores, loads, evictions and preemptions, with bugs to plant.

It does what vLLM's scheduler and worker do around a device tier, and nothing that they do not do: a block belongs to a
request, a slot to a chunk, both are reused as soon as they may be, and every byte that arrives is looked at.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from tierkv.device.engine import CopyDone, CopyJob, TransferEngine
from tierkv.device.layout import DeviceLayout, PageRef
from tierkv.device.lowering import Pages
from tierkv.device.runtime import Direction, HostKind, Memory
from tierkv.device.slots import HostSlots
from tierkv.device.staging import StagedRuntime
from tierkv.testing.simdevice import SimDevice, SimRuntime, SimSchedule

N_BLOCKS, N_SLOTS = 64, 6
PAGES = ((192, 192), (320, 300), (128, 128))
"""Of each tensor: padded and used bytes of a page."""
GROUPS = ((0, 1), (1, 2))
"""Tensors of each group; tensor 1 belongs to both, as in hybrid models."""


class SimMachine:
    """A simulated device with KV tensors, slots and an engine over them."""

    def __init__(
        self,
        seed: int,
        schedule: SimSchedule = SimSchedule.RANDOM,
        *,
        per_chunk: int = 4,
        races: str = "raise",
        engine: type[TransferEngine] = TransferEngine,
        host: HostKind = HostKind.PINNED,
        staged_nbytes: int = 0,
    ) -> None:
        self.sim = SimDevice(seed, schedule, races=races)  # type: ignore[arg-type]
        self.runtime = SimRuntime(self.sim)
        self.per_chunk = per_chunk
        self.buffers = [self.sim.alloc(N_BLOCKS * (padded + 64)) for padded, _ in PAGES]
        self.pages = [
            Pages(self.runtime.memory(buffer), N_BLOCKS, padded, padded + 64)
            for buffer, (padded, _) in zip(self.buffers, PAGES, strict=True)
        ]
        refs = [[PageRef(tensor, PAGES[tensor][1]) for tensor in group] for group in GROUPS]
        nbytes = sum(padded for padded, _ in PAGES) * per_chunk
        stride = -(-nbytes // 4096) * 4096
        self.layout = DeviceLayout.direct([p for p, _ in PAGES], refs, blocks_per_chunk=per_chunk, stop_nbytes=stride)
        if host is HostKind.PINNED:  # two pieces: slots go on in another one
            self.slots = HostSlots.allocate(self.runtime, N_SLOTS, stride, piece_nbytes=4 * stride)
        else:
            mapped = self.sim.alloc(N_SLOTS * stride)
            memory = Memory(mapped.address, mapped.nbytes, mapped, HostKind.PAGEABLE)
            self.slots = HostSlots([memory], stride, N_SLOTS)
            if host is HostKind.REGISTERED:
                assert self.slots.register(self.runtime)
        runtime = StagedRuntime(self.runtime, half_nbytes=staged_nbytes) if staged_nbytes else self.runtime
        self.engine = engine(runtime, self.layout, self.pages, self.slots)

    def page(self, tensor: int, block: int) -> tuple[int, int]:
        """Address and used length."""
        return self.pages[tensor].memory.address + block * self.pages[tensor].row_nbytes, PAGES[tensor][1]

    def page_view(self, tensor: int, block: int) -> memoryview:
        start = block * self.pages[tensor].row_nbytes
        return self.buffers[tensor].view[start : start + PAGES[tensor][1]]

    def fill(self, group: int, block: int, value: int) -> None:
        """A kernel that writes a block of a group: ``value`` in its first tensor, ``value + 1`` in the next."""

        def kernel():
            for i, tensor in enumerate(GROUPS[group]):
                view = self.page_view(tensor, block)
                for at in range(0, len(view), 64):
                    view[at : at + 64] = bytes([(value + i) % 256]) * len(view[at : at + 64])
                    yield

        writes = [self.page(tensor, block) for tensor in GROUPS[group]]
        self.sim.launch(kernel, writes=writes, name=f"fill {block}")

    def read(self, group: int, block: int) -> list[bytearray]:
        """A kernel that reads a block of a group; what it saw is there once it has run."""
        seen = [bytearray(PAGES[tensor][1]) for tensor in GROUPS[group]]

        def kernel():
            for tensor, out in zip(GROUPS[group], seen, strict=True):
                view = self.page_view(tensor, block)
                for at in range(0, len(view), 64):
                    out[at : at + 64] = view[at : at + 64]
                    yield

        self.sim.launch(kernel, reads=[self.page(t, block) for t in GROUPS[group]], name=f"attention {block}")
        return seen

    def slot_bytes(self, slot: int) -> bytes:
        """What a tier below reads of a committed slot."""
        piece, row = divmod(slot, self.slots.slots_per_piece)
        address = self.slots.pieces[piece].address + row * self.slots.stride_nbytes
        self.sim.host_access([(address, self.slots.stride_nbytes)], "a tier below", is_write=False)
        return bytes(self.slots.view(slot))


@dataclass
class StoredChunk:
    group: int
    slot: int
    values: dict[int, int]
    """By sub-block, what the blocks were filled with."""
    n_readers: int = 0


@dataclass
class Part:
    """One group's share of a job."""

    group: int
    first: int
    blocks: list[int]
    chunks: list[StoredChunk]
    values: list[int] = field(default_factory=list)


@dataclass
class Request:
    direction: Direction
    parts: list[Part]


class Workload:
    """Traffic like a scheduler's, drawn by a seed.

    Args:
        machine: over which.
        seed: of the traffic.
        bugs: of the scheduler's: "slot_reuse" lets go of a load's slots when it is submitted, "block_reuse" hands a
            store's blocks on when it is submitted.
    """

    def __init__(self, machine: SimMachine, seed: int, bugs: tuple[str, ...] = ()) -> None:
        self.m, self.rng, self.bugs = machine, random.Random(seed * 7 + 1), bugs
        self.free_blocks = deque(range(N_BLOCKS))
        self.free_slots = list(range(N_SLOTS))
        self.ready: dict[int, StoredChunk] = {}
        self.checks: list[tuple[str, list[bytearray], int]] = []
        self.wrong: list[str] = []
        self.ids = 0
        self.n_stored = self.n_loaded = 0
        self.errors: list[CopyDone] = []

    def run(self, n_steps: int = 60) -> list[str]:
        """Traffic for a while, and then the end of it. Returns what was wrong with bytes; races raise on their own."""
        for _ in range(n_steps):
            self.rng.choice((self.store, self.store, self.load, self.load, self.preempt, self.settle, self.settle))()
        return self.finish()

    def finish(self) -> list[str]:
        """Let everything end, and look at every byte that arrived. Returns what was wrong."""
        while self.m.engine.n_open:
            self.m.sim.progress()
            self.settle()
        self.settle()  # what a preemption waited for
        self.m.sim.synchronize()
        for what, seen, value in self.checks:
            for i, page in enumerate(seen):
                if bytes(page) != bytes([(value + i) % 256]) * len(page):
                    self.wrong.append(f"{what}: {sorted(set(page))[:4]} instead of {(value + i) % 256}")
        return self.wrong

    # -- what a scheduler does ----------------------------------------------------------------------------------

    def store(self) -> None:
        parts = [part for group in self._groups() if (part := self._store_part(group)) is not None]
        if not parts:
            return
        self._submit(Direction.STORE, parts)
        for part in parts:  # the request goes on: its attention reads what is being stored
            for block, value in zip(part.blocks, part.values, strict=True):
                self.checks.append((f"block {block} after its store", self.m.read(part.group, block), value))
            if "block_reuse" in self.bugs:
                self.free_blocks.extendleft(part.blocks)

    def load(self) -> None:
        parts = [part for group in self._groups() if (part := self._load_part(group)) is not None]
        if not parts:
            return
        self._submit(Direction.LOAD, parts)
        if "slot_reuse" in self.bugs:
            for part in parts:
                for chunk in part.chunks:
                    chunk.n_readers -= 1

    def preempt(self) -> None:
        """A request with a store in flight loses its blocks at once: the host waits for that store."""
        open_ids = [flight.job.id for flight in self.m.engine._flights[Direction.STORE]]
        if open_ids:
            self.m.engine.wait({(Direction.STORE, self.rng.choice(open_ids))})

    def settle(self) -> None:
        for done in self.m.engine.poll():
            request: Request = done.job.tag
            if done.error is not None:
                self.errors.append(done)
            if done.job.direction is Direction.STORE:
                self._stored(request, failed=done.error is not None)
            else:
                self._loaded(request, failed=done.error is not None)

    def _stored(self, request: Request, *, failed: bool) -> None:
        for part in request.parts:
            if "block_reuse" not in self.bugs:
                self.free_blocks.extendleft(part.blocks)
            for chunk in part.chunks:
                if failed:
                    self.free_slots.append(chunk.slot)
                    continue
                self.ready[self.n_stored] = chunk
                self._check_slot(chunk)
                self.n_stored += 1

    def _loaded(self, request: Request, *, failed: bool) -> None:
        for part in request.parts:
            for block, value in zip(part.blocks, part.values, strict=True):
                if not failed:
                    self.checks.append((f"block {block} after its load", self.m.read(part.group, block), value))
            if "slot_reuse" not in self.bugs:
                for chunk in part.chunks:
                    chunk.n_readers -= 1
            self.free_blocks.extend(part.blocks)
            self.n_loaded += not failed

    # -- parts of jobs ------------------------------------------------------------------------------------------

    def _groups(self) -> list[int]:
        return self.rng.choice(([0], [1], [0, 1]))

    def _store_part(self, group: int) -> Part | None:
        per_chunk = self.m.per_chunk
        n_chunks, lead = self.rng.randint(1, 2), self.rng.randrange(per_chunk)
        slots = [slot for _ in range(n_chunks) if (slot := self._slot()) is not None]
        n_blocks = len(slots) * per_chunk - lead
        if not slots or len(self.free_blocks) < n_blocks:
            self.free_slots += slots
            return None
        blocks = [self.free_blocks.popleft() for _ in range(n_blocks)]
        values = [self.rng.randrange(1, 200) for _ in blocks]
        for block, value in zip(blocks, values, strict=True):
            self.m.fill(group, block, value)
        chunks = [StoredChunk(group, slot, {}) for slot in slots]
        for index, value in enumerate(values, lead):
            chunks[index // per_chunk].values[index % per_chunk] = value
        return Part(group, lead + per_chunk * self.rng.randrange(3), blocks, chunks, values)

    def _load_part(self, group: int) -> Part | None:
        """One ready chunk, from any of its blocks on, into blocks that a kernel has just zeroed."""
        keys = [key for key, chunk in self.ready.items() if chunk.group == group]
        if not keys:
            return None
        chunk = self.ready[self.rng.choice(keys[:2])]  # the next victims: eviction and loads meet
        first = self.rng.choice(sorted(chunk.values))
        values = [chunk.values[sub] for sub in range(first, self.m.per_chunk)]
        if len(self.free_blocks) < len(values):
            return None
        blocks = [self.free_blocks.popleft() for _ in values]
        for block in blocks:
            self.m.fill(group, block, 0)
        chunk.n_readers += 1
        return Part(group, first, blocks, [chunk], values)

    def _slot(self) -> int | None:
        if not self.free_slots:
            for key, chunk in self.ready.items():
                if not chunk.n_readers:
                    del self.ready[key]
                    return chunk.slot
            return None
        return self.free_slots.pop()

    def _submit(self, direction: Direction, parts: list[Part]) -> None:
        self.ids += 1
        by_group = {part.group: part for part in parts}
        sizes = [len(by_group[g].blocks) if g in by_group else 0 for g in range(len(GROUPS))]
        firsts = [by_group[g].first if g in by_group else 0 for g in range(len(GROUPS))]
        blocks = [block for part in parts for block in part.blocks]
        slots = [chunk.slot for part in parts for chunk in part.chunks]
        copies = self.m.layout.split(blocks, sizes, firsts, slots, whole=direction is Direction.STORE)
        self.m.engine.submit(CopyJob(self.ids, direction, copies, Request(direction, parts)))

    def _check_slot(self, chunk: StoredChunk) -> None:
        """A committed slot holds its blocks' bytes and zeros, and nothing of whoever had it before."""
        got = self.m.slot_bytes(chunk.slot)
        want = bytearray(self.m.slots.stride_nbytes)
        start = 0
        for tensor, (padded, used) in enumerate(PAGES):
            if tensor in GROUPS[chunk.group]:
                for sub, value in chunk.values.items():
                    at = start + sub * padded
                    byte = (value + GROUPS[chunk.group].index(tensor)) % 256
                    want[at : at + used] = bytes([byte]) * used
            start += padded * self.m.per_chunk
        if got != want:
            at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
            self.wrong.append(f"slot {chunk.slot} holds {got[at]} instead of {want[at]} at byte {at}")
