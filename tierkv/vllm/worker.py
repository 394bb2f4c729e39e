"""The worker's half of the adapter: vLLM's copies between KV blocks and slots, each stamped when it has ended.

All calls come from one thread and none but ``wait`` and ``shutdown`` may block. What becomes of a copy is told twice:
to vLLM, for which every store succeeds, because a failure would stop the engine; and on the control page, from which
the scheduler's half learns which stores to drop.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult

from tierkv.device import CanonicalPage, CopyDone, DeviceLayout, DeviceTier, Direction, HostSlots, PageRef, Run
from tierkv.device.runtime import DeviceLostError
from tierkv.errors import TierError
from tierkv.tiers._mapping import SlotMapping
from tierkv.vllm import _compat, _control
from tierkv.vllm._holes import Offered, without_holes
from tierkv.vllm._identity import identity_digest, kv_shapes, layout_digest
from tierkv.vllm._spec_types import ChunkGeometry, SlotSpec

logger = logging.getLogger("vllm.tierkv.worker")


_ON_PAGE = {Direction.STORE: _control.Direction.STORE, Direction.LOAD: _control.Direction.LOAD}


class TierKVWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies chunks between this rank's KV blocks and its part of the slots.

    Args:
        kv_caches: vLLM's view of this rank's tensors.
        layout: where their pages lie in a slot.
        slots: the slots.
        page: the control page, where ends are stamped.
        rank: this worker's rank.
        group_ids: the group number in keys of each group of the layout.
        recurrent: of these, the groups that keep a state instead of tokens.
        release: called once when nothing touches pool and control page any more.

    Raises:
        TierError: the tensors are not what the layout says, or no runtime exists for their device.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        layout: DeviceLayout,
        slots: HostSlots,
        *,
        page: _control.ControlPage,
        rank: int,
        group_ids: tuple[int, ...],
        recurrent: Collection[int] = (),
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self._blocks_per_chunk = layout.blocks_per_chunk
        self._recurrent = frozenset(position for position, group in enumerate(group_ids) if group in recurrent)
        self._page = page
        self._rank = rank
        self._positions = {group: position for position, group in enumerate(group_ids)}
        self._release = release
        self._finished: deque[TransferResult] = deque()
        self._closed = False
        self._tier = DeviceTier(blocks_per_chunk=layout.blocks_per_chunk)
        self._tier.register_pages([cache.tensor for cache in kv_caches.tensors], layout)
        self._tier.bind(slots)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec, **_: Any) -> bool:
        assert isinstance(dst_spec, SlotSpec), "the scheduler's half is tierkv's too"
        return self._submit(job_id, Direction.STORE, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, **_: Any) -> bool:
        assert isinstance(src_spec, SlotSpec), "the scheduler's half is tierkv's too"
        return self._submit(job_id, Direction.LOAD, dst_spec, src_spec)

    def get_finished(self) -> list[TransferResult]:
        self._take()
        finished: list[TransferResult] = []
        while self._finished:
            finished.append(self._finished.popleft())
        return finished

    def wait(self, job_ids: set[int]) -> None:
        self._tier.wait({(direction, job_id) for direction in Direction for job_id in job_ids})
        self._take()

    def shutdown(self) -> None:
        """Wait for running copies, let go of pool and control page. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._tier.close()
        self._take()
        self._release()

    def _submit(self, job_id: int, direction: Direction, blocks: GPULoadStoreSpec, spec: SlotSpec) -> bool:
        if self._closed:
            logger.debug("%s job %d came after the shutdown and was dropped", direction.value, job_id)
            return True
        unknown = [group for group in spec.groups or () if group not in self._positions]
        if unknown or spec.generation not in {0, self._page.generation}:
            what = f"groups {unknown}, which this worker has not" if unknown else "slots of another pool"
            # It still waits its turn in the engine: a stamp says that every earlier copy on the slot has ended.
            self._tier.refuse(direction, job_id, TierError("device", f"the job names {what}"), tag=(spec, ()))
            return True
        offered = Offered(blocks.block_ids.tolist(), blocks.group_sizes, blocks.block_indices)
        dropped: Sequence[int] = ()
        if direction is Direction.STORE:
            offered, dropped = without_holes(offered, self._blocks_per_chunk, self._recurrent)
        kept = [place for place in range(len(spec.slots)) if place not in dropped]
        self._tier.submit(
            direction,
            offered.blocks,
            [spec.slots[place] for place in kept],
            group_sizes=offered.group_sizes,
            first_blocks=offered.first_blocks,
            slot_groups=[self._positions[spec.groups[place]] for place in kept] if spec.groups else None,
            whole=direction is Direction.STORE,
            job_id=job_id,
            tag=(spec, dropped),
        )
        return True

    def _take(self) -> None:
        for done in self._tier.poll():
            self._ended(done)

    def _ended(self, done: CopyDone) -> None:
        """A copy has ended: stamp first, since what vLLM hears may lead it to the stamp."""
        job, error = done.job, done.error
        if error is None:
            result = TransferResult(job.id, True, done.nbytes, done.duration_s)
        else:
            logger.error("%s job %d failed: %r", job.direction.value.capitalize(), job.id, error)
            # On a lost device the model's kernels are dropped too: vLLM must stop, whatever failed.
            harmless = job.direction is Direction.STORE and not isinstance(error, DeviceLostError)
            result = TransferResult(job.id, harmless)
        try:
            self._stamp(*job.tag, direction=_ON_PAGE[job.direction], ok=error is None)
        finally:
            self._finished.append(result)  # a job that is never reported would keep its request for ever

    def _stamp(self, spec: SlotSpec, dropped: Sequence[int], *, direction: _control.Direction, ok: bool) -> None:
        """Stamp every slot of a job; what was not copied has not succeeded."""
        if not dropped:
            self._page.stamp_many(self._rank, direction, spec.slots, spec.tickets, ok=ok)
            return
        for place, (slot, ticket) in enumerate(zip(spec.slots, spec.tickets, strict=True)):
            self._page.stamp_many(self._rank, direction, [slot], [ticket], ok=ok and place not in dropped)


