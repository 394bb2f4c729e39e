"""Two equal hierarchies over one set of real bytes, and everything that must hold after each step.

The rig does what the Mover, the tiers and the device do: it runs transfers, but at any time and in any order, and as
late as can be: a copy reads and writes its slot only when it ends, so that a slot given back too early shows as wrong
bytes. The second hierarchy gets the same calls, with its sets built in another order, and must answer the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tests.property.world import BY_KEY, KEYS, SLOT, File, Medium, SecondOffer, content, make_policy
from tierkv._breaker import Traffic
from tierkv._hierarchy import ABSENT, UNSETTLED, Hierarchy
from tierkv._hints import Hints
from tierkv._ledger import GONE, PENDING, READY, Entry
from tierkv._level import LevelBooks, LevelPlan, Writes
from tierkv.testing import ManualClock
from tierkv.types import Chunk, ChunkKey, Event, EventKind, Found, Outcome, Reason, Status, Transfer, TransferKind

T = TypeVar("T")
Twins = tuple[Entry, Entry]
EVICTIONS = {Reason.EVICTED, Reason.DEMOTED, Reason.DEMOTE_DROPPED}
WRITES = {TransferKind.CASCADE, TransferKind.DEMOTE}


@dataclass(frozen=True)
class LowerSetup:
    """A level below the primary, as the machine draws it."""

    writes: Writes
    capacity_nbytes: int
    policy: str
    queue_nbytes: int
    rounded: bool
    second_offer: bool
    scanned: bool
    """Its total is known from the start, so that it takes writes."""


def rounded_charge(nbytes: int) -> int:
    return -(-(nbytes + 16) // 16) * 16


class Watched(Hierarchy):
    """A hierarchy that says who was turned down by which level; counters only say how many were."""

    def __init__(self, plans: Sequence[LevelPlan], *, recycles: bool) -> None:
        super().__init__(plans, record_events=True, recycles=recycles)
        self.turned_down: set[tuple[int, ChunkKey]] = set()
        """In the latest call, of those that asked for room there."""

    def _wants(self, level: LevelBooks, chunk: Chunk, charge: int) -> bool:
        known = level.ledger.get(chunk.key)
        wanted = super()._wants(level, chunk, charge)
        if known is not None and level.ledger.get(chunk.key) is None:
            self.turned_down.add((level.index, chunk.key))  # its copy has expired, and so would the next one
        return wanted

    def _refusal(self, level: LevelBooks, chunk: Chunk, charge: int) -> Reason | None:
        reason = super()._refusal(level, chunk, charge)
        if reason is not None and (reason is not Reason.BUSY or chunk.key in level.hanging):
            self.turned_down.add((level.index, chunk.key))
        return reason


class Lower:
    """What the rig keeps of one lower level: its medium, and what its tier says of itself."""

    def __init__(self, setup: LowerSetup) -> None:
        self.setup = setup
        self.medium = Medium()
        self.share_nbytes = setup.capacity_nbytes
        self.writable = setup.scanned
        self.hidden: set[ChunkKey] = set()
        """Files of an earlier process that the scan has not reached."""
        self.stuck: dict[ChunkKey, int] = {}
        """Keys whose latest deletion failed, and their charges: on the medium, though the index has forgotten them."""

    def charge(self, nbytes: int) -> int:
        return rounded_charge(nbytes) if self.setup.rounded else nbytes

    def plan(self, index: int, clock: ManualClock, low_water: float, *, twin: bool) -> LevelPlan:
        return LevelPlan(
            name=f"level{index}",
            capacity_nbytes=self.setup.capacity_nbytes,
            policy=make_policy(self.setup.policy, clock, twin=twin),
            admission=SecondOffer() if self.setup.second_offer else None,
            writes=self.setup.writes,
            charge=rounded_charge if self.setup.rounded else None,
            queue_nbytes=self.setup.queue_nbytes,
            writable=lambda: self.writable,
            settled=lambda _: self.writable,  # a scan that has come to its end knows both
            owns=lambda key: key in self.medium.owned,
            scans=True,
            share=lambda: self.share_nbytes,
            high_water=low_water / 2,
            low_water=low_water,
        )


@dataclass(eq=False)
class Flying:
    """A transfer under way."""

    transfer: Transfer
    past_deadline: bool = False


@dataclass(eq=False)
class Store:
    """A slot that the device is filling."""

    entries: Twins
    aborted: bool = False


@dataclass(eq=False)
class Held:
    """One pin of a lease."""

    entries: Twins
    key: ChunkKey


class Rig:
    def __init__(
        self,
        n_slots: int,
        policy: str,
        lowers: Sequence[LowerSetup],
        low_water: float = 0.0,
        *,
        recycles: bool = False,
    ) -> None:
        self.clock = ManualClock()
        self.lowers = [Lower(setup) for setup in lowers]
        self.h, self.twin = (
            Watched(
                [
                    LevelPlan(
                        "primary", 0, make_policy(policy, self.clock, twin=twin), n_slots=n_slots, slot_nbytes=SLOT
                    ),
                    *(lower.plan(i + 1, self.clock, low_water, twin=twin) for i, lower in enumerate(self.lowers)),
                ],
                recycles=recycles,
            )
            for twin in (False, True)
        )
        self.hints = [Hints([level.ledger for level in h.levels], self.clock) for h in (self.h, self.twin)]
        self.slots = [b"\0" * SLOT for _ in range(n_slots)]
        self.n_levels = 1 + len(self.lowers)
        self.flying: dict[int, Flying] = {}
        self.stores: list[Store] = []
        self.held: list[Held] = []
        self.ready: set[tuple[int, ChunkKey]] = set()
        """Rebuilt from events alone."""
        self.fresh_events: list[Event] = []
        """Events of the latest call."""
        self.fresh_transfers: list[Transfer] = []
        self.tenants: dict[tuple[int, int], Entry] = {}
        """Who had a slot in which of its generations."""
        self.whole = True
        """The latest call was proved: False once anything has failed."""

    def generation_of(self, slot: int) -> int:
        """Of whoever has the slot now, though it may have left the index."""
        primary = self.h.primary
        return next(entry.generation for entry in [*primary, *primary.gone()] if entry.slot == slot)

    # -- calls --------------------------------------------------------------------------------------------------

    def call(
        self,
        act: Callable[[Hierarchy, int], T],
        *,
        keep: Collection[ChunkKey] = (),
        may_lose: Collection[tuple[int, ChunkKey]] = (),
    ) -> tuple[T, T]:
        """Do the same to both hierarchies and prove what must hold after every call.

        Args:
            act: the call, given the hierarchy and 0 or 1.
            keep: primary keys that this call may not evict.
            may_lose: pending (level, key) pairs that this call may end without a commit.
        """
        self.whole = False
        before = {(i, e.key): e for i in range(self.n_levels) for e in self.h.levels[i].ledger}
        pending = {at for at, entry in before.items() if entry.state is PENDING}
        self.h.turned_down.clear()
        self.n_stored = [level.counts.stored for level in self.h.levels]
        n_dropped = [level.counts.dropped[Reason.DEMOTE_DROPPED] for level in self.h.levels]
        answers = act(self.h, 0), act(self.twin, 1)
        self.fresh_events, self.fresh_transfers = self.h.take_events(), self.h.take_transfers()
        assert self.fresh_events == self.twin.take_events(), "same operations, same events (11)"
        assert self.fresh_transfers == self.twin.take_transfers(), "same operations, same transfers (11)"
        self.note_transfers()
        self.note_events(before)
        for index, level in enumerate(self.h.levels):
            told = sum(e.level == index and e.reason is Reason.DEMOTE_DROPPED for e in self.fresh_events)
            assert level.counts.dropped[Reason.DEMOTE_DROPPED] - n_dropped[index] == told, "drops are counted (8)"
        gone = {e.key for e in self.fresh_events if e.level == 0 and e.reason in EVICTIONS}
        assert not gone & set(keep), "what was offered, promoted or shielded is no victim (6, 9)"
        committed = {(e.level, e.key) for e in self.fresh_events if e.kind is EventKind.STORED}
        for index, key in pending - committed - set(may_lose):
            entry = self.h.levels[index].ledger.get(key)
            assert entry is before[index, key], "what is pending is no victim (6)"
        guarded = {e.key for e in self.fresh_events if e.reason in EVICTIONS and self.h.guarded[e.key]}
        assert not guarded, "what is guarded is no victim at any level"
        self.check()
        self.whole = True
        return answers

    def ready_below(self, index: int, key: ChunkKey) -> bool:
        return any((lower, key) in self.ready for lower in range(index + 1, self.n_levels))

    def keeps_below(self, index: int, key: ChunkKey) -> bool:
        """A lower level has a copy that has not expired, whether it can be read now or not."""
        found = [
            (level, level.ledger.get(key)) for level in self.h.levels[index + 1 :] if (level.index, key) in self.ready
        ]
        return any(entry is not None and not level.ledger.expired(entry) for level, entry in found)

    def note_transfers(self) -> None:
        """A copy or deletion begins: nothing under way may be in its way."""
        for new in self.fresh_transfers:
            for other in (flying.transfer for flying in self.flying.values()):
                if other.chunk.key != new.chunk.key:
                    continue
                assert not self.clash(new, other), f"{new} overlaps {other}"
            if new.slot is not None:
                assert self.generation_of(new.slot) == new.generation
            if new.kind in WRITES:
                level = self.h.levels[new.target]
                assert level.ledger.free_nbytes >= 0, "nothing is written into room that is not there"
                assert level.writes.traffic is not Traffic.STOPPED and self.lowers[new.target - 1].writable
            self.flying[new.id] = Flying(new)

    @staticmethod
    def clash(new: Transfer, other: Transfer) -> bool:
        """Two transfers of one key that touch the same file, one of them changing it."""

        def touches(t: Transfer) -> tuple[set[int], set[int]]:
            reads = {t.source} if t.kind is not TransferKind.DELETE else set()
            writes = {t.source} if t.kind is TransferKind.DELETE else {t.target}
            return reads - {0}, writes - {0}

        new_reads, new_writes = touches(new)
        reads, writes = touches(other)
        return bool(new_writes & (writes | reads) or writes & new_reads)

    def note_events(self, before: dict[tuple[int, ChunkKey], Entry]) -> None:
        for event in self.fresh_events:
            at = (event.level, event.key)
            if event.kind is EventKind.STORED:
                assert at not in self.ready, "stored and removed alternate (10)"
                self.ready.add(at)
                continue
            assert at in self.ready, "stored and removed alternate (10)"
            assert event.reason is not None
            self.ready.discard(at)
            if event.reason not in EVICTIONS:
                continue
            entry = before.get(at)
            assert entry is None or entry.state is not GONE or not entry.holds, "what is held is no victim (6)"
            lower = self.h.levels[event.level + 1 :]
            if not lower or lower[0].plan.writes is Writes.CASCADE:
                assert event.reason is Reason.EVICTED
            elif event.reason is Reason.DEMOTED:
                assert self.ready_below(event.level, event.key), "demoted means that there is a copy below (8)"
            else:
                assert event.reason is Reason.DEMOTE_DROPPED
                turned_down = (lower[0].index, event.key) in self.h.turned_down
                turned_down |= entry is None or any(map(entry.turned_down, self.n_stored_since(lower[0])))
                refused = turned_down or not lower[0].writes.lets_through
                assert refused, "dropped only if the level below would not take it (8)"

    def n_stored_since(self, level: LevelBooks) -> range:
        """What a level had stored at some moment of the latest call."""
        return range(self.n_stored[level.index], level.counts.stored + 1)

    # -- proof --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.h.check()
        self.twin.check()
        self.check_holds()
        for index, level in enumerate(self.h.levels):
            statistics = level.statistics()
            assert (
                statistics.free_nbytes
                + statistics.ready_nbytes
                + statistics.pending_nbytes
                + statistics.quarantined_nbytes
                == statistics.capacity_nbytes
            ), "conservation (1)"
            index_now = {(index, e.key) for e in level.ledger if e.state is READY}
            assert index_now == {at for at in self.ready if at[0] == index}, "events tell the index (10)"
            assert not index or not level.waiting or self.is_awaited(index), "nothing waits for what hangs (3)"
        self.check_bytes()
        for key in KEYS:
            assert self.h.find(key) == self.expected_find(key)

    def is_awaited(self, index: int) -> bool:
        """Writes that wait for a level will be told: it is not theirs to write yet, or something under way will end."""
        level = self.h.levels[index]
        told_to_wait = not level.writes.lets_through or not self.lowers[index - 1].writable
        ending = [f.transfer for f in self.flying.values() if not f.past_deadline]
        return (
            told_to_wait
            or any(index in (transfer.source, transfer.target) for transfer in ending)
            or any(waiting.source_level == index for lower in level.lower for waiting in lower.waiting.values())
        )

    def expected_find(self, key: ChunkKey) -> int:
        for index, level in enumerate(self.h.levels):
            entry = level.ledger.get(key)
            if (
                (index, key) in self.ready
                and level.reads.lets_through
                and entry is not None
                and not level.ledger.expired(entry)
            ):
                return index
        probed = any(level.reads.lets_through and not level.plan.settled(key) for level in self.h.levels[1:])
        return UNSETTLED if probed else ABSENT

    def check_holds(self) -> None:
        """Each hold is a lease's, a copy's or a waiting write's, and each of those has one."""
        expected: dict[int, int] = {}
        for pin in self.held:
            expected[id(pin.entries[0])] = expected.get(id(pin.entries[0]), 0) + 1
        for flight in self.h._flights.values():
            if flight.transfer.kind is not TransferKind.DELETE:
                expected[id(flight.source)] = expected.get(id(flight.source), 0) + 1
        for level in self.h.levels:
            for waiting in level.waiting.values():
                expected[id(waiting.source)] = expected.get(id(waiting.source), 0) + 1
        for level in self.h.levels:
            for entry in [*level.ledger, *level.ledger.gone()]:
                assert entry.n_pins == expected.get(id(entry), 0)

    def check_bytes(self) -> None:
        for entry in self.h.primary:
            tenant = self.tenants.setdefault((entry.slot, entry.generation), entry)
            assert tenant is entry, "a slot that is reused has another generation"
            if entry.state is READY:
                assert self.slots[entry.slot].startswith(content(entry.key)), "no wrong bytes (2)"
        for lower, level in zip(self.lowers, self.h.levels[1:], strict=True):
            ledger = level.ledger
            booked = ledger.pending_nbytes + ledger.ready_nbytes + ledger.quarantined_nbytes
            assert lower.medium.owned_nbytes <= booked, "the books never say less than the medium holds (1)"

    # -- what the device and the tiers do -----------------------------------------------------------------------

    def fill(self, store: Store, *, well: bool) -> None:
        """The device writes a slot, now, because until its copy has ended it may at any time."""
        entry = store.entries[0]
        data = content(entry.key) if well else b"half of something"
        self.slots[entry.slot] = data.ljust(SLOT, b"\0")

    def end(self, flying: Flying, fault: Status | None) -> None:
        """A transfer ends, and is told of by itself."""
        transfer = flying.transfer
        key, status = transfer.chunk.key, self.do(transfer, fault)
        may_lose = {(transfer.target, key)} if status is not Status.OK else set()
        self.call(lambda h, _: h.finish(transfer.id, Outcome(key, status)), may_lose=may_lose)
        self.check_ends([(flying, status)])

    def end_all(self, some: Sequence[tuple[Flying, Status | None]]) -> None:
        """Transfers end, and are told of at once; whatever they do to slots and media they have done by then."""
        ends = [(flying, self.do(flying.transfer, fault)) for flying, fault in some]
        lost = [flying.transfer for flying, status in ends if status is not Status.OK]
        told = [(f.transfer.id, Outcome(f.transfer.chunk.key, status), True) for f, status in ends]
        may_lose = {(transfer.target, transfer.chunk.key) for transfer in lost}
        self.call(lambda h, _: h.finish_all(told), may_lose=may_lose)
        self.check_ends(ends)

    def check_ends(self, ends: Sequence[tuple[Flying, Status]]) -> None:
        for flying, status in ends:
            transfer = flying.transfer
            key = transfer.chunk.key
            if transfer.kind is not TransferKind.DELETE and status in (Status.MISSING, Status.CORRUPT):
                assert (transfer.source, key) not in self.ready, "what is missing or rotten is believed in no more"
            if transfer.kind is not TransferKind.DELETE and status is not Status.OK and not flying.past_deadline:
                assert (transfer.target, key) not in self.ready, "what was not copied is not there"

    def do(self, transfer: Transfer, fault: Status | None) -> Status:
        """Whatever a transfer does to slots and media it does now."""
        if transfer.slot is not None:
            assert self.generation_of(transfer.slot) == transfer.generation, "a slot in use is not reused"
        if transfer.kind is TransferKind.PROMOTE:
            status = self.end_promote(transfer, fault)
        elif transfer.kind is TransferKind.DELETE:
            status = self.end_delete(transfer, fault)
        else:
            status = self.end_write(transfer, fault)
        del self.flying[transfer.id]
        return status

    def end_promote(self, transfer: Transfer, fault: Status | None) -> Status:
        assert transfer.slot is not None
        medium = self.lowers[transfer.source - 1].medium
        key = transfer.chunk.key
        if fault is Status.MISSING:
            medium.lose(key)
        if fault is Status.CORRUPT:
            medium.spoil(key)
        data = medium.read(key)
        if fault in (Status.FAILED, Status.REFUSED):
            self.slots[transfer.slot] = b"half of something".ljust(SLOT, b"\0")
            return Status.FAILED
        self.slots[transfer.slot] = (data or b"").ljust(SLOT, b"\0")
        if data is None:
            return Status.MISSING
        if data != content(key):
            medium.lose(key)
            return Status.CORRUPT
        return Status.OK

    def end_write(self, transfer: Transfer, fault: Status | None) -> Status:
        key, lower = transfer.chunk.key, self.lowers[transfer.target - 1]
        if transfer.slot is not None:
            data: bytes | None = self.slots[transfer.slot][: BY_KEY[key].nbytes]
            assert data == content(key), "the source keeps its bytes until the copy has ended"
        else:
            data = self.lowers[transfer.source - 1].medium.read(key)
        if fault is not None:
            return Status.REFUSED if fault is Status.REFUSED else Status.FAILED
        if data is None:
            return Status.MISSING
        if data != content(key):
            self.lowers[transfer.source - 1].medium.lose(key)
            return Status.CORRUPT
        lower.medium.owned[key] = File(data, lower.charge(transfer.chunk.nbytes))
        lower.hidden.discard(key)
        lower.stuck.pop(key, None)
        return Status.OK

    def end_delete(self, transfer: Transfer, fault: Status | None) -> Status:
        key, lower = transfer.chunk.key, self.lowers[transfer.source - 1]
        if fault in (Status.FAILED, Status.REFUSED, Status.CORRUPT):
            lower.stuck[key] = self.h._flights[transfer.id].source.charge_nbytes
            return Status.FAILED
        there = lower.medium.owned.pop(key, None) or key in lower.hidden
        lower.hidden.discard(key)
        lower.stuck.pop(key, None)
        return Status.OK if there else Status.MISSING

    def miss_deadline(self, flying: Flying) -> None:
        flying.past_deadline = True
        transfer = flying.transfer
        outcome = Outcome(transfer.chunk.key, Status.FAILED, Reason.DEADLINE)
        self.call(
            lambda h, _: h.finish(transfer.id, outcome, ended=False),
            may_lose={(transfer.target, transfer.chunk.key)},
        )

    def absorb(self, index: int, items: Sequence[tuple[ChunkKey, bool, bool]]) -> None:
        """A scan reports files (key, owned, whole record): new ones, and such as the ledger knows in any state."""
        level, lower = self.h.levels[index], self.lowers[index - 1]
        found = []
        unknown = {key for key, owned, _ in items if owned and level.ledger.get(key) is None}
        purging = level.purging
        for key, owned, whole in items:
            if owned:
                lower.hidden.discard(key)
            chunk, entry = BY_KEY[key], level.ledger.get(key)
            medium = lower.medium
            charge = medium.owned[key].charge_nbytes if key in medium.owned else lower.charge(chunk.nbytes)
            if (entry is None and key not in level.leaving) or (entry is not None and not entry.owned and owned):
                if owned:
                    medium.foreign.pop(key, None)
                    medium.owned.setdefault(key, File(content(key), charge))
                    lower.stuck.pop(key, None)
                else:
                    medium.foreign.setdefault(key, File(content(key), charge))
            found.append(Found(key, charge, owned, chunk if whole else None))
        self.call(lambda h, _: h.absorb(index, found))
        told = {e.key for e in self.fresh_events if e.level == index and e.kind is EventKind.STORED}
        assert not purging or not told & (unknown - {key for key, owned, _ in items if not owned}), "reset means reset"

    def absorb_stale(self, index: int, keys: Sequence[ChunkKey]) -> None:
        """An answer comes that is older than the end of what it tells of."""
        lower = self.lowers[index - 1]
        gone = [key for key in keys if key not in lower.medium.owned]
        self.call(lambda h, _: h.absorb(index, [Found(key, lower.charge(BY_KEY[key].nbytes)) for key in gone]))
        told = {event.kind for event in self.fresh_events if event.level == index}
        assert EventKind.STORED not in told, "what is gone stays gone"

    def abort(self, store: Store, reason: Reason, *, ended: bool = True) -> None:
        """The device's copy into a slot failed, or (not ended) is given up while it runs."""
        store.aborted = True
        if ended:
            self.stores.remove(store)
            self.fill(store, well=False)
        lost = {(0, store.entries[0].key)}
        self.call(lambda h, i: h.abort_store([store.entries[i]], reason, ended=ended), may_lose=lost)

    def breaker(self, index: int, *, reads: Traffic = Traffic.FLOWS, writes: Traffic = Traffic.FLOWS) -> None:
        self.call(lambda h, _: h.set_traffic(index, reads=reads, writes=writes))
        assert writes is not Traffic.STOPPED or not self.h.levels[index].waiting

    def release(self, pin: Held) -> None:
        entry = pin.entries[0]
        if entry.stored:
            assert self.slots[entry.slot].startswith(content(pin.key)), "a leased slot keeps its bytes"
        self.held.remove(pin)
        self.call(lambda h, i: h.release(pin.entries[i]))

    # -- rest ---------------------------------------------------------------------------------------------------

    def run_dry(self) -> None:
        """End every transfer well, and those that follow. They must come to an end (3)."""
        for _ in range(300):
            if not self.flying:
                break
            self.end(next(iter(self.flying.values())), None)
        assert not self.flying, "transfers breed for ever"
        stores = sum(store.entries[0].state is PENDING for store in self.stores)
        assert self.h.primary.n_pending == stores, "nothing stays pending (3)"
        for index, level in enumerate(self.h.levels):
            if index:
                assert not level.ledger.n_pending, "nothing stays pending (3)"
                told_to_wait = not all(lower.writable for lower in self.lowers[index - 1 :])
                assert not level.waiting or told_to_wait, "nothing waits for ever (3)"

    def rest(self) -> None:
        """Everybody goes home: no space is pending, pinned or quarantined, and the media hold what the index says."""
        for pin in list(self.held):
            self.release(pin)
        for store in list(self.stores):
            self.abort(store, Reason.CANCELLED)
        for index, lower in enumerate(self.lowers):
            lower.writable = True
            self.breaker(index + 1)
        self.call(lambda h, _: h.refresh())
        self.run_dry()
        for index, level in enumerate(self.h.levels):
            ledger = level.ledger
            assert not ledger.n_held and not ledger.pending_nbytes
            if not index:
                assert not ledger.quarantined_nbytes and not ledger.n_gone
                continue
            lower = self.lowers[index - 1]
            assert ledger.quarantined_nbytes == sum(lower.stuck.values())
            known = {entry.key for entry in ledger if entry.owned}
            assert set(lower.medium.owned) <= known | set(lower.stuck), "no orphan is left on a medium"
