"""One level as the hierarchy sees it: its ledger, its counters, what its tier says of itself, its queue of writes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple

from tierkv._breaker import Door, Traffic
from tierkv._ledger import READY, Entry, Ledger
from tierkv.protocols import Admission, EvictionPolicy
from tierkv.types import Chunk, ChunkKey, LevelStatistics, Outcome, Reason, Status, Transfer


class Writes(Enum):
    """How chunks reach a level from the one above it."""

    CASCADE = auto()
    """At store time (write-through): what leaves the level above is already here."""
    DEMOTE = auto()
    """When the level above is about to evict them, and only if this level lacks them (write-back)."""


def _always(_: ChunkKey) -> bool:
    return True


class LevelPlan(NamedTuple):
    """What the hierarchy must know of a level. Everything here is synchronous and cheap.

    ``low_water`` and ``high_water`` are fractions of the capacity: when less than ``high_water`` is free, a trim makes
    ``low_water`` free in the background, so that writes need not wait for deletions.
    """

    name: str
    capacity_nbytes: int
    policy: EvictionPolicy
    admission: Admission | None = None
    writes: Writes = Writes.CASCADE
    charge: Callable[[int], int] | None = None
    n_slots: int | None = None
    slot_nbytes: int = 0
    queue_nbytes: int = 1 << 30
    """Bytes that may wait for or be in a write to this level; more is dropped and counted ``queue_full``."""
    settled: Callable[[ChunkKey], bool] = _always
    """False: the ledger does not know the key, yet the tier may hold it; a probe tells."""
    owns: Callable[[ChunkKey], bool] = _always
    """False: the tier has no such chunk of ours, whatever it answered before."""
    writable: Callable[[], bool] = lambda: True
    scans: bool = False
    """The tier brings chunks of earlier runs along, after it has opened."""
    share: Callable[[], int] | None = None
    """Bytes that the level may hold now, where that changes (a root shared by several processes)."""
    high_water: float = 0.02
    low_water: float = 0.05


class Waiting(NamedTuple):
    """A write that has not been given room yet; it holds its source entry."""

    source_level: int
    source: Entry
    demote: bool
    charge_nbytes: int
    """As counted in ``queued_nbytes``: what is known of a scanned source, its length too, may change meanwhile."""


class Flight(NamedTuple):
    """A transfer under way, and the entries it keeps busy."""

    transfer: Transfer
    source: Entry
    target: Entry | None
    demote: bool = False


class Counts:
    """Counters of one level; see :class:`~tierkv.types.LevelStatistics` for what each means."""

    def __init__(self) -> None:
        self.hits = self.offered = self.stored = self.present = self.evicted = 0
        self.read = self.written = self.read_nbytes = self.written_nbytes = 0
        self.refused: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()

    def refuse(self, reason: Reason, n: int = 1) -> None:
        self.refused[reason.value] += n

    def drop(self, reason: Reason, n: int = 1) -> None:
        self.dropped[reason.value] += n


def _ledger_of(plan: LevelPlan, *, recycles: bool) -> Ledger:
    return Ledger(
        name=plan.name,
        capacity_nbytes=plan.capacity_nbytes,
        policy=plan.policy,
        admission=plan.admission,
        charge=plan.charge,
        n_slots=plan.n_slots,
        slot_nbytes=plan.slot_nbytes,
        recycles=recycles,
    )


class LevelBooks:
    """State of one level inside the hierarchy. A record with arithmetic, no decisions."""

    __slots__ = (
        "counts", "deleting_nbytes", "demotes", "demoting_nbytes", "hanging", "index", "leaving", "ledger", "lower",
        "min_free_nbytes", "n_quiet", "name", "plan", "purging", "queued_nbytes", "reads", "stuck", "trimming",
        "waiting", "writes",
    )  # fmt: skip

    def __init__(self, index: int, plan: LevelPlan, *, recycles: bool) -> None:
        self.index, self.name, self.plan = index, plan.name, plan
        self.ledger = _ledger_of(plan, recycles=recycles)
        self.counts = Counts()
        self.lower: Sequence[LevelBooks] = ()
        """The levels below, nearest first."""
        self.demotes = False
        """Leaving takes a copy to the level below, unless one below has it already."""
        self.waiting: OrderedDict[ChunkKey, Waiting] = OrderedDict()
        self.queued_nbytes = 0
        """Charges of waiting writes and of those under way."""
        self.leaving: dict[ChunkKey, Entry] = {}
        """GONE entries whose space is not free yet: until then nobody may write their key again."""
        self.hanging: Counter[ChunkKey] = Counter()
        """Copies and deletions past their deadline that touch a key's entry here: what they keep is not free soon."""
        self.stuck: OrderedDict[ChunkKey, Entry] = OrderedDict()
        """GONE entries whose deletion failed: still on the medium and charged, until a later write replaces them or a
        deletion succeeds."""
        self.deleting_nbytes = 0
        """Charges whose deletion has been launched and is not past its deadline: they will be free soon."""
        self.demoting_nbytes = 0
        """Charges whose copy to the level below is under way: they will be droppable at once."""
        self.min_free_nbytes = 0
        """Free space that a trim always aims for; the size of one chunk where leaving takes a copy."""
        self.trimming = False
        """Less than ``high_water`` was free, and ``low_water`` is not free yet."""
        self.purging = False
        """Set by a reset while the tier may still bring chunks of earlier runs: they leave again as they come."""
        self.n_quiet = 0
        """Refreshes in a row, while ``purging``, at which the tier was writable and had brought nothing new."""
        self.reads, self.writes = Door(), Door()
        """What its breakers let through: without reads it answers misses, without writes it takes none."""

    @property
    def serves(self) -> bool:
        """Neither reads nor writes are stopped; one of them, or both, may be on trial."""
        return Traffic.STOPPED not in (self.reads.traffic, self.writes.traffic)

    def readable(self, key: ChunkKey) -> Entry | None:
        """The entry if the level can serve the key now."""
        entry = self.ledger.get(key)
        if entry is None or entry.state is not READY or not self.reads.lets_through or self.ledger.expired(entry):
            return None
        return entry

    def has_below(self, key: ChunkKey) -> bool:
        """A level below keeps a copy, be it readable now or not: an open breaker closes again."""
        return any(each.keeps(key) for each in self.lower)

    def keeps(self, key: ChunkKey) -> bool:
        entry = self.ledger.get(key)
        return entry is not None and entry.state is READY and not self.ledger.expired(entry)

    def is_deleting(self, key: ChunkKey) -> bool:
        """A copy is on its way out, and its end is near."""
        return key in self.leaving and key not in self.hanging

    @property
    def is_clearing(self) -> bool:
        """Somebody is on his way out, and his end is near."""
        return any(key not in self.hanging for key in self.leaving)

    def hang(self, key: ChunkKey, by: int) -> None:
        """One more copy or deletion hangs (1), or one has ended after all (-1)."""
        self.hanging[key] += by
        if not self.hanging[key]:
            del self.hanging[key]

    def low_target(self) -> int:
        """Bytes to evict until ``low_water`` is free, from when less than ``high_water`` was.

        In a level so small that this is less than a chunk there is no such reserve: it would cost one that fits.
        """
        ledger = self.ledger
        free = ledger.free_nbytes + self.deleting_nbytes + self.demoting_nbytes
        capacity = ledger.capacity_nbytes
        high, low = int(capacity * self.plan.high_water), int(capacity * self.plan.low_water)
        if low * (len(ledger) - ledger.n_foreign - ledger.n_pending) < ledger.ready_nbytes:
            high = low = 0
        if free < max(high, self.min_free_nbytes):
            self.trimming = True
        if not self.trimming:
            return 0
        short = max(low, self.min_free_nbytes) - free
        self.trimming = short > 0
        return max(short, 0)

    def statistics(self) -> LevelStatistics:
        ledger, counts = self.ledger, self.counts
        return LevelStatistics(
            name=self.name,
            capacity_nbytes=ledger.capacity_nbytes,
            free_nbytes=ledger.free_nbytes,
            ready_nbytes=ledger.ready_nbytes,
            pending_nbytes=ledger.pending_nbytes,
            quarantined_nbytes=ledger.quarantined_nbytes,
            foreign_nbytes=ledger.foreign_nbytes,
            pinned_nbytes=ledger.held_nbytes,
            n_chunks=len(ledger) - ledger.n_pending,
            n_pending=ledger.n_pending,
            n_pinned=ledger.n_held,
            n_quarantined=ledger.n_gone,
            n_foreign=ledger.n_foreign,
            n_hits=counts.hits,
            n_offered=counts.offered,
            n_stored=counts.stored,
            n_present=counts.present,
            n_evicted=counts.evicted,
            n_read=counts.read,
            n_written=counts.written,
            read_nbytes=counts.read_nbytes,
            written_nbytes=counts.written_nbytes,
            refused=dict(counts.refused),
            dropped=dict(counts.dropped),
            broken=not self.serves,
        )


def bare(key: ChunkKey, nbytes: int) -> Chunk:
    """A chunk of which only the name is known yet, and a bound of its length (a directory scan)."""
    return Chunk(key, nbytes=nbytes)


def reason_of(outcome: Outcome) -> Reason:
    """Why a chunk left whose copy ended so."""
    if outcome.reason is not None:
        return outcome.reason
    return {
        Status.MISSING: Reason.VANISHED,
        Status.CORRUPT: Reason.CORRUPT,
        Status.REFUSED: Reason.FULL,
    }.get(outcome.status, Reason.TIER_ERROR)
