"""ARC, the adaptive replacement cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tierkv.policies._queues import Ghosts, TwoQueues
from tierkv.types import Chunk, ChunkKey


class ARC(TwoQueues):
    """Chunks used once and chunks used again are two orders of recency; what comes back shifts the share of each.

    The order remembers as many chunks that have left as the level holds. If one comes back that had left the first
    queue, that queue was too short, and its target grows; if one comes back that had left the second, it shrinks.

    Where a queue has nothing that may leave, the other is asked, whatever the target says.

    Parents play no part; wrap it in :class:`~tierkv.policies.LeafFirst`.

    Args:
        capacity_chunks: chunks that the level holds. By default the most that were resident at one time, which is the
            same from the first eviction on.

    Concurrency: one thread. Cost: amortised constant a chunk and a victim.

    Source: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. Case:
    https://github.com/vllm-project/vllm/pull/55461
    """

    def __init__(self, capacity_chunks: int | None = None) -> None:
        super().__init__(capacity_chunks)
        self._young_ghosts = Ghosts()
        self._old_ghosts = Ghosts()
        self._target = 0.0
        """Chunks that the young queue should have."""
        self._tie_is_over = False
        """A young queue just as long as its target gives way, since somebody wants an old chunk back."""

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        asked = self._asked
        for key in self._fresh(chunks):
            if key in asked or self._returns(key):
                asked.discard(key)
                self._old.put(key)
            else:
                self._young.put(key)
            self._trim_ghosts()

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        self.on_use([chunk[0] for chunk in chunks])

    def on_use(self, keys: Sequence[ChunkKey]) -> None:
        """All that a use says here."""
        young, old = self._young, self._old
        self._asked.clear()
        self._tie_is_over = False
        for key in reversed(keys):
            if (item := young.pull(key)) is not None:
                old.push(item)
            elif key in old:
                old.to_back(key)
            else:
                is_old = key in self._old_ghosts
                if self._returns(key):
                    self._asked.add(key)
                    self._tie_is_over = is_old

    def refresh(self, chunks: Sequence[Chunk]) -> None:
        """To the back of the queue that each is in."""
        for chunk in reversed(chunks):
            for queue in (self._young, self._old):
                if chunk.key in queue:
                    queue.to_back(chunk.key)

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        if self._young.pull(key) is not None:
            ghosts = self._young_ghosts
        elif self._old.pull(key) is not None:
            ghosts = self._old_ghosts
        else:
            return
        if evicted:
            ghosts.add(key)

    def victims(self) -> Iterator[ChunkKey]:
        n_over = len(self._young) - self._target
        return self._merged(n_over + 1 if self._tie_is_over and not n_over else n_over)

    def _returns(self, key: ChunkKey) -> bool:
        """Whether the key has left lately; if so it is no ghost any more, and the target follows."""
        young, old = self._young_ghosts, self._old_ghosts
        if key in young:
            self._target = min(self._target + max(len(old) / len(young), 1), self._capacity)
            del young[key]
            return True
        if key in old:
            self._target = max(self._target - max(len(young) / len(old), 1), 0)
            del old[key]
            return True
        return False

    def _trim_ghosts(self) -> None:
        """With its ghosts the young queue is no longer than the level, and both are no longer than two levels."""
        capacity, n_young = self._capacity, len(self._young)
        n_ghosts = len(self._young_ghosts)
        if n_ghosts > capacity - n_young:
            n_ghosts = max(capacity - n_young, 0)
            self._young_ghosts.trim(n_ghosts)
        n_left = 2 * capacity - n_young - len(self._old) - n_ghosts
        if len(self._old_ghosts) > n_left:
            self._old_ghosts.trim(max(n_left, 0))
