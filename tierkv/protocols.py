"""The five frozen protocols, and the optional capabilities that a tier or policy may add.

A protocol is frozen: a new method would be a new major version. What only some can do is a capability, found by
``isinstance`` once, when a level is built.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tierkv.types import Chunk, ChunkKey, Found, Outcome, Turn

Clock = Callable[[], float]
"""Seconds, monotonic. Handed in wherever time matters, so that tests own it."""


class TierContext(NamedTuple):
    """What a tier is told when it opens."""

    chunk_nbytes: int
    """Largest payload of a chunk of any group; ``Chunk.nbytes`` is the true length of one."""
    stride_nbytes: int
    """Distance of primary slots: ``chunk_nbytes`` rounded up to 4,096."""
    namespace: bytes
    """Canonical bytes of the :class:`~tierkv.Namespace`; a persistent tier keeps namespaces apart."""
    capacity_nbytes: int
    """The bytes the level may hold; 0 means that the tier chooses its own default (see :class:`Bounded`)."""


class Tier(Protocol):
    """Holds whole chunks by key. Moves bytes; decides nothing.

    Every call is a batch and answers per key, in order. A write is visible all at once or not at all, per key.

    Concurrency: calls on different keys may overlap; the cache never overlaps two writes of one key. Cancellation:
    the cache does not cancel these calls, since a thread behind one would go on; a tier must not rely on it.
    Constructors do no I/O.
    """

    @property
    def name(self) -> str:
        """Stable; used in metrics and messages."""
        ...

    async def open(self, ctx: TierContext) -> None:
        """Once, before any other call. A tier that is no :class:`ScanTier` starts empty, and so does its medium.

        Nobody would ever ask for what an earlier run left there, nor count or evict it.
        """
        ...

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]: ...

    async def read(self, items: Sequence[tuple[ChunkKey, memoryview]]) -> Sequence[Outcome]:
        """Fill each buffer, whose length is the chunk's true length or more; bytes past the chunk are zeroed."""
        ...

    async def write(self, items: Sequence[tuple[Chunk, memoryview]]) -> Sequence[Outcome]:
        """Store ``chunk.nbytes`` leading bytes of each buffer under its key, replacing an earlier copy."""
        ...

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Forget the keys and free their bytes; absent ones are ignored.

        Raises:
            TierError: ``keys`` names those that could not be deleted, the others are gone; they will be tried again.
        """
        ...

    async def aclose(self) -> None:
        """Idempotent. Releases everything even when it raises or is cancelled."""
        ...


@runtime_checkable
class HostTier(Tier, Protocol):
    """A tier of fixed slots in addressable host memory. Level 0, the primary, must be one.

    For the primary the ledger assigns slots and only ``slot_view`` is used; keyed calls serve a lower level.
    """

    @property
    def n_slots(self) -> int:
        """Valid once open."""
        ...

    def slot_view(self, slot: int) -> memoryview:
        """Writable view of one slot, ``stride_nbytes`` long. Valid until ``aclose``."""
        ...


@runtime_checkable
class Charging(Protocol):
    """A tier on which a chunk occupies more than its payload (headers, rounding)."""

    def charge_nbytes(self, chunk_nbytes: int) -> int:
        """Bytes that a payload of this length occupies. Pure."""
        ...


@runtime_checkable
class Bounded(Protocol):
    """A tier that knows a tighter or changing limit: a default capacity, or this owner's share of a root."""

    def share_nbytes(self) -> int:
        """Bytes that this process may hold now. Cheap and callable from any thread; the level follows it."""
        ...


