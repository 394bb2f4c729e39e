"""The machinery under the hierarchy's verbs: transfers end, copies are sent down, writes wait for room.

A part of :class:`~tierkv._hierarchy.Hierarchy`, which is the one to import.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby

from tierkv._entry import chunks_of
from tierkv._ledger import GONE, PENDING, READY, Entry
from tierkv._level import Flight, LevelBooks, Waiting, reason_of
from tierkv._moves import Moves
from tierkv.types import Chunk, ChunkKey, EventKind, Outcome, Reason, Status, TransferKind

SLICE = 128
"""Chunks that one call expires, or begins to copy down to make room, at most."""
LEAVING = 32
"""How many chunks may be leaving a level in the background at a time; twice those that just came, if that is more."""
PATIENCE = 256
"""A search for victims that meets so many chunks which would have to be copied down first gives up."""
_PASSING = frozenset({
    Reason.BUSY, Reason.FULL, Reason.NO_SPACE, Reason.QUEUE_FULL, Reason.SCANNING, Reason.TIER_BROKEN
})  # fmt: skip
"""Why a level does not take a chunk now, and may take it once it has taken another."""
Keys = Collection[ChunkKey | None]
NOTHING: frozenset[ChunkKey] = frozenset()
End = tuple[int, Outcome, bool]
"""A transfer's id, its outcome, and whether it has ended: what :meth:`Flow.finish` is told."""


