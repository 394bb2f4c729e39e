"""Which resident chunks have resident children, and another order's victims taken leaf by leaf."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import chain

from tierkv.protocols import EvictionPolicy, PinAware
from tierkv.types import Chunk, ChunkKey, Turn


class Tree:
    """Who continues whom. Chunks may come before their parents and may learn of their parent later."""

    def __init__(self) -> None:
        self.parents: dict[ChunkKey, ChunkKey | None] = {}
        """Of each resident chunk; None at a head and where the parent is unknown. The parent need not be resident."""
        self.n_children: dict[ChunkKey, int] = {}
        """Resident children, by key of the parent, resident or not; absent where there are none."""

    def add(self, chunk: Chunk) -> bool:
        """Note a chunk, or what it says of its parent now; tells whether it is new."""
        key, parent = chunk.key, chunk.parent
        known = self.parents.get(key, self)
        if known is not None and known is not self:
            return False
        self.parents[key] = parent if parent is not None and self._may_follow(key, parent) else None
        if self.parents[key] is not None:
            assert parent is not None
            self.n_children[parent] = self.n_children.get(parent, 0) + 1
        return known is self

    def remove(self, key: ChunkKey) -> ChunkKey | None:
        """Forget a chunk. Returns its parent if that has no resident child any more."""
        parent = self.parents.pop(key, None)
        if parent is None:
            return None
        n = self.n_children.pop(parent) - 1
        if n:
            self.n_children[parent] = n
            return None
        return parent

    def _may_follow(self, key: ChunkKey, parent: ChunkKey) -> bool:
        """False if ``key`` would be its own ancestor. Keys that say so are nonsense, not a reason to loop."""
        if parent != key and key not in self.n_children:
            return True
        ancestor: ChunkKey | None = parent
        while ancestor is not None:
            if ancestor == key:
                return False
            ancestor = self.parents.get(ancestor)
        return True


class Leaves:
    """An order's victims, each only after its resident children.

    A chunk with children that the walk comes upon is *parked*: held in the order, so that no later walk comes upon it
    again, until it is used, gets a child or loses its last one. So the cost is amortised constant. An order that knows
    no holds is walked over them each time.

    Args:
        order: the order to walk. The caller tells it of inserts, uses and removals.
        tree: kept up to date by the caller.
    """

    def __init__(self, order: EvictionPolicy, tree: Tree) -> None:
        self._order = order
        self._pins = order if isinstance(order, PinAware) else None
        self._tree = tree
        self._held: set[ChunkKey] = set()
        self._parked: set[ChunkKey] = set()
        self._last: set[ChunkKey] = set()
        # What the latest walk came upon; parked when the next call comes, since a walk must not change the order.
        self._met: list[ChunkKey] = []

    def follow(self, order: EvictionPolicy) -> None:
        """Go on with an order around the one before, which knows all that that one was told."""
        self._order = order
        self._pins = order if self._pins is not None and isinstance(order, PinAware) else None

    def hint(self, key: ChunkKey, turn: Turn) -> None:
        """The order is about to be told of a hint."""
        self.unpark(key)
        (self._last.add if turn is Turn.LAST else self._last.discard)(key)

    def unpark(self, key: ChunkKey | None) -> None:
        """The chunk was used, or its children have changed: it is in its place in the order again."""
        self._park_met()
        if key is not None and key in self._parked:
            self._parked.remove(key)
            if self._pins is not None and key not in self._held:
                self._pins.release(key)

    def forget(self, key: ChunkKey) -> None:
        """The chunk is leaving; the order learns of it from the caller."""
        self._park_met()
        self._parked.discard(key)
        self._held.discard(key)
        self._last.discard(key)

    def hold(self, key: ChunkKey) -> None:
        if key in self._tree.parents:
            self._held.add(key)
            if self._pins is not None:
                self._pins.hold(key)

    def release(self, key: ChunkKey) -> None:
        self._held.discard(key)
        if self._pins is not None and key not in self._parked:
            self._pins.release(key)

    def victims(self) -> Iterator[ChunkKey]:
        """Each key only after its resident children, less what is held and the ancestors of what is held."""
        victims = self._from_first_leaf()
        met = self._met
        parents, n_children = self._tree.parents, self._tree.n_children
        n_left: dict[ChunkKey, int] = {}
        passed = set(met)
        late: list[ChunkKey] = []
        for key in chain(victims, late):
            if key in self._held:
                continue
            if n_left.get(key, n_children.get(key, 0)):
                met.append(key)
                passed.add(key)
                continue
            yield key
            parent = parents[key]
            while parent is not None:
                n_left[parent] = n_left.get(parent, n_children[parent]) - 1
                if n_left[parent] or parent in self._held or not (parent in passed or parent in self._parked):
                    break
                # Its last child is gone and the walk has passed it: it is colder than all that is still to come, unless
                # it was kept, and then it comes after that.
                if parent in self._last:
                    late.append(parent)
                    break
                yield parent
                parent = parents.get(parent)

    def _from_first_leaf(self) -> Iterator[ChunkKey]:
        """The order's victims, asked again until no chunk with children is in front of the first leaf.

        An order that weighs two queues against each other may choose otherwise with those out of the way.
        """
        while True:
            self._park_met()
            victims = iter(self._order.victims())
            first = next((key for key in victims if not self._meets(key)), None)
            if not self._met or self._pins is None:
                return chain(() if first is None else (first,), victims)
            if isinstance(victims, Generator):
                victims.close()

    def _meets(self, key: ChunkKey) -> bool:
        """Whether a key in front may not leave; one that has children is noted."""
        if key in self._tree.n_children:
            self._met.append(key)
            return True
        return key in self._held

    def _park_met(self) -> None:
        if not self._met:
            return
        for key in self._met:
            if self._pins is not None and key in self._tree.n_children and key in self._tree.parents:
                self._parked.add(key)
                self._pins.hold(key)
        self._met = []
