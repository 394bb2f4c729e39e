"""How an entry leaves a level, and how a transfer is launched: what everything that the hierarchy does ends in.

A part of :class:`~tierkv._hierarchy.Hierarchy`, which is the one to import.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from tierkv._breaker import Door
from tierkv._entry import chunks_of
from tierkv._ledger import GONE, READY, Entry
from tierkv._level import Flight, LevelBooks, LevelPlan, Writes
from tierkv.types import Chunk, ChunkKey, Event, EventKind, Reason, Transfer, TransferKind

_make = tuple.__new__  # half the cost of a named tuple's own way: every chunk with a level below comes by, twice


class Moves:
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
        self._late: set[int] = set()
        """Those of them that are past their deadline."""
        self._last_id = 0

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
        self._emit_all(level, EventKind.REMOVED, gone, Reason.EVICTED)

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

    def _launch(self, kind: TransferKind, levels: tuple[int, int], source: Entry, target: Entry | None = None) -> None:
        """A copy up or a deletion."""
        self._last_id += 1
        source_level, target_level = levels
        slot, generation = (None, 0) if target is None else (target.slot, target.generation)
        chunk = (target or source).chunk
        transfer = _make(Transfer, (self._last_id, kind, chunk, source_level, target_level, slot, generation))
        self._door(transfer).trying = True
        self._flights[self._last_id] = _make(Flight, (transfer, source, target, False))
        self._outbox.append(transfer)

    def _launch_down(
        self,
        kind: TransferKind,
        levels: tuple[int, int],
        copies: Iterable[tuple[Entry, Entry, Chunk]],
    ) -> None:
        """:meth:`_launch` for copies to a lower level, (source, target, chunk) each; there is at least one."""
        source_level, target_level = levels
        flights, outbox, demote = self._flights, self._outbox, kind is TransferKind.DEMOTE
        slot, generation = None, 0
        id_ = self._last_id
        for source, target, chunk in copies:
            id_ += 1
            if not source_level:
                slot, generation = source.slot, source.generation
            transfer = _make(Transfer, (id_, kind, chunk, source_level, target_level, slot, generation))
            flights[id_] = _make(Flight, (transfer, source, target, demote))
            outbox.append(transfer)
        self._last_id = id_
        self.levels[target_level].writes.trying = True

    def _door(self, transfer: Transfer) -> Door:
        """Which breaker a transfer's end tells something about."""
        if transfer.kind is TransferKind.PROMOTE:
            return self.levels[transfer.source].reads
        return self.levels[transfer.target].writes

    def _note_late(self, flight: Flight, *, is_late: bool) -> None:
        """What a transfer keeps of lower levels is not free soon, or is so again: a hanging one has ended after all."""
        transfer, by = flight.transfer, 1 if is_late else -1
        (self._late.add if is_late else self._late.discard)(transfer.id)
        for index, entry in ((transfer.source, flight.source), (transfer.target, flight.target)):
            if index and entry is not None:
                self.levels[index].hang(entry.key, by)
        if transfer.kind is TransferKind.DELETE:
            self.levels[transfer.source].deleting_nbytes -= by * flight.source.charge_nbytes

    def _emit(self, level: LevelBooks, kind: EventKind, entry: Entry, reason: Reason | None = None) -> None:
        if self.record_events:
            self._events.append(Event(level.index, kind, entry.chunk, reason))

    def _emit_all(
        self, level: LevelBooks, kind: EventKind, entries: Sequence[Entry], reason: Reason | None = None
    ) -> None:
        if self.record_events:
            self._events += [Event(level.index, kind, chunk, reason) for chunk in chunks_of(entries)]

    @property
    def primary_busy(self) -> bool:
        """Copies out of the primary are under way or wait: slots that are held now may become evictable."""
        return any(not f.transfer.source for f in self._flights.values()) or any(
            not waiting.source_level for level in self.levels for waiting in level.waiting.values()
        )
