"""Files that a failed write, or a trim, could not remove: charged while they are there, and gone when they can be."""

from __future__ import annotations

import errno
from pathlib import Path

from tests.cases.kit import chunk_files, litter
from tests.faults import Faults, in_child
from tests.fs_kit import (
    OVERHEAD,
    capacity_for,
    chunk_of,
    context,
    fetch,
    in_files,  # noqa: F401
    opened,
    recount,
    store,
    write,
)
from tierkv.tiers.fs import FSTier
from tierkv.types import Reason, Status


def _leftovers(tier: FSTier) -> int:
    assert tier._mount is not None
    return len(tier._mount._leftovers)


def _without_keeper(tier: FSTier) -> None:
    """Nobody tries again but the test."""
    assert tier._mount is not None
    tier._mount._stop.set()
    tier._mount._keeper.join()


def _retry(tier: FSTier) -> None:
    """What the tier's keeper does every second."""
    assert tier._mount is not None
    tier._mount._leftovers.retry()


def _charged(tier: FSTier) -> int:
    return tier.usage()["used_nbytes"]


async def _half_written(faults: Faults, root: str) -> None:
    async with opened(root, 6) as tier:
        _without_keeper(tier)
        before = _charged(tier)
        rules = [faults.add(call, path=f"{root}/", error=errno.EROFS) for call in ("write", "rename", "unlink")]
        outcomes = await write(tier, *(chunk_of(i) for i in range(3)))
        assert [outcome.status for outcome in outcomes] == [Status.FAILED] * 3
        assert len(litter(root)) == _leftovers(tier) == 3
        assert _charged(tier) == before + 3 * (capacity_for(1) - OVERHEAD), "as much as the whole files would take"
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
        _without_keeper(tier)
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
        assert recount(root) <= _charged(tier) <= capacity_for(6)
        rule.remove()
        await store(tier, chunk_of(9))
        assert recount(root) <= _charged(tier) <= capacity_for(6)


def test_files_of_another_namespace_that_cannot_be_removed_stay_charged(tmp_path: Path) -> None:
    """They were given up as removed, and the root grew over its limit by as much."""
    in_child(_full_of_leavers, tmp_path / "root", folder=tmp_path)
