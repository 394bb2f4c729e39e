"""Least recently used, as an order of leaves."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.policies._leaf_order import LeafOrder, Node
from tierkv.types import Chunk


class LRU(LeafOrder):
    """The leaf that was not used for the longest time leaves first; never a chunk with a resident child.

    A request's chunks count as used tail first, so its tail is older than its head. Where each request arrives whole,
    the order is that of a plain list touched tail first; where it arrives in pieces it stays that order, at the same
    cost. A chunk without a parent (a sliding-window group) is in plain order of recency.

    Chunks may arrive before their parents, and may learn of their parent in a later access: a scan finds names only.
    A chunk whose parent was deleted is a head until the parent is back.

    Concurrency: one thread. Cost: amortised constant a chunk; a parent that becomes a leaf, or a chunk
    that was held, is O(log(n)) as a victim.
    """

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        line, aside, absent = self._line, self._aside, self._absent
        stamp = self._stamp
        linked = False
        for chunk in reversed(chunks):
            # Key and parent by number, here and below: every access comes by, and names take twice as long.
            stamp += 1
            key = chunk[0]
            if key in line:
                line[key].stamp = stamp
                line.move_to_end(key)
            elif key in aside:
                self._to_end(key, stamp)
            elif key in absent:
                self._arrive(key, stamp)
            else:
                line[key] = Node(key, stamp)
            if chunk[1] is not None:
                linked = True
        self._stamp = stamp
        if linked:
            self._link_all(chunks)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        line, aside = self._line, self._aside
        stamp = self._stamp
        for chunk in reversed(chunks):
            stamp += 1
            key = chunk[0]
            node = line.get(key)
            if node is not None:
                line.move_to_end(key)
                node.stamp = stamp
            elif key in aside:
                node = self._to_end(key, stamp)
            else:
                continue
            parent_key = chunk[1]
            if parent_key is not None and node.parent is None:
                self._link(node, parent_key)
        self._stamp = stamp

    def refresh(self, chunks: Sequence[Chunk]) -> None:
        """Recency is all there is here: the same as a use."""
        self.on_access(chunks)

    def _link_all(self, chunks: Sequence[Chunk]) -> None:
        line = self._line
        before = None
        for chunk in chunks:
            node, parent_key = line[chunk.key], chunk.parent
            if parent_key is not None and node.parent is None:
                if before is not None and before.key == parent_key and before is not node and not node.n_children:
                    # The usual case, a chain in order: without children it cannot be an ancestor of the one before.
                    node.parent = before
                    before.n_children += 1
                else:
                    self._link(node, parent_key)
            before = node
