"""LRU and FIFO against naive orders that are worked out from scratch at every step."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierkv.policies import FIFO, LRU, _leaf_order, _stamp_heap
from tierkv.policies._leaf_order import LAST, USUAL
from tierkv.protocols import HintAware, PinAware
from tierkv.types import Chunk, ChunkKey, Turn

N_KEYS = 14


def key_of(i: int) -> ChunkKey:
    return ChunkKey(b"key-%02d" % i)


KEYS = [key_of(i) for i in range(N_KEYS)]


class NaiveOrder:
    """The definition, at O(n squared): stamps and links by key; the order is found by taking leaf after leaf."""

    def __init__(self, *, leaves: bool) -> None:
        self.leaves = leaves
        self.stamps: dict[ChunkKey, int] = {}
        self.parents: dict[ChunkKey, ChunkKey] = {}
        self.held: set[ChunkKey] = set()
        self.kept: set[ChunkKey] = set()
        self.n_first = 0
        self.clock = USUAL if leaves else 0

    def hint(self, key: ChunkKey, turn: Turn) -> None:
        if turn is Turn.FIRST:
            self.n_first += 1
            self.stamps[key] = self.n_first
        elif turn is Turn.LAST and self.stamps[key] < USUAL:
            self.clock += 1
            self.stamps[key] = self.clock
        (self.kept.add if turn is Turn.LAST else self.kept.discard)(key)

    def insert(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks if self.leaves else ():
            self.kept.discard(chunk.key)
            self.stamps.setdefault(chunk.key, 0)
            self.link(chunk)
        for chunk in reversed(chunks):
            if self.leaves or chunk.key not in self.stamps:
                self.clock += 1
                self.stamps[chunk.key] = self.clock

    def access(self, chunks: Sequence[Chunk]) -> None:
        for chunk in reversed(chunks) if self.leaves else ():
            if chunk.key in self.stamps:
                self.clock += 1
                self.stamps[chunk.key] = self.clock
                self.link(chunk)

    def link(self, chunk: Chunk) -> None:
        if chunk.parent is None or chunk.key in self.parents:
            return
        ancestor: ChunkKey | None = chunk.parent
        while ancestor is not None:
            if ancestor == chunk.key:
                return
            ancestor = self.parents.get(ancestor)
        self.parents[chunk.key] = chunk.parent

    def remove(self, key: ChunkKey) -> None:
        stamp = self.stamps.pop(key)
        self.held.discard(key)
        self.kept.discard(key)
        parent = self.parents.pop(key, None)
        if parent in self.stamps and parent not in self.kept:
            self.stamps[parent] = max(self.stamps[parent], stamp)

    def order(self) -> list[ChunkKey]:
        rest = NaiveOrder(leaves=self.leaves)
        rest.stamps, rest.parents, rest.held = dict(self.stamps), dict(self.parents), set(self.held)
        rest.kept = set(self.kept)
        found: list[ChunkKey] = []
        while True:
            parents = {rest.parents.get(key) for key in rest.stamps}
            leaves = [key for key in rest.stamps if key not in parents and key not in rest.held]
            if not leaves:
                return found
            oldest = min(leaves, key=lambda key: (key in rest.kept, rest.stamps[key]))
            found.append(oldest)
            rest.remove(oldest)


def any_parent(i: int) -> st.SearchStrategy[int | None]:
    """Mostly the parent in a fixed tree; else unknown, or something that no honest caller says."""
    honest = i // 2 - 1 if i >= 2 else None
    return st.sampled_from([honest, honest, honest, None]) | st.integers(0, N_KEYS - 1)


indices = st.integers(0, N_KEYS - 1)
hostile_chunks = indices.flatmap(
    lambda i: any_parent(i).map(lambda parent: Chunk(key_of(i), None if parent is None else key_of(parent)))
)
paths = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(
    lambda turns: [Chunk(key_of(i), None if parent is None else key_of(parent)) for i, parent in walk(turns)]
)


def walk(turns: Sequence[int]) -> list[tuple[int, int | None]]:
    """A path from a root of the fixed tree (children of i are 2i+2 and 2i+3; the roots are 0 and 1)."""
    path: list[tuple[int, int | None]] = []
    parent: int | None = None
    for turn in turns:
        i = turn if parent is None else 2 * parent + 2 + turn
        if i >= N_KEYS:
            break
        path.append((i, parent))
        parent = i
    return path


batches = paths | st.lists(hostile_chunks, max_size=5)


class OrderMachine(RuleBasedStateMachine):
    """Any calls in any order: whenever it is asked, the policy's order is the naive one, and its books always agree."""

    make: Callable[[], LRU | FIFO]
    leaves: bool
    policy: LRU | FIFO

    @initialize(slack=st.sampled_from([0, 2, 64]))
    def begin(self, slack: int) -> None:
        """A small slack makes the rare clean-up of the heap, and of a line that has become long, the usual case."""
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(_stamp_heap, "_SLACK", slack)
        self.patch.setattr(_leaf_order, "_SLACK", slack)
        self.policy = self.make()
        self.naive = NaiveOrder(leaves=self.leaves)
        self.open: list[object] = []

    @rule(chunks=batches)
    def insert(self, chunks: list[Chunk]) -> None:
        self.policy.on_insert(chunks)
        self.naive.insert(chunks)

    @rule(chunks=batches)
    def access(self, chunks: list[Chunk]) -> None:
        self.policy.on_access(chunks)
        self.naive.access(chunks)

    @rule(key=st.sampled_from(KEYS), evicted=st.booleans())
    def remove(self, key: ChunkKey, evicted: bool) -> None:
        """Any key: middles of chains, held ones, and such as are not resident."""
        self.policy.on_remove(key, evicted=evicted)
        if key in self.naive.stamps:
            self.naive.remove(key)

    @precondition(lambda self: self.naive.stamps)
    @rule(n=st.integers(1, 5), keep=st.sets(st.integers(0, 4), max_size=2))
    def evict(self, n: int, keep: set[int]) -> None:
        """What a level does: take some victims, end the iteration, remove some of them."""
        expected = self.naive.order()[:n]
        leaving = list(islice(self.policy.victims(), n))
        assert leaving == expected
        for i, key in enumerate(leaving):
            if i not in keep:
                self.policy.on_remove(key, evicted=True)
                self.naive.remove(key)

    @rule(n=st.integers(0, 6))
    def evict_at_once(self, n: int) -> None:
        """The batch lets go of exactly those that an iteration would name first."""
        expected = self.naive.order()[:n]
        assert self.policy.evict(n) == expected
        for key in expected:
            self.naive.remove(key)

    @rule(key=st.sampled_from(KEYS))
    def hold(self, key: ChunkKey) -> None:
        self.policy.hold(key)
        if key in self.naive.stamps:
            self.naive.held.add(key)

    @rule(key=st.sampled_from(KEYS))
    def release(self, key: ChunkKey) -> None:
        self.policy.release(key)
        self.naive.held.discard(key)

    @precondition(lambda self: self.leaves and self.naive.stamps)
    @rule(data=st.data(), turn=st.sampled_from(Turn))
    def hint(self, data: st.DataObject, turn: Turn) -> None:
        """Held or not: seats know that by themselves."""
        key = data.draw(st.sampled_from(sorted(self.naive.stamps)), label="key")
        assert isinstance(self.policy, HintAware)
        self.policy.on_hint(key, turn)
        self.policy.on_hint(ChunkKey(b"absent"), turn)
        self.naive.hint(key, turn)

    @rule(n=st.integers(0, 4))
    def leave_an_iteration_open(self, n: int) -> None:
        victims = self.policy.victims()
        self.open.append((victims, list(islice(victims, n))))

    def teardown(self) -> None:
        self.same_order()
        self.patch.undo()

    @rule()
    def same_order(self) -> None:
        """Not an invariant: asking brings the heap up to date, and what happens when nobody asks is the point."""
        expected = self.naive.order()
        assert list(self.policy.victims()) == expected
        assert list(self.policy.victims()) == expected, "asking changes nothing"
        assert len(self.policy) == len(self.naive.stamps)


