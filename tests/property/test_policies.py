"""Every order, alone and under wrappers: against its textbook form, and for what all of them promise."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.property.test_ledger_machine import CAPACITY, LedgerMachine, charge_of
from tests.property.world import SLOT
from tierkv._hints import Hints
from tierkv._ledger import Ledger
from tierkv.policies import ARC, FIFO, LFU, LRU, MQ, S3FIFO, SIEVE, TTL, LeafFirst, Quota, TwoQ, _stamp_heap
from tierkv.protocols import BatchEvicting, EvictionPolicy, Expiring, PinAware
from tierkv.testing import ManualClock
from tierkv.types import Chunk, ChunkKey

Maker = Callable[[ManualClock], Any]


def some(part: int) -> settings:
    """A part of the profile's examples: there are many orders."""
    return settings(max_examples=settings().max_examples // part)


N_KEYS = 14
ORDERS: dict[str, Callable[[], Any]] = {
    "lru": LRU, "fifo": FIFO, "lfu": LFU, "arc": ARC, "s3fifo": S3FIFO, "sieve": SIEVE, "two_q": TwoQ, "mq": MQ,
}  # fmt: skip


class NoHolds:
    """A third party's order that knows no holds, for the wrappers: oldest use first, batch by batch."""

    def __init__(self) -> None:
        self._order: OrderedDict[ChunkKey, None] = OrderedDict()

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        for chunk in reversed(chunks):
            self._order.setdefault(chunk.key)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        for chunk in reversed(chunks):
            if chunk.key in self._order:
                self._order.move_to_end(chunk.key)

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        self._order.pop(key, None)

    def victims(self) -> Any:
        yield from list(self._order)


def without_clock(make: Callable[[], Any], wrap: Callable[[Any], Any] = lambda order: order) -> Maker:
    return lambda _: wrap(make())


LEAFY: dict[str, Maker] = {f"leaf_first > {name}": without_clock(make, LeafFirst) for name, make in ORDERS.items()}
LEAFY |= {
    "lru": lambda _: LRU(),
    "leaf_first > no_holds": lambda _: LeafFirst(NoHolds()),
    "leaf_first > ttl > mq": lambda clock: LeafFirst(TTL(MQ(), 5.0, clock)),
    "leaf_first > quota > arc": lambda _: LeafFirst(Quota({"t0": 2}, ARC())),
}
WRAPPED: dict[str, Maker] = {
    "ttl > lru": lambda clock: TTL(LRU(), 5.0, clock),
    "ttl > leaf_first > mq": lambda clock: TTL(LeafFirst(MQ()), 5.0, clock),
    "ttl > no_holds": lambda clock: TTL(NoHolds(), 5.0, clock),
    "quota > leaf_first > s3fifo": lambda _: Quota({"t0": 2, "t1": 0}, LeafFirst(S3FIFO())),
    "quota > ttl > sieve": lambda clock: Quota({"t0": 1}, TTL(SIEVE(), 5.0, clock)),
    "quota > no_holds": lambda _: Quota({"t1": 1}, NoHolds()),
}
ALL: dict[str, Maker] = {**{name: without_clock(make) for name, make in ORDERS.items()}, **LEAFY, **WRAPPED}


def key_of(i: int) -> ChunkKey:
    return ChunkKey(b"key-%02d" % i)


KEYS = [key_of(i) for i in range(N_KEYS)]


def chunk_of(i: int, parent: int | None) -> Chunk:
    return Chunk(key_of(i), None if parent is None else key_of(parent), nbytes=1, tenant=f"t{i % 3}")


def any_parent(i: int) -> st.SearchStrategy[int | None]:
    """Mostly the parent in a fixed tree; else unknown, or something that no honest caller says."""
    honest = i // 2 - 1 if i >= 2 else None
    return st.sampled_from([honest, honest, honest, None]) | st.integers(0, N_KEYS - 1)


def walk(turns: Sequence[int]) -> list[Chunk]:
    """A path from a root of the fixed tree (children of i are 2i+2 and 2i+3; the roots are 0 and 1)."""
    path: list[Chunk] = []
    parent: int | None = None
    for turn in turns:
        i = turn if parent is None else 2 * parent + 2 + turn
        if i >= N_KEYS:
            break
        path.append(chunk_of(i, parent))
        parent = i
    return path


hostile = st.integers(0, N_KEYS - 1).flatmap(lambda i: any_parent(i).map(lambda parent: chunk_of(i, parent)))
paths = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(walk)
batches = paths | st.lists(hostile, max_size=5)


class Tree:
    """Who is resident, held, whose child: from the calls alone."""

    def __init__(self) -> None:
        self.parents: dict[ChunkKey, ChunkKey | None] = {}
        self.held: set[ChunkKey] = set()

    def learn(self, chunks: Sequence[Chunk], *, insert: bool) -> None:
        for chunk in chunks if insert else reversed(chunks):
            if insert:
                self.parents.setdefault(chunk.key, None)
            learns = self.parents.get(chunk.key, chunk.key) is None and chunk.parent is not None
            if learns and chunk.key not in self.line(chunk.parent):
                self.parents[chunk.key] = chunk.parent

    def line(self, key: ChunkKey | None) -> list[ChunkKey]:
        """The key and its ancestors."""
        found: list[ChunkKey] = []
        while key is not None:
            found.append(key)
            key = self.parents.get(key)
        return found

    def remove(self, key: ChunkKey) -> None:
        self.parents.pop(key, None)
        self.held.discard(key)


class PolicyMachine(RuleBasedStateMachine):
    """Any calls in any order. After each: everybody once, nobody held, children first, and asking changes nothing."""

    make: Maker
    leaves: bool
    static: bool

    @initialize(slack=st.sampled_from([0, 64]))
    def begin(self, slack: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(_stamp_heap, "_SLACK", slack)
        self.clock = ManualClock()
        self.policy = type(self).make(self.clock)
        self.tree = Tree()

    @rule(chunks=batches)
    def insert(self, chunks: list[Chunk]) -> None:
        self.policy.on_insert(chunks)
        self.tree.learn(chunks, insert=True)

    @rule(chunks=batches)
    def access(self, chunks: list[Chunk]) -> None:
        """Keys that are not resident are asked for in vain, or have a ghost."""
        self.policy.on_access(chunks)
        self.tree.learn(chunks, insert=False)

    @rule(key=st.sampled_from(KEYS), evicted=st.booleans())
    def remove(self, key: ChunkKey, evicted: bool) -> None:
        """Any key: middles of chains, held ones, and such as are not resident."""
        self.policy.on_remove(key, evicted=evicted)
        self.tree.remove(key)

    @precondition(lambda self: self.tree.parents)
    @rule(n=st.integers(1, 5), keep=st.sets(st.integers(0, 4), max_size=2))
    def evict(self, n: int, keep: set[int]) -> None:
        """What a level does: take some victims, end the iteration, remove some of them."""
        for i, key in enumerate(list(islice(self.policy.victims(), n))):
            if i not in keep:
                self.policy.on_remove(key, evicted=True)
                self.tree.remove(key)

    @precondition(lambda self: isinstance(self.policy, BatchEvicting))
    @rule(n=st.integers(0, 5))
    def evict_batch(self, n: int) -> None:
        """Many at once are the same as one by one."""
        expected = list(islice(self.policy.victims(), n))
        assert self.policy.evict(n) == expected
        for key in expected:
            self.tree.remove(key)

    @rule(key=st.sampled_from(KEYS))
    def hold(self, key: ChunkKey) -> None:
        self.policy.hold(key)
        if key in self.tree.parents:
            self.tree.held.add(key)

    @rule(key=st.sampled_from(KEYS))
    def release(self, key: ChunkKey) -> None:
        self.policy.release(key)
        self.tree.held.discard(key)

    @precondition(lambda self: hasattr(self.policy, "on_commit"))
    @rule(key=st.sampled_from(KEYS))
    def commit(self, key: ChunkKey) -> None:
        self.policy.on_commit(key)

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0]))
    def tick(self, seconds: float) -> None:
        self.clock.now_s += seconds

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()

    @invariant()
    def promises(self) -> None:
        if not hasattr(self, "policy"):
            return
        order = list(self.policy.victims())
        again = list(self.policy.victims())
        assert again[:1] == order[:1] and set(again) == set(order), "asking changes nothing"
        # Under LeafFirst an order that weighs two queues sees parents out of its way the second time.
        assert not self.static or again == order
        assert len(order) == len(set(order)), "once each"
        resident, held = set(self.tree.parents), self.tree.held
        kept = {up for key in held for up in self.tree.line(key)} if self.leaves else held
        assert set(order) <= resident - held
        assert set(order) >= resident - {up for key in held for up in self.tree.line(key)}
        assert not self.leaves or not kept & set(order), "what is held keeps its ancestors"
        if self.leaves:
            place = {key: i for i, key in enumerate(order)}
            for child, parent in self.tree.parents.items():
                if child in place and parent in place:
                    assert place[child] < place[parent], "a child before its parent"
        if hasattr(self.policy, "__len__"):
            assert len(self.policy) == len(resident)
        assert isinstance(self.policy, PinAware)


