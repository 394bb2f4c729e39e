"""The machinery under the hierarchy's verbs: writes wait for room, entries leave, transfers are launched and end.

A part of :class:`~tierkv._hierarchy.Hierarchy`, which is the one to import.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence

from tierkv._breaker import Door
from tierkv._ledger import GONE, PENDING, READY, Entry
from tierkv._level import Flight, LevelBooks, LevelPlan, Waiting, Writes, reason_of
from tierkv.types import Chunk, ChunkKey, Event, EventKind, Outcome, Reason, Status, Transfer, TransferKind

SLICE = 128
"""Chunks that one call expires, or begins to copy down to make room, at most."""
LEAVING = 32
"""How many chunks may be leaving a level in the background at a time; twice those that just came, if that is more."""
PATIENCE = 256
"""A search for victims that meets so many chunks which would have to be copied down first gives up."""
Keys = Collection[ChunkKey | None]
NOTHING: frozenset[ChunkKey] = frozenset()
_make = tuple.__new__  # half the cost of a named tuple's own way: every chunk with a level below comes by, thrice


class Flow:
    """State and mechanics shared by all verbs of :class:`~tierkv._hierarchy.Hierarchy`."""

    def __init__(self, plans: Sequence[LevelPlan], *, record_events: bool = False, recycles: bool = False) -> None:
        assert plans, "there is a primary"
        assert plans[0].n_slots is not None, "the primary has slots"
        self.levels = [LevelBooks(i, plan, recycles=recycles) for i, plan in enumerate(plans)]
        self.primary = self.levels[0].ledger
        for level in self.levels:
            level.lower = self.levels[level.index + 1 :]
            level.demotes = bool(level.lower) and level.lower[0].plan.writes is Writes.DEMOTE
            level.min_free_nbytes = level.plan.slot_nbytes if level.demotes else 0
        self.cascades = [level for level in self.levels[1:] if level.plan.writes is Writes.CASCADE]
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
            self.primary.commit((entry,))
            below.counts.read += 1
            below.counts.read_nbytes += entry.nbytes
            self._emit(top, EventKind.STORED, entry)
        else:
            if entry.state is not GONE:
                self._leave(top, entry, reason_of(outcome))
            if ended:
                self._writer_ended(top, entry)
        self._source_lost(below, flight.source, outcome)
        if ended:
            self._release(below, flight.source)
            self._pump_up(below.index)

    def _finish_write(self, flight: Flight, outcome: Outcome, *, ended: bool) -> None:
        level, above, entry = self.levels[flight.transfer.target], self.levels[flight.transfer.source], flight.target
        assert entry is not None
        if outcome.ok:
            self._unstick(level, entry.key)
        if entry.state is PENDING and outcome.ok:
            level.ledger.commit((entry,))
            level.counts.stored += 1
            level.counts.written += 1
            level.counts.written_nbytes += entry.nbytes
            self._emit(level, EventKind.STORED, entry)
        else:
            if outcome.ok:
                entry.stored = True
            if entry.state is not GONE:
                self._leave(level, entry, reason_of(outcome))
            if ended:
                self._writer_ended(level, entry)
        if flight.demote and not outcome.ok:
            flight.source.demote_refused = True
            self._source_lost(above, flight.source, outcome)
        if not ended:
            self._give_up_demotion(above, flight)
        if ended:
            level.queued_nbytes -= entry.charge_nbytes
            if flight.demote:
                above.demoting_nbytes -= flight.source.charge_nbytes
            self._release(above, flight.source)
            self._pump_up(level.index)

    def _give_up_demotion(self, above: LevelBooks, flight: Flight) -> None:
        """A copy down hangs: its source leaves without it, or would keep its ancestors, unless somebody reads it."""
        source = flight.source
        if flight.demote:
            above.demoting_nbytes -= source.charge_nbytes
            self._flights[flight.transfer.id] = flight._replace(demote=False)
            if source.state is READY and source.holds == 1 and source.key not in self.guarded:
                self._leave(above, source, Reason.DEADLINE)

    def _finish_delete(self, flight: Flight, outcome: Outcome, *, ended: bool) -> None:
        level, entry = self.levels[flight.transfer.source], flight.source
        if not ended:
            return
        level.deleting_nbytes -= entry.charge_nbytes
        if outcome.ok or outcome.status is Status.MISSING:
            self._free(level, entry)
            self._retry_stuck(level)
        else:
            # Still on the medium, so its bytes stay charged; the key may be written again (the copy is replaced).
            key = entry.key
            if key not in level.stuck:
                level.counts.drop(Reason.TIER_ERROR)
                level.stuck[key] = entry
            level.stuck.move_to_end(key)
            del level.leaving[key]
        self._pump_up(level.index)

    def _source_lost(self, level: LevelBooks, source: Entry, outcome: Outcome) -> None:
        """A copy found out that a lower level's medium no longer has what the ledger says."""
        if level.index and source.state is not GONE and outcome.status in (Status.MISSING, Status.CORRUPT):
            source.stored = False
            self._leave(level, source, reason_of(outcome))

    def _unstick(self, level: LevelBooks, key: ChunkKey) -> None:
        """What lies under the key is accounted for anew: a deletion that failed is history."""
        entry = level.stuck.pop(key, None)
        if entry is not None:
            level.ledger.free(entry)

    def _retry_stuck(self, level: LevelBooks) -> None:
        """Try the oldest failed deletion again, one at a time: a medium that refuses them must not be hammered."""
        if not level.stuck or not level.writes.lets_through or level.deleting_nbytes:
            return
        key, entry = next(iter(level.stuck.items()))
        if key in level.leaving or key in level.waiting or level.ledger.get(key) is not None:
            level.stuck.move_to_end(key)
            return
        level.leaving[key] = entry
        self._settle(level, entry)

    # -- lower levels -------------------------------------------------------------------------------------------

    def _enqueue(self, level: LevelBooks, source_level: int, sources: Sequence[Entry], *, demote: bool) -> None:
        """Ask a lower level to take copies of chunks, in prefix order: what fits at once starts, the rest waits."""
        above = self.levels[source_level]
        asked: list[Waiting] = []
        nbytes, charge = -1, 0
        for source in sources:
            chunk = source.chunk
            if chunk[4] != nbytes:  # mostly all are as long as the first
                nbytes, charge = chunk[4], level.ledger.charge(chunk)
            if self._wants(level, chunk, charge):
                level.queued_nbytes += charge
                asked.append(_make(Waiting, (source_level, source, demote, charge)))
        if not asked:
            return
        above.ledger.hold(*[waiting[1] for waiting in asked])
        if demote:
            above.demoting_nbytes += sum([waiting.source.charge_nbytes for waiting in asked])
        started: list[Entry] = []
        if not level.waiting and level.plan.writable():
            started = level.ledger.reserve([waiting[1].chunk for waiting in asked])
            for waiting, target in zip(asked, started, strict=False):
                self._begin(level, waiting, target)
        if len(started) == len(asked):
            self._trim(level, n_came=len(asked))
            return
        level.waiting.update({waiting.source.key: waiting for waiting in asked[len(started) :]})
        self._pump(level)

    def _wants(self, level: LevelBooks, chunk: Chunk, charge: int) -> bool:
        """Whether the level wants the chunk. False, and counted why, if it has it or refuses."""
        level.counts.offered += 1
        known = level.ledger.get(chunk[0])
        if known is not None:
            if not level.ledger.expired(known) or known.holds:
                level.counts.present += 1
                return False
            self._leave(level, known, Reason.EXPIRED)
        reason = self._refusal(level, chunk, charge)
        if reason is not None:
            level.counts.refuse(reason)
        return reason is None

    def _refusal(self, level: LevelBooks, chunk: Chunk, charge: int) -> Reason | None:
        if not level.writes.lets_through:
            return Reason.TIER_BROKEN
        if chunk[0] in level.leaving or chunk[0] in level.waiting:
            return Reason.BUSY
        if charge > level.ledger.capacity_nbytes and level.plan.writable():
            return Reason.TOO_LARGE if level.plan.share is None else Reason.FULL  # a share may grow again
        if level.queued_nbytes + charge > level.plan.queue_nbytes:
            return Reason.QUEUE_FULL if level.plan.writable() else Reason.SCANNING
        if not level.ledger.admits(chunk):
            return Reason.NOT_ADMITTED
        return None

    def _pump(self, level: LevelBooks) -> None:
        """Give waiting writes room, in order, as far as there is room or can be at once."""
        while level.waiting and level.writes.lets_through and level.plan.writable():
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
                self._begin(level, waiting, taken[0])
            elif charge <= level.ledger.capacity_nbytes and (level.leaving or level.demoting_nbytes):
                break
            else:
                level.waiting.popitem(last=False)
                self._refuse(level, waiting, Reason.FULL)
        self._trim(level)

    def _begin(self, level: LevelBooks, waiting: Waiting, target: Entry) -> None:
        level.queued_nbytes += target.charge_nbytes - waiting.charge_nbytes
        kind = TransferKind.DEMOTE if waiting.demote else TransferKind.CASCADE
        self._launch(kind, (waiting.source_level, level.index), waiting.source, target, demote=waiting.demote)

    def _refuse(self, level: LevelBooks, waiting: Waiting, reason: Reason) -> None:
        level.counts.refuse(reason)
        if waiting.demote:
            waiting.source.demote_refused = True
        self._forget(level, waiting)

    def _forget(self, level: LevelBooks, waiting: Waiting) -> None:
        """A write that waited will not be: let go of its source."""
        level.queued_nbytes -= waiting.charge_nbytes
        above = self.levels[waiting.source_level]
        if waiting.demote:
            above.demoting_nbytes -= waiting.source.charge_nbytes
        self._release(above, waiting.source)

    def _refuse_waiting(self, level: LevelBooks, reason: Reason) -> None:
        while level.waiting:
            self._refuse(level, level.waiting.popitem(last=False)[1], reason)

    def _pump_up(self, lowest: int = -1) -> None:
        """Pump a level and those above it, deepest first: room below lets what waits above go on."""
        for level in reversed(self.levels[: lowest + 1] if lowest >= 0 else self.levels):
            self._pump(level)

    def _trim(
        self, level: LevelBooks, request: Sequence[Chunk] = (), shielded: Keys = NOTHING, n_came: int = 0
    ) -> None:
        """Evict to the low-water mark where leaving takes time, so that those who come need not wait for it."""
        if level.index or level.min_free_nbytes:
            need_nbytes = level.low_target()
            at_most = max(LEAVING, 2 * n_came) - len(level.leaving)
            if need_nbytes > 0 and at_most > 0:
                self._make_room(level, need_nbytes, {*shielded, *(chunk.key for chunk in request)}, at_most=at_most)

    def _make_room(self, level: LevelBooks, need_nbytes: int, protect: Keys, *, at_most: int | None = None) -> None:
        """Start making ``need_nbytes`` free: drop what may leave, demote what may not yet."""
        accept = self._unguarded if self.guarded else None
        victims = level.ledger.victims(accept, protect, need_nbytes, at_most=at_most)
        droppable = self._droppable(level)
        if droppable is None:
            self._evict(level, victims)
            return
        moving = {id(entry): entry for entry in victims if not droppable(entry)}
        below = level.lower[0]
        self._enqueue(below, level.index, list(moving.values())[::-1], demote=True)
        staying: set[ChunkKey | None] = set()
        for entry in victims:
            key = entry.key
            asked = id(entry) in moving
            # What was asked for stays if it was not refused; what was not asked for, if its copy has just left below.
            stays = entry.holds or below.ledger.get(key) is not None if asked else not droppable(entry)
            if stays or key in staying:
                staying.add(entry.parent)
            else:
                self._leave(level, entry, Reason.EVICTED)

    def _unguarded(self, entry: Entry) -> bool:
        return entry.key not in self.guarded

    def _droppable(self, level: LevelBooks) -> Callable[[Entry], bool] | None:
        """Who may leave a level at once: everybody (None) under CASCADE, else what a level below has or refuses."""
        if not level.demotes:
            return None
        below = level.lower[0]
        return lambda entry: entry.demote_refused or not below.writes.lets_through or level.has_below(entry.key)

    # -- leaving ------------------------------------------------------------------------------------------------

    def _leave(self, level: LevelBooks, entry: Entry, reason: Reason) -> None:
        """Take an entry out of a level's index, count it, and free its space once nothing touches it."""
        state, ledger = entry.state, level.ledger
        if reason is Reason.EVICTED and ledger.expired(entry):
            reason = Reason.EXPIRED
        at_once = not level.index and not entry.holds
        if at_once:
            ledger.drop((entry,), evicted=reason is Reason.EVICTED)
        else:
            ledger.remove(entry, evicted=reason is Reason.EVICTED)
        if level.index:
            level.leaving[entry.key] = entry
        if state is READY:
            if reason is Reason.EVICTED:
                level.counts.evicted += 1
                if level.demotes:
                    reason = Reason.DEMOTED if level.has_below(entry.key) else Reason.DEMOTE_DROPPED
                    if reason is Reason.DEMOTE_DROPPED:
                        level.counts.drop(reason)
            else:
                level.counts.drop(reason)
            self._emit(level, EventKind.REMOVED, entry, reason)
        elif not entry.promoted:
            level.counts.refuse(reason)
        if not at_once:
            self._settle(level, entry)

    def _evict(self, level: LevelBooks, victims: Sequence[Entry]) -> None:
        """Entries that :meth:`Ledger.victims` chose leave; from the primary, whose slots take no deletion, together."""
        if level.index or level.demotes or level.ledger.expires:
            for entry in victims:
                self._leave(level, entry, Reason.EVICTED)
            return
        level.ledger.drop(victims, evicted=True)
        self._evicted(level, victims)

    def _evicted(self, level: LevelBooks, gone: Sequence[Entry]) -> None:
        level.counts.evicted += len(gone)
        if self.record_events:
            for entry in gone:
                self._emit(level, EventKind.REMOVED, entry, Reason.EVICTED)

    def _writer_ended(self, level: LevelBooks, entry: Entry) -> None:
        level.ledger.writer_ended(entry)
        self._settle(level, entry)

    def _release(self, level: LevelBooks, *entries: Entry) -> None:
        level.ledger.release(*entries)
        for entry in dict.fromkeys([entry for entry in entries if entry.state is GONE]) if level.ledger.n_gone else ():
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
            del level.leaving[entry.key]
            if level.stuck.get(entry.key) is entry:
                del level.stuck[entry.key]

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
        slot, generation = (at_primary.slot, at_primary.generation) if at_primary is not None else (None, 0)
        chunk = (target or source).chunk
        transfer = _make(Transfer, (self._last_id, kind, chunk, source_level, target_level, slot, generation))
        self._door(transfer).trying = True
        self._flights[self._last_id] = _make(Flight, (transfer, source, target, demote))
        self._outbox.append(transfer)

    def _door(self, transfer: Transfer) -> Door:
        """Which breaker a transfer's end tells something about."""
        if transfer.kind is TransferKind.PROMOTE:
            return self.levels[transfer.source].reads
        return self.levels[transfer.target].writes

    def _emit(self, level: LevelBooks, kind: EventKind, entry: Entry, reason: Reason | None = None) -> None:
        if self.record_events:
            self._events.append(Event(level.index, kind, entry.chunk, reason))

    @property
    def primary_busy(self) -> bool:
        """Copies out of the primary are under way or wait: slots that are held now may become evictable."""
        return any(not f.transfer.source for f in self._flights.values()) or any(
            not waiting.source_level for level in self.levels for waiting in level.waiting.values()
        )
