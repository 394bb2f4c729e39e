"""A server's paged KV tensors bound to primary slots, for :class:`~tierkv.TieredCache`. Needs torch and numpy."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from tierkv.device.engine import CopyDone, CopyJob, CopyRuntime, open_runtime
from tierkv.device.layout import DeviceLayout, GroupCopy, PageRef
from tierkv.device.runtime import Direction
from tierkv.errors import ChunkSizeError, ClosedError, ConfigError, TierError
from tierkv.protocols import HostTier, PortJob
from tierkv.settings import parse_count


@runtime_checkable
class SlotBuffer(Protocol):
    """A primary whose slots lie in one piece, ``stride_nbytes`` apart."""

    @property
    def buffer(self) -> memoryview: ...


class DeviceTier:
    """Copies between blocks of KV tensors and host slots: pass it as ``TieredCache(device=...)``.

    Args:
        kv_tensors: one a layer (or separate K and V), each with the block as its first dimension and contiguous from
            there: ``[n_blocks, ...]``. Only tensors in host memory so far.
        blocks_per_chunk: blocks that make up a chunk; the chunker's.

    ``TieredCache.store`` and ``load`` then take the block ids of the prefix, one a block. Blocks and slots are the
    caller's again once those return, also if they were cancelled.

    Raises:
        TierError: a tensor cannot be seen as pages without a copy; says which, with shape and strides.
    """

    def __init__(self, kv_tensors: Sequence[torch.Tensor], *, blocks_per_chunk: int) -> None:
        parse_count("blocks_per_chunk", blocks_per_chunk, 1, 1 << 20)
        self._pages = [_pages(tensor, index) for index, tensor in enumerate(kv_tensors)]
        if not self._pages:
            raise TierError("device", "no KV tensors were given")
        self.n_blocks = min(len(pages) for pages in self._pages)
        page_nbytes = [pages.shape[1] for pages in self._pages]
        self.blocks_per_chunk = blocks_per_chunk
        self.chunk_nbytes = sum(page_nbytes) * blocks_per_chunk
        self._page_nbytes = page_nbytes
        self._layout: DeviceLayout | None = None
        self._runtime: CopyRuntime | None = None
        self._ids = itertools.count(1)
        self._waiting: dict[tuple[Direction, int], tuple[asyncio.AbstractEventLoop, asyncio.Future[bool]]] = {}

    def attach(self, primary: HostTier, stride_nbytes: int) -> None:
        """Bind to the slots of an open primary. Raises ConfigError if they do not lie in one piece."""
        if not isinstance(primary, SlotBuffer):
            raise ConfigError(
                f"device is given, so the primary's slots must lie in one piece, but {primary.name} is a "
                f"{type(primary).__name__}; nearest valid value: CPUTier"
            )
        self._layout = DeviceLayout.direct(
            self._page_nbytes,
            [[PageRef(index, nbytes) for index, nbytes in enumerate(self._page_nbytes)]],
            blocks_per_chunk=self.blocks_per_chunk,
            stop_nbytes=stride_nbytes,
        )
        self._runtime = open_runtime(self._pages, self._layout, primary.buffer, stride_nbytes, self._done)

    def check(self, jobs: Sequence[PortJob]) -> None:
        """Raises ChunkSizeError if a chunk has no blocks or too many, or a block id is not the device's."""
        for job in jobs:
            if not 0 < len(job.place) <= self.blocks_per_chunk:
                raise ChunkSizeError(f"{len(job.place)} blocks for a chunk of at most {self.blocks_per_chunk}")
            for block in job.place:
                if not 0 <= block < self.n_blocks:
                    raise ChunkSizeError(f"block {block} is not one of the device's {self.n_blocks}")

    async def store(self, jobs: Sequence[PortJob]) -> Sequence[bool]:
        return await self._copy(Direction.STORE, jobs)

    async def load(self, jobs: Sequence[PortJob]) -> Sequence[bool]:
        return await self._copy(Direction.LOAD, jobs)

    def close(self) -> None:
        """Wait for running copies, then touch neither blocks nor slots any more."""
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None

    async def _copy(self, direction: Direction, jobs: Sequence[PortJob]) -> Sequence[bool]:
        if self._runtime is None or self._layout is None:
            raise ClosedError("the device is not attached to an open cache")
        copies = [_group_copy(job, self.blocks_per_chunk) for job in jobs]
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        job_id = next(self._ids)
        self._waiting[direction, job_id] = (loop, future)
        self._runtime.submit(CopyJob(job_id, direction, copies))
        return [await future] * len(jobs)

    def _done(self, done: CopyDone) -> None:
        """On a thread of the runtime."""
        loop, future = self._waiting.pop((done.job.direction, done.job.id))
        loop.call_soon_threadsafe(future.set_result, done.error is None)


def _group_copy(job: PortJob, blocks_per_chunk: int) -> GroupCopy:
    n_blocks = len(job.place)
    return GroupCopy(
        group=0,
        blocks=list(job.place),
        slots=[job.slot] * n_blocks,
        subs=list(range(n_blocks)),
        touched=[job.slot],
        skipped=[(job.slot, sub) for sub in range(n_blocks, blocks_per_chunk)],
    )


def _pages(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """``int8 [n_blocks, page_nbytes]`` over the same memory."""
    told = f"tensor {index} of {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
    if tensor.ndim < 2 or not len(tensor) or not tensor[0].is_contiguous():
        raise TierError("device", f"{told} is not [n_blocks, ...] with each block in one piece")
    rows = tensor.as_strided((len(tensor), tensor[0].numel()), (tensor.stride(0), 1))
    return rows.view(torch.int8)
