"""The slab layout by itself: slots, rows, room, and what somebody may do to a slab's files."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fs_kit import (
    CHARGE,
    LONGEST,
    PAGE,
    _mount,
    capacity_for,
    chunk_bytes,
    chunk_of,
    context,
    fetch,
    files_under,
    first_batches,
    flip,
    key_of,
    kill,
    n_on_disk,
    opened,
    path_of,
    payload_of,
    recount,
    store,
    using,
    write,
)
from tests.patience import PATIENCE_S
from tierkv.errors import ConfigError, TierWriteError
from tierkv.tiers._fs import holes as _fs_holes
from tierkv.tiers._fs import mount as _fs_mount
from tierkv.tiers._fs import slab as _fs_slab
from tierkv.tiers._fs import slab_files as _fs_slab_files
from tierkv.tiers._fs.catalogue import (
    ROWS_A_BUCKET,
    Catalogue,
    catalogue_nbytes,
    head_of,
    n_buckets_for,
    parse_slab_name,
    slab_name,
)
from tierkv.tiers._fs.slab import Slab
from tierkv.tiers.fs import FSTier
from tierkv.types import ChunkKey, Reason, Status

OK, MISSING, CORRUPT = Status.OK, Status.MISSING, Status.CORRUPT


@pytest.fixture(autouse=True)
def _in_slabs() -> Iterator[None]:
    with using("slab"):
        yield


def slab_of(tier: FSTier) -> Slab:
    """The only one."""
    (slab,) = _mount(tier)._slabs._all_held()
    assert isinstance(slab, Slab)
    return slab


def only(root: Path, suffix: str) -> Path:
    (path,) = root.rglob(f"*.{suffix}")
    return path


# -- bytes ----------------------------------------------------------------------------------------------------------


async def test_neighbours_go_in_one_call_headers_and_all(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers, six chunks: two calls each way, from and into the caller's memory, and no open, rename or unlink."""
    calls: list[tuple[str, int]] = []

    def counting(name: str) -> Any:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, len(args[1]) if name.startswith("p") else 1))
            return real(*args, **kwargs)

        return call

    async with opened(root, n_write_threads=2, n_read_threads=2) as tier:
        tier._n_cores = 2
        await store(tier, chunk_of(9))  # makes the slab
        for name in ("pwritev", "preadv", "open", "rename", "unlink"):
            monkeypatch.setattr(os, name, counting(name))
        await store(tier, *(chunk_of(i) for i in range(6)))
        assert await fetch(tier, *(chunk_of(i) for i in (4, 2, 0, 5, 3, 1))) == [OK] * 6
        await tier.delete([key_of(i) for i in range(6)])
        monkeypatch.undo()
    assert calls == [("pwritev", 9)] * 2 + [("preadv", 6)] * 2


