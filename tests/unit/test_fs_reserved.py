"""What lies on a root is never more than its owners' pages claim, nor than its capacity: seen after every change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.fs_kit import (
    CHARGE,
    PAGE,
    _mount,
    capacity_for,
    chunk_of,
    context,
    is_slab,
    key_of,
    kill,
    layout,  # noqa: F401
    opened,
    recount,
    scanned,
    store,
    write,
)
from tests.instants import Instants, reserved
from tierkv.testing import ManualClock
from tierkv.tiers._fs import mount as _fs_mount
from tierkv.tiers._fs import owners as _fs_owners
from tierkv.tiers._fs.garbage import Garbage, Wish
from tierkv.tiers._fs.inspection import Root
from tierkv.tiers._fs.page import processes
from tierkv.tiers.fs import FSTier
from tierkv.types import Chunk

N_CHUNKS = 24


@pytest.fixture
def instants(root: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> Instants:  # noqa: F811 - the fixture
    return Instants(root, capacity_for(N_CHUNKS), monkeypatch)


@pytest.fixture(autouse=True)
def _no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats come when a test says so."""
    monkeypatch.setattr(_fs_mount, "HEARTBEAT_S", 3600.0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


_opened: list[FSTier] = []


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    """Whatever a test that fails has not closed."""
    yield
    while _opened:
        tier = _opened.pop()
        if tier._closing is None:
            kill(tier)


async def newcomer(root: Path, clock: ManualClock, namespace: bytes = b"a namespace") -> FSTier:
    tier = FSTier(root, capacity=capacity_for(N_CHUNKS), min_free=0, clock=clock)
    _opened.append(tier)
    await tier.open(context(namespace=namespace))
    return await scanned(tier)


async def beat(*tiers: FSTier) -> None:
    for tier in tiers:
        _mount(tier).beat()
        await scanned(tier)


async def fill(tier: FSTier, first: int = 1000) -> None:
    """Until it takes no more."""
    await beat(tier)
    for i in range(first, first + 2 * N_CHUNKS):
        await write(tier, chunk_of(i))


async def adopted(root: Path, clock: ManualClock, n_chunks: int = 3) -> FSTier:
    """A process that holds two ids with so many chunks each, its own and a dead one's."""
    one, two = await newcomer(root, clock), await newcomer(root, clock)
    await beat(one, two, one, two)
    await store(one, *(chunk_of(i) for i in range(n_chunks)))
    await store(two, *(chunk_of(100 + i) for i in range(n_chunks)))
    await beat(one, two)
    kill(two)
    await _later(clock, one)
    assert len(_mount(one)._ownership.held_ids()) == 2
    return one


async def _later(clock: ManualClock, *tiers: FSTier) -> None:
    """Whoever is dead now is adopted."""
    await beat(*tiers)
    clock.now_s += 2 * _fs_owners.ADOPT_AFTER_S
    await beat(*tiers)


async def test_a_newcomer_takes_all_that_a_dead_process_held(
    root: Path, instants: Instants, clock: ManualClock
) -> None:
    """And not one of its ids: one page had claimed the bytes of all, and without it nobody counted the others'.

    The newcomer then wrote over the capacity by as much as they held.
    """
    old = await adopted(root, clock)
    new = await newcomer(root, clock)
    await beat(old, new)
    kill(old)
    await beat(new)
    assert len(_mount(new)._ownership.held_ids()) == 3
    await fill(new)
    assert instants.wrong == []
    await new.aclose()
    assert instants.wrong == [] and instants.highest_nbytes > capacity_for(N_CHUNKS) - 4 * CHARGE


async def test_a_dead_process_of_two_namespaces_goes_to_one_heir(
    root: Path, instants: Instants, clock: ManualClock
) -> None:
    """Also if others could read a part of it: to whoever may take the id that the process wrote under."""
    dead = await newcomer(root, clock, b"another")
    old = await newcomer(root, clock)
    await beat(dead, old, dead, old)
    await store(dead, *(chunk_of(i) for i in range(3)))
    await store(old, *(chunk_of(10 + i) for i in range(3)))
    kill(dead)
    await _later(clock, old)
    assert len(_mount(old)._ownership.held_ids()) == 2
    heirs = [await newcomer(root, clock, b"another"), await newcomer(root, clock)]
    await beat(old, *heirs)
    kill(old)
    await beat(*heirs)
    await _later(clock, *heirs)
    assert [len(_mount(heir)._ownership.held_ids()) for heir in heirs] == [1, 3]
    for heir in heirs:
        await fill(heir)
    for heir in heirs:
        await heir.aclose()
    assert instants.wrong == []


async def test_who_leaves_only_an_adopted_ids_files_says_so_in_its_page(
    root: Path, instants: Instants, clock: ManualClock
) -> None:
    """The page of its own id goes, as no file carries that; it was the only one that claimed what the other left."""
    old = await adopted(root, clock)
    other = await newcomer(root, clock)
    await beat(old, other)
    await old.delete([key_of(i) for i in range(3)])
    own = _mount(old)._ownership.id
    await old.aclose()
    assert not (root / f"owner-{own}.lock").exists()
    assert reserved(root) - _mount(other).books.limit_nbytes >= 3 * CHARGE
    await fill(other)
    await other.aclose()
    assert instants.wrong == []


async def test_who_leaves_nothing_takes_its_claim_away_last(root: Path, instants: Instants, clock: ManualClock) -> None:
    """A kill in the middle of leaving may not leave a lock file that nobody counts."""
    old = await adopted(root, clock)
    await old.delete([key_of(i) for i in (*range(3), *range(100, 103))])
    await old.aclose()
    assert not list(root.glob("owner-*.lock")) and instants.wrong == []


async def test_dead_processes_ids_are_handed_back_with_what_each_holds(
    root: Path, instants: Instants, clock: ManualClock
) -> None:
    """The page that had claimed two ids' bytes is lowered after the other's was raised."""
    old, larger = await adopted(root, clock, 4 if is_slab() else 5), await newcomer(root, clock)
    await beat(old, larger, old)
    await fill(larger)  # to its limit: what is claimed is what is there
    await beat(old, larger)
    for tier in (old, larger):
        kill(tier)
    taken = await newcomer(root, clock)
    assert len(list(root.glob("owner-*.lock"))) == 3 and len(_mount(taken)._ownership.held_ids()) == 1
    await fill(taken)
    await taken.aclose()
    assert instants.wrong == []


async def test_empty_lock_files_that_are_adopted_get_a_page_only_where_there_is_room(
    root: Path, instants: Instants, clock: ManualClock
) -> None:
    """Newcomers came to a full root and died: who adopts their ids has no room for a page for each."""
    async with opened(root, capacity=capacity_for(N_CHUNKS), clock=clock) as old:
        await fill(old)
        n_dead = (capacity_for(N_CHUNKS) - recount(root)) // PAGE + 1
        for i in range(n_dead):
            (root / f"owner-{i:016x}.lock").touch(mode=0o600)
        await _later(clock, old)
        assert old.counters()["adopted_owners"] == n_dead
    assert instants.wrong == []


async def test_a_newcomer_without_room_for_a_page_leaves_no_index(
    root: Path, instants: Instants, clock: ManualClock
) -> None:
    """Its room was never granted: on a full root the index of nothing was over the capacity."""
    async with opened(root, capacity=capacity_for(N_CHUNKS), clock=clock) as old:
        await fill(old)
        # As if it wrote all that it may.
        (root / "filler").write_bytes(bytes(capacity_for(N_CHUNKS) - recount(root)))
        new = await newcomer(root, clock)
        assert not _mount(new)._ownership.has_page
        await new.aclose()
        assert not list(root.glob("owner-*.index"))
        (root / "filler").unlink()
    assert instants.wrong == []


async def test_an_index_beyond_its_room_is_claimed(root: Path, instants: Instants, clock: ManualClock) -> None:
    """Long names of tenants make it longer than what was set aside; what is taken from the spare is claimed, too."""
    order: Sequence[Chunk] = [chunk_of(i, tenant=f"{i:03}" * 1300) for i in range(5)]
    tier = await newcomer(root, clock)
    await store(tier, *order)
    await beat(tier)
    await tier.save_order(order)
    room_nbytes = _mount(tier)._index_room_nbytes
    await tier.aclose()
    (index,) = root.glob("owner-*.index")
    assert index.stat().st_size > room_nbytes and reserved(root) >= recount(root)
    assert instants.wrong == []


@pytest.mark.parametrize("ends", [False, True])
async def test_gc_does_not_lower_a_page_that_speaks_for_others(
    root: Path, instants: Instants, clock: ManualClock, *, ends: bool
) -> None:
    """Each id of a dead process says what it holds before the one that had said it for all of them stops to.

    That one is left with its own files, or ends.
    """
    n_chunks = 4 if is_slab() else 5
    old, other = await adopted(root, clock, n_chunks), await newcomer(root, clock)
    await beat(old, other, old)
    await fill(other)  # to its limit: what is claimed is what is there
    await old.delete([key_of(i) for i in range(n_chunks if ends else 0)])
    await beat(old, other)
    kill(old)
    looked = Root("root", str(root))
    try:
        list(Garbage(looked, Wish(), sleep=lambda _s: None).collect(dry_run=False))
    finally:
        looked.close()
    await fill(other)
    await other.aclose()
    assert instants.wrong == []


async def test_a_new_page_claims_itself(root: Path, instants: Instants, clock: ManualClock) -> None:
    """From its first byte on: a process may be killed as soon as it has made it."""
    tier = await newcomer(root, clock)
    assert reserved(root) >= PAGE
    await tier.aclose()
    assert instants.wrong == []


@pytest.mark.parametrize(
    ("holder_of", "together"),
    [
        ({"a": "a", "b": "b"}, [["a"], ["b"]]),
        ({"a": "a", "b": "a", "c": "c"}, [["a", "b"], ["c"]]),
        ({"a": "gone", "b": "gone"}, [["a", "b"]]),
        ({"a": "a", "b": "n", "n": "a"}, [["a", "b", "n"]]),
        ({"n": "n", "b": "n", "a": "n"}, [["n", "b", "a"]]),
        ({"a": "b", "b": "a"}, [["a", "b"]]),
        ({}, []),
    ],
)
def test_ids_of_one_process_are_found_by_their_holders(holder_of: dict[str, str], together: list[list[str]]) -> None:
    """Directly, by a holder whose own lock file is gone, and while a process changes its id from page to page."""
    assert processes(holder_of) == together
