"""Several owners on one root: shares, foreign chunks, adoption. Two tiers in one process are two owners."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fs_kit import (
    CHARGE,
    OVERHEAD,
    PAGE,
    capacity_for,
    chunk_of,
    context,
    fetch,
    first_batches,
    is_slab,
    key_of,
    kill,
    layout,  # noqa: F401
    n_on_disk,
    only_files,
    opened,
    path_of,
    recount,
    scanned,
    set_time,
    store,
    unfinished_of,
    write,
)
from tests.patience import PATIENCE_S
from tierkv.errors import TierError
from tierkv.tiers._fs import locks as _fs_locks
from tierkv.tiers._fs import mount as _fs_mount
from tierkv.tiers._fs import owners as _fs_owners
from tierkv.tiers._fs.page import OwnerPage
from tierkv.tiers.fs import FSTier
from tierkv.types import Found, Reason, Status

OK, MISSING, CORRUPT = Status.OK, Status.MISSING, Status.CORRUPT


@pytest.fixture(autouse=True)
def _no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats come when a test says so; the dead are adopted at the next one unless a test says otherwise."""
    monkeypatch.setattr(_fs_mount, "HEARTBEAT_S", 3600.0)
    monkeypatch.setattr(_fs_owners, "ADOPT_AFTER_S", 0.0)
    monkeypatch.setattr(_fs_owners, "FRESH_S", PATIENCE_S)


async def newcomer(root: Path, n_chunks: int) -> FSTier:
    tier = FSTier(root, capacity=capacity_for(n_chunks), min_free=0)
    await tier.open(context())
    return await scanned(tier)


def beat(*tiers: FSTier) -> None:
    for tier in tiers:
        _of(tier).beat()


def page_of(root: Path, tier: FSTier) -> OwnerPage:
    page = OwnerPage.unpack((root / f"owner-{_of(tier)._ownership.id}.lock").read_bytes())
    assert page is not None
    return page


START_S = time.time() - 10_000
"""When the first chunk was last used, where that is set."""


def locks(root: Path) -> list[str]:
    return sorted(p.name for p in root.glob("owner-*.lock"))


@only_files
async def test_a_lock_file_says_who_holds_what(root: Path) -> None:
    """One page of text: what an operator sees with cat, and what other owners go by."""
    async with opened(root, n_chunks=5) as tier:
        await store(tier, chunk_of(1))
        beat(tier)
        page = page_of(root, tier)
        assert page.capacity_nbytes == page.reserved_nbytes == capacity_for(5)
        assert page.used_nbytes == OVERHEAD + CHARGE
        assert page.pid == os.getpid() and abs(page.heartbeat_s - time.time()) < 60
        (name,) = locks(root)
        assert (root / name).stat().st_size == PAGE
        assert json.loads((root / name).read_text().splitlines()[0])["owner"] == page.owner


async def test_each_of_two_owners_gets_its_half_and_the_sum_never_exceeds(root: Path) -> None:
    """A newcomer writes nothing until the first owner has made room; then both hold half."""
    total = capacity_for(8)
    async with opened(root, capacity=total) as old:
        await store(old, *(chunk_of(i) for i in range(8)))
        async with opened(root, capacity=total) as new:
            assert new.writable and new.share_nbytes() == 0
            assert locks(root)[0] != locks(root)[1] and recount(root) <= total
            (outcome,) = await write(new, chunk_of(100))
            assert outcome.reason is Reason.FULL
            beat(old)
            assert old.share_nbytes() < 4 * CHARGE
            await old.delete([key_of(i) for i in range(5)])  # as its ledger would, to come under the share
            beat(old, new)
            assert new.share_nbytes() >= 2 * CHARGE
            await store(new, chunk_of(100), chunk_of(101))
            assert recount(root) <= total
            assert {old.usage()["n_owners"], new.usage()["n_owners"]} == {2}
            (outcome,) = await write(old, *[chunk_of(200)])
            assert old.usage()["used_nbytes"] <= total // 2
        beat(old)
        beat(old)
        assert old.usage()["n_owners"] == 1 and old.usage()["limit_nbytes"] == total


