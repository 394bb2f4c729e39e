"""What many tests need: a chunker without hashing options, bytes that follow from a key, tiers that take their time."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sequence

from tierkv import Chunk, ChunkKey, Level, MemoryTier, Outcome, TieredCache, Writes
from tierkv._threads import Lane
from tierkv.policies import LRU
from tierkv.protocols import TierContext

NBYTES = 5000
"""Payload of a chunk: not a multiple of anything, so that padding is there to be got wrong."""
STRIDE = 8192


class ToyChunker:
    """Two tokens a chunk, chained keys."""

    chunk_nbytes = NBYTES

    def chunks(self, tokens: Sequence[int], *, extra: bytes = b"") -> Sequence[Chunk]:
        chunks: list[Chunk] = []
        parent: ChunkKey | None = None
        for end in range(2, len(tokens) + 1, 2):
            text = (parent or extra) + repr(list(tokens[end - 2 : end])).encode()
            key = ChunkKey(hashlib.blake2b(text, digest_size=16).digest())
            chunks.append(Chunk(key, parent, 0, end))
            parent = key
        return chunks


def payload(chunk: Chunk) -> bytes:
    """The bytes that belong to a chunk."""
    return random.Random(chunk.key).randbytes(NBYTES)


def buffers(chunks: Sequence[Chunk]) -> list[bytearray]:
    return [bytearray(payload(chunk)) for chunk in chunks]


def prompt(branch: int, n_chunks: int = 4) -> list[int]:
    """Tokens of ``n_chunks`` chunks, the first of which all even or all odd branches share."""
    return [branch % 2, 0] + [branch] * (2 * (n_chunks - 1))


def loop_time() -> float:
    """A clock for caches: the running loop's, which is the real one but for a loop whose time is virtual."""
    return asyncio.get_running_loop().time()


def shorten_deadline(cache: TieredCache, deadline_s: float) -> None:
    """From now on copies have so long. Before, they had as long as they took: only what hangs misses a deadline."""
    mover = cache._opened().mover
    mover._limits = mover._limits._replace(deadline_s=deadline_s)


def cache_of(
    *lower: MemoryTier, n_slots: int = 8, n_chunks: int = 64, writes: Writes = Writes.CASCADE, **options: object
) -> TieredCache:
    """A primary of ``n_slots`` over levels of ``n_chunks``."""
    levels = [Level(MemoryTier(name="primary"), LRU(), capacity=n_slots * STRIDE)]
    levels += [Level(tier, LRU(), capacity=n_chunks * STRIDE, writes=writes) for tier in lower]
    options.setdefault("clock", loop_time)
    return TieredCache(chunker=ToyChunker(), namespace=b"toy", levels=levels, **options)  # type: ignore[arg-type]


class ThreadTier(MemoryTier):
    """A memory tier whose copies run on a thread, chunk by chunk, and wait at ``gate`` where one is set.

    Counts what was asked. ``fail`` lets the next so many reads raise. Without ``threads`` it copies on the loop: for
    virtual time.
    """

    def __init__(self, name: str = "lower", *, threads: bool = True) -> None:
        super().__init__(name=name)
        self.threads = threads
        self.lane = Lane("toy-tier", 2)
        self.gate: asyncio.Event | None = None
        self.asked = asyncio.Event()
        """Set by every read."""
        self.n_reads: dict[ChunkKey, int] = {}
        self.n_writes = 0
        self.n_failing = 0

    async def open(self, ctx: TierContext) -> None:
        self.lane = Lane("toy-tier", 2)
        await super().open(ctx)

    async def read(self, items: Sequence[tuple[ChunkKey, memoryview]]) -> Sequence[Outcome]:
        self.asked.set()
        for key, _ in items:
            self.n_reads[key] = self.n_reads.get(key, 0) + 1
        if self.gate is not None:
            await self.gate.wait()
        if self.n_failing:
            self.n_failing -= 1
            raise OSError(5, "planted")
        copies = super().read(items)
        return await (self.lane.run(asyncio.run, copies) if self.threads else copies)

    async def write(self, items: Sequence[tuple[Chunk, memoryview]]) -> Sequence[Outcome]:
        self.n_writes += len(items)
        if self.gate is not None:
            await self.gate.wait()
        copies = super().write(items)
        return await (self.lane.run(asyncio.run, copies) if self.threads else copies)

    async def aclose(self) -> None:
        self.lane.close()
        await super().aclose()
