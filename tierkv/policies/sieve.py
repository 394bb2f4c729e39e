"""SIEVE: a queue that is never reordered, and a hand that passes over it."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.policies._leaf_order import LeafOrder, Node
from tierkv.types import Chunk, ChunkKey

_LAP = 1 << 48
"""A stamp is a lap of the hand and a place in the queue in one number."""


class SIEVE(LeafOrder):
    """A hand passes over the queue from old to new; what was not used since the hand last came by leaves.

    No hand moves here: it would have to walk over what is held. A chunk's stamp is the lap and the place at which the
    hand will find it unused. A use puts that off to the lap after the one in which the hand comes by next. The order of
    stamps is then the order in which a hand would take the chunks, whatever it has to pass over.

    Use beyond the first does not count, so what is new often leaves before what is used; good for web traces, bad for
    conversations. Parents play no part; wrap it in :class:`~tierkv.policies.LeafFirst`.

    Concurrency: one thread. Cost: constant a chunk, O(log(n)) a victim.

    Source: Zhang and others, "SIEVE is Simpler than LRU", NSDI 2024.
    """

    def __init__(self) -> None:
        super().__init__()
        self._hand = 0
        """Stamp of the latest chunk that it took."""

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        nodes = self._nodes
        newest = next(reversed(nodes.values()), None)
        if newest is not None and newest.stamp % _LAP <= self._hand % _LAP:
            # The hand has passed the newest chunk: it goes on at the oldest, and comes to what is new after that.
            self._hand += _LAP - self._hand % _LAP
        lap = self._hand - self._hand % _LAP
        for chunk in reversed(chunks):
            key = chunk.key
            if key not in nodes:
                self._stamp += 1
                node = nodes[key] = Node(key, lap + self._stamp)
                self._enqueue(node)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        find = self._nodes.get
        place_of_hand = self._hand % _LAP
        lap = self._hand - place_of_hand
        for chunk in chunks:
            node = find(chunk.key)
            if node is not None:
                place = node.stamp % _LAP
                node.stamp = lap + place + (_LAP if place > place_of_hand else 2 * _LAP)

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        if evicted:
            node = self._nodes.get(key)
            if node is not None and node.stamp > self._hand:
                self._hand = node.stamp
        super().on_remove(key, evicted=evicted)
