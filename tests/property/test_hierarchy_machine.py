"""Hierarchies of two and three levels, driven in any order, with real bytes under them."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.property.rig import Flying, Held, LowerSetup, Rig, Store
from tests.property.world import KEYS, PATHS, TOO_LARGE, ancestors
from tierkv._breaker import Traffic
from tierkv._hierarchy import Offer
from tierkv._hints import Hint
from tierkv._ledger import GONE, PENDING, READY, Entry
from tierkv._level import Writes
from tierkv.types import Chunk, ChunkKey, Reason, Status, TransferKind

setups = st.builds(
    LowerSetup,
    writes=st.sampled_from(Writes),
    capacity_nbytes=st.integers(2, 9).map(lambda n: n * 52),
    policy=st.sampled_from(["lru", "lru_seats", "lru_seats", "lru_by_one", "fifo", "in_order", "fading", "fading"]),
    queue_nbytes=st.sampled_from([100, 200, 1 << 20, 1 << 20]),
    rounded=st.booleans(),
    second_offer=st.sampled_from([False, False, False, True]),
    scanned=st.sampled_from([True, True, False]),
)
requests = st.tuples(st.sampled_from(PATHS), st.integers(1, 4)).map(lambda drawn: drawn[0][: drawn[1]])
key_sets = st.sets(st.sampled_from(KEYS), max_size=2)
hints = st.sampled_from([Hint.DEAD, Hint.DEAD, Hint.KEEP, Hint.TTL(1.0), Hint.TTL(5.0)])
faults = st.sampled_from([None, None, None, None, *Status])


TROUBLE = ["delete", "file_fails", "file_fails", "breaker", "writable", "share", "abort_early", "reset"]


class HierarchyMachine(RuleBasedStateMachine):
    """Any legal calls in any order; :class:`Rig` proves what must hold after each."""

    n_lower = 1
    writes: Writes | None = None
    """The same for all lower levels, or drawn."""

    @initialize(
        data=st.data(),
        n_slots=st.integers(3, 8),
        policy=st.sampled_from(["lru", "lru_seats", "lru_seats", "lru_by_one", "fifo", "in_order", "fading", "fading"]),
        low_water=st.sampled_from([0.0, 0.1, 0.4]),
        recycles=st.booleans(),
    )
    def begin(self, data: st.DataObject, n_slots: int, policy: str, low_water: float, recycles: bool) -> None:
        lowers = [data.draw(setups, label=f"level {i + 1}") for i in range(self.n_lower)]
        if self.writes is not None:
            lowers = [LowerSetup(self.writes, *list(vars(lower).values())[1:]) for lower in lowers]
        self.policy = policy
        self.guards: list[list[ChunkKey]] = []
        self.rig = Rig(n_slots, policy, lowers, low_water, recycles=recycles)
        left = data.draw(st.lists(st.sampled_from(KEYS), max_size=6), label="left by an earlier process")
        if self.rig.lowers[0].writable:
            self.rig.absorb(1, [(key, True, False) for key in left])
        else:
            self.rig.lowers[0].hidden.update(left)
        for part in data.draw(st.lists(requests, max_size=4), label="stored before"):
            self.serve(part)

    # -- storing ------------------------------------------------------------------------------------------------

    @rule(
        parts=st.lists(requests, min_size=1, max_size=2),
        shielded=key_sets,
        huge=st.sampled_from([False] * 5 + [True]),
        tentative=st.booleans(),
    )
    def offer(self, parts: list[list[Chunk]], shielded: set[ChunkKey], huge: bool, tentative: bool) -> None:
        """Requests of several groups at once, with shared heads and keys given twice."""
        rig = self.rig
        chunks = [chunk for part in parts for chunk in part] + [TOO_LARGE] * huge
        before = {entry.key: entry for entry in rig.h.primary}
        offers = rig.call(
            lambda h, i: h.offer(
                chunks, shielded=shielded if not i else sorted(shielded, reverse=True), tentative=tentative
            ),
            keep={chunk.key for chunk in chunks} | shielded,
        )
        rig.stores += [Store(twins) for twins in zip(offers[0].reserved, offers[1].reserved, strict=True)]
        self.check_offer(chunks, offers[0], before)
        self.check_room(chunks, shielded, offers[0])

    def check_offer(self, chunks: list[Chunk], offer: Offer, before: dict[ChunkKey, Entry]) -> None:
        reserved = [entry.key for entry in offer.reserved]
        refused = [chunk for chunk, _ in offer.refused]
        told = [*reserved, *{entry.key for entry in offer.present}, *{chunk.key for chunk in refused}]
        assert sorted(told) == sorted({chunk.key for chunk in chunks}), "each key has one answer"
        assert all(entry.state is PENDING for entry in offer.reserved)
        assert all(entry is before[entry.key] and entry.state is not GONE for entry in offer.present)
        ends = [entry.chunk.end_token for entry in offer.reserved]
        full = [chunk.end_token for chunk, reason in offer.refused if reason is Reason.FULL]
        assert ends == sorted(ends)
        assert not full or not ends or ends[-1] <= min(full), "the leading part is taken (6)"

    def check_room(self, chunks: list[Chunk], shielded: set[ChunkKey], offer: Offer) -> None:
        """No more was evicted than was needed, and nothing was refused while something idle could leave (A1)."""
        rig = self.rig
        evicted = [event for event in rig.fresh_events if event.level == 0 and event.reason is Reason.EVICTED]
        assert len(evicted) <= len(offer.reserved), "a refusal changes nothing (6)"
        if any(reason is Reason.FULL for _, reason in offer.refused):
            busy = {entry.key for entry in rig.h.primary if entry.holds or entry.state is PENDING}
            busy |= shielded | set(rig.h.guarded)
            if rig.h.levels[0].demotes:  # it waits for a copy, or was refused one while its parent was passed over
                busy |= {entry.key for entry in rig.h.primary if not rig.keeps_below(0, entry.key)}
                busy |= {event.key for event in rig.fresh_events if event.level == 0}
            kept = {up for key in busy | {chunk.key for chunk in chunks} for up in ancestors(key)}
            assert {entry.key for entry in rig.h.primary} <= kept, "nothing idle was overlooked"

    @rule(part=requests)
    def store(self, part: list[Chunk]) -> None:
        """A request is stored, and the device is quick."""
        self.offer([part], set(), False, False)
        self.all_stores_end()

    @rule(part=requests)
    def serve(self, part: list[Chunk]) -> None:
        """A whole request: what it hits comes up and is used, the rest is stored."""
        self.promote(part, None, set(), False)
        self.rig.run_dry()
        self.access(part)
        self.store(part)

    @precondition(lambda self: self.rig.stores)
    @rule(data=st.data(), well=st.sampled_from([True, True, True, False]))
    def store_ends(self, data: st.DataObject, well: bool) -> None:
        """The device's copy into a slot has ended, be the chunk still wanted or not."""
        rig = self.rig
        store = rig.stores[data.draw(st.integers(0, len(rig.stores) - 1), label="store")]
        if store.aborted or not well:
            rig.abort(store, Reason.DEVICE_ERROR)
            return
        rig.stores.remove(store)
        rig.fill(store, well=True)
        rig.call(lambda h, i: h.commit_store([store.entries[i]]))

    @precondition(lambda self: self.rig.stores)
    @rule()
    def all_stores_end(self) -> None:
        """One call commits all that is filled: lower levels see many writes at once."""
        rig = self.rig
        stores = [store for store in rig.stores if not store.aborted]
        rig.stores = [store for store in rig.stores if store.aborted]
        for store in stores:
            rig.fill(store, well=True)
        rig.call(lambda h, i: h.commit_store([store.entries[i] for store in stores]))

    # -- using --------------------------------------------------------------------------------------------------

    @rule(
        chunks=requests,
        limit=st.none() | st.integers(0, 3),
        shielded=key_sets,
        lease=st.booleans(),
    )
    def promote(self, chunks: list[Chunk], limit: int | None, shielded: set[ChunkKey], lease: bool) -> None:
        """A request brings what it hits to the primary, perhaps under a lease."""
        rig = self.rig
        where = {chunk.key: rig.h.find(chunk.key) for chunk in chunks}
        before = {entry.key for entry in rig.h.primary}
        pairs = rig.call(
            lambda h, i: h.promote(chunks, limit=limit, shielded=shielded if not i else sorted(shielded)[::-1]),
            keep={chunk.key for chunk in chunks} | shielded,
        )
        entries = pairs[0]
        assert [entry.key for entry in entries] == [chunk.key for chunk in chunks[: len(entries)]], "a prefix"
        assert all(entry.state is not GONE and not rig.h.primary.expired(entry) for entry in entries)
        reads = [transfer for transfer in rig.fresh_transfers if transfer.kind is TransferKind.PROMOTE]
        assert limit is None or len(reads) <= limit
        for transfer in reads:
            key = transfer.chunk.key
            assert key in where and transfer.source == where[key], "read from the fastest level that has it"
        started = {transfer.chunk.key for transfer in reads}
        for entry in entries:
            assert entry.key in started or entry.key in before
        if lease:
            for twins in zip(*pairs, strict=True):
                self.hold(twins)

    def hold(self, twins: tuple[Entry, ...]) -> None:
        pin = Held((twins[0], twins[1]), twins[0].key)
        self.rig.held.append(pin)
        self.rig.call(lambda h, i: h.hold(twins[i]))

    @rule(chunks=requests)
    def guard(self, chunks: list[Chunk]) -> None:
        """A request that promotes its prefix in several goes keeps all of it where it is."""
        keys = [chunk.key for chunk in chunks]
        self.guards.append(keys)
        self.rig.call(lambda h, _: h.guard(keys))

    @precondition(lambda self: self.guards)
    @rule()
    def unguard(self) -> None:
        keys = self.guards.pop(0)
        self.rig.call(lambda h, _: h.unguard(keys))

    @rule(chunks=requests)
    def lease(self, chunks: list[Chunk]) -> None:
        """A request pins what the primary has or will have, maybe for the second time."""
        for chunk in chunks:
            twins = self.rig.h.primary.get(chunk.key), self.rig.twin.primary.get(chunk.key)
            if twins[0] is not None and twins[1] is not None:
                self.hold((twins[0], twins[1]))

    @precondition(lambda self: self.rig.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        rig = self.rig
        rig.release(rig.held[data.draw(st.integers(0, len(rig.held) - 1), label="pin")])

    @rule(chunks=requests)
    def access(self, chunks: list[Chunk]) -> None:
        self.rig.call(lambda h, _: h.access(chunks))

    @rule(chunks=requests, more=key_sets, hint=hints)
    def hint(self, chunks: list[Chunk], more: set[ChunkKey], hint: Hint) -> None:
        """Somebody says what becomes of a request, or of keys from anywhere; be it true or not."""
        keys = [*(chunk.key for chunk in chunks), *more]
        answers = self.rig.call(lambda _, i: self.rig.hints[i].give(keys if not i else list(keys), hint))
        assert answers[0] == answers[1]
        assert not self.rig.fresh_transfers and not self.rig.fresh_events, "a hint moves and deletes nothing"

    # -- transfers ----------------------------------------------------------------------------------------------

    def pick(self, data: st.DataObject, flying: list[Flying]) -> Flying:
        return flying[data.draw(st.integers(0, len(flying) - 1), label="transfer")]

    @precondition(lambda self: self.rig.flying)
    @rule(data=st.data(), fault=faults)
    def transfer_ends(self, data: st.DataObject, fault: Status | None) -> None:
        self.rig.end(self.pick(data, list(self.rig.flying.values())), fault)

    @precondition(lambda self: len(self.rig.flying) > 1)
    @rule(data=st.data(), some_faults=st.lists(faults, min_size=2, max_size=8))
    def transfers_end(self, data: st.DataObject, some_faults: list[Status | None]) -> None:
        """Several have ended, in any order, before anybody looks."""
        ids = data.draw(st.permutations(sorted(self.rig.flying)), label="transfers")
        self.rig.end_all([(self.rig.flying[id_], fault) for id_, fault in zip(ids, some_faults, strict=False)])

    @precondition(lambda self: any(not flying.past_deadline for flying in self.rig.flying.values()))
    @rule(data=st.data())
    def deadline_passes(self, data: st.DataObject) -> None:
        """A transfer is given up on while its thread goes on."""
        self.rig.miss_deadline(self.pick(data, [f for f in self.rig.flying.values() if not f.past_deadline]))

    @rule()
    def run_dry(self) -> None:
        self.rig.run_dry()

    # -- trouble ------------------------------------------------------------------------------------------------

    @rule(data=st.data(), what=st.sampled_from(TROUBLE))
    def trouble(self, data: st.DataObject, what: str) -> None:
        """One rule for all of it: in equal shares with the others nothing would ever be stored."""
        getattr(self, what)(data)

    def draw_level(self, data: st.DataObject) -> int:
        return data.draw(st.integers(1, self.n_lower), label="level")

    def delete(self, data: st.DataObject) -> None:
        rig = self.rig
        keys = data.draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3), label="keys")
        lost = {(i, key) for i in range(rig.n_levels) for key in keys}
        foreign = {(i, e.key) for i, level in enumerate(rig.h.levels) for e in level.ledger if not e.owned}
        rig.call(lambda h, _: h.delete(keys), may_lose=lost)
        assert all(rig.h.find(key) < 0 for key in keys)
        for index, lower in enumerate(rig.lowers, 1):
            doomed = {f.transfer.chunk.key for f in rig.flying.values() if f.transfer.kind is TransferKind.DELETE}
            unseen = {key for key in lower.hidden & set(keys) if (index, key) not in foreign}
            assert lower.writable or unseen <= doomed | set(rig.h.levels[index].leaving), (
                "a scan brings it back no more"
            )

    def reset(self, data: st.DataObject) -> None:
        rig = self.rig
        levels = data.draw(st.none() | st.sets(st.integers(0, self.n_lower), min_size=1), label="levels")
        chosen = range(rig.n_levels) if levels is None else sorted(levels)
        waited = [waiting for i in chosen for waiting in rig.h.levels[i].waiting.values()]
        rig.call(lambda h, _: h.reset(levels), may_lose={(i, key) for i in chosen for key in KEYS})
        begun = {(t.target, t.chunk.key) for t in rig.fresh_transfers if t.source not in chosen}
        there = {(i, entry.key, entry.state) for i in chosen for entry in rig.h.levels[i].ledger}
        assert there <= {(*at, PENDING) for at in begun}, "but for new copies from levels that were not reset"
        waits = [waiting for i in chosen for waiting in rig.h.levels[i].waiting.values()]
        assert not any(old is new for old in waited for new in waits), "what waited is not stored after a reset"

    def file_fails(self, data: st.DataObject) -> None:
        """A file vanishes, or its bytes change, behind everybody's back."""
        medium = self.rig.lowers[self.draw_level(data) - 1].medium
        files = sorted({*medium.owned, *medium.foreign})
        if files:
            key = data.draw(st.sampled_from(files), label="file")
            (medium.spoil if data.draw(st.booleans(), label="rots") else medium.lose)(key)

    def breaker(self, data: st.DataObject) -> None:
        """Reads and writes each flow, are on trial or stopped."""
        level = self.draw_level(data)
        reads, writes = (data.draw(st.sampled_from(Traffic), label=label) for label in ("reads", "writes"))
        self.rig.breaker(level, reads=reads, writes=writes)

    def writable(self, data: st.DataObject) -> None:
        """The tier's total becomes known, or not known again; the hierarchy hears of it at the next refresh."""
        lower = self.rig.lowers[self.draw_level(data) - 1]
        lower.writable = not lower.writable
        if lower.writable:
            self.refresh()

    def share(self, data: st.DataObject) -> None:
        """Other owners come and go, and our share of the root with them."""
        lower = self.rig.lowers[self.draw_level(data) - 1]
        lower.share_nbytes = data.draw(st.integers(0, 9), label="share") * 52
        self.refresh()

    def abort_early(self, data: st.DataObject) -> None:
        """A store is given up while the device still writes its slot."""
        running = [store for store in self.rig.stores if not store.aborted]
        if running:
            store = running[data.draw(st.integers(0, len(running) - 1), label="store")]
            self.rig.abort(store, Reason.CANCELLED, ended=False)

    @rule(seconds=st.sampled_from([2.0, 6.0]))
    def tick(self, seconds: float) -> None:
        self.rig.clock.now_s += seconds

    @rule(
        data=st.data(),
        items=st.lists(st.tuples(st.sampled_from(KEYS), st.booleans(), st.booleans()), min_size=1, max_size=4),
    )
    def scan(self, data: st.DataObject, items: list[tuple[ChunkKey, bool, bool]]) -> None:
        self.rig.absorb(self.draw_level(data), items)

    @rule(data=st.data(), keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4))
    def late_answer(self, data: st.DataObject, keys: list[ChunkKey]) -> None:
        self.rig.absorb_stale(self.draw_level(data), keys)

    @rule()
    def refresh(self) -> None:
        rig = self.rig
        ledgers = [level.ledger for level in rig.h.levels]
        # What a waiting write lets go of in this call is idle only after it.
        idle = [(ledger, entry) for ledger in ledgers for entry in ledger if entry.state is READY and not entry.holds]
        rig.call(lambda h, _: h.refresh())
        assert not any(ledger.expired(entry) for ledger, entry in idle if not entry.holds), "what expired is removed"

    def teardown(self) -> None:
        if hasattr(self, "rig") and self.rig.whole:
            self.rig.rest()


@pytest.mark.timeout(600)  # a failure takes a while to shrink
@pytest.mark.parametrize("writes", [Writes.CASCADE, Writes.DEMOTE], ids=["cascade", "demote"])
def test_two_levels(writes: Writes) -> None:
    """Invariants 1-3 and 6-11 hold after every step over one lower level."""
    run_state_machine_as_test(type("Machine", (HierarchyMachine,), {"writes": writes}))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("writes", [Writes.DEMOTE, None], ids=["demote", "mixed"])
def test_three_levels(writes: Writes | None) -> None:
    """They hold over two lower levels too, where one level's room waits for the next one's."""
    run_state_machine_as_test(type("Machine", (HierarchyMachine,), {"writes": writes, "n_lower": 2}))
