"""Hints by example, one rule a test; the state machines of tests/property give them in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.property.world import InOrder
from tests.toys import buffers, cache_of, prompt
from tests.unit.test_hierarchy import SLOT, chain, disk, store
from tierkv import Hint, MemoryTier
from tierkv._hierarchy import Hierarchy
from tierkv._hints import Hints
from tierkv._level import LevelPlan, Writes
from tierkv.errors import ConfigError
from tierkv.policies import ARC, FIFO, LFU, LRU, MQ, S3FIFO, SIEVE, TTL, LeafFirst, Quota, TwoQ
from tierkv.protocols import EvictionPolicy
from tierkv.testing import ManualClock
from tierkv.types import Chunk, ChunkKey, Outcome, Reason, Status, Turn

ORDERS: dict[str, Callable[[], EvictionPolicy]] = {
    "LRU": LRU, "FIFO": FIFO, "LFU": LFU, "ARC": ARC, "TwoQ": TwoQ, "S3FIFO": S3FIFO, "SIEVE": SIEVE, "MQ": MQ,
    "TTL": lambda: TTL(LRU(), 3600), "LeafFirst": lambda: LeafFirst(MQ()), "third party": InOrder,
    "all": lambda: TTL(LeafFirst(Quota({"red": 10**6}, ARC())), 3600),
}  # fmt: skip
HOUR_S = 3600.0


class World:
    """A hierarchy, its hints and a clock; a level's leaving order by name."""

    def __init__(self, n_slots: int, *lowers: LevelPlan, policy: EvictionPolicy | None = None) -> None:
        self.clock = ManualClock()
        order = LRU() if policy is None else policy
        self.h = Hierarchy([LevelPlan("primary", 0, order, n_slots=n_slots, slot_nbytes=SLOT), *lowers])
        self.hints = Hints([level.ledger for level in self.h.levels], self.clock)

    def give(self, chunks: list[Chunk], hint: Hint) -> tuple[int, int]:
        return self.hints.give([chunk.key for chunk in chunks], hint)

    def order(self, level: int = 0) -> str:
        self.h.check()
        return " ".join(key.decode() for key in self.h.levels[level].ledger.policy.victims())

    def find(self, name: str) -> int:
        return self.h.find(ChunkKey(name.encode()))

    def run(self, status: Status = Status.OK) -> None:
        """Every transfer ends, and those that follow."""
        while transfers := self.h.take_transfers():
            for transfer in transfers:
                self.h.finish(transfer.id, Outcome(transfer.chunk.key, status))


def loners(*names: str, tenant: str = "") -> list[Chunk]:
    """Chunks without parents."""
    return [Chunk(ChunkKey(name.encode()), None, 0, 8, SLOT, tenant) for name in names]


# -- dead --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ORDERS)
def test_the_dead_leave_first_and_a_use_revives_them(name: str) -> None:
    """In every order: tail before head, before all that is alive; once used they stand where they would have stood."""
    world, control = World(8, policy=ORDERS[name]()), World(8, policy=ORDERS[name]())
    session, others = chain("s", 3), loners("a", "b")
    for each in (world, control):
        store(each.h, others[:1])
        store(each.h, session)
        store(each.h, others[1:])
    assert world.give(session, Hint.DEAD) == (3, 0)
    assert world.order().split()[:3] == ["s2", "s1", "s0"]
    for each in (world, control):
        each.h.access(session)
    assert world.order() == control.order(), "a hint that was wrong leaves no trace"


def test_a_dead_head_waits_for_a_living_tail() -> None:
    """Somebody else's conversation stands on it (invariant 7); it takes over when the other was used, and goes then."""
    world = World(8)
    prompt, mine = chain("p", 2), chain("m", 1)
    theirs = chain("t", 1, parent=prompt[-1])
    store(world.h, [*prompt, *theirs])
    store(world.h, mine)
    world.give(prompt, Hint.DEAD)
    assert world.order() == "t0 p1 p0 m0", "not before its tail"
    world.h.access(theirs)
    assert world.order() == "m0 t0 p1 p0", "a tail that is in use keeps its head, whatever was said of that"


