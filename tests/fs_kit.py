"""What the fs tier's tests share: aligned slots, bytes that follow from a key, a recount from outside, a kill."""

from __future__ import annotations

import asyncio
import mmap
import os
import stat
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tierkv.protocols import TierContext
from tierkv.tiers._fs_format import charge_nbytes, file_name, leaf_of, namespace_digest
from tierkv.tiers.fs import FSTier
from tierkv.types import Chunk, ChunkKey, Found, Outcome, Status

PAGE = 4096
LONGEST = 3 * PAGE - 100
STRIDE = 3 * PAGE
CHARGE = charge_nbytes(LONGEST)
NAMESPACE = b"a namespace"
OVERHEAD = 3 * PAGE
"""Lock file and index room of a tier with few chunks."""


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


def capacity_for(n_chunks: int) -> int:
    """A capacity that holds exactly so many of the longest chunks (few enough for a one-page index)."""
    return OVERHEAD + n_chunks * CHARGE


async def scanned(tier: FSTier) -> FSTier:
    """Wait for the scans that are under way."""
    await asyncio.to_thread(_mount(tier)._scan_lane.wait_idle, 30)
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
    mount._seat.abandon()
    os.close(mount._namespace_fd)
    os.close(mount._root_fd)
    tier._mount = None
    tier._closing = tier._opening  # type: ignore[assignment]  # a done future: closing has nothing left to do


def path_of(root: Path | str, key: ChunkKey, tier: FSTier, namespace: bytes = NAMESPACE) -> Path:
    return Path(root, namespace_digest(namespace).hex(), leaf_of(key), file_name(key, _mount(tier)._seat.id))


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
    return -(-found.st_size // PAGE) * PAGE if stat.S_ISREG(found.st_mode) else 0


def _mount(tier: FSTier) -> Any:
    assert tier._mount is not None
    return tier._mount
