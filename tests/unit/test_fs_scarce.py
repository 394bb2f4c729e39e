"""A root on a disk that has next to nothing left: what lies there already is room that it has."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.fs_kit import (
    CHARGE,
    LONGEST,
    _mount,
    capacity_for,
    chunk_of,
    context,
    kill,
    layout,  # noqa: F401
    opened,
    scanned,
    store,
)
from tests.patience import PATIENCE_S
from tests.toys import NBYTES, ToyChunker, buffers, prompt
from tierkv import CPUTier, Level, TieredCache
from tierkv.policies import LRU
from tierkv.tiers._fs.mount import Mount
from tierkv.tiers.fs import FSTier

N_CHUNKS, N_SPARE, CAPACITY_CHUNKS = 12, 2, 40


async def left(root: Path, *, killed: bool) -> None:
    tier = FSTier(root, capacity=capacity_for(CAPACITY_CHUNKS), min_free=0)
    await tier.open(context())
    await scanned(tier)
    await store(tier, *(chunk_of(i) for i in range(N_CHUNKS)))
    if killed:
        kill(tier)
    else:
        await tier.aclose()


@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
async def test_the_share_of_a_root_holds_what_a_scan_has_yet_to_count(
    root: Path, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the scan ran it was what the disk had left: the level above threw away what it was told of, as too much."""
    await left(root, killed=killed)
    gate = threading.Event()
    monkeypatch.setattr(Mount, "spare_nbytes", lambda _: N_SPARE * CHARGE)
    async with opened(root, CAPACITY_CHUNKS, wait=False, _scan_gate=lambda *_: gate.wait(PATIENCE_S)) as tier:
        _mount(tier).beat()
        meanwhile = tier.share_nbytes()
        gate.set()
        await scanned(tier)
        assert meanwhile >= N_CHUNKS * CHARGE
        assert len(_mount(tier).books) == N_CHUNKS
        assert N_CHUNKS * CHARGE <= tier.share_nbytes() <= (N_CHUNKS + N_SPARE) * CHARGE + LONGEST


async def test_a_cache_on_a_full_disk_keeps_what_it_stored(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 300 chunks 258 had left a minute after a restart, on a disk with twice of ``min_free`` free."""

    def cache() -> TieredCache:
        disk = FSTier(root, min_free=0)
        levels = [Level(CPUTier(), LRU(), capacity="1MiB"), Level(disk, LRU(), capacity="16MiB")]
        return TieredCache(chunker=ToyChunker(), namespace=b"toy", chunk_nbytes=NBYTES, levels=levels)

    tokens = [prompt(branch) for branch in range(0, 12, 2)]
    async with cache() as first:
        for each in tokens:
            await first.store(each, buffers(first.chunks(each)))
        assert await first.wait_idle(PATIENCE_S)
        n_chunks = first.statistics()["fs"].n_chunks
    monkeypatch.setattr(Mount, "spare_nbytes", lambda _: 8 * NBYTES)
    async with cache() as again:
        async with again.lease(await again.lookup(tokens[0])) as lease:
            assert len(lease.chunks) == len(again.chunks(tokens[0]))
        disk = again._levels[1].tier
        assert isinstance(disk, FSTier)
        await scanned(disk)
        assert await again._opened().until(lambda: again.statistics()["fs"].n_chunks == n_chunks, PATIENCE_S)
        _mount(disk).beat()
        again._opened().hierarchy.refresh()
        assert again.statistics()["fs"].n_chunks == n_chunks and not again.statistics()["fs"].n_evicted
