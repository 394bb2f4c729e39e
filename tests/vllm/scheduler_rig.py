"""vLLM's real scheduler and offloading connector, both halves, over a model that only writes recognisable bytes.

The "model" writes 16 bytes for each token and group, a hash of the prefix up to it, of the group and of the weights'
number; before each step it looks at every byte that attention would read and compares. So wrong bytes, stale bytes,
bytes of another group and bytes that have not arrived are all seen, and the sampled token is a function of the prefix.

Copies and the Mover run when the test says so and not before, on the test's own thread: whatever a test finds, it finds
again.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import functools
import hashlib
import itertools
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.vllm.engine import arguments
from tests.vllm.model import make_model
from tierkv.device import CopyBatch, Direction, tier
from tierkv.device.cpu import CpuEvent, CpuRuntime, CpuStream, copy_rows
from tierkv.protocols import TierContext
from tierkv.types import Chunk, Found, Outcome, Status
from tierkv.vllm import _assembly, worker
from tierkv.vllm._loop import MoverLoop

BLOCK = 4
"""Tokens of a block."""
TOKEN_NBYTES = 16
WINDOW = 2 * BLOCK + 1
VOCABULARY = 7


class ManualStream(CpuStream):
    """Copies when told to."""

    def __init__(self) -> None:
        super().__init__("manual")
        self.work: deque[Any] = deque()
        self.n_failing = 0

    def put(self, work: Any) -> None:
        if isinstance(work, tuple) and work[0] == "happen":
            work[1].stream = self
        self.work.append(work)

    def step(self) -> bool:
        """Go on to the next event; False if there is none."""
        error: Exception | None = None
        while self.work:
            work = self.work.popleft()
            if isinstance(work, CopyBatch):
                if self.n_failing:
                    self.n_failing -= 1
                    error = RuntimeError("a planted failure")
                else:
                    copy_rows(work)
            elif work[0] == "happen":
                work[1].happen(error, 0.0)
                return True
        return False

    def close(self) -> None:
        while self.step():
            pass


class ManualEvent(CpuEvent):
    stream: ManualStream | None = None

    def synchronize(self) -> None:
        while self.stream is not None and not self._happened.is_set() and self.stream.step():
            pass
        super().synchronize()


class ManualRuntime(CpuRuntime):
    """Copies when told to, each direction in order; the next ones can be made to fail."""

    current: ManualRuntime

    def __init__(self) -> None:
        super().__init__()
        self.lanes: dict[Direction, ManualStream] = {}
        ManualRuntime.current = self

    def new_stream(self) -> ManualStream:
        stream = ManualStream()
        self.lanes[list(Direction)[len(self.lanes)]] = stream
        return stream

    def new_event(self) -> ManualEvent:
        return ManualEvent()

    def run(self, direction: Direction, n: int = 1) -> None:
        """Let the next copies of a direction end."""
        for _ in range(n):
            self.lanes[direction].step()

    def wait(self) -> None:
        for lane in self.lanes.values():
            lane.close()


class ManualLoop(MoverLoop):
    """The Mover's loop without its thread: :meth:`pump` runs what is ready."""

    current: ManualLoop | None = None

    def _start(self) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            ManualLoop.current = self

    def pump(self, n: int = 20) -> None:
        if self._loop is not None and not self._loop.is_closed():
            for _ in range(n):
                self._loop.call_soon(self._loop.stop)
                self._loop.run_forever()

    def close(self, orders: Any) -> None:
        if self._loop is not None:
            self._run(self._close(orders))
            self._loop.run_forever()
            self._loop.close()
            ManualLoop.current = None


class ShelfTier:
    """A lower tier that keeps its chunks over epochs and restarts, each namespace on its own shelf, as a disk would."""

    shelves: ClassVar[dict[bytes, dict[bytes, tuple[Chunk, bytes]]]] = {}
    n_failing: ClassVar[int] = 0
    name = "shelf"
    writable = True

    async def open(self, ctx: TierContext) -> None:
        self._shelf = self.shelves.setdefault(ctx.namespace, {})

    def charge_nbytes(self, chunk_nbytes: int) -> int:
        return -(-chunk_nbytes // 4096) * 4096

    def settled(self, key: bytes) -> bool:
        return True

    async def scan(self) -> AsyncIterator[list[Found]]:
        yield [Found(chunk.key, 4096, owned=True, chunk=chunk) for chunk, _ in self._shelf.values()]

    async def probe(self, keys: Sequence[bytes]) -> list[None]:
        return [None] * len(keys)

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._shelf for key in keys]

    async def read(self, items: Sequence[tuple[bytes, memoryview]]) -> list[Outcome]:
        outcomes = []
        for key, view in items:
            if ShelfTier.n_failing:
                ShelfTier.n_failing -= 1
                self._shelf.pop(key, None)
                outcomes.append(Outcome(key, Status.CORRUPT))
            elif key not in self._shelf:
                outcomes.append(Outcome(key, Status.MISSING))
            else:
                data = self._shelf[key][1]
                view[: len(data)] = data
                view[len(data) :] = bytes(len(view) - len(data))
                outcomes.append(Outcome(key, Status.OK))
        return outcomes

    async def write(self, items: Sequence[tuple[Chunk, memoryview]]) -> list[Outcome]:
        for chunk, view in items:
            self._shelf[chunk.key] = (chunk, bytes(view[: chunk.nbytes]))
        return [Outcome(chunk.key, Status.OK) for chunk, _ in items]

    async def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._shelf.pop(key, None)

    async def save_order(self, chunks: Sequence[Chunk]) -> None:
        """Nothing to remember: a shelf keeps its order."""

    async def aclose(self) -> None:
        """The shelf stays."""


