"""A20, A21, A35, A36: host memory that nobody leaks, overfills, keeps alive by accident, or takes for his own."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tests.cases.kit import turns_until
from tests.faults import need
from tests.faults.disks import may_mount
from tests.patience import PATIENCE_S
from tests.pool_process import PoolProcess
from tests.toys import NBYTES, STRIDE, ToyChunker, payload, prompt
from tests.unit.test_hierarchy import SLOT, over
from tierkv import Chunk, ChunkKey, ConfigError, CPUTier, Level, TieredCache
from tierkv._ledger import Entry
from tierkv.policies import LRU
from tierkv.tiers._pool import SharedPool
from tierkv.tiers._rendezvous import Purpose, Role, socket_name

MIB = 1 << 20


def _names(shared_id: str) -> list[str]:
    ours = {"@" + socket_name(shared_id, purpose)[1:].decode() for purpose in Purpose}
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if line.split()[-1] in ours]


async def test_a20_a_killed_engine_leaves_no_pool() -> None:
    """A killed engine left its pool in /dev/shm, until the machine could start none.

    https://github.com/vllm-project/vllm/issues/57303

    A scheduler and two workers killed together, after their start and in the middle of it; the next start finds name
    and bytes free, its slots zero, one generation. Twenty times: tests/crash/test_pool_kill.py.
    """
    shared_id = secrets.token_hex(8)
    generations = set()
    for turn in range(3):
        with PoolProcess() as creator, PoolProcess() as worker, PoolProcess() as scheduler:
            processes = (creator, worker, scheduler)
            creator.start("create", shared_id=shared_id, n_slots=16, stride_nbytes=MIB, populate=True)
            worker.start("join", shared_id=shared_id, role="WORKER", rank=1, deadline_s=PATIENCE_S)
            scheduler.start("join", shared_id=shared_id, role="SCHEDULER", rank=0, deadline_s=PATIENCE_S)
            if turn != 1:
                (generation,) = {process.wait() for process in processes}
                assert generation not in generations
                generations.add(generation)
                assert scheduler.ask("peek", slot=5) == [0], "bytes of an earlier engine"
                creator.ask("fill", slot=5, byte=7)
            for process in processes:
                os.kill(process.pid, signal.SIGKILL)
        await turns_until(lambda: not _names(shared_id))


FULL_SHM = (
    'mount -t tmpfs -o size=1m tmpfs /dev/shm && { head -c 2m /dev/zero > /dev/shm/full 2>/dev/null; exec "$@"; }'
)


async def test_a21_a_pool_that_is_too_large_is_refused_with_the_numbers() -> None:
    """A pool bigger than shared memory gave an opaque address fault when its pages were touched.

    https://github.com/vllm-project/vllm/pull/46959

    Of the kind: private and shared; more than the machine has, more than can be addressed; nothing is left, and a pool
    that fits can be made at once. A small and full /dev/shm is no limit: ours lies elsewhere.
    """
    shared_id = secrets.token_hex(8)
    for capacity in ("900TiB", "7EiB"):
        for tier in (CPUTier(name="pool"), CPUTier(name="pool", shared_id=shared_id)):
            with pytest.raises(ConfigError, match=r"pool\.capacity is \d+, but must be at most the \d+ bytes"):
                async with TieredCache(
                    chunker=ToyChunker(), namespace=b"toy", levels=[Level(tier, LRU(), capacity=capacity)]
                ):
                    pass
        assert not _names(shared_id)
    need(may_mount(), "root and the right to mount")
    with PoolProcess("unshare", "-m", "sh", "-c", FULL_SHM, "sh") as process:
        assert process.ask("shm_nbytes") == MIB
        process.ask("create", shared_id=shared_id, n_slots=16, stride_nbytes=MIB, populate=True)
        assert process.ask("populated") == 16 * MIB
        process.ask("fill", slot=15, byte=3)
        assert process.ask("peek", slot=15) == [3]


LEFTOVERS = (
    "mount -t tmpfs -o size=8m tmpfs /dev/shm && for name in $0 vllm_offload_$0.mmap tierkv-$0; "
    'do tr "\\0" x < /dev/zero | head -c 1m > /dev/shm/$name; done; exec "$@"'
)


def _resident_nbytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_a35_small_handles_keep_nothing_big_alive() -> None:
    """Small handles kept big buffers alive: slot numbers were views of the free list.

    https://github.com/sgl-project/sglang/pull/21624

    Fifty thousand chunks through 64 slots with every thousandth handle kept: resident memory stays where it was
    after the first, and so does what Python has allocated. And views that somebody kept from a lease: the pool closes
    under them without "exported pointers exist", and they keep their bytes.
    """
    h = over(64)
    kept: list[Entry] = []

    def churn(first: int, n: int) -> None:
        for i in range(first, first + n):
            (entry,) = h.offer([Chunk(ChunkKey(b"%d" % i), None, 0, 8, SLOT)]).reserved
            h.commit_store([entry])
            if i % 1000 == 0:
                kept.append(entry)
            h.take_events()

    churn(0, 10_000)
    resident_nbytes = _resident_nbytes()
    churn(10_000, 35_000)
    assert _resident_nbytes() < 1.05 * resident_nbytes
    tracemalloc.start()
    try:
        churn(45_000, 1_000)
        allocated_nbytes, _ = tracemalloc.get_traced_memory()
        churn(46_000, 4_000)
        assert tracemalloc.get_traced_memory()[0] < 1.05 * allocated_nbytes + 20 * 1024
    finally:
        tracemalloc.stop()
    assert len(kept) == 50 and all(type(entry.slot) is int for entry in kept)

    levels = [Level(CPUTier(populate=False), LRU(), capacity=8 * STRIDE)]
    async with TieredCache(chunker=ToyChunker(), namespace=b"toy", levels=levels) as cache:
        chunks = cache.chunks(prompt(1))
        await cache.store(prompt(1), [bytearray(payload(chunk)) for chunk in chunks])
        async with cache.lease(await cache.lookup(prompt(1))) as lease:
            view = lease.view(chunks[0])
            array = np.frombuffer(lease.view(chunks[1]), np.uint8)
    with pytest.raises(ValueError, match="released"):
        view[0]
    assert array.tobytes() == payload(chunks[1]) and len(array) == NBYTES
    del array


async def test_a36_replicas_do_not_share_a_pool_by_accident() -> None:
    """Data-parallel replicas derived one pool name, and each wrote its own KV into it.

    https://github.com/vllm-project/vllm/pull/47987

    Of the kind: ids that differ in the replica's index, in their end or in their case; truly the same id from another
    process; a second bearer of a role and rank; another geometry or generation; a large file under any such name in
    /dev/shm, which nobody looks at.
    """
    base = secrets.token_hex(8)
    ids = [f"{base}_dp0", f"{base}_dp1", f"{base}_dp10", f"{base}_DP0", base]
    pools = [SharedPool.create(shared_id, 4, 4096) for shared_id in ids]
    for i, pool in enumerate(pools):
        pool.view(0)[:] = bytes([i + 1]) * 4096
    assert [set(pool.view(0)) for pool in pools] == [{i + 1} for i in range(len(pools))]
    assert len({pool.generation for pool in pools}) == len(pools)
    with PoolProcess() as other:
        with pytest.raises(RuntimeError, match=f"ConfigError: shared_id is '{ids[0]}'.*process {os.getpid()}"):
            other.ask("create", shared_id=ids[0], n_slots=4, stride_nbytes=4096)
        for wrong, told in (
            ({"n_slots": 5}, "n_slots is 4, not 5"),
            ({"stride_nbytes": 8192}, "stride_nbytes is 4096, not 8192"),
            ({"generation": pools[0].generation + 1}, "its generation is"),
            ({"role": "WORKER"}, "worker rank 0 has joined already"),
        ):
            with pytest.raises(RuntimeError, match=told):
                other.ask(
                    "join", shared_id=ids[0], **({"role": "SCHEDULER", "rank": 0, "deadline_s": PATIENCE_S} | wrong)
                )
        generation = other.ask("join", shared_id=ids[0], role="SCHEDULER", rank=0, deadline_s=PATIENCE_S)
        assert generation == pools[0].generation and other.ask("peek", slot=0) == [1]
        with pytest.raises(ConfigError, match="scheduler rank 0 has joined already"):
            SharedPool.join(ids[0], role=Role.SCHEDULER, rank=0)
    for pool in pools:
        pool.close()
    need(may_mount(), "root and the right to mount")
    with PoolProcess("unshare", "-m", "sh", "-c", LEFTOVERS, base) as process:
        process.ask("create", shared_id=base, n_slots=4, stride_nbytes=4096)
        assert [process.ask("peek", slot=slot) for slot in range(4)] == [[0]] * 4, "stale bytes"
