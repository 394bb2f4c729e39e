"""One engine's two halves by hand: the real spec, manager, pool, control page and worker over a few torch tensors."""

from __future__ import annotations

import hashlib
import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from tests.patience import PATIENCE_S
from tierkv.vllm import _assembly, _compat, worker
from tierkv.vllm.spec import TieringOffloadingSpec

TOKENS = 4
PAGE_NBYTES = 256
N_BLOCKS = 64
STEP = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
HIT, PENDING, RETRY, MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.RETRY, LookupResult.MISS


def offloading_config(
    extra: dict[str, Any],
    *,
    n_groups: int = 1,
    page_nbytes: int = PAGE_NBYTES,
    engine_id: str = "",
    world_size: int = 1,
) -> OffloadingConfig:
    parallel = OffloadingParallelConfig(
        rank=0, world_size=world_size, tp_size=world_size, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0,
        data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=False,
    )  # fmt: skip
    groups = tuple(OffloadingGroupConfig(TOKENS, (f"layer{i}",), i) for i in range(n_groups))
    return OffloadingConfig(
        groups=groups,
        worker_kv_bytes_per_block=page_nbytes,
        enable_kv_cache_events=True,
        extra_config=extra,
        engine_id=engine_id or uuid.uuid4().hex,
        model=OffloadingModelConfig("model", "float32"),
        cache=OffloadingCacheConfig(TOKENS, 1),
        parallel=parallel,
    )


def keys_of(name: str, n: int, group: int = 0) -> list[Any]:
    """Keys of a prompt's chunks, the same for the same name."""
    return [make_offload_key(hashlib.sha256(f"{name} {i}".encode()).digest(), group) for i in range(n)]


class Kit:
    """See the module.

    Args:
        n_slots: chunks that the primary holds.
        tiers: ``secondary_tiers``.
        sliding: groups that are no prefix groups.
        model: what the weights' digest is made of; None publishes no identity.
        extra: more settings.
    """

    def __init__(
        self,
        n_slots: int = 8,
        tiers: Sequence[dict[str, Any]] = (),
        *,
        n_groups: int = 1,
        page_nbytes: int = PAGE_NBYTES,
        sliding: frozenset[int] = frozenset(),
        model: str | None = "model",
        clock: Callable[[], float] = time.monotonic,
        **extra: Any,
    ) -> None:
        extra = (
            {"cpu_bytes_to_use": n_slots * max(4096, page_nbytes)}
            | ({"secondary_tiers": list(tiers)} if tiers else {})
            | extra
        )
        self.spec = TieringOffloadingSpec(offloading_config(extra, n_groups=n_groups, page_nbytes=page_nbytes))
        self.tensor = torch.zeros((N_BLOCKS, page_nbytes), dtype=torch.int8)
        ref = CanonicalKVCacheRef(0, page_nbytes)
        caches = CanonicalKVCaches([CanonicalKVCacheTensor(self.tensor, page_nbytes)], [[ref] for _ in range(n_groups)])
        digest = None if model is None else hashlib.sha256(model.encode()).digest()
        with mock.patch.object(worker, "identity_digest", return_value=digest):
            self.worker: Any = self.spec.get_worker(caches)
        with mock.patch.object(_compat, "sliding_groups", return_value=sliding):
            self.manager: Any = _assembly.make_manager(self.spec, clock)
        self.hierarchy = self.manager.hierarchy
        self.n_groups = n_groups
        self._jobs = itertools.count()
        self._names = itertools.count()

    # -- requests -----------------------------------------------------------------------------------------------

    def request(self, *prompts: Sequence[Any], req_id: str = "", **fields: Any) -> ReqContext:
        """A request whose groups have these keys."""
        context = ReqContext(req_id=req_id or f"r{next(self._names)}", **fields)
        for keys in prompts if hasattr(context, "set_offload_key_position") else ():  # 0.30 has no positions
            for i, key in enumerate(keys, 1):
                context.set_offload_key_position(key, i * TOKENS)
        self.manager.on_new_request(context)
        return context

    def lookup(self, keys: Sequence[Any], context: ReqContext) -> list[LookupResult]:
        """As vLLM looks up a prefix: up to the first miss."""
        answers = []
        for key in keys:
            answers.append(self.manager.lookup(key, context))
            if answers[-1] is MISS:
                break
        return answers

    def step(self, *new: str) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=new, preempted_req_ids=()))

    def fill(self, block: int, seed: object) -> bytes:
        """Write recognisable bytes into a block of the device."""
        data = hashlib.shake_256(repr(seed).encode()).digest(PAGE_NBYTES)
        self.tensor[block] = torch.frombuffer(bytearray(data), dtype=torch.int8)
        return data

    def block(self, block: int) -> bytes:
        return self.tensor[block].numpy().tobytes()

    def offer(self, keys: Sequence[Any], context: ReqContext) -> Any:
        output = self.manager.prepare_store(keys, context)
        assert output is not None, "vLLM would retry and warn in each step"
        return output

    def copy_out(self, output: Any) -> None:
        """Let the worker store what an offer gave room to: block ``i`` of the device holds the bytes of key ``i``."""
        keys = output.keys_to_store
        sizes = [sum(key[-1] == group for key in keys) for group in range(self.n_groups)]
        blocks = []
        for i, key in enumerate(keys):
            self.fill(i, key)
            blocks.append(i)
        job = next(self._jobs)
        self.worker.submit_store(job, GPULoadStoreSpec(blocks, sizes, [0] * self.n_groups), output.store_spec)
        self.worker.wait({job})
        self.worker.get_finished()

    def store(self, keys: Sequence[Any], context: ReqContext | None = None) -> list[Any]:
        """Offer, copy, complete; the keys that were taken."""
        context = context or self.request(keys)
        output = self.offer(keys, context)
        if output.keys_to_store:
            self.copy_out(output)
            self.manager.complete_store(set(output.keys_to_store), context)
        return list(output.keys_to_store)

    def load(self, keys: Sequence[Any], context: ReqContext) -> None:
        """Load keys that were hits in this step and compare every byte."""
        spec = self.manager.prepare_load(keys, context)
        sizes = [sum(key[-1] == group for key in keys) for group in range(self.n_groups)]
        blocks = list(range(N_BLOCKS - len(keys), N_BLOCKS))
        job = next(self._jobs)
        self.worker.submit_load(job, spec, GPULoadStoreSpec(blocks, sizes, [0] * self.n_groups))
        self.worker.wait({job})
        (result,) = self.worker.get_finished()
        assert result.success
        for block, key in zip(blocks, keys, strict=True):
            assert self.block(block) == self.fill(0, key), "wrong bytes"
        self.manager.complete_load(set(keys), context)

    def until(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        """Step until it is so; the Mover's thread needs real time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not come to pass"
            self.step()
            time.sleep(0.002)

    def statistics(self, level: int = 0) -> Any:
        return self.hierarchy.statistics()[level]

    def at_rest(self) -> bool:
        return self.hierarchy.at_rest and not self.manager.has_pending_work()

    def close(self) -> None:
        self.hierarchy.check()
        self.worker.shutdown()
        self.manager.shutdown()
