"""The order that FIFO and the queues of others share: everybody in a line, and the front leaves first.

Whoever stands at the front and is held is put aside when met there, so that nobody meets it twice. Once it is held no
more, its old stamp belongs in front of the line or in the middle, so it waits in a heap. The order is both, merged.

Standard library only; single-threaded; deterministic: no set, no identity and no clock takes part in the order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from math import inf

from tierkv.policies._stamp_heap import Item, StampHeap
from tierkv.types import ChunkKey


class LineOrder:
    """What such an order needs beside inserting and moving. Subclasses say what does.

    Keys that are not resident are ignored by every method. A hold is a flag, not a count.
    """

    def __init__(self) -> None:
        # A resident chunk is in one of the two. In the line it has the stamp that it had when it went to its end.
        self._line: OrderedDict[ChunkKey, Item] = OrderedDict()
        self._aside: dict[ChunkKey, Item] = {}
        # Those aside that are not held.
        self._heap: StampHeap[Item] = StampHeap()
        # Whom the latest victims() met held. They are put aside when the next one begins.
        self._met: list[Item] = []
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._line) + len(self._aside)

    def __contains__(self, key: object) -> bool:
        return key in self._line or key in self._aside

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)} resident>"

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:  # noqa: ARG002 - no ghosts are kept either way
        item = self._line.pop(key, None) or self._aside.pop(key, None)
        if item is not None and item.heaped is not None:
            self._heap.drop(item)

    def hold(self, key: ChunkKey) -> None:
        item = self._line.get(key) or self._aside.get(key)
        if item is not None:
            item.held = True
            if item.heaped is not None:
                self._heap.drop(item)

    def release(self, key: ChunkKey) -> None:
        item = self._line.get(key)
        if item is None and (item := self._aside.get(key)) is not None and item.held:
            self._heap.add(item)
        if item is not None:
            item.held = False

    def victims(self) -> Iterator[ChunkKey]:
        """Every resident key in leaving order, less what is held.

        Lazy; a key costs O(1), or O(log(n)) where it is in the heap. One iteration at a time: a later one ends the
        earlier.

        Raises:
            RuntimeError: advanced after another iteration has begun, or after the order has changed.
        """
        turn = self._heap.begin()
        self._put_aside()
        met, aside = self._met, self._heap.entries
        for item in self._line.values():
            if item.held:
                met.append(item)
                continue
            while aside and (early := self._heap.take(item.stamp)) is not None:
                yield early.key
                self._heap.check(turn)
            yield item.key
            self._heap.check(turn)
        while (early := self._heap.take(inf)) is not None:
            yield early.key
            self._heap.check(turn)

    def evict(self, n_chunks: int) -> list[ChunkKey]:
        """Forget the ``n_chunks`` that :meth:`victims` would name first, or all it would name; their keys, in order.

        The front of the line leaves in one go. Only where somebody waits in the heap the two must be merged.
        """
        self._heap.begin()
        self._put_aside()
        line, waiting = self._line, self._heap.entries
        gone: list[ChunkKey] = []
        while len(gone) < n_chunks and line and not waiting:
            key, item = line.popitem(last=False)
            if item.held:
                self._aside[key] = item
            else:
                gone.append(key)
        if len(gone) < n_chunks:
            for key in list(islice(self.victims(), n_chunks - len(gone))):
                self.on_remove(key, evicted=True)
                gone.append(key)
        return gone

    # -- for subclasses -----------------------------------------------------------------------------------------

    def _to_end(self, key: ChunkKey, stamp: int) -> Item:
        """Give a chunk that is aside the newest stamp and its place at the end of the line."""
        item = self._aside.pop(key)
        self._heap.drop(item)
        self._line[key] = item
        item.stamp = stamp
        return item

    def _find(self, key: ChunkKey) -> Item | None:
        return self._line.get(key) or self._aside.get(key)

    # -- inside -------------------------------------------------------------------------------------------------

    def _put_aside(self) -> None:
        if not self._met:
            return
        met, self._met = self._met, []
        for item in met:
            if item.held and self._line.get(item.key) is item:
                self._aside[item.key] = self._line.pop(item.key)
