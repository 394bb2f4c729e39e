"""Orders, wrappers and admission rules by example."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest

from tierkv._ledger import Ledger
from tierkv.admission import All, DropPartialTail, MaxSize, SecondTouch, TinyLFU, WriteBudget
from tierkv.admission import Any as AnyRule
from tierkv.errors import ConfigError
from tierkv.policies import ARC, FIFO, LFU, LRU, MQ, S3FIFO, SIEVE, TTL, LeafFirst, Quota, TwoQ
from tierkv.protocols import Refreshing
from tierkv.testing import ManualClock
from tierkv.types import Chunk, ChunkKey

SLOT = 10


def chain(name: str, n: int, *, tenant: str = "", nbytes: int = 1) -> list[Chunk]:
    keys = [ChunkKey(f"{name}{i}".encode()) for i in range(n)]
    return [
        Chunk(key, parent, nbytes=nbytes, tenant=tenant) for key, parent in zip(keys, [None, *keys[:-1]], strict=True)
    ]


def names(order: Any, n: int | None = None) -> list[str]:
    return [key.decode() for key in islice(order.victims(), n)]


def ledger_of(policy: Any, n_slots: int) -> Ledger:
    return Ledger(name="level", capacity_nbytes=0, policy=policy, n_slots=n_slots, slot_nbytes=SLOT)


def store(ledger: Ledger, chunks: Sequence[Chunk]) -> None:
    for entry in ledger.reserve(chunks):
        ledger.commit((entry,))


# -- cases ----------------------------------------------------------------------------------------------------------


def arc_that_favours_recency() -> tuple[ARC, Ledger]:
    """Capacity 4: two chunks used again, two new ones, and ghost hits have raised the target to all of the level."""
    arc = ARC()
    ledger = ledger_of(arc, 4)

    def make_room(n: int) -> None:
        for entry in ledger.victims(lambda _: True, (), n * SLOT):
            ledger.remove(entry, evicted=True)
            ledger.free(entry)

    store(ledger, chain("f", 2))
    ledger.access([(entry, entry.chunk) for entry in ledger])
    for name in ("a", "b", "c", "a", "d", "e", "b"):
        if ledger.free_nbytes == 0:
            make_room(1)
        if ledger.get(ChunkKey(f"{name}0".encode())) is None:
            store(ledger, chain(name, 1))
    return arc, ledger


@pytest.mark.parametrize("pin_aware", [True, False])
def test_arc_takes_idle_recent_chunks_when_the_frequent_ones_are_pinned(pin_aware: bool) -> None:
    """Room for two is found among the recent ones, whatever the target says.

    Case: https://github.com/vllm-project/vllm/pull/55461
    """
    arc = ARC(4)
    frequent, recent = chain("f", 2), chain("r", 2)
    arc.on_insert(frequent)
    arc.on_access(frequent)
    arc.on_insert(recent)
    arc._target = 4.0
    order: Any = arc
    if pin_aware:
        for chunk in frequent:
            arc.hold(chunk.key)
        assert names(order) == ["r1", "r0"]
    ledger = ledger_of(ARC(4), 4)
    store(ledger, frequent)
    entries = list(ledger)
    ledger.access([(entry, entry.chunk) for entry in entries])
    store(ledger, recent)
    ledger.policy._target = 4.0  # type: ignore[attr-defined]
    for entry in entries:
        ledger.hold(entry)
    chosen = ledger.victims(lambda _: True, (), 2 * SLOT)
    assert [entry.key for entry in chosen] == [b"r1", b"r0"]


def test_arc_that_has_too_little_idle_changes_nothing() -> None:
    """Asked for more than is idle it names what is, and queues, ghosts and target stay as they were.

    Case: https://github.com/vllm-project/vllm/pull/55461
    """
    arc, ledger = arc_that_favours_recency()
    before = (list(arc._young._line), list(arc._old._line), list(arc._young_ghosts), arc._target)
    held = list(ledger)[:3]
    for entry in held:
        ledger.hold(entry)
    assert len(ledger.victims(lambda _: True, (), 2 * SLOT)) == 1
    for entry in held:
        ledger.release(entry)
    order = names(arc)
    assert (list(arc._young._line), list(arc._old._line), list(arc._young_ghosts), arc._target) == before
    assert names(arc) == order


@pytest.mark.parametrize("make", [LRU, FIFO, LFU, ARC, S3FIFO, SIEVE, TwoQ, MQ])
def test_a_running_request_loses_its_tail_first(make: Any) -> None:
    """Stored in two pieces, running or finished, alone or with a head that another request shares.

    Case: https://github.com/novitalabs/pegaflow/issues/396
    """
    request = chain("c", 4)
    order = LeafFirst(make())
    order.on_insert(request[:2])
    order.on_insert(request[2:])
    assert names(order, 1) == ["c3"]
    order.on_access(request)
    assert names(order, 1) == ["c3"]
    order.on_insert([Chunk(ChunkKey(b"d2"), ChunkKey(b"c1"))])
    place = {name: i for i, name in enumerate(names(order))}
    assert place["c3"] < place["c2"] < place["c1"] < place["c0"]
    assert place["d2"] < place["c1"]


def test_storing_again_with_another_size_is_no_op() -> None:
    """A chunk that is there is not stored again, so no neighbour leaves for it and what is used does not move.

    Case: https://github.com/tkem/cachetools/issues/405
    """
    for policy in (LRU(), Quota({"t": 10}, MQ())):
        ledger = Ledger(name="level", capacity_nbytes=10, policy=policy)
        a, b = Chunk(ChunkKey(b"a"), nbytes=3, tenant="t"), Chunk(ChunkKey(b"b"), nbytes=3, tenant="t")
        store(ledger, [a, b])
        policy.on_insert([b._replace(nbytes=7)])
        assert ledger.ready_nbytes == 6
        assert sorted(policy.victims()) == [b"a", b"b"]
        if isinstance(policy, Quota):
            assert policy._used_nbytes == {"t": 6}


# -- wrappers -------------------------------------------------------------------------------------------------------


def test_an_age_counts_from_the_commit() -> None:
    """A copy that takes long does not make the chunk old; what is found on a disk is as old as the run."""
    clock = ManualClock()
    ttl = TTL(LRU(), 10, clock)
    ledger = ledger_of(ttl, 4)
    (entry,) = ledger.reserve(chain("a", 1))
    clock.now_s = 9.0
    ledger.commit((entry,))
    clock.now_s = 18.9
    assert not ledger.expired(entry)
    assert not ledger.expired_entries(10)
    clock.now_s = 19.0
    assert ledger.expired(entry)
    assert ledger.expired_entries(10) == [entry]


def test_what_expired_leaves_first_and_oldest_first() -> None:
    """Used or not; a held one after its release, and a use does not make it young."""
    clock = ManualClock()
    ttl = TTL(LeafFirst(MQ()), 10, clock)
    a, b, c = chain("a", 1), chain("b", 1), chain("c", 1)
    ttl.on_insert(a)
    clock.now_s = 1.0
    ttl.on_insert(b)
    clock.now_s = 5.0
    ttl.on_insert(c)
    ttl.on_access(a)
    ttl.hold(a[0].key)
    assert names(ttl) == ["b0", "c0"]
    clock.now_s = 11.0
    assert [ttl.expired(x[0]) for x in (a, b, c)] == [True, True, False]
    assert names(ttl) == ["b0", "c0"]
    ttl.release(a[0].key)
    assert names(ttl) == ["b0", "a0", "c0"]
    assert not ttl.expired(Chunk(ChunkKey(b"nobody")))


def test_a_tenant_over_its_quota_gives_way() -> None:
    """Exactly its quota is not over it; only as much gives way as is over; leaves first; then the order's order."""
    quota = Quota({"a": "20B"}, FIFO())
    quota.on_insert(chain("x", 1))
    quota.on_insert(chain("a", 2, tenant="a", nbytes=10))
    assert names(quota) == ["x0", "a1", "a0"]
    quota.on_insert([Chunk(ChunkKey(b"a2"), ChunkKey(b"a1"), nbytes=1, tenant="a")])
    quota.on_insert([Chunk(ChunkKey(b"y0"), ChunkKey(b"a2"), nbytes=1, tenant="b")])
    assert names(quota, 1) == ["x0"], "a2 carries another tenant's chunk"
    quota.on_remove(ChunkKey(b"y0"), evicted=True)
    assert names(quota) == ["a2", "x0", "a1", "a0"]
    quota.on_remove(ChunkKey(b"a2"), evicted=True)
    assert names(quota) == ["x0", "a1", "a0"]


