"""First in, first out."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.policies._line_order import LineOrder
from tierkv.policies._stamp_heap import Item
from tierkv.types import Chunk, ChunkKey


class FIFO(LineOrder):
    """The chunk that was inserted first leaves first, used or not; the tail of one batch before its head.

    Parents play no part: a request that extends another's prefix outlives it, and its tail is then unreachable until
    the head is stored again. Inserting a resident key again does not move it.

    Concurrency: one thread. Cost: constant a chunk for insert, remove and victim, nothing for access.
    """

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        line, aside = self._line, self._aside
        for chunk in reversed(chunks):
            key = chunk.key
            if key not in line and key not in aside:
                self._stamp += 1
                line[key] = Item(key, self._stamp)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        """Use does not count."""

    def on_use(self, keys: Sequence[ChunkKey]) -> None:
        """Use does not count."""
