"""Devices of random shape with random bytes, and a slow, obvious model of what a copy must do to a slot."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from tierkv.device import (
    CanonicalPage,
    CopyJob,
    DeviceLayout,
    HostSlots,
    PageRef,
    Run,
    TransferEngine,
)
from tierkv.device.cpu import CpuRuntime
from tierkv.device.lowering import DescriptorPool, Pages

DIRT = 0x5A
"""What a slot holds before a store: somebody else's bytes."""


@dataclass
class Shape:
    """Pages of each tensor (padded, unpadded) and the tensors of each group."""

    pages: list[tuple[int, int]]
    groups: list[list[int]]
    blocks_per_chunk: int
    n_blocks: int = 24

    def refs(self) -> list[list[PageRef]]:
        return [[PageRef(tensor, self.pages[tensor][1]) for tensor in group] for group in self.groups]

    def layout(self, start: int = 0, stop: int | None = None) -> DeviceLayout:
        return DeviceLayout.direct(
            [padded for padded, _ in self.pages],
            self.refs(),
            blocks_per_chunk=self.blocks_per_chunk,
            start_nbytes=start,
            stop_nbytes=stop,
        )

    @property
    def nbytes(self) -> int:
        return sum(padded for padded, _ in self.pages) * self.blocks_per_chunk

    def tensors(self, seed: int = 0, *, strided: bool = False) -> list[np.ndarray]:
        """Random bytes; ``strided``: rows further apart than they are long, as in packed caches."""
        rng = np.random.default_rng(seed)
        made = []
        for padded, _ in self.pages:
            wide = rng.integers(-128, 128, (self.n_blocks, padded + 16 * strided), np.int8)
            made.append(wide[:, :padded])
        return made


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    pages = []
    for _ in range(draw(st.integers(1, 4))):
        unpadded = draw(st.sampled_from([1, 7, 64, 513, 9000]))
        pages.append((unpadded + draw(st.sampled_from([0, 0, 3, 64])), unpadded))
    tensors = st.integers(0, len(pages) - 1)
    groups = draw(st.lists(st.lists(tensors, min_size=1, max_size=4, unique=True), min_size=1, max_size=3))
    return Shape(pages, groups, draw(st.sampled_from([1, 3, 4, 8])))


@dataclass
class Cut:
    """The arguments of ``DeviceLayout.split`` for one copy."""

    blocks: list[int]
    sizes: list[int]
    firsts: list[int]
    slots: list[int]

    def places(self, per_chunk: int) -> list[tuple[int, int, int, int]]:
        """(group, block, slot, sub) of each block, counted out one by one."""
        out, blocks, slots = [], iter(self.blocks), iter(self.slots)
        for group, (size, first) in enumerate(zip(self.sizes, self.firsts, strict=True)):
            slot = -1
            for index in range(first, first + size):
                if index == first or index % per_chunk == 0:
                    slot = next(slots)
                out.append((group, next(blocks), slot, index % per_chunk))
        return out


def random_cut(rng: random.Random, shape: Shape, n_slots: int, *, whole: bool = False) -> Cut:
    """Blocks of a request in each group: any first block, any end (``whole``: at a chunk's end)."""
    per_chunk, sizes, firsts, n_chunks = shape.blocks_per_chunk, [], [], 0
    room = min(n_slots // len(shape.groups), shape.n_blocks // (len(shape.groups) * per_chunk))
    for _ in shape.groups:
        chunks = rng.randint(0, room)
        first = rng.randrange(4 * per_chunk)
        end = (first // per_chunk + chunks) * per_chunk
        if not whole and chunks:
            end -= rng.randrange(per_chunk)
        size = max(0, end - first)
        sizes.append(size)
        firsts.append(first)
        n_chunks += -(-(first % per_chunk + size) // per_chunk) if size else 0
    blocks = rng.sample(range(shape.n_blocks), sum(sizes))
    return Cut(blocks, sizes, firsts, rng.sample(range(n_slots), n_chunks))


def expected_store(shape: Shape, tensors: list[np.ndarray], cut: Cut, slots: np.ndarray, start: int) -> np.ndarray:
    """The slots after a store, by the slow road: the rank's span of each touched slot is zero but for the pages."""
    after = slots.copy()
    offsets = [start + sum(p for p, _ in shape.pages[:t]) * shape.blocks_per_chunk for t in range(len(shape.pages))]
    for slot in cut.slots:
        after[slot, start : start + shape.nbytes] = 0
    for group, block, slot, sub in cut.places(shape.blocks_per_chunk):
        for tensor in shape.groups[group]:
            padded, unpadded = shape.pages[tensor]
            at = offsets[tensor] + sub * padded
            after[slot, at : at + unpadded] = tensors[tensor][block, :unpadded]
    return after


def dirty_slots(n_slots: int, stride: int) -> np.ndarray:
    return np.full((n_slots, stride), DIRT, np.int8)


class Copier:
    """An engine over host memory; each call is one whole copy."""

    def __init__(self, tensors: list[np.ndarray], layout: DeviceLayout, slots: np.ndarray) -> None:
        self.runtime = CpuRuntime()
        pages = [Pages(self.runtime.memory(t), len(t), t.shape[1], t.strides[0]) for t in tensors]
        stride = slots.shape[1]
        self.engine = TransferEngine(self.runtime, layout, pages, HostSlots.over(slots.data.cast("B"), stride))

    def copy(self, job: CopyJob) -> int:
        """Returns the bytes copied."""
        self.engine.submit(job)
        self.engine.wait()
        (done,) = self.engine.poll()
        if done.error is not None:
            raise done.error
        return done.nbytes

    def copy_plain(self, job: CopyJob) -> int:
        batch, _ = self.engine._lowering.batch(job.direction, job.copies, DescriptorPool())
        self.runtime.copy_plain(batch)
        return batch.total_nbytes

    def close(self) -> None:
        self.engine.close()


@contextlib.contextmanager
def copier(tensors: list[np.ndarray], layout: DeviceLayout, slots: np.ndarray) -> Iterator[Copier]:
    made = Copier(tensors, layout, slots)
    try:
        yield made
    finally:
        made.close()


def head_sharded(
    rank: int, n_ranks: int, *, heads: int, tokens: int, head_nbytes: int, by_token: bool
) -> CanonicalPage:
    """The canonical page of ``heads`` KV heads dealt to ranks; ranks beyond the heads hold copies and take turns."""
    n_shards = min(heads, n_ranks)
    local, copies = heads // n_shards, n_ranks // n_shards
    shard = rank // copies
    if by_token:
        row = local * head_nbytes
        runs: tuple[Run, ...] = (Run(0, shard * row, row, tokens, row, n_shards * row),)
    else:
        span = tokens * head_nbytes
        runs = tuple(Run(h * span, (shard * local + h) * span, span) for h in range(local))
    return CanonicalPage(heads * tokens * head_nbytes, runs, copies, rank % copies)
