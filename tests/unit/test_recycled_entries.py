"""A level that recycles: the entries of chunks that an order let go become those of the next chunks."""

from __future__ import annotations

import pytest

from tierkv._entry import GONE, PENDING, READY, Columns, Entry
from tierkv._hierarchy import Hierarchy
from tierkv._ledger import Ledger
from tierkv._level import LevelPlan
from tierkv.policies import LRU
from tierkv.types import Chunk, ChunkKey

SLOT = 64


def keys(*names: str) -> list[ChunkKey]:
    return [ChunkKey(name.encode()) for name in names]


def ledger_of(n_slots: int, *, recycles: bool = True) -> Ledger:
    return Ledger(name="primary", capacity_nbytes=0, policy=LRU(), n_slots=n_slots, slot_nbytes=SLOT, recycles=recycles)


def columns_of(
    ledger: Ledger, *names: str, parent: ChunkKey | None = None, chained: bool = True, tenant: str = ""
) -> Columns:
    ends = [16 * (i + 1) for i in range(len(names))]
    return Columns(keys(*names), ends, parent, chained, ledger.kinds.of((0, SLOT, tenant, False)))


def stored(ledger: Ledger, columns: Columns) -> list[Entry]:
    entries = ledger.reserve_columns(columns)
    ledger.commit(entries)
    return entries


def test_an_entry_is_used_again_and_remembers_nothing() -> None:
    """Slot and object are those of the chunk that left; all that was said of that one is said anew."""
    ledger = ledger_of(3)
    old = stored(ledger, columns_of(ledger, "a0", "a1", "a2", tenant="one"))
    slots, generations = [entry.slot for entry in old], [entry.generation for entry in old]
    gone = ledger.evict(2, ())
    assert gone is not None and [entry.key for entry in gone] == keys("a2", "a1")
    assert [entry.state for entry in gone] == [GONE, GONE] and len(ledger) == 1
    new = ledger.reserve_columns(columns_of(ledger, "b0", "b1", chained=False))
    assert [id(entry) for entry in new] == [id(old[1]), id(old[2])]
    assert [entry.slot for entry in new] == slots[1:]
    assert all(entry.generation > before for entry, before in zip(new, generations[1:], strict=True))
    assert [entry.chunk for entry in new] == [
        Chunk(key, None, 0, 16 * (i + 1), SLOT) for i, key in enumerate(keys("b0", "b1"))
    ]
    assert all(entry.state is PENDING and entry.writing and not entry.stored for entry in new)
    ledger.check()
    ledger.commit(new)
    assert list(ledger.policy.victims()) == keys("a0", "b1", "b0")
    gone = ledger.evict(3, ())
    assert gone is not None and [entry.key for entry in gone] == keys("a0", "b1", "b0"), "they are nobody's children"
    ledger.check()


def test_one_chunk_is_filled_as_many_are() -> None:
    """What takes the way for a single chunk forgets as much."""
    ledger = ledger_of(2)
    old = stored(ledger, columns_of(ledger, "a0", "a1"))
    assert ledger.evict(1, ()) == [old[1]]
    chunk = Chunk(ChunkKey(b"b0"), None, 3, 8, 5, "two")
    entry = ledger.reserve_one(chunk)
    assert entry is old[1] and entry.chunk == chunk
    ledger.commit([entry])
    assert list(ledger.policy.victims()) == keys("a0", "b0")
    ledger.check()


@pytest.mark.parametrize("recycles", [False, True])
def test_what_did_not_leave_by_eviction_is_not_used_again(recycles: bool) -> None:
    """A removed entry stays a handle of its chunk, whoever has its slot: somebody may hold it still."""
    ledger = ledger_of(1, recycles=recycles)
    (old,) = stored(ledger, columns_of(ledger, "a0"))
    ledger.hold(old)
    ledger.remove(old, evicted=False)
    ledger.release(old)
    ledger.free(old)
    (new,) = stored(ledger, columns_of(ledger, "b0"))
    assert new is not old and new.slot == old.slot
    assert old.state is GONE and old.key == keys("a0")[0]


def test_without_it_every_chunk_has_an_entry_of_its_own() -> None:
    """The cache without an engine keeps entries over calls: they must stay what they were."""
    plan = LevelPlan("primary", 0, LRU(), n_slots=2, slot_nbytes=SLOT)
    hierarchy = Hierarchy([plan])
    kept = hierarchy.offer([Chunk(key, nbytes=SLOT) for key in keys("a", "b")]).reserved
    hierarchy.commit_store(kept)
    new = hierarchy.offer([Chunk(key, nbytes=SLOT) for key in keys("c", "d")]).reserved
    assert not {id(entry) for entry in kept} & {id(entry) for entry in new}
    assert [entry.state for entry in kept] == [GONE, GONE] and [entry.key for entry in kept] == keys("a", "b")
    hierarchy.check()


def test_pins_are_told_from_the_writer() -> None:
    """A pin on a chunk that is being written outlives the commit; the writer's hold ends with it."""
    ledger = ledger_of(2)
    first, second = ledger.reserve_columns(columns_of(ledger, "a0", "a1"))
    ledger.hold(first)
    assert (first.n_pins, second.n_pins, ledger.n_held) == (1, 0, 1) and first.writing and second.writing
    ledger.hold(first, second)
    assert (first.n_pins, second.n_pins, ledger.n_held) == (2, 1, 2)
    ledger.check()
    ledger.commit([first, second])
    assert (first.holds, second.holds) == (2, 1) and first.state is READY and first.stored
    assert ledger.evict(2, ()) == []
    ledger.release(first, second)
    assert (first.holds, second.holds, ledger.n_held) == (1, 0, 1)
    ledger.release(first)
    ledger.check()
    with pytest.raises(AssertionError, match="matches a hold"):
        ledger.release(first)
