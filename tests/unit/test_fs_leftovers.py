"""Files that a failed write, or a trim, could not remove: charged while they are there, and gone when they can be."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tests.cases.kit import chunk_files, litter
from tests.faults import Faults, in_child
from tests.fs_kit import (
    NAMESPACE,
    OVERHEAD,
    capacity_for,
    charged,
    chunk_of,
    context,
    fetch,
    in_files,  # noqa: F401
    kill,
    opened,
    path_of,
    recount,
    store,
    using,
    without_keeper,
    write,
)
from tierkv.tiers._fs.format import namespace_digest
from tierkv.tiers.fs import FSTier
from tierkv.types import Reason, Status


def _leftovers(tier: FSTier) -> int:
    assert tier._mount is not None
    return len(tier._mount._leftovers)


def _retry(tier: FSTier) -> None:
    """What the tier's keeper does every second."""
    assert tier._mount is not None
    tier._mount._leftovers.retry()


async def _half_written(faults: Faults, root: str) -> None:
    async with opened(root, 6) as tier:
        without_keeper(tier)
        before = charged(tier)
        rules = [faults.add(call, path=f"{root}/", error=errno.EROFS) for call in ("write", "rename", "unlink")]
        outcomes = await write(tier, *(chunk_of(i) for i in range(3)))
        assert [outcome.status for outcome in outcomes] == [Status.FAILED] * 3
        assert len(litter(root)) == _leftovers(tier) == 3
        assert charged(tier) == before + 3 * (capacity_for(1) - OVERHEAD), "as much as the whole files would take"
        _retry(tier)
        assert len(litter(root)) == _leftovers(tier) == 3, "the disk is no better"
        assert (await write(tier, chunk_of(0)))[0].status is Status.FAILED, "what lies in the way stays in the way"
        assert _leftovers(tier) == 3
        for rule in rules:
            rule.remove()
        await store(tier, chunk_of(0))
        assert len(litter(root)) == _leftovers(tier) == 2, "who writes again needs no retry"
        _retry(tier)
        assert not litter(root) and not _leftovers(tier)
        assert await fetch(tier, chunk_of(0), chunk_of(1)) == [Status.OK, Status.MISSING]
        await store(tier, *(chunk_of(i) for i in range(1, 6)))
        assert recount(root) <= capacity_for(6) and len(chunk_files(root)) == 6, "nothing stays charged"


def test_what_a_failed_write_leaves_is_charged_until_it_is_gone(tmp_path: Path) -> None:
    """A disk turns read-only in mid-write: the unfinished files count, and go as soon as they can."""
    in_child(_half_written, tmp_path / "root", folder=tmp_path)


async def _renamed_after_all(faults: Faults, root: str) -> None:
    async with opened(root, 6) as tier:
        without_keeper(tier)
        rename = faults.add("rename", path=f"{root}/", error=errno.EIO, after=True)
        unlink = faults.add("unlink", path=f"{root}/", error=errno.EIO)
        assert (await write(tier, chunk_of(0)))[0].status is Status.FAILED
        assert len(chunk_files(root)) == _leftovers(tier) == 1, "whole and under its final name"
        assert await fetch(tier, chunk_of(0)) == [Status.MISSING], "which nobody was told"
        rename.remove()
        unlink.remove()
        await store(tier, chunk_of(0))
        _retry(tier)
        assert await fetch(tier, chunk_of(0)) == [Status.OK], "what was written since is not taken for what was left"
        assert not _leftovers(tier)


def test_a_write_that_was_done_and_denied(tmp_path: Path) -> None:
    """The rename is done and said to have failed, and nothing can be removed: a later write of that key stays."""
    in_child(_renamed_after_all, tmp_path / "root", folder=tmp_path)


async def _full_of_leavers(faults: Faults, root: str) -> None:
    async with opened(root, 6) as tier:
        await store(tier, *(chunk_of(i) for i in range(6)))
    async with opened(root, 6, ctx=context(namespace=b"another")) as tier:
        rule = faults.add("unlink", path=f"{root}/", error=errno.EROFS)
        (outcome,) = await write(tier, chunk_of(9))
        assert (outcome.status, outcome.reason) == (Status.REFUSED, Reason.FULL), "nobody leaves, so nobody enters"
        assert recount(root) <= charged(tier) <= capacity_for(6)
        rule.remove()
        await store(tier, chunk_of(9))
        assert recount(root) <= charged(tier) <= capacity_for(6)


def test_files_of_another_namespace_that_cannot_be_removed_stay_charged(tmp_path: Path) -> None:
    """They were given up as removed, and the root grew over its limit by as much."""
    in_child(_full_of_leavers, tmp_path / "root", folder=tmp_path)


def _cut(path: Path) -> None:
    """No chunk any more, and still a page."""
    os.truncate(path, 100)


async def _probe_cannot_remove(faults: Faults, root: str) -> None:
    async with opened(root, 6) as tier:
        without_keeper(tier)
        await store(tier, chunk_of(0), chunk_of(1))
        before = charged(tier)
        cut = path_of(root, chunk_of(0).key, tier)
        _cut(cut)
        for error in (errno.EACCES, errno.EROFS, errno.EIO):
            rule = faults.add("unlink", path=f"{root}/", error=error)
            assert await tier.contains([chunk_of(0).key]) == [False], "it is no chunk"
            assert await tier.contains([chunk_of(0).key]) == [False]
            assert cut.exists() and recount(root) <= charged(tier) < before, os.strerror(error)
            _retry(tier)
            assert recount(root) <= charged(tier), "the disk is no better"
            rule.remove()
        _retry(tier)
        assert not cut.exists() and not _leftovers(tier)
        assert charged(tier) == before - (capacity_for(1) - OVERHEAD), "nothing stays charged"
        await store(tier, chunk_of(0), *(chunk_of(i) for i in range(2, 6)))
        assert await fetch(tier, *(chunk_of(i) for i in range(6))) == [Status.OK] * 6