@runtime_checkable
class ScanTier(Protocol):
    """A persistent tier: it brings chunks along from earlier runs and from other owners."""

    @property
    def writable(self) -> bool:
        """False until the total on the medium is known and trimmed; writes wait for it. Any thread."""
        ...

    def settled(self, key: ChunkKey) -> bool:
        """True if a key unknown to the ledger is surely absent; False asks for a :meth:`probe`. Cheap, any thread."""
        ...

    def scan(self) -> AsyncIterator[Sequence[Found]]:
        """What is there, coldest first where the tier knows; runs on for later news (adoptions) until closed."""
        ...

    async def probe(self, keys: Sequence[ChunkKey]) -> Sequence[Found | None]:
        """Look for keys that the scan has not reached, or that another owner may have written since."""
        ...

    async def save_order(self, chunks: Sequence[Chunk]) -> None:
        """Remember recency, coldest first, for the next open; called once before a clean ``aclose``."""
        ...


@runtime_checkable
class Owning(Protocol):
    """A :class:`ScanTier` that can say at once which chunks it owns.

    What a scan or a probe answers may be old when a level hears of it: the chunk was found by another probe, evicted
    and deleted meanwhile. A tier without this is believed, and such a chunk is announced once more and then missed.
    """

    def owns(self, key: ChunkKey) -> bool:
        """True at least from before a chunk of ours is announced until its deletion, false from its end on.

        Cheap, any thread.
        """
        ...


class EvictionPolicy(Protocol):
    """A total order over resident chunks. No bytes, no I/O, no clock that it was not handed.

    Chunks of one request come in one call, in prefix order, so that an order can prefer tails to heads.
    """

    def on_insert(self, chunks: Sequence[Chunk]) -> None: ...

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        """A request used these resident chunks. A chunk may know its parent now where it did not before."""
        ...

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        """``evicted`` is False for deletes, resets, failures: then no ghost should be kept."""
        ...

    def victims(self) -> Iterator[ChunkKey]:
        """Every resident key once, first to leave first, less what is held. Lazy; not advanced across a mutation.

        An order of leaves leaves out the ancestors of what is held, too: they cannot go while it stays.
        """
        ...


@runtime_checkable
class PinAware(Protocol):
    """A policy whose :meth:`~EvictionPolicy.victims` skips held keys without a scan over them."""

    def hold(self, key: ChunkKey) -> None: ...

    def release(self, key: ChunkKey) -> None: ...


@runtime_checkable
class UsedByKey(Protocol):
    """A policy to which a use says nothing but keys, so that nobody need make chunks to tell it of one."""

    def on_use(self, keys: Sequence[ChunkKey]) -> None:
        """:meth:`~EvictionPolicy.on_access` by key, in the same order."""
        ...


@runtime_checkable
class CommitAware(Protocol):
    """A policy that counts from when a chunk can be read, which is later than its :meth:`~EvictionPolicy.on_insert`."""

    def on_commit(self, key: ChunkKey) -> None: ...


@runtime_checkable
class Refreshing(Protocol):
    """A policy that keeps recency apart from use: what vLLM tells of chunks that an ended request has only stored."""

    def refresh(self, chunks: Sequence[Chunk]) -> None:
        """These resident chunks, in prefix order, are the most recent where they stand now; that is no use of them."""
        ...


@runtime_checkable
class BatchEvicting(Protocol):
    """A policy that can let many go at once for less than :meth:`~EvictionPolicy.victims` and a removal each cost."""

    def evict(self, n_chunks: int) -> list[ChunkKey]:
        """Forget the ``n_chunks`` that ``victims`` would name first, or all it would name; their keys, in order."""
        ...


class Seat:
    """One resident chunk as an order sees it, in an object that belongs to somebody else; see :class:`Seating`."""

    __slots__ = ("heaped", "holds", "key", "link", "n_children", "parent", "stamp")

    key: ChunkKey
    parent: ChunkKey | None
    """Key of its chunk's parent, or None at a head or while it is unknown. Its owner says so."""
    holds: int
    """While positive it may not leave. Its owner says so, and tells :meth:`Seating.readmit` of the last one's end."""
    stamp: int
    """The order's, as is all that follows: 0 while it does not rank it; the higher, the later it leaves."""
    n_children: int
    link: Seat | None
    """The parent that it is counted under as a child. If that one has no stamp, whoever comes to have its key is meant.
    """
    heaped: list[Any] | None
    """Its place in the order's heap."""

    def __init__(self, key: ChunkKey, parent: ChunkKey | None = None) -> None:
        self.key = key
        self.parent = parent
        self.holds = 0
        self.stamp = 0
        self.n_children = 0
        self.link = None
        self.heaped = None