def test_the_dead_sink_a_level_and_count_as_new_there() -> None:
    """A hint deletes nothing: the chunk is copied down like any victim, and the hint has then had its effect."""
    world = World(4, disk(writes=Writes.DEMOTE))
    first, session, last = loners("a"), chain("s", 2), loners("b", "c")
    for part in (first, session):
        store(world.h, part)
    assert world.give(session, Hint.DEAD) == (2, 0)
    store(world.h, last[:1])
    world.run()
    store(world.h, last[1:])
    world.run()
    assert world.find("s1") == 1 and world.find("a") == 0, "the dead first, although they were newer"
    store(world.h, loners("d", "e", "f"))
    world.run()
    order = world.order(1).split()
    assert order.index("s1") < order.index("a") or "a" not in order, "below it is in order of arrival, as any other"
    world.h.promote(session[:1])
    world.run()
    assert world.find("s0") == 0, "nothing was lost"


def test_a_copy_below_stays_where_it_is() -> None:
    """Where a copy lies below already, the hint acts on the fastest level alone; said again, it acts on the next."""
    world = World(2, disk())
    session = chain("s", 2)
    store(world.h, session)
    world.run()
    store(world.h, loners("a", "b"))
    world.run()
    assert world.order(1) == "s1 s0 b a"
    world.h.promote(session)
    world.run()
    world.h.access(session)
    assert world.order(1) == "b a s1 s0"
    world.give(session, Hint.DEAD)
    assert world.order(1) == "b a s1 s0"
    store(world.h, loners("c", "d"))
    world.run()
    world.give(session, Hint.DEAD)
    assert world.order(1) == "s1 s0 b a d c"


def test_hints_reach_what_is_still_being_stored() -> None:
    """A request may be over before its last copies are: they are dead as soon as they can leave."""
    world = World(4)
    store(world.h, loners("a"))
    reserved = world.h.offer(chain("s", 2)).reserved
    assert world.give(chain("s", 3), Hint.DEAD) == (2, 1), "what nobody has is ignored and counted"
    assert world.order() == "a"
    world.h.commit_store(reserved)
    assert world.order() == "s1 s0 a"


# -- keep --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ORDERS)
def test_what_is_kept_leaves_last(name: str) -> None:
    """In every order, used or not; and where nothing else is left it leaves, tail before head."""
    world = World(8, policy=ORDERS[name]())
    kept, others = chain("k", 2), loners("a", "b", "c")
    store(world.h, kept)
    for other in others:
        store(world.h, [other])
    assert world.give(kept, Hint.KEEP) == (2, 0)
    order = world.order().split()
    assert order[-2:] == ["k1", "k0"] and len(order) == 5
    world.h.access(kept)
    assert world.order().split()[-2:] == ["k1", "k0"]
    new = chain("n", 8)
    assert len(store(world.h, new)) == 8, "a keep is no pin"


def test_a_head_takes_no_keep_over() -> None:
    """A tail that was kept and has gone leaves its head where that stands by its uses."""
    world = World(8)
    session = chain("s", 2)
    store(world.h, session)
    store(world.h, loners("a"))
    world.give(session[1:], Hint.KEEP)
    assert world.order() == "a s1 s0"
    world.h.delete([session[1].key])
    assert world.order() == "s0 a"


def test_a_keep_ends() -> None:
    """An hour after it was last said, and at once for the oldest where more than half of the level is kept."""
    world = World(4)
    old, young = loners("a", "b"), loners("c")
    for chunk in (*old, *young):
        store(world.h, [chunk])
    world.give(old[:1], Hint.KEEP)
    assert world.order() == "b c a"
    world.clock.advance(HOUR_S / 2)
    world.give(young, Hint.KEEP)
    world.clock.advance(HOUR_S / 2)
    assert world.order() == "a b c", "where it would stand without"
    world.give(old, Hint.KEEP)
    assert world.order() == "c a b", "two of four; the oldest had to give way"


