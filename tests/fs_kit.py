"""What the fs tier's tests share: aligned slots, bytes that follow from a key, a recount from outside, a kill."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import stat
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tierkv.protocols import TierContext
from tierkv.tiers._fs.catalogue import SLAB, Catalogue, catalogue_nbytes, parse_slab_name, slab_name
from tierkv.tiers._fs.format import charge_nbytes, file_name, leaf_of, namespace_digest
from tierkv.tiers.fs import FSTier
from tierkv.types import Chunk, ChunkKey, Found, Outcome, Status

PAGE = 4096
LONGEST = 3 * PAGE - 100
STRIDE = 3 * PAGE
CHARGE = charge_nbytes(LONGEST)
NAMESPACE = b"a namespace"
OVERHEAD = 3 * PAGE
"""Lock file and index room of a tier with few chunks."""


LAYOUTS = ("files", "slab")


@pytest.fixture(params=LAYOUTS, autouse=True)
def layout(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every tier of a test module that imports this writes in one layout, then in the other."""
    with using(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def in_files() -> Iterator[None]:
    """For a module that is about chunk files as files, from its first test to its last."""
    with using("files"):
        yield


only_files = pytest.mark.parametrize("layout", ["files"], indirect=True)
"""For what is about one file a chunk."""
only_slab = pytest.mark.parametrize("layout", ["slab"], indirect=True)


_CHILDS = "TIERKV_TESTS_LAYOUT"


@contextmanager
def using(layout: str) -> Iterator[None]:
    """Tiers that are not told otherwise write in this layout, also those of children that import this module."""
    defaults = FSTier.__init__.__kwdefaults__
    assert defaults is not None
    before, childs = defaults["layout"], os.environ.get(_CHILDS)
    defaults["layout"] = os.environ[_CHILDS] = layout
    try:
        yield
    finally:
        defaults["layout"] = before
        del os.environ[_CHILDS]
        os.environ |= {} if childs is None else {_CHILDS: childs}


if _CHILDS in os.environ:
    FSTier.__init__.__kwdefaults__["layout"] = os.environ[_CHILDS]  # type: ignore[index]


def is_slab() -> bool:
    defaults = FSTier.__init__.__kwdefaults__
    return defaults is not None and defaults["layout"] != "files"


def charge_of(nbytes: int) -> int:
    """What a chunk occupies in a tier opened with ``context()``: a slab has slots of one length."""
    return CHARGE if is_slab() else charge_nbytes(nbytes)


def key_of(i: int) -> ChunkKey:
    return ChunkKey(b"key %d" % i + bytes(28))


def chunk_of(i: int, nbytes: int = LONGEST, **fields: Any) -> Chunk:
    return Chunk(key_of(i), nbytes=nbytes, **fields)


def payload_of(key: bytes, nbytes: int) -> bytes:
    """Never zero, so that padding and payload cannot be confused."""
    seed = bytes((b % 251) + 1 for b in key)
    return (seed * (nbytes // len(seed) + 1))[:nbytes]


def slots(n: int, stride: int = STRIDE, fill: int = 0xEE) -> list[memoryview]:
    """Aligned, writable, full of a canary."""
    memory = memoryview(mmap.mmap(-1, n * stride))
    memory[:] = bytes([fill]) * len(memory)
    return [memory[i * stride : (i + 1) * stride] for i in range(n)]


def context(
    capacity_nbytes: int = 0, namespace: bytes = NAMESPACE, longest: int = LONGEST, stride: int = STRIDE
) -> TierContext:
    return TierContext(longest, stride, namespace, capacity_nbytes)


def capacity_for(n_chunks: int, charge: int = CHARGE) -> int:
    """A capacity that holds exactly so many of the longest chunks (few enough for a one-page index)."""
    nbytes = OVERHEAD + n_chunks * charge
    if not is_slab():
        return nbytes
    while True:
        spare = nbytes - OVERHEAD - catalogue_nbytes(nbytes // charge) - n_chunks * charge
        if spare >= 0:
            return nbytes
        nbytes -= spare


async def scanned(tier: FSTier) -> FSTier:
    """Wait for the scans that are under way."""
    await asyncio.to_thread(_mount(tier)._scan_lane.wait_idle, PATIENCE_S)
    return tier


@asynccontextmanager
async def opened(
    root: Path | str, n_chunks: int = 20, *, ctx: TierContext | None = None, wait: bool = True, **settings: Any
) -> AsyncIterator[FSTier]:
    settings.setdefault("capacity", capacity_for(n_chunks))
    settings.setdefault("min_free", 0)
    tier = FSTier(root, **settings)
    await tier.open(ctx or context())
    try:
        yield await scanned(tier) if wait else tier
    finally:
        await tier.aclose()


async def write(tier: FSTier, *chunks: Chunk) -> Sequence[Outcome]:
    """From slots whose bytes behind the payload are a canary."""
    items = []
    for chunk, slot in zip(chunks, slots(len(chunks)), strict=True):
        slot[: chunk.nbytes] = payload_of(chunk.key, chunk.nbytes)
        items.append((chunk, slot))
    return await tier.write(items)


async def store(tier: FSTier, *chunks: Chunk) -> None:
    outcomes = await write(tier, *chunks)
    assert all(outcome.ok for outcome in outcomes), outcomes


async def read(tier: FSTier, *keys: ChunkKey) -> tuple[list[Status], list[memoryview]]:
    views = slots(len(keys))
    outcomes = await tier.read(list(zip(keys, views, strict=True)))
    assert [outcome.key for outcome in outcomes] == list(keys)
    return [outcome.status for outcome in outcomes], views


async def fetch(tier: FSTier, *chunks: Chunk) -> list[Status]:
    """Read and check every byte of what came back OK, padding included."""
    statuses, views = await read(tier, *(chunk.key for chunk in chunks))
    for chunk, status, view in zip(chunks, statuses, views, strict=True):
        if status is Status.OK:
            assert view == payload_of(chunk.key, chunk.nbytes) + bytes(len(view) - chunk.nbytes)
    return statuses


async def first_batches(tier: FSTier) -> list[Found]:
    """What the start-up scan announces."""
    await scanned(tier)
    found: list[Found] = []
    feed = _mount(tier).feed
    while feed._batches:
        found += await feed.take() or []
    return found


def kill(tier: FSTier) -> None:
    """End a tier as SIGKILL ends its process: no index, no last word, locks gone. Its threads are let go of, too."""
    mount = _mount(tier)
    mount.stop()
    mount._keeper.join()
    for lane in (tier._read_lane, tier._write_lane, tier._probe_lane, mount._scan_lane):
        lane.wait_idle()
        lane.close()
    mount._ownership.abandon()
    mount._slabs.close()
    os.close(mount._namespace_fd)
    os.close(mount._root_fd)
    tier._mount = None
    tier._closing = tier._opening  # type: ignore[assignment]  # a done future: closing has nothing left to do


class SlotPath:
    """A chunk in a slab, as far as a path can do with it: its bytes lie in its slot, its name is its row."""

    def __init__(self, slab: Path, slot: int, slot_nbytes: int) -> None:
        self.slab = slab
        self.slot = slot
        self._at, self._nbytes = slot * slot_nbytes, slot_nbytes

    @property
    def span(self) -> tuple[int, int]:
        """The bytes of the slab that are its."""
        return self._at, self._at + self._nbytes

    def unlink(self) -> None:
        """Somebody clears its row."""
        catalogue = self.slab.with_suffix(".slots")
        with catalogue.open("rb+") as file:
            rows = Catalogue(file.fileno(), self._nbytes, bytes.fromhex(catalogue.parent.name))
            for row in [row for piece in rows.rows(tidy=False) for row in piece if row.slot == self.slot]:
                rows.clear(row.line)

    def exists(self) -> bool:
        return any(path.slab == self.slab and path.slot == self.slot for _, path in rows_under(self.slab.parent))

    def read_bytes(self) -> bytes:
        with self.slab.open("rb") as file:
            return os.pread(file.fileno(), self._nbytes, self._at)

    def write_bytes(self, data: bytes) -> None:
        with self.slab.open("rb+") as file:
            os.pwrite(file.fileno(), data[: self._nbytes], self._at)


def slot_of(root: Path, key: ChunkKey) -> SlotPath | None:
    """Where a key lies in slabs, by their catalogues; None if nowhere."""
    for path in root.rglob("*.slots"):
        with path.open("rb") as file:
            name = parse_slab_name(path.name)
            assert name is not None
            row = Catalogue(file.fileno(), name.slot_nbytes, bytes.fromhex(path.parent.name)).find(key)
            if row is not None:
                return SlotPath(path.with_suffix(".slab"), row.slot, name.slot_nbytes)
    return None


def set_time(root: Path | str, key: ChunkKey, tier: FSTier, when_s: float, namespace: bytes = NAMESPACE) -> None:
    """When the chunk was last used, as its file or its row says."""
    if not is_slab():
        os.utime(path_of(root, key, tier, namespace), (when_s, when_s))
        return
    held = _mount(tier).books.get(key)
    slab = _mount(tier)._slabs.at(_mount(tier)._ownership.ids[held.number], held.nbytes)
    slab.catalogue.put_at(slab._lines[held.at], key, held.at, when_s)


def unfinished_of(root: Path, key: ChunkKey, tier: FSTier) -> Path:
    """Where the tier's process would leave something unfinished for this key."""
    path = path_of(root, key, tier)
    return path.slab.with_name(path.slab.name + ".part") if is_slab() else path.with_name(path.name + ".part")


def n_on_disk(root: Path) -> int:
    """Chunks as the disk says: files, or rows of catalogues."""
    return n_rows(root) if is_slab() else n_files(root)


def n_files(root: Path) -> int:
    """Chunk files, whole or not."""
    ours = ("owner", "tierkv")
    return sum(not path.name.startswith(ours) for path in files_under(root) if parse_slab_name(path.name) is None)


def n_rows(root: Path) -> int:
    """Chunks in slabs."""
    return sum(1 for _ in rows_under(root))


def rows_under(root: Path | str) -> Iterator[tuple[ChunkKey, SlotPath]]:
    """Every row of every slab, and what it stands for."""
    for path in sorted(Path(root).rglob("*.slots")):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            slab = parse_slab_name(path.name)
            assert slab is not None
            catalogue = Catalogue(file.fileno(), slab.slot_nbytes, bytes.fromhex(path.parent.name))
            for row in (row for rows in catalogue.rows(tidy=False) for row in rows):
                yield row.key, SlotPath(path.with_suffix(".slab"), row.slot, slab.slot_nbytes)


def chunk_bytes(root: Path, tier: FSTier) -> int:
    """What chunks occupy, as the disk says: chunk files, or the blocks of slabs less their idle slots."""
    if not is_slab():
        in_root = sum(_size(str(path)) for path in root.iterdir() if path.is_file())
        return recount(root) - in_root
    slabs = sum(_size(str(path)) for path in root.rglob("*.slab"))
    return slabs - int(_mount(tier).books.idle_nbytes)


def chunks_and_fixed(tier: FSTier) -> int:
    """What is used, without the slots of a slab that have no chunk."""
    return int(tier.usage()["used_nbytes"] - _mount(tier).books.idle_nbytes)


def path_of(root: Path | str, key: ChunkKey, tier: FSTier, namespace: bytes = NAMESPACE) -> Any:
    """Of the chunk's file; in a slab what comes closest."""
    if is_slab():
        held = _mount(tier).books.get(key)
        owner = _mount(tier)._ownership.ids[held.number]
        folder = Path(root, namespace_digest(namespace).hex())
        return SlotPath(folder / slab_name(owner, held.nbytes, SLAB), held.at, held.nbytes)
    return Path(root, namespace_digest(namespace).hex(), leaf_of(key), file_name(key, _mount(tier)._ownership.id))


def flip(path: Path | SlotPath, at: int) -> None:
    """One bit of a chunk, as it lies there."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(bytes(data))


def files_under(root: Path | str) -> list[Path]:
    """Everything but directories, links not followed."""
    return sorted(p for p in Path(root).rglob("*") if not stat.S_ISDIR(p.lstat().st_mode))


def recount(root: Path | str) -> int:
    """Bytes of all regular files, each rounded up to 4 KiB, as an outsider sees them.

    Files come and go while we walk: only those count that are still there after the walk, so that all of them were
    there together at its end.
    """
    paths = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
    sizes = {path: _size(path) for path in paths}
    return sum(min(size, _size(path)) for path, size in sizes.items())


def _size(path: str) -> int:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return 0
    nbytes = found.st_size
    slab = parse_slab_name(os.path.basename(path))
    if slab is not None and slab.slot_nbytes and slab.kind == SLAB:  # without slots a file system is tried
        # Holes occupy nothing, and what the file system needs to remember them is less than a slot.
        nbytes = min(nbytes, found.st_blocks * 512) // slab.slot_nbytes * slab.slot_nbytes
    return -(-nbytes // PAGE) * PAGE if stat.S_ISREG(found.st_mode) else 0


def charged(tier: FSTier) -> int:
    """What the books count, which is never less than what lies on the disk."""
    return tier.usage()["used_nbytes"]


def without_keeper(tier: FSTier) -> None:
    """Nobody looks after the root but the test."""
    _mount(tier)._stop.set()
    _mount(tier)._keeper.join()


def _mount(tier: FSTier) -> Any:
    assert tier._mount is not None
    return tier._mount
