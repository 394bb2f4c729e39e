"""Least frequently used."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.policies._leaf_order import LeafOrder, Node
from tierkv.types import Chunk

_USE = 1 << 48
"""A stamp is uses and a clock in one number; the clock ends ties between chunks used equally often."""


class LFU(LeafOrder):
    """The chunk that was used least often since it entered leaves first; of equals the one used longest ago.

    Uses are counted while a chunk is resident and forgotten when it leaves. So a chunk that was used often long ago
    stays, and what is new leaves before it can prove itself: on traces whose interest moves on it does badly.

    Parents play no part; wrap it in :class:`~tierkv.policies.LeafFirst`.

    Concurrency: one thread. Cost: constant a chunk, O(log(n)) a victim.
    """

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        nodes = self._nodes
        for chunk in reversed(chunks):
            key = chunk.key
            if key not in nodes:
                self._stamp += 1
                node = nodes[key] = Node(key, _USE + self._stamp)
                self._enqueue(node)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        find = self._nodes.get
        clock = self._stamp
        for chunk in reversed(chunks):
            clock += 1
            node = find(chunk.key)
            if node is not None:
                node.stamp += _USE + clock - node.stamp % _USE
        self._stamp = clock
