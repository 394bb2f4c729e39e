"""A lease that is entered and forgotten: what it held comes back, on the loop, unless somebody still reads it."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading

import pytest

from tests.toys import buffers, cache_of, payload, prompt
from tierkv import Lease, TieredCache


def n_pinned(cache: TieredCache) -> int:
    return cache.statistics()["primary"].n_pinned


def lose(leases: list[Lease], *, elsewhere: bool = False) -> None:
    """Let go of the last reference, here or on another thread."""
    if elsewhere:
        thread = threading.Thread(target=leases.clear)
        thread.start()
        thread.join()
    leases.clear()
    gc.collect()


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_forgotten_lease_gives_its_chunks_back(*, elsewhere: bool) -> None:
    """Collected here or on another thread: one warning, and after the loop's next step nothing is pinned any more."""
    async with cache_of() as cache:
        await cache.store(prompt(1), buffers(cache.chunks(prompt(1))))
        leases = [cache.lease(await cache.lookup(prompt(1)))]
        await leases[0].__aenter__()
        assert n_pinned(cache) == 4
        with pytest.warns(ResourceWarning, match="a lease of 4 chunks was never ended"):
            lose(leases, elsewhere=elsewhere)
        assert n_pinned(cache) == 4, "not in the middle of whatever runs"
        await asyncio.sleep(0)
        assert n_pinned(cache) == 0
        await cache.store(prompt(2, 8), buffers(cache.chunks(prompt(2, 8))))
        assert cache.statistics()["primary"].refused.get("full", 0) == 0


async def test_what_somebody_still_reads_stays_pinned() -> None:
    """Something built on a view outlives the lease: the bytes below it are not given to anybody else."""
    async with cache_of() as cache:
        await cache.store(prompt(1), buffers(cache.chunks(prompt(1))))
        leases = [cache.lease(await cache.lookup(prompt(1)))]
        await leases[0].__aenter__()
        array = pickle.PickleBuffer(leases[0].view(leases[0].chunks[0]))
        with pytest.warns(ResourceWarning):
            lose(leases)
        await asyncio.sleep(0)
        assert n_pinned(cache) == 4
        await cache.store(prompt(2, 8), buffers(cache.chunks(prompt(2, 8))))
        assert array.raw() == payload(cache.chunks(prompt(1))[0])
        array.release()


@pytest.mark.filterwarnings("error")
async def test_a_lease_that_ended_or_never_began_says_nothing() -> None:
    """No warning after ``async with``, without entering, or where there was nothing to hold."""
    async with cache_of() as cache:
        await cache.store(prompt(1), buffers(cache.chunks(prompt(1))))
        hit = await cache.lookup(prompt(1))
        async with cache.lease(hit) as lease:
            assert lease.n_tokens == 8
        cache.lease(hit)
        empty = cache.lease(await cache.lookup(prompt(2)))
        await empty.__aenter__()
        del lease, empty
        gc.collect()
        assert n_pinned(cache) == 0


async def test_a_lease_that_outlives_its_loop_is_no_trouble() -> None:
    """Collected when its event loop is closed: the warning, and no error behind it."""
    lost: list[Lease] = []

    async def use() -> None:
        async with cache_of() as cache:
            await cache.store(prompt(1), buffers(cache.chunks(prompt(1))))
            lost.append(cache.lease(await cache.lookup(prompt(1))))
            await lost[0].__aenter__()

    await asyncio.to_thread(asyncio.run, use())
    with pytest.warns(ResourceWarning):
        lose(lost)