@pytest.mark.parametrize("name", ALL)
def test_what_every_order_promises(name: str) -> None:
    """Any order under any wrapper names everybody once, nobody held, and under LeafFirst children before parents."""
    adaptive = "leaf_first" in name and any(each in name for each in ("arc", "two_q", "s3fifo"))
    body = {"make": staticmethod(ALL[name]), "leaves": name in LEAFY, "static": not adaptive}
    run_state_machine_as_test(type("Machine", (PolicyMachine,), body), settings=some(5))


class OrderedLedger(LedgerMachine):
    """A ledger over one of our orders."""

    make: Maker

    @initialize()
    def begin(self) -> None:
        super().begin()
        self.policy = type(self).make(ManualClock())
        slotted = {"n_slots": 5, "slot_nbytes": SLOT} if self.slotted else {"charge": charge_of}
        self.ledger = Ledger(name="level", capacity_nbytes=CAPACITY, policy=self.policy, **slotted)
        self.hints = Hints([self.ledger], self.clock)


@pytest.mark.parametrize(
    "name",
    [*sorted(set(ORDERS) - {"lru", "fifo"}), "ttl > leaf_first > mq", "quota > ttl > sieve", "leaf_first > no_holds"],
)
def test_under_a_ledger(name: str) -> None:
    """A ledger that reserves, commits, holds and removes in any order finds its books right over each order."""
    body = {
        "make": staticmethod(ALL[name]),
        "policy_name": "fifo",  # the base's checks that go for leaf orders only are above
        "slotted": len(name) % 2,
    }
    run_state_machine_as_test(type("Machine", (OrderedLedger,), body), settings=some(10))


