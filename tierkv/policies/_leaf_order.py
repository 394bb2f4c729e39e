"""The order that LRU and FIFO share: the resident chunk with the oldest stamp leaves first, children before parents.

Only a *leaf*, a chunk without a resident child, can leave. When its last child has gone, a parent takes the later of
its own stamp and the newest among its descendants'. So a chain in use keeps its head, and the cost of a use does not
depend on the pieces in which a request arrives: a chunk with children is only stamped, and moved when it is a leaf.

Everybody stands in a line by stamp. A use takes a chunk to the end of the line, which is where its new stamp belongs.
Whoever stands at the front and may not leave is put aside when met there, so that nobody meets it twice. Once it may
leave, its old stamp belongs in front of the line or in the middle, so it waits in a heap. The order is both, merged.

Standard library only; single-threaded; deterministic: no set, no identity and no clock takes part in the order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import islice
from math import inf

from tierkv.policies._stamp_heap import Item, StampHeap
from tierkv.types import ChunkKey

_ABSENT = 0
"""Stamp of a node that is not resident. Others start at 1."""


class Node(Item):
    """A resident chunk, or the parent of one that is not resident (then unlinked from its own parent)."""

    __slots__ = ("n_children", "parent")

    def __init__(self, key: ChunkKey, stamp: int) -> None:
        self.key = key
        self.stamp = stamp
        self.held = False
        self.entry = None
        self.parent: Node | None = None
        self.n_children = 0


class _Walk:
    """One iteration over the victims."""

    __slots__ = ("freed", "n_left", "stamp", "turn")

    def __init__(self, turn: int) -> None:
        self.turn = turn
        self.stamp: float = 0
        """That of the last in the line who was met and may leave."""
        self.n_left: dict[Node, int] = {}
        """Children that have not been named, of those of whose children some have been."""
        self.freed: list[tuple[int, Node]] = []
        """Parents behind the walk whose children have all been named."""


class LeafOrder:
    """What an order by stamp needs beside inserting and stamping. Subclasses say what sets a stamp and what links.

    Keys that are not resident are ignored by every method. A hold is a flag, not a count.
    """

    def __init__(self) -> None:
        # A resident chunk is in one of the two. In the line it has the stamp that it had when it went to its end.
        self._line: OrderedDict[ChunkKey, Node] = OrderedDict()
        self._aside: dict[ChunkKey, Node] = {}
        # Parents that are not resident, so that their children find them when they arrive.
        self._absent: dict[ChunkKey, Node] = {}
        # The leaves among those aside that are not held.
        self._heap: StampHeap[Node] = StampHeap()
        # Whom the latest victims() met in the line who may not leave. They are put aside when the next one begins.
        self._met: list[Node] = []
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._line) + len(self._aside)

    def __contains__(self, key: object) -> bool:
        return key in self._line or key in self._aside

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)} resident>"

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:  # noqa: ARG002 - no ghosts are kept either way
        node = self._line.pop(key, None) or self._aside.pop(key, None)
        if node is None:
            return
        self._heap.drop(node)
        stamp, node.stamp = node.stamp, _ABSENT
        parent, node.parent = node.parent, None
        node.held = False
        if node.n_children:
            self._absent[key] = node
        if parent is not None:
            self._child_left(parent, stamp)

    def hold(self, key: ChunkKey) -> None:
        node = self._find(key)
        if node is not None:
            node.held = True
            self._heap.drop(node)

    def release(self, key: ChunkKey) -> None:
        node = self._find(key)
        if node is not None and node.held:
            node.held = False
            self._enter_heap(node)

    def victims(self) -> Iterator[ChunkKey]:
        """Every resident key in leaving order, less what is held and the ancestors of what is held.

        Lazy; a key costs O(1), or O(log(n)) where it is in the heap. One iteration at a time: a later one ends the
        earlier.

        Raises:
            RuntimeError: advanced after another iteration has begun, or after the order has changed.
        """
        turn = self._heap.begin()
        self._put_aside()
        met, aside = self._met, self._heap.entries
        walk: _Walk | None = None  # made when it is needed, since most often it is not
        for node in self._line.values():
            if node.held or (node.n_children and (walk is None or walk.n_left.get(node, 1))):
                met.append(node)
                continue
            if walk is None and (aside or node.parent is not None):
                walk = _Walk(turn)
            if walk is not None:
                walk.stamp = node.stamp
                while (early := self._before(walk)) is not None:
                    yield early.key
                    self._named(early, walk)
            yield node.key
            if walk is None:
                self._heap.check(turn)
            else:
                self._named(node, walk)
        walk = walk or _Walk(turn)
        walk.stamp = inf
        while (early := self._before(walk)) is not None:
            yield early.key
            self._named(early, walk)

    def evict(self, n_chunks: int) -> list[ChunkKey]:
        """Forget the ``n_chunks`` that :meth:`victims` would name first, or all it would name; their keys, in order.

        The front of the line leaves in one go. Only where somebody waits in the heap the two must be merged.
        """
        self._heap.begin()
        self._put_aside()
        line, waiting = self._line, self._heap.entries
        gone: list[ChunkKey] = []
        while len(gone) < n_chunks and line and not waiting:
            key, node = line.popitem(last=False)
            if node.held or node.n_children:
                self._aside[key] = node
                continue
            stamp, node.stamp = node.stamp, _ABSENT
            parent, node.parent = node.parent, None
            gone.append(key)
            if parent is not None:
                self._child_left(parent, stamp)
        if len(gone) < n_chunks:
            for key in list(islice(self.victims(), n_chunks - len(gone))):
                self.on_remove(key, evicted=True)
                gone.append(key)
        return gone

    # -- for subclasses -----------------------------------------------------------------------------------------

    def _to_end(self, key: ChunkKey, stamp: int) -> Node:
        """Give a chunk that is aside the newest stamp and its place at the end of the line."""
        node = self._aside.pop(key)
        self._heap.drop(node)
        self._line[key] = node
        node.stamp = stamp
        return node

    def _arrive(self, key: ChunkKey, stamp: int) -> None:
        """Make a chunk resident and newest whose children came before it; they are linked already."""
        node = self._line[key] = self._absent.pop(key)
        node.stamp = stamp

    def _find(self, key: ChunkKey) -> Node | None:
        return self._line.get(key) or self._aside.get(key)

    def _link(self, node: Node, parent_key: ChunkKey) -> None:
        """Make ``node``, which has no parent, a child of ``parent_key``, which may be absent."""
        parent = self._find(parent_key) or self._absent.get(parent_key)
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
        self._heap.drop(parent)

    # -- inside -------------------------------------------------------------------------------------------------

    def _before(self, walk: _Walk) -> Node | None:
        """Whoever behind the walk is to be named before whom it has met."""
        freed = walk.freed
        if freed and freed[0][0] < walk.stamp:
            return self._heap.take(freed[0][0]) or heappop(freed)[1]
        return self._heap.take(walk.stamp)

    def _named(self, node: Node, walk: _Walk) -> None:
        """Its parent is a leaf as soon as all its children have been named, as if they had left."""
        self._heap.check(walk.turn)
        parent = node.parent
        if parent is None or parent.stamp == _ABSENT:
            return
        n_left = walk.n_left[parent] = walk.n_left.get(parent, parent.n_children) - 1
        if not n_left and not parent.held and (parent.stamp <= walk.stamp or parent.key in self._aside):
            # The walk will not meet it any more. Its descendants' stamps play no part here: they have all been the
            # oldest, so they delay nothing.
            heappush(walk.freed, (parent.stamp, parent))

    def _child_left(self, parent: Node, stamp: int) -> None:
        parent.n_children -= 1
        if parent.stamp == _ABSENT:
            if not parent.n_children:
                del self._absent[parent.key]
            return
        if stamp > parent.stamp:
            parent.stamp = stamp
            if self._line.pop(parent.key, None) is not None:
                self._aside[parent.key] = parent
        self._enter_heap(parent)

    def _enter_heap(self, node: Node) -> None:
        """Somebody aside waits in the heap if it may leave."""
        if not (node.held or node.n_children or node.entry is not None) and node.key in self._aside:
            self._heap.add(node)

    def _put_aside(self) -> None:
        if not self._met:
            return
        met, self._met = self._met, []
        for node in met:
            if (node.held or node.n_children) and self._line.get(node.key) is node:
                self._aside[node.key] = self._line.pop(node.key)