@only_files
async def test_a_newcomers_lock_file_costs_nothing_on_a_full_root(root: Path) -> None:
    """To the byte: joining a root that is full to its capacity does not exceed it; the page comes with the room."""
    total = capacity_for(4)
    async with opened(root, capacity=total) as old:
        await store(old, *(chunk_of(i) for i in range(4)))
        spare = total - recount(root)
        (root / "filler").write_bytes(bytes(spare))  # foreign: not counted by us, so the recount below is exact
        (root / "filler").unlink()
        async with opened(root, capacity=total) as new:
            assert (root / f"owner-{_of(new)._ownership.id}.lock").stat().st_size == 0
            await old.delete([key_of(0), key_of(1), key_of(2)])
            beat(old, new)
            assert page_of(root, new).capacity_nbytes == total


async def test_newcomers_that_died_at_once_cost_no_chunk(root: Path) -> None:
    """Of a full root: their lock files, which have nothing behind them, end at the next start, and nothing is trimmed.

    Found by the storm of kills: each of them took room for an index from the chunks that were there.
    """
    async with opened(root, n_chunks=10) as tier:
        await store(tier, *(chunk_of(i) for i in range(10)))
        kill(tier)
    for owner in ("0123456789abcdef", "fedcba9876543210"):
        (root / f"owner-{owner}.lock").touch(mode=0o600)
    async with opened(root, n_chunks=10) as tier:
        assert await fetch(tier, *(chunk_of(i) for i in range(10))) == [OK] * 10
        assert tier.counters()["trimmed"] == 0
        assert len([path for path in root.iterdir() if path.name.startswith("owner-")]) == 1


async def test_the_least_capacity_counts(root: Path) -> None:
    """A newcomer with less lowers everybody's; when it leaves, the others get theirs back."""
    async with opened(root, capacity=capacity_for(20)) as big:
        async with opened(root, capacity=capacity_for(8)) as small:
            beat(big, small, big, small)
            assert big.usage()["capacity_nbytes"] == small.usage()["capacity_nbytes"] == capacity_for(8)
            assert big.usage()["limit_nbytes"] == small.usage()["limit_nbytes"] == capacity_for(8) // 2
        beat(big)
        assert big.usage()["capacity_nbytes"] == capacity_for(20)


async def test_owners_read_each_others_chunks_and_evict_only_their_own(root: Path) -> None:
    """A probe finds what the other wrote; it is foreign: readable, not charged, and its removal is not ours."""
    now = [0.0]
    async with opened(root, n_chunks=40, clock=lambda: now[0]) as one, opened(root, n_chunks=40) as two:
        beat(one, two, one, two)
        assert not one.settled(key_of(1))
        assert await one.probe([key_of(1)]) == [None]
        assert one.settled(key_of(1))  # for a second
        await store(two, chunk_of(1))
        now[0] = 1.5
        assert not one.settled(key_of(1))
        assert await one.probe([key_of(1)]) == [Found(key_of(1), CHARGE, owned=False)]
        used = one.usage()["used_nbytes"]
        assert await fetch(one, chunk_of(1)) == [OK]
        await one.delete([key_of(1)])
        assert one.usage()["used_nbytes"] == used
        assert await fetch(two, chunk_of(1)) == [OK]
        await two.delete([key_of(1)])
        assert await fetch(one, chunk_of(1)) == [MISSING]


async def test_two_owners_may_hold_the_same_key(root: Path) -> None:
    """Both stored it before either knew: two files, each owner serves and removes its own."""
    async with opened(root, n_chunks=40) as one, opened(root, n_chunks=40) as two:
        beat(one, two, one, two)
        await store(one, chunk_of(1))
        await store(two, chunk_of(1))
        await one.delete([key_of(1)])
        assert await fetch(two, chunk_of(1)) == [OK]
        assert await fetch(one, chunk_of(1)) == [OK]  # the other's