class LRUMachine(OrderMachine):
    make = staticmethod(LRU)
    leaves = True
    policy: LRU

    @invariant()
    def books_agree(self) -> None:
        """Stamps and links are what a recount says; who may leave is in the line or in the heap, and not in both."""
        policy = self.policy
        seats = {key: seat for key, seat in policy._seats.items() if seat.stamp}
        assert len(seats) == len(policy._seats) == len(policy)
        assert {key: seat.stamp % LAST for key, seat in seats.items()} == self.naive.stamps
        assert {key for key, seat in seats.items() if seat.stamp >= LAST} == self.naive.kept
        assert len(set(self.naive.stamps.values())) == len(seats), "no ties"
        assert {key: seat.parent for key, seat in seats.items() if seat.link} == self.naive.parents
        children = Counter(self.naive.parents.values())
        assert {key: seat.n_children for key, seat in seats.items() if seat.n_children} == {
            key: n for key, n in children.items() if key in seats
        }
        assert policy._absent == {key: n for key, n in children.items() if key not in seats}
        for key, seat in seats.items():
            assert seat.key == key
            stands = policy._front <= seat.stamp < LAST
            assert not stands or policy._line[seat.stamp - policy._front] is seat
            if seat.heaped is not None:
                assert not stands and not seat.n_children
                assert seat.heaped[2] is seat
                assert seat.heaped[0] == seat.stamp or LAST <= seat.heaped[0] < seat.stamp, "corrected when it is met"
            else:
                assert stands or seat.n_children or seat.holds, "who may leave waits to leave"
        live = [entry for entry in (*policy._heap.entries, *policy._heap._taken) if entry[2] is not None]
        assert sorted(id(entry) for entry in live) == sorted(id(seat.heaped) for seat in seats.values() if seat.heaped)


