"""Least frequently used."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.policies._heap_order import HeapOrder
from tierkv.policies._stamp_heap import Item
from tierkv.types import Chunk, ChunkKey

_USE = 1 << 48
"""A stamp is uses and a clock in one number; the clock ends ties between chunks used equally often."""


class LFU(HeapOrder):
    """The chunk that was used least often since it entered leaves first; of equals the one used longest ago.

    Uses are counted while a chunk is resident and forgotten when it leaves. So a chunk that was used often long ago
    stays, and what is new leaves before it can prove itself: on traces whose interest moves on it does badly.

    Parents play no part; wrap it in :class:`~tierkv.policies.LeafFirst`.

    Concurrency: one thread. Cost: constant a chunk, O(log(n)) a victim.
    """

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        items = self._items
        for chunk in reversed(chunks):
            key = chunk.key
            if key not in items:
                self._clock += 1
                item = items[key] = Item(key, _USE + self._clock)
                self._heap.add(item)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        self.on_use([chunk[0] for chunk in chunks])

    def on_use(self, keys: Sequence[ChunkKey]) -> None:
        """All that a use says here."""
        find = self._items.get
        clock = self._clock
        for key in reversed(keys):
            clock += 1
            item = find(key)
            if item is not None:
                item.stamp += _USE + clock - item.stamp % _USE
        self._clock = clock
