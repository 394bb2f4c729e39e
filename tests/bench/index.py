"""What an index of many chunks costs: memory, the open of a large root, lookups meanwhile, and the import itself.

``python -m tests.bench.index DIRECTORY [CHUNKS...]`` prints the table. A large root is made of sparse files with the
names that the tier gives, or of one sparse slab with a row for each slot: a scan reads names, sizes and rows only. It
is opened twice: after a kill, when the tree is scanned or the catalogue read, and with the index that the close after
that wrote. The kernel still knows the directories, as it does when a server is restarted; a machine that was off reads
them from the disk first.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from tests.bench.pairs import N_PAIRS, Row, seconds, table
from tests.fs_kit import CHARGE, NAMESPACE, chunk_of, context, kill, store
from tierkv._hierarchy import Hierarchy
from tierkv._level import LevelPlan
from tierkv.policies import LRU
from tierkv.tiers._fs.books import Books
from tierkv.tiers._fs.catalogue import SLAB, slab_name
from tierkv.tiers._fs.file_io import Tally
from tierkv.tiers._fs.format import HEADER_NBYTES, LEAVES, PAGE_NBYTES, file_name, leaf_of, namespace_digest
from tierkv.tiers._fs.slab_files import SlabFiles
from tierkv.tiers.fs import FSTier
from tierkv.types import Chunk, ChunkKey

SIZES = (100_000, 1_000_000)
Layout = Literal["files", "slab"]
LAYOUTS: tuple[Layout, ...] = ("files", "slab")
REAL = 0
"""The number of the one chunk that is really there."""


def bytes_per_chunk(n_chunks: int = 100_000) -> Iterator[Row]:
    """By tracemalloc, with 32-byte keys in chains of 500, key objects included."""
    keys = [ChunkKey(i.to_bytes(32, "big")) for i in range(n_chunks)]
    chains = [keys[at : at + 500] for at in range(0, n_chunks, 500)]
    del keys
    tracemalloc.start()
    try:
        level = Hierarchy(
            [LevelPlan("primary", n_chunks * PAGE_NBYTES, LRU(), n_slots=n_chunks, slot_nbytes=PAGE_NBYTES)]
        )
        before = tracemalloc.get_traced_memory()[0]
        for chain in chains:
            parents = [None, *chain[:-1]]
            level.commit_store(
                level.offer([Chunk(k, p, nbytes=100) for k, p in zip(chain, parents, strict=True)]).reserved
            )
            level.take_events()
        ledger = tracemalloc.get_traced_memory()[0] - before
        books = Books()
        before = tracemalloc.get_traced_memory()[0]
        books.limit_nbytes = n_chunks * CHARGE
        for key in (key for chain in chains for key in chain):
            assert books.start_write(CHARGE)
            books.end_write(key, 0, "0" * 16, CHARGE)
        on_root = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    key_nbytes = sys.getsizeof(chains[0][0])
    note = f"the key itself, {key_nbytes} bytes, is shared by all of them and counted once"
    total = (ledger + on_root) / n_chunks + key_nbytes
    yield _figure("index of a chunk in memory, LRU and the root's books", "bytes", total, 250, note)
    yield _figure("of these the level with its order", "bytes", ledger / n_chunks)
    yield _figure("of these the root's books", "bytes", on_root / n_chunks, note="52 of them where an index was loaded")


def import_time(n: int = N_PAIRS) -> Row:
    """``import tierkv`` in a fresh process, beside one that imports nothing."""

    def run(code: str) -> float:
        return seconds(lambda: subprocess.run([sys.executable, "-c", code], check=True))

    spent = [(run("import tierkv") - run("pass")) * 1e3 for _ in range(n)]
    return Row("index", "import tierkv, beyond an empty process", "ms", spent, higher_is_better=False)


def opens(folder: Path, n_chunks: int, layout: Layout = "files") -> Iterator[Row]:
    with tempfile.TemporaryDirectory(dir=folder) as made:
        yield from asyncio.run(_opens(Path(made) / "root", n_chunks, layout))


async def _opens(root: Path, n_chunks: int, layout: Layout) -> list[Row]:
    await made(root, n_chunks, layout)
    root_of = f"root of {n_chunks:,} chunks{' in a slab' * (layout == 'slab')}"
    killed = await opened(root, n_chunks, layout)
    clean = await opened(root, n_chunks, layout)
    rate, n_asked = n_chunks / killed["scanned_s"], killed["n_asked"]
    return [
        _figure(f"{root_of}, after a kill: open returns", "s", killed["opened_s"]),
        _figure(f"{root_of}, after a kill: first lookup answered", "s", killed["answered_s"], 5),
        _figure(f"{root_of}, after a kill: longest of {n_asked:.0f} lookups meanwhile", "s", killed["longest_s"]),
        Row("index", f"{root_of}, after a kill: scanned", "chunks/s", [rate], must=15_000),
        _figure(f"{root_of}, clean: first lookup answered", "s", clean["answered_s"], 5),
        _figure(f"{root_of}, clean: index loaded", "s", clean["scanned_s"], 5),
    ]


async def made(root: Path, n_chunks: int, layout: Layout) -> None:
    """A root as a killed process leaves it: one chunk that is one, and names."""
    tier = _tier(root, n_chunks, layout)
    await tier.open(context())
    while not tier.writable:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await store(tier, chunk_of(REAL))
    assert tier._mount is not None
    owner = tier._mount._ownership.id
    kill(tier)
    others = (ChunkKey(i.to_bytes(4, "little") + bytes(28)) for i in range(1, n_chunks))
    (_in_slab if layout == "slab" else _in_files)(root / namespace_digest(NAMESPACE).hex(), owner, others)


def _in_files(place: Path, owner: str, keys: Iterable[ChunkKey]) -> None:
    for leaf in LEAVES:
        (place / leaf).mkdir(mode=0o700, exist_ok=True)
    nbytes = HEADER_NBYTES + PAGE_NBYTES
    for key in keys:
        fd = os.open(place / leaf_of(key) / file_name(key, owner), os.O_CREAT | os.O_WRONLY, 0o600)
        os.truncate(fd, nbytes)
        os.close(fd)


def _in_slab(place: Path, owner: str, keys: Iterable[ChunkKey]) -> None:
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        files = SlabFiles(fd, namespace_digest(NAMESPACE), direct=False, durable=False, tally=Tally())
        slab = files.open(owner, CHARGE)
        real = slab.catalogue.find(chunk_of(REAL).key)
        assert real is not None and real.slot == 0
        rows = [(real.key, 0, real.used_s), *((key, slot, real.used_s) for slot, key in enumerate(keys, 1))]
        os.truncate(place / slab_name(owner, CHARGE, SLAB), len(rows) * CHARGE)
        files._write_catalogue(owner, CHARGE, slab.catalogue.n_slots, rows)
    finally:
        os.close(fd)


async def opened(root: Path, n_chunks: int, layout: Layout) -> dict[str, float]:
    """Open, look up the real chunk until all is known, take what is announced, close cleanly."""
    tier, began = _tier(root, n_chunks, layout), time.perf_counter()
    await tier.open(context())
    told = {"opened_s": time.perf_counter() - began}
    (found,) = await tier.probe([chunk_of(REAL).key])
    told["answered_s"] = time.perf_counter() - began
    assert found is not None, "the chunk was lost"
    asked = [0.0]
    while not tier.writable:
        at = time.perf_counter()
        await tier.probe([ChunkKey(os.urandom(32)), chunk_of(REAL).key])
        asked.append(time.perf_counter() - at)
        await asyncio.sleep(0.01)
    told |= {"scanned_s": time.perf_counter() - began, "longest_s": max(asked), "n_asked": len(asked) - 1}
    order = {chunk_of(REAL).key: chunk_of(REAL)}  # found by the lookup, so the scan does not announce it
    if len(order) < n_chunks:
        async for batch in tier.scan():
            order |= {item.key: item.chunk or Chunk(item.key, nbytes=PAGE_NBYTES) for item in batch}
            if len(order) >= n_chunks:
                break
    await tier.save_order(list(order.values()))
    await tier.aclose()
    return told


def _tier(root: Path, n_chunks: int, layout: Layout) -> FSTier:
    return FSTier(root, capacity=2 * n_chunks * CHARGE + (256 << 20), min_free=0, layout=layout)


def _figure(what: str, unit: str, value: float, must: float | None = None, note: str = "") -> Row:
    return Row("index", what, unit, [value], higher_is_better=False, must=must, note=note)


def run(folder: Path, sizes: Sequence[int] = SIZES) -> Iterator[Row]:
    yield from bytes_per_chunk()
    yield import_time()
    for n_chunks in sizes:
        for layout in LAYOUTS:
            yield from opens(folder, n_chunks, layout)


if __name__ == "__main__":
    for row in run(Path(sys.argv[1]), [int(n) for n in sys.argv[2:]] or SIZES):
        print(table([row]), flush=True)
