"""Slabs, or halves of one, that cannot be removed: charged while they lie there, tried again, never in the way."""

from __future__ import annotations

import errno
from pathlib import Path

from tests.faults import Faults, in_child
from tests.fs_kit import (
    NAMESPACE,
    capacity_for,
    charged,
    chunk_of,
    context,
    fetch,
    kill,
    opened,
    recount,
    scanned,
    store,
    using,
    without_keeper,
    write,
)
from tierkv.tiers._fs.format import namespace_digest
from tierkv.types import Status


async def _leaving_slab_that_stays(faults: Faults, root: str) -> None:
    with using("slab"):
        async with opened(root, 6) as tier:
            await store(tier, *map(chunk_of, range(6)))
        async with opened(root, 6, ctx=context(namespace=b"another")) as tier:
            without_keeper(tier)
            rule = faults.add("unlink", path=f"{root}/", error=errno.EIO)
            for i in range(20):
                await write(tier, chunk_of(i))
                assert recount(root) <= charged(tier) <= capacity_for(6), i
            rule.remove()
            for i in range(20):
                await write(tier, chunk_of(i))
            assert not list(Path(root, namespace_digest(NAMESPACE).hex()).glob("*.sl*"))
            assert recount(root) <= charged(tier) <= capacity_for(6)


def test_a_slab_of_another_namespace_that_cannot_be_removed_stays_charged(tmp_path: Path) -> None:
    """Its last part was given up as removed while it lay there."""
    in_child(_leaving_slab_that_stays, tmp_path / "root", folder=tmp_path)


async def _not_made(faults: Faults, root: str) -> None:
    with using("slab"):
        async with opened(root, 6) as tier:
            without_keeper(tier)
            rules = [
                faults.add("size", "write", path=".slots", error=errno.EIO),
                faults.add("unlink", path=f"{root}/", error=errno.EIO),
            ]
            assert (await write(tier, chunk_of(0)))[0].status is Status.FAILED
            assert recount(root) <= charged(tier)
            for rule in rules:
                rule.remove()
            await store(tier, *map(chunk_of, range(6)))
            assert await fetch(tier, *map(chunk_of, range(6))) == [Status.OK] * 6
            assert recount(root) <= charged(tier) <= capacity_for(6)


def test_a_slab_that_could_not_be_made_is_not_in_the_way_of_the_next(tmp_path: Path) -> None:
    """Half of it stayed, unknown, and no chunk could be stored until a restart."""
    in_child(_not_made, tmp_path / "root", folder=tmp_path)


async def _trim_fails(faults: Faults, root: str) -> None:
    with using("slab"):
        async with opened(root, 8) as tier:
            await store(tier, *map(chunk_of, range(8)))
            kill(tier)
        rule = faults.add("write", path=".slots", error=errno.EIO)
        async with opened(root, 8, capacity=capacity_for(6)) as tier:
            assert tier._mount is not None
            assert recount(root) <= charged(tier)
            tier._mount._leftovers.retry()
            assert recount(root) <= charged(tier)
            assert await fetch(tier, *map(chunk_of, range(8))) == [Status.OK] * 8, "it is a good chunk still"
            rule.remove()
            await tier.delete([chunk_of(i).key for i in range(4)])
            tier._mount.beat()
            assert recount(root) <= charged(tier) <= capacity_for(6)
            await store(tier, chunk_of(0))
            assert recount(root) <= charged(tier) <= capacity_for(6)


def test_a_slot_that_a_scan_cannot_free_stays_a_chunk(tmp_path: Path) -> None:
    """It was taken for a file that could not be removed, found to be no file, and counted by nobody."""
    in_child(_trim_fails, tmp_path / "root", folder=tmp_path)


async def _adopted_slab_stays(faults: Faults, root: str) -> None:
    with using("slab"):
        now = [0.0]
        async with opened(root, 12) as first, opened(root, 12, clock=lambda: now[0]) as second:
            assert first._mount is not None and second._mount is not None
            await store(first, *map(chunk_of, range(2)))
            await first.delete([chunk_of(0).key, chunk_of(1).key])
            first._mount.beat()
            second._mount.beat()
            await store(second, chunk_of(0))
            kill(first)
            without_keeper(second)
            rule = faults.add("unlink", path=".sl", error=errno.EIO)
            second._mount.beat()
            now[0] += 61.0
            second._mount.beat()
            await scanned(second)
            assert second.counters()["adopted_owners"] == 1
            assert len(list(Path(root).rglob("*.slab"))) == 2
            assert recount(root) <= charged(second)
            rule.remove()
            second._mount._slabs.retry()
            second._mount.beat()
            assert len(list(Path(root).rglob("*.slab"))) == 1
            await store(second, *map(chunk_of, range(1, 11)))
            assert recount(root) <= charged(second) <= capacity_for(12)


def test_an_adopted_slab_that_cannot_be_removed_goes_when_it_can(tmp_path: Path) -> None:
    """It stayed charged, and lay there, until a restart: its owner's id was given up with it."""
    in_child(_adopted_slab_stays, tmp_path / "root", folder=tmp_path)


async def _left_at_a_close(faults: Faults, root: str) -> None:
    with using("slab"):
        async with opened(root, 12) as second:
            assert second._mount is not None
            without_keeper(second)
            async with opened(root, 12) as first:
                assert first._mount is not None
                second._mount.beat()
                first._mount.beat()
                await store(first, *map(chunk_of, range(4)))
                await first.delete([chunk_of(i).key for i in range(4)])
                rule = faults.add("unlink", path=".sl", error=errno.EIO)
            for i in range(20):
                second._mount.beat()
                await scanned(second)
                await write(second, chunk_of(i))
                assert recount(root) <= capacity_for(12), i
            rule.remove()
            second._mount._slabs.retry()
            second._mount.beat()
            assert len(list(Path(root).rglob("*.slab"))) == 1


def test_a_slab_that_a_close_cannot_remove_is_left_to_the_others(tmp_path: Path) -> None:
    """Its owner's lock file went, so that nobody counted it, and the others filled the root over its capacity."""
    in_child(_left_at_a_close, tmp_path / "root", folder=tmp_path)