async def test_a_corrupt_foreign_chunk_is_not_removed_and_not_offered_again(root: Path) -> None:
    """It belongs to its owner. Answering "found" again and again would make a request read it for ever."""
    async with opened(root, n_chunks=40) as one, opened(root, n_chunks=40) as two:
        beat(one, two, one, two)
        await store(two, chunk_of(1))
        path = path_of(root, key_of(1), two)
        set_time(root, key_of(1), two, time.time() - 10)  # what was written just now may be a slot that changes hands
        data = bytearray(path.read_bytes())
        data[PAGE] ^= 1
        path.write_bytes(data)
        assert await one.probe([key_of(1)]) != [None]
        assert await fetch(one, chunk_of(1)) == [CORRUPT]
        assert await one.probe([key_of(1)]) == [None] and path.exists()
        assert await fetch(two, chunk_of(1)) == [CORRUPT] and not path.exists()
        await store(two, chunk_of(1))
        assert await one.probe([key_of(1)]) != [None]
        assert await fetch(one, chunk_of(1)) == [OK]


async def test_a_dead_owners_files_are_adopted_whole(root: Path) -> None:
    """The survivor keeps the id, sweeps what was unfinished, learns of the chunks by the scan and may evict them."""
    async with opened(root, n_chunks=40) as one:
        two = FSTier(root, capacity=capacity_for(40), min_free=0)
        await two.open(context())
        await scanned(two)
        beat(one, two, one, two)
        await store(two, *(chunk_of(i) for i in range(5)))
        unfinished = unfinished_of(root, key_of(1), two)
        unfinished.write_bytes(bytes(PAGE))
        beat(one)
        await scanned(one)
        assert one.counters()["adopted_owners"] == 0 and unfinished.exists()  # alive, however slow
        kill(two)
        beat(one)
        assert not one.settled(key_of(1))
        found = await first_batches(one)
        assert {f.key for f in found} == {key_of(i) for i in range(5)} and all(f.owned for f in found)
        assert not unfinished.exists() and one.counters()["unfinished"] == (0 if is_slab() else 1)
        assert one.usage()["chunks_nbytes"] == 5 * CHARGE and len(locks(root)) == 2
        assert one.usage()["n_owners"] == 1
        assert await fetch(one, *(chunk_of(i) for i in range(5))) == [OK] * 5
        await one.delete([key_of(i) for i in range(5)])
        assert one.usage()["chunks_nbytes"] == 0
        await store(one, chunk_of(1))
    assert len(locks(root)) == 1  # no file carries the other id any more
    async with opened(root) as tier:
        assert len(await first_batches(tier)) == 1


async def test_an_adoption_is_trimmed_to_what_fits(root: Path) -> None:
    """The survivor is full: the dead owner's coldest go, its own chunks and the capacity stay."""
    total = capacity_for(16)
    async with opened(root, capacity=total) as one:
        two = FSTier(root, capacity=total, min_free=0)
        await two.open(context())
        await scanned(two)
        beat(one, two, one, two)
        await store(two, *(chunk_of(i) for i in range(5)))
        for i in range(5):
            set_time(root, key_of(i), two, START_S + i)
        await store(one, *(chunk_of(i) for i in range(10, 15)))
        kill(two)
        three = FSTier(root, capacity=total, min_free=0)  # so that the survivor's share stays half
        await three.open(context(namespace=b"another"))
        await scanned(three)  # which holds the dead id while it counts
        beat(one, three)
        found = await first_batches(one)
        assert 0 < len(found) < 5
        assert [f.key for f in found] == [key_of(i) for i in range(5 - len(found), 5)]
        assert await fetch(one, *(chunk_of(i) for i in range(10, 15))) == [OK] * 5
        assert one.usage()["used_nbytes"] <= one.usage()["limit_nbytes"] and recount(root) <= total
        await three.aclose()


async def test_a_dead_owner_of_a_namespace_that_somebody_reads_is_left_to_him(root: Path) -> None:
    """Chunks go to the owner that can serve them."""
    async with opened(root, n_chunks=60) as mine, opened(root, n_chunks=60, ctx=context(namespace=b"x")) as theirs:
        dead = FSTier(root, capacity=capacity_for(60), min_free=0)
        await dead.open(context(namespace=b"x"))
        await scanned(dead)
        beat(mine, theirs, dead, mine, theirs, dead)
        await store(dead, chunk_of(1))
        kill(dead)
        beat(mine)
        assert mine.counters()["adopted_owners"] == 0
        beat(theirs)
        assert theirs.counters()["adopted_owners"] == 1
        assert [f.key for f in await first_batches(theirs)] == [key_of(1)]


