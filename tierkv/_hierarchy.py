"""All levels together: where each chunk is, what may enter, who must leave, and which copies that takes.

A plain state machine: synchronous, no I/O, no thread, no clock. Callers ask and are answered at once; the copies that
follow are :class:`~tierkv.types.Transfer` values for somebody else to run (:meth:`Hierarchy.take_transfers`), whose end
comes back through ``finish``. It belongs to one thread: the event loop's under
:class:`~tierkv.TieredCache`, the scheduler's under vLLM.

The path of one chunk: ``offer`` reserves a primary slot -> the device copies -> ``commit_store`` -> CASCADE transfers
to the levels below -> evicted from the primary by a later offer -> ``find`` says that a lower level has it ->
``promote`` reserves a slot and emits a read -> ``finish`` -> leased and loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from tierkv._breaker import Traffic
from tierkv._entry import of_its_tenant
from tierkv._flow import NOTHING, SLICE
from tierkv._ledger import GONE, PENDING, READY, Entry
from tierkv._level import LevelBooks, bare
from tierkv._proof import check_books
from tierkv._room import Room
from tierkv.types import (
    Chunk,
    ChunkKey,
    Event,
    EventKind,
    Found,
    LevelStatistics,
    PrefixHit,
    Reason,
    Stop,
    Transfer,
    TransferKind,
)

ABSENT = -1
UNSETTLED = -2
"""Answers of :meth:`Hierarchy.find`: no level has the key; no ledger knows it, but a tier should be probed."""


_end_token = itemgetter(3)
"""By number, which costs half of what a name does; ``test_fields_by_number`` holds it right."""


class Offer(NamedTuple):
    """What became of chunks that somebody wants to store: per key reserved, already there, or refused."""

    reserved: list[Entry]
    """PENDING primary entries, in the order in which room was given. Fill their slots, then commit or abort each."""
    present: list[Entry]
    refused: list[tuple[Chunk, Reason]]
    retry: bool = False
    """Copies under way may make room for what was refused as FULL."""


class Hierarchy(Room):
    """See the module.

    Args:
        plans: the levels, fastest first; the first must have slots.
        record_events: keep events for :meth:`take_events`; off by default, since untaken events would pile up.
        evicts_ahead: free a few slots more than needed, in one go; up to a thousandth of the primary.
        recycles: entries of evicted chunks become those of new ones. Then an entry means nothing beyond the call that
            returned it, unless it is held, pending, or shielded in every offer.
    """

    # -- asking -------------------------------------------------------------------------------------------------

    def find(self, key: ChunkKey) -> int:
        """The fastest level that can serve the key now, else ABSENT or UNSETTLED. Touches nothing."""
        entry = self.primary.get(key)
        if entry is not None and entry.state is READY and not self.primary.expired(entry):
            return 0
        lower = self.levels[0].lower
        for level in lower:
            if level.readable(key) is not None:
                return level.index
        for level in lower:
            if level.reads.lets_through and not level.plan.settled(key):
                return UNSETTLED
        return ABSENT

    def lookup(self, chunks: Sequence[Chunk]) -> PrefixHit:
        """The longest run of leading chunks that levels can serve. Read-only; chunks of one group, in order."""
        found: list[int] = []
        stop = Stop.COMPLETE
        for chunk in chunks:
            where = self.find(chunk.key)
            if where < 0:
                entry = self.primary.get(chunk.key)
                stop = Stop.PENDING if entry is not None and entry.state is PENDING else Stop.MISS
                break
            found.append(where)
        hit = chunks[: len(found)]
        return PrefixHit(tuple(hit), tuple(found), hit[-1].end_token if hit else 0, stop, tuple(chunks))

    def statistics(self) -> list[LevelStatistics]:
        return [level.statistics() for level in self.levels]

    def take_transfers(self) -> list[Transfer]:
        """Copies and deletions to run, oldest first. Each must come back through :meth:`finish`."""
        taken = list(self._outbox)
        self._outbox.clear()
        return taken

    def take_events(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken

    # -- storing ------------------------------------------------------------------------------------------------

    def offer(
        self, chunks: Sequence[Chunk], *, shielded: Collection[ChunkKey] = NOTHING, tentative: bool = False
    ) -> Offer:
        """Reserve primary slots for chunks that somebody is about to fill.

        Of what fits in part the leading part is taken, leading by ``end_token`` across groups. A key given twice takes
        one slot. Nothing offered, shielded, held or pending is evicted to make room; a full refusal changes nothing.
        ``tentative`` callers offer what was FULL again if told to ``retry``: it is counted only then.
        """
        # Sorting is stable, and quick where they are in order.
        reserved = self.offer_new(sorted(chunks, key=_end_token) if len(chunks) > 1 else chunks, shielded)
        if reserved is not None:
            return Offer(reserved, [], [])
        level = self.levels[0]
        present, refused, wanted = self._sift(chunks)
        n_twice = len(chunks) - len(present) - len(refused) - len(wanted)
        if len(wanted) > 1:
            wanted.sort(key=_end_token)
        reserved = self._take_primary(wanted, chunks, shielded) if wanted else []
        if len(reserved) < len(wanted):
            refused += [(chunk, Reason.FULL) for chunk in wanted[len(reserved) :]]
        n_again = len(wanted) - len(reserved) if tentative else 0
        retry = n_again > 0 and self.primary_busy
        n_again = n_again if retry else 0
        level.counts.offered += len(chunks) - n_again
        level.counts.present += len(present) + n_twice
        for _, reason in refused[: len(refused) - n_again]:
            level.counts.refuse(reason)
        if level.min_free_nbytes:
            self._trim(level, chunks, shielded)
        return Offer(reserved, present, refused, retry)

    def commit_store(self, entries: Sequence[Entry]) -> None:
        """The device's bytes are in these slots: the chunks can be read, and lower levels follow."""
        level = self.levels[0]
        stored = entries
        if self.primary.quarantined_nbytes:
            stored = [entry for entry in entries if entry.state is not GONE]
            for entry in entries:
                if entry.state is GONE:
                    self._writer_ended(level, entry)
        self.primary.commit(stored)
        self._emit_all(level, EventKind.STORED, stored)
        level.counts.stored += len(stored)
        for lower in self.cascades:
            self._enqueue(lower, 0, stored, demote=False)
        if level.min_free_nbytes:
            self._trim(level)

    def abort_store(self, entries: Iterable[Entry], reason: Reason, *, ended: bool = True) -> None:
        """The bytes did not come. With ``ended=False`` a copy may still run: call again once it has ended."""
        level = self.levels[0]
        for entry in entries:
            if entry.state is not GONE:
                self._leave(level, entry, reason)
            if ended:
                self._writer_ended(level, entry)

    # -- using --------------------------------------------------------------------------------------------------

    def access(self, chunks: Sequence[Chunk]) -> None:
        """One request used these chunks, given in prefix order. Every level that holds one is told, once a request."""
        for level in self.levels:
            get = level.ledger.get
            used = [(entry, chunk) for chunk in chunks if (entry := get(chunk.key)) is not None]
            if used:
                level.ledger.access(used)

    def count_hits(self, hit: PrefixHit) -> None:
        for where in hit.levels:
            self.levels[where].counts.hits += 1

    def hold(self, *entries: Entry) -> None:
        """Pin primary entries, pending or ready, each named once, until :meth:`release`."""
        self.primary.hold(*entries)

    def release(self, *entries: Entry) -> None:
        """Take back one pin of each."""
        self._release(self.levels[0], *entries)

    def guard(self, keys: Iterable[ChunkKey]) -> None:
        """Ban the eviction of keys at every level, also where a chunk has no entry yet, until :meth:`unguard`.

        For a prefix that is being promoted in several goes: what makes room for its head must not evict its tail below.
        """
        self.guarded.update(keys)

    def unguard(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            self.guarded[key] -= 1
            if not self.guarded[key]:
                del self.guarded[key]

    def promote(
        self, chunks: Sequence[Chunk], *, limit: int | None = None, shielded: Collection[ChunkKey] = NOTHING
    ) -> list[Entry]:
        """Bring leading chunks to the primary: their primary entries, ready, pending or newly reserved, in order.

        Stops at the first chunk that no level can serve, or for which there is no slot. At most ``limit`` new slots are
        taken. Evicts neither ``chunks`` nor what is shielded, held or pending.
        """
        sources = self._sources(chunks, limit)
        for _, level, below in sources.values():
            level.ledger.hold(below)  # making room above may take a demotion, and that makes room below
        for entry in self._take_primary([chunk for chunk, _, _ in sources.values()], chunks, shielded):
            _, level, below = sources.pop(entry.key)
            entry.promoted = True
            self._launch(TransferKind.PROMOTE, (level.index, 0), below, entry)
        for _, level, below in sources.values():
            self._release(level, below)
        self._trim(self.levels[0], chunks, shielded)
        entries: list[Entry] = []
        for chunk in chunks:
            known = self.primary.get(chunk.key)
            if known is None or self.primary.expired(known):
                break
            entries.append(known)
        return entries

    def _sources(self, chunks: Sequence[Chunk], limit: int | None) -> dict[ChunkKey, tuple[Chunk, LevelBooks, Entry]]:
        """For the leading chunks that can be served: those that the primary lacks, and what to read them from."""
        sources: dict[ChunkKey, tuple[Chunk, LevelBooks, Entry]] = {}
        for chunk in chunks:
            entry = self.primary.get(chunk.key)
            if entry is not None and self.primary.expired(entry):
                if entry.holds:
                    break
                self._leave(self.levels[0], entry, Reason.EXPIRED)
                entry = None
            if entry is not None or chunk.key in sources:
                continue
            found = next(((lower, below) for lower in self.levels[1:] if (below := lower.readable(chunk.key))), None)
            if found is None or (limit is not None and len(sources) >= limit):
                break
            sources[chunk.key] = (of_its_tenant(chunk, found[1].kind.tenant), *found)
        return sources

    # -- forgetting ---------------------------------------------------------------------------------------------

    def delete(self, keys: Iterable[ChunkKey], reason: Reason = Reason.DELETED) -> None:
        """Forget keys at every level. Space that a copy or lease still touches stays quarantined until that ends.

        What a persistent tier may hold without our knowing yet (a scan under way) is deleted there, too.
        """
        for key in dict.fromkeys(keys):
            for level in self.levels:
                waiting = level.waiting.pop(key, None)
                if waiting is not None:
                    self._refuse(level, waiting, reason)
                entry = level.ledger.get(key)
                if entry is not None:
                    self._leave(level, entry, reason)
                elif key not in level.leaving and not level.plan.settled(key):
                    self._expel(level, bare(key, 0), 0)
        self._pump_up()

    def reset(self, levels: Iterable[int] | None = None) -> None:
        """Forget everything at the given levels, all by default. Copies under way end into quarantine.

        What a persistent tier has not told of yet (its scan is under way) is deleted as it comes.
        """
        chosen = [self.levels[i] for i in levels] if levels is not None else self.levels
        for level in chosen:
            if level.index and level.plan.scans:
                level.purging, level.n_quiet = True, 0
            self._refuse_waiting(level, Reason.RESET)
            for entry in list(level.ledger):
                self._leave(level, entry, Reason.RESET)
        self._pump_up()

    def _expel(self, level: LevelBooks, chunk: Chunk, charge_nbytes: int) -> None:
        """Have the tier delete a chunk that the ledger never knew, and that nobody was told of."""
        entry = level.stuck.get(chunk.key)  # a deletion that failed, to be tried again
        if entry is None:
            entry = level.ledger.insert_found(chunk, charge_nbytes, owned=True)
            assert entry is not None, "only called for unknown keys"
            level.ledger.remove(entry, evicted=False)
        elif charge_nbytes > entry.charge_nbytes:  # it failed before anybody knew how long the file is
            level.ledger.recharge(entry, charge_nbytes)
        level.leaving[chunk.key] = entry
        self._settle(level, entry)

    # -- what tiers report --------------------------------------------------------------------------------------

    def absorb(self, index: int, found: Iterable[Found]) -> None:
        """Enter what a persistent tier reports and still has. Keys that are known or leaving stay as they are."""
        level = self.levels[index]
        for item in found:
            # On its way out, or out by now: a tier's answer may be older than the deletion that ended since.
            if item.key in level.leaving or (item.owned and not level.plan.owns(item.key)):
                continue
            chunk = item.chunk
            if chunk is None:
                chunk = bare(item.key, min(item.charge_nbytes, self.levels[0].plan.slot_nbytes))
            if level.purging and item.owned and level.ledger.get(item.key) is None:
                if (waiting := level.waiting.pop(item.key, None)) is not None:
                    self._refuse(level, waiting, Reason.BUSY)
                self._expel(level, chunk, item.charge_nbytes)
                level.n_quiet = 0
                continue
            new = level.ledger.insert_found(chunk, item.charge_nbytes, owned=item.owned)
            if new is not None:
                self._emit(level, EventKind.STORED, new)
            if (waiting := level.waiting.pop(item.key, None)) is not None:  # what should have been written is there
                level.counts.present += 1
                self._forget(level, waiting)
            if item.key in level.stuck and (entry := level.ledger.get(item.key)) and entry.owned and entry.stored:
                self._unstick(level, item.key)
        self._pump_up(index)

    def refresh(self) -> None:
        """Follow shares that changed and tiers that became writable; trim. Cheap; call it between steps."""
        for level in self.levels:
            if level.index and level.plan.share is not None:
                level.ledger.capacity_nbytes = level.plan.share()
            if level.purging and level.plan.writable():
                # A tier turns writable when all that its scan found waits to be absorbed, and that takes no pause.
                level.n_quiet += 1
                level.purging = level.n_quiet < 2
            for entry in level.ledger.expired_entries(SLICE):
                self._leave(level, entry, Reason.EXPIRED)
            self._retry_stuck(level)
        self._pump_up()

    def set_open(self, index: int, *, is_open: bool) -> None:
        """Whether there is a tier at all: while it is not open the level answers misses and drops writes."""
        traffic = Traffic.FLOWS if is_open else Traffic.STOPPED
        self.set_traffic(index, reads=traffic, writes=traffic)

    def set_traffic(self, index: int, *, reads: Traffic, writes: Traffic) -> None:
        """A level's breakers. Stopped reads are misses, stopped writes are dropped; on trial, all but one at a time."""
        level = self.levels[index]
        for door, traffic in ((level.reads, reads), (level.writes, writes)):
            if door.traffic is not traffic:
                door.set(traffic)
        if writes is Traffic.STOPPED:
            self._refuse_waiting(level, Reason.TIER_BROKEN)
        self._pump_up(index)

    # -- proof --------------------------------------------------------------------------------------------------

    @property
    def at_rest(self) -> bool:
        """No copy, deletion or waiting write, no pending or quarantined space."""
        return self.is_quiet and not any(level.stuck for level in self.levels)

    @property
    def is_quiet(self) -> bool:
        """As ``at_rest``, but for deletions that a medium refuses: they wait for its better days."""
        return not self._flights and all(
            not each.waiting and not each.ledger.n_pending and each.ledger.n_gone == len(each.stuck)
            for each in self.levels
        )

    def check(self) -> None:
        """Recount everything that is kept incrementally. For tests; O(n)."""
        check_books(self.levels, list(self._flights.values()))