def test_a_kept_prompt_is_not_killed_by_those_who_share_it() -> None:
    """A one-shot call that says dead of all its chunks does not mean what others keep."""
    world = World(8)
    prompt = chain("p", 2)
    call = chain("c", 1, parent=prompt[-1])
    store(world.h, [*prompt, *call])
    store(world.h, loners("a"))
    world.give(prompt, Hint.KEEP)
    world.give([*prompt, *call], Hint.DEAD)
    assert world.order() == "c0 a p1 p0"


def test_a_quota_and_an_expiry_come_before_a_keep() -> None:
    """A tenant that keeps all it has is still held to its quota, and what has expired leaves, kept or not."""
    world = World(8, policy=Quota({"red": 2 * SLOT}, LRU()))
    store(world.h, loners("a", "b"))
    red = loners("r", "s", "t", tenant="red")
    for chunk in red:
        store(world.h, [chunk])
    world.give(red, Hint.KEEP)
    assert world.order().split()[0] in {"r", "s", "t"} and world.order().split()[1:3] == ["b", "a"]
    clock = ManualClock()
    aging = World(8, policy=TTL(LRU(), 10, clock))
    store(aging.h, loners("a"))
    aging.give(loners("a"), Hint.KEEP)
    clock.advance(5)
    store(aging.h, loners("b"))
    clock.advance(5)
    assert aging.order() == "a b"


# -- lifetimes ---------------------------------------------------------------------------------------------------------


def test_a_lifetime_goes_with_the_chunk() -> None:
    """Up and down, and what is over is a miss at every level at once; the next refresh frees it."""
    world = World(2, disk(writes=Writes.DEMOTE))
    session = chain("s", 1)
    store(world.h, session)
    assert world.give(session, Hint.TTL(10)) == (1, 0)
    for _ in range(2):
        store(world.h, loners("a", "b"))
        world.run()
    assert world.find("s0") == 1
    world.clock.advance(9.5)
    world.h.promote(session)
    world.run()
    assert world.find("s0") == 0 and world.h.levels[1].readable(ChunkKey(b"s0"))
    world.clock.advance(0.5)
    assert world.find("s0") == -1
    assert world.give(session, Hint.TTL(10)) == (0, 1), "what is over stays over"
    world.h.refresh()
    world.run()
    assert [level.counts.dropped[Reason.EXPIRED] for level in world.h.levels] == [1, 1]
    assert b"s0" not in {entry.key for level in world.h.levels for entry in level.ledger}
    store(world.h, session)
    world.clock.advance(100)
    assert world.find("s0") == 0, "stored anew, it is another chunk's life"


def test_the_latest_lifetime_counts() -> None:
    """A session that goes on says so; the wrapper's age is a limit that no hint extends."""
    world = World(4)
    store(world.h, loners("a"))
    world.give(loners("a"), Hint.TTL(10))
    world.clock.advance(9)
    world.give(loners("a"), Hint.TTL(10))
    world.clock.advance(9)
    assert world.find("a") == 0
    clock = ManualClock()
    aging = World(4, policy=TTL(LRU(), 5, clock))
    store(aging.h, loners("a"))
    aging.give(loners("a"), Hint.TTL(10))
    clock.advance(5)
    assert aging.find("a") == -1


def test_a_lease_outlasts_a_lifetime() -> None:
    """What somebody reads stays until it is let go; then it is the first to leave."""
    world = World(2)
    store(world.h, loners("a", "b"))
    entry = world.h.primary.get(ChunkKey(b"b"))
    assert entry is not None
    world.h.hold(entry)
    world.give(loners("b"), Hint.TTL(1))
    world.clock.advance(1)
    world.h.refresh()
    assert world.h.primary.get(ChunkKey(b"b")) is entry and world.order() == "a"
    world.h.release(entry)
    assert world.order() == "b a"
    world.h.refresh()
    assert world.order() == "a"


