"""A13-A17, A41, A46: a disk that is bounded, full, picky, emptied by others, or out of descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import fs_kit
from tests.cases.kit import (
    CHARGE,
    cache_over,
    chunk_files,
    ear,
    fetch,
    file_of,
    forget_primary,
    fs_tier,
    keep,
    litter,
    opened,
    place_of,
    room_for,
    settle,
    turns_until,
)
from tests.faults import Faults, in_child, need
from tests.faults.disks import may_mount, small_disk
from tests.fs_kit import is_slab, recount
from tests.patience import PATIENCE_S
from tests.toys import prompt
from tierkv import EventKind, TieredCache
from tierkv.tiers._fs import mount as _fs_mount
from tierkv.tiers._fs.format import leaf_of
from tierkv.tiers.fs import FSTier

pytestmark = pytest.mark.usefixtures("layout")


async def test_a13_the_disk_tier_keeps_its_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The disk tier grew until the disk was full.

    https://github.com/vllm-project/vllm/issues/54779

    Of the kind: more than fits, a restart on a full root, one with a smaller limit (coldest first), files removed
    behind its back, a chunk that is read while others push it out; and no limit given, which is a limit, in the log.
    """
    root = tmp_path / "root"
    limit = room_for(10)

    def within(cache: TieredCache) -> None:
        assert recount(root) <= limit
        assert len(chunk_files(root)) == cache.statistics()["fs"].n_chunks <= 10

    async with opened(cache_over(fs_tier(root), n_chunks=10)) as cache:
        for n in range(25):
            await keep(cache, [n, n])
            assert recount(root) <= limit
        await settle(cache)
        within(cache)
        assert len(ear(cache).removed(level=1)) == 25 - cache.statistics()["fs"].n_chunks
    async with opened(cache_over(fs_tier(root), n_chunks=10)) as cache:
        await turns_until(lambda: cache.statistics()["fs"].n_chunks >= 9)
        within(cache)
        for n in range(30, 35):
            await keep(cache, [n, n])
        await settle(cache)
        within(cache)
        for path in list(chunk_files(root).values())[:2]:
            path.unlink()
        for n in range(40, 50):
            await keep(cache, [n, n])
            assert recount(root) <= limit
        await settle(cache)
        within(cache)
        async with cache.lease(await cache.lookup([49, 49])):
            cache._opened().hierarchy.reset([0])
            for n in range(60, 80):
                await keep(cache, [n, n])
    async with opened(cache_over(fs_tier(root), n_chunks=4)) as cache:
        await turns_until(lambda: cache.statistics()["fs"].n_chunks >= 3)
        assert recount(root) <= room_for(4)
        told = sum(event.level == 1 and event.kind is EventKind.STORED for event in ear(cache).events)
        assert told <= 4, "the rest had gone before anybody heard of it"
        assert await fetch(cache, [79, 79]) == 1, "the youngest stay"
        assert await fetch(cache, [60, 60]) == 0
    with caplog.at_level(logging.INFO):
        async with opened(cache_over(fs_tier(tmp_path / "other"), bounded=False)) as cache:
            assert 0 < cache.statistics()["fs"].capacity_nbytes < shutil.disk_usage(tmp_path).free
    assert "no capacity given; taking" in caplog.text


