"""S3-FIFO: two queues that nothing is moved in, and a memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from tierkv.policies._queues import Ghosts, TwoQueues
from tierkv.types import Chunk, ChunkKey

_YOUNG = 0.1
_GHOSTS = 0.9
_USES_TO_STAY = 2
_MOST_USES = 3


class S3FIFO(TwoQueues):
    """New chunks pass through a short queue; what was used twice there, or comes back soon, enters the long one.

    The short queue has a tenth of the level. In the long one a chunk that was used goes round once more for each use,
    at most three times. As many chunks as nine tenths of the level are remembered after they left the short queue.
    Until something has been evicted, what does not fit into the short queue goes straight into the long one.

    Parents play no part; wrap it in :class:`~tierkv.policies.LeafFirst`.

    Args:
        capacity_chunks: chunks that the level holds. By default the most that were resident at one time; then the short
            queue is a tenth of what is there while the level fills for the first time.

    Concurrency: one thread. Cost: amortised constant a chunk and a victim.

    Source: Yang and others, "FIFO Queues are All You Need for Cache Eviction", SOSP 2023.
    """

    def __init__(self, capacity_chunks: int | None = None) -> None:
        super().__init__(capacity_chunks)
        self._ghosts = Ghosts()
        self._n_uses: dict[ChunkKey, int] = {}
        self._filling = True
        # What the latest victims() passed on its way to each victim. It happens when that victim leaves.
        self._passed: list[tuple[ChunkKey, int]] = []
        self._n_before: dict[ChunkKey, int] = {}
        self._n_done = 0

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        self._forget_passed()
        for key in self._fresh(chunks):
            if key in self._asked or self._ghosts.take(key):
                self._asked.discard(key)
                self._old.put(key)
            elif self._filling and len(self._young) >= int(self._capacity * _YOUNG):
                self._old.put(key)
            else:
                self._young.put(key)
            self._n_uses[key] = 0

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        self.on_use([chunk[0] for chunk in chunks])

    def on_use(self, keys: Sequence[ChunkKey]) -> None:
        """All that a use says here."""
        self._forget_passed()
        self._asked.clear()
        n_uses = self._n_uses
        for key in reversed(keys):
            if key in n_uses:
                n_uses[key] += 1
            elif self._ghosts.take(key):
                self._asked.add(key)

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        if key not in self._n_uses:
            return
        if evicted:
            self._filling = False
            self._pass(self._n_before.get(key, 0))
        del self._n_uses[key]
        if self._young.pull(key) is None:
            self._old.pull(key)
        elif evicted:
            self._ghosts.add(key)
            self._ghosts.trim(int(self._capacity * _GHOSTS))

    def victims(self) -> Iterator[ChunkKey]:
        """As the orders' protocol says. What it passes over goes round when the victim behind it has left, not before.

        Asking therefore changes nothing, and a victim that is passed over stays where it is.
        """
        self._forget_passed()
        passed, n_before = self._passed, self._n_before
        young, old = self._young.victims(), self._old.victims()
        round_again: deque[tuple[ChunkKey, int]] = deque()
        n_old = len(self._old)
        n_old_limit = self._capacity - int(self._capacity * _YOUNG)
        young_key = next(young, None)
        while True:
            if young_key is not None and n_old <= n_old_limit:
                key, young_key = young_key, next(young, None)
                if self._n_uses[key] >= _USES_TO_STAY:
                    n_old += 1
                    round_again.append((key, 0))
                    passed.append((key, 0))
                    continue
            else:
                old_key = next(old, None)
                if old_key is not None:
                    key, n_uses = old_key, self._n_uses[old_key]
                elif round_again:
                    key, n_uses = round_again.popleft()
                elif young_key is not None:
                    n_old_limit = n_old  # the long queue has nothing that may leave, however long it is
                    continue
                else:
                    return
                if n_uses:
                    n_uses = min(n_uses, _MOST_USES) - 1
                    round_again.append((key, n_uses))
                    passed.append((key, n_uses))
                    continue
                n_old -= 1
            n_before[key] = len(passed)
            yield key

    def _forget_passed(self) -> None:
        self._passed, self._n_before, self._n_done = [], {}, 0

    def _pass(self, n: int) -> None:
        """Make true the first ``n`` steps of the latest iteration."""
        for key, n_uses in self._passed[self._n_done : n]:
            if key in self._n_uses:
                self._n_uses[key] = n_uses
                if (item := self._young.pull(key)) is not None:
                    self._old.push(item)
                else:
                    self._old.to_back(key)
        self._n_done = max(self._n_done, n)
