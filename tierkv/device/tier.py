"""A server's paged KV tensors bound to primary slots: for :class:`~tierkv.TieredCache`, and for vLLM's worker."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from tierkv.device.engine import CopyDone, CopyJob, EngineStats, EngineThread, TransferEngine
from tierkv.device.layout import DeviceLayout, GroupCopy
from tierkv.device.lowering import Pages, check_page_views, pages_of
from tierkv.device.runtime import DeviceLostError, DeviceRuntime, Direction, open_runtime
from tierkv.device.slots import HostSlots
from tierkv.device.staging import StagedRuntime
from tierkv.errors import ChunkSizeError, ClosedError, ConfigError, TierError
from tierkv.protocols import HostTier, PortJob
from tierkv.settings import parse_count

logger = logging.getLogger(__name__)


@runtime_checkable
class SlotBuffer(Protocol):
    """A primary whose slots lie in one piece, ``stride_nbytes`` apart."""

    @property
    def buffer(self) -> memoryview: ...


class DeviceTier:
    """Copies between blocks of KV tensors and host slots: pass it as ``TieredCache(device=...)``.

    Args:
        kv_caches: what :meth:`register` takes; or None, and :meth:`register` is called later.
        blocks_per_chunk: blocks that make up a chunk; the chunker's.
        groups: as in :meth:`register`.
        n_blocks: as in :meth:`register`.
        runtime: the device; None finds the one on which the tensors lie.

    Blocks and slots of a copy are the caller's again once its end was told, also if whoever awaited it was cancelled.

    Concurrency: one thread, the one whose current stream runs the model; with asyncio the loop's. Polling and
    awaiting may be mixed.

    Raises:
        TierError: a tensor cannot be seen as pages without a copy; says which, with shape and strides.
    """

    def __init__(
        self,
        kv_caches: Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        blocks_per_chunk: int,
        groups: Sequence[Sequence[str]] | None = None,
        n_blocks: int | None = None,
        runtime: DeviceRuntime | None = None,
    ) -> None:
        self.blocks_per_chunk = parse_count("blocks_per_chunk", blocks_per_chunk, 1, 1 << 20)
        self.n_blocks = 0
        self._given = runtime
        self._runtime: DeviceRuntime | None = None
        self._layout: DeviceLayout | None = None
        self._pages: list[Pages] = []
        self._engine: TransferEngine | None = None
        self._ids = itertools.count(1)
        self._ended: list[CopyDone] = []
        self._awaited: dict[tuple[Direction, int], asyncio.Future[CopyDone]] = {}
        self._sleepers: dict[Direction, EngineThread] = {}
        self._asleep: set[Direction] = set()
        if kv_caches is not None:
            self.register(kv_caches, groups, n_blocks=n_blocks)

    def register(
        self,
        kv_caches: Mapping[str, Any] | Sequence[Any],
        groups: Sequence[Sequence[str]] | None = None,
        *,
        n_blocks: int | None = None,
    ) -> None:
        """Take a server's KV tensors as they are; nothing is copied. Needs torch.

        Args:
            kv_caches: by layer name (or in order, layers then being called "0", "1", ...) a tensor, or a tuple or list
                of tensors, also nested: K and V, scales, latent parts, states. Each has the block as its first
                dimension.
            groups: the layer names of each group; None if all layers are one.
            n_blocks: how many blocks the server uses, where tensors have more; None takes the least that one has.

        Raises:
            TierError: a tensor cannot be seen as pages without a copy, or there is no runtime for its device.
        """
        from tierkv.device.pages import kv_pages  # noqa: PLC0415 - torch; slots and engine do without

        found = kv_pages(kv_caches, groups, n_blocks=n_blocks)
        layout = DeviceLayout.direct(found.page_nbytes, found.groups, blocks_per_chunk=self.blocks_per_chunk)
        self.register_pages(found.tensors, layout)

    def register_pages(self, tensors: Sequence[Any], layout: DeviceLayout) -> None:
        """Take page views that somebody else has made, with the layout in which they lie in a slot.

        Args:
            tensors: one a tensor of the layout, each ``[n_blocks, page_nbytes]`` of one-byte elements, pages in one
                piece, rows at any stride.
            layout: where their pages lie in a slot.

        Raises:
            TierError: a tensor is not what the layout says, or there is no runtime for its device.
        """
        if self._runtime is not None:
            raise TierError("device", "KV tensors were registered already")
        if not tensors or len(tensors) != len(layout.page_nbytes):
            raise TierError("device", f"{len(tensors)} tensors for a layout of {len(layout.page_nbytes)}")
        check_page_views(tensors, layout.page_nbytes)
        self._runtime = self._given or open_runtime(getattr(tensors[0], "device", "cpu"))
        self._pages = [pages_of(self._runtime, tensor) for tensor in tensors]
        self.n_blocks = min(pages.n_blocks for pages in self._pages)
        self._layout = layout

    @property
    def chunk_nbytes(self) -> int:
        """Bytes that a chunk takes of a slot."""
        return self._registered().span.stop

    @property
    def runtime(self) -> DeviceRuntime:
        """The device. Raises TierError before :meth:`register`."""
        self._registered()
        assert self._runtime is not None
        return self._runtime

    # -- binding ------------------------------------------------------------------------------------------------

    def bind(self, slots: HostSlots) -> None:
        """Copy to and from these slots from now on; they are page-locked if the device can do that."""
        layout = self._registered()
        runtime = self.runtime
        if not slots.register(runtime) and runtime.blocks_on_pageable:
            runtime = _staged(runtime)
            logger.warning(
                "%s cannot page-lock the %d slots in host memory: copies go through threads of their own, by %s",
                runtime.name,
                slots.n_slots,
                runtime.path,
            )
        self._engine = TransferEngine(runtime, layout, self._pages, slots)
        logger.info("%s: copies by %s, slots %s", runtime.name, runtime.path, slots.kind.value)

    def attach(self, primary: HostTier, stride_nbytes: int) -> None:
        """Bind to the slots of an open primary. Raises ConfigError if they do not lie in one piece."""
        if not isinstance(primary, SlotBuffer):
            raise ConfigError(
                f"device is given, so the primary's slots must lie in one piece, but {primary.name} is a "
                f"{type(primary).__name__}; nearest valid value: CPUTier"
            )
        known = self._registered()
        self._layout = DeviceLayout.direct(
            known.page_nbytes, known.groups, blocks_per_chunk=known.blocks_per_chunk, stop_nbytes=stride_nbytes
        )
        self.bind(HostSlots.over(primary.buffer, stride_nbytes))

    def stats(self) -> EngineStats:
        """What was copied so far, and by which path. Raises ClosedError while nothing is bound."""
        return self._bound().stats()

    def close(self) -> None:
        """Wait for every copy, then touch neither blocks nor slots any more. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        engine.close()
        for thread in self._sleepers.values():
            thread.close()
        self._take(engine)

    # -- copying, for a thread that polls -----------------------------------------------------------------------

    def submit(
        self,
        direction: Direction,
        block_ids: Sequence[int],
        slots: Sequence[int],
        *,
        group_sizes: Sequence[int] | None = None,
        first_blocks: Sequence[int] | None = None,
        slot_groups: Sequence[int] | None = None,
        whole: bool = False,
        job_id: int | None = None,
        tag: Any = None,
    ) -> int:
        """Queue a copy and return its number at once; :meth:`poll` tells its end, also if it cannot be copied at all.

        Args:
            direction: which way.
            block_ids: device blocks, groups one behind the other.
            slots: a slot for each chunk touched, in the same order.
            group_sizes: how many blocks belong to each group; None: all to the first.
            first_blocks: for each group the index, in the request, of its first block: a chunk may be entered in its
                middle. None: 0.
            slot_groups: for each slot its group, to be checked against what the blocks say.
            whole: refuse a copy whose last chunk of a group has no last block: for stores, where that is a hole.
            job_id: a number of the caller's, not in use in that direction; None draws one.
            tag: handed back with the end.
        """
        engine = self._bound()
        number = next(self._ids) if job_id is None else job_id
        try:
            copies = self._split(block_ids, slots, group_sizes, first_blocks, slot_groups, whole=whole)
        except TierError as error:
            engine.submit(CopyJob(number, direction, (), tag), refused=error)
        else:
            engine.submit(CopyJob(number, direction, copies, tag))
        return number

    def refuse(self, direction: Direction, job_id: int, error: Exception, *, tag: Any = None) -> None:
        """Let a job that is wrong take its turn and end with this error: its end says that those before it have."""
        self._bound().submit(CopyJob(job_id, direction, (), tag), refused=error)

    def poll(self) -> list[CopyDone]:
        """The copies that have ended since the last call, in order within each direction; not those awaited."""
        if self._engine is not None:
            self._take(self._engine)
        ended, self._ended = self._ended, []
        return ended

    def wait(self, ids: Collection[tuple[Direction, int]] | None = None) -> None:
        """Block until these copies (None: all) have ended; the next :meth:`poll` tells their ends."""
        if self._engine is not None:
            self._engine.wait(ids)

    def consume(self, ids: Collection[int], *, stream: Any = None) -> None:
        """Let a stream (default: the current one) wait for these loads without the host waiting."""
        self._bound().consume(ids, stream=stream)

    # -- copying, for asyncio -----------------------------------------------------------------------------------

    async def store(
        self,
        block_ids: Sequence[int],
        slots: Sequence[int],
        *,
        group_sizes: Sequence[int] | None = None,
        first_blocks: Sequence[int] | None = None,
    ) -> bool:
        """Copy blocks to slots; whether all bytes arrived. Arguments as in :meth:`submit`.

        Cancelled, it re-raises only when the copy has ended.
        """
        copies = self._split(block_ids, slots, group_sizes, first_blocks, None, whole=False)
        return await self._run(Direction.STORE, copies)

    async def load(
        self,
        slots: Sequence[int],
        block_ids: Sequence[int],
        *,
        group_sizes: Sequence[int] | None = None,
        first_blocks: Sequence[int] | None = None,
    ) -> bool:
        """Copy slots to blocks; whether all bytes arrived. As :meth:`store`."""
        copies = self._split(block_ids, slots, group_sizes, first_blocks, None, whole=False)
        return await self._run(Direction.LOAD, copies)

    def check(self, jobs: Sequence[PortJob]) -> None:
        """Raises ChunkSizeError if a chunk has no blocks or too many, or a block id is not the device's.

        Raises DeviceLostError if the device was lost: the caller's own work on it is, too.
        """
        if self._engine is not None and self._engine.device_lost is not None:
            raise self._engine.device_lost
        for job in jobs:
            if not 0 < len(job.place) <= self.blocks_per_chunk:
                raise ChunkSizeError(f"{len(job.place)} blocks for a chunk of at most {self.blocks_per_chunk}")
            for block in job.place:
                if not 0 <= block < self.n_blocks:
                    raise ChunkSizeError(f"block {block} is not one of the device's {self.n_blocks}")

    async def store_chunks(self, jobs: Sequence[PortJob]) -> Sequence[bool]:
        """For TieredCache: chunks of the first group."""
        return [await self._run(Direction.STORE, self._of(jobs))] * len(jobs)

    async def load_chunks(self, jobs: Sequence[PortJob]) -> Sequence[bool]:
        """For TieredCache: chunks of the first group."""
        return [await self._run(Direction.LOAD, self._of(jobs))] * len(jobs)

    # -- inside -------------------------------------------------------------------------------------------------

    def _registered(self) -> DeviceLayout:
        if self._layout is None:
            raise TierError("device", "no KV tensors were registered")
        return self._layout

    def _bound(self) -> TransferEngine:
        if self._engine is None:
            raise ClosedError("the device is not bound to slots")
        return self._engine

    def _of(self, jobs: Sequence[PortJob]) -> list[GroupCopy]:
        return [
            copy for job in jobs for copy in self._split(list(job.place), [job.slot], None, None, None, whole=False)
        ]

    def _split(
        self,
        block_ids: Sequence[int],
        slots: Sequence[int],
        group_sizes: Sequence[int] | None,
        first_blocks: Sequence[int] | None,
        slot_groups: Sequence[int] | None,
        *,
        whole: bool,
    ) -> list[GroupCopy]:
        layout = self._registered()
        none = [0] * (len(layout.groups) - 1)
        sizes = [len(block_ids), *none] if group_sizes is None else group_sizes
        firsts = [0, *none] if first_blocks is None else first_blocks
        return layout.split(block_ids, sizes, firsts, slots, slot_groups=slot_groups, whole=whole)

    async def _run(self, direction: Direction, copies: Sequence[GroupCopy]) -> bool:
        engine, number = self._bound(), next(self._ids)
        future: asyncio.Future[CopyDone] = asyncio.get_running_loop().create_future()
        self._awaited[direction, number] = future
        engine.submit(CopyJob(number, direction, copies))
        self._watch(engine, direction)
        error = (await uncancelled_future(future)).error
        if isinstance(error, DeviceLostError):
            raise error
        return error is None

    def _watch(self, engine: TransferEngine, direction: Direction) -> None:
        """Have a thread sleep until the oldest copy has ended, and then the loop look at what has."""
        sleep = engine.sleeper(direction)
        if sleep is None or direction in self._asleep:
            return
        if direction not in self._sleepers:
            self._sleepers[direction] = EngineThread(f"tierkv-{direction.value}-ends")
        self._asleep.add(direction)
        loop = asyncio.get_running_loop()

        def woken() -> None:
            self._asleep.discard(direction)
            self._take(engine)
            self._watch(engine, direction)

        self._sleepers[direction].run(_sleep_then, (sleep, loop, woken))

    def _take(self, engine: TransferEngine) -> None:
        for done in engine.poll():
            future = self._awaited.pop((done.job.direction, done.job.id), None)
            if future is None:
                self._ended.append(done)
            elif not future.done():
                future.set_result(done)


def _staged(runtime: DeviceRuntime) -> DeviceRuntime:
    """The device with a ring of pinned memory before it, if it has some."""
    try:
        return StagedRuntime(runtime)
    except TierError as error:
        logger.warning("%s has no pinned memory for staging: %s", runtime.name, error)
        return runtime


async def uncancelled_future(future: asyncio.Future[CopyDone]) -> CopyDone:
    """Wait for a copy to its end even if the caller is cancelled meanwhile; the cancellation is re-raised then."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return future.result()


def _sleep_then(call: tuple[Callable[[], None], asyncio.AbstractEventLoop, Callable[[], None]]) -> None:
    sleep, loop, woken = call
    sleep()
    with contextlib.suppress(RuntimeError):  # the loop ended before the copy did; close() still waits for the copy
        loop.call_soon_threadsafe(woken)