class Flow(Moves):
    """The ends of transfers, and what is copied down: at once, when it is evicted, or once there is room for it."""

    # -- ends of transfers --------------------------------------------------------------------------------------

    def finish(self, transfer_id: int, outcome: Outcome, *, ended: bool = True) -> None:
        """A transfer's end.

        ``ended=False`` reports a deadline: askers see the outcome, but its space stays quarantined until the same
        transfer is finished again with ``ended=True``.
        """
        flight = self._flights[transfer_id] if not ended else self._flights.pop(transfer_id)
        if ended:
            self._door(flight.transfer).trying = False
        if (transfer_id in self._late) is ended:
            self._note_late(flight, is_late=not ended)
        if flight.transfer.kind is TransferKind.PROMOTE:
            self._finish_promote(flight, outcome, ended=ended)
        elif flight.transfer.kind is TransferKind.DELETE:
            self._finish_delete(flight, outcome, ended=ended)
        else:
            self._finish_write(flight, outcome, ended=ended)

    def finish_all(self, ends: Iterable[End]) -> None:
        """:meth:`finish` for many, in their order; writes that went well, and follow each other, are taken together."""
        for levels, some in groupby(ends, self._levels_of_good_write):
            if levels is None:
                for id_, outcome, ended in some:
                    self.finish(id_, outcome, ended=ended)
            else:
                self._finish_good_writes(levels, [self._flights.pop(id_) for id_, _, _ in some])

    def _levels_of_good_write(self, end: End) -> tuple[int, int] | None:
        """From which to which level a write has been done that somebody waits for; None: it is something else."""
        id_, outcome, ended = end
        (_, kind, _, source_level, target_level, _, _), _, target, _ = self._flights[id_]
        is_write = kind is TransferKind.CASCADE and ended and outcome.ok
        is_awaited = is_write and target is not None and target.state is PENDING
        return (source_level, target_level) if is_awaited and not self.levels[target_level].stuck else None

    def _finish_good_writes(self, levels: tuple[int, int], flights: Sequence[Flight]) -> None:
        above, level = self.levels[levels[0]], self.levels[levels[1]]
        entries = [entry for _, _, entry, _ in flights if entry is not None]
        n_entries, nbytes = len(entries), sum([entry.kind[1] for entry in entries])
        level.writes.trying = False
        level.ledger.commit(entries)
        level.counts.stored += n_entries
        level.counts.written += n_entries
        level.counts.written_nbytes += nbytes
        self._emit_all(level, EventKind.STORED, entries)
        level.queued_nbytes -= sum([entry.charge_nbytes for entry in entries])
        self._release(above, *[source for _, source, _, _ in flights])
        self._pump_up(level.index)

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
            _note_refusal(level, flight.source, reason_of(outcome))
            self._source_lost(above, flight.source, outcome)
        if not ended:
            self._give_up_demotion(above, flight)
            for each in (level, above):
                if each.waiting:  # for what is not free soon any more
                    self._pump(each)
            return
        level.queued_nbytes -= entry.charge_nbytes
        self._copied_down(above, flight, well=outcome.ok)
        self._pump_up(level.index)

    def _copied_down(self, above: LevelBooks, flight: Flight, *, well: bool) -> None:
        """A copy down has ended: its source may leave."""
        if flight.demote:
            above.demoting_nbytes -= flight.source.charge_nbytes
        self._release(above, flight.source)
        if flight.demote and well:
            self._trim(above)  # before the level below evicts it again: it would come and go without an end

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
            self._pump_up(level.index)
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
        chunks: Sequence[Chunk] = chunks_of(sources)
        charges = self._welcome(level, chunks)
        if charges is None:
            wanted = [*self._wanted(level, sources, chunks)]
            if not wanted:
                return
            sources, chunks, charges = zip(*wanted, strict=True)
        above.ledger.hold(*sources)
        if demote:
            above.demoting_nbytes += sum([source.charge_nbytes for source in sources])
        n_started = 0
        if not level.waiting and level.plan.writable():
            started = level.ledger.reserve(chunks)
            n_started = len(started)
            if started:
                # A tier that has just been opened on another thread may charge more than it said a moment ago.
                level.queued_nbytes += sum([entry.charge_nbytes for entry in started]) - sum(charges[:n_started])
                kind = TransferKind.DEMOTE if demote else TransferKind.CASCADE
                self._launch_down(kind, (source_level, level.index), zip(sources, started, chunks, strict=False))
        if n_started == len(sources):
            self._trim(level, n_came=n_started)
            return
        for source, charge in zip(sources[n_started:], charges[n_started:], strict=True):
            level.waiting[source.key] = Waiting(source_level, source, demote, charge)
        self._pump(level)

    def _welcome(self, level: LevelBooks, chunks: Sequence[Chunk]) -> Sequence[int] | None:
        """What each chunk is charged as if the level wants them all, without a look at each: the usual case, cheaply.

        None: it takes that look, and nothing was done.
        """
        n_chunks = len(chunks)
        if not chunks or level.plan.admission is not None or not level.writes.lets_through:
            return None
        nbytes = chunks[0][4]
        keys = {chunk[0] for chunk in chunks}
        is_free = level.leaving.keys().isdisjoint(keys) and level.waiting.keys().isdisjoint(keys)
        is_new = is_free and level.ledger.lacks(keys, n_chunks)
        if not is_new or [chunk[4] for chunk in chunks].count(nbytes) != n_chunks:
            return None
        charge = level.ledger.charge(chunks[0])
        queued_nbytes = level.queued_nbytes + n_chunks * charge
        if charge > level.ledger.capacity_nbytes or queued_nbytes > level.plan.queue_nbytes:
            return None
        level.counts.offered += n_chunks
        level.queued_nbytes = queued_nbytes
        return (charge,) * n_chunks

    def _wanted(
        self, level: LevelBooks, sources: Sequence[Entry], chunks: Sequence[Chunk]
    ) -> Iterable[tuple[Entry, Chunk, int]]:
        """Those that the level wants, and what each is charged as."""
        nbytes, charge = -1, 0
        for source, chunk in zip(sources, chunks, strict=True):
            if chunk[4] != nbytes:  # mostly all are as long as the first
                nbytes, charge = chunk[4], level.ledger.charge(chunk)
            if self._wants(level, chunk, charge):
                level.queued_nbytes += charge
                yield source, chunk, charge

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
            elif charge <= level.ledger.capacity_nbytes and (level.is_clearing or level.demoting_nbytes):
                break
            else:
                level.waiting.popitem(last=False)
                self._refuse(level, waiting, Reason.FULL)
        self._trim(level)

    def _begin(self, level: LevelBooks, waiting: Waiting, target: Entry) -> None:
        level.queued_nbytes += target.charge_nbytes - waiting.charge_nbytes
        kind = TransferKind.DEMOTE if waiting.demote else TransferKind.CASCADE
        copies = ((waiting.source, target, target.chunk),)
        self._launch_down(kind, (waiting.source_level, level.index), copies)

    def _refuse(self, level: LevelBooks, waiting: Waiting, reason: Reason) -> None:
        level.counts.refuse(reason)
        if waiting.demote:
            _note_refusal(level, waiting.source, reason)
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
        droppable = self._droppable(level)
        accept: Callable[[Entry], bool] | None = self._unguarded if self.guarded else None
        if droppable is not None and level.lower[0].leaving:
            accept = self._is_settled_below(level.lower[0], droppable)
        victims = level.ledger.victims(accept, protect, need_nbytes, at_most=at_most)
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

    def _is_settled_below(self, below: LevelBooks, droppable: Callable[[Entry], bool]) -> Callable[[Entry], bool]:
        """Who may be asked to go down: a key whose earlier copy is just being deleted there waits for the end of that.

        Asked now it would be turned down, and leave, and so would both of its copies. A deletion that hangs is not
        waited for.
        """
        guarded = self.guarded
        return lambda entry: entry.key not in guarded and (not below.is_deleting(entry.key) or droppable(entry))

    def _droppable(self, level: LevelBooks) -> Callable[[Entry], bool] | None:
        """Who may leave a level at once: everybody (None) under CASCADE, else what a level below has or refuses."""
        if not level.demotes:
            return None
        below = level.lower[0]
        n_stored = below.counts.stored
        return lambda entry: entry.turned_down(n_stored) or not below.writes.lets_through or level.has_below(entry.key)


def _note_refusal(below: LevelBooks, source: Entry, reason: Reason) -> None:
    """A copy down came to nothing. What may be the chunk's own fault is not tried again."""
    if reason in _PASSING:
        source.turn_down(below.counts.stored)
    else:
        source.demote_refused = True
