"""One level's books: which chunk is here, in which slot, in what state, and who may leave.

Synchronous, no I/O, no clock, no thread: it belongs to the thread of the :class:`~tierkv._hierarchy.Hierarchy` that
owns it. Every fact is kept once, and :meth:`Ledger.check` recounts all of them.

States of an entry are in :mod:`tierkv._entry`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

from tierkv._entry import GONE, OWNED, PENDING, READY, STORED, WRITER, Columns, Entry, Kinds, State, of_its_tenant
from tierkv._order import KeyedOrder, SeatedOrder
from tierkv._recount import recount
from tierkv._slots import Slots, fitting
from tierkv.protocols import Admission, EvictionPolicy, Expiring, Seating
from tierkv.types import Chunk, ChunkKey

__all__ = ("GONE", "PENDING", "READY", "Entry", "Ledger", "State")


class Ledger:
    """The index, slots, bytes and order of one level.

    Args:
        name: the level's name, for messages.
        capacity_nbytes: bytes the level may hold. For a slotted ledger ``n_slots * slot_nbytes``.
        policy: order in which READY entries leave.
        admission: who may enter; asked by the hierarchy through :meth:`admits`.
        charge: bytes that a payload of a given length occupies; identity by default. Ignored with slots.
        n_slots: number of fixed slots, or None for a level that is bounded in bytes only.
        slot_nbytes: bytes charged for each slot.
        recycles: entries that :meth:`evict` let go are the next chunks' entries. Then nobody may keep an entry that he
            does not hold, from one call to the next.
    """

    def __init__(
        self,
        *,
        name: str,
        capacity_nbytes: int,
        policy: EvictionPolicy,
        admission: Admission | None = None,
        charge: Callable[[int], int] | None = None,
        n_slots: int | None = None,
        slot_nbytes: int = 0,
        recycles: bool = False,
    ) -> None:
        self.name = name
        self.capacity_nbytes = capacity_nbytes if n_slots is None else n_slots * slot_nbytes
        self.pending_nbytes = self.ready_nbytes = 0
        self.quarantined_nbytes = self.foreign_nbytes = self.held_nbytes = 0
        self.n_pending = self.n_held = self.n_foreign = 0
        self._admission = admission
        self._charge = charge
        self._recycles = recycles
        self._slots = None if n_slots is None else Slots(n_slots, slot_nbytes)
        self.kinds = Kinds()
        self._index: dict[ChunkKey, Entry] = {}
        self._gone: dict[int, Entry] = {}
        self.free_slots: tuple[Sequence[int], Sequence[Entry]] = ((), ()) if self._slots is None else self._slots.lists
        """Together as many as there are free slots; the ledger's own lists, whose lengths every offer asks for."""
        self.get = self._index.get
        """``get(key) -> Entry | None``; the dict's own method, since lookups are counted in nanoseconds."""
        self.follow(policy)

    def follow(self, policy: EvictionPolicy) -> None:
        """Evict in this order from now on. A later one wraps the one before, so it knows of everything that is here."""
        self.policy = policy
        self._order = (
            SeatedOrder(policy, self._index) if isinstance(policy, Seating) else KeyedOrder(policy, self._index)
        )
        self._expiring = policy if isinstance(policy, Expiring) else None
        self.expires = self._expiring is not None
        """The policy lets chunks expire."""

    # -- reading ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._index.values())

    @property
    def free_nbytes(self) -> int:
        """Negative while a shared root's share has shrunk below what this owner holds."""
        return self.capacity_nbytes - self.pending_nbytes - self.ready_nbytes - self.quarantined_nbytes

    def lacks(self, keys: AbstractSet[ChunkKey], n_keys: int) -> bool:
        """Whether these are ``n_keys`` keys, none of which is here."""
        return len(keys) == n_keys and self._index.keys().isdisjoint(keys)

    @property
    def n_gone(self) -> int:
        """Entries out of the index whose space is quarantined."""
        return len(self._gone)

    def gone(self) -> Sequence[Entry]:
        return tuple(self._gone.values())

    def coldest_first(self) -> list[Chunk]:
        """READY chunks of ours in the order in which they would leave, for the next run to remember. O(n)."""
        entries = (self._index[key] for key in self.policy.victims())
        return [entry.chunk for entry in entries if entry.state is READY]

    def charge(self, chunk: Chunk) -> int:
        if self._slots is not None:
            return self._slots.slot_nbytes
        return chunk.nbytes if self._charge is None else self._charge(chunk.nbytes)

    def admits(self, chunk: Chunk) -> bool:
        return self._admission is None or self._admission.admits(chunk)

    def expired(self, entry: Entry) -> bool:
        """True if the policy lets chunks expire and this READY one has: it answers a miss."""
        expiring = self._expiring
        return expiring is not None and entry.state is READY and entry.owned and expiring.expired(entry.chunk)

    # -- entering -----------------------------------------------------------------------------------------------

    def reserve(self, chunks: Sequence[Chunk]) -> list[Entry]:
        """Take free space for the leading chunks that fit, none of which may be in the index. Evicts nothing."""
        slots = self._slots
        if slots is None:
            taken = fitting(chunks, self.free_nbytes, self.charge, self.kinds)
        else:
            taken = slots.fill_each(chunks, self.kinds)
        if taken:
            self._enter([entry.key for entry in taken], taken)
            self._order.insert(taken, chunks if len(taken) == len(chunks) else chunks[: len(taken)])
        return taken

    def reserve_columns(self, columns: Columns) -> list[Entry]:
        """:meth:`reserve` for one or more chunks by column, in a level with slots."""
        assert self._slots is not None
        taken = self._slots.fill(columns)
        if taken:
            self._enter(columns.keys, taken)
            self._order.seat(taken)
        return taken

    def _enter(self, keys: Sequence[ChunkKey], taken: Sequence[Entry]) -> None:
        index, n_before = self._index, len(self._index)
        index.update(zip(keys, taken, strict=False))
        assert len(index) == n_before + len(taken), "a key is reserved once"
        self.n_pending += len(taken)
        self.pending_nbytes += self._charged(taken)

    def reserve_one(self, chunk: Chunk) -> Entry:
        """:meth:`reserve` for one chunk while a slot is free, and its key is not in the index."""
        assert self._slots is not None and chunk[0] not in self._index, "a key is reserved once"
        entry = self._index[chunk[0]] = self._slots.fill_one(chunk, self.kinds)
        self.n_pending += 1
        self.pending_nbytes += entry.charge_nbytes
        self._order.insert((entry,), (chunk,))
        return entry

    def commit(self, entries: Sequence[Entry]) -> None:
        """The copies into these PENDING entries have ended well: they can be read."""
        pending, ready = PENDING, READY
        for entry in entries:
            assert entry.state is pending, "each is committed once"
            entry.state = ready
            entry.flags |= STORED
            entry.holds -= WRITER
        nbytes = self._charged(entries)
        self.n_pending -= len(entries)
        self.pending_nbytes -= nbytes
        self.ready_nbytes += nbytes
        self._order.commit(entries)

    def insert_found(self, chunk: Chunk, charge_nbytes: int, *, owned: bool) -> Entry | None:
        """Enter a chunk that already lies on the medium; None if the key is here already.

        A foreign entry that turns out to be ours now (its owner died and we adopted its files) becomes ours.
        """
        known = self._index.get(chunk.key)
        if known is not None:
            if owned and not known.owned:
                self._own(known, charge_nbytes)
            return None
        entry = Entry(chunk, self.kinds.of_chunk(chunk), charge_nbytes, READY, owned=owned)
        self._index[chunk.key] = entry
        if owned:
            self.ready_nbytes += charge_nbytes
            self._order.insert((entry,), (chunk,))
        else:
            self.n_foreign += 1
            self.foreign_nbytes += charge_nbytes
        return entry

    def _own(self, entry: Entry, charge_nbytes: int) -> None:
        self.n_foreign -= 1
        self.foreign_nbytes -= entry.charge_nbytes
        if entry.holds:
            self.held_nbytes += charge_nbytes - entry.charge_nbytes
        entry.owned = True
        entry.charge_nbytes = charge_nbytes
        self.ready_nbytes += charge_nbytes
        self._order.seat((entry,))

    # -- using --------------------------------------------------------------------------------------------------

    def access(self, used: Iterable[tuple[Entry, Chunk]]) -> None:
        """One request used these entries, given in prefix order.

        The chunk beside an entry may say more than the entry knows (a scan finds names, not parents); it is kept then.
        """
        touched: list[Entry] = []
        learned = False
        for entry, chunk in used:
            if entry.state is GONE:
                continue
            if entry.parent is None:
                told = of_its_tenant(chunk, entry.kind.tenant)
                entry.learn(told, self.kinds.of_chunk(told))
                learned |= chunk.parent is not None
            if entry.flags & OWNED:
                touched.append(entry)
        if touched:
            self._order.access(touched, learned=learned)

    def touch(self, entries: Sequence[Entry]) -> None:
        """:meth:`access` where the caller knows no more of the chunks than their entries do, which are all here."""
        if self.n_foreign:
            entries = [entry for entry in entries if entry.owned]
        if entries:
            self._order.access(entries, learned=False)

    def hold(self, *entries: Entry) -> None:
        """Ban their eviction and the reuse of their space until the matching :meth:`release`. Each is named once."""
        fresh: Sequence[Entry] = entries
        if any([entry.holds for entry in entries]):  # noqa: C419 - a generator takes twice as long
            for entry in entries:
                entry.holds += 1
            fresh = [entry for entry in entries if entry.n_pins == 1]
        else:
            for entry in entries:
                entry.holds = 1
        if fresh:
            self.n_held += len(fresh)
            self.held_nbytes += self._charged(fresh)
            self._order.hold(fresh)

    def release(self, *entries: Entry) -> None:
        """Take back one hold of each, named once."""
        idle: Sequence[Entry] = entries
        if [entry.holds for entry in entries].count(1) == len(entries):
            for entry in entries:
                entry.holds = 0
        else:
            assert all(entry.n_pins for entry in entries), "each release matches a hold"
            for entry in entries:
                entry.holds -= 1
            idle = [entry for entry in entries if not entry.n_pins]
        if idle:
            self.n_held -= len(idle)
            self.held_nbytes -= self._charged(idle)
            self._order.release(idle)

    def _charged(self, entries: Sequence[Entry]) -> int:
        if self._slots is not None:
            return len(entries) * self._slots.slot_nbytes
        return sum([entry.charge_nbytes for entry in entries])

    # -- leaving ------------------------------------------------------------------------------------------------

    def victims(
        self,
        accept: Callable[[Entry], bool | None] | None,
        protect: Collection[ChunkKey | None],
        enough_nbytes: int,
        *,
        at_most: int | None = None,
    ) -> list[Entry]:
        """READY, unheld entries in leaving order that ``accept`` takes, until their charges reach ``enough_nbytes``.

        An ``accept`` of None takes all; one that answers None ends the search, since to look on would cost more than it
        might find. The order names a parent after its children, as if those had left. So the parent of whoever is
        passed over is passed over, too.
        """
        chosen: list[Entry] = []
        gained = 0
        if enough_nbytes <= 0:
            return chosen
        index = self._index
        blocked: set[ChunkKey | None] = set()
        order = self.policy.victims()
        try:
            for key in order:
                entry = index[key]
                may = not entry.holds and key not in protect and key not in blocked
                taken = may and (accept is None or accept(entry))
                if taken:
                    chosen.append(entry)
                    gained += entry.charge_nbytes
                    if gained >= enough_nbytes or len(chosen) == at_most:
                        break
                elif taken is None:
                    break
                else:
                    blocked.add(entry.parent)
        finally:
            if isinstance(order, Generator):
                order.close()
        return chosen

    def evict(self, n_slots: int, spared: Iterable[Entry]) -> list[Entry] | None:
        """:meth:`victims` and :meth:`drop` at once, for slots and a policy that can. None: it cannot."""
        at_once = self._slots is not None and not self.expires  # who leaves as expired is counted one by one
        gone = self._order.evict(n_slots, spared) if at_once else None
        if gone is not None:
            self._vacate(gone, recycle=self._recycles)
        return gone

    def expired_entries(self, at_most: int) -> list[Entry]:
        """Evictable entries that have expired; a policy that lets chunks expire names those first."""
        expired: list[Entry] = []
        if self._expiring is None:
            return expired
        for key in self.policy.victims():
            entry = self._index[key]
            if entry.state is not READY:
                continue  # its age counts from its commit, whatever the policy thinks
            if not self.expired(entry):
                break
            if not entry.holds:
                expired.append(entry)
                if len(expired) == at_most:
                    break
        return expired

    def remove(self, entry: Entry, *, evicted: bool) -> None:
        """Take an entry out of the index. Its space stays quarantined until :meth:`free`."""
        assert entry.state is not GONE
        if entry.owned:
            self._order.remove(entry, evicted=evicted)  # while the index, which it may share, has the key still
        del self._index[entry.key]
        if not entry.owned:
            self.n_foreign -= 1
            self.foreign_nbytes -= entry.charge_nbytes
        else:
            if entry.state is PENDING:
                self.n_pending -= 1
                self.pending_nbytes -= entry.charge_nbytes
            else:
                self.ready_nbytes -= entry.charge_nbytes
            self.quarantined_nbytes += entry.charge_nbytes
        entry.state = GONE
        self._gone[id(entry)] = entry

    def drop(self, entries: Sequence[Entry], *, evicted: bool) -> None:
        """:meth:`remove` and :meth:`free` at once: READY entries of ours that nothing touches, in slots."""
        for entry in entries:
            self._order.remove(entry, evicted=evicted)
        self._vacate(entries)

    def _vacate(self, entries: Sequence[Entry], *, recycle: bool = False) -> None:
        assert self._slots is not None
        popped = [*map(self._index.pop, [entry.key for entry in entries])]  # in C, where cache misses overlap
        assert popped == [*entries], "who leaves is in the index"
        for entry in entries:
            assert not entry.holds
            entry.state = GONE
        if recycle:
            self._slots.spare += entries
        else:
            self._slots.give_back(entries)
        self.ready_nbytes -= self._charged(entries)

    def writer_ended(self, entry: Entry) -> None:
        """No copy touches a GONE entry's space any more. Said again, it changes nothing."""
        assert entry.state is GONE
        if entry.writing:
            entry.holds -= WRITER

    def free(self, entry: Entry) -> None:
        """Give a GONE entry's space back. Nothing may touch it any more."""
        assert entry.state is GONE and entry.settled
        del self._gone[id(entry)]
        if not entry.owned:
            return
        self.quarantined_nbytes -= entry.charge_nbytes
        if self._slots is not None:
            self._slots.give_back((entry,))

    def recharge(self, entry: Entry, charge_nbytes: int) -> None:
        """What a GONE entry of ours still takes is known better now."""
        self.quarantined_nbytes += charge_nbytes - entry.charge_nbytes
        entry.charge_nbytes = charge_nbytes

    # -- proof --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Recount everything that is kept incrementally. For tests; O(n)."""
        recount(self, self._index, list(self._gone.values()), self._slots)
        self._order.check()