def test_a_quota_of_an_order_that_expires() -> None:
    """What has expired comes before what is over a quota, and counts towards it."""
    clock = ManualClock()
    quota = Quota({"a": 1}, TTL(LRU(), 10, clock))
    quota.on_insert(chain("old", 1, tenant="a"))
    clock.now_s = 5.0
    quota.on_insert(chain("x", 1))
    quota.on_insert(chain("a", 2, tenant="a"))
    assert names(quota) == ["old0", "a1", "x0", "a0"]
    clock.now_s = 10.0
    assert names(quota) == ["old0", "a1", "x0", "a0"]
    clock.now_s = 15.0
    assert names(quota)[0] == "old0"
    assert set(names(quota)) == {"old0", "x0", "a0", "a1"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: TTL(LRU, 5),  # type: ignore[arg-type]  # the class, not an order
        lambda: TTL(LRU(), 0),
        lambda: TTL(LRU(), float("nan")),
        lambda: LeafFirst("lru"),  # type: ignore[arg-type]
        lambda: Quota({}, LRU()),
        lambda: Quota({"a": "ten"}, LRU()),
        lambda: ARC(0),
        lambda: MQ(1.5),  # type: ignore[arg-type]
        lambda: SecondTouch(0),
        lambda: MaxSize("big"),
        lambda: WriteBudget("300GB"),
        All,
        lambda: AnyRule(SecondTouch),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(make: Any) -> None:
    """Whatever is wrong with an argument is a ConfigError when it is made."""
    with pytest.raises(ConfigError) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_quota_wants_a_new_order() -> None:
    """An order with chunks cannot be copied for each tenant."""
    order = LRU()
    order.on_insert(chain("a", 1))
    with pytest.raises(ConfigError, match="without chunks"):
        Quota({"a": 1}, order)
    order = LRU()
    order.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="can be copied"):
        Quota({"a": 1}, order)


