"""vLLM's own tiered manager, pool and fs tier on a machine with CPUs only, over the same copies as ours.

vLLM's worker refuses CPU platforms. In its place stands our device tier, so that two engines differ in who decides and
who does the disk's work, and in nothing else.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from tests.vllm.upstream import UpstreamTieringSpec
from tierkv.device import CopyDone, DeviceLayout, DeviceTier, Direction, HostSlots, PageRef


class PeerTieringSpec(UpstreamTieringSpec):
    """vLLM's, but for the worker."""

    def make_worker(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> OffloadingWorker:
        return PeerWorker(kv_caches, self.blocks_per_chunk, region, self.kv_bytes_per_chunk)


class PeerWorker(OffloadingWorker):
    """Copies between blocks and the rows of vLLM's pool, on the device tier's threads. One rank, direct layout."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion, row_nbytes: int
    ) -> None:
        self._region = region
        layout = DeviceLayout.direct(
            [cache.page_size_bytes for cache in kv_caches.tensors],
            [[PageRef(ref.tensor_idx, ref.page_size_bytes) for ref in group] for group in kv_caches.group_data_refs],
            blocks_per_chunk=blocks_per_chunk,
            stop_nbytes=row_nbytes,
        )
        self._tier = DeviceTier(blocks_per_chunk=blocks_per_chunk)
        self._tier.register_pages([cache.tensor.view(torch.int8) for cache in kv_caches.tensors], layout)
        self._tier.bind(HostSlots.over(memoryview(region.mmap_obj), row_nbytes))

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(Direction.STORE, job_id, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **_: Any) -> bool:
        return self._submit(Direction.LOAD, job_id, dst_spec, src_spec)

    def _submit(self, direction: Direction, job_id: int, device: Any, pool: Any) -> bool:
        self._tier.submit(
            direction,
            device.block_ids.tolist(),
            pool.chunk_ids.tolist(),
            group_sizes=device.group_sizes,
            first_blocks=device.block_indices,
            job_id=job_id,
        )
        return True

    def get_finished(self) -> list[TransferResult]:
        return [_result(done) for done in self._tier.poll()]

    def wait(self, job_ids: Collection[int]) -> None:
        self._tier.wait({(direction, job_id) for direction in Direction for job_id in job_ids})

    def shutdown(self) -> None:
        self._tier.close()
        self._region.cleanup()


def _result(done: CopyDone) -> TransferResult:
    return TransferResult(done.job.id, done.error is None, done.nbytes, done.duration_s)
