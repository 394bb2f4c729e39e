"""The offloading specs that vLLM makes by name: one object for each role in each process, both from the same settings.

Built on ``vllm.v1.kv_offload.base`` alone. Constructing one checks every setting and creates nothing.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)

from tierkv.errors import bad_setting
from tierkv.vllm import _assembly, _compat, _meeting, _metrics
from tierkv.vllm._spec_types import ChunkGeometry
from tierkv.vllm.options import check_capacity, check_reserve, check_tier_capacity, parse_options

logger = logging.getLogger("vllm.tierkv.spec")

_warned: set[str] = set()


class _Spec(OffloadingSpec):  # type: ignore[misc]
    """What the three specs share."""

    tiered: ClassVar[bool]
    """Whether there may be levels below host memory."""
    shares: ClassVar[bool] = False
    """Whether all workers have one pool also where nothing demands it."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Called in the front end, which has no spec: wrong settings end here already."""
        options = parse_options(extra_config, tiered=cls.tiered)
        return _metrics.definitions(store_threshold=options.store_threshold)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.options = parse_options(config.extra_config, tiered=self.tiered)
        for sentence in self.options.warnings:
            _warn(sentence)
        self.recurrent = _compat.recurrent_group_ids()
        self.shared = self._is_shared()
        self.geometry = ChunkGeometry.of(config, shared=self.shared)
        n_ranks = config.parallel.world_size
        self.n_slots = check_capacity(
            self.options.cpu_nbytes,
            self.geometry.stride_nbytes,
            n_ranks=n_ranks,
            shared=self.shared,
            n_chunks=self.options.n_cpu_chunks,
        )
        self._warn_of_old_name(self.n_slots * self.geometry.stride_nbytes * (1 if self.shared else n_ranks))
        self.store_reserve = check_reserve(self.options, self.n_slots, self.geometry.stride_nbytes)
        for index, tier in enumerate(self.options.tiers):
            sample = _assembly.make_tier(index, tier)
            check_tier_capacity(index, tier, _assembly.charge_nbytes(sample, self.geometry.chunk_nbytes))
        self._manager: OffloadingManager | None = None
        self._worker: OffloadingWorker | None = None

    def get_manager(self) -> OffloadingManager:
        """The scheduler's half. Joins nothing yet: the order in which processes start cannot deadlock."""
        if self._manager is None:
            self._manager = _assembly.make_manager(self)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """A worker's half; rank 0 makes pool and control page, the others join."""
        if self._worker is None:
            self._worker = _meeting.start_worker(self, kv_caches)
        return self._worker

    def _is_shared(self) -> bool:
        """Whether one pool holds every rank's bytes: levels below and canonical pages need that."""
        options = self.options
        needs = bool(options.tiers) or options.canonical_layout
        if options.pool == "private" and needs:
            why = "secondary_tiers" if options.tiers else "canonical_layout"
            raise bad_setting("pool", "private", f"shared while {why} is given", "shared")
        return needs or options.pool == "shared" or (options.pool == "auto" and self.shares)

    def _warn_of_old_name(self, nbytes: int) -> None:
        n_chunks = self.options.n_cpu_chunks
        if n_chunks:
            _warn(
                f"num_cpu_blocks is vLLM Ascend's former name of the pool's size: {n_chunks} chunks are taken; in "
                f'bytes, as vLLM has it now, that is "cpu_bytes_to_use": {nbytes}'
            )


class CPUOffloadingSpec(_Spec):
    """Host memory alone, in a private pool for each worker unless ``pool`` says otherwise."""

    tiered = False


class TieringOffloadingSpec(_Spec):
    """Host memory, shared by the engine's processes, and the levels of ``secondary_tiers`` below it."""

    tiered = True
    shares = True


class TierKVOffloadingSpec(_Spec):
    """With ``secondary_tiers`` like :class:`TieringOffloadingSpec`, without like :class:`CPUOffloadingSpec`."""

    tiered = True


def _warn(sentence: str) -> None:
    """Once in a process, whichever half of the adapter comes first."""
    if sentence not in _warned:
        _warned.add(sentence)
        logger.warning("%s", sentence)
