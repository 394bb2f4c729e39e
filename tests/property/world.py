"""What the state machines share: a family of chunks, policies that watch their ledger, a medium with real bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from tierkv.policies import FIFO, LRU
from tierkv.protocols import EvictionPolicy
from tierkv.types import Chunk, ChunkKey, Turn

SLOT = 64
"""Bytes of a primary slot."""


def _chain(name: str, n: int, *, parent: Chunk | None = None, group: int = 0, linked: bool = True) -> list[Chunk]:
    """``n`` chunks that follow ``parent``; lengths differ, so that bytes are counted and not slots."""
    chain: list[Chunk] = []
    end = parent.end_token if parent else 0
    for i in range(n):
        key = ChunkKey(f"{name}{i}".encode())
        end += 8
        nbytes = (SLOT, 40, 52)[(i + len(name)) % 3]
        chain.append(Chunk(key, parent.key if parent and linked else None, group, end, nbytes))
        parent = chain[-1]
    return chain


_A = _chain("a", 4)
_B = _chain("bb", 2, parent=_A[1])
_C = _chain("c", 3)
_W = _chain("w", 3, group=1, linked=False)

PATHS: list[list[Chunk]] = [_A, _A[:2] + _B, _C, _W]
"""Requests: two with a shared head, one of its own, and a sliding-window group whose chunks have no parents."""

CHUNKS: list[Chunk] = list({chunk.key: chunk for path in PATHS for chunk in path}.values())
KEYS = [chunk.key for chunk in CHUNKS]
BY_KEY = {chunk.key: chunk for chunk in CHUNKS}
PARENTS = {chunk.key: chunk.parent for chunk in CHUNKS}
TOO_LARGE = Chunk(ChunkKey(b"huge"), None, 0, 8, SLOT + 1)


def content(key: ChunkKey) -> bytes:
    """The bytes that are stored under a key, so that any other bytes under it are wrong."""
    nbytes = BY_KEY[key].nbytes
    return (bytes(key) * nbytes)[:nbytes]


def ancestors(key: ChunkKey | None) -> Iterator[ChunkKey]:
    """The key and everything before it in its prefix."""
    while key is not None:
        yield key
        key = PARENTS.get(key)


class InOrder:
    """Insertion order, not PinAware: the ledger has to skip held and pending keys itself."""

    def __init__(self) -> None:
        self._order: dict[ChunkKey, None] = {}

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            assert chunk.key not in self._order
            self._order[chunk.key] = None

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        assert all(chunk.key in self._order for chunk in chunks), "only resident chunks are used"

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        del self._order[key]

    def victims(self) -> Iterator[ChunkKey]:
        yield from self._order


class LeafGuard:
    """An LRU that asserts invariant 7 whatever the ledger thinks: no eviction leaves a linked child behind."""

    def __init__(self) -> None:
        self._inner = LRU()
        self._links: dict[ChunkKey, ChunkKey | None] = {}
        self._held: set[ChunkKey] = set()

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            assert chunk.key not in self._links, "a chunk is inserted once"
            self._links[chunk.key] = chunk.parent
        self._inner.on_insert(chunks)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            assert chunk.key in self._links, "only resident chunks are used"
            if self._links[chunk.key] is None:
                self._links[chunk.key] = chunk.parent
        self._inner.on_access(chunks)

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        if evicted:
            self._check_evicted(key)
        del self._links[key]
        self._held.discard(key)
        self._inner.on_remove(key, evicted=evicted)

    def _check_evicted(self, key: ChunkKey) -> None:
        assert key not in self._held, "what is held or pending is no victim"
        children = [child for child, parent in self._links.items() if parent == key]
        assert not children, f"{key!r} was evicted before its children {children}"

    def on_hint(self, key: ChunkKey, turn: Turn) -> None:
        assert key in self._links and key not in self._held, "who holds it lets it go first"
        self._inner.on_hint(key, turn)

    def hold(self, key: ChunkKey) -> None:
        assert key in self._links and key not in self._held, "a flag, set once"
        self._held.add(key)
        self._inner.hold(key)

    def release(self, key: ChunkKey) -> None:
        assert key in self._held
        self._held.discard(key)
        self._inner.release(key)

    def victims(self) -> Iterator[ChunkKey]:
        return self._inner.victims()


class BatchGuard(LeafGuard):
    """The same for an order that lets many go in one call."""

    def evict(self, n_chunks: int) -> list[ChunkKey]:
        named = list(islice(self._inner.victims(), n_chunks))
        gone = self._inner.evict(n_chunks)
        assert gone == named, "what victims() names first"
        for key in gone:
            self._check_evicted(key)
            del self._links[key]
        return gone


class Fading:
    """A leaf LRU whose chunks expire ``ttl_s`` after they were inserted; expired ones are named first."""

    def __init__(self, clock: Callable[[], float], ttl_s: float) -> None:
        self._inner = LeafGuard()
        self._clock = clock
        self._ttl_s = ttl_s
        self._born: dict[ChunkKey, float] = {}

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        self._born.update((chunk.key, self._clock()) for chunk in chunks)
        self._inner.on_insert(chunks)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        self._inner.on_access(chunks)

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        del self._born[key]
        self._inner.on_remove(key, evicted=evicted)

    def on_hint(self, key: ChunkKey, turn: Turn) -> None:
        self._inner.on_hint(key, turn)

    def expired(self, chunk: Chunk) -> bool:
        return self._clock() - self._born[chunk.key] >= self._ttl_s

    def victims(self) -> Iterator[ChunkKey]:
        dead = [key for key in self._born if self.expired(BY_KEY[key])]
        yield from dead
        gone = set(dead)
        yield from (key for key in list(self._inner.victims()) if key not in gone)


class SecondOffer:
    """Admits a chunk when it is offered for the second time."""

    def __init__(self) -> None:
        self._seen: set[ChunkKey] = set()

    def admits(self, chunk: Chunk) -> bool:
        seen = chunk.key in self._seen
        self._seen.add(chunk.key)
        return seen


def make_policy(name: str, clock: Callable[[], float], *, twin: bool = False) -> EvictionPolicy:
    """``twin`` is the policy of a hierarchy that must do the same: an LRU in the ledger's seats beside one by key."""
    makers: dict[str, Callable[[], EvictionPolicy]] = {
        "lru": BatchGuard,
        "lru_seats": BatchGuard if twin else LRU,
        "lru_by_one": LeafGuard,
        "fifo": FIFO,
        "in_order": InOrder,
        "fading": lambda: Fading(clock, 5.0),
    }
    return makers[name]()


@dataclass
class File:
    """A chunk on a lower level's medium."""

    data: bytes
    charge_nbytes: int


class Medium:
    """What really lies on a lower level, ours and other owners', whatever the ledger believes."""

    def __init__(self) -> None:
        self.owned: dict[ChunkKey, File] = {}
        self.foreign: dict[ChunkKey, File] = {}

    def read(self, key: ChunkKey) -> bytes | None:
        file = self.owned.get(key) or self.foreign.get(key)
        return file.data if file is not None else None

    def lose(self, key: ChunkKey) -> None:
        self.owned.pop(key, None)
        self.foreign.pop(key, None)

    def spoil(self, key: ChunkKey) -> None:
        for file in (self.owned.get(key), self.foreign.get(key)):
            if file is not None:
                file.data = b"rotten" + file.data[6:]

    @property
    def owned_nbytes(self) -> int:
        return sum(file.charge_nbytes for file in self.owned.values())
