"""MQ, the multi-queue order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tierkv.policies._heap_order import HeapOrder
from tierkv.policies._queues import check_capacity
from tierkv.policies._stamp_heap import Item
from tierkv.types import Chunk, ChunkKey

_N_QUEUES = 8
_GHOSTS_PER_CHUNK = 4


class _Used(Item):
    __slots__ = ("n_uses",)

    def __init__(self, key: ChunkKey, n_uses: int) -> None:
        super().__init__(key, 0)
        self.n_uses = n_uses


class MQ(HeapOrder):
    """Chunks used 1, 2, 4, 8... times are in queues of their own; the lowest queue's oldest chunk leaves first.

    A chunk that is not used for a *life*, which is as many uses of any chunks as the level holds chunks, goes down to
    the back of the next lower queue. So queue ``q`` is worth ``q`` lives: the order is that of the last use plus ``q``
    lives, and it is kept as that one number rather than as eight queues whose heads would have to be looked at. How
    often a chunk was used is remembered after it has left, for four times as many chunks as the level holds.

    The best simple upgrade over LRU on conversations. Parents play no part; wrap it in
    :class:`~tierkv.policies.LeafFirst`.

    Args:
        capacity_chunks: chunks that the level holds. By default the most that were resident at one time.

    Concurrency: one thread. Cost: constant a chunk, O(log(n)) a victim.

    Source: Zhou, Philbin and Li, "The Multi-Queue Replacement Algorithm", USENIX 2001.
    """

    def __init__(self, capacity_chunks: int | None = None) -> None:
        super().__init__()
        self._given = check_capacity(capacity_chunks)
        self._life = self._given or 1
        self._ghosts: OrderedDict[ChunkKey, int] = OrderedDict()

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        items = self._items
        for chunk in reversed(chunks):
            key = chunk.key
            if key not in items:
                item = items[key] = _Used(key, self._ghosts.pop(key, 0))
                if self._given is None and len(items) > self._life:
                    self._life = len(items)
                self._use(item)
                self._heap.add(item)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        self.on_use([chunk[0] for chunk in chunks])

    def on_use(self, keys: Sequence[ChunkKey]) -> None:
        """All that a use says here."""
        find = self._items.get
        for key in reversed(keys):
            item = find(key)
            if item is not None:
                self._use(item)  # type: ignore[arg-type]

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        if evicted:
            item = self._items.get(key)
            if item is not None:
                self._ghosts[key] = item.n_uses  # type: ignore[attr-defined]
                if len(self._ghosts) > _GHOSTS_PER_CHUNK * self._life:
                    self._ghosts.popitem(last=False)
        super().on_remove(key, evicted=evicted)

    def _use(self, item: _Used) -> None:
        item.n_uses = n_uses = item.n_uses + 1
        self._clock += 1
        item.stamp = self._clock + self._life * min(n_uses.bit_length(), _N_QUEUES)
