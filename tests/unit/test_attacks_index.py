"""Indexes, catalogues and headers that somebody made: sound checksums over what cannot be."""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.fs_kit import (
    CHARGE,
    PAGE,
    capacity_for,
    chunk_of,
    fetch,
    first_batches,
    kill,
    layout,  # noqa: F401
    only_slab,
    opened,
    recount,
    scanned,
    store,
)
from tests.patience import PATIENCE_S
from tierkv.tiers._fs import catalogue as _fs_catalogue
from tierkv.tiers._fs import format as _fs_format
from tierkv.tiers._fs import index as _fs_index
from tierkv.tiers._fs.index import IndexEntry, pack_index, unpack_index
from tierkv.types import Chunk, ChunkKey, Status

N = 4
CHUNKS = [chunk_of(i, tenant="a") for i in range(N)]
OK = Status.OK


async def closed(root: Path) -> None:
    """A root with an index that lists all chunks."""
    async with opened(root) as tier:
        await store(tier, *CHUNKS)
        await tier.save_order(CHUNKS)


def only(root: Path, suffix: str) -> Path:
    (path,) = root.rglob(f"*.{suffix}")
    return path


def forge(index: Path, field: int, value: int) -> None:
    """Another value in the first entry."""
    data = bytearray(index.read_bytes())
    head = _fs_index._HEAD.unpack_from(data)
    entry = struct.Struct(_fs_index._ENTRY.format(key=head[5], parent=head[6]))
    at = len(data) - _fs_index._SUM_NBYTES - head[8] * entry.size
    fields: list[Any] = list(entry.unpack_from(data, at))
    fields[field] = value
    entry.pack_into(data, at, *fields)
    data[-_fs_index._SUM_NBYTES :] = xxhash.xxh3_128_digest(bytes(data[: -_fs_index._SUM_NBYTES]))
    index.write_bytes(data)


@pytest.mark.parametrize(("field", "value"), [(0, 0), (0, 116), (3, 1), (3, 0x300), (4, 7), (4, 0xFFFF)], ids=str)
async def test_an_index_that_cannot_be_is_none(root: Path, field: int, value: int) -> None:
    """No key, a key too long, an owner or a tenant that is not listed: it ended the scan, and nothing was written."""
    await closed(root)
    forge(only(root, "index"), field, value)
    async with opened(root) as tier:
        assert {found.key for found in await first_batches(tier)} == {chunk.key for chunk in CHUNKS}
        assert await fetch(tier, *CHUNKS) == [OK] * N
        assert tier.counters()["bad_index"] == 1
        await store(tier, chunk_of(N))


async def test_an_index_as_long_as_somebody_likes_takes_no_memory(root: Path) -> None:
    """It would be read as a whole."""
    await closed(root)
    os.truncate(only(root, "index"), 1 << 40)
    async with opened(root) as tier:
        assert await fetch(tier, *CHUNKS) == [OK] * N
        assert tier.counters()["bad_index"] == 1
        await store(tier, chunk_of(N))


def test_an_index_of_more_tenants_than_it_can_number() -> None:
    """A close failed of them. Those that are left over are nobody's."""
    n = 70_000
    chunks = [Chunk(ChunkKey(b"%08d" % i), nbytes=1, tenant=f"t{i}") for i in range(n)]
    data = pack_index(["ab" * 8], {}, {}, [IndexEntry("ab" * 8, 2 * PAGE, chunk) for chunk in chunks], bytes(16))
    index = unpack_index(data, bytes(16))
    assert [index.chunk(i) for i in range(60_000)] == chunks[:60_000]
    assert index.chunk(n - 1) == chunks[-1]._replace(tenant="")


@only_slab
@pytest.mark.parametrize("n_key", [0, 116, 300, 0xFFFF])
async def test_a_lost_catalogue_and_a_key_that_cannot_be(root: Path, n_key: int) -> None:
    """The slot's own header says so: one chunk is lost, and the slab is mended."""
    await closed(root)
    only(root, "slots").unlink()
    with only(root, "slab").open("rb+") as slab:
        page = bytearray(slab.read(PAGE))
        fields: list[Any] = list(_fs_format._FIXED.unpack_from(page))
        fields[8] = n_key
        _fs_format._FIXED.pack_into(page, 0, *fields)
        page[_fs_format._SUM_AT :] = _fs_format.PLAIN.of_header(memoryview(page))
        os.pwrite(slab.fileno(), page, 0)
    async with opened(root) as tier:
        assert (await fetch(tier, *CHUNKS)).count(OK) == N - 1
        await store(tier, *CHUNKS)
        assert await fetch(tier, *CHUNKS) == [OK] * N


@only_slab
async def test_a_lost_catalogue_of_a_slab_as_long_as_somebody_likes(root: Path) -> None:
    """The new one is for what can be in it: it had a row for each slot of the hole, beyond any capacity."""
    await closed(root)
    only(root, "slots").unlink()
    os.truncate(only(root, "slab"), 1 << 33)
    async with opened(root) as tier:
        assert recount(root) <= tier.usage()["used_nbytes"] <= capacity_for(20)
        assert await fetch(tier, *CHUNKS) == [OK] * N
        await store(tier, *(chunk_of(i) for i in range(N, 20)))
        assert recount(root) <= capacity_for(20)


@only_slab
async def test_a_catalogue_of_more_slots_than_a_disk_can_have(root: Path) -> None:
    """A head that says so, and a file as long: no memory is taken for its rows, and it is written anew."""
    await closed(root)
    n_buckets = 1 << 31
    head = _fs_catalogue.head_of(CHARGE, n_buckets, bytes.fromhex(only(root, "slots").parent.name))
    with only(root, "slots").open("rb+") as slots:
        slots.write(head)
        slots.truncate(PAGE * (1 + n_buckets))
    async with opened(root) as tier:
        assert await fetch(tier, *CHUNKS) == [OK] * N
        await store(tier, chunk_of(N))
        assert recount(root) <= capacity_for(20)


@only_slab
async def test_a_probe_beyond_the_end_of_a_slab_finds_nothing(root: Path) -> None:
    """The slab was cut: what lay behind is no chunk, not counted, and no obstacle to the close."""
    async with opened(root) as tier:
        await store(tier, *CHUNKS)
        kill(tier)
    os.truncate(only(root, "slab"), 2 * CHARGE)
    go_on = threading.Event()
    async with opened(root, wait=False, _scan_gate=lambda *_: go_on.wait(PATIENCE_S)) as tier:
        found = await tier.probe([chunk.key for chunk in CHUNKS])
        go_on.set()
        await scanned(tier)
        assert [item is not None for item in found].count(True) == 2
        assert tier.usage()["n_chunks"] == 2
        assert recount(root) <= tier.usage()["used_nbytes"]
