"""A lower tier in memory for vLLM's manager, on the Mover's thread: it waits at a gate, counts, and fails by key."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

from tierkv.types import Chunk, ChunkKey, Found, Outcome, Reason, Status


class Shelf:
    """Named in ``secondary_tiers`` by this module; what it holds outlives an engine, as a disk does."""

    chunks: ClassVar[dict[ChunkKey, tuple[Chunk, bytes]]] = {}
    gate: ClassVar[threading.Event] = threading.Event()
    """Reads and writes wait for it."""
    latency_s: ClassVar[float] = 0.0
    n_reads: ClassVar[Counter[ChunkKey]] = Counter()
    n_calls: ClassVar[int] = 0
    """Calls of read."""
    fails: ClassVar[dict[ChunkKey, Status]] = {}
    """Answers of read for these keys."""
    writes_fail: ClassVar[bool] = False

    name = "shelf"
    writable = True

    @classmethod
    def settings(cls, **more: Any) -> dict[str, Any]:
        """An empty shelf, as an entry of ``secondary_tiers``."""
        cls.chunks.clear()
        cls.n_reads.clear()
        cls.fails.clear()
        cls.n_calls, cls.latency_s, cls.writes_fail = 0, 0.0, False
        cls.gate.set()
        return {"type": "Shelf", "module_path": __name__, "capacity": "16MiB", **more}

    async def open(self, ctx: Any) -> None:
        """Nothing to open."""

    async def _passed(self) -> None:
        while not Shelf.gate.is_set():  # noqa: ASYNC110 - it is set on another thread
            await asyncio.sleep(0.002)
        await asyncio.sleep(Shelf.latency_s)

    def settled(self, key: ChunkKey) -> bool:
        return True

    async def scan(self) -> AsyncIterator[Sequence[Found]]:
        yield [Found(key, 4096, chunk=chunk) for key, (chunk, _) in self.chunks.items()]

    async def probe(self, keys: Sequence[ChunkKey]) -> list[None]:
        return [None] * len(keys)

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [key in self.chunks for key in keys]

    async def read(self, items: Sequence[tuple[ChunkKey, memoryview]]) -> list[Outcome]:
        Shelf.n_calls += 1
        await self._passed()
        return [self._read(key, view) for key, view in items]

    def _read(self, key: ChunkKey, view: memoryview) -> Outcome:
        self.n_reads[key] += 1
        if key in self.fails:
            return Outcome(key, self.fails[key], Reason.TIER_ERROR)
        if key not in self.chunks:
            return Outcome(key, Status.MISSING)
        payload = self.chunks[key][1]
        view[: len(payload)] = payload
        return Outcome(key, Status.OK)

    async def write(self, items: Sequence[tuple[Chunk, memoryview]]) -> list[Outcome]:
        await self._passed()
        if Shelf.writes_fail:
            return [Outcome(chunk.key, Status.FAILED, Reason.TIER_ERROR) for chunk, _ in items]
        for chunk, view in items:
            self.chunks[chunk.key] = (chunk, bytes(view[: chunk.nbytes]))
        return [Outcome(chunk.key, Status.OK) for chunk, _ in items]

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self.chunks.pop(key, None)

    async def save_order(self, chunks: Sequence[Chunk]) -> None:
        """Nothing to remember."""

    async def aclose(self) -> None:
        """Nothing to close."""
