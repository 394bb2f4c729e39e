"""One chunk at one level, and the states it goes through.

States of an entry::

    reserve -> PENDING --commit--> READY --remove--> GONE --free--> (forgotten)
    reserve -> PENDING -----remove (abort, reset)--> GONE --free--> (forgotten)

PENDING and READY entries are in the index. GONE ones are not, but their space stays charged ("quarantined") until
whatever still touches it has ended: a copy into it, a copy out of it, a lease (all three in ``holds``), a deletion.

There are as many entries as chunks, and the collector of garbage looks through all of them: what a chunk says is kept
in the entry's own fields, and the chunk is made again for whoever asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import chain, repeat
from typing import Final, NamedTuple

from tierkv.protocols import Seat
from tierkv.types import Chunk, ChunkKey


class State(Enum):
    PENDING = "pending"
    READY = "ready"
    GONE = "gone"


PENDING, READY, GONE = State.PENDING, State.READY, State.GONE
OWNED: Final = 1
STORED: Final = 2
PROMOTED: Final = 4
DEMOTE_REFUSED: Final = 8
_TURNED_DOWN_AT: Final = 4
"""From this bit of an entry's flags on: how much the level below had stored, and one, when it turned it down."""
WRITER: Final = 1 << 20
"""What a copy into an entry adds to its ``holds``: far more than pins come to, so the number says both."""
_make = tuple.__new__  # half the cost of Chunk(...)


class Kind(NamedTuple):
    """What the chunks of a request have in common: one object for all of them."""

    group: int
    nbytes: int
    tenant: str
    partial: bool


class Kinds:
    """Kinds that were met, so that equal ones are the same object. Forgets them all where they become many."""

    _MOST = 1024

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, str, bool], Kind] = {}

    def of(self, what: tuple[int, int, str, bool]) -> Kind:
        kind = self._known.get(what)
        if kind is None:
            if len(self._known) >= self._MOST:
                self._known.clear()
            kind = self._known[what] = Kind(*what)
        return kind

    def of_chunk(self, chunk: Chunk) -> Kind:
        _, _, group, _, nbytes, tenant, partial = chunk
        return self.of((group, nbytes, tenant, partial))


class Columns(NamedTuple):
    """Chunks of one group and kind, by column: what a request offers in one call, with no chunk made for it."""

    keys: Sequence[ChunkKey]
    end_tokens: Sequence[int]
    """Rising."""
    parent: ChunkKey | None
    """Of the first."""
    chained: bool
    """The parent of each further one is the one before it. False: no chunk has a parent."""
    kind: Kind

    def parents(self) -> Iterable[ChunkKey | None]:
        """That of each key; does not end with the keys."""
        return chain((self.parent,), self.keys) if self.chained else repeat(None)

    def chunks(self) -> list[Chunk]:
        group, nbytes, tenant, partial = self.kind
        rows = zip(self.keys, self.parents(), self.end_tokens, strict=False)
        return [_make(Chunk, (key, parent, group, end, nbytes, tenant, partial)) for key, parent, end in rows]


class _Flag:
    """One bit of :attr:`Entry.flags`, for those who ask seldom."""

    __slots__ = ("_bit",)

    def __init__(self, bit: int) -> None:
        self._bit = bit

    def __get__(self, entry: Entry, _: type[Entry]) -> bool:
        return entry.flags & self._bit != 0

    def __set__(self, entry: Entry, value: bool) -> None:  # noqa: FBT001
        entry.flags = entry.flags | self._bit if value else entry.flags & ~self._bit


class Entry(Seat):
    """One chunk at one level. A handle: it outlives the key's stay in the index, so late completions stay harmless.

    Where the level's policy can rank entries, it keeps what it knows in the fields of :class:`~tierkv.protocols.Seat`.
    ``holds`` counts leases and copies out of it, and :data:`WRITER` for the copy into it: while positive it is no
    victim, and its space is not reused.
    """

    __slots__ = ("charge_nbytes", "end_token", "flags", "generation", "kind", "slot", "state")

    owned = _Flag(OWNED)
    stored = _Flag(STORED)
    """The medium holds it: leaving takes a deletion where the level is not the primary."""
    promoted = _Flag(PROMOTED)
    """It came up from a lower level rather than from the device."""
    demote_refused = _Flag(DEMOTE_REFUSED)
    """The level below could not take it, and it may be the chunk's fault: its eviction is a removal."""

    def __init__(self, chunk: Chunk, kind: Kind, charge_nbytes: int, state: State, *, owned: bool = True) -> None:
        super().__init__(chunk.key, chunk.parent)
        self.end_token = chunk.end_token
        self.kind = kind
        self.charge_nbytes = charge_nbytes
        self.state = state
        self.flags = (OWNED if owned else 0) | (STORED if state is READY else 0)
        self.holds = WRITER if state is PENDING else 0
        self.slot: int = -1
        self.generation: int = 0

    @property
    def chunk(self) -> Chunk:
        """What it is an entry of; a new object each time."""
        group, nbytes, tenant, partial = self.kind
        return _make(Chunk, (self.key, self.parent, group, self.end_token, nbytes, tenant, partial))

    @property
    def group(self) -> int:
        return self.kind[0]

    @property
    def nbytes(self) -> int:
        """True length of the payload."""
        return self.kind[1]

    @property
    def n_pins(self) -> int:
        """Leases and copies out of it."""
        return self.holds % WRITER

    @property
    def writing(self) -> bool:
        """A copy into it has not ended."""
        return self.holds >= WRITER

    @property
    def settled(self) -> bool:
        """Nothing touches its space any more."""
        return not self.holds

    def turn_down(self, n_stored: int) -> None:
        """The level below, which has stored so many, has no room for it or is not ready: no fault of the chunk's."""
        self.flags = self.flags & ((1 << _TURNED_DOWN_AT) - 1) | n_stored + 1 << _TURNED_DOWN_AT

    def turned_down(self, n_stored: int) -> bool:
        """The level below would not take it: for good, or as long as it has stored no more than ``n_stored``."""
        flags = self.flags
        return flags & DEMOTE_REFUSED != 0 or flags >> _TURNED_DOWN_AT == n_stored + 1

    def learn(self, chunk: Chunk, kind: Kind) -> None:
        """Somebody knows more of its chunk than the scan did that found it."""
        self.parent, self.end_token, self.kind = chunk.parent, chunk.end_token, kind

    def __repr__(self) -> str:
        flags = f"{' writing' if self.writing else ''}{'' if self.owned else ' foreign'}"
        return f"<Entry {self.key.hex()[:12]} {self.state.value} slot={self.slot} pins={self.n_pins}{flags}>"


def chunks_of(entries: Iterable[Entry]) -> list[Chunk]:
    """:attr:`Entry.chunk` of many, for less than one by one costs."""
    return [_make(Chunk, (e.key, e.parent, (k := e.kind)[0], e.end_token, k[1], k[2], k[3])) for e in entries]


def of_its_tenant(chunk: Chunk, tenant: str) -> Chunk:
    """A chunk as somebody asks for it, but of the tenant that stored it, where that is known."""
    return chunk._replace(tenant=tenant) if tenant and tenant != chunk.tenant else chunk