class FIFOMachine(OrderMachine):
    make = staticmethod(FIFO)
    leaves = False
    policy: FIFO

    @invariant()
    def books_agree(self) -> None:
        """Everybody is in the line or aside, in order of stamps; aside are those who are held, or wait in the heap."""
        policy = self.policy
        assert not policy._line.keys() & policy._aside.keys()
        items = {**policy._line, **policy._aside}
        assert {key: item.stamp for key, item in items.items()} == self.naive.stamps
        assert all((item.heaped is None) == item.held for item in policy._aside.values())
        assert all(item.heaped is None for item in policy._line.values())
        line = [item.stamp for item in policy._line.values()]
        assert line == sorted(line)
        live = [entry for entry in (*policy._heap.entries, *policy._heap._taken) if entry[2] is not None]
        assert sorted(id(entry) for entry in live) == sorted(id(item.heaped) for item in items.values() if item.heaped)


TestLRU = LRUMachine.TestCase
TestFIFO = FIFOMachine.TestCase


# -- whole requests, pieces, and the plain list ---------------------------------------------------------------------


class PlainLRU:
    """A list in order of use, each request touched tail first."""

    def __init__(self) -> None:
        self.order: OrderedDict[ChunkKey, None] = OrderedDict()

    def request(self, chain: Sequence[Chunk], n_slots: int) -> list[ChunkKey]:
        for chunk in reversed(chain):
            self.order[chunk.key] = None
            self.order.move_to_end(chunk.key)
        return [self.order.popitem(last=False)[0] for _ in range(len(self.order) - n_slots)]


class Level:
    """Serves requests through a policy: uses what is there, inserts what is not, then evicts down to its size."""

    def __init__(self, policy: LRU, n_slots: int, piece: int | None, *, inserts_first: bool = False) -> None:
        self.policy, self.n_slots, self.piece, self.inserts_first = policy, n_slots, piece, inserts_first
        self.resident: set[ChunkKey] = set()

    def request(self, chain: Sequence[Chunk]) -> list[ChunkKey]:
        piece = self.piece or len(chain)
        for start in range(0, len(chain), piece):
            part = chain[start : start + piece]
            calls = [
                (self.policy.on_access, [chunk for chunk in part if chunk.key in self.resident]),
                (self.policy.on_insert, [chunk for chunk in part if chunk.key not in self.resident]),
            ]
            for call, chunks in reversed(calls) if self.inserts_first else calls:
                call(chunks)
            self.resident.update(chunk.key for chunk in part)
        return self.evict(len(self.resident) - self.n_slots)

    def evict(self, n: int) -> list[ChunkKey]:
        leaving = list(islice(self.policy.victims(), max(n, 0)))
        for key in leaving:
            self.policy.on_remove(key, evicted=True)
        self.resident.difference_update(leaving)
        return leaving


