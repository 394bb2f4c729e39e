"""A policy of your own: least frequently used. A policy is an order over chunks and nothing else.

python examples/custom_policy.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from tierkv import Chunk, ChunkKey, CPUTier, Level, Namespace, PrefixChunker, TieredCache
from tierkv.protocols import EvictionPolicy

CHUNK_NBYTES = 4 << 10


class LFU:
    """The chunk with the fewest uses leaves first; among equals the one that came first.

    It knows no bytes, no clock and no pins: the ledger skips what may not leave. Sorting at each eviction is fine for a
    few thousand chunks; the orders in :mod:`tierkv.policies` show how to do without.
    """

    def __init__(self) -> None:
        self._n_uses: dict[ChunkKey, int] = {}

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        self._n_uses.update((chunk.key, 0) for chunk in chunks)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self._n_uses[chunk.key] += 1

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        del self._n_uses[key]

    def victims(self) -> Iterator[ChunkKey]:
        yield from sorted(self._n_uses, key=self._n_uses.__getitem__)  # stable: the oldest first among equals


async def main() -> None:
    """A popular prompt outlives a stream of prompts that are asked once."""
    policy: EvictionPolicy = LFU()
    async with TieredCache(
        chunker=PrefixChunker(namespace=Namespace(model="my-model"), tokens_per_block=16, blocks_per_chunk=1),
        levels=[Level(CPUTier(), policy=policy, capacity=8 * CHUNK_NBYTES)],
        chunk_nbytes=CHUNK_NBYTES,
    ) as cache:
        popular = [1] * 32
        await cache.store(popular, [b"p" * CHUNK_NBYTES] * 2)
        for _ in range(3):
            async with cache.lease(await cache.lookup(popular)):
                pass
        for user in range(100, 120):
            await cache.store([user] * 32, [b"u" * CHUNK_NBYTES] * 2)
        hit = await cache.lookup(popular)
        print(f"after 20 other prompts through 8 slots, {hit.n_tokens} of {len(popular)} popular tokens are still here")
        assert hit.n_tokens == 32


if __name__ == "__main__":
    asyncio.run(main())
