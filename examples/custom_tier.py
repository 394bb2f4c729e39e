"""A tier of your own: chunks in an SQLite file, below host memory. Six methods, no base class.

python examples/custom_tier.py
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tierkv import Chunk, ChunkKey, ClosedError, CPUTier, Level, Namespace, Outcome, PrefixChunker, Status, TieredCache
from tierkv.policies import LRU
from tierkv.protocols import Tier, TierContext

CHUNK_NBYTES = 16 << 10


class SQLiteTier:
    """Moves whole chunks by key and decides nothing; the hierarchy says what comes and what leaves.

    All calls run one after another on a thread of their own, each as one transaction, so a chunk is there whole or not
    at all and a caller that is cancelled disturbs nobody. Constructors do no I/O.
    """

    def __init__(self, path: Path) -> None:
        self.name = "sqlite"
        self._path = path
        self._thread: ThreadPoolExecutor | None = None

    async def open(self, ctx: TierContext) -> None:
        """Start empty: this tier cannot tell what an earlier run left (see ``ScanTier`` for those that can)."""
        self._database = sqlite3.connect(self._path, check_same_thread=False)
        self._thread = ThreadPoolExecutor(1, "sqlite")
        await self._run("DROP TABLE IF EXISTS chunks", [()])
        await self._run("CREATE TABLE chunks (key BLOB PRIMARY KEY, bytes BLOB) WITHOUT ROWID", [()])

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return [row is not None for row in await self._run("SELECT 1 FROM chunks WHERE key = ?", [(k,) for k in keys])]

    async def read(self, items: Sequence[tuple[ChunkKey, memoryview]]) -> Sequence[Outcome]:
        rows = await self._run("SELECT bytes FROM chunks WHERE key = ?", [(key,) for key, _ in items])
        outcomes = []
        for (key, buffer), row in zip(items, rows, strict=True):
            if row is not None:
                whole: bytes = row[0]
                buffer[: len(whole)] = whole
                buffer[len(whole) :] = bytes(len(buffer) - len(whole))  # never another chunk's leftovers
            outcomes.append(Outcome(key, Status.MISSING if row is None else Status.OK))
        return outcomes

    async def write(self, items: Sequence[tuple[Chunk, memoryview]]) -> Sequence[Outcome]:
        values = [(chunk.key, bytes(buffer[: chunk.nbytes])) for chunk, buffer in items]
        await self._run("REPLACE INTO chunks VALUES (?, ?)", values)
        return [Outcome(chunk.key, Status.OK) for chunk, _ in items]

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        await self._run("DELETE FROM chunks WHERE key = ?", [(key,) for key in keys])

    async def aclose(self) -> None:
        """Close once, also if it is cancelled."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            closed = thread.submit(self._database.close)
            thread.shutdown(wait=False)
            await asyncio.shield(asyncio.wrap_future(closed))

    async def _run(self, statement: str, values: Sequence[tuple[bytes, ...]]) -> list[Any]:
        """One statement for each set of values; the first row of each answer, or None."""
        if self._thread is None:
            raise ClosedError("the sqlite tier is not open")

        def run() -> list[Any]:
            with self._database:
                return [self._database.execute(statement, each).fetchone() for each in values]

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)


async def main(path: Path) -> None:
    """Store more than host memory holds; the rest comes back from the database."""
    tier: Tier = SQLiteTier(path)  # a type checker compares it with the protocol
    async with TieredCache(
        chunker=PrefixChunker(namespace=Namespace(model="my-model"), tokens_per_block=16, blocks_per_chunk=4),
        levels=[
            Level(CPUTier(), policy=LRU(), capacity=8 * CHUNK_NBYTES),
            Level(tier, policy=LRU(), capacity="16MiB"),
        ],
        chunk_nbytes=CHUNK_NBYTES,
    ) as cache:
        prompts = [[user] * 256 for user in range(6)]
        for prompt in prompts:
            chunks = cache.chunks(prompt)
            await cache.store(prompt, [chunk.key[:1] * CHUNK_NBYTES for chunk in chunks])
            await cache.wait_idle()
        for prompt in prompts:
            hit = await cache.lookup(prompt)
            async with cache.lease(hit) as lease:
                assert lease.n_tokens == 256
                assert all(bytes(lease.view(chunk)) == chunk.key[:1] * CHUNK_NBYTES for chunk in lease.chunks)
        read = cache.statistics()["sqlite"].n_read
        print(f"served {len(prompts)} prompts, {read} chunks of them from the database")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(Path(directory) / "chunks.sqlite"))
