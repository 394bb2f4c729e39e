"""Expiry by age."""

from __future__ import annotations

import copy
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from tierkv.policies._wrapper import Wrapper
from tierkv.protocols import Clock, EvictionPolicy
from tierkv.settings import parse_seconds
from tierkv.types import Chunk, ChunkKey


class TTL(Wrapper):
    """A chunk expires ``ttl_s`` seconds after it could first be read, used or not.

    An expired chunk answers a miss at once, is first to leave, oldest first, and the next trim removes it. Heads are
    older than their tails and expire before them: a tail behind an expired head waits for the head to be stored again,
    or for its own time. A held chunk that expires leaves after its release.

    The age counts from the commit, of which the level tells (:class:`~tierkv.protocols.CommitAware`), not from the
    reservation; a chunk that was found on a disk at start counts from then.

    Args:
        order: the order of what has not expired.
        ttl_s: seconds, more than 0.
        clock: seconds, never running backwards. Not wall time: that may be set.

    Raises:
        ConfigError: ``ttl_s`` is not a time, or ``order`` is not an order.

    Concurrency: one thread. Cost: constant a chunk.
    """

    def __init__(self, order: EvictionPolicy, ttl_s: float, clock: Clock = time.monotonic) -> None:
        super().__init__(order)
        self._ttl_s = parse_seconds("ttl_s", ttl_s, 0.001)
        self._clock = clock
        # Each resident key is in one of three: not seen to be due, oldest first; due; due and held.
        self._born: OrderedDict[ChunkKey, float] = OrderedDict()
        self._due: OrderedDict[ChunkKey, None] = OrderedDict()
        self._due_held: set[ChunkKey] = set()

    def __contains__(self, key: object) -> bool:
        return key in self._born or key in self._due or key in self._due_held

    def __len__(self) -> int:
        return len(self._born) + len(self._due) + len(self._due_held)

    def __deepcopy__(self, memo: dict[int, object]) -> TTL:
        """A copy in its own state that keeps the same clock: time is one."""
        memo[id(self._clock)] = self._clock
        other = memo[id(self)] = object.__new__(type(self))
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    def expired(self, chunk: Chunk) -> bool:
        key = chunk.key
        born_s = self._born.get(key)
        if born_s is not None:
            return self._clock() - born_s >= self._ttl_s or self._inner_expired(chunk)
        return key in self._due or key in self._due_held

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        now_s = self._clock()
        for chunk in chunks:
            if chunk.key not in self:
                self._born[chunk.key] = now_s
        super().on_insert(chunks)

    def on_commit(self, key: ChunkKey) -> None:
        """It can be read from now on: the age begins."""
        if key in self:
            self._forget_age(key)
            self._born[key] = self._clock()
        self._on_commit(key)

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        self._forget_age(key)
        super().on_remove(key, evicted=evicted)

    def hold(self, key: ChunkKey) -> None:
        if key in self._due:
            del self._due[key]
            self._due_held.add(key)
        super().hold(key)

    def release(self, key: ChunkKey) -> None:
        if key in self._due_held:
            self._due_held.remove(key)
            self._due[key] = None
        super().release(key)

    def victims(self) -> Iterator[ChunkKey]:
        self._age()
        due = self._due
        yield from due
        for key in self._rest():
            if key not in due:
                yield key

    def _age(self) -> None:
        """Move what is due out of the way, held or not, so that nobody looks at it twice."""
        born, now_s = self._born, self._clock()
        while born:
            key = next(iter(born))
            if now_s - born[key] < self._ttl_s:
                return
            del born[key]
            if key in self._held:
                self._due_held.add(key)
            else:
                self._due[key] = None

    def _forget_age(self, key: ChunkKey) -> None:
        self._born.pop(key, None)
        self._due.pop(key, None)
        self._due_held.discard(key)

    def _inner_expired(self, chunk: Chunk) -> bool:
        inner = getattr(self._order, "expired", None)
        return inner is not None and bool(inner(chunk))
