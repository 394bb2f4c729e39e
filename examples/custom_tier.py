"""A tier of your own: chunks in an SQLite file, below host memory. Six methods, no base class.

python examples/custom_tier.py
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tierkv import Chunk, ChunkKey, CPUTier, Level, Namespace, Outcome, PrefixChunker, Status, TieredCache
from tierkv.policies import LRU
from tierkv.protocols import Tier, TierContext

CHUNK_NBYTES = 16 << 10


class SQLiteTier:
    """Moves whole chunks by key and decides nothing; the hierarchy says what comes and what leaves.

    Each chunk is one transaction on a thread, so it is visible as a whole or not at all.
    """

    def __init__(self, path: Path) -> None:
        self.name = "sqlite"
        self._path = path
        self._lock = asyncio.Lock()

    async def open(self, ctx: TierContext) -> None:
        """Make the table; what an earlier run left is dropped, since this tier cannot say what it holds."""
        self._database = sqlite3.connect(self._path, check_same_thread=False)
        await self._run("DROP TABLE IF EXISTS chunks", ())
        await self._run("CREATE TABLE chunks (key BLOB PRIMARY KEY, bytes BLOB) WITHOUT ROWID", ())

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return [bool(await self._run("SELECT 1 FROM chunks WHERE key = ?", (key,))) for key in keys]

    async def read(self, items: Sequence[tuple[ChunkKey, memoryview]]) -> Sequence[Outcome]:
        outcomes = []
        for key, buffer in items:
            rows = await self._run("SELECT bytes FROM chunks WHERE key = ?", (key,))
            if rows:
                whole: bytes = rows[0][0]
                buffer[: len(whole)] = whole
                buffer[len(whole) :] = bytes(len(buffer) - len(whole))  # never another chunk's leftovers
            outcomes.append(Outcome(key, Status.OK if rows else Status.MISSING))
        return outcomes

    async def write(self, items: Sequence[tuple[Chunk, memoryview]]) -> Sequence[Outcome]:
        for chunk, buffer in items:
            await self._run("REPLACE INTO chunks VALUES (?, ?)", (chunk.key, bytes(buffer[: chunk.nbytes])))
        return [Outcome(chunk.key, Status.OK) for chunk, _ in items]

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            await self._run("DELETE FROM chunks WHERE key = ?", (key,))

    async def aclose(self) -> None:
        async with self._lock:
            self._database.close()

    async def _run(self, statement: str, values: tuple[object, ...]) -> list[tuple[bytes]]:
        async with self._lock:  # one statement at a time on one connection

            def run() -> list[tuple[bytes]]:
                with self._database:
                    return self._database.execute(statement, values).fetchall()

            return await asyncio.to_thread(run)


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
