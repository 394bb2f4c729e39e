"""A root that nobody changed since it was closed is taken from its index as a whole, while somebody looks into it."""

from __future__ import annotations

from collections.abc import Callable
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
from tierkv.tiers._fs import scan, unchanged
from tierkv.tiers._fs.catalogue import Catalogue
from tierkv.tiers._fs.format import namespace_digest
from tierkv.tiers.fs import FSTier
from tierkv.types import ChunkKey, Found, Status

ORDER = (3, 1, 4, 0, 5, 2)
CHUNKS = [chunk_of(i, end_token=i, parent=key_of(9)) for i in ORDER]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture(autouse=True)
def _short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks at once, so that some spans are disturbed and others are not."""
    monkeypatch.setattr(unchanged, "BATCH", 2)


async def left(root: Path, **settings: Any) -> None:
    """Chunks in an order of their own, closed."""
    async with opened(root, **settings) as tier:
        await store(tier, *CHUNKS)
        await tier.save_order(CHUNKS)


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
            _mount(tier).operations.delete_some([key_of(i)], {}, iter([0]))

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
    (path,) = root.rglob("*.slots")
    with path.open("rb+") as file:
        catalogue = Catalogue(file.fileno(), CHARGE, namespace_digest(NAMESPACE))
        rows = {row.key: row for piece in catalogue.rows() for row in piece}
        catalogue.clear(rows[key_of(2)].place)
        catalogue.put(key_of(8), rows[key_of(2)].slot)
    async with opened(root) as tier:
        assert [f.key for f in await first_batches(tier)] == [key_of(i) for i in (3, 1, 4, 0, 5, 8)]
        assert tier.usage()["chunks_nbytes"] == 6 * CHARGE
        _mount(tier).books.check()


@only_slab
async def test_a_row_besides_is_seen(root: Path) -> None:
    """All that the index lists is there, and one chunk more."""
    await left(root)
    (path,) = root.rglob("*.slots")
    with path.open("rb+") as file:
        catalogue = Catalogue(file.fileno(), CHARGE, namespace_digest(NAMESPACE))
        taken = {row.slot for piece in catalogue.rows() for row in piece}
        catalogue.put(key_of(8), max(taken) + 1)
    async with opened(root) as tier:
        assert [f.key for f in await first_batches(tier)] == [key_of(i) for i in (*ORDER, 8)]
        assert tier.usage()["chunks_nbytes"] == 7 * CHARGE


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
    monkeypatch.setattr(scan, "shrink_leaver", lambda _fd, leaver, _nbytes: leaver)
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
