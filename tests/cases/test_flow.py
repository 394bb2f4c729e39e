"""A6, A7, A10-A12, A28's kin and the batches: reads and writes under way, and who waits for them."""

# ruff: noqa: B023 - functions made in a loop are used up in the same turn

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.cases.kit import (
    LIMITS,
    cache_over,
    fetch,
    file_of,
    forget_primary,
    fs_tier,
    in_virtual_time,
    keep,
    opened,
    settle,
    start,
    store,
    turns_until,
    virtual_time,
)
from tests.faults import Faults, in_child
from tests.fs_kit import is_slab
from tests.patience import PATIENCE_S
from tests.toys import NBYTES, STRIDE, ThreadTier, payload, prompt
from tierkv import MemoryTier, Stop, TieredCache
from tierkv.testing import Does, Fault, FaultTier
from tierkv.types import Found


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096 + 77] ^= 4
    path.write_bytes(data)


def _replace_by_directory(path: Path) -> None:
    path.unlink()
    (path / "x").mkdir(parents=True)


def _zeros(path: Path) -> None:
    path.write_bytes(bytes(len(path.read_bytes())))


DAMAGES: tuple[Callable[[Path], None], ...] = (_cut, Path.unlink, _flip, _zeros, _replace_by_directory)
SLOT_DAMAGES: tuple[Callable[[Path], None], ...] = (_flip, _zeros)


@pytest.mark.usefixtures("layout")
async def test_a06_a_bad_file_is_read_once_and_is_a_miss(tmp_path: Path) -> None:
    """One bad file made a request loop for ever: the verdict "it is there" was never dropped.

    https://github.com/vllm-project/vllm/issues/49176

    Of the kind: a file cut, removed, changed or replaced by a directory after it was found, asked for twenty times;
    the others of its prefix stay, the slot comes back, and the next store serves again.
    """
    for damage in SLOT_DAMAGES if is_slab() else DAMAGES:
        root = tmp_path / damage.__name__.strip("_")
        tier = fs_tier(root)
        async with opened(cache_over(tier)) as cache:
            await keep(cache, prompt(1))
            await forget_primary(cache)
            chunks = cache.chunks(prompt(1))
            path = file_of(root, chunks[2].key)
            assert (await cache.lookup(prompt(1))).n_tokens == 8
            damage(path)
            got = [await fetch(cache, prompt(1)) for _ in range(20)]
            assert got == [2] * 20
            counters = tier.counters()
            assert counters["corrupt"] + counters["vanished"] + counters["not_regular"] == 1
            assert (await cache.lookup(prompt(1))).stop is Stop.MISS
            await settle(cache)
            assert cache.statistics()["primary"].n_chunks == 3, "two and the one behind the bad one"
            if isinstance(path, Path):
                shutil.rmtree(path, ignore_errors=True)  # whose that was tidies up
            await keep(cache, prompt(1))
            await forget_primary(cache)
            assert await fetch(cache, prompt(1)) == 4


class _Shelf(FaultTier):
    """A tier that takes 50 ms a call, and counts reads by key."""

    def __init__(self, inner: MemoryTier) -> None:
        super().__init__(inner, Fault("read", Does.SLOW, delay_s=0.05))
        self.n_reads: dict[bytes, int] = {}

    async def read(self, items):
        for key, _ in items:
            self.n_reads[key] = self.n_reads.get(key, 0) + 1
        return await super().read(items)