def open_worker(
    config: Any,
    kv_caches: CanonicalKVCaches,
    *,
    pool: SlotMapping | HostSlots,
    page: _control.ControlPage,
    shared: bool,
    recurrent: Collection[int] = (),
    release: Callable[[], None] = lambda: None,
) -> TierKVWorker:
    """A worker for this process's rank, its identity published on the control page.

    Args:
        config: vLLM's ``OffloadingConfig``.
        kv_caches: vLLM's view of this rank's tensors.
        pool: the slots, of ``ChunkGeometry.of(config, shared=shared)``.
        page: the control page.
        shared: whether all ranks share each slot.
        recurrent: group numbers, as in keys, of the groups that keep a state instead of tokens.
        release: called once when nothing touches pool and control page any more.

    Raises:
        TierError: as :class:`TierKVWorker` and :func:`worker_layout`.
    """
    rank = config.parallel.rank
    layout = worker_layout(config, kv_caches, ChunkGeometry.of(config, shared=shared), shared=shared)
    slots = pool if isinstance(pool, HostSlots) else HostSlots.over(pool.buffer, pool.stride_nbytes)
    worker = TierKVWorker(
        kv_caches,
        layout,
        slots,
        page=page,
        rank=rank,
        group_ids=group_ids(config),
        recurrent=recurrent,
        release=release,
    )
    vllm_config = _compat.current_vllm_config()
    identity = identity_digest(vllm_config)
    if identity is not None:
        page.publish_identity(rank, identity, layout_digest(config, layout, kv_shapes(vllm_config, config)))
    return worker


def worker_layout(config: Any, kv_caches: CanonicalKVCaches, geometry: ChunkGeometry, *, shared: bool) -> DeviceLayout:
    """Where this rank's pages lie in a slot.

    Args:
        config: vLLM's ``OffloadingConfig``.
        kv_caches: vLLM's view of this rank's tensors.
        geometry: the chunk's bytes as the scheduler's half counts them.
        shared: whether all ranks share each slot.

    Raises:
        TierError: the tensors need more bytes than the scheduler's half counted, or canonical pages are asked for
            where they cannot be.
    """
    pages = [tensor.page_size_bytes for tensor in kv_caches.tensors]
    groups = [[_page_ref(ref) for ref in group] for group in kv_caches.group_data_refs]
    rank, n_ranks = config.parallel.rank, config.parallel.world_size
    per_chunk = config.cache.blocks_per_chunk
    if getattr(config, "canonical_layout", False):
        if not shared and n_ranks > 1:
            raise TierError(
                "device", "canonical_layout needs the shared pool: private pools hold one rank's bytes each"
            )
        return DeviceLayout.canonical(
            pages, groups, blocks_per_chunk=per_chunk, stop_nbytes=geometry.stride_nbytes, zeroes_gaps=rank == 0
        )
    start = rank * geometry.rank_nbytes if shared else 0
    last = not shared or rank == n_ranks - 1
    stop = geometry.stride_nbytes if last else start + geometry.rank_nbytes
    return DeviceLayout.direct(pages, groups, blocks_per_chunk=per_chunk, start_nbytes=start, stop_nbytes=stop)


def group_ids(config: Any) -> tuple[int, ...]:
    """The group number that vLLM puts into keys, for each group that it offloads."""
    return tuple(getattr(group, "group_id", position) for position, group in enumerate(config.groups))


def _page_ref(ref: Any) -> PageRef:
    mapping = getattr(ref, "mapping", None)
    if mapping is None:
        return PageRef(ref.tensor_idx, ref.page_size_bytes)
    runs = tuple(
        Run(
            run.local_offset,
            run.canonical_offset,
            run.fragment_size,
            run.num_fragments,
            run.local_stride,
            run.canonical_stride,
        )
        for run in mapping.runs
    )
    page = CanonicalPage(
        mapping.canonical_page_size_bytes, runs, mapping.num_writers, mapping.writer_index, mapping.parallelism_agnostic
    )
    return PageRef(ref.tensor_idx, ref.page_size_bytes, page)
