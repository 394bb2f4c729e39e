"""Values that cross module borders: frozen, standard library only.

Named tuples: one costs a third of a frozen dataclass to make, which vLLM's scheduler thread does for each key that it
offers, and less to define, which every ``import tierkv`` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import NamedTuple, NewType

ChunkKey = NewType("ChunkKey", bytes)
"""Opaque identity of a chunk's bytes: equal keys mean equal bytes, within one namespace."""


class Chunk(NamedTuple):
    """What policies, admission and file headers may look at: everything about a chunk but its bytes."""

    key: ChunkKey
    parent: ChunkKey | None = None
    """Key of the chunk just before it in the same prefix and group, or None at the head or if unknown."""
    group: int = 0
    """Index of the KV-cache group that the chunk's blocks belong to."""
    end_token: int = 0
    """Tokens of the prefix up to and including this chunk."""
    nbytes: int = 0
    """True payload length in bytes; never more than the tier's ``chunk_nbytes``."""
    tenant: str = ""
    partial: bool = False
    """True if fewer than ``blocks_per_chunk`` blocks are filled."""


class Status(Enum):
    """What became of one key of a batch."""

    OK = "ok"
    MISSING = "missing"
    """The tier does not hold the key: a miss."""
    REFUSED = "refused"
    """The tier did not take the chunk (full, or not writable now); nothing of it is visible."""
    FAILED = "failed"
    """The operation failed but the chunk, if it was there, may be intact (EIO, EMFILE, a deadline)."""
    CORRUPT = "corrupt"
    """The stored bytes were wrong; the tier has removed or quarantined them: a miss."""


class Reason(StrEnum):
    """Why a chunk was refused or dropped, or left a level. Used as the label of drop counters and events."""

    FULL = "full"
    NOT_ADMITTED = "not_admitted"
    TOO_LARGE = "too_large"
    BEHIND_HOLE = "behind_hole"
    QUEUE_FULL = "queue_full"
    SCANNING = "scanning"
    BUSY = "busy"
    NO_SPACE = "no_space"
    TIER_BROKEN = "tier_broken"
    TIER_ERROR = "tier_error"
    DEVICE_ERROR = "device_error"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    RESET = "reset"
    CLOSED = "closed"
    EVICTED = "evicted"
    DEMOTED = "demoted"
    DEMOTE_DROPPED = "demote_dropped"
    EXPIRED = "expired"
    DELETED = "deleted"
    VANISHED = "vanished"
    CORRUPT = "corrupt"


class Turn(Enum):
    """When a chunk leaves, beside what its uses say; what an order is told of a hint."""

    FIRST = "first"
    """Before everybody else, until it is used."""
    USUAL = "usual"
    """As if it had not been kept."""
    LAST = "last"
    """After everybody else, used or not."""


class Outcome(NamedTuple):
    """What happened to one key of a batch."""

    key: ChunkKey
    status: Status
    reason: Reason | None = None
    error: Exception | None = None

    @property
    def ok(self) -> bool:
        return self.status is Status.OK


class Stop(StrEnum):
    """Why a prefix hit ended where it did."""

    COMPLETE = "complete"
    """Every chunk asked for was found."""
    MISS = "miss"
    PENDING = "pending"
    """The next chunk is being stored by somebody else right now."""
    SHORT = "short"
    """The tokens end inside a chunk."""


class PrefixHit(NamedTuple):
    """The longest run of leading chunks that some level holds. Read-only: looking up touches and moves nothing."""

    chunks: Sequence[Chunk]
    levels: Sequence[int]
    """For each chunk the fastest level that holds it; 0 is the primary."""
    n_tokens: int
    """Tokens covered by ``chunks``."""
    stop: Stop
    asked: Sequence[Chunk] = ()
    """All chunks of the tokens that were looked up, found or not."""


class TransferKind(StrEnum):
    """Which way a chunk goes, and why."""

    PROMOTE = "promote"
    """A lower level's chunk is read into a primary slot."""
    CASCADE = "cascade"
    """A primary slot is written to a lower level at store time."""
    DEMOTE = "demote"
    """A chunk is written to the next level because it is about to leave its own."""
    DELETE = "delete"
    """A lower level forgets a chunk and frees its bytes."""


class Transfer(NamedTuple):
    """One copy or deletion for somebody else to run. Plain data: it could be sent to another process."""

    id: int
    kind: TransferKind
    chunk: Chunk
    source: int
    """Level read from; for DELETE the level that forgets."""
    target: int
    """Level written to; for DELETE equal to ``source``."""
    slot: int | None
    """Primary slot at the primary end of the copy, None if neither end is the primary."""
    generation: int = 0
    """Generation of ``slot`` when the transfer was made: a later one means that the slot was reused."""


class EventKind(StrEnum):
    """Whether a chunk became readable or stopped being so."""

    STORED = "stored"
    REMOVED = "removed"


class Event(NamedTuple):
    """A chunk became readable at a level, or stopped being so. Per (level, key) the kinds alternate."""

    level: int
    kind: EventKind
    chunk: Chunk
    reason: Reason | None = None

    @property
    def key(self) -> ChunkKey:
        return self.chunk.key


class Found(NamedTuple):
    """A chunk that a persistent tier holds from an earlier run, or that another owner wrote."""

    key: ChunkKey
    charge_nbytes: int
    """Bytes it occupies on the medium, header and rounding included."""
    owned: bool = True
    """False if another owner wrote it: readable, not ours to evict and not charged to us."""
    chunk: Chunk | None = None
    """The whole record where the tier knows it without reading the chunk (a clean index)."""


class LevelStatistics(NamedTuple):
    """A level at one instant. Sizes in bytes; free + ready + pending + quarantined = capacity, foreign apart."""

    name: str
    capacity_nbytes: int
    free_nbytes: int
    ready_nbytes: int
    pending_nbytes: int
    quarantined_nbytes: int
    foreign_nbytes: int
    pinned_nbytes: int
    n_chunks: int
    n_pending: int
    n_pinned: int
    n_quarantined: int
    n_foreign: int
    n_hits: int = 0
    """Chunks of prefix hits that this level answered."""
    n_offered: int = 0
    """Chunks offered: n_stored + n_present + sum of refused + those pending."""
    n_stored: int = 0
    n_present: int = 0
    n_evicted: int = 0
    n_read: int = 0
    """Chunks read from the tier (promotions)."""
    n_written: int = 0
    read_nbytes: int = 0
    written_nbytes: int = 0
    refused: Mapping[str, int] = MappingProxyType({})
    """Chunks not taken, by :class:`Reason`."""
    dropped: Mapping[str, int] = MappingProxyType({})
    """Chunks that left other than by eviction or demotion, by :class:`Reason`."""
    broken: bool = False
    """True while a breaker of the level is open, that of its reads or that of its writes."""
