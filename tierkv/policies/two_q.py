"""2Q: a queue for what is new, a queue for what came back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tierkv.policies._queues import Ghosts, TwoQueues
from tierkv.types import Chunk, ChunkKey

_YOUNG = 0.25
_GHOSTS = 0.5


class TwoQ(TwoQueues):
    """New chunks pass through a first-in-first-out queue; those that are stored again after that are in order of use.

    The first queue may take up a quarter of the level, and what left it is remembered for half as many chunks as the
    level holds. A use while in the first queue does not count: uses in quick succession are one.

    Parents play no part; wrap it in :class:`~tierkv.policies.LeafFirst`.

    Args:
        capacity_chunks: chunks that the level holds. By default the most that were resident at one time, which is the
            same from the first eviction on.

    Concurrency: one thread. Cost: amortised constant a chunk and a victim.

    Source: Johnson and Shasha, "2Q: A Low Overhead High Performance Buffer Management Replacement Algorithm", VLDB
    1994.
    """

    def __init__(self, capacity_chunks: int | None = None) -> None:
        super().__init__(capacity_chunks)
        self._ghosts = Ghosts()

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        for key in self._fresh(chunks):
            if key in self._asked or self._ghosts.take(key):
                self._asked.discard(key)
                self._old.put(key)
            else:
                self._young.put(key)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        self.on_use([chunk[0] for chunk in chunks])

    def on_use(self, keys: Sequence[ChunkKey]) -> None:
        """All that a use says here."""
        old = self._old
        self._asked.clear()
        for key in reversed(keys):
            if key in old:
                old.to_back(key)
            elif self._ghosts.take(key):
                self._asked.add(key)

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        if self._young.pull(key) is None:
            self._old.pull(key)
        elif evicted:
            self._ghosts.add(key)
            self._ghosts.trim(int(self._capacity * _GHOSTS))

    def victims(self) -> Iterator[ChunkKey]:
        return self._merged(len(self._young) - int(self._capacity * _YOUNG))