def tree_path(turns: Sequence[int]) -> list[Chunk]:
    """A path in an endless tree: each chunk is named by the turns that lead to it, as a prefix is by its tokens."""
    keys = [ChunkKey(bytes(turns[: i + 1])) for i in range(len(turns))]
    return [Chunk(key, parent) for key, parent in zip(keys, [None, *keys[:-1]], strict=True)]


requests = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tree_path), max_size=40)


@given(requests=requests, n_slots=st.integers(1, 24), piece=st.integers(1, 5), inserts_first=st.booleans())
def test_pieces_and_whole_and_plain_lru_evict_alike(
    requests: list[list[Chunk]], n_slots: int, piece: int, inserts_first: bool
) -> None:
    """On trees of shared prefixes the same chunks leave, in the same order, however small the pieces of a request."""
    plain = PlainLRU()
    whole = Level(LRU(), n_slots, None, inserts_first=inserts_first)
    pieces = Level(LRU(), n_slots, piece, inserts_first=inserts_first)
    for chain in requests:
        expected = plain.request(chain, n_slots)
        assert whole.request(chain) == expected
        assert pieces.request(chain) == expected
        assert whole.resident == pieces.resident == set(plain.order)


@given(
    requests=requests,
    n_slots=st.integers(1, 16),
    schedule=st.lists(st.tuples(st.integers(0, 39), st.integers(1, 3)), max_size=80),
)
def test_a_head_never_leaves_before_its_tail(
    requests: list[list[Chunk]], n_slots: int, schedule: list[tuple[int, int]]
) -> None:
    """However running requests interleave, what stays of each prefix is one run from its head.

    Case: https://github.com/novitalabs/pegaflow/issues/396
    """
    level = Level(LRU(), n_slots, None)
    progress = [0] * len(requests)
    for turn, n in schedule:
        if not requests:
            break
        at = turn % len(requests)
        chain = requests[at]
        head, part = chain[: progress[at]], chain[progress[at] : progress[at] + n]
        # A store behind a hole is refused by a level, so a request that lost its head starts again.
        if any(chunk.key not in level.resident for chunk in head):
            progress[at] = 0
            continue
        if part:
            level.request(part)
            progress[at] += len(part)
        for path in requests:
            present = [chunk.key in level.resident for chunk in path]
            assert present == sorted(present, reverse=True)


# -- cases ----------------------------------------------------------------------------------------------------------


def chain(name: str, n: int) -> list[Chunk]:
    keys = [ChunkKey(f"{name}{i}".encode()) for i in range(n)]
    return [Chunk(key, parent) for key, parent in zip(keys, [None, *keys[:-1]], strict=True)]


def names(policy: LRU | FIFO) -> list[str]:
    return [key.decode() for key in policy.victims()]


def test_a_running_request_loses_its_tail_first() -> None:
    """Case: https://github.com/novitalabs/pegaflow/issues/396 - stored in two pieces, and still running."""
    policy = LRU()
    request = chain("c", 4)
    policy.on_insert(request[:2])
    policy.on_insert(request[2:])
    policy.on_insert(chain("x", 1))
    assert names(policy) == ["c3", "c2", "c1", "c0", "x0"]


def test_a_shared_head_leaves_after_both_tails() -> None:
    """Two requests share c0 and c1; the head is as young as the younger tail."""
    policy = LRU()
    request = chain("c", 4)
    policy.on_insert(request)
    policy.on_insert(chain("x", 1))
    policy.on_insert([Chunk(ChunkKey(b"d2"), ChunkKey(b"c1"))])
    policy.on_insert(chain("y", 1))
    assert names(policy) == ["c3", "c2", "x0", "d2", "c1", "c0", "y0"]


