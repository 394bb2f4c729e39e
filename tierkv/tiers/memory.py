"""The reference tier: plain anonymous memory, nothing clever, so that other tiers and tests can be judged by it."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from tierkv.errors import ChunkSizeError, ClosedError, bad_setting
from tierkv.protocols import TierContext
from tierkv.settings import parse_count
from tierkv.types import Chunk, ChunkKey, Outcome, Reason, Status


class MemoryTier:
    """Chunks in this process's own memory, as slots for a primary or by key for a lower level.

    The two uses are separate memory: slots are one zeroed mapping that costs nothing until it is touched, keyed chunks
    are copies in a dict. Copies run on the calling thread and never await half-way, so each write is visible whole.
    The tier forgets everything when it closes.

    Args:
        n_slots: how many chunks fit, in slots as well as by key; None takes as many as the level's capacity holds.
            With both, the smaller one counts.
        name: used in metrics and messages.
    """

    def __init__(self, n_slots: int | None = None, name: str = "memory") -> None:
        self._asked_slots = None if n_slots is None else parse_count("MemoryTier.n_slots", n_slots, 1, 1 << 40)
        self._name = name
        self._n_slots = 0
        self._ctx: TierContext | None = None
        self._slots: memoryview | None = None
        self._chunks: dict[ChunkKey, bytes] = {}

    @property
    def name(self) -> str:
        return self._name

    @property
    def n_slots(self) -> int:
        """Slots of ``stride_nbytes``; 0 while the tier is not open."""
        return self._n_slots

    def slot_view(self, slot: int) -> memoryview:
        """Writable bytes of one slot. Raises IndexError outside ``range(n_slots)``, ClosedError while not open."""
        ctx = self._opened()
        if self._slots is None:
            self._slots = memoryview(mmap.mmap(-1, self._n_slots * ctx.stride_nbytes))
        if not 0 <= slot < self._n_slots:
            raise IndexError(f"{self._name}: slot {slot} is not in range({self._n_slots})")
        start = slot * ctx.stride_nbytes
        return self._slots[start : start + ctx.stride_nbytes]

    def charge_nbytes(self, chunk_nbytes: int) -> int:
        """A chunk occupies whole slots, however short it is."""
        stride_nbytes = self._opened().stride_nbytes
        return max(1, -(-chunk_nbytes // stride_nbytes)) * stride_nbytes

    def share_nbytes(self) -> int:
        """Bytes of all slots: the level's capacity where it names none; 0 while not open."""
        return 0 if self._ctx is None else self._n_slots * self._ctx.stride_nbytes

    async def open(self, ctx: TierContext) -> None:
        """Raises ConfigError if not even one chunk fits."""
        fits = ctx.capacity_nbytes // ctx.stride_nbytes
        if ctx.capacity_nbytes == 0 and self._asked_slots is not None:
            fits = self._asked_slots
        if fits < 1:
            allowed = f"at least one slot of {ctx.stride_nbytes} bytes"
            raise bad_setting(f"{self._name}.capacity", ctx.capacity_nbytes, allowed, ctx.stride_nbytes)
        self._n_slots = fits if self._asked_slots is None else min(fits, self._asked_slots)
        self._ctx = ctx

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        self._opened()
        return [key in self._chunks for key in keys]

    async def read(self, items: Sequence[tuple[ChunkKey, memoryview]]) -> Sequence[Outcome]:
        """A buffer shorter than its chunk is left alone and answered ``FAILED`` with ChunkSizeError."""
        self._opened()
        return [self._read_one(key, buffer) for key, buffer in items]

    async def write(self, items: Sequence[tuple[Chunk, memoryview]]) -> Sequence[Outcome]:
        """Refuses what is larger than ``chunk_nbytes`` or finds all slots taken; see :class:`~tierkv.Reason`."""
        ctx = self._opened()
        return [self._write_one(ctx, chunk, buffer) for chunk, buffer in items]

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        self._opened()
        for key in keys:
            self._chunks.pop(key, None)

    async def aclose(self) -> None:
        """Views handed out stay valid: the last of them frees the memory."""
        self._ctx, self._slots, self._n_slots = None, None, 0
        self._chunks.clear()

    def _opened(self) -> TierContext:
        if self._ctx is None:
            raise ClosedError(f"{self._name}: the tier is not open")
        return self._ctx

    def _read_one(self, key: ChunkKey, buffer: memoryview) -> Outcome:
        stored = self._chunks.get(key)
        if stored is None:
            return Outcome(key, Status.MISSING)
        if len(buffer) < len(stored):
            error = ChunkSizeError(f"{self._name}: a buffer of {len(buffer)} bytes for a chunk of {len(stored)}")
            return Outcome(key, Status.FAILED, Reason.TIER_ERROR, error)
        buffer[: len(stored)] = stored
        buffer[len(stored) :] = bytes(len(buffer) - len(stored))
        return Outcome(key, Status.OK)

    def _write_one(self, ctx: TierContext, chunk: Chunk, buffer: memoryview) -> Outcome:
        if chunk.nbytes > ctx.chunk_nbytes:
            return Outcome(chunk.key, Status.REFUSED, Reason.TOO_LARGE)
        if len(buffer) < chunk.nbytes:
            error = ChunkSizeError(f"{self._name}: a buffer of {len(buffer)} bytes for a chunk of {chunk.nbytes}")
            return Outcome(chunk.key, Status.FAILED, Reason.TIER_ERROR, error)
        if chunk.key not in self._chunks and len(self._chunks) >= self._n_slots:
            return Outcome(chunk.key, Status.REFUSED, Reason.FULL)
        self._chunks[chunk.key] = bytes(buffer[: chunk.nbytes])
        return Outcome(chunk.key, Status.OK)