@functools.cache
def base_config() -> VllmConfig:
    folder = Path(tempfile.mkdtemp(prefix="tierkv-rig-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = make_model(folder)
    overrides = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 24, "async_scheduling": False}
    return EngineArgs(**arguments(model, **overrides)).create_engine_config()


def engine_config(extra: dict[str, Any], n_blocks: int, engine_id: str) -> VllmConfig:
    config = copy.copy(base_config())
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.block_size = BLOCK
    config.cache_config.num_gpu_blocks = n_blocks
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", engine_id=engine_id, kv_connector_extra_config=extra
    )
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    return config


def cache_config(n_blocks: int, *, two_groups: bool) -> KVCacheConfig:
    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 2, "dtype": torch.float32}
    page = BLOCK * TOKEN_NBYTES
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))]
    if two_groups:
        groups.append(KVCacheGroupSpec(["sliding"], SlidingWindowSpec(**shape, sliding_window=WINDOW)))
    assert groups[0].kv_cache_spec.page_size_bytes == page
    names = [group.layer_names[0] for group in groups]
    tensors = [
        KVCacheTensor(page * n_blocks, [name], page * n_blocks, page) for name in names
    ]  # they alias, as in vLLM
    return KVCacheConfig(n_blocks, tensors, groups)


class Rig:
    """One engine without an engine. See the module.

    Args:
        blocks_per_chunk: blocks of a chunk.
        n_slots: chunks that the primary holds.
        n_blocks: blocks of the device; few of them make vLLM preempt.
        two_groups: a full and a sliding-window group, or the full one alone.
        tiered: whether a level lies below the primary.
        n_below: chunks that the level below holds.
        writes: how they get there.
        device_caches: whether vLLM finds prefixes on the device; if not, every hit is ours.
        extra: more settings, as an operator writes them.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        *,
        blocks_per_chunk: int = 1,
        n_slots: int = 12,
        n_blocks: int = 40,
        two_groups: bool = True,
        tiered: bool = True,
        n_below: int = 64,
        writes: str = "cascade",
        device_caches: bool = True,
        **extra: Any,
    ) -> None:
        settings: dict[str, Any] = {
            "spec_name": "TierKVOffloadingSpec",
            "spec_module_path": "tierkv.vllm",
            "cpu_bytes_to_use": n_slots * 4096,
            "blocks_per_chunk": blocks_per_chunk,
            "offload_prompt_only": False,
        } | extra
        if tiered:
            tier = {"type": "ShelfTier", "module_path": __name__, "capacity": n_below * 4096, "enable_kv_events": True}
            settings["secondary_tiers"] = [tier | {"writes": writes}]
        self.config = engine_config(settings, n_blocks, f"rig-{next(self._numbers)}")
        self.config.cache_config.enable_prefix_caching = device_caches
        self.cache_config = cache_config(n_blocks, two_groups=two_groups)
        self.weights = 0
        self.blocks_per_chunk = blocks_per_chunk
        self.n_verified = 0
        ManualLoop.current = None
        init_none_hash(sha256)
        scheduler_block, self.hash_block = resolve_kv_cache_block_sizes(self.cache_config, self.config)
        self._hasher = get_request_block_hasher(self.hash_block, sha256)
        self._start_worker(n_blocks)
        with mock.patch.object(_assembly, "MoverLoop", ManualLoop):
            self.scheduler = Scheduler(
                self.config, self.cache_config, StructuredOutputManager(self.config), scheduler_block, self.hash_block
            )
        connector = self.scheduler.connector
        assert connector is not None
        self.half: Any = connector.connector_scheduler
        self.manager: Any = self.half.manager
        self.told: dict[int, set[bytes]] = {}
        self._watch_events()
        self.pump()

    def _start_worker(self, n_blocks: int) -> None:
        page = BLOCK * TOKEN_NBYTES
        self.memory = torch.zeros((n_blocks, 1, BLOCK, TOKEN_NBYTES), dtype=torch.int8)
        self.bytes = self.memory.view(n_blocks, page).numpy().view("uint8")
        with (
            set_current_vllm_config(self.config),
            mock.patch.object(tier, "open_runtime", side_effect=lambda _device: ManualRuntime()),
            mock.patch.object(worker, "identity_digest", return_value=bytes(32)),
        ):
            self.worker: Any = KVConnectorFactory.create_connector(
                self.config, KVConnectorRole.WORKER, self.cache_config
            )
            self.worker.register_kv_caches({g.layer_names[0]: self.memory for g in self.cache_config.kv_cache_groups})
        self.runtime = ManualRuntime.current

    def _watch_events(self) -> None:
        """Events of each level and key alternate; a set made of them is the index at rest."""
        hierarchy = self.manager.hierarchy
        take = hierarchy.take_events

        def watched() -> list[Any]:
            events = take()
            for event in events:
                known = self.told.setdefault(event.level, set())
                if event.kind.value == "stored":
                    assert event.key not in known, "stored twice"
                    known.add(event.key)
                else:
                    assert event.key in known, "removed, but never stored"
                    known.remove(event.key)
            return events

        hierarchy.take_events = watched

    # -- requests -----------------------------------------------------------------------------------------------

    def add(self, req_id: str, prompt: list[int], n_new: int, **params: Any) -> Request:
        sampling = SamplingParams(max_tokens=n_new, ignore_eos=True)
        sampling.extra_args = {"kv_transfer_params": params} if params else None
        request = Request(req_id, prompt, sampling, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def abort(self, req_id: str) -> None:
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def free_id(self, req_id: str) -> bool:
        """Whether vLLM has forgotten a request id, so that it may come again."""
        known = (self.scheduler.requests, self.half._req_status, self.scheduler.finished_req_ids)
        return not any(req_id in ids for ids in known)

    # -- steps --------------------------------------------------------------------------------------------------

    def step(self) -> int:
        """One engine step; the number of tokens that were computed."""
        output = self.scheduler.schedule()
        meta = output.kv_connector_metadata
        assert meta is not None
        self.worker.bind_connector_metadata(meta)
        self.worker.handle_preemptions(meta)
        sampled = [self._compute(req_id, n) for req_id, n in output.num_scheduled_tokens.items()]
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        sending, receiving = self.worker.get_finished(output.finished_req_ids)
        told = KVConnectorOutput(
            finished_sending=sending or None,
            finished_recving=receiving or None,
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        req_ids = list(output.num_scheduled_tokens)
        runner = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            sampled_token_ids=sampled,
            kv_connector_output=told,
        )
        self.scheduler.update_from_output(output, runner)
        return output.total_num_scheduled_tokens

    def _compute(self, req_id: str, n_tokens: int) -> list[int]:
        request = self.scheduler.requests[req_id]
        start = request.num_computed_tokens - n_tokens
        tokens = list(request.all_token_ids)
        tables = self.scheduler.kv_cache_manager.get_block_ids(req_id)
        for group, table in enumerate(tables):
            first = 0 if group == 0 else max(0, start - (WINDOW - 1))
            for position in range(first, start):
                assert self._at(table, position) == self._bytes_of(tokens, position, group), (
                    f"{req_id}: wrong bytes at token {position} of {start} in group {group}"
                )
                self.n_verified += 1
            for position in range(start, start + n_tokens):
                self._put(table, position, self._bytes_of(tokens, position, group))
        if start + n_tokens < len(tokens):
            return []
        return [int.from_bytes(self._bytes_of(tokens, len(tokens) - 1, 0)[:4], "big") % VOCABULARY]

    def _at(self, table: list[int], position: int) -> bytes:
        block, at = table[position // BLOCK], position % BLOCK * TOKEN_NBYTES
        assert block, "attention reads no null block"
        return self.bytes[block, at : at + TOKEN_NBYTES].tobytes()

    def _put(self, table: list[int], position: int, data: bytes) -> None:
        block, at = table[position // BLOCK], position % BLOCK * TOKEN_NBYTES
        if block:
            self.bytes[block, at : at + TOKEN_NBYTES] = list(data)

    def _bytes_of(self, tokens: Iterable[int], position: int, group: int) -> bytes:
        prefix = bytes(itertools.islice(tokens, position + 1))
        return hashlib.blake2b(prefix, digest_size=TOKEN_NBYTES, salt=bytes([self.weights % 256, group])).digest()

    def pump(self) -> None:
        if ManualLoop.current is not None:
            ManualLoop.current.pump()

    def settle(self, n_steps: int = 400) -> None:
        """Run everything to its end."""
        for _ in range(n_steps):
            self.runtime.wait()
            self.pump()
            self.step()
            if not self.scheduler.requests and not self.half._jobs and not self.manager.has_pending_work():
                break
        else:
            raise AssertionError(f"still busy: {list(self.scheduler.requests.values())}")
        for _ in range(50):  # what waits for room below takes a hook for each eviction
            self.pump()
            self.step()
            if self.manager.hierarchy.at_rest:
                break

    def reset(self) -> None:
        """As after new weights. Where loads are under way vLLM cannot preempt: then the weights stay the same."""
        if self.half._current_batch_jobs_to_flush:
            return  # vLLM asserts that there is a step between two resets
        loading = any(not job.is_store for job in self.half._jobs.values())
        waiting = any(r.status is RequestStatus.WAITING_FOR_REMOTE_KVS for r in self.scheduler.requests.values())
        if loading or waiting:
            self.half.reset_cache()
            return
        self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        self.weights += 1

    def check(self) -> None:
        self.manager.hierarchy.check()

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()