async def _fifty_askers() -> None:
    loop = asyncio.get_running_loop()
    limits = LIMITS._replace(batch_nbytes=5 * NBYTES)
    tokens = prompt(1, 100)
    shelf = _Shelf(MemoryTier(name="shelf"))

    async def ask(cache: TieredCache) -> int:
        async with cache.lease(await cache.lookup(tokens)) as lease:
            assert all(bytes(lease.view(chunk)) == payload(chunk) for chunk in lease.chunks[::33])
            return len(lease.chunks)

    async with opened(cache_over(shelf, n_slots=128, n_chunks=128, limits=limits, clock=loop.time)) as cache:
        await keep(cache, tokens)
        took_s = []
        for n_askers in (1, 50):
            await forget_primary(cache)
            shelf.n_reads.clear()
            began_s = loop.time()
            assert await asyncio.gather(*(ask(cache) for _ in range(n_askers))) == [100] * n_askers
            took_s.append(loop.time() - began_s)
            assert set(shelf.n_reads.values()) == {1} and len(shelf.n_reads) == 100
        alone_s, together_s = took_s
        assert alone_s > 0.2, "four batches of five chunks at a time"
        assert together_s <= 1.5 * alone_s

        for does in (Does.RAISE, Does.MISS, Does.HANG):
            await forget_primary(cache)
            shelf.n_reads.clear()
            shelf.gate.close()
            shelf.faults[:] = [Fault("read", does)]
            answers = await asyncio.gather(*(ask(cache) for _ in range(50)))
            assert answers == [0] * 50, "all of them see a miss, and none hangs"
            assert set(shelf.n_reads.values()) == {1}
            shelf.faults[:] = [Fault("read", Does.SLOW)]
            shelf.gate.open()
            await asyncio.sleep(1)  # the breaker's pause
            if does is not Does.MISS:
                assert await ask(cache) == 100, "what failed is not gone"
            else:
                await keep(cache, tokens)


def test_a07_fifty_askers_share_one_read() -> None:
    """Fifty requests with one shared prefix queued behind a single load.

    https://github.com/vllm-project/vllm/issues/44294

    Of the kind: the shared read fails, misses, or hangs past its deadline: all fifty see a miss. Time is the loop's own
    here and passes only while everybody waits. The same through vLLM's manager: tests/cases/test_vllm_flights.py.
    """
    in_virtual_time(_fifty_askers())


async def _cancelled_while_the_disk_hangs(faults: Faults, root: str) -> None:
    tier = fs_tier(root)
    cache = cache_over(tier, n_slots=6)
    async with cache:
        await keep(cache, prompt(1))
        await forget_primary(cache)
        hang = faults.add("read", path=f"{root}/", hang=True)
        asker = start(fetch(cache, prompt(1)))
        await hang.met(waiting=True)
        asker.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asker
        primary = cache.statistics()["primary"]
        assert primary.n_pending == 4, "the threads still have these slots"
        for n in range(10):
            await keep(cache, [50 + n] * 4)
            assert await fetch(cache, [50 + n] * 4) == 2
        hang.let_go()
        await settle(cache)
        hang.remove()
        assert await fetch(cache, [59] * 4) == 2, "nobody wrote into these slots"
        assert await fetch(cache, prompt(1)) == 4

        await forget_primary(cache)
        hang = faults.add("read", path=f"{root}/", hang=True)
        asker = start(fetch(cache, prompt(1)))
        await hang.met(waiting=True)
        asyncio.get_running_loop().call_later(0.5, hang.let_go)  # no close waits for a disk for ever
        async with asyncio.timeout(PATIENCE_S):
            await cache.aclose(0.1)
        await asyncio.gather(asker, return_exceptions=True)
    hang.let_go()


@pytest.mark.usefixtures("layout")
def test_a10_a_slot_is_its_threads_until_the_thread_has_ended(tmp_path: Path) -> None:
    """The awaiting task was cancelled, the I/O thread was not, and went on reading into a buffer that was reused.

    https://github.com/python/cpython/issues/107505

    Real threads in a real system call that hangs: cancelled readers, the pool used by others meanwhile, and a close.
    Also of the kind, elsewhere: random cancellation of everything (tests/cancel), a write whose source is leased on.
    """
    in_child(_cancelled_while_the_disk_hangs, tmp_path / "root", folder=tmp_path)


async def _larger_than_the_primary(n_slots: int, least: int) -> None:
    shelf = ThreadTier()
    tokens = prompt(1, 8)
    async with opened(cache_over(shelf, n_slots=n_slots)) as cache:
        everything = cache.chunks(tokens)
        hierarchy = cache._opened().hierarchy
        await shelf.write([(chunk, memoryview(payload(chunk))) for chunk in everything])
        hierarchy.absorb(1, [Found(chunk.key, STRIDE) for chunk in everything])
        cache._opened().kick()
        for _ in range(3):
            async with cache.lease(await cache.lookup(tokens)) as lease:
                assert len(lease.chunks) >= least
                assert all(bytes(lease.view(chunk)) == payload(chunk) for chunk in lease.chunks)
            assert max(shelf.n_reads.values()) == 1 and sum(shelf.n_reads.values()) <= 8


