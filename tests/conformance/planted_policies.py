"""Orders that break one rule each. Where no fault is planted they are a plain list in order of insertion."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from tierkv.policies import LRU
from tierkv.testing import ManualClock
from tierkv.types import Chunk, ChunkKey


class InOrder:
    """The sound one: insertion order, holds respected."""

    def __init__(self) -> None:
        self.order: dict[ChunkKey, None] = {}
        self.held: set[ChunkKey] = set()

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        self.order.update((chunk.key, None) for chunk in chunks)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        pass

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        del self.order[key]
        self.held.discard(key)

    def hold(self, key: ChunkKey) -> None:
        self.held.add(key)

    def release(self, key: ChunkKey) -> None:
        self.held.discard(key)

    def victims(self) -> Iterator[ChunkKey]:
        return (key for key in list(self.order) if key not in self.held)


class NamesTwice(InOrder):
    """The last one is named again at the end."""

    def victims(self) -> Iterator[ChunkKey]:
        keys = list(super().victims())
        yield from keys + keys[3:4]


class LosesOne(InOrder):
    """A chunk that is used while it is held is never named again."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[ChunkKey] = set()

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        self.lost.update(chunk.key for chunk in chunks if chunk.key in self.held)

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        super().on_remove(key, evicted=evicted)
        self.lost.discard(key)

    def victims(self) -> Iterator[ChunkKey]:
        return (key for key in super().victims() if key not in self.lost)


class NamesTheDead(InOrder):
    """A chunk that was evicted stays in the order until the next insertion."""

    def __init__(self) -> None:
        super().__init__()
        self.dead: list[ChunkKey] = []

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        self.dead.clear()
        super().on_insert(chunks)

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        super().on_remove(key, evicted=evicted)
        if evicted:
            self.dead.append(key)

    def victims(self) -> Iterator[ChunkKey]:
        yield from super().victims()
        yield from self.dead


class NamesTheHeld(InOrder):
    """A chunk that was held twice in its life is named although it is held."""

    def __init__(self) -> None:
        super().__init__()
        self.once: set[ChunkKey] = set()

    def hold(self, key: ChunkKey) -> None:
        if key not in self.once:
            super().hold(key)
        self.once.add(key)


class RemembersHolds(InOrder):
    """A hold outlives the chunk: stored again, it is never named."""

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        del self.order[key]


class Moves(InOrder):
    """Being asked moves the first one to the end: what looks at an order changes it."""

    def victims(self) -> Iterator[ChunkKey]:
        for key in [key for key in self.order if key not in self.held]:
            self.order[key] = self.order.pop(key)
            yield key


class ByHash(InOrder):
    """A set's order is another one in every process."""

    def victims(self) -> Iterator[ChunkKey]:
        return iter(set(self.order) - self.held)


class ByIdentity(InOrder):
    """Ties are ended by where an object happens to lie."""

    def victims(self) -> Iterator[ChunkKey]:
        return iter(sorted(self.order.keys() - self.held, key=lambda key: id(key) >> 4))


class RemembersDeletes(InOrder):
    """A chunk that was deleted, not evicted, is let in at the cold end when it comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: list[ChunkKey] = []

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if chunk.key in self.gone:
                self.order = {chunk.key: None} | self.order
            else:
                self.order[chunk.key] = None

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        super().on_remove(key, evicted=evicted)
        if not evicted:
            self.gone = [*self.gone[-20:], key]


class NeverForgets(InOrder):
    """Every key that was ever evicted is remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.ghosts: set[ChunkKey] = set()

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        super().on_remove(key, evicted=evicted)
        if evicted:
            self.ghosts.add(key)


class EvictsTheWrongEnd(InOrder):
    """Many at once are others than one by one."""

    def evict(self, n_chunks: int) -> list[ChunkKey]:
        chosen = list(self.victims())[-n_chunks:]
        for key in chosen:
            self.on_remove(key, evicted=True)
        return chosen


class EvictsAndKeeps(InOrder):
    """Many at once are named and not forgotten."""

    def evict(self, n_chunks: int) -> list[ChunkKey]:
        return list(self.victims())[:n_chunks]


class HeadFirst(InOrder):
    """Claims to be an order of leaves, and is in order of insertion: a head before its tail."""


class TakesAncestorsOfTheHeld(LRU):
    """An order of leaves that names what stands before a held chunk."""

    evict = None  # type: ignore[assignment]  # it cannot let many go at once

    def __init__(self) -> None:
        super().__init__()
        self.all: dict[ChunkKey, None] = {}
        self.pinned: set[ChunkKey] = set()

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        super().on_insert(chunks)
        self.all.update((chunk.key, None) for chunk in chunks)

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        super().on_remove(key, evicted=evicted)
        del self.all[key]
        self.pinned.discard(key)

    def hold(self, key: ChunkKey) -> None:
        super().hold(key)
        self.pinned.add(key)

    def release(self, key: ChunkKey) -> None:
        super().release(key)
        self.pinned.discard(key)

    def victims(self) -> Iterator[ChunkKey]:
        named = dict.fromkeys(super().victims())
        yield from named
        yield from (key for key in self.all if key not in named and key not in self.pinned)


class GivesAList(InOrder):
    """All victims at once, so that finding one costs as much as finding all."""

    def victims(self):
        return list(super().victims())


class MiscountsItself(InOrder):
    """Its length counts what has left."""

    n = 0

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        self.n += len(chunks)
        super().on_insert(chunks)

    def __len__(self) -> int:
        return self.n


class Ages(InOrder):
    """Chunks expire ``ttl_s`` after their commit, and the expired are named first; the sound one."""

    def __init__(self, clock: ManualClock, ttl_s: float = 3.0) -> None:
        super().__init__()
        self.clock = clock
        self.ttl_s = ttl_s
        self.born_s: dict[ChunkKey, float] = {}

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        super().on_insert(chunks)
        self.born_s.update((chunk.key, self.clock()) for chunk in chunks)

    def on_commit(self, key: ChunkKey) -> None:
        self.born_s[key] = self.clock()

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        super().on_remove(key, evicted=evicted)
        del self.born_s[key]

    def expired(self, chunk: Chunk) -> bool:
        return self.clock() - self.born_s[chunk.key] >= self.ttl_s

    def victims(self) -> Iterator[ChunkKey]:
        keys = list(super().victims())
        yield from sorted(keys, key=lambda key: not self.expired(Chunk(key)))


class AgesFromReservation(Ages):
    """The age counts from before the chunk could be read."""

    def on_commit(self, key: ChunkKey) -> None:
        pass


class AgesByWallClock(Ages):
    """The age is taken from the wall, not from the clock that it was given."""

    def expired(self, chunk: Chunk) -> bool:
        return time.time() - self.born_s[chunk.key] >= self.ttl_s


class RenewsOnUse(Ages):
    """An expired chunk that is used is young again."""

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        self.born_s.update((chunk.key, self.clock()) for chunk in chunks)


class ExpiredLast(Ages):
    """What has expired is named in its place, not first."""

    def victims(self) -> Iterator[ChunkKey]:
        return InOrder.victims(self)
