"""vLLM's own tiered spec and manager by hand, with a tier of ours below: real rows, real jobs, no engine."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tests.patience import PATIENCE_S
from tests.vllm.manager_kit import TOKENS, offloading_config
from tierkv import MemoryTier
from tierkv.vllm import _identity

HIT, PENDING, RETRY, MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.RETRY, LookupResult.MISS
ROW = 4096


def fs(root: Path, **settings: Any) -> dict[str, Any]:
    """An entry of ``secondary_tiers`` as an operator writes it."""
    return {
        "type": "TierKVSecondaryTier", "module_path": "tierkv.vllm", "tier": "fs", "root_dir": str(root),
        "capacity": "4MiB", **settings,
    }  # fmt: skip


def pattern(key: Any) -> bytes:
    """The bytes that belong to a key."""
    return (hashlib.sha256(key).digest() * (ROW // 32))[:ROW]


class GateTier(MemoryTier):
    """A tier in memory whose reads and writes wait for a gate, or fail."""

    gate: ClassVar[threading.Event] = threading.Event()
    failing: ClassVar[bool] = False
    n_begun: ClassVar[int] = 0
    n_read: ClassVar[int] = 0

    @classmethod
    def fresh(cls) -> None:
        cls.gate.set()
        cls.failing, cls.n_begun, cls.n_read = False, 0, 0

    async def _pass(self) -> None:
        GateTier.n_begun += 1
        while not GateTier.gate.is_set():  # noqa: ASYNC110 - it is set on another thread
            await asyncio.sleep(0.002)
        if GateTier.failing:
            raise OSError("a planted fault")

    async def read(self, items: Any) -> Any:
        await self._pass()
        GateTier.n_read += len(items)
        return await super().read(items)

    async def write(self, items: Any) -> Any:
        await self._pass()
        return await super().write(items)


GATE = {
    "type": "TierKVSecondaryTier", "module_path": "tierkv.vllm", "tier": "tests.vllm.own_spec_kit:GateTier",
    "capacity": "1MiB",
}  # fmt: skip


class OwnSpec:
    """One engine's scheduler side under vLLM's own ``TieringOffloadingSpec``.

    Args:
        tiers: ``secondary_tiers``.
        n_slots: chunks that vLLM's primary holds.
        model: what the weights' digest is made of; None: nothing vouches for them.
        page_nbytes: bytes of a block; requests are served with rows of one size only, ``ROW``.
    """

    def __init__(
        self,
        *tiers: dict[str, Any],
        n_slots: int = 8,
        model: str | None = "model",
        page_nbytes: int = ROW,
        **extra: Any,
    ) -> None:
        extra = {"cpu_bytes_to_use": n_slots * ROW, "secondary_tiers": list(tiers)} | extra
        config = offloading_config(extra, page_nbytes=page_nbytes)
        self.spec: Any = TieringOffloadingSpec(config)
        digest = None if model is None else hashlib.sha256(model.encode()).digest()
        with mock.patch.object(_identity, "identity_digest", return_value=digest):
            self.manager: Any = self.spec.get_manager()
        self.tier: Any = self.manager.secondary_tiers[0] if self.manager.secondary_tiers else None
        self.primary: Any = self.manager.primary_tier
        self.rows = self.primary.get_kv_memoryview().cast("B")
        self._names = itertools.count()

    # -- requests -----------------------------------------------------------------------------------------------

    def request(self, keys: Sequence[Any], req_id: str = "") -> ReqContext:
        context = ReqContext(req_id=req_id or f"r{next(self._names)}")
        if hasattr(context, "set_offload_key_position"):  # from 0.31 on
            for i, key in enumerate(keys, 1):
                context.set_offload_key_position(key, i * TOKENS)
        self.manager.on_new_request(context)
        return context

    def lookup(self, keys: Sequence[Any], context: ReqContext) -> list[LookupResult]:
        """As vLLM looks up a prefix: up to the first miss, whatever is pending."""
        answers = []
        for key in keys:
            answers.append(self.manager.lookup(key, context))
            if answers[-1] is MISS:
                break
        return answers

    def step(self, new: Sequence[str] = (), preempted: Sequence[str] = ()) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=new, preempted_req_ids=preempted))
        list(self.manager.take_events())
        self.manager.get_stats()

    def reset(self) -> None:
        """Let vLLM forget its cache; from 0.33 on it promotes nothing until the workers let go of what it held."""
        self.manager.reset_cache()
        getattr(self.manager, "on_reset_flushed", lambda: None)()

    def row(self, chunk_id: int) -> memoryview:
        return self.rows[int(chunk_id) * ROW : (int(chunk_id) + 1) * ROW]

    def store(self, keys: Sequence[Any], context: ReqContext | None = None) -> list[Any]:
        """Offer, let the device copy, complete; the keys that were taken. None of them if there is no room."""
        context = context or self.request(keys)
        output = self.manager.prepare_store(list(keys), context)
        if output is None or not output.keys_to_store:
            return []
        for key, chunk_id in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            self.row(chunk_id)[:] = pattern(key)
        self.manager.complete_store(output.keys_to_store, context)
        return list(output.keys_to_store)

    def load(self, keys: Sequence[Any], context: ReqContext) -> None:
        """Load hits of this step and compare every byte; the request is scheduled by that."""
        spec = self.manager.prepare_load(list(keys), context)
        for key, chunk_id in zip(keys, spec.chunk_ids, strict=True):
            assert bytes(self.row(chunk_id)) == pattern(key), "wrong bytes"
        self.manager.complete_load(list(keys), context)

    def serve(self, keys: Sequence[Any], timeout_s: float = PATIENCE_S) -> int:
        """One request as vLLM's scheduler treats it: look up until nothing is pending, load, store the rest, end."""
        context = self.request(keys)
        deadline = time.monotonic() + timeout_s
        while True:
            answers = self.lookup(keys, context)
            if PENDING not in answers and RETRY not in answers:
                break
            assert time.monotonic() < deadline, f"never answered: {answers}"
            self.step()
            time.sleep(0.001)
        n = answers.count(HIT)
        if n:
            self.load(keys[:n], context)
        self.step(new=[context.req_id])
        self.store(keys[n:], context)
        self.manager.on_request_finished(context)
        self.settle()
        return n

    def until(self, condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> None:
        """Step until it is so; the Mover's thread needs real time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not come to pass"
            self.step()
            time.sleep(0.001)

    def settle(self) -> None:
        """Every job of vLLM's has ended."""
        self.until(lambda: not self.manager.has_pending_work())

    def ready(self, n_held: int = 0) -> OwnSpec:
        """The tier is open, its root is scanned, and our ledger knows of ``n_held`` chunks of earlier runs."""
        level = self.tier.hierarchy.levels[1]
        self.until(lambda: level.serves and level.plan.writable() and len(level.ledger) >= n_held)
        return self

    def held(self) -> list[Any]:
        """Keys that our level can serve."""
        return [entry.chunk.key for entry in self.tier.hierarchy.levels[1].ledger if entry.stored]

    def statistics(self) -> Any:
        return self.tier.hierarchy.statistics()[1]

    def empty_primary(self) -> None:
        """Push everything out of vLLM's primary, and nothing out of ours."""
        policy = self.primary._policy
        keys = [key for key in list(getattr(policy, "chunks", {})) if policy.get(key).ref_cnt == 0]
        for key in keys:
            self.primary._free_chunk(policy.get(key))
            policy.remove(key)
        self.primary._num_evictable_cache_chunks -= len(keys)

    def close(self) -> None:
        self.tier.hierarchy.check()
        self.rows.release()
        self.manager.shutdown()


@contextlib.contextmanager
def own_spec(*tiers: dict[str, Any], **options: Any) -> Iterator[OwnSpec]:
    """Shut down at the end, however it comes."""
    made = OwnSpec(*tiers, **options)
    try:
        yield made
    finally:
        made.close()