async def test_in_memory_writers_meet_and_are_no_more_than_cores(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third thread would only fight for the GIL. A lock that kept the second out made one wait for the other."""
    monkeypatch.setattr("tierkv.tiers._fs.mount.is_in_memory", lambda _: True)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    meeting = threading.Barrier(2, timeout=PATIENCE_S)
    real = os.pwritev

    def pwritev(*args: Any) -> int:
        meeting.wait()
        return real(*args)

    async with opened(root, n_chunks=64, n_write_threads=8, n_read_threads=8) as tier:
        assert (tier._write_lane.n_threads, tier._read_lane.n_threads) == (2, 2)
        await store(tier, chunk_of(9))
        monkeypatch.setattr(os, "pwritev", pwritev)
        await store(tier, *(chunk_of(i) for i in range(6)))  # a run for each worker
        monkeypatch.undo()
        assert await fetch(tier, *(chunk_of(i) for i in range(6))) == [OK] * 6


async def test_a_shorter_chunk_has_a_slot_of_its_own_length_or_not(root: Path) -> None:
    """It occupies a whole slot, comes back with zeros behind it, and its neighbours are not touched."""
    chunks = [chunk_of(0), chunk_of(1, 5), chunk_of(2, PAGE), chunk_of(3), chunk_of(4, 2 * PAGE + 1)]
    async with opened(root, n_write_threads=1) as tier:
        await store(tier, *(chunk_of(i) for i in range(5)))
        await tier.delete([key_of(i) for i in range(5)])
        await store(tier, *chunks)
        assert await fetch(tier, *chunks) == [OK] * 5
        assert tier.usage()["chunks_nbytes"] == 5 * CHARGE == chunk_bytes(root, tier)
        assert tier.charge_nbytes(5) == CHARGE


async def test_a_torn_slot_was_never_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle of a slot, over the bytes of another key: neither key, and both can be stored again."""
    real = os.pwritev

    def torn(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        real(fd, [buffers[0], buffers[1][:PAGE]], offset)
        raise KeyboardInterrupt  # what comes after a kill does not come

    async with opened(root, n_chunks=1) as tier:
        await store(tier, chunk_of(1))
        await tier.delete([key_of(1)])
        monkeypatch.setattr(os, "pwritev", torn)
        with pytest.raises(KeyboardInterrupt):
            await write(tier, chunk_of(2))
        monkeypatch.undo()
        kill(tier)
    async with opened(root, n_chunks=1) as tier:
        assert await first_batches(tier) == []
        assert await fetch(tier, chunk_of(1), chunk_of(2)) == [MISSING] * 2
        await store(tier, chunk_of(2))
        assert await fetch(tier, chunk_of(2)) == [OK]


async def test_a_chunk_that_was_deleted_stays_deleted(root: Path) -> None:
    """Also if the kill comes at once: the slot still holds it, and no row says so."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1), chunk_of(2))
        place = path_of(root, key_of(1), tier)
        await tier.delete([key_of(1)])
        kill(tier)
    assert payload_of(key_of(1), LONGEST) in place.read_bytes()
    async with opened(root) as tier:
        assert [f.key for f in await first_batches(tier)] == [key_of(2)]
        assert await fetch(tier, chunk_of(1)) == [MISSING]


async def test_a_key_that_was_written_twice_before_a_kill_is_one_chunk(root: Path, monkeypatch: Any) -> None:
    """Between the new row and the end of the old one: the next open keeps one and frees the other's slot."""
    async with opened(root, n_chunks=4) as tier:
        await store(tier, chunk_of(1))
        slab = slab_of(tier)
        monkeypatch.setattr(slab, "erase", lambda *_: False)
        await store(tier, chunk_of(1))
        assert n_on_disk(root) == 2
        kill(tier)
    async with opened(root, n_chunks=4) as tier:
        assert [f.key for f in await first_batches(tier)] == [key_of(1)]
        assert tier.usage()["chunks_nbytes"] == CHARGE and n_on_disk(root) == 1
        assert await fetch(tier, chunk_of(1)) == [OK]
        await store(tier, *(chunk_of(i) for i in range(2, 5)))
        assert recount(root) <= capacity_for(4)


def test_memory_is_told_from_a_disk(tmp_path: Path) -> None:
    """By the file system's number; this says no more than that it can be asked."""
    with open("/proc/self/mountinfo") as file:
        assert not _fs_holes.is_in_memory(file.fileno())


# -- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 20, 90, PAGE - 1, PAGE, PAGE + LONGEST - 1])
@pytest.mark.parametrize("restart", [False, True])
async def test_a_flipped_bit_is_a_miss_and_heals(root: Path, at: int, restart: bool) -> None:
    """Header or payload: that chunk is gone and counted, the others of its call are served, its slot is used again."""
    async with opened(root, n_chunks=3, n_read_threads=1) as tier:
        await store(tier, *(chunk_of(i) for i in range(3)))
        flip(path_of(root, key_of(1), tier), at)
        if restart:
            kill(tier)
    async with opened(root, n_chunks=3, n_read_threads=1) as tier:
        assert await fetch(tier, *(chunk_of(i) for i in range(3))) == [OK, CORRUPT, OK]
        assert tier.counters()["corrupt"] == 1
        assert tier.usage()["chunks_nbytes"] == 2 * CHARGE
        assert await fetch(tier, chunk_of(1)) == [MISSING]
        await store(tier, chunk_of(1))
        assert await fetch(tier, *(chunk_of(i) for i in range(3))) == [OK] * 3


@pytest.mark.parametrize("n_threads", [1, 2])
async def test_two_swapped_slots_are_two_misses(root: Path, n_threads: int) -> None:
    """Each holds a whole chunk, and not the one that its row names; read in one call and each by itself."""
    async with opened(root, n_read_threads=n_threads) as tier:
        tier._n_cores = 2
        await store(tier, chunk_of(1), chunk_of(2))
        one, two = (path_of(root, key_of(i), tier) for i in (1, 2))
        data = one.read_bytes(), two.read_bytes()
        one.write_bytes(data[1])
        two.write_bytes(data[0])
        assert await fetch(tier, chunk_of(1), chunk_of(2)) == [CORRUPT] * 2


def lose_catalogue(root: Path) -> None:
    only(root, "slots").unlink()


def cut_catalogue(root: Path) -> None:
    os.truncate(only(root, "slots"), PAGE + 100)


def zero_head(root: Path) -> None:
    with only(root, "slots").open("rb+") as file:
        file.write(bytes(PAGE))


def put_a_link_there(root: Path) -> None:
    path = only(root, "slots")
    path.unlink()
    path.symlink_to(root / "tierkv.lock")


@pytest.mark.parametrize("damage", [lose_catalogue, cut_catalogue, zero_head, put_a_link_there])
async def test_without_a_catalogue_slots_say_themselves_what_they_hold(root: Path, damage: Callable[..., None]) -> None:
    """The headers are read once, and the catalogue is written anew."""
    async with opened(root) as tier:
        await store(tier, *(chunk_of(i) for i in range(5)))
    damage(root)
    for _ in range(2):
        async with opened(root) as tier:
            assert {f.key for f in await first_batches(tier)} == {key_of(i) for i in range(5)}
            assert await fetch(tier, *(chunk_of(i) for i in range(5))) == [OK] * 5


async def test_a_row_that_is_none_is_cleared(root: Path) -> None:
    """One flipped bit in a row: that chunk is a miss, its slot idle, the others stay."""
    async with opened(root, n_chunks=3) as tier:
        await store(tier, *(chunk_of(i) for i in range(3)))
        berth = _mount(tier)._slabs.find(key_of(1), _mount(tier)._ownership.id)
    catalogue = only(root, "slots")
    data = bytearray(catalogue.read_bytes())
    data[PAGE + berth.row.line * (PAGE // ROWS_A_BUCKET) + 4] ^= 1
    catalogue.write_bytes(data)
    async with opened(root, n_chunks=3) as tier:
        assert {f.key for f in await first_batches(tier)} == {key_of(0), key_of(2)}
        await store(tier, chunk_of(5))
        assert recount(root) <= capacity_for(3)


@pytest.mark.parametrize("noticed_by", ["read", "probe", "delete"])
async def test_a_row_that_somebody_cleared_is_a_chunk_that_vanished(root: Path, noticed_by: str) -> None:
    """While we run: a miss, counted, and the slot is idle, not lost."""
    async with opened(root, n_chunks=1) as tier:
        await store(tier, chunk_of(1))
        berth = _mount(tier)._slabs.find(key_of(1), _mount(tier)._ownership.id)
        berth.slab.catalogue.clear(berth.row.line)
        if noticed_by == "read":
            assert await fetch(tier, chunk_of(1)) == [MISSING]
        elif noticed_by == "probe":
            assert await tier.probe([key_of(1)]) == [None]
        else:
            await tier.delete([key_of(1)])
        assert tier.counters()["vanished"] == 1 and tier.usage()["chunks_nbytes"] == 0
        await store(tier, chunk_of(2))
        assert slab_of(tier).n_slots == 1, "in its slot"
        _mount(tier).books.check()


async def test_a_slab_that_is_cut_short_serves_what_is_left(root: Path) -> None:
    """Rows behind the end go."""
    async with opened(root, n_write_threads=1) as tier:
        await store(tier, *(chunk_of(i) for i in range(6)))
    os.truncate(only(root, "slab"), 3 * CHARGE + 100)
    async with opened(root) as tier:
        assert {f.key for f in await first_batches(tier)} == {key_of(i) for i in range(3)}
        assert await fetch(tier, *(chunk_of(i) for i in range(3))) == [OK] * 3
        await store(tier, chunk_of(7))
        assert await fetch(tier, chunk_of(7)) == [OK]


async def test_a_slab_whose_file_is_gone_is_an_empty_one(root: Path) -> None:
    """Its catalogue alone is nothing: removed, and the next write makes both anew."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1))
    only(root, "slab").unlink()
    async with opened(root) as tier:
        assert await first_batches(tier) == []
        await store(tier, chunk_of(1))
        assert await fetch(tier, chunk_of(1)) == [OK]


async def test_files_that_are_removed_under_us_are_noticed(root: Path) -> None:
    """At the next heartbeat: their chunks have vanished, their bytes are no longer charged, and writing goes on."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1), chunk_of(2))
        for suffix in ("slab", "slots"):
            only(root, suffix).unlink()
        _mount(tier).beat()
        assert await fetch(tier, chunk_of(1), chunk_of(2)) == [MISSING] * 2
        assert tier.counters()["vanished"] == 2 and tier.usage()["chunks_nbytes"] == 0
        _mount(tier).books.check()
        await store(tier, chunk_of(3))
        assert await fetch(tier, chunk_of(3)) == [OK]
        assert recount(root) <= tier.usage()["used_nbytes"] <= capacity_for(20)


# -- room -----------------------------------------------------------------------------------------------------------


async def test_a_slab_grows_in_steps_and_never_over_the_capacity(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last slot that fits, and then a write is refused; what is deleted makes room at once."""
    monkeypatch.setattr("tierkv.tiers._fs.slabs._STEP_NBYTES", 4 * CHARGE)
    async with opened(root, n_chunks=10) as tier:
        for i in range(10):
            await store(tier, chunk_of(i))
            assert recount(root) <= tier.usage()["used_nbytes"] <= capacity_for(10)
            assert slab_of(tier).n_slots == min(10, 4 * (i // 4 + 1))
        (outcome,) = await write(tier, chunk_of(10))
        assert outcome.reason is Reason.FULL
        await tier.delete([key_of(3)])
        await store(tier, chunk_of(10))
        assert slab_of(tier).n_slots == 10
        assert await fetch(tier, *(chunk_of(i) for i in (0, 9, 10))) == [OK] * 3


async def test_a_smaller_share_gives_space_back_to_the_file_system(root: Path) -> None:
    """A newcomer halves it: once the ledger has evicted, the blocks are the newcomer's, wherever they were in the file.

    What is left stays readable, also after a kill, and the slab grows into its holes again when the other has gone.
    """
    total = capacity_for(20)
    async with opened(root, capacity=total) as old:
        await store(old, *(chunk_of(i) for i in range(20)))
        async with opened(root, capacity=total) as new:
            _mount(old).beat()
            await old.delete([key_of(i) for i in range(0, 20, 2)])
            await old.delete([key_of(i) for i in (1, 5)])
            for tier in (old, new, old, new):
                _mount(tier).beat()
            assert old.usage()["used_nbytes"] <= old.usage()["limit_nbytes"] <= total // 2
            await store(new, *(chunk_of(100 + i) for i in range(8)))
            assert recount(root) <= total
            left = [i for i in range(1, 20, 2) if i not in (1, 5)]
            assert await fetch(old, *(chunk_of(i) for i in left)) == [OK] * len(left)
            await new.delete([key_of(100 + i) for i in range(8)])
        _mount(old).beat()
        await store(old, *(chunk_of(200 + i) for i in range(12)))
        assert slab_of(old).n_slots == 20
        kill(old)
    async with opened(root, capacity=total) as tier:
        assert len(await first_batches(tier)) == len(left) + 12
        assert recount(root) <= total
        _mount(tier).books.check()


async def test_idle_slots_are_a_newcomers(root: Path) -> None:
    """An owner that took more blocks than it has chunks for gives them back when another one comes."""
    total = capacity_for(20)
    async with opened(root, capacity=total) as old:
        await store(old, *(chunk_of(i) for i in range(20)))
        await old.delete([key_of(i) for i in range(4, 20)])
        assert slab_of(old).n_slots == 20
        async with opened(root, capacity=total) as new:
            for tier in (old, new, old, new):
                _mount(tier).beat()
            await store(new, *(chunk_of(100 + i) for i in range(8)))
            assert recount(root) <= total
            assert await fetch(old, *(chunk_of(i) for i in range(4))) == [OK] * 4


async def test_holes_are_remembered_over_a_kill(root: Path) -> None:
    """Nobody knows which idle slots have blocks: all give them back, and what is charged is what is there."""
    async with opened(root, n_chunks=10, n_write_threads=1) as tier:
        await store(tier, *(chunk_of(i) for i in range(10)))
        await tier.delete([key_of(i) for i in (1, 4, 5)])
        _mount(tier)._slabs.give_back(CHARGE)
        kill(tier)
    async with opened(root, n_chunks=10) as tier:
        assert len(await first_batches(tier)) == 7
        assert chunk_bytes(root, tier) == 7 * CHARGE == tier.usage()["chunks_nbytes"]
        assert _mount(tier).books.idle_nbytes == 0
        await store(tier, *(chunk_of(i) for i in (1, 4, 5)))
        assert await fetch(tier, *(chunk_of(i) for i in range(10))) == [OK] * 10


async def test_a_disk_without_room_refuses(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC where a slab would grow: nothing is charged or left; idle slots are written all the same."""
    async with opened(root, n_chunks=8) as tier:
        monkeypatch.setattr("tierkv.tiers._fs.slabs._STEP_NBYTES", 4 * CHARGE)
        await store(tier, *(chunk_of(i) for i in range(4)))
        before = tier.usage()

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "no space")

        monkeypatch.setattr(_fs_slab, "allocate", full)
        outcomes = await write(tier, chunk_of(4), chunk_of(5))
        assert [(o.status, o.reason) for o in outcomes] == [(Status.REFUSED, Reason.NO_SPACE)] * 2
        assert tier.usage() == before and recount(root) <= before["used_nbytes"]
        await tier.delete([key_of(0)])
        await store(tier, chunk_of(4))


async def test_min_free_holds_for_growth_and_not_for_idle_slots(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else fills the disk: the slab stops to grow, and the share shrinks to what is held."""
    free = [1 << 30]
    monkeypatch.setattr(
        os, "fstatvfs", lambda _: os.statvfs_result((PAGE, PAGE, 1 << 20, 0, free[0] // PAGE, 0, 0, 0, 0, 255))
    )
    monkeypatch.setattr("tierkv.tiers._fs.slabs._STEP_NBYTES", 4 * CHARGE)
    async with opened(root, n_chunks=10, min_free=1 << 20) as tier:
        await store(tier, *(chunk_of(i) for i in range(4)))
        free[0] = (1 << 20) + CHARGE - 1
        (outcome,) = await write(tier, chunk_of(4))
        assert (outcome.status, outcome.reason) == (Status.REFUSED, Reason.NO_SPACE)
        await tier.delete([key_of(0)])
        await store(tier, chunk_of(4))
        free[0] = (1 << 20) - 2 * CHARGE
        _mount(tier).beat()
        assert tier.share_nbytes() == 2 * CHARGE
        await tier.delete([key_of(1), key_of(2)])
        assert recount(root) <= tier.usage()["used_nbytes"] <= tier.usage()["limit_nbytes"]


@pytest.mark.parametrize("where", ["pwritev", "fdatasync", "row"])
async def test_other_write_errors_fail_their_chunks_and_lose_no_slot(
    root: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """EIO anywhere on the way: FAILED with a TierWriteError, nothing charged, no row, the next write works."""
    async with opened(root, n_chunks=2, durability="power") as tier:
        await store(tier, chunk_of(0))
        before = tier.usage()["chunks_nbytes"]

        def broken(*_: Any) -> Any:
            raise OSError(errno.EIO, "input/output error")

        if where == "row":
            monkeypatch.setattr(Catalogue, "put", broken)
        else:
            monkeypatch.setattr(os, where, broken)
        (outcome,) = await write(tier, chunk_of(1))
        monkeypatch.undo()
        assert outcome.status is Status.FAILED and isinstance(outcome.error, TierWriteError)
        assert tier.usage()["chunks_nbytes"] == before == chunk_bytes(root, tier) and n_on_disk(root) == 1
        await store(tier, chunk_of(1))
        assert await fetch(tier, chunk_of(0), chunk_of(1)) == [OK] * 2
        _mount(tier).books.check()


async def test_a_row_that_was_written_and_denied_is_a_chunk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands, so the chunk is there and its slot is taken; a row that was cut short is none, and its slot idle."""
    real = os.pwrite
    async with opened(root) as tier:
        await store(tier, chunk_of(0))

        def denied(fd: int, data: bytes, offset: int) -> int:
            real(fd, data, offset)
            raise OSError(errno.EIO, "done and denied")

        monkeypatch.setattr(os, "pwrite", denied)
        await store(tier, chunk_of(1))
        monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:8], offset))
        (outcome,) = await write(tier, chunk_of(2))
        assert outcome.status is Status.FAILED
        monkeypatch.undo()
        await store(tier, chunk_of(3))
        assert slab_of(tier).n_taken == 3
        kill(tier)
    async with opened(root) as tier:
        assert {found.key for found in await first_batches(tier)} == {key_of(i) for i in (0, 1, 3)}
        assert await fetch(tier, chunk_of(0), chunk_of(1), chunk_of(3)) == [OK] * 3
        _mount(tier).books.check()


async def test_an_earlier_copy_that_cannot_go_is_tried_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is written anew while rows cannot be cleared: both slots count until the old one has gone, then one."""

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(_fs_mount, "HEARTBEAT_S", 3600.0)
    async with opened(root, n_chunks=4) as tier:
        await store(tier, chunk_of(1), chunk_of(2))
        mount = _mount(tier)
        before = mount.books.fixed_nbytes
        monkeypatch.setattr(Catalogue, "clear", fails)
        await store(tier, chunk_of(1))
        mount.operations.retry()
        assert mount.books.fixed_nbytes == before + CHARGE and slab_of(tier).n_taken == n_on_disk(root) == 3
        assert await fetch(tier, chunk_of(1), chunk_of(2)) == [OK] * 2
        await _delete_fails(tier, key_of(1))
        monkeypatch.undo()
        await tier.delete([key_of(1)])
        assert n_on_disk(root) == 2, "the earlier copy stands"
        mount.operations.retry()
        assert mount.books.fixed_nbytes == before and slab_of(tier).n_taken == n_on_disk(root) == 1
        mount.books.check()
        await store(tier, *(chunk_of(i) for i in (3, 4, 5)))
        assert await fetch(tier, *(chunk_of(i) for i in (2, 3, 4, 5))) == [OK] * 4


async def _delete_fails(tier: FSTier, key: ChunkKey) -> None:
    with pytest.raises(TierWriteError):
        await tier.delete([key])


async def test_a_row_that_was_read_wrongly_does_not_outlive_its_chunk(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit of it flips on its way, so the chunk seems gone: its row goes for good, or the slot would have two."""
    real = os.pread

    def rotten(fd: int, nbytes: int, offset: int) -> bytes:
        return bytes(byte ^ 1 for byte in real(fd, nbytes, offset))

    async with opened(root, n_chunks=4) as tier:
        await store(tier, *(chunk_of(i) for i in range(4)))
        monkeypatch.setattr(os, "pread", rotten)
        await tier.delete([key_of(1)])
        monkeypatch.undo()
        assert n_on_disk(root) == 3 == slab_of(tier).n_taken
        await store(tier, chunk_of(5))
        kill(tier)
    async with opened(root, n_chunks=4) as tier:
        assert {found.key for found in await first_batches(tier)} == {key_of(i) for i in (0, 2, 3, 5)}
        assert await fetch(tier, *(chunk_of(i) for i in (0, 2, 3, 5))) == [OK] * 4


async def test_durability_power_syncs_slots_before_their_rows(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that a power loss needs, once a call; and none of it by default."""
    for durability, expected in (("process", ["put"]), ("power", ["fdatasync", "put", "fdatasync"])):
        async with opened(root / durability, durability=durability) as tier:
            await store(tier, chunk_of(0))
            calls: list[str] = []
            for holder, name in ((os, "fdatasync"), (Catalogue, "put")):
                monkeypatch.setattr(holder, name, recorded(getattr(holder, name), name, calls))
            await store(tier, chunk_of(1))
            monkeypatch.undo()
            assert calls == expected


async def test_a_read_renews_an_old_row(root: Path) -> None:
    """Recency that survives a kill: by the tenth of a second, and written at most once a minute."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1), chunk_of(2), chunk_of(3))
        slab = slab_of(tier)
        for i in (1, 2):
            held = _mount(tier).books.get(key_of(i))
            slab.catalogue.put_at(slab._lines[held.at], key_of(i), held.at, 1_790_000_000.0 + i)
        kill(tier)
    async with opened(root) as tier:
        assert [f.key for f in await first_batches(tier)] == [key_of(1), key_of(2), key_of(3)]
        assert await fetch(tier, chunk_of(1), chunk_of(3)) == [OK] * 2
        kill(tier)
    async with opened(root) as tier:
        assert (await first_batches(tier))[0].key == key_of(2)


# -- both layouts, and other slots ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [("files", "slab"), ("slab", "files")])
async def test_a_root_may_change_its_layout(root: Path, first: str, second: str) -> None:
    """What was written in the one is served, counted, replaced and evicted under the other; nothing is left of it."""
    capacity = capacity_for(12)
    async with opened(root, capacity=capacity, layout=first) as tier:
        await store(tier, *(chunk_of(i) for i in range(8)))
        order = [chunk_of(i, parent=key_of(i - 1)) for i in range(8)]
        await tier.save_order(order)
    async with opened(root, capacity=capacity, layout=second) as tier:
        assert [f.chunk for f in await first_batches(tier)] == order
        assert await fetch(tier, *(chunk_of(i) for i in range(8))) == [OK] * 8
        await tier.delete([key_of(i) for i in range(4)])
        _mount(tier).beat()
        await store(tier, *(chunk_of(i) for i in range(3, 7)))
        assert await fetch(tier, *(chunk_of(i) for i in range(8))) == [MISSING] * 3 + [OK] * 5
        assert recount(root) <= tier.usage()["used_nbytes"] <= capacity
        kill(tier)
    async with opened(root, capacity=capacity, layout=first) as tier:
        assert {f.key for f in await first_batches(tier)} == {key_of(i) for i in range(3, 8)}
        assert await fetch(tier, *(chunk_of(i) for i in range(3, 8))) == [OK] * 5
        await tier.delete([key_of(i) for i in range(8)])
        assert tier.usage()["chunks_nbytes"] == 0
    assert {path.name.partition(".")[2] for path in files_under(root)} <= {"lock", "index"}


async def test_slots_of_another_length_are_read_until_they_are_gone(root: Path) -> None:
    """The model's chunks became longer under one namespace: old slots give their space back one by one."""
    async with opened(root, n_chunks=6, ctx=context(longest=PAGE, stride=PAGE)) as tier:
        await store(tier, *(chunk_of(i, PAGE) for i in range(4)))
    async with opened(root, n_chunks=6) as tier:
        assert len(await first_batches(tier)) == 4
        assert await fetch(tier, *(chunk_of(i, PAGE) for i in range(4))) == [OK] * 4
        await store(tier, chunk_of(5))
        await tier.delete([key_of(0), key_of(2)])
        assert await fetch(tier, chunk_of(1, PAGE), chunk_of(5)) == [OK] * 2
        await tier.delete([key_of(1), key_of(3)])
        assert tier.usage()["chunks_nbytes"] == CHARGE
        assert recount(root) <= tier.usage()["used_nbytes"] <= capacity_for(6)


async def test_a_slab_that_nobody_reads_makes_room_coldest_first(root: Path) -> None:
    """Another model's: its idle slots, then its chunks one after another; it is served again if it comes back."""
    async with opened(root, n_chunks=8, ctx=context(namespace=b"old")) as tier:
        await store(tier, *(chunk_of(i) for i in range(8)))
        slab = slab_of(tier)
        for i in range(8):
            held = _mount(tier).books.get(key_of(i))
            slab.catalogue.put_at(slab._lines[held.at], key_of(i), held.at, 1_790_000_000.0 + i)
        kill(tier)
    async with opened(root, n_chunks=12) as tier:
        await store(tier, *(chunk_of(i) for i in range(9)))
        assert recount(root) <= tier.usage()["used_nbytes"] <= capacity_for(12)
    async with opened(root, n_chunks=12, ctx=context(namespace=b"old")) as tier:
        keys = {f.key for f in await first_batches(tier)}
        assert keys and keys == {key_of(i) for i in range(8 - len(keys), 8)}
        assert await fetch(tier, *(chunk_of(i) for i in range(8 - len(keys), 8))) == [OK] * len(keys)


async def test_a_larger_capacity_needs_a_larger_catalogue(root: Path) -> None:
    """Written anew at open; the slots stay where they are."""
    async with opened(root, n_chunks=10) as tier:
        await store(tier, *(chunk_of(i) for i in range(10)))
        before = slab_of(tier).catalogue.nbytes
    async with opened(root, n_chunks=220) as tier:
        assert slab_of(tier).catalogue.nbytes > before
        assert {f.key for f in await first_batches(tier)} == {key_of(i) for i in range(10)}
        await store(tier, *(chunk_of(i) for i in range(10, 200)))
        assert await fetch(tier, *(chunk_of(i) for i in range(200))) == [OK] * 200
        assert recount(root) <= capacity_for(220)


# -- others ---------------------------------------------------------------------------------------------------------


async def test_a_reader_that_loses_the_race_gets_a_miss(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreign slot is overwritten while it is read: a miss, counted as nothing, and never the other chunk's bytes."""
    async with opened(root, n_chunks=40) as mine, opened(root, n_chunks=40) as theirs:
        for tier in (mine, theirs, mine, theirs):
            _mount(tier).beat()
        await store(theirs, chunk_of(1))
        assert (await mine.probe([key_of(1)]))[0] is not None
        real = os.preadv
        loop = asyncio.get_running_loop()

        def late(fd: int, buffers: Any, offset: int) -> int:
            monkeypatch.undo()
            slab = slab_of(theirs)
            slab._cursor = 0  # the next write takes this very slot
            for call in (theirs.delete([key_of(1)]), store(theirs, chunk_of(2))):
                asyncio.run_coroutine_threadsafe(call, loop).result(20)
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", late)
        assert await fetch(mine, chunk_of(1)) == [MISSING]
        assert mine.counters()["corrupt"] == 0
        assert await fetch(mine, chunk_of(2)) == [OK]


async def test_a_file_system_without_holes_is_a_wrong_setting(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said in one sentence at open, with what to choose instead; nothing is left behind."""

    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "operation not supported")

    monkeypatch.setattr(_fs_slab_files, "punch", unsupported)
    tier = FSTier(root, capacity=capacity_for(5), min_free=0)
    with pytest.raises(ConfigError, match=r"layout.*files"):
        await tier.open(context())
    await tier.aclose()
    assert not root.exists()


def test_names_go_both_ways() -> None:
    """And what is nearly one is none."""
    name = slab_name("0123456789abcdef", CHARGE, "slots")
    assert parse_slab_name(name) == ("0123456789abcdef", CHARGE, "slots", False)
    for bad in ("x" + name, name + "x", name.replace("4000", "4001"), name.replace("4000", "04000"), "slab"):
        assert parse_slab_name(bad) is None


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("n", [1, 21, 22, 1000])
def test_a_catalogue_finds_every_key_of_as_many_slots(tmp_path: Path, n: int, at_once: bool) -> None:
    """Until it is full, however its buckets overflow; also after half of them were replaced."""
    path = tmp_path / "slots"
    path.write_bytes(head_of(CHARGE, catalogue_nbytes(n) // PAGE - 1, bytes(16)).ljust(catalogue_nbytes(n), b"\0"))
    fd = os.open(path, os.O_RDWR)
    try:
        catalogue = Catalogue(fd, CHARGE, bytes(16))
        assert n <= catalogue.n_slots
        if at_once:
            catalogue.put_all((key_of(i), i, 1_790_000_000.0 + i) for i in range(n))
            assert catalogue.find(key_of(0)).used_s == pytest.approx(1_790_000_000.0)  # type: ignore[union-attr]
            places = {row.slot: row.line for piece in catalogue.rows() for row in piece}
        else:
            places = {i: catalogue.put(key_of(i), i) for i in range(n)}
        found = [catalogue.find(key_of(i)) for i in range(n)]
        assert [row and row.slot for row in found] == list(range(n))
        for i in range(0, n, 2):
            catalogue.clear(places[i])
            catalogue.put(ChunkKey(b"x" * 115 if not i else b"%d" % i), i)
        rows = [row for piece in catalogue.rows() for row in piece]
        assert sorted(row.slot for row in rows) == list(range(n))
        assert all(catalogue.find(key_of(i)) is None for i in range(0, n, 2))
    finally:
        os.close(fd)


def recorded(real: Callable[..., Any], name: str, calls: list[str]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        calls.append(name)
        return real(*args)

    return call


def test_a_new_catalogue_is_not_written_page_by_page(tmp_path: Path) -> None:
    """One for 10 TB of small chunks is gigabytes: it is given blocks, and what has no row is not written."""
    n_slots = 1_000_000
    with (tmp_path / "slots").open("wb+", buffering=0) as file:
        file.write(head_of(CHARGE, n_buckets_for(n_slots), bytes(16)))
        file.truncate(catalogue_nbytes(n_slots))
        catalogue = Catalogue(file.fileno(), CHARGE, bytes(16))
        before = os.fstat(file.fileno()).st_blocks
        catalogue.put_all(())
        assert os.fstat(file.fileno()).st_blocks == before
        keys = [key_of(i) for i in range(3)]
        catalogue.put_all((key, slot, 1.7e9) for slot, key in enumerate(keys))
        assert (os.fstat(file.fileno()).st_blocks - before) * 512 <= 3 * (1 << 20) + (1 << 16)
        again = Catalogue(file.fileno(), CHARGE, bytes(16))
        assert sorted((row.key, row.slot) for piece in again.rows() for row in piece) == [
            (key, slot) for slot, key in sorted(enumerate(keys), key=lambda pair: pair[1])
        ]
