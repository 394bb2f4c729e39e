"""Tails before heads, in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tierkv.policies._leaves import Leaves, Tree
from tierkv.policies._wrapper import Wrapper
from tierkv.protocols import EvictionPolicy
from tierkv.types import Chunk, ChunkKey, Turn


class LeafFirst(Wrapper):
    """The inner order's victims, but never a chunk whose child is resident: a prefix shrinks from its tail.

    A prefix is of use up to its first hole only, so an order that takes heads leaves chunks behind that nobody can
    reach. LRU needs no such wrapper, it is an order of leaves by itself.

    A chunk with children is passed over and, once they have left, is named in its place: at once where the inner
    order would have named it before, else where the inner order names it.

    Args:
        order: any order; where it is :class:`~tierkv.protocols.PinAware`, passing over costs nothing (amortised).

    Concurrency: one thread. Case: https://github.com/novitalabs/pegaflow/issues/396
    """

    _learns_from_uses = True

    def __init__(self, order: EvictionPolicy) -> None:
        super().__init__(order)
        self._tree = Tree()
        self._leaves = Leaves(order, self._tree)

    def __contains__(self, key: object) -> bool:
        return key in self._tree.parents

    def __len__(self) -> int:
        return len(self._tree.parents)

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self._tree.add(chunk)
            self._leaves.unpark(chunk.parent)
        self._order.on_insert(chunks)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        self._moved(chunks)
        self._order.on_access(chunks)

    def _refresh(self, chunks: Sequence[Chunk]) -> None:
        self._moved(chunks)
        super()._refresh(chunks)

    def _moved(self, chunks: Sequence[Chunk]) -> None:
        """These have another place in the inner order, and may say more of their parents than before."""
        parents = self._tree.parents
        # Backwards, as LRU goes, so that they agree on who is whose child even if keys are nonsense.
        for chunk in reversed(chunks):
            if chunk.key in parents:
                self._tree.add(chunk)
                self._leaves.unpark(chunk.key)
                self._leaves.unpark(chunk.parent)

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        self._leaves.forget(key)
        freed = self._tree.remove(key)
        self._order.on_remove(key, evicted=evicted)
        if freed is not None:
            self._leaves.unpark(freed)

    def on_hint(self, key: ChunkKey, turn: Turn) -> None:
        if key in self:
            self._leaves.hint(key, turn)
            super().on_hint(key, turn)

    def _follow(self, order: EvictionPolicy) -> None:
        super()._follow(order)
        self._leaves.follow(order)

    def hold(self, key: ChunkKey) -> None:
        self._leaves.hold(key)

    def release(self, key: ChunkKey) -> None:
        self._leaves.release(key)

    def victims(self) -> Iterator[ChunkKey]:
        return self._leaves.victims()
