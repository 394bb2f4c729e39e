"""One level's books against a model that keeps nothing but what the caller did."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.property.world import CHUNKS, KEYS, PATHS, SLOT, ancestors, make_policy
from tierkv._entry import Columns
from tierkv._hints import Hint, Hints
from tierkv._ledger import GONE, PENDING, READY, Entry, Ledger, State
from tierkv.testing import ManualClock
from tierkv.types import Chunk, ChunkKey

CAPACITY = 5 * SLOT
HINTS = [Hint.DEAD, Hint.DEAD, Hint.KEEP, Hint.TTL(2.0), Hint.TTL(5.0)]


def charge_of(nbytes: int) -> int:
    """What a payload costs on a level that is bounded in bytes: a header, and rounding."""
    return -(-(nbytes + 8) // 16) * 16


@dataclass(eq=False)
class Line:
    """What the model knows of one entry."""

    entry: Entry
    charge_nbytes: int
    parent: ChunkKey | None
    state: State = PENDING
    owned: bool = True
    holds: int = 0
    writing: bool = False


class LedgerMachine(RuleBasedStateMachine):
    """Any legal calls in any order, with slots and with bytes."""

    policy_name = "lru"
    slotted = True
    recycles = False

    @initialize()
    def begin(self) -> None:
        self.clock = ManualClock()
        self.policy = make_policy(self.policy_name, self.clock)
        self.ledger = Ledger(
            name="level",
            capacity_nbytes=CAPACITY,
            policy=self.policy,
            charge=None if self.slotted else charge_of,
            n_slots=5 if self.slotted else None,
            slot_nbytes=SLOT,
            recycles=self.recycles,
        )
        self.hints = Hints([self.ledger], self.clock)
        self.capacity = CAPACITY
        self.until_s: dict[ChunkKey, float] = {}
        self.lines: dict[ChunkKey, Line] = {}
        self.gone: list[Line] = []
        self.generations = [0] * 5

    def charge(self, chunk: Chunk) -> int:
        return SLOT if self.slotted else charge_of(chunk.nbytes)

    def charged(self, state: State) -> int:
        lines = self.gone if state is GONE else [line for line in self.lines.values() if line.state is state]
        return sum(line.charge_nbytes for line in lines if line.owned)

    @property
    def free(self) -> int:
        return self.capacity - self.charged(PENDING) - self.charged(READY) - self.charged(GONE)

    def pick(self, data: st.DataObject, lines: list[Line]) -> Line:
        return lines[data.draw(st.integers(0, len(lines) - 1), label="which")]

    def begins(self, key: ChunkKey) -> None:
        """A lifetime that is over says nothing of a chunk that is stored anew."""
        if self.is_over(key):
            del self.until_s[key]

    def is_over(self, key: ChunkKey) -> bool:
        return self.until_s.get(key, inf) <= self.clock.now_s

    # -- rules --------------------------------------------------------------------------------------------------

    @rule(path=st.sampled_from(PATHS), n=st.integers(1, 4))
    def reserve(self, path: list[Chunk], n: int) -> None:
        """The leading chunks that fit get room, and only they."""
        chunks = [chunk for chunk in path[:n] if chunk.key not in self.lines]
        free, expected = self.free, []
        for chunk in chunks:
            if self.charge(chunk) > free:
                break
            free -= self.charge(chunk)
            expected.append(chunk)
        alone = self.slotted and len(chunks) == 1 and expected
        taken = [self.ledger.reserve_one(*chunks)] if alone else self.ledger.reserve(chunks)
        assert [entry.chunk for entry in taken] == expected
        self.entered(taken)

    @precondition(lambda self: self.slotted)
    @rule(path=st.sampled_from(PATHS), n=st.integers(1, 4), chained=st.booleans())
    def reserve_columns(self, path: list[Chunk], n: int, chained: bool) -> None:
        """The same for chunks by column, which are of one kind."""
        path = [chunk._replace(nbytes=SLOT, parent=chunk.parent if chained else None, group=0) for chunk in path]
        missing = [chunk.key not in self.lines for chunk in path]
        if not any(missing):
            return
        start = missing.index(True)
        chunks = [chunk for chunk, absent in zip(path[start : start + n], missing[start:], strict=False) if absent]
        chunks = chunks[
            : next((i for i in range(1, len(chunks)) if chained and chunks[i].parent != chunks[i - 1].key), n)
        ]
        columns = Columns(
            [chunk.key for chunk in chunks],
            [chunk.end_token for chunk in chunks],
            chunks[0].parent,
            chained,
            self.ledger.kinds.of_chunk(chunks[0]),
        )
        assert columns.chunks() == chunks
        taken = self.ledger.reserve_columns(columns)
        assert [entry.chunk for entry in taken] == chunks[: self.free // SLOT]
        self.entered(taken)

    def entered(self, taken: list[Entry]) -> None:
        for entry in taken:
            assert not any(line.entry is entry for line in [*self.lines.values(), *self.gone]), "it is nobody else's"
            self.begins(entry.key)
            self.lines[entry.key] = Line(entry, self.charge(entry.chunk), entry.chunk.parent, writing=True)
            if self.slotted:
                assert entry.generation > self.generations[entry.slot], "whoever had it before can tell"
                self.generations[entry.slot] = entry.generation

    @precondition(lambda self: self.slotted and not self.ledger.expires)
    @rule(n=st.integers(1, 4), spared=st.sets(st.sampled_from(KEYS), max_size=3))
    def evict_at_once(self, n: int, spared: set[ChunkKey]) -> None:
        """Exactly those leave, and at once, who would be the first victims."""
        expected = [entry.key for entry in self.ledger.victims(None, spared, n * SLOT)]
        entries = [entry for key in sorted(spared) if (entry := self.ledger.get(key)) is not None and entry.owned]
        gone = self.ledger.evict(n, entries)
        if gone is None:
            return
        assert [entry.key for entry in gone] == expected
        for key in expected:
            del self.lines[key]

    @precondition(lambda self: any(line.state is PENDING for line in self.lines.values()))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        line = self.pick(data, [line for line in self.lines.values() if line.state is PENDING])
        self.ledger.commit((line.entry,))
        line.state, line.writing = READY, False

    @precondition(lambda self: not self.slotted)
    @rule(chunk=st.sampled_from(CHUNKS), owned=st.booleans(), extra=st.sampled_from([0, 16]), bare=st.booleans())
    def found(self, chunk: Chunk, owned: bool, extra: int, bare: bool) -> None:
        """A scan brings what lies on the medium, whether there is room for it or not; often only the name."""
        chunk = chunk._replace(parent=None) if bare else chunk
        charge = charge_of(chunk.nbytes) + extra
        line = self.lines.get(chunk.key)
        entry = self.ledger.insert_found(chunk, charge, owned=owned)
        if line is None:
            assert entry is not None
            if owned:
                self.begins(chunk.key)
            self.lines[chunk.key] = Line(entry, charge, chunk.parent, READY, owned)
            return
        assert entry is None, "what is known stays as it is"
        if owned and not line.owned:
            self.begins(chunk.key)
            line.owned, line.charge_nbytes = True, charge

    @precondition(lambda self: self.lines)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        """Several at once, each once."""
        held = data.draw(st.permutations(list(self.lines.values())), label="which")[: data.draw(st.integers(1, 3))]
        self.ledger.hold(*[line.entry for line in held])
        for line in held:
            line.holds += 1

    @precondition(lambda self: any(line.holds for line in [*self.lines.values(), *self.gone]))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = [line for line in [*self.lines.values(), *self.gone] if line.holds]
        released = data.draw(st.permutations(held), label="which")[: data.draw(st.integers(1, 3))]
        self.ledger.release(*[line.entry for line in released])
        for line in released:
            line.holds -= 1

    @rule(path=st.sampled_from(PATHS), stranger=st.booleans())
    def access(self, path: list[Chunk], stranger: bool) -> None:
        """A request uses what is here; a handle whose chunk has left by now is ignored."""
        used = [(self.lines[chunk.key].entry, chunk) for chunk in path if chunk.key in self.lines]
        if stranger and self.gone:
            used.append((self.gone[0].entry, self.gone[0].entry.chunk))
        self.ledger.access(used)
        for entry, chunk in used:
            line = self.lines.get(chunk.key)
            if line is not None and line.entry is entry and line.parent is None:
                line.parent = chunk.parent

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4), hint=st.sampled_from(HINTS))
    def hint(self, keys: list[ChunkKey], hint: Hint) -> None:
        """Whatever state they are in; what is not here, not ours or over is ignored, and counted."""
        ours = {key for key in keys if key in self.lines and self.lines[key].owned}
        over = {key for key in ours if self.is_over(key)}
        assert all(self.ledger.expired(self.lines[key].entry) for key in over if self.lines[key].state is READY)
        answer = self.hints.give(keys, hint)
        assert answer == (len(ours - over), len(set(keys) - (ours - over)))
        if hint.ttl_s is not None:
            self.until_s.update((key, self.clock.now_s + hint.ttl_s) for key in ours - over)

    @rule(seconds=st.sampled_from([1.0, 3.0, 4000.0]))
    def tick(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule(
        enough=st.integers(0, CAPACITY),
        protect=st.sets(st.sampled_from(KEYS), max_size=3),
        unwanted=st.sets(st.sampled_from(KEYS), max_size=3),
    )
    def evict(self, enough: int, protect: set[ChunkKey], unwanted: set[ChunkKey]) -> None:
        """Victims are the policy's, less what is pending, held, protected or unwanted, and their ancestors."""
        chosen = self.ledger.victims(lambda entry: entry.key not in unwanted, protect, enough)
        keys = [entry.key for entry in chosen]
        stay = {key for key, line in self.lines.items() if line.state is PENDING or line.holds}
        stay |= protect | unwanted
        assert not stay & set(keys)
        gained = [self.lines[key].charge_nbytes for key in keys]
        assert sum(gained[:-1]) < enough or not gained, "no more than needed"
        if self.policy_name in {"lru", "lru_seats"}:
            ours = [key for key in sorted(stay) if key in self.lines and self.lines[key].owned]
            kept = {up for key in ours for up in self.resident_ancestors(key) if not self.is_over(up)}
            assert not kept & set(keys), "nor their ancestors, but for those whose lifetime is over: nobody finds them"
        if sum(gained) < enough:
            kept = {up for key in stay for up in ancestors(key)}
            idle = {key for key, line in self.lines.items() if line.owned} - kept
            assert idle <= set(keys), "nothing idle was overlooked"
        for entry in chosen:
            self.leave(self.lines[entry.key], evicted=not self.is_over(entry.key))

    def resident_ancestors(self, key: ChunkKey) -> set[ChunkKey]:
        found: set[ChunkKey] = set()
        parent = self.lines[key].parent
        while parent is not None and parent in self.lines and self.lines[parent].owned:
            found.add(parent)
            parent = self.lines[parent].parent
        return found

    @precondition(lambda self: self.lines)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """A delete, a reset or an abort: whatever state it is in."""
        self.leave(self.pick(data, list(self.lines.values())), evicted=False)

    def leave(self, line: Line, *, evicted: bool) -> None:
        del self.lines[line.entry.key]
        self.ledger.remove(line.entry, evicted=evicted)
        line.state = GONE
        self.gone.append(line)

    @precondition(lambda self: any(line.writing for line in self.gone))
    @rule(data=st.data())
    def writer_ended(self, data: st.DataObject) -> None:
        line = self.pick(data, [line for line in self.gone if line.writing])
        self.ledger.writer_ended(line.entry)
        line.writing = False

    @precondition(lambda self: any(not line.writing and not line.holds for line in self.gone))
    @rule(data=st.data())
    def free_space(self, data: st.DataObject) -> None:
        line = self.pick(data, [line for line in self.gone if not line.writing and not line.holds])
        assert line.entry.settled
        self.ledger.free(line.entry)
        self.gone.remove(line)

    @precondition(lambda self: any(line.writing or line.holds for line in self.gone))
    @rule(data=st.data())
    def free_too_early(self, data: st.DataObject) -> None:
        """Space that something still touches is never given back."""
        line = self.pick(data, [line for line in self.gone if line.writing or line.holds])
        with pytest.raises(AssertionError):
            self.ledger.free(line.entry)

    @precondition(lambda self: not self.slotted)
    @rule(capacity=st.integers(0, CAPACITY))
    def resize(self, capacity: int) -> None:
        self.ledger.capacity_nbytes = self.capacity = capacity

    # -- invariants ---------------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "ledger"):
            return
        ledger, everybody = self.ledger, [*self.lines.values(), *self.gone]
        ledger.check()
        assert {entry.key: entry.state for entry in ledger} == {key: line.state for key, line in self.lines.items()}
        assert all(ledger.get(key) is line.entry for key, line in self.lines.items())
        assert (ledger.pending_nbytes, ledger.ready_nbytes) == (self.charged(PENDING), self.charged(READY))
        assert (ledger.quarantined_nbytes, ledger.free_nbytes) == (self.charged(GONE), self.free)
        held = [line for line in everybody if line.holds]
        assert (ledger.n_held, ledger.held_nbytes) == (len(held), sum(line.charge_nbytes for line in held))
        assert ledger.n_gone == len(self.gone) == len(ledger.gone())
        assert len(ledger) == len(self.lines)

    def teardown(self) -> None:
        """At rest nothing is pending, held or quarantined, and all room is free."""
        if not hasattr(self, "ledger"):
            return
        for line in [*self.lines.values(), *self.gone]:
            for _ in range(line.holds):
                self.ledger.release(line.entry)
            if line.state is not GONE:
                self.ledger.remove(line.entry, evicted=False)
            self.ledger.writer_ended(line.entry)
            self.ledger.free(line.entry)
        self.ledger.check()
        assert self.ledger.free_nbytes == self.capacity
        assert not len(self.ledger) and not self.ledger.n_gone and not list(self.policy.victims())


@pytest.mark.parametrize(
    ("policy", "slotted", "recycles"),
    [
        pytest.param("lru", True, False, id="lru-slots"),
        pytest.param("lru", True, True, id="lru-recycled"),
        pytest.param("lru", False, False, id="lru-bytes"),
        pytest.param("lru_seats", True, False, id="seats-slots"),
        pytest.param("lru_seats", True, True, id="seats-recycled"),
        pytest.param("lru_seats", False, False, id="seats-bytes"),
        pytest.param("fifo", True, False, id="fifo-slots"),
        pytest.param("in_order", False, False, id="in_order-bytes"),
    ],
)
def test_ledger_agrees_with_its_model(policy: str, slotted: bool, recycles: bool) -> None:
    """Whatever is called in whatever order, the books are what a recount says (A5), for each kind of policy."""
    machine = type("Machine", (LedgerMachine,), {"policy_name": policy, "slotted": slotted, "recycles": recycles})
    run_state_machine_as_test(machine)
