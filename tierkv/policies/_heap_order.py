"""The order that LFU and MQ share: the chunk with the lowest stamp leaves first, and a use only raises its stamp."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from tierkv.policies._stamp_heap import Item, StampHeap
from tierkv.types import ChunkKey


class HeapOrder:
    """What an order by rising stamps needs beside inserting and stamping, which its subclasses do.

    Keys that are not resident are ignored by every method. A hold is a flag, not a count.
    """

    def __init__(self) -> None:
        self._items: dict[ChunkKey, Item] = {}
        self._heap: StampHeap[Item] = StampHeap()
        self._clock = 0

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self._items)} resident>"

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:  # noqa: ARG002 - subclasses keep ghosts, or do not
        item = self._items.pop(key, None)
        if item is not None:
            self._heap.drop(item)

    def hold(self, key: ChunkKey) -> None:
        item = self._items.get(key)
        if item is not None:
            item.held = True
            self._heap.drop(item)

    def release(self, key: ChunkKey) -> None:
        item = self._items.get(key)
        if item is not None and item.held:
            item.held = False
            self._heap.add(item)

    def victims(self) -> Iterator[ChunkKey]:
        """Every resident key, lowest stamp first, less what is held.

        Lazy, and each key costs O(log(n)). One iteration at a time: a later one ends the earlier.

        Raises:
            RuntimeError: advanced after another iteration has begun.
        """
        heap = self._heap
        turn = heap.begin()
        while (item := heap.take(inf)) is not None:
            yield item.key
            heap.check(turn)
