"""Any legal calls to an eviction order, in any sequence, as a level makes them; see :func:`policy_machine`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import ClassVar, Final

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierkv.protocols import EvictionPolicy
from tierkv.testing._clock import ManualClock
from tierkv.testing._keys import salted
from tierkv.testing._policy_turns import Turned
from tierkv.testing._policy_twins import Renamed, Twin, ancestors, with_ancestors
from tierkv.testing._requests import CHUNKS, REQUESTS
from tierkv.testing._rules import require
from tierkv.types import Chunk, ChunkKey, Turn

_KEYS: Final = sorted(CHUNKS)


class PolicyMachine(RuleBasedStateMachine):
    """The base of what :func:`policy_machine` makes; subclass it to add rules of your own order.

    ``resident`` is what a level would hold, ``pending`` what it has reserved but cannot read yet, ``held`` what it has
    pinned. All calls go to :attr:`twins`, of which the first is the order under test.
    """

    make: ClassVar[Callable[..., EvictionPolicy]]
    leaves: ClassVar[bool] = False
    forgets: ClassVar[bool] = True
    pure: ClassVar[bool] = True
    clock: ClassVar[ManualClock | None] = None
    ttl_s: ClassVar[float | None] = None
    turns: ClassVar[bool] = True

    @initialize()
    def begin(self) -> None:
        if self.clock is not None:
            self.clock.restart()
        make = type(self).make
        self.renamed = Renamed()
        self.main = Twin(make(), "")
        self.twins = [
            self.main,
            *([Twin(make(), "being asked for victims changes it")] if self.pure else []),
            Twin(make(), "its order depends on hashes of keys, hence on the hash seed", salted),
        ]
        self.at_once: Twin | None = None
        """A twin whose victims leave in one call, where the order can do that."""
        if self.main.batches is not None and self.main.pins is not None:
            self.at_once = Twin(make(), "evict() takes others than victims() names")
            self.twins.append(self.at_once)
        if self.forgets:
            self.twins.append(Twin(make(), "it remembers a chunk that was deleted, not evicted", self.renamed))
        self.resident: dict[ChunkKey, Chunk] = {}
        self.pending: set[ChunkKey] = set()
        self.held: set[ChunkKey] = set()
        self.born_s: dict[ChunkKey, float] = {}
        self.dead: set[ChunkKey] = set()
        self.turned = Turned()

    # -- entering -----------------------------------------------------------------------------------------------

    @rule(
        request=st.sampled_from(REQUESTS), n=st.integers(1, 4), piece=st.integers(1, 4), commit=st.booleans(),
    )  # fmt: skip
    def store(self, request: tuple[Chunk, ...], n: int, piece: int, *, commit: bool) -> None:
        """A request stores what is missing of its prefix, in pieces; what is there is used."""
        for at in range(0, n, piece):
            part = request[at : min(at + piece, n)]
            fresh = [chunk for chunk in part if chunk.key not in self.resident]
            present = [chunk for chunk in part if chunk.key in self.resident]
            if fresh:
                for twin in self.twins:
                    twin.insert(fresh)
                    for chunk in fresh:
                        twin.hold(chunk)
                for chunk in fresh:
                    self.enter(chunk)
                    self.pending.add(chunk.key)
            if present:
                self.use(present)
        if commit:
            for chunk in request[:n]:
                self.commit(chunk.key)

    @rule(key=st.sampled_from(_KEYS), bare=st.booleans())
    def found(self, key: ChunkKey, *, bare: bool) -> None:
        """A scan brings a chunk that can be read at once; often only its name is known."""
        if key in self.resident:
            return
        self.find(CHUNKS[key]._replace(parent=None) if bare else CHUNKS[key])

    def find(self, chunk: Chunk) -> None:
        for twin in self.twins:
            twin.insert([chunk])
        self.enter(chunk)

    def enter(self, chunk: Chunk) -> None:
        self.resident[chunk.key] = chunk
        self.turned.entered(chunk)
        self.born_s[chunk.key] = self.now_s

    def commit(self, key: ChunkKey) -> None:
        if key not in self.pending:
            return
        self.pending.remove(key)
        self.born_s[key] = self.now_s
        for twin in self.twins:
            twin.commit(CHUNKS[key])
            if key not in self.held:
                twin.release(CHUNKS[key])

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def commit_one(self, data: st.DataObject) -> None:
        self.commit(data.draw(st.sampled_from(sorted(self.pending)), label="key"))

    # -- using --------------------------------------------------------------------------------------------------

    @rule(request=st.sampled_from(REQUESTS), n=st.integers(1, 4))
    def access(self, request: tuple[Chunk, ...], n: int) -> None:
        used = [chunk for chunk in request[:n] if chunk.key in self.resident]
        if used:
            self.use(used)

    def use(self, chunks: list[Chunk]) -> None:
        for twin in self.twins:
            twin.access(chunks)
        for chunk in chunks:
            self.turned.used(chunk)
            if self.resident[chunk.key].parent is None:
                self.resident[chunk.key] = chunk

    @precondition(lambda self: self.resident.keys() - self.held)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.resident.keys() - self.held)), label="key")
        self.held.add(key)
        if key not in self.pending:
            for twin in self.twins:
                twin.hold(CHUNKS[key])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.held)), label="key")
        self.held.remove(key)
        if key not in self.pending:
            for twin in self.twins:
                twin.release(CHUNKS[key])

    @precondition(lambda self: self.main.hints is not None and self.resident)
    @rule(data=st.data(), turn=st.sampled_from(Turn))
    def hint(self, data: st.DataObject, turn: Turn) -> None:
        """A chunk is to leave first, or last, or in its turn again; a level lets go of what it holds for the moment."""
        key = data.draw(st.sampled_from(sorted(self.resident)), label="key")
        for twin in self.twins:
            if key in self.busy:
                twin.release(CHUNKS[key])
            twin.hint(CHUNKS[key], turn)
            if key in self.busy:
                twin.hold(CHUNKS[key])
        self.turned.hinted(key, turn)

    @precondition(lambda self: self.clock is not None)
    @rule(by_s=st.sampled_from([0.5, 1.0, 2.0, 4.0]))
    def time_passes(self, by_s: float) -> None:
        assert self.clock is not None
        self.clock.advance(by_s)

    @property
    def now_s(self) -> float:
        return 0.0 if self.clock is None else self.clock()

    # -- leaving ------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.resident)
    @rule(n=st.integers(1, 4), unwanted=st.sets(st.sampled_from(_KEYS), max_size=2))
    def evict(self, n: int, unwanted: set[ChunkKey]) -> None:
        """A level takes the first victims that it may, and their parents only after them."""
        self.trim()
        chosen = self.choose(self.main, n, unwanted)
        for twin in self.twins[1:]:
            other = self.choose(twin, n, unwanted)
            require(other == chosen, f"the same calls give the same victims; {twin.difference}", chosen, other)
        gone = None
        if self.at_once is not None and not unwanted:
            gone, taken = self.at_once, self.at_once.evict(n)
            require(taken == chosen, "evict() takes what victims() names first, in order", taken, chosen)
        for key in chosen:
            self.leave(key, evicted=True, gone=gone)

    def trim(self) -> None:
        """A level removes all that has expired before it evicts; in which order makes no difference."""
        if self.main.expiring is None:
            return
        for twin in () if self.pure else self.twins[1:]:
            twin.order()
        for key in self.main.order():
            if key not in self.busy and self.main.expired(self.resident[key]):
                self.leave(key, evicted=False)

    def choose(self, twin: Twin, n: int, unwanted: set[ChunkKey]) -> list[ChunkKey]:
        chosen: list[ChunkKey] = []
        blocked: set[ChunkKey | None] = set()
        for key in twin.victims():
            require(key in self.resident, "victims() names resident keys only", key)
            if key in self.busy or key in unwanted or key in blocked:
                blocked.add(self.resident[key].parent)
                continue
            chosen.append(key)
            if len(chosen) == n:
                break
        return chosen

    @precondition(lambda self: self.resident)
    @rule(data=st.data(), back=st.booleans())
    def delete(self, data: st.DataObject, *, back: bool) -> None:
        """A delete, a reset or an abort, in whatever state the chunk is; it may be found again at once."""
        key = data.draw(st.sampled_from(sorted(self.resident)), label="key")
        self.leave(key, evicted=False)
        if back:
            self.find(CHUNKS[key])

    def leave(self, key: ChunkKey, *, evicted: bool, gone: Twin | None = None) -> None:
        """The chunk leaves; ``gone`` has let it go by itself already."""
        for twin in self.twins:
            if twin is not gone:
                twin.remove(CHUNKS[key], evicted=evicted)
        if not evicted:
            self.renamed.deleted(key)
        self.turned.left(self.resident[key])
        del self.resident[key], self.born_s[key]
        self.pending.discard(key)
        self.held.discard(key)
        self.dead.discard(key)

    # -- what must hold -----------------------------------------------------------------------------------------

    @property
    def busy(self) -> set[ChunkKey]:
        return self.held | self.pending

    @precondition(lambda self: hasattr(self, "resident"))
    @invariant()
    def orders_what_is_resident(self) -> None:
        """Each key that may leave is named once; nothing else is; asking again gives the same answer."""
        head, order = self.ask(self.main)
        for twin in () if self.pure else self.twins[1:]:
            self.ask(twin)
        require(len(order) == len(set(order)), "victims() names a key once", order)
        strangers = set(order) - self.resident.keys()
        require(not strangers, "victims() names resident keys only", *strangers)
        may_wait: set[ChunkKey] = set()
        if self.main.pins is not None:
            named = sorted(self.busy & set(order))
            require(not named, "victims() leaves out what is held", *named)
            may_wait = with_ancestors(self.busy, self.resident)
        missing = self.resident.keys() - may_wait - set(order)
        require(not missing, "victims() names every resident key that may leave", *sorted(missing))
        require(not self.pure or order[: len(head)] == head, "asking for victims changes nothing", head, order)
        length = getattr(self.main.policy, "__len__", None)
        require(length is None or length() == len(self.resident), "len() is the number of resident keys")
        if self.leaves:
            self.check_leaves(order)
        if self.main.expiring is not None:
            self.check_expiry(order)
        if self.turns and self.main.hints is not None:
            expired = {key for key in order if self.main.expired(self.resident[key])}
            self.turned.check([key for key in order if key not in expired], self.resident)

    def ask(self, twin: Twin) -> tuple[list[ChunkKey], list[ChunkKey]]:
        """The first two victims, from a question that is not heard to its end, and all of them."""
        begun = twin.victims()
        head = list(islice(begun, 2))
        begun.close()
        return head, twin.order()

    def check_leaves(self, order: list[ChunkKey]) -> None:
        place = {key: i for i, key in enumerate(order)}
        for key in self.resident:
            for ancestor in ancestors(key, self.resident):
                if ancestor not in place:
                    continue
                # What is held is not named, and nothing before it may be; without holds all are named.
                require(
                    key in place and place[key] < place[ancestor],
                    "an order of leaves names a chunk only after those that continue it, and not if one of them stays",
                    ancestor,
                    key,
                )

    def check_expiry(self, order: list[ChunkKey]) -> None:
        ready = [key for key in self.resident if key not in self.pending]
        expired = {key for key in ready if self.main.expired(self.resident[key])}
        revived = self.dead - expired
        require(not revived, "what has expired stays expired until it leaves", *sorted(revived))
        self.dead = expired
        if self.ttl_s is not None:
            due = {key for key in ready if self.now_s - self.born_s[key] >= self.ttl_s}
            require(
                expired == due,
                "a chunk expires ttl_s after its commit, by the clock it was given",
                sorted(expired),
                sorted(due),
            )
        alive = [i for i, key in enumerate(order) if key not in expired]
        first_alive = alive[0] if alive else len(order)
        waits_for_tail = with_ancestors(self.resident.keys() - expired, self.resident)
        late = [key for key in order[first_alive:] if key in expired and key not in waits_for_tail]
        require(not late, "what has expired is named first", *late)

    def teardown(self) -> None:
        """In the end all twins agree on the whole order, and everything can leave."""
        if not hasattr(self, "resident"):
            return
        self.trim()
        order = self.main.order()
        for twin in self.twins[1:]:
            other = twin.order()
            require(other == order, f"the same calls give the same order; {twin.difference}", order, other)
        for key in list(self.resident):
            self.leave(key, evicted=False)
        left = self.main.order()
        require(not left, "an order forgets what leaves", *left)


def policy_machine(
    factory: Callable[[], EvictionPolicy],
    *,
    leaves: bool = False,
    forgets: bool = True,
    pure: bool = True,
    clock: ManualClock | None = None,
    ttl_s: float | None = None,
    turns: bool = True,
) -> type[PolicyMachine]:
    """A Hypothesis state machine for an order; :func:`check_policy` has the arguments.

    ``TestMyOrder = policy_machine(MyOrder).TestCase`` is a test for pytest and unittest.
    """
    more = {"leaves": leaves, "forgets": forgets, "pure": pure, "clock": clock, "ttl_s": ttl_s, "turns": turns}
    return type("PolicyMachine", (PolicyMachine,), {"make": staticmethod(factory), **more})
