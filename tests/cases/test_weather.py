"""A disk's bad days: read-only, not ours any more, clocks that jump, and everything in turn and back again."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from tests.cases.kit import (
    LIMITS,
    cache_over,
    chunk_files,
    fetch,
    forget_primary,
    fs_tier,
    keep,
    litter,
    opened,
    settle,
    start,
    turns_until,
)
from tests.faults import Faults, in_child
from tests.faults.disks import ext4_disk, unprivileged
from tests.fs_kit import is_slab
from tests.patience import PATIENCE_S
from tests.toys import prompt, shorten_deadline
from tierkv import Level, TieredCache, _driver
from tierkv.errors import ConfigError
from tierkv.policies import LRU, TTL

pytestmark = pytest.mark.usefixtures("layout")


async def test_the_kernel_turns_the_disk_read_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Under open files, as after a bad sector: what is there is served, stores go on in memory, closing works.

    After a repair the next start finds what was there, and writes.
    """
    with ext4_disk(tmp_path / "disk") as disk:
        root = disk.path / "root"
        async with opened(cache_over(fs_tier(root, durability="power"), n_slots=12)) as cache:
            await keep(cache, prompt(1))
            await forget_primary(cache)
            disk.turn_read_only()
            for n in range(20):
                await keep(cache, [50 + n] * 2)
                await cache.wait_idle(PATIENCE_S)
            await turns_until(lambda: not cache.statistics()["fs"].broken)
            await forget_primary(cache)
            assert await fetch(cache, prompt(1)) == 4
        assert len(caplog.records) < 30, "not a line for each chunk"
        disk.repair()
        async with opened(cache_over(fs_tier(root), n_slots=12)) as cache:
            assert await fetch(cache, prompt(1)) == 4
            await keep(cache, prompt(2))
        assert len(chunk_files(root)) >= 8 and not litter(root)


async def test_a_root_that_is_not_ours(tmp_path: Path) -> None:
    """An unprivileged process: a root it may not enter is one error at open; one that is taken away later costs misses.

    Given back, the tier goes on. Nothing of anybody's is changed meanwhile.
    """
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir(mode=0o700)
    ours.mkdir(mode=0o755)
    for folder in (tmp_path, *tmp_path.parents):  # pytest's own, which others may not pass
        if folder == tmp_path or folder.name.startswith(("pytest-", "popen-")):
            os.chmod(folder, 0o755)
    with unprivileged(ours):
        with pytest.raises(ConfigError, match="Permission denied") as refused:
            async with cache_over(fs_tier(theirs)):
                pass
        assert str(theirs) in str(refused.value)
        async with opened(cache_over(fs_tier(ours), n_slots=12)) as cache:
            await keep(cache, prompt(1))
            await forget_primary(cache)
            (namespace,) = [path for path in ours.iterdir() if path.is_dir()]
            os.chmod(namespace, 0)
            for n in range(10):
                await keep(cache, [50 + n] * 2)
                await cache.wait_idle(PATIENCE_S)
                await forget_primary(cache)
                assert await fetch(cache, prompt(1)) == (4 if is_slab() else 0), "a slab is open, and stays so"
            os.chmod(namespace, 0o700)
            await turns_until(lambda: not cache.statistics()["fs"].broken)
            assert await fetch(cache, prompt(1)) == 4, "no file was taken for lost"
            await keep(cache, prompt(2))
            await forget_primary(cache)
            assert await fetch(cache, prompt(2)) == 4
    assert list(theirs.iterdir()) == []


