"""The slab layout under attack: files that are cut, lost or half of a pair, at the worst moment."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.fs_kit import (
    CHARGE,
    PAGE,
    _mount,
    capacity_for,
    chunk_of,
    context,
    fetch,
    files_under,
    first_batches,
    key_of,
    kill,
    opened,
    recount,
    scanned,
    store,
    using,
    write,
)
from tests.patience import PATIENCE_S
from tierkv.tiers._fs import dirs as _fs_dirs
from tierkv.tiers._fs import holes as _fs_holes
from tierkv.tiers._fs import slab as _fs_slab
from tierkv.tiers._fs import slab_files as _fs_slab_files
from tierkv.tiers._fs.catalogue import BadCatalogueError, Catalogue
from tierkv.tiers._fs.format import Header, Sums
from tierkv.tiers._fs.slab_files import SlabFiles
from tierkv.tiers.fs import FSTier
from tierkv.types import ChunkKey, Reason, Status

OK, MISSING = Status.OK, Status.MISSING


@pytest.fixture(autouse=True)
def _in_slabs() -> Iterator[None]:
    with using("slab"):
        yield


def only(root: Path, suffix: str) -> Path:
    (path,) = root.rglob(f"*.{suffix}")
    return path


async def test_a_cut_slab_and_a_smaller_capacity(root: Path) -> None:
    """Far more rows than slots, just when the catalogue is to be made smaller: it opens, and serves what is there."""
    async with opened(root, n_chunks=200, n_write_threads=1) as tier:
        await store(tier, *(chunk_of(i) for i in range(100)))
    os.truncate(only(root, "slab"), 3 * CHARGE)
    async with opened(root, n_chunks=5) as tier:
        assert {found.key for found in await first_batches(tier)} == {key_of(i) for i in range(3)}
        assert await fetch(tier, *(chunk_of(i) for i in range(3))) == [OK] * 3
        await store(tier, chunk_of(7))


@pytest.mark.parametrize("suffix", ["slab", "slots"])
async def test_half_of_a_pair_is_removed_under_us(root: Path, suffix: str) -> None:
    """At the next heartbeat the other half goes too: its bytes are no longer counted, and writing goes on."""
    async with opened(root) as tier:
        await store(tier, *(chunk_of(i) for i in range(4)))
        only(root, suffix).unlink()
        _mount(tier).beat()
        assert await fetch(tier, chunk_of(1)) == [MISSING]
        assert recount(root) <= tier.usage()["used_nbytes"] <= capacity_for(20)
        await store(tier, chunk_of(9))
        assert await fetch(tier, chunk_of(9)) == [OK]
        assert recount(root) <= tier.usage()["used_nbytes"] <= capacity_for(20)


async def test_a_catalogue_that_was_cut_before_its_owner_died(root: Path) -> None:
    """We had opened it while it was whole: the adoption ends all the same, with what the slots say of themselves."""
    async with opened(root, n_chunks=40) as dying, opened(root, n_chunks=40) as heir:
        mount = _mount(heir)
        mount._stop.set()  # no heartbeats but ours
        mount._keeper.join()
        mount.beat()
        _mount(dying).beat()
        await store(dying, *(chunk_of(i) for i in range(3)))
        mount.beat()
        await store(heir, chunk_of(8))
        owner = _mount(dying)._ownership.id
        catalogue = next(path for path in root.rglob("*.slots") if path.name.startswith(owner))
        kill(dying)
        os.truncate(catalogue, PAGE)
        mount._ownership._clock = lambda: 0.0
        mount.beat()
        mount._ownership._clock = lambda: 1e6
        await asyncio.to_thread(mount.beat)
        await scanned(heir)
        assert owner in mount._ownership.held_ids() and not mount.books.is_scanning
        assert await fetch(heir, *(chunk_of(i) for i in range(3))) == [OK] * 3


async def test_a_kill_while_a_slab_is_removed_brings_nothing_back(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was evicted stays evicted, although its bytes lie in the half that is left."""

    def killed(self: SlabFiles, owner: str, slot_nbytes: int) -> int:
        names: list[str] = []

        def note(some: Iterable[str], _: int) -> bool:
            names.extend(some)
            return True

        monkeypatch.setattr("tierkv.tiers._fs.slab_files.unlink_first", note)
        real(self, owner, slot_nbytes)
        _fs_dirs.unlink_quietly(names[0], self.dir_fd)
        return 0

    real = SlabFiles.remove
    async with opened(root) as tier:
        await store(tier, *(chunk_of(i) for i in range(3)))
        await tier.delete([key_of(i) for i in range(3)])
        monkeypatch.setattr(SlabFiles, "remove", killed)
    monkeypatch.undo()
    assert [path for path in files_under(root) if ".sl" in path.name]
    async with opened(root) as tier:
        assert await first_batches(tier) == []
        assert await fetch(tier, *(chunk_of(i) for i in range(3))) == [MISSING] * 3


