"""One order under test, and copies of it that must do the same although something about them differs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from tierkv.protocols import BatchEvicting, CommitAware, EvictionPolicy, Expiring, HintAware, PinAware, UsedByKey
from tierkv.testing._requests import LONERS
from tierkv.testing._rules import require
from tierkv.types import Chunk, ChunkKey, Turn

_MOST: Final = 1_000
"""More keys than any example has: an iteration that goes on for ever is cut here."""


class Twin:
    """An order and how it is told of chunks. All calls are in the test's keys."""

    def __init__(self, policy: EvictionPolicy, difference: str, translate: Callable[[Chunk], Chunk] | None = None):
        self.policy = policy
        self.difference = difference
        self.pins = policy if isinstance(policy, PinAware) else None
        self.commits = policy if isinstance(policy, CommitAware) else None
        self.batches = policy if isinstance(policy, BatchEvicting) else None
        self.uses = policy if difference and isinstance(policy, UsedByKey) else None
        self.expiring = policy if isinstance(policy, Expiring) else None
        self.hints = policy if isinstance(policy, HintAware) else None
        self._translate = translate or (lambda chunk: chunk)
        self._names: dict[bytes, ChunkKey] = {}
        """From the order's key to the test's, of every key it was told of."""

    def told(self, chunk: Chunk) -> Chunk:
        told = self._translate(chunk)
        self._names[bytes(told.key)] = chunk.key
        return told

    def key(self, chunk: Chunk) -> ChunkKey:
        return self.told(chunk).key

    def insert(self, chunks: Sequence[Chunk]) -> None:
        self.policy.on_insert([self.told(chunk) for chunk in chunks])

    def access(self, chunks: Sequence[Chunk]) -> None:
        if self.uses is not None:
            self.uses.on_use([self.key(chunk) for chunk in chunks])
        else:
            self.policy.on_access([self.told(chunk) for chunk in chunks])

    def remove(self, chunk: Chunk, *, evicted: bool) -> None:
        self.policy.on_remove(self.key(chunk), evicted=evicted)

    def commit(self, chunk: Chunk) -> None:
        if self.commits is not None:
            self.commits.on_commit(self.key(chunk))

    def hold(self, chunk: Chunk) -> None:
        if self.pins is not None:
            self.pins.hold(self.key(chunk))

    def release(self, chunk: Chunk) -> None:
        if self.pins is not None:
            self.pins.release(self.key(chunk))

    def hint(self, chunk: Chunk, turn: Turn) -> None:
        if self.hints is not None:
            self.hints.on_hint(self.key(chunk), turn)

    def expired(self, chunk: Chunk) -> bool:
        return self.expiring is not None and bool(self.expiring.expired(self.told(chunk)))

    def victims(self) -> Generator[ChunkKey, None, None]:
        """The order's victims, in the test's keys; closed when the caller is done with them, as a level does."""
        order = self.policy.victims()
        require(iter(order) is order, "victims() gives an iterator", order)
        try:
            for key in islice(order, _MOST):
                name = self._names.get(bytes(key))
                require(name is not None, "victims() names keys that it was told of", key)
                assert name is not None
                yield name
        finally:
            close = getattr(order, "close", None)
            if close is not None:
                close()

    def evict(self, n_chunks: int) -> list[ChunkKey]:
        """Let the first victims go in one call; only where the order can."""
        assert self.batches is not None
        return [self._names[bytes(key)] for key in self.batches.evict(n_chunks)]

    def order(self) -> list[ChunkKey]:
        return list(self.victims())


class Renamed:
    """Gives a chunk a new key each time it has been deleted: an order that forgets deletes cannot tell."""

    def __init__(self) -> None:
        self._n_deleted: dict[ChunkKey, int] = {}

    def __call__(self, chunk: Chunk) -> Chunk:
        return chunk._replace(key=ChunkKey(chunk.key + b"'" * self._n_deleted.get(chunk.key, 0)))

    def deleted(self, key: ChunkKey) -> None:
        if key in LONERS:
            self._n_deleted[key] = self._n_deleted.get(key, 0) + 1


def ancestors(key: ChunkKey, resident: Mapping[ChunkKey, Chunk]) -> Iterator[ChunkKey]:
    """The resident chunks before this one in its prefix, as far as their links are unbroken; nearest first."""
    seen = {key}
    parent = resident[key].parent
    while parent is not None and parent in resident and parent not in seen:
        yield parent
        seen.add(parent)
        parent = resident[parent].parent


def with_ancestors(keys: Iterable[ChunkKey], resident: Mapping[ChunkKey, Chunk]) -> set[ChunkKey]:
    """``keys`` and the resident chunks before each of them."""
    found = set(keys)
    for key in keys:
        found.update(ancestors(key, resident))
    return found