async def _damaged_third(faults: Faults, root: str) -> None:
    tokens = prompt(1, 8)
    tier = fs_tier(root, n_read_threads=1)
    async with opened(cache_over(tier, n_slots=10)) as cache:
        await keep(cache, tokens)
        third = cache.chunks(tokens)[3].key
        for error, kept in ((errno.EIO, True), (errno.ESTALE, True), (errno.EMFILE, True), (-1, True), (0, False)):
            if error == errno.EMFILE and is_slab():
                continue  # a slab is open
            await forget_primary(cache)
            before = cache.statistics()["primary"].free_nbytes
            where = place_of(root, third)
            if error == -1:
                rule = faults.add("read", at_most=5000, **where)
            elif error:
                rule = faults.add("open" if error == errno.EMFILE else "read", error=error, **where)
            else:
                rule = faults.add("read", flip=True, **where)
            assert await fetch(cache, tokens) == 3
            await settle(cache)
            # A short direct read is tried once more through the page cache; a run of slots that fails, slot by slot.
            most = (2 if error == -1 else 1) * (2 if is_slab() else 1)
            # One that was written a moment ago and is not right once more: the same key may have come anew meanwhile.
            most += not error and is_slab()
            assert 1 <= rule.n_struck <= most, "for one asker it is read once"
            primary = cache.statistics()["primary"]
            assert primary.n_chunks == 7 and before - primary.free_nbytes == 7 * 8192, "one slot more than with all"
            assert file_of(root, third).exists() if kept else third.hex() not in chunk_files(root)
            rule.remove()
            reads = faults.add("read", path=".slab" if is_slab() else f"{root}/")  # not of rows: those are names
            if not kept:
                await keep(cache, tokens)
            assert await fetch(cache, tokens) == 8, "and the others are there without another read"
            assert reads.n_seen == int(kept)
            reads.remove()


def test_a14_one_bad_chunk_costs_one_chunk(tmp_path: Path) -> None:
    """One missing chunk threw away the good ones in its batch.

    https://github.com/vllm-project/vllm/pull/50321

    Of the kind: the third of eight cannot be opened (EMFILE) or read (EIO, ESTALE, a short read of a whole file): its
    file stays and serves the next time; or its bytes are wrong: it goes. A file cut or removed: test_a06. Each other
    stage: test_one_of_eight.
    """
    in_child(_damaged_third, tmp_path / "root", folder=tmp_path)