def test_what_is_held_protects_its_ancestors() -> None:
    """A hold takes a chunk and all above it out of the order; the release puts them back where they were."""
    policy = LRU()
    assert isinstance(policy, PinAware)
    policy.on_insert(chain("a", 3))
    policy.on_insert(chain("b", 2))
    before = names(policy)
    policy.hold(ChunkKey(b"a1"))
    assert names(policy) == ["a2", "b1", "b0"]
    policy.release(ChunkKey(b"a1"))
    assert names(policy) == before


def test_an_eviction_stops_at_what_is_held() -> None:
    """A batch that climbs a chain leaves what is held, and all above it, until it is let go."""
    policy = LRU()
    policy.on_insert(chain("a", 3))
    policy.hold(ChunkKey(b"a1"))
    assert policy.evict(5) == [b"a2"]
    assert policy.evict(5) == []
    policy.release(ChunkKey(b"a1"))
    assert policy.evict(5) == [b"a1", b"a0"]


def test_a_chain_that_came_in_pieces_is_climbed_up_to_what_is_held() -> None:
    """Its head has the oldest stamp and loses its place; what leaves hands its own on, but to nobody who is held."""
    policy = LRU()
    for chunk in chain("a", 4):
        policy.on_insert([chunk])
    policy.on_insert(chain("x", 1))
    policy.hold(ChunkKey(b"a1"))
    assert policy.evict(5) == [b"a3", b"a2", b"x0"]
    policy.release(ChunkKey(b"a1"))
    assert policy.evict(5) == [b"a1", b"a0"]


def test_a_chunk_that_is_deleted_hands_its_place_on() -> None:
    """A parent that is older than the child it lost stands where that one stood, in the middle of the line."""
    policy = LRU()
    for chunk in [*chain("c", 2), *chain("x", 1)]:
        policy.on_insert([chunk])
    policy.on_remove(ChunkKey(b"c1"), evicted=False)
    assert names(policy) == ["c0", "x0"]
    assert policy.evict(5) == [b"c0", b"x0"]


def test_a_parent_that_has_lost_its_place_overtakes_nobody() -> None:
    """Used after its child and passed over because of it, it is younger than a leaf that came between the two."""
    policy = LRU()
    head, tail = chain("c", 2)
    for chunk in (head, tail, *chain("x", 1)):
        policy.on_insert([chunk])
    policy.on_access([head])
    policy.on_insert(chain("y", 1))
    policy.hold(tail.key)
    assert names(policy) == ["x0", "y0"]
    assert names(policy) == ["x0", "y0"]
    policy.release(tail.key)
    assert policy.evict(5) == [b"c1", b"x0", b"c0", b"y0"]


def test_places_behind_a_climb_are_not_lost() -> None:
    """An eviction takes places of the line together; those behind a leaf whose parent goes with it stay in the line."""
    policy = LRU()
    head, tail = chain("c", 2)
    for chunk in (head, *chain("x", 1), tail, *chain("y", 1), *chain("z", 1)):
        policy.on_insert([chunk])
    assert policy.evict(4) == [b"x0", b"c1", b"c0", b"y0"]
    assert policy.evict(4) == [b"z0"]


def test_held_chunks_are_met_once() -> None:
    """However often victims are asked for afterwards, what is held is not walked over again."""
    policy = LRU()
    singles = [Chunk(ChunkKey(b"%d" % i)) for i in range(1000)]
    policy.on_insert(singles)
    for chunk in singles[100:]:
        policy.hold(chunk.key)
    assert len(list(policy.victims())) == 100
    assert next(policy.victims()) == singles[99].key
    assert not [seat for seat in policy._line if seat.holds]
    for chunk in singles[100:]:
        policy.release(chunk.key)
    assert list(policy.victims()) == [chunk.key for chunk in reversed(singles)]