async def _clocks(faults: Faults, root: str) -> None:
    level = Level(fs_tier(root), TTL(LRU(), 3600), capacity=1 << 20)

    def cache_of() -> TieredCache:
        cache = cache_over(fs_tier(root), n_slots=12)
        cache._levels = (cache._levels[0], level._replace(tier=cache._levels[1].tier, policy=TTL(LRU(), 3600)))
        return cache

    day_s = 86400.0
    for shift_s in (-20 * 365 * day_s, 30 * day_s, 20 * 365 * day_s):
        async with opened(cache_of()) as cache:
            await keep(cache, prompt(1))
            await forget_primary(cache)
            faults.shift_clock(shift_s)
            assert abs(time.time() - time.clock_gettime(time.CLOCK_REALTIME)) < day_s
            assert await fetch(cache, prompt(1)) == 4, "no age counts by the wall"
            await keep(cache, prompt(2))
            await forget_primary(cache)
            async with opened(cache_over(fs_tier(root), n_slots=12)) as other:  # two owners, one with another clock
                await turns_until(lambda: other.statistics()["fs"].capacity_nbytes > 0)
                assert await fetch(other, prompt(2)) == 4
            faults.shift_clock(0)
            assert await fetch(cache, prompt(2)) == 4
            await cache.reset()
            await settle(cache)


def test_the_clock_jumps(tmp_path: Path) -> None:
    """Twenty years back, a month and twenty years ahead, under a running cache and between two owners of a root.

    Nothing expires, no owner is taken for dead, deadlines are as they were.
    """
    in_child(_clocks, tmp_path / "root", folder=tmp_path)


async def _everything_in_turn(faults: Faults, root: str) -> None:
    _driver._PROBE_S = 0.1  # while the disk hangs a lookup asks it in vain
    limits = LIMITS._replace(breaker_cooldown_s=0.2)
    async with opened(cache_over(fs_tier(root), n_slots=64, n_chunks=200, limits=limits)) as cache:
        await keep(cache, prompt(1))
        await forget_primary(cache)
        n = 100
        for fault in (
            {"error": errno.ENOSPC},
            {"error": errno.EROFS},
            {"error": errno.EIO},
            {"error": errno.ESTALE},
            {"hang": True},
            {"error": errno.EDQUOT, "after": True},
            {"delay_s": 0.001},
            {"at_most": 1000},
        ):
            # What a disk without space or write access refuses; an open that was done cannot be given back.
            changing = fault.get("error") in (errno.ENOSPC, errno.EROFS) or "after" in fault
            calls = ("write", "rename", "mkdir", "unlink", "sync") if changing else ()
            shorten_deadline(cache, 0.5 if "hang" in fault else PATIENCE_S)
            rule = faults.add(*calls, path=f"{root}/", **fault)
            for _ in range(12):
                n += 1
                await keep(cache, [n] * 2)
                assert await fetch(cache, [n] * 2) == 1, "host memory serves as if there were no disk"
                asker = start(fetch(cache, prompt(1)))
                assert await asker in (0, 1, 2, 3, 4)  # right bytes or a miss, within the deadline
                await cache.wait_idle(0.02)
            rule.let_go()
            rule.remove()
            shorten_deadline(cache, PATIENCE_S)
            await turns_until(lambda: cache._opened().idle and not cache.statistics()["fs"].broken)
            await keep(cache, prompt(1))
            await settle(cache)  # or those are what is counted
            n_stored = cache.statistics()["fs"].n_stored
            while cache.statistics()["fs"].n_stored < n_stored + 3:
                n += 1
                await keep(cache, [n] * 2)
                await cache.wait_idle(PATIENCE_S)
            await settle(cache)
            await forget_primary(cache)
            on_disk = cache._opened().hierarchy.levels[1].ledger.get
            last = next(i for i in range(n, 0, -1) if on_disk(cache.chunks([i] * 2)[0].key) is not None)
            assert await fetch(cache, [last] * 2) == 1, "and the disk serves again"
            assert len(chunk_files(root)) == cache.statistics()["fs"].n_chunks
    assert not litter(root)


def test_everything_in_turn_and_back_again(tmp_path: Path) -> None:
    """Full, read-only, failing, stale, hanging, late, slow, short: each for a while, each call of the kernel's.

    Every request is answered, with right bytes or a miss; after each the tier takes and serves chunks again by itself,
    its books equal the files, and nothing unfinished is left.
    """
    in_child(_everything_in_turn, tmp_path / "root", folder=tmp_path)