async def test_a15_direct_io_that_only_opens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Direct I/O opened fine, then every write failed, and the fix removed the file before its descriptor was closed.

    https://github.com/vllm-project/vllm/pull/43674

    Of the kind: 3 and 9 KiB from memory that is aligned to nothing, on the disk at hand, on tmpfs and on overlay;
    memory that is aligned by chance; one warning for each tier, not for each chunk.
    """
    with small_disk(tmp_path / "tmpfs"), _overlay(tmp_path) as overlay:
        for root in (tmp_path / "disk", tmp_path / "tmpfs" / "root", overlay / "root"):
            caplog.clear()
            async with fs_kit.opened(root) as tier:
                chunks = [fs_kit.chunk_of(i, nbytes) for i, nbytes in enumerate([3 << 10, 9 << 10] * 4)]
                memory = bytearray(16 * 4096)
                for i, chunk in enumerate(chunks):
                    at = i * 8191 % 4096 + 1 + i
                    payload = fs_kit.payload_of(chunk.key, chunk.nbytes)
                    memory[at : at + chunk.nbytes] = payload
                    (outcome,) = await tier.write([(chunk, memoryview(memory)[at : at + chunk.nbytes])])
                    assert outcome.ok, (root, outcome)
                    target = bytearray(12000)
                    (outcome,) = await tier.read([(chunk.key, memoryview(target)[3:11003])])
                    assert outcome.ok
                    assert bytes(target[3:11003]) == payload + bytes(11000 - chunk.nbytes)
                assert litter(root) == []
            assert len(caplog.records) <= 1, caplog.text


class _overlay:  # noqa: N801 - used like a function
    """An overlay file system over two folders."""

    def __init__(self, folder: Path) -> None:
        self._parts = [folder / name for name in ("low", "up", "work", "merged")]

    def __enter__(self) -> Path:
        low, up, work, merged = self._parts
        for part in self._parts:
            part.mkdir()
        need(may_mount(), "root and the right to mount")
        options = f"lowerdir={low},upperdir={up},workdir={work}"
        subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", str(merged)], check=True)
        return merged

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", str(self._parts[3])], check=True)


async def _no_directory_is_read(faults: Faults, root: str) -> None:
    setattr(_fs_mount, "HEARTBEAT_S", 3600.0)  # noqa: B010 - final; it looks for slabs, at an instant of its own
    tier = fs_tier(root)
    async with opened(cache_over(tier, n_slots=12, n_chunks=600)) as cache:
        for n in range(40):
            await keep(cache, [1000 + n] * 20)
            await settle(cache)
        await forget_primary(cache)
        lists = faults.add("list", path=root)
        calls = faults.add("open", "stat", path=f"{root}/")
        for n in range(40):
            assert await fetch(cache, [1000 + n] * 20) == 10
        n_reads = calls.n_seen
        assert lists.n_seen == 0, "a lookup reads no directory"
        for n in range(200):
            await cache.lookup([9000 + n] * 20)
        assert lists.n_seen == 0 and calls.n_seen - n_reads <= 200 * 10, "what is not there costs no search"
        lists.remove()
        calls.remove()


def test_a16_no_directory_grows_and_none_is_searched(tmp_path: Path) -> None:
    """A disk with terabytes free had "no space left": a directory with millions of entries, which each lookup listed.

    https://github.com/sgl-project/sglang/issues/28653

    A hundred thousand keys of several kinds (hashes, counters, one long prefix) spread over 256 directories, none
    above a thousand (a slab has none of them); lookups of what is there and of what is not, with every call to the file
    system counted.
    """
    for make in (
        ()
        if is_slab()
        else (
            lambda i: i.to_bytes(32, "big"),
            lambda i: i.to_bytes(32, "little"),
            lambda i: b"the same long prefix of all of them " + str(i).encode(),
            lambda i: os.urandom(32),
        )
    ):
        counts: dict[str, int] = {}
        for i in range(100_000):
            leaf = leaf_of(make(i))
            counts[leaf] = counts.get(leaf, 0) + 1
        assert len(counts) <= 256 and max(counts.values()) < 1000
    in_child(_no_directory_is_read, tmp_path / "root", folder=tmp_path)


async def test_a17_evicting_a_file_that_is_gone(tmp_path: Path) -> None:
    """Evicting a file that was already gone killed the engine.

    https://github.com/LMCache/LMCache/issues/1981

    Of the kind: half of the files, a leaf with all that is in it (or a whole slab), the whole namespace, the whole root
    with its lock files: stores go on, what is gone is a miss and counted, the limit holds, and nothing reaches the
    caller.
    """
    for what in ("half", "slab" if is_slab() else "leaf", "namespace", "root"):
        root = tmp_path / what
        tier = fs_tier(root)
        async with opened(cache_over(tier, n_slots=4, n_chunks=12)) as cache:
            for n in range(12):
                await keep(cache, [n, n])
            await settle(cache)
            files = list(chunk_files(root).values())
            (namespace,) = (path for path in root.iterdir() if path.is_dir())
            if what == "half":
                for path in files[::2]:
                    path.unlink()
            elif what == "slab":
                for path in namespace.glob("*.sl*"):
                    path.unlink()
            else:
                shutil.rmtree(files[0].parent if what == "leaf" else {"namespace": namespace, "root": root}[what])
            if is_slab():  # at the next beat, which looks whether it is there
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(tier._mount.beat)  # type: ignore[union-attr]
            for n in range(20, 60):
                await keep(cache, [n, n])
                await settle(cache)
            assert tier.counters()["vanished"] >= {"half": 6, "leaf": 1, "slab": 12}.get(what, 0)
            assert recount(root) <= room_for(12) if root.exists() else True
            assert sum([await fetch(cache, [n, n]) for n in range(56, 60)]) == 4
            if what in ("half", "leaf", "slab"):
                assert cache.statistics()["fs"].n_chunks == len(chunk_files(root)) >= 8


async def _full_and_empty_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(folder / "disk") as disk:
        root = disk.path / "root"
        async with opened(cache_over(FSTier(root, min_free=0), capacity=1 << 30)) as cache:
            disk.fill(leave_nbytes=1 << 20)
            n = 0
            while not cache.statistics()["fs"].n_evicted:  # the disk is smaller than the capacity: then it counts
                await keep(cache, [n, n])
                await cache.wait_idle(PATIENCE_S)
                n += 1
            await settle(cache)
            assert len(chunk_files(root)) == cache.statistics()["fs"].n_chunks and not litter(root)
            warm = n - 12
            disk.fill()
            caplog.clear()
            n_stored = cache.statistics()["fs"].n_stored
            for i in range(200):
                await keep(cache, [10_000 + i] * 2)
                assert await fetch(cache, [10_000 + i] * 2) == 1, "host memory does not care"
                if i % 20 == 0:
                    await forget_primary(cache)
                    assert await fetch(cache, [warm, warm]) == 1, "what is there is served from a full disk"
                assert not cache.statistics()["fs"].broken
            await settle(cache)
            assert len(caplog.records) <= 20, "not a line for each chunk"
            assert not litter(root)
            assert is_slab() or all(path.stat().st_size == CHARGE for path in chunk_files(root).values())
            record = cache.statistics()["fs"]
            assert record.n_chunks == len(chunk_files(root))
            assert record.n_stored > n_stored, "what is newer takes the place of what is old"
            disk.empty()
            n_chunks = record.n_chunks
            while cache.statistics()["fs"].n_chunks < n_chunks + 50:
                i += 1
                await keep(cache, [10_000 + i] * 2)
                await cache.wait_idle(0.05)
        assert not litter(root)


async def _refused_in_mid_write(faults: Faults, root: str) -> None:
    tier = fs_tier(root, n_write_threads=1, durability="power")
    async with opened(cache_over(tier, n_slots=10)) as cache:
        for n, (call, error, after) in enumerate((
            ("write", errno.ENOSPC, False),
            ("write", errno.EDQUOT, False),
            ("write", errno.ENOSPC, True),
            ("sync", errno.ENOSPC, False),
            ("close", errno.ENOSPC, False),
            ("rename", errno.EDQUOT, False),
            ("rename", errno.ENOSPC, True),
            ("open", errno.ENOSPC, False),
            ("leaf", errno.ENOSPC, False),
        )):  # fmt: skip
            tokens = [50 + n] * 16
            key = cache.chunks(tokens)[2].key
            third = key.hex()
            if call == "leaf":  # the directory is synced after the file in it
                rule = faults.add("sync", path=f"/{leaf_of(key)}", error=error, first=2, count=1)
            else:
                rule = faults.add(call, path=f"/{third}", error=error, after=after)
            before = cache.statistics()["fs"]
            await keep(cache, tokens)
            await cache.wait_idle(PATIENCE_S)
            assert rule.n_struck >= 1
            now = cache.statistics()["fs"]
            assert now.refused["no_space"] - before.refused.get("no_space", 0) == 1
            assert now.n_stored - before.n_stored == 7, "the others are kept and announced"
            assert third not in chunk_files(root) and not litter(root)
            assert not now.broken
            rule.remove()
            await forget_primary(cache)
            assert await fetch(cache, tokens) == 2
            await keep(cache, tokens)
            await forget_primary(cache)
            assert await fetch(cache, tokens) == 8
        rule = faults.add("write", path=".part", error=errno.EDQUOT, count=6)
        for n in range(20):  # a quota, of which the file system's own numbers say nothing
            await keep(cache, [100 + n] * 2)
            await cache.wait_idle(PATIENCE_S)
            assert not cache.statistics()["fs"].broken
        assert rule.n_struck == 6 and rule.n_seen == 20
        rule.remove()
        await forget_primary(cache)
        assert sum([await fetch(cache, [100 + n] * 2) for n in range(20)]) == 14


async def _run_refused_in_mid_write(faults: Faults, root: str) -> None:
    setattr(_fs_mount, "HEARTBEAT_S", 0.05)  # noqa: B010 - final; what a full disk took from the share comes back with it
    tier = fs_tier(root, n_write_threads=1, durability="power")
    async with opened(cache_over(tier, n_slots=10, n_chunks=120)) as cache:
        await keep(cache, [49, 49])
        await settle(cache)
        capacity_nbytes = cache.statistics()["fs"].capacity_nbytes
        for n, (call, where, error, after, n_kept) in enumerate((
            ("write", ".slab", errno.ENOSPC, False, 0),
            ("write", ".slab", errno.EDQUOT, False, 0),
            ("write", ".slab", errno.ENOSPC, True, 0),
            ("sync", ".slab", errno.ENOSPC, False, 0),
            ("write", ".slots", errno.ENOSPC, False, 7),
            ("write", ".slots", errno.EDQUOT, False, 7),
            ("sync", ".slots", errno.ENOSPC, False, 0),
        )):  # fmt: skip
            tokens = [50 + n] * 16
            if n_kept:  # the third row
                rule = faults.add(call, path=where, error=error, first=3, count=1)
            else:
                rule = faults.add(call, path=where, error=error, after=after)
            before = cache.statistics()["fs"]
            await keep(cache, tokens)
            await cache.wait_idle(PATIENCE_S)
            assert rule.n_struck >= 1
            rule.remove()
            now = cache.statistics()["fs"]
            assert now.refused["no_space"] - before.refused.get("no_space", 0) == 8 - n_kept, (call, where)
            assert now.n_stored - before.n_stored == n_kept, "the others are kept and announced"
            assert not now.broken and not litter(root)
            gone = cache.chunks(tokens)[2 if n_kept else 0].key
            assert gone.hex() not in chunk_files(root)
            await forget_primary(cache)
            assert await fetch(cache, tokens) == (2 if n_kept else 0)
            await turns_until(lambda: cache.statistics()["fs"].capacity_nbytes >= capacity_nbytes)
            await keep(cache, tokens)
            await forget_primary(cache)
            assert await fetch(cache, tokens) == 8
            await settle(cache)
            assert cache.statistics()["fs"].n_chunks == len(chunk_files(root))


async def test_a41_the_disk_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Disk full in the middle of a write (ENOSPC), by the tier itself or by somebody else; and space again.

    Of the kind: a tmpfs of 16 MiB below a larger limit, filled by us, and to the last page by somebody else: what is
    there is served all the time, newer chunks take the place of older ones, host memory takes everything, no slot
    stays pinned, the log has no line for each chunk, and the tier grows again by itself. And the third of eight writes
    refused (ENOSPC, a quota) at each call on its way, in front of it or behind, its sync and close too: no file of it,
    whole or unfinished, the others kept, the breaker closed. In a slab eight neighbours are written and synced as one,
    and only rows are written one by one: none of them is kept then, or seven.
    """
    await _full_and_empty_again(tmp_path, caplog)
    in_child(_run_refused_in_mid_write if is_slab() else _refused_in_mid_write, tmp_path / "root", folder=tmp_path)


