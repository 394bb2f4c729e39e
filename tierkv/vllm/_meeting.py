"""How the processes of one engine find each other: who makes pool and control page, and who joins."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker

from tierkv.device import HostSlots, open_runtime
from tierkv.errors import ConfigError, TierError
from tierkv.tiers._memory_limits import check_memory
from tierkv.tiers._pool import PrivatePool, SharedPool
from tierkv.tiers._rendezvous import NotServedError, Role
from tierkv.vllm._control import ControlPage
from tierkv.vllm.worker import open_worker

logger = logging.getLogger("vllm.tierkv.spec")

_JOIN_AGAIN_S = 1.0
_JOIN_PATIENCE_S = 60.0


def start_worker(spec: Any, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
    """A worker over its part of the pool. Rank 0 makes pool and page; the others wait for them, up to a deadline.

    Raises:
        ConfigError: the pool does not fit into this machine, or another engine has this one's id.
        NotServedError: rank 0 did not come, or runs where it cannot be reached (another host or network namespace).
    """
    rank, n_ranks = spec.config.parallel.rank, spec.config.parallel.world_size
    pool = _workers_pool(spec, rank, kv_caches)
    page = None
    try:
        page = _workers_page(spec, rank, n_ranks, pool.generation if isinstance(pool, SharedPool) else 0)

        def release() -> None:
            page.close()
            pool.close()

        return open_worker(
            spec.config,
            kv_caches,
            pool=pool,
            page=page,
            shared=spec.shared,
            recurrent=spec.recurrent,
            release=release,
        )
    except BaseException:
        if page is not None:
            page.close()
        pool.close()
        raise


def _workers_pool(spec: Any, rank: int, kv_caches: CanonicalKVCaches) -> PrivatePool | SharedPool | HostSlots:
    n_slots, stride_nbytes = spec.n_slots, spec.geometry.stride_nbytes
    if not spec.shared:
        return _pinned_slots(n_slots, stride_nbytes, kv_caches) or PrivatePool(
            n_slots, stride_nbytes, option="cpu_bytes_to_use"
        )
    if rank == 0:
        return SharedPool.create(spec.config.engine_id, n_slots, stride_nbytes)
    return SharedPool.join(
        spec.config.engine_id, role=Role.WORKER, rank=rank, n_slots=n_slots, stride_nbytes=stride_nbytes
    )


def _pinned_slots(n_slots: int, stride_nbytes: int, kv_caches: CanonicalKVCaches) -> HostSlots | None:
    """Slots in the device's own host memory, which copies fastest; None where the device has none or needs none."""
    runtime = open_runtime(kv_caches.tensors[0].tensor.device)
    try:
        if not runtime.blocks_on_pageable:
            return None
        check_memory("cpu_bytes_to_use", n_slots * stride_nbytes, stride_nbytes)
        return HostSlots.allocate(runtime, n_slots, stride_nbytes)
    except TierError as error:
        logger.warning("No pinned host memory for %d slots, ordinary memory is taken: %s", n_slots, error)
        return None
    finally:
        runtime.close()


def _workers_page(spec: Any, rank: int, n_ranks: int, generation: int) -> ControlPage:
    if rank == 0:
        return ControlPage.create(spec.config.engine_id, n_ranks=n_ranks, n_slots=spec.n_slots, generation=generation)
    return ControlPage.join(
        spec.config.engine_id, role=Role.WORKER, rank=rank, n_ranks=n_ranks, n_slots=spec.n_slots, generation=generation
    )


def join_pool(spec: Any) -> SharedPool:
    """The scheduler's view of the shared slots. Blocks until a deadline; for the Mover's thread."""
    n_slots, stride_nbytes = spec.n_slots, spec.geometry.stride_nbytes
    return SharedPool.join(
        spec.config.engine_id, role=Role.SCHEDULER, rank=0, n_slots=n_slots, stride_nbytes=stride_nbytes
    )


class PageDoor:
    """Joins the control page at the first call that finds it served; the scheduler's thread never waits for it."""

    def __init__(self, spec: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine_id = spec.config.engine_id
        self._n_ranks = spec.config.parallel.world_size
        self._n_slots = spec.n_slots
        self._clock = clock
        self._page: ControlPage | None = None
        self._again = 0.0
        self._patience: float | None = None

    def __call__(self) -> ControlPage | None:
        if self._page is None and self._clock() >= self._again:
            self._try()
        return self._page

    def _try(self) -> None:
        now = self._clock()
        self._again = now + _JOIN_AGAIN_S
        try:
            self._page = ControlPage.join(
                self._engine_id,
                role=Role.SCHEDULER,
                rank=0,
                n_ranks=self._n_ranks,
                n_slots=self._n_slots,
                deadline_s=0.0,
            )
        except NotServedError as error:
            if self._patience is None:
                self._patience = now + _JOIN_PATIENCE_S
            elif now >= self._patience:
                self._patience = float("inf")
                logger.error("Nothing is offloaded: %s", error)
        except ConfigError as error:
            self._again = float("inf")
            logger.error("Nothing is offloaded: %s", error)
