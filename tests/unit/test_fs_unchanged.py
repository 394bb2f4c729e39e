"""A root that nobody changed since it was closed is taken from its index as a whole, while somebody looks into it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.fs_kit import (
    CHARGE,
    LAYOUTS,
    NAMESPACE,
    _mount,
    capacity_for,
    chunk_bytes,
    chunk_of,
    context,
    fetch,
    first_batches,
    key_of,
    layout,  # noqa: F401
    only_files,
    only_slab,
    opened,
    store,
)
from tests.patience import PATIENCE_S
from tierkv.tiers._fs import catalogue as catalogues
from tierkv.tiers._fs import scan, settle, unchanged
from tierkv.tiers._fs.catalogue import Catalogue, Row
from tierkv.tiers._fs.format import namespace_digest
from tierkv.tiers.fs import FSTier
from tierkv.types import ChunkKey, Found, Status

ORDER = (3, 1, 4, 0, 5, 2)
CHUNKS = [chunk_of(i, end_token=i, parent=key_of(9)) for i in ORDER]


@pytest.fixture(autouse=True)
def _short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks at once, so that some spans are disturbed and others are not."""
    monkeypatch.setattr(unchanged, "BATCH", 2)


async def left(root: Path, **settings: Any) -> None:
    """Chunks in an order of their own, closed."""
    async with opened(root, **settings) as tier:
        await store(tier, *CHUNKS)
        await tier.save_order(CHUNKS)


@contextlib.contextmanager
def catalogue_of(root: Path) -> Iterator[Catalogue]:
    """The only one's rows, as another process sees them."""
    (path,) = root.rglob("*.slots")
    with path.open("rb+") as file:
        yield Catalogue(file.fileno(), CHARGE, namespace_digest(NAMESPACE))


def before_they_enter(monkeypatch: pytest.MonkeyPatch, do: Callable[[FSTier], object]) -> Future[FSTier]:
    """On the scan's thread, when the index has been weighed and nothing of it is counted. Takes the tier later."""
    enter, tier = unchanged.enter, Future[FSTier]()

    def late(*args: Any) -> Any:
        do(tier.result(PATIENCE_S))
        return enter(*args)

    monkeypatch.setattr(scan, "enter", late)
    return tier