async def _out_of_descriptors(_: Faults, root: str) -> None:
    tokens = prompt(1, 8)
    tier = fs_tier(root)
    async with opened(cache_over(tier, n_slots=10)) as cache:
        await keep(cache, tokens)
        await settle(cache)
        await forget_primary(cache)
        n_fds = len(os.listdir("/proc/self/fd"))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = {name: path.read_bytes() for name, path in chunk_files(root).items()}
        for spare in (0, 1, 2):
            resource.setrlimit(resource.RLIMIT_NOFILE, (n_fds - 1 + spare, hard))
            try:
                got = await fetch(cache, tokens)
                await keep(cache, [77 + spare] * 4)
                await cache.wait_idle(PATIENCE_S)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert 0 <= got <= 8
            assert tier.counters()["corrupt"] == tier.counters()["vanished"] == 0
            now = {name: path.read_bytes() for name, path in chunk_files(root).items()}
            assert files.items() <= now.items(), "no file was deleted or changed"
            await turns_until(lambda: not cache.statistics()["fs"].broken)
            assert await fetch(cache, tokens) == 8, "hits again"
            await forget_primary(cache)
            assert len(os.listdir("/proc/self/fd")) == n_fds, "no descriptor is lost"
        n_failed = tier.counters()["failed_reads"], tier.counters()["failed_writes"]
        assert n_failed == (0, 0) if is_slab() else min(n_failed) > 0
        assert not litter(root)


def test_a46_out_of_descriptors(tmp_path: Path) -> None:
    """Out of descriptors (EMFILE) during eight reads and eight writes, with none, one and two to spare; then not.

    Transient: no file is deleted or marked corrupt, what failed is missed once and hit again, no descriptor is lost. A
    slab is open and needs none.
    Of the kind: an owner's page that cannot be read then (tests/unit/test_attacks_fs.py), a pool's server
    (tests/unit/test_cpu_pool.py).
    """
    in_child(_out_of_descriptors, tmp_path / "root", folder=tmp_path)