# -- heads and tails ------------------------------------------------------------------------------------------------


class Level:
    """Serves requests through an order: makes room first, as a level does, then uses what is there and inserts."""

    def __init__(self, policy: EvictionPolicy, n_slots: int) -> None:
        self.policy, self.n_slots = policy, n_slots
        self.resident: set[ChunkKey] = set()
        self.parents: dict[ChunkKey, ChunkKey | None] = {}

    def serve(self, part: Sequence[Chunk]) -> None:
        """A piece of a request, whose earlier pieces are resident."""
        self.policy.on_access([chunk for chunk in part if chunk.key in self.resident])
        new = [chunk for chunk in part if chunk.key not in self.resident]
        protected = {key for chunk in part for key in (chunk.key, chunk.parent)}
        n_over = len(self.resident) + len(new) - self.n_slots
        leaving: list[ChunkKey] = []
        blocked: set[ChunkKey | None] = set()
        for key in self.policy.victims():
            if len(leaving) >= n_over:
                break
            if key in protected or key in blocked:
                blocked.add(self.parents[key])
            else:
                leaving.append(key)
        if len(leaving) < n_over:
            return
        for key in leaving:
            self.policy.on_remove(key, evicted=True)
            self.resident.remove(key)
        self.policy.on_insert(new)
        self.parents.update((chunk.key, chunk.parent) for chunk in new)
        self.resident.update(chunk.key for chunk in new)


def tree_path(turns: Sequence[int]) -> list[Chunk]:
    """A path in an endless tree: each chunk is named by the turns that lead to it, as a prefix is by its tokens."""
    keys = [ChunkKey(bytes(turns[: i + 1])) for i in range(len(turns))]
    return [
        Chunk(key, parent, nbytes=1, tenant=f"t{turns[0]}")
        for key, parent in zip(keys, [None, *keys[:-1]], strict=True)
    ]


requests = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tree_path), min_size=1, max_size=30)
schedules = st.lists(st.tuples(st.integers(0, 29), st.integers(1, 3)), max_size=60)