def test_what_a_probe_finds_damaged_and_cannot_remove_stays_charged(tmp_path: Path) -> None:
    """Its record went and its bytes stayed, counted by nobody: the root held more than its books said."""
    in_child(_probe_cannot_remove, tmp_path / "root", folder=tmp_path)


async def _damaged_and_written_anew(faults: Faults, root: str) -> None:
    async with opened(root, 6) as tier:
        without_keeper(tier)
        await store(tier, chunk_of(0))
        path = path_of(root, chunk_of(0).key, tier)
        whole = path.read_bytes()
        _cut(path)
        rule = faults.add("unlink", path=f"{root}/", error=errno.EIO)
        assert await tier.contains([chunk_of(0).key]) == [False]
        rule.remove()
        path.with_name("aside").write_bytes(whole)
        path.with_name("aside").rename(path)
        _retry(tier)
        assert path.exists() and not _leftovers(tier), "another file by now: not what was found"


def test_what_replaced_a_damaged_file_is_not_removed_for_it(tmp_path: Path) -> None:
    """A write of that key that was under way when the damage was found gives it its name afterwards."""
    in_child(_damaged_and_written_anew, tmp_path / "root", folder=tmp_path)


async def _scan_cannot_remove(faults: Faults, root: str) -> None:
    async with opened(root, 8) as tier:
        await store(tier, *map(chunk_of, range(4)))
        paths = [path_of(root, chunk_of(i).key, tier) for i in range(4)]
        kill(tier)
    _cut(paths[0])
    paths[1].rename(paths[1].with_name(paths[1].name + ".part0"))
    elsewhere = paths[2].parents[1] / ("00" if paths[2].parent.name != "00" else "01")
    elsewhere.mkdir(exist_ok=True)
    paths[2].rename(elsewhere / paths[2].name)
    rule = faults.add("unlink", path=f"{root}/{namespace_digest(NAMESPACE).hex()}/", error=errno.EIO)
    async with opened(root, 8) as tier:
        without_keeper(tier)
        assert _leftovers(tier) == 3
        assert recount(root) <= charged(tier), "what a scan cannot remove counts"
        assert (await write(tier, chunk_of(1)))[0].status is Status.FAILED, "what lies in the way stays in the way"
        rule.remove()
        _retry(tier)
        assert not _leftovers(tier) and len(chunk_files(root)) == 1
        await store(tier, *map(chunk_of, (0, 1, 2, 4, 5, 6, 7)))
        assert recount(root) <= capacity_for(8), "nothing stays charged"


def test_what_a_scan_cannot_remove_is_charged_until_it_is_gone(tmp_path: Path) -> None:
    """Cut, unfinished and misplaced files of a disk that lets nothing be removed were counted by nobody."""
    in_child(_scan_cannot_remove, tmp_path / "root", folder=tmp_path)


async def _scan_of_another_namespace(faults: Faults, root: str) -> None:
    async with opened(root, 6) as tier:
        await store(tier, *map(chunk_of, range(3)))
        _cut(path_of(root, chunk_of(0).key, tier))
    rule = faults.add("unlink", path=f"{root}/{namespace_digest(NAMESPACE).hex()}/", error=errno.EIO)
    async with opened(root, 6, ctx=context(namespace=b"another")) as tier:
        assert recount(root) <= charged(tier), "what a scan cannot remove counts"
        rule.remove()
        await store(tier, *map(chunk_of, range(6)))
        assert recount(root) <= capacity_for(6) and not chunk_files(root / Path(namespace_digest(NAMESPACE).hex()))


def test_what_cannot_be_removed_of_another_namespace_counts_and_leaves_first(tmp_path: Path) -> None:
    """As above, where nobody reads it."""
    in_child(_scan_of_another_namespace, tmp_path / "root", folder=tmp_path)


async def _half_a_slab_that_stays(faults: Faults, root: str) -> None:
    with using("slab"):
        async with opened(root, 6) as tier:
            without_keeper(tier)
            assert tier._mount is not None
            await store(tier, *map(chunk_of, range(3)))
            (catalogue,) = Path(root).rglob("*.slots")
            catalogue.unlink()
            rule = faults.add("unlink", path=f"{root}/", error=errno.EIO)
            for _ in range(2):
                tier._mount.beat()
                assert recount(root) <= charged(tier), "what stays of it counts"
            assert (await write(tier, chunk_of(0)))[0].status is not Status.OK, "what lies in the way stays in the way"
            assert recount(root) <= charged(tier)
            rule.remove()
            await store(tier, *map(chunk_of, range(6)))
            assert await fetch(tier, *map(chunk_of, range(6))) == [Status.OK] * 6, "nothing stays charged"
            assert recount(root) <= charged(tier) <= capacity_for(6)
            tier._mount.books.check()


def test_half_of_a_slab_that_cannot_be_removed_counts(tmp_path: Path) -> None:
    """Somebody removed its catalogue, and the disk keeps the slots: an owner that gave them up counted them no more."""
    in_child(_half_a_slab_that_stays, tmp_path / "root", folder=tmp_path)