async def test_a11_promotions_cannot_thrash() -> None:
    """Promotions for queued requests filled the pool and evicted one another; one prefix larger than it never ended.

    https://github.com/vllm-project/vllm/issues/49902

    (a) ten waiting requests of four chunks below and a running one over 16 slots: every store of two chunks is taken,
    and no chunk is read twice without having been used. (b) eight chunks below, six slots: one poll, six reads at
    most, five leading hits at least. Of the kind: both again with write-back, and the small pool asked three times.
    """
    shelf = ThreadTier()
    async with opened(cache_over(shelf, n_slots=16)) as cache:
        for i in range(10):
            await keep(cache, [10 + i] * 8)
            await settle(cache)
        await forget_primary(cache)
        async with AsyncExitStack() as waiting_ones:
            for i in range(10):
                await waiting_ones.enter_async_context(cache.lease(await cache.lookup([10 + i] * 8)))
            assert cache.statistics()["primary"].n_pinned == 14, "as many as may wait, and two slots for a running one"
            assert all(outcome.ok for outcome in await store(cache, [99] * 4))
        await forget_primary(cache)
        shelf.n_reads.clear()
        turn, n_used, used = asyncio.Semaphore(0), dict.fromkeys(range(10), 0), Counter[bytes]()

        async def wait_for_its_turn(i: int) -> None:
            while n_used[i] < 4:
                async with cache.lease(await cache.lookup([10 + i] * 8)) as lease:
                    if not lease.chunks:
                        await asyncio.sleep(0)
                        continue
                    await turn.acquire()
                    used.update(chunk.key for chunk in lease.chunks)
                    n_used[i] = len(lease.chunks)

        waiting = [start(wait_for_its_turn(i)) for i in range(10)]
        for step in range(40):
            assert all(outcome.ok for outcome in await store(cache, [100 + step] * 4)), "a share is kept for stores"
            turn.release()
            await cache.wait_idle(0.01)
        while not all(task.done() for task in waiting):
            turn.release()
            await asyncio.sleep(0.001)
        await asyncio.gather(*waiting)
        assert len(shelf.n_reads) == 40
        assert all(n <= used[key] for key, n in shelf.n_reads.items()), "no read is for nobody"
    for n_slots, least in ((6, 5), (8, 7), (2, 1), (1, 1)):
        await _larger_than_the_primary(n_slots, least)


@virtual_time
async def test_a12_a_slow_tier_pins_no_more_than_its_queue() -> None:
    """One slow tier pinned the whole CPU pool, and the detector that should have tripped saw only successes.

    https://github.com/vllm-project/vllm/issues/50031

    Of the kind: beside a fast tier, one that hangs, one that raises, one that fails each key and one that is full, each
    until it recovers. The fast one gets everything; what is dropped is counted; the breaker trips, and lets traffic
    through again.
    """
    for does in (Does.HANG, Does.RAISE, Does.FAIL):
        good, bad = MemoryTier(name="good"), FaultTier(MemoryTier(name="bad"), Fault("write", does))
        limits = LIMITS._replace(deadline_s=0.2, breaker_cooldown_s=0.2)
        async with opened(cache_over(good, bad, n_chunks=512, queue=2 * STRIDE, limits=limits)) as cache:
            n = 0
            while n < 100 or not cache.statistics()["bad"].refused.get("tier_broken"):
                await keep(cache, [n, n])
                n += 1
                await turns_until(lambda: cache.statistics()["good"].n_stored == n)
                if does is Does.HANG:
                    assert cache.statistics()["primary"].n_pinned <= 2
            record = cache.statistics()["bad"]
            assert record.n_stored == 0 and sum(record.refused.values()) + record.n_pending == n
            assert await fetch(cache, [0, 0]) == 1, "served by the good one"
            bad.faults.clear()
            bad.gate.open()
            while not cache.statistics()["bad"].n_stored:
                await keep(cache, [n, n])
                await asyncio.sleep(0.01)
                n += 1
