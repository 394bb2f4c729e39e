"""How bytes get into and out of primary slots: from host buffers, or from a device's blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tierkv._mover import zero_tail
from tierkv._threads import Lane
from tierkv.errors import ChunkSizeError
from tierkv.protocols import HostTier, PortJob

_INLINE_NBYTES = 256 << 10
"""Up to here a copy costs less than a hop to a thread and back (about 50 us)."""


class HostPort:
    """Copies from and to host buffers: small batches on the loop, larger ones on a thread of its own."""

    def __init__(self) -> None:
        self._lane = Lane("tierkv-host-copy", 1)
        self._primary: HostTier | None = None

    def attach(self, primary: HostTier, stride_nbytes: int) -> None:  # noqa: ARG002 - slots know their stride
        self._primary = primary

    def check(self, jobs: Sequence[PortJob]) -> None:
        for job in jobs:
            nbytes = memoryview(job.place).nbytes
            if nbytes != job.chunk.nbytes:
                raise ChunkSizeError(
                    f"the buffer for the chunk that ends at token {job.chunk.end_token} has {nbytes} bytes, "
                    f"but the chunk has {job.chunk.nbytes}"
                )

    async def store_chunks(self, jobs: Sequence[PortJob]) -> Sequence[bool]:
        return await self._run(self._store, jobs)

    async def load_chunks(self, jobs: Sequence[PortJob]) -> Sequence[bool]:
        return await self._run(self._load, jobs)

    def close(self) -> None:
        self._lane.close()

    async def _run(self, copy: Any, jobs: Sequence[PortJob]) -> Sequence[bool]:
        if sum(job.chunk.nbytes for job in jobs) <= _INLINE_NBYTES:
            copy(jobs)
        else:
            await self._lane.run(copy, jobs)
        return [True] * len(jobs)

    def _store(self, jobs: Sequence[PortJob]) -> None:
        assert self._primary is not None
        for job in jobs:
            view = self._primary.slot_view(job.slot)
            view[: job.chunk.nbytes] = memoryview(job.place).cast("B")
            zero_tail(view, job.chunk)

    def _load(self, jobs: Sequence[PortJob]) -> None:
        assert self._primary is not None
        for job in jobs:
            memoryview(job.place).cast("B")[:] = self._primary.slot_view(job.slot)[: job.chunk.nbytes]


async def uncancelled(task: asyncio.Task[Any]) -> Any:
    """Wait for a task to its end even if the caller is cancelled meanwhile; the cancellation is re-raised then.

    The caller owns what the task still touches (a device's blocks, a buffer) and will reuse it once this returns.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()
        raise cancelled
    return task.result()