def test_a_line_stays_short() -> None:
    """However often chunks are used, an order keeps a few places for each of them, and nobody loses one for good."""
    policy = LRU()
    singles = [Chunk(ChunkKey(b"%d" % i)) for i in range(100)]
    policy.on_insert(singles)
    for i in range(5_000):
        policy.on_access([singles[i % 7]])
        assert len(policy._line) < 500
    assert sorted(policy.victims()) == sorted(chunk.key for chunk in singles)
    assert list(policy.victims())[:93] == [chunk.key for chunk in reversed(singles[7:])]


def test_a_scan_finds_names_before_parents() -> None:
    """Chunks without parents are in plain order until an access links them; from then on tails leave first."""
    policy = LRU()
    found = chain("c", 3)
    policy.on_insert([Chunk(chunk.key) for chunk in reversed(found)])
    policy.on_insert(chain("x", 1))
    assert names(policy) == ["c0", "c1", "c2", "x0"]
    policy.on_access(found[:1])
    policy.on_access(found[1:])
    assert names(policy) == ["x0", "c2", "c1", "c0"]


def test_a_parent_finds_the_children_that_came_before_it() -> None:
    """A hole that is filled again is part of its chain again, and a deleted one makes its child a head."""
    policy = LRU()
    request = chain("c", 3)
    policy.on_insert(request)
    policy.on_insert(chain("x", 1))
    policy.on_remove(ChunkKey(b"c1"), evicted=False)
    assert names(policy) == ["c2", "c0", "x0"]
    policy.hold(ChunkKey(b"c2"))
    policy.on_insert(request[1:2])
    assert names(policy) == ["x0"]
    policy.on_remove(ChunkKey(b"c1"), evicted=False)
    policy.on_insert([*request[1:2], *chain("y", 1)])
    assert names(policy) == ["x0", "y0"]


def test_keys_that_claim_to_be_their_own_ancestors() -> None:
    """Nonsense from a broken caller neither loops nor hides a chunk from eviction."""
    a, b, c = (ChunkKey(name) for name in (b"a", b"b", b"c"))
    policy = LRU()
    policy.on_insert([Chunk(a, a), Chunk(a, a), Chunk(b, c), Chunk(c, b)])
    policy.on_access([Chunk(a, a), Chunk(b, c), Chunk(c, b)])
    assert sorted(policy.victims()) == [a, b, c]


def test_one_iteration_at_a_time() -> None:
    """An iteration that a later one has overtaken says so instead of naming wrong victims; the later one is whole."""
    policy = LRU()
    policy.on_insert(chain("c", 3))
    first = policy.victims()
    assert next(first) == b"c2"
    assert names(policy) == ["c2", "c1", "c0"]
    with pytest.raises(RuntimeError, match="called again"):
        next(first)


def test_fifo_is_the_order_of_arrival() -> None:
    """Tail of a batch first; use and parents do not matter; a hold keeps a chunk's place, not its parent's."""
    policy = FIFO()
    assert isinstance(policy, PinAware)
    policy.on_insert(chain("c", 3))
    policy.on_insert(chain("x", 2))
    policy.on_access(chain("c", 3))
    policy.on_insert(chain("c", 3))
    assert names(policy) == ["c2", "c1", "c0", "x1", "x0"]
    policy.hold(ChunkKey(b"c1"))
    assert names(policy) == ["c2", "c0", "x1", "x0"]
    policy.release(ChunkKey(b"c1"))
    assert names(policy) == ["c2", "c1", "c0", "x1", "x0"]


def test_many_outdated_stamps_at_once() -> None:
    """Far more uses than evictions: the heap is brought up to date in one go, and the order is exact."""
    policy = LRU()
    singles = [Chunk(ChunkKey(b"%d" % i)) for i in range(2000)]
    policy.on_insert(singles)
    order = singles[1::2] + singles[::2]
    for chunk in order:
        policy.on_access([chunk])
    for chunk in singles[100:200]:
        policy.on_remove(chunk.key, evicted=False)
    assert list(policy.victims()) == [chunk.key for chunk in order if chunk not in singles[100:200]]
