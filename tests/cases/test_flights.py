"""One member of a batch of eight fails at each stage in turn, and the other seven are served."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases.kit import (
    cache_over,
    chunk_files,
    fetch,
    forget_primary,
    fs_tier,
    keep,
    opened,
    place_of,
    settle,
    start,
    store,
)
from tests.faults import Faults, in_child
from tests.fs_kit import is_slab
from tests.toys import prompt
from tierkv import Chunk, Reason, TieredCache
from tierkv.policies import LRU

pytestmark = pytest.mark.usefixtures("layout")
TOKENS = prompt(1, 8)


class _AllBut:
    """Admits every chunk but one, once."""

    def __init__(self) -> None:
        self.refuses: bytes | None = None

    def admits(self, chunk: Chunk) -> bool:
        refused = chunk.key == self.refuses
        if refused:
            self.refuses = None
        return not refused


def _cache(root: str, admission: _AllBut) -> TieredCache:
    cache = cache_over(fs_tier(root, n_read_threads=1, n_write_threads=1), n_slots=12)
    cache._levels = (cache._levels[0]._replace(admission=admission), *cache._levels[1:])
    assert isinstance(cache._levels[0].policy, LRU)
    return cache


async def _read(cache: TieredCache, faults: Faults, root: str, bad: bytes) -> None:
    rule = faults.add("read", error=errno.EIO, **place_of(root, bad))
    assert await fetch(cache, TOKENS) == 3
    rule.remove()
    assert bad.hex() in chunk_files(root), "an error is no verdict over the file"


async def _verify(cache: TieredCache, faults: Faults, root: str, bad: bytes) -> None:
    rule = faults.add("read", flip=True, **place_of(root, bad))
    assert await fetch(cache, TOKENS) == 3
    rule.remove()
    assert bad.hex() not in chunk_files(root)


async def _commit(cache: TieredCache, faults: Faults, root: str, bad: bytes) -> None:
    rule = faults.add("read", hang=True, **place_of(root, bad))
    asker = start(fetch(cache, TOKENS))
    await rule.met(waiting=True)
    await cache.delete([chunk for chunk in cache.chunks(TOKENS) if chunk.key == bad])
    rule.let_go()
    assert await asker == 3, "forgotten while it was read: the bytes that come are nobody's"
    rule.remove()


async def _reserve(cache: TieredCache, faults: Faults, root: str, bad: bytes) -> None:
    # What takes it away: its name, or its row.
    rule = faults.add("write", path=".slots") if is_slab() else faults.add("unlink", path=f"/{bad.hex()}")
    await cache.delete([chunk for chunk in cache.chunks(TOKENS) if chunk.key == bad])
    await settle(cache)
    assert rule.n_struck == 1
    rule.remove()
    assert await fetch(cache, TOKENS) == 3, "it cannot be reserved: nobody has it"


async def _each_stage_of_a_promotion(faults: Faults, root: str) -> None:
    async with opened(_cache(root, _AllBut())) as cache:
        bad = cache.chunks(TOKENS)[3].key
        stages: list[Callable[..., Any]] = [_reserve, _read, _verify, _commit]
        for stage in stages:
            await keep(cache, TOKENS)
            await forget_primary(cache)
            assert len(chunk_files(root)) == 8
            await stage(cache, faults, root, bad)
            await settle(cache)
            n_behind = 0 if stage is _reserve else 4
            assert cache.statistics()["primary"].n_chunks == 3 + n_behind
            await keep(cache, TOKENS[:8])  # the bad one is computed and stored again
            reads = faults.add("read", path=".slab" if is_slab() else f"{root}/")
            assert await fetch(cache, TOKENS) == 8
            n_calls = min(1, 4 - n_behind) if is_slab() else 4 - n_behind
            assert reads.n_seen == n_calls, "what had come is not read again"
            reads.remove()
            await cache.reset()
            await settle(cache)


async def _each_stage_of_a_store(faults: Faults, root: str) -> None:
    admission = _AllBut()
    async with opened(_cache(root, admission)) as cache:
        bad = cache.chunks(TOKENS)[3].key
        for call in ("reserve", "device", *(("row",) if is_slab() else ("open", "write", "rename"))):
            rule = None
            port, real = cache._port, cache._port.store_chunks

            async def fails_for_one(jobs: Any) -> Any:
                arrived = list(await real(jobs))  # noqa: B023 - used in this turn
                return [ok and job.chunk.key != bad for ok, job in zip(arrived, jobs, strict=True)]

            if call == "reserve":
                admission.refuses = bad
            elif call == "device":
                port.store_chunks = fails_for_one
            elif call == "row":  # eight neighbours are one write: it fails for all or none; then each gets its row
                rule = faults.add("write", path=".slots", error=errno.EIO, first=4, count=1)
            else:
                rule = faults.add(call, path=f"/{bad.hex()}", error=errno.EIO)
            outcomes = await store(cache, TOKENS)
            port.store_chunks = real
            in_memory = call not in ("reserve", "device")
            assert [outcome.ok for outcome in outcomes] == [True] * 3 + [in_memory] + [True] * 4
            assert in_memory or outcomes[3].reason in (Reason.NOT_ADMITTED, Reason.DEVICE_ERROR)
            await settle(cache)
            assert len(chunk_files(root)) == 7 and bad.hex() not in chunk_files(root)
            if rule is not None:
                assert rule.n_struck >= 1
                rule.remove()
            await forget_primary(cache)
            assert await fetch(cache, TOKENS) == 3
            await keep(cache, TOKENS[:8])
            await settle(cache)
            assert await fetch(cache, TOKENS) == 8, "the seven are served as soon as the hole is filled"
            await cache.reset()
            await settle(cache)


def test_one_of_eight_fails_on_its_way_up(tmp_path: Path) -> None:
    """Not there to be reserved, unreadable, wrong, or forgotten before its commit: seven of eight are served.

    https://github.com/vllm-project/vllm/pull/50321
    """
    in_child(_each_stage_of_a_promotion, tmp_path / "root", folder=tmp_path)


def test_one_of_eight_fails_on_its_way_down(tmp_path: Path) -> None:
    """Not admitted, not copied from the device, not opened, written or named on the disk: seven of eight are kept.

    In a slab: without a row.
    """
    in_child(_each_stage_of_a_store, tmp_path / "root", folder=tmp_path)