async def test_a_catalogue_made_on_a_full_disk_bounds_the_share(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is freed later: the slab cannot grow beyond its catalogue, so the ledger must not think that it can."""
    free = [200 * CHARGE]
    real = os.fstatvfs

    def statvfs(_: int) -> os.statvfs_result:
        return os.statvfs_result((PAGE, PAGE, 1 << 20, 0, free[0] // PAGE, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "fstatvfs", statvfs)
    async with opened(root, n_chunks=2000) as tier:
        free[0] = 10_000 * CHARGE
        _mount(tier).beat()
        n = tier.share_nbytes() // CHARGE
        outcomes = await write(tier, *(chunk_of(i) for i in range(n)))
        assert [outcome.reason for outcome in outcomes if not outcome.ok] == []
    monkeypatch.setattr(os, "fstatvfs", real)


async def test_durability_power_syncs_every_directory_on_the_way(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab whose namespace's name is lost with the power is lost as a whole: the root is synced as well."""
    synced: list[int] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        real(fd)

    async with opened(root / "kv", durability="power") as tier:
        monkeypatch.setattr(os, "fsync", fsync)
        await store(tier, chunk_of(0))
    namespace = only(root, "slab").parent if list(root.rglob("*.slab")) else root
    assert {path.stat().st_ino for path in (namespace, root / "kv", root)} <= set(synced)


async def test_a_slab_made_as_long_as_the_file_system_allows(root: Path) -> None:
    """By somebody, without a block in it: no memory for slots that nobody has, and all of the capacity can be used."""
    async with opened(root, n_chunks=40) as tier:
        await store(tier, *(chunk_of(i) for i in range(4)))
    os.truncate(only(root, "slab"), 1 << 43)
    async with opened(root, n_chunks=40) as tier:
        assert await fetch(tier, *(chunk_of(i) for i in range(4))) == [OK] * 4
        (slab,) = _mount(tier)._slabs._all_held()
        assert slab.n_slots < 1000 and only(root, "slab").stat().st_size < 1000 * CHARGE
        await store(tier, *(chunk_of(i) for i in range(4, 39)))
        assert await fetch(tier, *(chunk_of(i) for i in range(39))) == [OK] * 39


async def test_what_a_trial_of_the_file_system_left_is_tidied(root: Path) -> None:
    """Killed in the middle of it; also if somebody has put a slab of slots without length beside it."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1))
        slab = only(root, "slab")
        kill(tier)
    owner = slab.name.partition(".")[0]
    for name in (f"{owner}.0000.slab.part", f"{owner}.0000.slab", f"{owner}.0000.slots"):
        slab.with_name(name).write_bytes(bytes(2 * PAGE))
    async with opened(root, layout="files") as tier:  # which tries nothing of the kind itself
        assert await fetch(tier, chunk_of(1)) == [OK]
        assert not _mount(tier).books.is_scanning
        await store(tier, chunk_of(2))
    assert not list(root.rglob("*.part"))


async def test_a_quota_smaller_than_a_step(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows by ENOSPC alone, not by what is free: the slab grows by as much as there is."""
    real, left = _fs_holes.allocate, [6 * CHARGE]

    def allocate(fd: int, start: int, nbytes: int) -> None:
        if nbytes > left[0]:
            raise OSError(errno.EDQUOT, "quota")
        left[0] -= nbytes
        real(fd, start, nbytes)

    monkeypatch.setattr(_fs_slab, "allocate", allocate)
    async with opened(root, n_chunks=40) as tier:
        outcomes = [(await write(tier, chunk_of(i)))[0] for i in range(7)]
        assert [outcome.ok for outcome in outcomes] == [True] * 6 + [False]
        assert outcomes[6].reason is Reason.NO_SPACE
        await tier.delete([key_of(0)])
        await store(tier, chunk_of(6))


async def test_a_kill_while_a_catalogue_is_written_anew_loses_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second accident on top of a lost catalogue: the next start finds every chunk all the same."""
    async with opened(root) as tier:
        await store(tier, *(chunk_of(i) for i in range(5)))
    only(root, "slots").unlink()
    real, n = Catalogue.put_all, 0

    def put_all(self: Catalogue, rows: Iterable[tuple[ChunkKey, int, float]]) -> None:
        nonlocal n
        n += 1
        real(self, itertools.islice(rows, 3))
        for name in ("unlink_quietly", "unlink_first"):  # killed: no cleaning up
            monkeypatch.setattr(f"tierkv.tiers._fs.slab_files.{name}", lambda *_: True)
        raise BadCatalogueError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Catalogue, "put_all", put_all)
        tier = FSTier(root, capacity=capacity_for(20), min_free=0)
        await tier.open(context())
        await scanned(tier)
        kill(tier)
    monkeypatch.undo()
    assert n
    async with opened(root) as tier:
        assert await fetch(tier, *(chunk_of(i) for i in range(5))) == [OK] * 5


async def test_closing_does_not_wait_for_a_lost_catalogue(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large slab's headers take minutes to read: a tier that closes ends with the next one, and nothing is lost."""
    async with opened(root) as tier:
        await store(tier, *(chunk_of(i) for i in range(5)))
    only(root, "slots").unlink()
    real, read, go_on = _fs_slab_files.header_at, [], threading.Event()

    def header_at(fd: int, offset: int, sums: Sums) -> Header | None:
        read.append(offset)
        go_on.wait(PATIENCE_S)
        return real(fd, offset, sums)

    monkeypatch.setattr("tierkv.tiers._fs.slab_files.header_at", header_at)
    tier = FSTier(root, capacity=capacity_for(20), min_free=0)
    await tier.open(context())
    closing = asyncio.create_task(tier.aclose())
    assert await asyncio.to_thread(_mount(tier).scanner._stop.wait, PATIENCE_S)
    go_on.set()
    await closing
    assert len(read) <= 1
    async with opened(root) as tier:
        assert await fetch(tier, *(chunk_of(i) for i in range(5))) == [OK] * 5
