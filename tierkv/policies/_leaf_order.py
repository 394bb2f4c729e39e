"""The order that LRU and FIFO share: the resident chunk with the oldest stamp leaves first, children before parents.

Only a *leaf*, a chunk without a resident child, can leave. When its last child has gone, a parent takes the later of
its own stamp and the newest among its descendants'. So a chain in use keeps its head, and the cost of a use does not
depend on the pieces in which a request arrives: nothing is moved when a chunk is used, only stamped.

Leaves wait in a heap by the stamp they had when they entered it. Stamps only rise, so that stamp is a lower bound; what
comes to the top with an old one is put back with the right one. A leaf has one entry at most, and hands it over when it
stops being a leaf: down to its first child, up to its parent when it leaves. A chain of any length costs one entry.

Standard library only; single-threaded; deterministic: no set, no identity and no clock takes part in the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

from tierkv.types import ChunkKey

_Entry = list[Any]
"""``[stamp, number, node or None]``: mutable, since it is handed over, and compared in C. The number ends every tie."""

_ABSENT = 0
"""Stamp of a node that is not resident. Others start at 1."""

_SLACK = 64
"""Outdated entries that are never worth a clean-up."""


class Node:
    """A resident chunk, or the parent of one that is not resident (then unlinked from its own parent)."""

    __slots__ = ("entry", "held", "key", "n_children", "parent", "stamp")

    def __init__(self, key: ChunkKey, stamp: int) -> None:
        self.key = key
        self.stamp = stamp
        self.parent: Node | None = None
        self.n_children = 0
        self.held = False
        self.entry: _Entry | None = None


class LeafOrder:
    """What an order by stamp needs beside inserting and stamping. Subclasses say what sets a stamp and what links.

    Keys that are not resident are ignored by every method. A hold is a flag, not a count.
    """

    def __init__(self) -> None:
        self._nodes: dict[ChunkKey, Node] = {}
        # Parents that are not resident, so that their children find them when they arrive.
        self._absent: dict[ChunkKey, Node] = {}
        self._heap: list[_Entry] = []
        # What the latest victims() took off the heap. Most of it is about to be removed, so putting it back waits.
        self._taken: list[_Entry] = []
        self._stamp = 0
        self._n_entries = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self._nodes)} resident>"

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:  # noqa: ARG002 - no ghosts are kept either way
        node = self._nodes.pop(key, None)
        if node is None:
            return
        entry, node.entry = node.entry, None
        stamp, node.stamp = node.stamp, _ABSENT
        parent, node.parent = node.parent, None
        node.held = False
        if node.n_children:
            self._absent[key] = node
        if entry is not None:
            entry[2] = None
        if parent is not None:
            self._child_left(parent, stamp, entry)

    def hold(self, key: ChunkKey) -> None:
        node = self._nodes.get(key)
        if node is not None:
            node.held = True

    def release(self, key: ChunkKey) -> None:
        node = self._nodes.get(key)
        if node is not None:
            node.held = False
            if node.entry is None and not node.n_children:
                self._enqueue(node)

    def victims(self) -> Iterator[ChunkKey]:
        """Every resident key in leaving order, less what is held and the ancestors of what is held.

        Lazy, and each key costs O(log(leaves)). One iteration at a time: a later one ends the earlier.

        Raises:
            RuntimeError: advanced after another iteration has begun.
        """
        self._put_back()
        taken = self._taken
        # Parents whose children have all been named: leaves as soon as those have left, which only the caller decides.
        freed: list[tuple[int, Node]] = []
        n_left: dict[Node, int] = {}
        while True:
            oldest = self._oldest()
            if freed and (oldest is None or freed[0][0] < oldest[0]):
                node = heappop(freed)[1]
            elif oldest is not None:
                taken.append(heappop(self._heap))
                node = oldest[2]
            else:
                return
            yield node.key
            if self._taken is not taken:
                msg = "victims() was called again while this iteration was open"
                raise RuntimeError(msg)
            parent = node.parent
            if parent is None or parent.stamp == _ABSENT:
                continue
            n_left[parent] = n_left.get(parent, parent.n_children) - 1
            if not n_left[parent] and not parent.held:
                # Its descendants' stamps play no part here: they have all been the oldest, so they delay nothing.
                heappush(freed, (parent.stamp, parent))

    # -- for subclasses -----------------------------------------------------------------------------------------

    def _arrive(self, key: ChunkKey, stamp: int) -> Node:
        """Make ``key``, which is not resident, resident; children that came before it are linked already."""
        node = self._absent.pop(key, None) if self._absent else None
        if node is None:
            node = Node(key, stamp)
        node.stamp = stamp
        self._nodes[key] = node
        return node

    def _link(self, node: Node, parent_key: ChunkKey) -> None:
        """Make ``node``, which has no parent, a child of ``parent_key``, which may be absent."""
        parent = self._nodes.get(parent_key) or self._absent.get(parent_key)
        if parent is None:
            parent = self._absent[parent_key] = Node(parent_key, _ABSENT)
        elif node.n_children or parent is node:
            # Only a node with children can be its own ancestor. Keys that say so are nonsense, not a reason to loop.
            ancestor: Node | None = parent
            while ancestor is not None:
                if ancestor is node:
                    return
                ancestor = ancestor.parent
        node.parent = parent
        parent.n_children += 1
        if parent.entry is not None:
            self._hand_down(parent, node)

    def _hand_down(self, parent: Node, child: Node) -> None:
        """``parent`` has a child now, hence no entry: the child takes it, unless it has or needs none."""
        entry, parent.entry = parent.entry, None
        assert entry is not None
        if child.entry is None and not child.n_children:
            # Whoever links has just stamped the child, so the entry's stamp is a lower bound for it.
            child.entry = entry
            entry[2] = child
        else:
            entry[2] = None

    def _enqueue(self, node: Node) -> None:
        """Give a leaf without an entry one."""
        if len(self._heap) > 2 * len(self._nodes) + _SLACK:
            self._tidy()
        self._n_entries += 1
        node.entry = [node.stamp, self._n_entries, node]
        heappush(self._heap, node.entry)

    # -- inside -------------------------------------------------------------------------------------------------

    def _child_left(self, parent: Node, stamp: int, entry: _Entry | None) -> None:
        parent.n_children -= 1
        if parent.stamp == _ABSENT:
            if not parent.n_children:
                del self._absent[parent.key]
            return
        parent.stamp = max(parent.stamp, stamp)
        if parent.n_children:
            return
        if entry is not None:
            parent.entry = entry
            entry[2] = parent
        elif not parent.held:
            self._enqueue(parent)

    def _put_back(self) -> None:
        taken, self._taken = self._taken, []
        for entry in taken:
            node = entry[2]
            if node is not None:
                entry[0] = node.stamp
                heappush(self._heap, entry)

    def _oldest(self) -> _Entry | None:
        """The entry at the top of the heap, once that is a leaf that may leave, with its present stamp."""
        heap = self._heap
        n_outdated = 0
        while heap:
            entry = heap[0]
            node = entry[2]
            if node is not None and not node.held and entry[0] == node.stamp:
                return entry
            n_outdated += 1
            if n_outdated > _SLACK + len(heap) // 16:
                self._tidy()
            elif node is not None and not node.held:
                entry[0] = node.stamp
                heapreplace(heap, entry)
            else:
                heappop(heap)
                if node is not None:
                    node.entry = None
        return None

    def _tidy(self) -> None:
        """Bring every entry up to date at once: when many are not, that is linear where one by one is not."""
        live = []
        for entry in self._heap:
            node = entry[2]
            if node is not None:
                if node.held:
                    node.entry = None
                else:
                    entry[0] = node.stamp
                    live.append(entry)
        heapify(live)
        self._heap[:] = live