# -- the cache ---------------------------------------------------------------------------------------------------------


async def test_the_cache_takes_hints() -> None:
    """A session that has ended makes room for the next one, and is found below; an unknown key is counted."""
    async with cache_of(MemoryTier(name="lower"), n_slots=4) as cache:
        old, ended, new = ([*prompt(branch, 2)] for branch in (1, 2, 3))
        for tokens in (old, ended):
            await cache.store(tokens, buffers(cache.chunks(tokens)))
        keys = [chunk.key for chunk in cache.chunks(ended)]
        assert cache.hint([*keys, ChunkKey(b"nobody's")], Hint.DEAD) == (2, 1)
        await cache.wait_idle()
        await cache.store(new, buffers(cache.chunks(new)))
        assert (await cache.lookup(old)).levels == (0, 0)
        assert 1 in (await cache.lookup(ended)).levels


async def test_a_wrong_hint_is_refused_in_a_sentence() -> None:
    """Before anything was changed, with what is allowed; a key alone is a mistake, not thirty-two unknown keys."""
    async with cache_of() as cache:
        for wrong in ("dead", None, Hint("ttl"), Hint("drop")):
            with pytest.raises(ConfigError, match=r"hint is .* must be Hint\.DEAD, Hint\.KEEP or Hint\.TTL"):
                cache.hint([], wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="not one"):
            cache.hint(ChunkKey(b"key"), Hint.DEAD)  # type: ignore[arg-type]
    for ttl_s in (0, -1, float("nan"), "10", True):
        with pytest.raises(ConfigError, match="ttl_s is"):
            Hint.TTL(ttl_s)  # type: ignore[arg-type]


def test_a_promoted_chunk_stays_its_tenants() -> None:
    """A chunk counts for who stored it: whoever asks for it names no tenant, or another."""
    world = World(1, disk())
    for chunk in (*loners("a", tenant="red"), *loners("b")):
        store(world.h, [chunk])
        world.run()
    (entry,) = world.h.promote(loners("a", tenant="blue"))
    assert entry.chunk.tenant == "red"


class ByKey(SIEVE):
    """An order that is told of uses by key, and of nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[list[ChunkKey]] = []

    def on_use(self, keys: Sequence[ChunkKey]) -> None:
        self.used.append([*keys])

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        raise AssertionError(f"chunks were made: {chunks}")


class ByKeyWithHints(ByKey):
    def on_hint(self, key: ChunkKey, turn: Turn) -> None:
        """They change nothing here."""


@pytest.mark.parametrize("kind", [ByKey, ByKeyWithHints])
@pytest.mark.parametrize("hint", [Hint.DEAD, Hint.KEEP, Hint.TTL(HOUR_S)], ids=["dead", "keep", "ttl"])
def test_uses_are_told_by_key_after_a_hint_as_before(kind: type[ByKey], hint: Hint) -> None:
    """No chunk is made for a use of an order that needs none, also where that order takes no hints by itself."""
    order = kind()
    world, session = World(4, policy=order), chain("s", 3)
    store(world.h, session)
    world.h.access(session[:2])
    assert world.give(session[1:2], hint) == (1, 0)
    world.h.access(session)
    assert order.used == [[chunk.key for chunk in used] for used in (session[:2], session)]


def test_nobody_pays_who_does_not_hint() -> None:
    """Until the first hint a level's order is the one that it was given, wrapped in nothing."""
    order = LRU()
    world = World(2, policy=order)
    store(world.h, loners("a"))
    assert world.h.primary.policy is order
    world.give(loners("b"), Hint.DEAD)
    assert world.h.primary.policy is order, "nor by a hint about nothing"
