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

    Concurrency: one thread. Cost: amortised constant a chunk for insert, access and remove, O(log(leaves)) a victim.
    """

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        nodes = self._nodes
        stamp = self._stamp + len(chunks)
        self._stamp = stamp
        ends: list[Node] = []
        before = None
        for chunk in chunks:
            key, parent_key = chunk.key, chunk.parent
            node = nodes.get(key)
            if node is None:
                if self._absent:
                    node = self._arrive(key, stamp)
                else:
                    node = nodes[key] = Node(key, stamp)
            elif node.stamp < stamp:
                node.stamp = stamp
            stamp -= 1
            if (
                before is not None
                and before.key == parent_key
                and before is not node
                and node.parent is None
                and not node.n_children
            ):
                # The usual case, a chain in order: without children it cannot be an ancestor of the one before.
                node.parent = before
                before.n_children += 1
                if before.entry is not None:
                    self._hand_down(before, node)
                ends[-1] = node
            else:
                if parent_key is not None and node.parent is None:
                    self._link(node, parent_key)
                ends.append(node)
            before = node
        for node in ends:
            if node.entry is None and not node.n_children:
                self._enqueue(node)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        find = self._nodes.get
        stamp = self._stamp
        for chunk in reversed(chunks):
            stamp += 1
            node = find(chunk.key)
            if node is not None:
                node.stamp = stamp
                if node.parent is None and chunk.parent is not None:
                    self._link(node, chunk.parent)
        self._stamp = stamp
