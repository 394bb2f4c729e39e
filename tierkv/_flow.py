"""The machinery under the hierarchy's verbs: writes wait for room, entries leave, transfers are launched and end.

Nothing here is called from outside :mod:`tierkv._hierarchy`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from tierkv._ledger import GONE, PENDING, READY, Entry
from tierkv._level import LevelBooks, LevelPlan, Waiting, Writes
from tierkv.types import Chunk, ChunkKey, Event, EventKind, Outcome, Reason, Status, Transfer, TransferKind

NOTHING: frozenset[ChunkKey] = frozenset()


class Flight(NamedTuple):
    """A transfer under way, and the entries it keeps busy."""

    transfer: Transfer
    source: Entry
    target: Entry | None
    demote: bool = False


class Flow:
    """State and mechanics shared by all verbs of :class:`~tierkv._hierarchy.Hierarchy`."""

    def __init__(self, plans: Sequence[LevelPlan], *, record_events: bool = False) -> None:
        assert plans, "there is a primary"
        assert plans[0].n_slots is not None, "the primary has slots"
        self.levels = [LevelBooks(i, plan) for i, plan in enumerate(plans)]
        self.primary = self.levels[0].ledger
        for level, below in zip(self.levels, self.levels[1:], strict=False):
            if below.plan.writes is Writes.DEMOTE:
                level.min_free_nbytes = level.plan.slot_nbytes
        self.guarded: Counter[ChunkKey] = Counter()
        """Keys that nobody may evict at any level for now; see :meth:`~tierkv._hierarchy.Hierarchy.guard`."""
        self.record_events = record_events
        self._events: list[Event] = []
        self._outbox: deque[Transfer] = deque()
        self._flights: dict[int, Flight] = {}
        self._last_id = 0

    # -- ends of transfers --------------------------------------------------------------------------------------

    def _finish_promote(self, flight: Flight, outcome: Outcome, *, ended: bool) -> None:
        top, below, entry = self.levels[0], self.levels[flight.transfer.source], flight.target
        assert entry is not None
        if entry.state is PENDING and outcome.ok:
            self.primary.commit(entry)
            below.counts.read += 1
            below.counts.read_nbytes += entry.chunk.nbytes
            self._emit(top, EventKind.STORED, entry.chunk)
        else:
            if entry.state is not GONE:
                self._leave(top, entry, _reason_of(outcome))
            if ended:
                self._writer_ended(top, entry)
        source = flight.source
        if outcome.status in (Status.MISSING, Status.CORRUPT) and source.state is not GONE:
            source.stored = False
            self._leave(below, source, Reason.VANISHED if outcome.status is Status.MISSING else Reason.CORRUPT)
        if ended:
            self._release(below, source)
            self._pump(below)
            self._trim(top)

    def _finish_write(self, flight: Flight, outcome: Outcome, *, ended: bool) -> None:
        level, above, entry = self.levels[flight.transfer.target], self.levels[flight.transfer.source], flight.target
        assert entry is not None
        entry.stored = entry.stored or outcome.ok
        if entry.state is PENDING and outcome.ok:
            level.ledger.commit(entry)
            level.counts.stored += 1
            level.counts.written += 1
            level.counts.written_nbytes += entry.chunk.nbytes
            self._emit(level, EventKind.STORED, entry.chunk)
        else:
            if entry.state is not GONE:
                self._leave(level, entry, _reason_of(outcome))
            if ended:
                self._writer_ended(level, entry)
        if flight.demote and not outcome.ok:
            flight.source.demote_refused = True
        if ended:
            level.queued_nbytes -= entry.charge_nbytes
            if flight.demote:
                above.demoting_nbytes -= flight.source.charge_nbytes
            self._release(above, flight.source)
            self._pump(level)
            self._trim(above)

    def _finish_delete(self, flight: Flight, outcome: Outcome, *, ended: bool) -> None:
        level, entry = self.levels[flight.transfer.source], flight.source
        if not ended:
            return
        level.deleting_nbytes -= entry.charge_nbytes
        if outcome.ok or outcome.status is Status.MISSING:
            self._free(level, entry)
        else:
            # Still on the medium, so its bytes stay charged; the key may be written again (the copy is replaced).
            level.counts.drop(Reason.TIER_ERROR)
            del level.leaving[entry.chunk.key]
        self._pump(level)

    # -- lower levels -------------------------------------------------------------------------------------------

    def _enqueue(self, level: LevelBooks, source_level: int, source: Entry, *, demote: bool) -> bool:
        """Ask a lower level to take a copy. True if it will, or has one."""
        chunk = source.chunk
        level.counts.offered += 1
        known = level.ledger.get(chunk.key)
        if known is not None and level.ledger.expired(known) and not known.holds:
            self._leave(level, known, Reason.EXPIRED)
        elif known is not None:
            level.counts.present += 1
            return True
        charge = level.ledger.charge(chunk)
        reason = self._refusal(level, chunk, charge)
        if reason is not None:
            level.counts.refuse(reason)
            return False
        above = self.levels[source_level]
        above.ledger.hold(source)
        if demote:
            above.demoting_nbytes += source.charge_nbytes
        level.queued_nbytes += charge
        level.waiting[chunk.key] = Waiting(source_level, source, demote)
        self._pump(level)
        return True

    def _refusal(self, level: LevelBooks, chunk: Chunk, charge: int) -> Reason | None:
        if not level.open:
            return Reason.TIER_BROKEN
        if chunk.key in level.leaving or chunk.key in level.waiting:
            return Reason.BUSY
        if charge > level.ledger.capacity_nbytes and level.plan.writable():
            return Reason.TOO_LARGE
        if level.queued_nbytes + charge > level.plan.queue_nbytes:
            return Reason.QUEUE_FULL if level.plan.writable() else Reason.SCANNING
        if not level.ledger.admits(chunk):
            return Reason.NOT_ADMITTED
        return None

    def _pump(self, level: LevelBooks) -> None:
        """Give waiting writes room, in order, as far as there is room or can be at once."""
        while level.waiting and level.open and level.plan.writable():
            waiting = next(iter(level.waiting.values()))
            chunk = waiting.source.chunk
            taken = level.ledger.reserve([chunk])
            charge = level.ledger.charge(chunk)
            if not taken and charge <= level.ledger.capacity_nbytes:
                short = charge - level.ledger.free_nbytes
                self._make_room(level, short - level.deleting_nbytes - level.demoting_nbytes, {chunk.parent})
                taken = level.ledger.reserve([chunk])
            if taken:
                level.waiting.popitem(last=False)
                kind = TransferKind.DEMOTE if waiting.demote else TransferKind.CASCADE
                levels = (waiting.source_level, level.index)
                self._launch(kind, levels, waiting.source, taken[0], demote=waiting.demote)
            elif charge <= level.ledger.capacity_nbytes and (level.leaving or level.demoting_nbytes):
                break
            else:
                level.waiting.popitem(last=False)
                self._refuse(level, waiting, Reason.FULL)
        self._trim(level)

    def _refuse(self, level: LevelBooks, waiting: Waiting, reason: Reason) -> None:
        level.counts.refuse(reason)
        level.queued_nbytes -= level.ledger.charge(waiting.source.chunk)
        above = self.levels[waiting.source_level]
        if waiting.demote:
            waiting.source.demote_refused = True
            above.demoting_nbytes -= waiting.source.charge_nbytes
        self._release(above, waiting.source)

    def _refuse_waiting(self, level: LevelBooks, reason: Reason) -> None:
        while level.waiting:
            self._refuse(level, level.waiting.popitem(last=False)[1], reason)

    def _trim(self, level: LevelBooks) -> None:
        """Evict to the low-water mark where leaving takes time, so that those who come need not wait for it."""
        if level.index or level.min_free_nbytes:
            self._make_room(level, level.low_target(), NOTHING)

    def _make_room(self, level: LevelBooks, need_nbytes: int, protect: Collection[ChunkKey | None]) -> None:
        """Start making ``need_nbytes`` free: drop what may leave, demote what may not yet."""
        droppable = self._droppable(level)
        staying: set[ChunkKey | None] = set()
        for entry in level.ledger.victims(lambda entry: entry.chunk.key not in self.guarded, protect, need_nbytes):
            if not droppable(entry) and self._enqueue(self.levels[level.index + 1], level.index, entry, demote=True):
                staying.add(entry.chunk.parent)
            elif entry.chunk.key in staying:
                staying.add(entry.chunk.parent)
            else:
                self._leave(level, entry, Reason.EVICTED)

    def _droppable(self, level: LevelBooks) -> Callable[[Entry], bool]:
        """Who may leave a level at once: everybody under CASCADE, else what a level below has or will not take."""
        lower = self.levels[level.index + 1 :]
        if not lower or lower[0].plan.writes is Writes.CASCADE:
            return lambda _: True

        def below_has_it(entry: Entry) -> bool:
            key = entry.chunk.key
            return entry.demote_refused or not lower[0].open or any(each.readable(key) is not None for each in lower)

        return below_has_it

    # -- leaving ------------------------------------------------------------------------------------------------

    def _leave(self, level: LevelBooks, entry: Entry, reason: Reason) -> None:
        """Take an entry out of a level's index, count it, and free its space once nothing touches it."""
        state = entry.state
        if reason is Reason.EVICTED and level.ledger.expired(entry):
            reason = Reason.EXPIRED
        level.ledger.remove(entry, evicted=reason is Reason.EVICTED)
        if level.index:
            level.leaving[entry.chunk.key] = entry
        if state is READY:
            if reason is Reason.EVICTED:
                reason = self._eviction_reason(level, entry)
                level.counts.evicted += 1
                if reason is Reason.DEMOTE_DROPPED:
                    level.counts.drop(reason)
            else:
                level.counts.drop(reason)
            self._emit(level, EventKind.REMOVED, entry.chunk, reason)
        elif not entry.promoted:
            level.counts.refuse(reason)
        self._settle(level, entry)

    def _eviction_reason(self, level: LevelBooks, entry: Entry) -> Reason:
        lower = self.levels[level.index + 1 :]
        if not lower or lower[0].plan.writes is Writes.CASCADE:
            return Reason.EVICTED
        has_copy = any(each.readable(entry.chunk.key) is not None for each in lower)
        return Reason.DEMOTED if has_copy else Reason.DEMOTE_DROPPED

    def _writer_ended(self, level: LevelBooks, entry: Entry) -> None:
        entry.writing = False
        self._settle(level, entry)

    def _release(self, level: LevelBooks, entry: Entry) -> None:
        level.ledger.release(entry)
        self._settle(level, entry)

    def _settle(self, level: LevelBooks, entry: Entry) -> None:
        """Free a GONE entry's space once nothing touches it; below the primary that takes a deletion first."""
        if entry.state is not GONE or not entry.settled:
            return
        if level.index and entry.owned and entry.stored:
            level.deleting_nbytes += entry.charge_nbytes
            self._launch(TransferKind.DELETE, (level.index, level.index), entry)
        else:
            self._free(level, entry)

    def _free(self, level: LevelBooks, entry: Entry) -> None:
        level.ledger.free(entry)
        if level.index:
            del level.leaving[entry.chunk.key]

    def _launch(
        self,
        kind: TransferKind,
        levels: tuple[int, int],
        source: Entry,
        target: Entry | None = None,
        *,
        demote: bool = False,
    ) -> None:
        self._last_id += 1
        source_level, target_level = levels
        at_primary = target if target_level == 0 else source if source_level == 0 else None
        transfer = Transfer(
            id=self._last_id,
            kind=kind,
            chunk=(target or source).chunk,
            source=source_level,
            target=target_level,
            slot=at_primary.slot if at_primary is not None else None,
            generation=at_primary.generation if at_primary is not None else 0,
        )
        self._flights[transfer.id] = Flight(transfer, source, target, demote)
        self._outbox.append(transfer)

    def _emit(self, level: LevelBooks, kind: EventKind, chunk: Chunk, reason: Reason | None = None) -> None:
        if self.record_events:
            self._events.append(Event(level.index, kind, chunk, reason))

    # -- proof --------------------------------------------------------------------------------------------------

    @property
    def primary_busy(self) -> bool:
        """Copies out of the primary are under way or wait: slots that are held now may become evictable."""
        return any(not f.transfer.source for f in self._flights.values()) or any(
            not waiting.source_level for level in self.levels for waiting in level.waiting.values()
        )

    @property
    def at_rest(self) -> bool:
        """No copy, deletion or waiting write, no pending or quarantined space."""
        return not self._flights and all(
            not level.waiting and not level.ledger.n_pending and not level.ledger.n_gone for level in self.levels
        )

    def check(self) -> None:
        """Recount everything. For tests; O(n)."""
        holds: dict[int, int] = {}
        flights = list(self._flights.values())
        for flight in flights:
            if flight.transfer.kind is not TransferKind.DELETE:
                holds[id(flight.source)] = holds.get(id(flight.source), 0) + 1
        for level in self.levels:
            level.ledger.check()
            for waiting in level.waiting.values():
                holds[id(waiting.source)] = holds.get(id(waiting.source), 0) + 1
        for level in self.levels:
            self._check_level(level, flights)
            for entry in [*level.ledger, *level.ledger.gone()]:
                assert entry.holds >= holds.get(id(entry), 0), "each copy holds its source"

    def _check_level(self, level: LevelBooks, flights: Sequence[Flight]) -> None:
        writes = [f for f in flights if f.target is not None and f.transfer.target == level.index and level.index]
        deletes = [
            f.source for f in flights if f.transfer.kind is TransferKind.DELETE and f.transfer.source == level.index
        ]
        demotes = [f.source for f in flights if f.demote and f.transfer.source == level.index]
        queued = sum(level.ledger.charge(w.source.chunk) for w in level.waiting.values())
        waiting = sum(
            w.source.charge_nbytes
            for lower in self.levels
            for w in lower.waiting.values()
            if w.demote and w.source_level == level.index
        )
        assert level.queued_nbytes == queued + sum(f.target.charge_nbytes for f in writes if f.target is not None)
        assert level.deleting_nbytes == sum(entry.charge_nbytes for entry in deletes)
        assert {id(entry) for entry in deletes} <= {id(entry) for entry in level.leaving.values()}
        assert all(entry.state is GONE for entry in level.leaving.values())
        assert level.demoting_nbytes == waiting + sum(entry.charge_nbytes for entry in demotes)
        pending = sum(entry.state is PENDING and not entry.promoted for entry in level.ledger)
        counts = level.counts
        told = counts.stored + counts.present + counts.refused.total() + pending + len(level.waiting)
        assert counts.offered == told, "offered = stored + present + refused, exactly"


def _reason_of(outcome: Outcome) -> Reason:
    if outcome.reason is not None:
        return outcome.reason
    return {
        Status.MISSING: Reason.VANISHED,
        Status.CORRUPT: Reason.CORRUPT,
        Status.REFUSED: Reason.FULL,
    }.get(outcome.status, Reason.TIER_ERROR)