def first_stranded_tail(
    policy: EvictionPolicy, paths: list[list[Chunk]], n_slots: int, schedule: list[tuple[int, int]], piece: int
) -> list[Chunk] | None:
    """Running requests interleave, each piece by piece. The first prefix of which a tail outlived its head, if any."""
    level = Level(policy, n_slots)
    progress = [0] * len(paths)
    for turn, n in schedule:
        at = turn % len(paths)
        for _ in range(-(-n // piece)):
            # A store behind a hole is refused by a level, so a request that lost its head starts again.
            if any(chunk.key not in level.resident for chunk in paths[at][: progress[at]]):
                progress[at] = 0
            part = paths[at][progress[at] : progress[at] + piece]
            if part:
                level.serve(part)
                progress[at] += len(part) if part[-1].key in level.resident else 0
            for path in paths:
                present = [chunk.key in level.resident for chunk in path]
                if present != sorted(present, reverse=True):
                    return path
    return None


@pytest.mark.parametrize("piece", [1, 3])
@pytest.mark.parametrize("name", LEAFY)
def test_a_head_never_leaves_before_its_tail(name: str, piece: int) -> None:
    """However requests interleave, also in pieces of 1, what stays of each prefix is one run from its head.

    Case: https://github.com/novitalabs/pegaflow/issues/396
    """

    @some(3)
    @given(paths=requests, n_slots=st.integers(1, 16), schedule=schedules)
    def run(paths: list[list[Chunk]], n_slots: int, schedule: list[tuple[int, int]]) -> None:
        stranded = first_stranded_tail(LEAFY[name](ManualClock()), paths, n_slots, schedule, piece)
        assert stranded is None, "a head left before its tail"

    run()


@pytest.mark.parametrize("name", sorted(set(ORDERS) - {"lru"}))
def test_the_property_catches_orders_without_leaf_first(name: str) -> None:
    """The property above is not empty: each order that knows no parents fails it when it is alone."""
    rng = random.Random(0)
    for _ in range(200):
        paths = [tree_path([rng.randrange(3) for _ in range(rng.randint(1, 7))]) for _ in range(12)]
        schedule = [(rng.randrange(12), rng.randint(1, 3)) for _ in range(60)]
        if first_stranded_tail(ORDERS[name](), paths, rng.randint(4, 16), schedule, 1) is not None:
            return
    pytest.fail("no head was lost before its tail")


# -- textbooks ------------------------------------------------------------------------------------------------------


class Textbook:
    """An order as its paper writes it, one access at a time; ``get`` returns what leaves to make room."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots

    def get(self, key: int) -> int | None:
        raise NotImplementedError


class SieveByHand(Textbook):
    def __init__(self, n_slots: int) -> None:
        super().__init__(n_slots)
        self.queue: list[list[int]] = []
        self.hand = 0

    def get(self, key: int) -> int | None:
        for entry in self.queue:
            if entry[0] == key:
                entry[1] = 1
                return None
        victim = None
        if len(self.queue) == self.n_slots:
            if self.hand >= len(self.queue):
                self.hand = 0
            while self.queue[self.hand][1]:
                self.queue[self.hand][1] = 0
                self.hand = (self.hand + 1) % len(self.queue)
            victim = self.queue.pop(self.hand)[0]
            if self.hand == len(self.queue):
                self.hand = 0
        self.queue.append([key, 0])
        return victim


class LFUByCount(Textbook):
    def __init__(self, n_slots: int) -> None:
        super().__init__(n_slots)
        self.uses: dict[int, tuple[int, int]] = {}
        self.time = 0

    def get(self, key: int) -> int | None:
        self.time += 1
        victim = None
        if key not in self.uses and len(self.uses) == self.n_slots:
            victim = min(self.uses, key=self.uses.__getitem__)
            del self.uses[victim]
        self.uses[key] = (self.uses.get(key, (0, 0))[0] + 1, self.time)
        return victim


class ARCByPaper(Textbook):
    def __init__(self, n_slots: int) -> None:
        super().__init__(n_slots)
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.p = 0.0

    def replace(self, *, in_b2: bool) -> int:
        if (self.t1 and (len(self.t1) > self.p or (in_b2 and len(self.t1) == self.p))) or not self.t2:
            self.b1.append(self.t1.pop(0))
            return self.b1[-1]
        self.b2.append(self.t2.pop(0))
        return self.b2[-1]

    def get(self, key: int) -> int | None:
        c, victim = self.n_slots, None
        for t in (self.t1, self.t2):
            if key in t:
                t.remove(key)
                self.t2.append(key)
                return None
        if key in self.b1 or key in self.b2:
            mine, other = (self.b1, self.b2) if key in self.b1 else (self.b2, self.b1)
            delta = max(len(other) / len(mine), 1)
            self.p = min(self.p + delta, c) if mine is self.b1 else max(self.p - delta, 0)
            victim = self.replace(in_b2=mine is self.b2) if len(self.t1) + len(self.t2) == c else None
            mine.remove(key)
            self.t2.append(key)
            return victim
        if len(self.t1) + len(self.b1) == c:
            if len(self.t1) < c:
                self.b1.pop(0)
                victim = self.replace(in_b2=False) if len(self.t1) + len(self.t2) == c else None
            else:
                victim = self.t1.pop(0)
        elif len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) >= c:
            if len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) == 2 * c:
                self.b2.pop(0)
            victim = self.replace(in_b2=False) if len(self.t1) + len(self.t2) == c else None
        self.t1.append(key)
        return victim


class TwoQByPaper(Textbook):
    def __init__(self, n_slots: int) -> None:
        super().__init__(n_slots)
        self.a_in: list[int] = []
        self.a_out: list[int] = []
        self.a_m: list[int] = []

    def get(self, key: int) -> int | None:
        if key in self.a_m:
            self.a_m.remove(key)
            self.a_m.append(key)
            return None
        if key in self.a_in:
            return None
        known = key in self.a_out
        if known:
            self.a_out.remove(key)
        victim = None
        if len(self.a_in) + len(self.a_m) == self.n_slots:
            if len(self.a_in) > self.n_slots // 4 or not self.a_m:
                victim = self.a_in.pop(0)
                self.a_out.append(victim)
                del self.a_out[: max(len(self.a_out) - self.n_slots // 2, 0)]
            else:
                victim = self.a_m.pop(0)
        (self.a_m if known else self.a_in).append(key)
        return victim


class S3FIFOByPaper(Textbook):
    def __init__(self, n_slots: int) -> None:
        super().__init__(n_slots)
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.uses: dict[int, int] = {}
        self.evicted = False

    def evict(self) -> int:
        n_small = self.n_slots // 10
        while True:
            if self.small and len(self.main) <= self.n_slots - n_small:
                key = self.small.pop(0)
                if self.uses[key] >= 2:
                    self.uses[key] = 0
                    self.main.append(key)
                    continue
                self.ghosts.append(key)
                del self.ghosts[: max(len(self.ghosts) - int(self.n_slots * 0.9), 0)]
                return key
            key = self.main.pop(0)
            if not self.uses[key]:
                return key
            self.uses[key] = min(self.uses[key], 3) - 1
            self.main.append(key)

    def get(self, key: int) -> int | None:
        if key in self.uses:
            self.uses[key] += 1
            return None
        known = key in self.ghosts
        if known:
            self.ghosts.remove(key)
        victim = None
        if len(self.uses) == self.n_slots:
            victim = self.evict()
            self.evicted = True
            del self.uses[victim]
        filling = not self.evicted and len(self.small) >= self.n_slots // 10
        (self.main if known or filling else self.small).append(key)
        self.uses[key] = 0
        return victim


TEXTBOOKS: dict[str, tuple[Callable[[int], Any], type[Textbook]]] = {
    "sieve": (lambda _: SIEVE(), SieveByHand),
    "lfu": (lambda _: LFU(), LFUByCount),
    "arc": (ARC, ARCByPaper),
    "arc, capacity learnt": (lambda _: ARC(), ARCByPaper),
    "two_q": (TwoQ, TwoQByPaper),
    "two_q, capacity learnt": (lambda _: TwoQ(), TwoQByPaper),
    "s3fifo": (S3FIFO, S3FIFOByPaper),
}


@pytest.mark.parametrize("name", TEXTBOOKS)
@given(n_slots=st.integers(1, 24), seed=st.integers(0, 2**32), skew=st.integers(1, 4))
def test_victims_are_the_textbooks(name: str, n_slots: int, seed: int, skew: int) -> None:
    """On random streams each order makes room with the same victims as its paper's own form does."""
    rng = random.Random(seed)
    make, textbook = TEXTBOOKS[name]
    policy, book = make(n_slots), textbook(n_slots)
    resident: set[int] = set()
    for _ in range(250):
        i = int(3 * n_slots * rng.random() ** skew)
        chunk = Chunk(ChunkKey(i.to_bytes(4, "big")))
        expected = book.get(i)
        policy.on_access([chunk])
        if i in resident:
            assert expected is None
            continue
        if len(resident) == n_slots:
            victim = next(policy.victims())
            assert int.from_bytes(victim, "big") == expected
            policy.on_remove(victim, evicted=True)
            resident.remove(int.from_bytes(victim, "big"))
        policy.on_insert([chunk])
        resident.add(i)


@pytest.mark.parametrize("name", ORDERS)
@given(n_slots=st.integers(1, 24), seed=st.integers(0, 2**32))
def test_asking_for_all_is_asking_for_one(name: str, n_slots: int, seed: int) -> None:
    """Of two twins one is asked for its whole order before each eviction: they lose the same chunks for ever after."""
    rng = random.Random(seed)
    twins = [ORDERS[name](), ORDERS[name]()]
    resident: set[ChunkKey] = set()
    for _ in range(250):
        chunk = Chunk(ChunkKey(int(3 * n_slots * rng.random() ** 2).to_bytes(4, "big")))
        for twin in twins:
            twin.on_access([chunk])
        if chunk.key in resident:
            continue
        if len(resident) == n_slots:
            order = list(twins[0].victims())
            victim = next(twins[1].victims())
            assert order[0] == victim
            resident.remove(victim)
            for twin in twins:
                twin.on_remove(victim, evicted=True)
        for twin in twins:
            twin.on_insert([chunk])
        resident.add(chunk.key)


# -- ghosts ---------------------------------------------------------------------------------------------------------


def n_ghosts(policy: Any) -> int:
    return sum(len(value) for name, value in vars(policy).items() if "ghosts" in name)


@pytest.mark.parametrize("name", ["arc", "s3fifo", "two_q", "mq"])
@pytest.mark.parametrize("n_slots", [1, 7, 40])
def test_ghosts_are_bounded(name: str, n_slots: int) -> None:
    """However much passes through, an order remembers a small multiple of what it holds."""
    policy: Any = ORDERS[name]()
    for i in range(600):
        if i >= n_slots:
            policy.on_remove(next(policy.victims()), evicted=True)
        policy.on_insert([Chunk(ChunkKey(i.to_bytes(4, "big")))])
        if i % 3 == 0:
            policy.on_access([Chunk(ChunkKey((i // 2).to_bytes(4, "big")))])
        assert n_ghosts(policy) <= 4 * n_slots + 1
    for key in list(policy.victims()):
        policy.on_remove(key, evicted=True)
    assert n_ghosts(policy) <= 5 * n_slots + 1


@pytest.mark.parametrize("name", ["arc", "s3fifo", "two_q", "mq"])
def test_what_was_deleted_leaves_no_ghost(name: str) -> None:
    """A chunk that left other than by eviction comes back as if for the first time."""
    policy: Any = ORDERS[name]()
    chunks = [Chunk(ChunkKey(b"%d" % i)) for i in range(20)]
    policy.on_insert(chunks)
    policy.on_access(chunks)
    for chunk in chunks[:10]:
        policy.on_remove(chunk.key, evicted=False)
    assert not n_ghosts(policy)
    leaving = []
    for i in range(20, 60):
        leaving.append(next(policy.victims()))
        policy.on_remove(leaving[-1], evicted=True)
        policy.on_insert([Chunk(ChunkKey(b"%d" % i))])
    before = n_ghosts(policy)
    assert before
    policy.on_insert([Chunk(key) for key in leaving[-2:]])
    assert n_ghosts(policy) == before - 2, "resident again"


def test_wrappers_tell_what_they_can_do() -> None:
    """Holds are always there, expiry only where something inside expires."""
    clock = ManualClock()
    assert isinstance(LeafFirst(NoHolds()), PinAware)
    assert not isinstance(NoHolds(), PinAware)
    plain: list[object] = [LeafFirst(MQ()), Quota({"a": 1}, LRU())]
    assert not any(isinstance(order, Expiring) for order in plain)
    fading: list[object] = [
        TTL(NoHolds(), 5, clock),
        LeafFirst(TTL(MQ(), 5, clock)),
        Quota({"a": 1}, TTL(LRU(), 5, clock)),
    ]
    assert all(isinstance(order, Expiring) for order in fading)
