"""Cancelling copies between a device's blocks and the cache: the blocks are the caller's again once the call has ended.

The device is host memory with the real runtime, whose copies run on threads of their own; a port around it lets them
begin late, or only when the test says so.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="a device tier binds tensors of torch")

from tests.patience import PATIENCE_S  # noqa: E402
from tierkv import CPUTier, Level, MoverLimits, Namespace, PrefixChunker, TieredCache  # noqa: E402
from tierkv.device.tier import DeviceTier  # noqa: E402
from tierkv.policies import LRU  # noqa: E402
from tierkv.protocols import HostTier, PortJob  # noqa: E402

PER_BLOCK, PER_CHUNK = 2, 3
"""Tokens of a block, blocks of a chunk."""
N_BLOCKS, N_SLOTS = 48, 7
SHAPE, SHAPE_2 = (N_BLOCKS, 37, 3), (N_BLOCKS, 2, 1024)
BLOCK_NBYTES = 37 * 3 + 2 * 1024
CANARY = 0x5A


class LatePort:
    """A device tier whose copies begin when ``wait`` lets them."""

    def __init__(self, device: DeviceTier) -> None:
        self.device = device
        self.chunk_nbytes = device.chunk_nbytes
        self.submitted = asyncio.Event()
        self.gate: asyncio.Event | None = None
        self.rng: random.Random | None = None

    def attach(self, primary: HostTier, stride_nbytes: int) -> None:
        self.device.attach(primary, stride_nbytes)

    def check(self, jobs: Sequence[PortJob]) -> None:
        self.device.check(jobs)

    async def store_chunks(self, jobs: Sequence[PortJob]) -> Sequence[bool]:
        await self._wait()
        return await self.device.store_chunks(jobs)

    async def load_chunks(self, jobs: Sequence[PortJob]) -> Sequence[bool]:
        await self._wait()
        return await self.device.load_chunks(jobs)

    def close(self) -> None:
        self.device.close()

    async def _wait(self) -> None:
        self.submitted.set()
        if self.gate is not None:
            await self.gate.wait()
        elif self.rng is not None:
            await asyncio.sleep(self.rng.choice((0, 0, 0.001)))


class Device:
    """Two tensors, and what is in which block."""

    def __init__(self) -> None:
        self.tensors = [torch.zeros(SHAPE, dtype=torch.int8), torch.zeros(SHAPE_2, dtype=torch.int8)]
        self.port = LatePort(DeviceTier(self.tensors, blocks_per_chunk=PER_CHUNK))
        self.free = list(range(N_BLOCKS))

    def take(self, n_blocks: int) -> list[int]:
        """Any free blocks, in any order."""
        random.shuffle(self.free)
        return [self.free.pop() for _ in range(n_blocks)]

    def give(self, blocks: Sequence[int]) -> None:
        """Let go of blocks; whoever gets them next writes at once: no copy may still touch them."""
        self.fill(blocks, [bytes([CANARY]) * BLOCK_NBYTES for _ in blocks])
        self.free += blocks

    def fill(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        for block, content in zip(blocks, contents, strict=True):
            at = 0
            for tensor in self.tensors:
                row = tensor[block].view(-1)
                row[:] = torch.frombuffer(bytearray(content[at : at + len(row)]), dtype=torch.int8)
                at += len(row)

    def read(self, block: int) -> bytes:
        return b"".join(tensor[block].contiguous().numpy().tobytes() for tensor in self.tensors)

    def untouched(self) -> bool:
        """Whether every free block that was used holds what its last owner left."""
        clean = {bytes([CANARY]) * BLOCK_NBYTES, bytes(BLOCK_NBYTES)}
        return all(self.read(block) in clean for block in self.free)


def tokens_of(branch: int, n_chunks: int) -> list[int]:
    """The first chunk is shared by all even or all odd branches."""
    per = PER_BLOCK * PER_CHUNK
    return [branch % 2] * per + [branch] * (per * (n_chunks - 1))


def contents(branch: int, n_chunks: int) -> list[bytes]:
    """What belongs into each block of these tokens."""
    tokens = tokens_of(branch, n_chunks)
    ends = range(PER_BLOCK, len(tokens) + 1, PER_BLOCK)
    return [random.Random(hashlib.blake2b(bytes(tokens[:end])).digest()).randbytes(BLOCK_NBYTES) for end in ends]


@asynccontextmanager
async def opened(device: Device) -> AsyncIterator[TieredCache]:
    chunker = PrefixChunker(namespace=Namespace(model="toy"), tokens_per_block=PER_BLOCK, blocks_per_chunk=PER_CHUNK)
    stride = -(-device.port.chunk_nbytes // 4096) * 4096
    levels = [Level(CPUTier(), policy=LRU(), capacity=N_SLOTS * stride)]
    limits = MoverLimits(deadline_s=PATIENCE_S)
    async with TieredCache(chunker=chunker, levels=levels, device=device.port, limits=limits) as cache:
        yield cache


async def store(cache: TieredCache, device: Device, branch: int, n_chunks: int) -> None:
    blocks = device.take(n_chunks * PER_CHUNK)
    device.fill(blocks, contents(branch, n_chunks))
    try:
        await cache.store(tokens_of(branch, n_chunks), blocks)
    finally:
        device.give(blocks)


async def load(cache: TieredCache, device: Device, branch: int, n_chunks: int) -> int:
    blocks = device.take(n_chunks * PER_CHUNK)
    try:
        hit = await cache.lookup(tokens_of(branch, n_chunks))
        n_tokens = await cache.load(hit, blocks)
        arrived = [device.read(block) for block in blocks[: n_tokens // PER_BLOCK]]
        assert arrived == contents(branch, n_chunks)[: len(arrived)]
        return n_tokens
    finally:
        device.give(blocks)


async def storm(seed: int) -> None:
    rng, device = random.Random(seed), Device()
    random.seed(seed)
    device.port.rng = rng
    async with opened(device) as cache:
        tasks: dict[asyncio.Task[Any], int] = {}
        for _ in range(30):
            what, branch, n_chunks = rng.choice((store, store, load)), rng.randrange(5), rng.randrange(1, 4)
            while sum(n for task, n in tasks.items() if not task.done()) > N_BLOCKS - n_chunks * PER_CHUNK:
                await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)
            tasks[asyncio.create_task(what(cache, device, branch, n_chunks))] = n_chunks * PER_CHUNK
            for _ in range(rng.randrange(5)):
                await asyncio.sleep(0)
            if rng.random() < 0.6:
                rng.choice(list(tasks)).cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result
        assert await cache.wait_idle(PATIENCE_S)
        assert len(device.free) == N_BLOCKS
        assert device.untouched()
        (record,) = cache.statistics().values()
        assert record.n_pending == record.n_pinned == record.n_quarantined == 0
        assert record.free_nbytes + record.ready_nbytes == record.capacity_nbytes
        for branch in range(5):
            await load(cache, device, branch, 3)


@pytest.mark.timeout(600)
def test_random_cancellation_and_reuse_at_once() -> None:
    """Tasks cancelled at random, blocks overwritten the moment a call ends: right bytes, clean blocks, no slot lost.

    https://github.com/vllm-project/vllm/issues/46278
    """

    @settings(max_examples=20, deadline=None)
    @given(st.integers(0, 2**32))
    def run(seed: int) -> None:
        asyncio.run(storm(seed))

    run()


@pytest.mark.parametrize("direction", ["store", "load"])
async def test_a_cancelled_copy_ends_before_the_call_does(direction: str) -> None:
    """Cancelled again and again while the copy waits for its turn: the call ends with the copy, and is cancelled."""
    device = Device()
    async with opened(device) as cache:
        await store(cache, device, 1, 2)
        branch = 2 if direction == "store" else 1
        tokens, blocks = tokens_of(branch, 2), device.take(2 * PER_CHUNK)
        if direction == "store":
            device.fill(blocks, contents(branch, 2))
        device.port.gate = asyncio.Event()
        device.port.submitted.clear()
        hit = await cache.lookup(tokens)
        call: asyncio.Future[Any] = asyncio.ensure_future(
            cache.store(tokens, blocks) if direction == "store" else cache.load(hit, blocks)
        )
        await device.port.submitted.wait()
        for _ in range(3):
            call.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not call.done(), "the blocks would be reused under the copy"
        device.port.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        if direction == "load":
            assert [device.read(block) for block in blocks] == contents(branch, 2)
        device.give(blocks)
        assert await load(cache, device, branch, 2) == len(tokens), "what was copied is kept"


async def test_a_cache_closes_under_a_copy_that_runs() -> None:
    """Close waits for the copy; then its blocks are the caller's, and the pool is gone."""
    device = Device()
    async with opened(device) as cache:
        blocks = device.take(PER_CHUNK)
        device.fill(blocks, contents(1, 1))
        device.port.gate = asyncio.Event()
        call = asyncio.create_task(cache.store(tokens_of(1, 1), blocks))
        await device.port.submitted.wait()
        closing = asyncio.create_task(cache.aclose(PATIENCE_S))
        await asyncio.sleep(0)
        assert not closing.done()
        device.port.gate.set()
        await closing
        (outcome,) = await call
        assert outcome.ok
        device.give(blocks)