async def test_ids_of_a_dead_holder_change_hands_together(root: Path) -> None:
    """A process that held two ids dies: nothing of either is lost, whoever takes them, and no byte goes uncounted."""
    async with opened(root, n_chunks=20) as one:
        await store(one, chunk_of(2))  # else it would go on under the dead one's id alone
        two = await newcomer(root, 20)
        beat(one, two, one, two)
        await store(two, chunk_of(1))
        kill(two)
        beat(one)
        await scanned(one)
        beat(one)
        kill(one)
    three = await newcomer(root, 20)
    four = await newcomer(root, 20)
    beat(three, four, three, four)
    await scanned(three)
    await scanned(four)
    for tier in (three, four):
        assert await fetch(tier, chunk_of(1), chunk_of(2)) == [OK, OK]
    assert sum(t.usage()["chunks_nbytes"] for t in (three, four)) == 2 * CHARGE
    await three.aclose()
    await four.aclose()


@pytest.mark.parametrize("first_to_go", ["own", "adopted"])
async def test_a_process_that_is_half_dead_is_alive(root: Path, first_to_go: str) -> None:
    """The kernel drops a dying process's locks one by one; what it reserved for all of them stands in one page."""
    one = await newcomer(root, 20)
    await store(one, chunk_of(1))
    two = await newcomer(root, 20)
    beat(one, two, one, two)
    await store(two, chunk_of(2))
    kill(two)
    beat(one)
    await scanned(one)
    async with opened(root, n_chunks=20) as three:
        beat(one, three, one, three)
        ownership = _of(one)._ownership
        owner = next(o for o in ownership.held_ids() if (o == ownership.id) == (first_to_go == "own"))
        ownership._let_go(owner)
        beat(three)
        assert three.counters()["adopted_owners"] == 0
        kill(one)
        beat(three)
        await scanned(three)
        assert three.counters()["adopted_owners"] == 2
        assert {f.key for f in await first_batches(three)} == {key_of(1), key_of(2)}


async def test_when_all_processes_restart_each_finds_its_part_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first to come takes one dead id and leaves the others, readable, to those that follow: nothing is trimmed.

    Had it adopted everything, its share would force it to throw half of that away when the second one comes.
    """
    monkeypatch.setattr(_fs_owners, "ADOPT_AFTER_S", 60.0)
    total = capacity_for(20)
    tiers = [await newcomer(root, 20), await newcomer(root, 20)]
    for round_ in range(3):
        beat(*tiers, *tiers)
        if not round_:
            for i, tier in enumerate(tiers):
                await store(tier, *(chunk_of(10 * i + j) for j in range(8)))
        assert sum(t.usage()["chunks_nbytes"] for t in tiers) == 16 * CHARGE
        assert {len(await first_batches(t)) for t in tiers} == ({0} if not round_ else {8})
        for tier in tiers:
            assert await fetch(tier, *(chunk_of(10 * i + j) for i in range(2) for j in range(8))) == [OK] * 16
        assert recount(root) <= total and len(locks(root)) == 2
        if round_ == 1:
            for tier in tiers:
                await tier.aclose()
        else:
            for tier in tiers:
                kill(tier)
        tiers = [await newcomer(root, 20), await newcomer(root, 20)]
    for tier in tiers:
        await tier.aclose()


@only_files
async def test_a_dead_owner_that_does_not_come_back_is_adopted_after_a_minute(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then its chunks are foreign: readable, its bytes reserved; its unfinished files go at the next open."""
    monkeypatch.setattr(_fs_owners, "ADOPT_AFTER_S", 60.0)
    now = [0.0]
    one, two = await newcomer(root, 20), await newcomer(root, 20)
    beat(one, two, one, two)
    await store(one, *(chunk_of(i) for i in range(5)))
    await store(two, *(chunk_of(i) for i in range(5, 8)))
    beat(one, two)
    unfinished = unfinished_of(root, key_of(6), two)
    unfinished.write_bytes(bytes(100))
    kill(one)
    kill(two)
    async with opened(root, n_chunks=20, clock=lambda: now[0]) as three:
        assert not unfinished.exists()
        assert {f.key for f in await first_batches(three)} == {key_of(i) for i in range(5)}
        assert await fetch(three, *(chunk_of(i) for i in range(8))) == [OK] * 8
        assert (await three.probe([key_of(6)]))[0] == Found(key_of(6), CHARGE, owned=False)
        if not is_slab():
            assert three.usage()["limit_nbytes"] == capacity_for(20) - 3 * CHARGE - OVERHEAD
        for now[0], n_adopted in ((59.0, 0), (120.0, 1)):
            beat(three)
            assert three.counters()["adopted_owners"] == n_adopted
        assert {f.key for f in await first_batches(three)} == {key_of(i) for i in range(5, 8)}
        beat(three)
        assert three.usage()["limit_nbytes"] == capacity_for(20)


