"""What the orders of two queues share: a queue that keeps its holds, and a memory of what has left.

ARC, 2Q and S3-FIFO each hold their chunks in two queues and choose between the queues' cold ends. Each of them says
only what moves a chunk and which end is next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

from tierkv.policies._line_order import LineOrder
from tierkv.policies._stamp_heap import Item
from tierkv.settings import parse_count
from tierkv.types import Chunk, ChunkKey


class Queue(LineOrder):
    """Keys in the order in which they were last put at the back. A held key keeps its place and is not named."""

    def put(self, key: ChunkKey) -> None:
        """Put a key that is not here at the back."""
        self._stamp += 1
        self._line[key] = Item(key, self._stamp)

    def to_back(self, key: ChunkKey) -> None:
        """Put a key that is here at the back."""
        self._stamp += 1
        item = self._line.get(key)
        if item is not None:
            self._line.move_to_end(key)
            item.stamp = self._stamp
        else:
            self._to_end(key, self._stamp)

    def pull(self, key: ChunkKey) -> Item | None:
        """Remove a key; what stood for it, held or not, or None if it is not here."""
        item = self._line.pop(key, None) or self._aside.pop(key, None)
        if item is not None and item.heaped is not None:
            self._heap.drop(item)
        return item

    def push(self, item: Item) -> None:
        """Put what another queue's :meth:`pull` gave at the back, held as it was."""
        self._stamp = item.stamp = self._stamp + 1
        self._line[item.key] = item


class Ghosts(OrderedDict[ChunkKey, None]):
    """Keys that were evicted, oldest first. The caller bounds it."""

    def add(self, key: ChunkKey) -> None:
        self[key] = None

    def take(self, key: ChunkKey) -> bool:
        """Forget a key; tells whether it was known."""
        if key in self:
            del self[key]
            return True
        return False

    def trim(self, n: int) -> None:
        """Forget the oldest until ``n`` are left."""
        while len(self) > n:
            self.popitem(last=False)


class TwoQueues:
    """Two queues, of which a chunk is in one; the order's whole state but its ghosts.

    Keys that are not resident are ignored, except by ``on_access`` where the order has a ghost of them: a caller who
    can tells of a request's missing chunks before making room for them, so that their ghosts are not pushed out by it.

    Args:
        capacity_chunks: chunks that the level holds. By default the most that were resident at one time, which is the
            same from the first eviction on.
    """

    def __init__(self, capacity_chunks: int | None = None) -> None:
        self._given = check_capacity(capacity_chunks)
        self._capacity = self._given or 0
        self._young = Queue()
        self._old = Queue()
        # Ghosts that the latest request asked for; they count as ghosts when they are inserted, and are none any more.
        self._asked: set[ChunkKey] = set()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self._young)} + {len(self._old)} resident>"

    def hold(self, key: ChunkKey) -> None:
        (self._old if key in self._old else self._young).hold(key)

    def release(self, key: ChunkKey) -> None:
        (self._old if key in self._old else self._young).release(key)

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        raise NotImplementedError

    def victims(self) -> Iterator[ChunkKey]:
        raise NotImplementedError

    def evict(self, n_chunks: int) -> list[ChunkKey]:
        """Forget the ``n_chunks`` that :meth:`victims` would name first, or all it would name; their keys, in order."""
        gone = list(islice(self.victims(), n_chunks))
        for key in gone:
            self.on_remove(key, evicted=True)
        return gone

    def _fresh(self, chunks: Sequence[Chunk]) -> list[ChunkKey]:
        """Keys that are not resident, tail first, each once; the capacity grows to what will be resident."""
        young, old = self._young, self._old
        keys = dict.fromkeys([chunk[0] for chunk in reversed(chunks)])  # by number: every chunk that comes in comes by
        fresh = [key for key in keys if key not in young and key not in old]
        if self._given is None:
            self._capacity = max(self._capacity, len(self) + len(fresh))
        return fresh

    def _merged(self, n_young_over: float) -> Iterator[ChunkKey]:
        """``n_young_over`` from the young queue, then the old one, then the rest of the young."""
        young = self._young.victims()
        while n_young_over > 0:
            key = next(young, None)
            if key is None:
                break
            n_young_over -= 1
            yield key
        yield from self._old.victims()
        yield from young


def check_capacity(capacity_chunks: object) -> int | None:
    """None, or a whole number of at least 1.

    Raises:
        ConfigError: anything else.
    """
    if capacity_chunks is None:
        return None
    return parse_count("capacity_chunks", capacity_chunks, 1, 2**48)