async def test_what_was_found_or_removed_meanwhile_is_not_announced(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk was looked up, one removed unseen, one found and removed: the others come in their order."""
    await left(root)

    def disturb(tier: FSTier) -> None:
        assert _mount(tier).lookups.probe([key_of(1), key_of(0)]) == [Found(key_of(i), CHARGE) for i in (1, 0)]
        for i in (0, 5):
            _mount(tier).operations.delete_some({}, iter([key_of(i)]))

    waits = before_they_enter(monkeypatch, disturb)
    async with opened(root, wait=False) as tier:
        waits.set_result(tier)
        found = await first_batches(tier)
        assert found == [Found(c.key, CHARGE, True, c) for c in CHUNKS if c.end_token in (3, 4, 2)]
        assert tier.usage()["chunks_nbytes"] == 4 * CHARGE == chunk_bytes(root, tier)
        assert await fetch(tier, *CHUNKS) == [Status.MISSING if i in (0, 5) else Status.OK for i in ORDER]
        _mount(tier).books.check()
        await tier.delete([c.key for c in CHUNKS])
        assert tier.usage()["chunks_nbytes"] == 0 == chunk_bytes(root, tier)


@only_slab
async def test_rows_and_index_that_differ_are_taken_by_the_rows(root: Path) -> None:
    """A row that somebody removed since, and one that somebody made: the catalogue is right."""
    await left(root)
    with catalogue_of(root) as catalogue:
        rows = {row.key: row for piece in catalogue.rows() for row in piece}
        catalogue.clear(rows[key_of(2)].line)
        catalogue.put(key_of(8), rows[key_of(2)].slot)
    async with opened(root) as tier:
        assert [f.key for f in await first_batches(tier)] == [key_of(i) for i in (3, 1, 4, 0, 5, 8)]
        assert tier.usage()["chunks_nbytes"] == 6 * CHARGE
        _mount(tier).books.check()


@only_slab
async def test_a_row_besides_is_seen(root: Path) -> None:
    """All that the index lists is there, and one chunk more."""
    await left(root)
    with catalogue_of(root) as catalogue:
        taken = {row.slot for piece in catalogue.rows() for row in piece}
        catalogue.put(key_of(8), max(taken) + 1)
    async with opened(root) as tier:
        assert [f.key for f in await first_batches(tier)] == [key_of(i) for i in (*ORDER, 8)]
        assert tier.usage()["chunks_nbytes"] == 7 * CHARGE


@only_slab
async def test_a_catalogue_that_nobody_changed_is_not_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index says which slot each chunk has, and which row: enough to read, replace and delete, and to be sure."""
    monkeypatch.setattr(catalogues, "_TICK_S", -1.0)
    await left(root)
    monkeypatch.setattr(Catalogue, "rows", lambda _: pytest.fail("it was read"))
    async with opened(root) as tier:
        assert await first_batches(tier) == [Found(c.key, CHARGE, True, c) for c in CHUNKS]
        assert tier.usage()["chunks_nbytes"] == 6 * CHARGE == chunk_bytes(root, tier)
        assert await fetch(tier, *CHUNKS) == [Status.OK] * 6
        await store(tier, chunk_of(6), chunk_of(7), CHUNKS[0])
        await tier.delete([CHUNKS[1].key])
        _mount(tier).books.check()
    monkeypatch.undo()
    with catalogue_of(root) as catalogue:
        rows = [row for piece in catalogue.rows(tidy=False) for row in piece]
    assert sorted(row.key for row in rows) == sorted(key_of(i) for i in (*ORDER, 6, 7) if i != ORDER[1])
    assert len({row.slot for row in rows}) == len(rows), "no slot was given out twice"
    async with opened(root) as tier:
        assert await fetch(tier, CHUNKS[0], *CHUNKS[2:], chunk_of(6), chunk_of(7)) == [Status.OK] * 7


@only_slab
@pytest.mark.parametrize("change", ["another run of the machine", "another file", "it changed a moment ago"])
async def test_a_catalogue_that_may_have_changed_is_read(
    root: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """After a start of the machine, where a copy stands in its place, and where its time says nothing."""
    monkeypatch.setattr(catalogues, "_TICK_S", 1e9 if change == "it changed a moment ago" else -1.0)
    await left(root)
    (path,) = root.rglob("*.slots")
    if change == "another file":
        path.write_bytes(path.rename(path.with_suffix(".old")).read_bytes())
        path.chmod(0o600)
        path.with_suffix(".old").unlink()
    elif change == "another run of the machine":
        monkeypatch.setattr(catalogues, "_boot", lambda: b"another")
    rows, read = Catalogue.rows, []

    def noted(catalogue: Catalogue) -> Iterator[list[Row]]:
        read.append(catalogue)
        return rows(catalogue)

    monkeypatch.setattr(Catalogue, "rows", noted)
    async with opened(root) as tier:
        assert await first_batches(tier) == [Found(c.key, CHARGE, True, c) for c in CHUNKS]
        assert await fetch(tier, *CHUNKS) == [Status.OK] * 6
    assert read


@only_slab
async def test_a_change_at_rest_is_seen(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that somebody cleared since the index was written, whose catalogue was at rest then."""
    monkeypatch.setattr(catalogues, "_TICK_S", -1.0)
    await left(root)
    with catalogue_of(root) as catalogue:
        (place,) = [row.line for piece in catalogue.rows() for row in piece if row.key == key_of(4)]
        catalogue.clear(place)
    (path,) = root.rglob("*.slots")
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime + 1))  # a file system's time may go by in steps
    async with opened(root) as tier:
        assert [f.key for f in await first_batches(tier)] == [key_of(i) for i in ORDER if i != 4]
        assert await fetch(tier, chunk_of(4)) == [Status.MISSING]


@only_slab
async def test_a_slab_without_a_stamp_that_is_gone_is_not_counted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index lists its chunks, but somebody took the slab away, and there is nothing to compare."""
    monkeypatch.setattr(catalogues, "_TICK_S", 1e9)
    await left(root)
    for path in (*root.rglob("*.slots"), *root.rglob("*.slab")):
        path.unlink()
    async with opened(root) as tier:
        assert tier.usage()["chunks_nbytes"] == 0
        assert await fetch(tier, *CHUNKS) == [Status.MISSING] * 6
        _mount(tier).books.check()


async def test_both_layouts_on_a_root_come_in_one_order(root: Path) -> None:
    """Chunks in files and chunks in slots, in turns, as they were ordered."""
    for name in LAYOUTS:
        async with opened(root, layout=name, n_chunks=12) as tier:
            await first_batches(tier)
            await store(tier, *(c for i, c in enumerate(CHUNKS) if LAYOUTS[i % 2] == name))
            await tier.save_order(CHUNKS)
    async with opened(root, n_chunks=12) as tier:
        assert await first_batches(tier) == [Found(c.key, CHARGE, True, c) for c in CHUNKS]
        assert tier.usage()["chunks_nbytes"] == 6 * CHARGE
        assert await fetch(tier, *CHUNKS) == [Status.OK] * 6
        _mount(tier).books.check()


async def test_a_smaller_capacity_takes_the_coldest(root: Path) -> None:
    """What the index lists is trimmed by the order that it gives."""
    await left(root)
    async with opened(root, capacity=capacity_for(4)) as tier:
        assert [f.key for f in await first_batches(tier)] == [key_of(i) for i in ORDER[2:]]
        assert tier.usage()["chunks_nbytes"] == 4 * CHARGE == chunk_bytes(root, tier)


@only_files
async def test_what_nobody_can_read_leaves_first(root: Path) -> None:
    """Another namespace's files make room before anything that the index lists."""
    await left(root, ctx=context(namespace=b"another"), n_chunks=12)
    await left(root, n_chunks=12)
    async with opened(root, n_chunks=8) as tier:
        assert [f.key for f in await first_batches(tier)] == [key_of(i) for i in ORDER]
        assert tier.usage()["used_nbytes"] <= capacity_for(8)
        assert chunk_bytes(root, tier) == 8 * CHARGE
        assert tier.counters()["trimmed"] == 4


@only_files
async def test_what_nobody_can_remove_costs_the_coldest(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of another namespace that stay count: then not everything that the index lists can be kept."""
    await left(root, ctx=context(namespace=b"another"), n_chunks=12)
    await left(root, n_chunks=12)
    monkeypatch.setattr(settle, "shrink_leaver", lambda _fd, leaver, _nbytes: leaver)
    async with opened(root, n_chunks=8) as tier:
        assert [f.key for f in await first_batches(tier)] == [key_of(i) for i in ORDER[4:]]
        assert chunk_bytes(root, tier) == 8 * CHARGE


async def test_chunks_of_many_lengths_keep_them(root: Path) -> None:
    """Keys and payloads of unequal length are counted as what they are."""
    chunks = [chunk_of(i, 100 + i * 3000)._replace(key=ChunkKey(key_of(i)[: 8 + i])) for i in range(4)]
    async with opened(root) as tier:
        await store(tier, *chunks)
        await tier.save_order(chunks)
        before = tier.usage()["chunks_nbytes"]
    async with opened(root) as tier:
        assert [f.chunk for f in await first_batches(tier)] == chunks
        assert tier.usage()["chunks_nbytes"] == before
        assert await fetch(tier, *chunks) == [Status.OK] * 4
