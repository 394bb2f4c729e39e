"""``layout: "auto"``: a slab wherever the file system and the capacity allow one, else files; and it says which."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.faults.disks import ext4_disk
from tests.fs_kit import (
    LONGEST,
    OVERHEAD,
    chunk_of,
    context,
    fetch,
    first_batches,
    kill,
    n_files,
    n_rows,
    opened,
    recount,
    store,
)
from tierkv import ConfigError
from tierkv.tiers._fs.format import charge_nbytes
from tierkv.tiers._fs.wishes import least_capacity_nbytes
from tierkv.tiers.fs import FSTier
from tierkv.types import Status

OK = Status.OK


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """(level, what) of every line about where new chunks go."""
    return [(line.levelname, line.getMessage()) for line in caplog.records if "new chunks go" in line.getMessage()]


async def test_a_slab_where_the_file_system_allows_one(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Said in one line of the log; a chunk is charged a slot, however short it is, from the open on."""
    with caplog.at_level(logging.INFO):
        async with opened(root, layout="auto") as tier:
            await store(tier, chunk_of(1), chunk_of(2, 1))
            assert await fetch(tier, chunk_of(1), chunk_of(2, 1)) == [OK, OK]
            assert tier.charge_nbytes(1) == charge_nbytes(LONGEST)
    assert (n_files(root), n_rows(root)) == (0, 2)
    ((level, what),) = said(caplog)
    assert level == "INFO" and what == f"fs: new chunks go into a slab, on {root}"


async def test_files_where_it_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On a real file system that cannot give a file blocks: files, one warning with the reason, and all works."""
    with ext4_disk(tmp_path / "disk", extents=False) as disk:
        root = disk.path / "root"
        for _ in range(2):
            caplog.clear()
            async with opened(root, layout="auto") as tier:
                await store(tier, chunk_of(1), chunk_of(2, 1))
                assert await fetch(tier, chunk_of(1), chunk_of(2, 1)) == [OK, OK]
                assert tier.charge_nbytes(1) == charge_nbytes(1)
            assert (n_files(root), n_rows(root)) == (2, 0)
            ((level, what),) = said(caplog)
            assert level == "WARNING" and "a file of its own: this file system cannot give a file blocks" in what
        with pytest.raises(ConfigError, match=r'layout.*"files" here: this file system cannot'):
            await FSTier(root, capacity="1MiB", min_free=0, layout="slab").open(context())


async def test_files_where_a_slab_has_no_room(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The least capacity of files is still enough; with the least of a slab there is one, which holds a chunk, too."""
    for capacity, n_in_files in (
        (least_capacity_nbytes(LONGEST), 1),
        (least_capacity_nbytes(LONGEST, in_slab=True) - 1, 1),
        (least_capacity_nbytes(LONGEST, in_slab=True), 0),
    ):
        here = root / str(capacity)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            async with opened(here, layout="auto", capacity=capacity) as tier:
                await store(tier, chunk_of(1))
                assert await fetch(tier, chunk_of(1)) == [OK]
                assert recount(here) <= capacity
        assert (n_files(here), n_rows(here)) == (n_in_files, 1 - n_in_files)
        assert len(said(caplog)) == 1
    with pytest.raises(ConfigError, match=rf"at least {least_capacity_nbytes(LONGEST)} bytes"):
        await FSTier(root, capacity=least_capacity_nbytes(LONGEST) - 1, layout="auto").open(context())


@pytest.mark.parametrize("nbytes", [64 << 10, 1 << 20], ids=["64KiB", "1MiB"])
@pytest.mark.parametrize("n", [2, 8, 200])
async def test_a_small_capacity_holds_nearly_as_many(root: Path, n: int, nbytes: int) -> None:
    """A slab holds one chunk less than files do: its catalogue, two pages for the first 21 slots, is set aside."""
    capacity = n * charge_nbytes(nbytes) + OVERHEAD
    held = {}
    for layout in ("files", "auto"):
        settings: dict[str, Any] = {"layout": layout, "capacity": capacity, "ctx": context(longest=nbytes)}
        async with opened(root / layout, **settings) as tier:
            held[layout] = tier.share_nbytes() // tier.charge_nbytes(nbytes)
    assert n - 1 <= held["files"] <= n and held["auto"] in (held["files"], held["files"] - 1), held


async def test_a_root_of_chunk_files_goes_on_in_a_slab(root: Path) -> None:
    """An upgrade: what lies there is served, also after a kill, and what is stored from now on goes into the slab."""
    capacity = 12 * charge_nbytes(LONGEST)
    async with opened(root, layout="files", capacity=capacity) as tier:
        await store(tier, *map(chunk_of, range(4)))
    async with opened(root, layout="auto", capacity=capacity) as tier:
        assert await fetch(tier, *map(chunk_of, range(4))) == [OK] * 4
        await store(tier, *map(chunk_of, range(4, 8)))
        kill(tier)
    async with opened(root, layout="auto", capacity=capacity) as tier:
        assert {found.key for found in await first_batches(tier)} == {chunk_of(i).key for i in range(8)}
        assert await fetch(tier, *map(chunk_of, range(8))) == [OK] * 8
        assert (n_files(root), n_rows(root)) == (4, 4)
        await tier.delete([chunk_of(i).key for i in range(4)])
    assert (n_files(root), n_rows(root)) == (0, 4)
    assert recount(root) <= capacity