@runtime_checkable
class Seating(Protocol):
    """A policy that can keep what it knows in the seats of one ledger, instead of in records of its own.

    A chunk then costs one object and one entry of a dictionary, where it costs two of each by key. Everything that the
    policy does by key it still does, and the order is the same. Only a ledger has reason to ask for it, and for all its
    chunks at once. Hints reach such a policy only if it is :class:`HintAware` by itself.
    """

    def share(self, seats: Mapping[ChunkKey, Seat]) -> None:
        """Use these seats from now on. Called once, before the first chunk. Their owner enters and deletes them."""
        ...

    def seat(self, seats: Sequence[Seat]) -> None:
        """:meth:`~EvictionPolicy.on_insert` for seats that are in the mapping by now, some of them held."""
        ...

    def touch(self, seats: Sequence[Seat]) -> None:
        """:meth:`~EvictionPolicy.on_access` where no chunk says more of its parent than before."""
        ...

    def readmit(self, seats: Iterable[Seat]) -> None:
        """Seats that were held, of which some are no more; some may not be ranked here."""
        ...

    def unseat(self, seat: Seat) -> None:
        """:meth:`~EvictionPolicy.on_remove`; the owner deletes it from the mapping, before or after."""
        ...

    def evict_seats(self, n_chunks: int) -> Sequence[Seat]:
        """:meth:`BatchEvicting.evict`: the seats that it forgot, in order, for the owner to delete."""
        ...


@runtime_checkable
class Expiring(Protocol):
    """A policy whose chunks can expire: an expired chunk answers a miss and the next trim removes it."""

    def expired(self, chunk: Chunk) -> bool: ...


@runtime_checkable
class HintAware(Protocol):
    """A policy that knows what to do with a hint: this chunk leaves first, or last.

    A policy that does not is wrapped by the level, with the first hint, in an order that names what was hinted apart
    from the rest. That wrapper knows of no parents: an order of leaves has to know hints by itself.
    """

    def on_hint(self, key: ChunkKey, turn: Turn) -> None:
        """``key`` is resident and not held: who holds it lets it go first.

        FIRST: named before all that has another turn, in the order of the hints, a parent never before its children.
        A use ends it: the chunk stands as if it had never been hinted. LAST: named after all that has another turn,
        used or not. USUAL ends a LAST and nothing else.
        """
        ...


class Admission(Protocol):
    """Who may enter a level. Asked once for each offer of a chunk that the level lacks; may count offers."""

    def admits(self, chunk: Chunk) -> bool: ...


class Chunker(Protocol):
    """Tokens to chunks. Pure: longer input extends the result and never changes it."""

    def chunks(self, tokens: Sequence[int], *, extra: bytes = b"") -> Sequence[Chunk]: ...


class PortJob(NamedTuple):
    """One chunk to copy between a slot and wherever the caller keeps it."""

    slot: int
    chunk: Chunk
    place: Any
    """A host buffer of ``chunk.nbytes`` bytes, or the chunk's block ids (a device)."""


class Port(Protocol):
    """Copies chunks between primary slots and their user: what a device tier offers :class:`~tierkv.TieredCache`.

    Both copies return, per job, whether its bytes arrived, and only once no copy touches slot or place any
    more. They are never cancelled; several may overlap, on different slots.
    """

    def attach(self, primary: HostTier, stride_nbytes: int) -> None:
        """Called once, when the primary is open."""
        ...

    def check(self, jobs: Sequence[PortJob]) -> None:
        """Raise ChunkSizeError if a place does not fit its chunk, before anything is reserved."""
        ...

    async def store_chunks(self, jobs: Sequence[PortJob]) -> Sequence[bool]: ...

    async def load_chunks(self, jobs: Sequence[PortJob]) -> Sequence[bool]: ...

    def close(self) -> None: ...
