"""What a scan has found enters in slices, between which everybody else on the loop has a turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

from tests.cases.kit import cache_over, turns_until
from tests.toys import STRIDE
from tierkv import MemoryTier
from tierkv.types import Chunk, ChunkKey, Found

N_BATCHES, BATCH = 5, 2_000


class Listed(MemoryTier):
    """Has listed everything before anybody asks, so that no batch has to be waited for."""

    writable = True

    def settled(self, key: ChunkKey) -> bool:
        return True

    async def scan(self) -> AsyncIterator[Sequence[Found]]:
        for batch in range(N_BATCHES):
            yield [Found(ChunkKey(b"%16d" % (batch * BATCH + i)), STRIDE) for i in range(BATCH)]

    async def probe(self, keys: Sequence[ChunkKey]) -> Sequence[Found | None]:
        return [None] * len(keys)

    async def save_order(self, chunks: Sequence[Chunk]) -> None:
        pass


async def test_a_large_root_enters_in_slices() -> None:
    """Between two looks of somebody else never more than a slice has entered, however fast the tier is."""
    tier = Listed(name="lower")
    entered: list[int] = []
    async with cache_over(tier, capacity=2 * N_BATCHES * BATCH * STRIDE) as cache:
        ledger = cache._opened().hierarchy.levels[1].ledger

        async def look() -> None:
            while len(ledger) < N_BATCHES * BATCH:
                entered.append(len(ledger))
                await asyncio.sleep(0)

        await look()
        await turns_until(lambda: len(ledger) == N_BATCHES * BATCH)
        steps = [later - earlier for earlier, later in pairwise(entered)]
        assert 0 < max(steps) <= 256