async def test_a_process_that_has_no_files_yet_goes_on_with_a_dead_ones(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came while the other still lived, or while a third one's scan held the dead id: no need to wait a minute."""
    monkeypatch.setattr(_fs_owners, "ADOPT_AFTER_S", 60.0)
    old = await newcomer(root, 20)
    await store(old, chunk_of(1))
    old_id = _of(old)._ownership.id
    async with opened(root, n_chunks=20) as new, opened(root, n_chunks=20, ctx=context(namespace=b"x")) as other:
        beat(old, new, other)
        kill(old)
        beat(other, new)
        await scanned(new)
        assert (other.counters()["adopted_owners"], new.counters()["adopted_owners"]) == (0, 1)
        assert _of(new)._ownership.id == old_id
        assert [f.key for f in await first_batches(new)] == [key_of(1)]
        await store(new, chunk_of(2))
        assert len(path_of(root, key_of(2), new).read_bytes()) == CHARGE
        beat(new, other)
        assert _of(other)._ownership.n_owners == 2
    assert locks(root) == [f"owner-{old_id}.lock"]  # the id that it made up was of no use


async def test_who_goes_on_with_an_adopted_id_writes_under_it_only_after_its_scan(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That scan removes what is unfinished under the id; it took away the very file that was being written."""
    monkeypatch.setattr(_fs_owners, "ADOPT_AFTER_S", 60.0)
    go_on, held = threading.Event(), threading.Event()
    go_on.set()

    def gate(_n_done: int, _n_leaves: int) -> None:
        held.set()
        assert go_on.wait(PATIENCE_S)

    old = await newcomer(root, 20)
    await store(old, chunk_of(1))
    old_id = _of(old)._ownership.id
    async with opened(root, n_chunks=20, _scan_gate=gate) as new:
        own_id = _of(new)._ownership.id
        beat(old, new, old, new)
        held.clear()
        go_on.clear()
        try:
            kill(old)
            beat(new)
            assert await asyncio.to_thread(held.wait, PATIENCE_S)
            assert own_id == _of(new)._ownership.id != old_id
            await store(new, chunk_of(2))
            assert path_of(root, key_of(2), new).exists(), "under an id that nobody tidies up"
        finally:
            go_on.set()
        await scanned(new)
        assert _of(new)._ownership.id == old_id
        await store(new, chunk_of(3))
        assert await fetch(new, chunk_of(1), chunk_of(2), chunk_of(3)) == [Status.OK] * 3
        beat(new)
        await store(new, chunk_of(2))
        assert recount(root) <= capacity_for(20)


async def test_a_root_fuller_than_its_new_capacity_is_trimmed_over_all_dead_owners(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those whose ids are left to others: coldest first, whoever wrote them."""
    monkeypatch.setattr(_fs_owners, "ADOPT_AFTER_S", 60.0)
    one, two = await newcomer(root, 20), await newcomer(root, 20)
    beat(one, two, one, two)
    for i in range(10):
        tier = (one, two)[i % 2]
        await store(tier, chunk_of(i))
        set_time(root, key_of(i), tier, START_S + i)
    kill(one)
    kill(two)
    async with opened(root, n_chunks=6) as three:
        assert recount(root) <= capacity_for(6)
        n_left = 4 if is_slab() else 5  # a dead owner's catalogue stays with its chunks
        assert await fetch(three, *(chunk_of(i) for i in range(10))) == [MISSING] * (10 - n_left) + [OK] * n_left


async def test_duplicates_from_an_adoption_are_dropped(root: Path) -> None:
    """One key under two ids of ours is one too many."""
    async with opened(root, n_chunks=40) as one:
        two = FSTier(root, capacity=capacity_for(40), min_free=0)
        await two.open(context())
        await scanned(two)
        beat(one, two, one, two)
        await store(one, chunk_of(1))
        await store(two, chunk_of(1), chunk_of(2))
        kill(two)
        beat(one)
        assert [f.key for f in await first_batches(one)] == [key_of(2)]
        assert one.usage()["chunks_nbytes"] == 2 * CHARGE
        assert n_on_disk(root) == 2


async def test_rewriting_an_adopted_chunk_removes_the_old_file(root: Path) -> None:
    """The new file carries our own id; both exist for a moment, and both are charged for it."""
    async with opened(root, n_chunks=40) as one:
        two = FSTier(root, capacity=capacity_for(40), min_free=0)
        await two.open(context())
        await scanned(two)
        beat(one, two, one, two)
        await store(one, chunk_of(5))  # else it would go on under the dead one's id
        await store(two, chunk_of(1))
        kill(two)
        beat(one)
        await scanned(one)
        await store(one, chunk_of(1))
        assert one.usage()["chunks_nbytes"] == 2 * CHARGE
        assert n_on_disk(root) == 2


async def test_adoption_goes_on_while_the_scan_generator_is_read(root: Path) -> None:
    """``scan`` stays open after the start-up and brings the adopted chunks."""
    async with opened(root, n_chunks=40) as one:
        two = FSTier(root, capacity=capacity_for(40), min_free=0)
        await two.open(context())
        await scanned(two)
        beat(one, two, one, two)
        await store(two, chunk_of(1))
        kill(two)
        beat(one)
        async for batch in one.scan():
            assert batch == [Found(key_of(1), CHARGE)]
            break


async def test_the_last_write_before_a_kill_is_counted_by_the_survivor(root: Path) -> None:
    """The page may be a heartbeat old: what a dead owner had reserved covers what it wrote since."""
    async with opened(root, n_chunks=20) as one:
        two = FSTier(root, capacity=capacity_for(20), min_free=0)
        await two.open(context())
        await scanned(two)
        beat(one, two, one, two)
        await store(two, *(chunk_of(i) for i in range(5)))
        kill(two)
        _of(one)._ownership.refresh()  # adopted, not yet scanned
        assert one.usage()["chunks_nbytes"] == 0  # counted so far: lock files, the index, an own catalogue
        assert _of(one).books.used_nbytes >= OVERHEAD + 5 * CHARGE
        assert recount(root) <= _of(one).books.used_nbytes


async def test_without_flock_one_warning_and_exclusive_use(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some FUSE file systems have none: earlier runs' files are still found; a second live process is refused."""

    def no_flock(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no flock")

    monkeypatch.setattr(fcntl, "flock", no_flock)
    caplog.set_level(logging.WARNING)
    tier = FSTier(root, capacity=capacity_for(20), min_free=0)
    await tier.open(context())
    await scanned(tier)
    await store(tier, chunk_of(1))
    beat(tier, tier)
    assert len([r for r in caplog.records if "flock" in r.message]) == 1
    kill(tier)
    async with opened(root) as tier:
        assert [f.key for f in await first_batches(tier)] == [key_of(1)]
        page = page_of(root, tier)
        path = root / f"owner-{page.owner}.lock"
        for pid, boot in ((1, page.boot), (12345, "another machine")):
            other = OwnerPage(**{**page.__dict__, "pid": pid, "boot": boot})
            path.write_bytes(other.pack())
            with pytest.raises(TierError, match="in use by process"):
                await FSTier(root, capacity=capacity_for(20)).open(context())


async def test_a_held_root_lock_is_an_error_with_a_deadline(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process stopped in the wrong moment: opening says so instead of hanging; a heartbeat skips."""
    monkeypatch.setattr(_fs_locks, "_ROOT_LOCK_TIMEOUT_S", 0.05)
    async with opened(root) as tier:
        fd = os.open(root / "tierkv.lock", os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            with pytest.raises(TierError, match=r"tierkv\.lock"):
                await FSTier(root, capacity=capacity_for(20)).open(context())
            with pytest.raises(TierError):
                beat(tier)
            await store(tier, chunk_of(1))
        finally:
            os.close(fd)
        beat(tier)
    assert len(locks(root)) == 1


@pytest.mark.parametrize("what", ["torn page", "link", "fifo", "directory"])
async def test_a_bad_lock_file_is_no_obstacle(root: Path, what: str) -> None:
    """Nobody holds it; whatever it says, the files with its id are taken in."""
    tier = FSTier(root, capacity=capacity_for(20), min_free=0)
    await tier.open(context())
    await scanned(tier)
    await store(tier, chunk_of(1))
    path = root / f"owner-{_of(tier)._ownership.id}.lock"
    kill(tier)
    if what == "torn page":
        path.write_bytes(path.read_bytes()[:100] + bytes(PAGE - 100))
    else:
        path.unlink()
        {"link": lambda p: p.symlink_to(root / "tierkv.lock"), "fifo": os.mkfifo, "directory": os.mkdir}[what](path)
    async with opened(root) as tier:
        assert tier.writable
        await store(tier, chunk_of(2))
        assert await fetch(tier, chunk_of(1), chunk_of(2)) == [OK, OK]


@only_files
async def test_min_free_keeps_the_disk_usable(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else fills the disk: writes stop, and the share shrinks so that the ledger gives some back."""
    free = [1 << 30]
    monkeypatch.setattr(
        os, "fstatvfs", lambda _: os.statvfs_result((PAGE, PAGE, 1 << 20, 0, free[0] // PAGE, 0, 0, 0, 0, 255))
    )
    async with opened(root, n_chunks=10, min_free=1 << 20) as tier:
        await store(tier, *(chunk_of(i) for i in range(4)))
        free[0] = (1 << 20) + CHARGE
        await store(tier, chunk_of(4))
        free[0] = (1 << 20) + CHARGE - 1
        (outcome,) = await write(tier, chunk_of(5))
        assert (outcome.status, outcome.reason) == (Status.REFUSED, Reason.NO_SPACE)
        free[0] = (1 << 20) - 2 * CHARGE
        beat(tier)
        assert tier.share_nbytes() == 3 * CHARGE
        free[0] = 1 << 30
        beat(tier)
        assert tier.share_nbytes() == 10 * CHARGE


@only_files
async def test_default_capacity_is_half_of_free_and_ours(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing configured: logged, and a restart does not shrink it as the root fills."""
    caplog.set_level(logging.INFO)
    free = [100 * CHARGE]
    monkeypatch.setattr(os, "fstatvfs", lambda _: os.statvfs_result((1, 1, 1 << 40, 0, free[0], 0, 0, 0, 0, 255)))
    async with opened(root, capacity=None) as tier:
        assert tier.usage()["capacity_nbytes"] == 50 * CHARGE
        await store(tier, *(chunk_of(i) for i in range(8)))
        beat(tier)
    free[0] -= 8 * CHARGE
    async with opened(root, capacity=None) as tier:
        assert abs(tier.usage()["capacity_nbytes"] - 50 * CHARGE) <= OVERHEAD
    assert "no capacity given" in caplog.text


async def test_the_level_may_name_the_capacity(root: Path) -> None:
    """The tier's own, the level's, or the smaller of both."""
    for own, level, expected in ((None, 19, 19), (15, 0, 15), (15, 19, 15), (19, 15, 15)):
        ctx = context(0 if not level else capacity_for(level))
        async with opened(root, ctx=ctx, capacity=None if own is None else capacity_for(own)) as tier:
            assert tier.usage()["capacity_nbytes"] == capacity_for(expected)
            assert tier.share_nbytes() == expected * CHARGE


def _of(tier: FSTier) -> Any:
    assert tier._mount is not None
    return tier._mount