# -- admission ------------------------------------------------------------------------------------------------------


def test_second_touch_remembers_a_window() -> None:
    """The second offer enters, and each later one, while the key is among the latest offered."""
    rule = SecondTouch(window=2)
    a, b, c = chain("a", 3)
    assert [rule.admits(x) for x in (a, a, a, b, c, a)] == [False, True, True, False, False, False]


def test_tiny_lfu_counts_lately() -> None:
    """The n-th offer enters; after a window all counts are halved; a key is never counted too little."""
    rule = TinyLFU(n_offers=3, window=1_000)
    a = chain("a", 1)[0]
    assert [rule.admits(a) for _ in range(4)] == [False, False, True, True]
    for chunk in chain("x", 996):
        rule.admits(chunk)
    assert [rule.admits(a) for _ in range(2)] == [True, True], "4 halved is 2, and this is the third"
    for chunk in chain("y", 998) + chain("z", 1_000) + chain("u", 1_000):
        rule.admits(chunk)
    assert not rule.admits(a)


def test_a_write_rate_is_kept() -> None:
    """Over a day at most the day's bytes, a burst and one chunk; a quiet time saves no more than the burst."""
    clock = ManualClock()
    rule = WriteBudget("2400B/day", clock=clock)
    chunk = Chunk(ChunkKey(b"k"), nbytes=30)
    n_written = 0
    for minute in range(24 * 60):
        clock.now_s = 60.0 * minute
        n_written += 30 * rule.admits(chunk)
    assert 2_400 <= n_written <= 2_400 + 100 + 30
    clock.now_s += 7 * 86_400
    assert sum(rule.admits(chunk) for _ in range(100)) == 4, "100 bytes saved: three, and one that goes below"
    clock.now_s -= 3_600
    assert not rule.admits(chunk), "a clock that runs backwards gives nothing"


def test_rules_combine() -> None:
    """All asks up to the first refusal, so a rate behind another rule is charged for what enters only."""
    clock = ManualClock()
    partial, whole = Chunk(ChunkKey(b"p"), nbytes=5, partial=True), Chunk(ChunkKey(b"w"), nbytes=5)
    rate = WriteBudget("10B/s", burst=10, clock=clock)
    rule = All(DropPartialTail(), rate)
    assert not any(rule.admits(partial) for _ in range(10))
    assert [rule.admits(whole) for _ in range(3)] == [True, True, False]
    either = AnyRule(MaxSize(4), SecondTouch())
    assert either.admits(Chunk(ChunkKey(b"s"), nbytes=4))
    assert [either.admits(whole) for _ in range(2)] == [False, True]


def test_admission_is_the_same_in_every_process() -> None:
    """The sketch's places come from the key alone: a known key has a known place."""
    rule = TinyLFU(window=1_000)
    rule.admits(Chunk(ChunkKey(b"known")))
    assert [row.index(1) for row in rule._counts] == [931, 278, 279, 171]


def test_refreshing_makes_recent_without_a_use() -> None:
    """LRU and ARC put refreshed chunks at the back of where they stand; for ARC that is no step up to the frequent."""
    for order in (LRU(), ARC(), LeafFirst(ARC())):
        assert isinstance(order, Refreshing)
        order.on_insert([Chunk(ChunkKey(name)) for name in (b"a", b"b", b"c")])
        order.refresh([Chunk(ChunkKey(b"b")), Chunk(ChunkKey(b"c"))])
        assert list(order.victims()) == [b"a", b"c", b"b"]
    arc = ARC()
    arc.on_insert([Chunk(ChunkKey(name)) for name in (b"a", b"b")])
    arc.on_access([Chunk(ChunkKey(b"b"))])
    arc.refresh([Chunk(ChunkKey(b"a"))])
    assert list(arc.victims()) == [b"a", b"b"]
    assert not isinstance(FIFO(), Refreshing)
