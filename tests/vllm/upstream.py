"""vLLM's own tiered spec on a machine with CPUs only: its pool, manager and tiers, with a plain worker in its place.

vLLM's worker refuses CPU platforms. This one copies between the CPU's KV blocks and the rows of vLLM's pool, at once.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class UpstreamTieringSpec(TieringOffloadingSpec):
    """vLLM's, but for the worker."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = self.make_worker(kv_caches, region)
        return self._worker

    def make_worker(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> OffloadingWorker:
        return PlainWorker(kv_caches, self.blocks_per_chunk, region)


class PlainWorker(OffloadingWorker):
    """Copies on the calling thread, block by block."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region = region
        self._n = blocks_per_chunk
        self._groups = kv_caches.group_data_refs
        self._pages = [each.page_size_bytes for each in kv_caches.tensors]
        self._blocks = [each.tensor.view(torch.int8) for each in kv_caches.tensors]
        self._rows = [region.create_next_worker_view(page * blocks_per_chunk) for page in self._pages]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec.chunk_ids, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **_later: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec.chunk_ids, store=False)

    def _copy(self, job_id: int, device: Any, chunk_ids: Any, *, store: bool) -> bool:
        blocks, chunks, nbytes = iter(device.block_ids.tolist()), iter(chunk_ids.tolist()), 0
        for group, n_blocks, first in zip(self._groups, device.group_sizes, device.block_indices, strict=True):
            place = first % self._n
            chunk = next(chunks) if n_blocks else 0
            for _ in range(n_blocks):
                if place == self._n:
                    chunk, place = next(chunks), 0
                nbytes += self._copy_block(group, next(blocks), chunk, place, store=store)
                place += 1
        self._done.append(TransferResult(job_id, True, nbytes, 0.001))
        return True

    def _copy_block(self, group: Any, block: int, chunk: int, place: int, *, store: bool) -> int:
        nbytes = 0
        for ref in group:
            start = place * self._pages[ref.tensor_idx]
            row = self._rows[ref.tensor_idx][chunk, start : start + ref.page_size_bytes]
            page = self._blocks[ref.tensor_idx][block, : ref.page_size_bytes]
            row.copy_(page) if store else page.copy_(row)
            nbytes += ref.page_size_bytes
        return nbytes

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Collection[int]) -> None:
        """Every copy has ended when its submission returns."""

    def shutdown(self) -> None:
        self._blocks.clear()
        self._rows.clear()
        self._region.cleanup()
