"""A tier of ours as one of the ``secondary_tiers`` of vLLM's own ``TieringOffloadingSpec``.

::

    {"type": "TierKVSecondaryTier", "module_path": "tierkv.vllm", "tier": "fs", "root_dir": "/nvme/kv",
     "capacity": "500GiB", "eviction_policy": "leaf_first > mq"}

vLLM keeps its spec, workers and primary tier; below it are our hierarchy with its one level, our Mover and our tier, as
under our own spec: bounded, verified, restartable. vLLM's manager calls it on the scheduler's thread and is never kept
waiting, but for ``drain_jobs``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from tierkv._entry import PENDING, READY, Entry
from tierkv._level import LevelPlan, Writes
from tierkv._mover import MoverLimits
from tierkv.admission import parse_admission
from tierkv.errors import TierError
from tierkv.policies import FIFO
from tierkv.protocols import Clock
from tierkv.types import Chunk, ChunkKey
from tierkv.vllm import _assembly, _compat, _metrics
from tierkv.vllm._below import Below, LevelState, LowerLevel
from tierkv.vllm._events import as_vllm_events
from tierkv.vllm._gateway import Declining, GatewayHierarchy, Job, Rows, row_of_key
from tierkv.vllm._identity import SchedulerIdentity
from tierkv.vllm._lineage import Lineage
from tierkv.vllm._loop import MoverLoop
from tierkv.vllm._promises import Asker, Promises
from tierkv.vllm._secondary_options import SecondaryOptions, parse_secondary
from tierkv.vllm.options import check_tier_capacity, reserved_slots

logger = logging.getLogger("vllm.tierkv.secondary")

_HIT, _MISS, _RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
_PROBE_S = 0.1
"""How long a request waits for probes in all; after that what is unsure is a miss."""
_QUEUE_NBYTES = 1 << 30
_DRAIN_POLL_S = 0.002
_DRAIN_WARN_S = 10.0


class TierKVSecondaryTier(SecondaryTierManager):  # type: ignore[misc]
    """See the module. vLLM's factory makes it from one entry of ``secondary_tiers``.

    Args:
        offloading_spec: vLLM's spec, for its configuration.
        primary_kv_view: the rows of vLLM's primary.
        tier_type: the name in vLLM's metrics.
        backpressure_detector: vLLM's own, if the entry configures one.
        settings: the other keys of the entry; see the reference page of options.

    Raises:
        ConfigError: a setting is wrong, in one sentence; nothing was created.

    Concurrency: the scheduler's thread.
    """

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        self._index = index = _index_of(offloading_spec, settings)
        options = parse_secondary(f"secondary_tiers[{index}]", settings)
        assert primary_kv_view.strides is not None, "vLLM's rows lie one after the other"
        charge_nbytes = _assembly.charge_nbytes(_assembly.make_tier(index, options.tier), primary_kv_view.strides[0])
        check_tier_capacity(index, options.tier, charge_nbytes)
        super().__init__(offloading_spec, primary_kv_view, tier_type, *_compat.detector_argument(backpressure_detector))
        self._clock: Clock = time.monotonic
        self._label = f"{index + 1}:{tier_type}"
        self._lookup_deadline_s = options.lookup_deadline_s
        self._declining = _rule(options, self._clock)
        self._level = _assembly.lower_level(index, options.tier)
        self.locality = self._level.locality
        self._metrics = _metrics.Metrics()
        self._answered: list[ChunkKey] = []
        """Told as hits in this step: nothing may evict them before vLLM has asked for them."""
        self._probes: dict[ChunkKey, None] = {}
        self._open: dict[Entry, Job] = {}
        self._ended: list[Job] = []
        self._opening_until: float | None = None
        self._rows = Rows(primary_kv_view)
        try:
            self._assemble(offloading_spec, options, charge_nbytes)
        except BaseException:
            self._rows.close()  # else vLLM could not give its memory back
            raise

    def _assemble(self, spec: Any, options: SecondaryOptions, charge_nbytes: int) -> None:
        config, rows = spec.config, self._rows
        self._lineage = Lineage(_compat.sliding_groups(config), rows.stride_nbytes)
        self._identity = SchedulerIdentity(config, rows.stride_nbytes)
        reserve = f"secondary_tiers[{self._index}].store_reserve"
        n_reserved = reserved_slots(reserve, options.store_reserve, rows.n_rows, rows.stride_nbytes)
        self._promises = Promises(rows.n_rows - n_reserved)
        events = _emits(self._level, spec)
        self.hierarchy = GatewayHierarchy(self._plans(options, charge_nbytes), record_events=events)
        self._below = Below([self._level], self._loop(options))
        self.hierarchy.set_open(1, is_open=False)
        self._keep_open()
        where = f"{self._level.name} in {options.tier.root_dir}" if options.tier.root_dir else self._level.name
        logger.info("tierkv: %s below vLLM's primary of %d chunks", where, rows.n_rows)

    def _plans(self, options: SecondaryOptions, charge_nbytes: int) -> list[LevelPlan]:
        rows, tier = self._rows, options.tier
        shadow = LevelPlan(
            name="vLLM's primary",
            capacity_nbytes=rows.n_rows * rows.stride_nbytes,
            policy=FIFO(),
            n_slots=rows.n_rows,
            slot_nbytes=rows.stride_nbytes,
        )
        # What waits is pinned in vLLM's primary: at most three quarters of it.
        waiting_nbytes = max(1, rows.n_rows * 3 // 4) * max(charge_nbytes, rows.stride_nbytes)
        queue_nbytes = tier.queue_nbytes or min(_QUEUE_NBYTES, waiting_nbytes)
        order = _assembly.make_order(tier.eviction_policy, tier.ttl_s, self._clock)
        return [shadow, self._level.plan(order, Writes.CASCADE, queue_nbytes, self._declining)]

    def _loop(self, options: SecondaryOptions) -> MoverLoop:
        return MoverLoop(
            2,
            lambda: self._rows,
            chunk_nbytes=self._rows.stride_nbytes,
            stride_nbytes=self._rows.stride_nbytes,
            limits=MoverLimits(deadline_s=options.transfer_deadline_s),
            cooldowns_s=_assembly.cooldowns_of([options.tier]),
        )

    # -- lookups ------------------------------------------------------------------------------------------------

    def lookup(self, key: ChunkKey, req_context: Any) -> LookupResult:
        """HIT, MISS, or RETRY for a moment: while the tier opens, and while a key that nobody knows is probed for."""
        asker = self._promises.asker(req_context)
        if self.hierarchy.levels[1].readable(key) is not None:
            if not self._promises.may_promise(asker, key):
                return _MISS
            self._promises.promise(req_context, asker, key)
            self.hierarchy.guard((key,))
            self._answered.append(key)
            return _HIT
        now = self._clock()
        if self._below.opening:
            # The first requests after a start wait for the tier, once for all of them.
            if self._opening_until is None:
                self._opening_until = now + self._lookup_deadline_s
            return _RETRY if now < self._opening_until else _MISS
        if self._level.state is LevelState.OPEN and not self.hierarchy.levels[1].plan.settled(key):
            return self._probe(key, asker, now)
        return _MISS

    def _probe(self, key: ChunkKey, asker: Asker, now: float) -> LookupResult:
        if asker.probe_deadline_s is None:
            asker.probe_deadline_s = now + _PROBE_S
        if now >= asker.probe_deadline_s:
            return _MISS
        self._probes[key] = None
        return _RETRY

    # -- jobs ---------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: Any) -> None:
        """Write what the tier lacks and admits; the rest is decided at once."""
        job, chunks, rows = self._begin(job_metadata, is_load=False)
        offer = self.hierarchy.offer(chunks)
        for entry in offer.reserved:
            self._rows.point(entry.slot, rows[entry.key])
            self._open[entry] = job
        job.n_left = len(offer.reserved)
        job.n_bad = len(offer.refused)
        self.hierarchy.commit_store(offer.reserved)
        self._collect(offer.reserved)
        self._end(job)

    def submit_load(self, job_metadata: Any, **_later: Any) -> None:
        """Read into the rows that vLLM has reserved; what is not there any more is a miss from then on."""
        job, chunks, rows = self._begin(job_metadata, is_load=True)
        for chunk in chunks:
            entry = next(iter(self.hierarchy.promote((chunk,))), None)
            if entry is None or entry.state is not PENDING or entry in self._open:
                job.n_bad += 1
                continue
            self._rows.point(entry.slot, rows[chunk.key])
            self._open[entry] = job
            job.n_left += 1
        self._collect()
        self._end(job)

    def _begin(self, given: Any, *, is_load: bool) -> tuple[Job, list[Chunk], dict[ChunkKey, int]]:
        rows = row_of_key(list(given.keys), given.chunk_ids)
        chunks = self._lineage.chunks(rows, given.req_context)
        return Job(given.job_id, is_load=is_load, started_s=self._clock()), chunks, rows

    def _collect(self, idle: Sequence[Entry] = ()) -> None:
        """Take note of copies that have ended, and hand over what follows from them."""
        for entry in self.hierarchy.take_done(idle):
            job = self._open.pop(entry, None)
            if job is not None:
                self._count(job, entry)
                job.n_left -= 1
                self._end(job)
        self._below.send(self.hierarchy.take_transfers())

    def _count(self, job: Job, entry: Entry) -> None:
        key = entry.key
        if job.is_load:
            arrived = entry.stored
        else:
            below = self.hierarchy.levels[1].ledger.get(key)
            arrived = below is not None and below.state is READY
            if not arrived and self._declining is not None and key in self._declining.declined:
                self._declining.declined.discard(key)
                arrived = True
        if arrived:
            job.good.append(key)
        else:
            job.n_bad += 1

    def _end(self, job: Job) -> None:
        if not job.n_left and job not in self._ended:
            self._ended.append(job)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Jobs of which no copy runs any more, whatever became of them."""
        self._keep_open()
        self._below.drain(self.hierarchy)
        self._collect()
        ended, self._ended = self._ended, []
        now = self._clock()
        return [self._result(job, now) for job in ended]

    def _result(self, job: Job, now: float) -> Any:
        partial = job.is_load and job.n_bad and job.good
        return _compat.record(
            JobResult,
            job_id=job.job_id,
            success=not job.n_bad,
            successful_keys=tuple(job.good) if partial else None,
            transfer_time=now - job.started_s,
        )

    def drain_jobs(self) -> None:
        """A reset: vLLM forgets its cache, since its weights may change: let every copy end, and begin a new epoch.

        Blocks as long as a copy touches vLLM's memory, which nobody can interrupt, and says so.
        """
        self._promises.clear()
        self._unguard()
        self._below.new_epoch(self.hierarchy)
        warn_at = self._clock() + _DRAIN_WARN_S
        while self._open:
            self._below.drain(self.hierarchy)
            self._collect()
            if self._clock() >= warn_at:
                warn_at += _DRAIN_WARN_S
                logger.warning("A reset waits for %d copies of tier %s", len(self._open), self._level.name)
            time.sleep(_DRAIN_POLL_S)
        self._keep_open()

    # -- requests and steps ---------------------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:  # noqa: ARG002
        """Nothing is kept until the request asks for something."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """One use, of all its chunks that lie here: vLLM reads hot ones from its primary and never asks us."""
        self._promises.settle((req_context.req_id,))
        self._use(_compat.key_positions(req_context), req_context)

    def touch(self, keys: Iterable[ChunkKey], req_context: Any) -> None:
        """The same in 0.30, which says so itself and tells no request's keys; later versions never call it."""
        if not _compat.key_positions(req_context):
            self._use(keys, req_context)

    def _use(self, keys: Iterable[ChunkKey], req_context: Any) -> None:
        ledger = self.hierarchy.levels[1].ledger
        chunks = self._lineage.chunks(keys, req_context)
        used = [(entry, chunk) for chunk in chunks if (entry := ledger.get(chunk.key)) is not None]
        if used:
            ledger.access(used)

    def on_schedule_end(self, context: Any) -> None:
        """By now vLLM has asked for what it was promised in this step."""
        self._unguard()
        self._promises.settle(context.new_req_ids)
        self._promises.settle(context.preempted_req_ids)
        self._keep_open()
        self._below.send(self.hierarchy.take_transfers(), tuple(self._probes))
        self._probes.clear()

    def _unguard(self) -> None:
        self.hierarchy.unguard(self._answered)
        self._answered.clear()

    def _keep_open(self) -> None:
        self._below.keep_open(self.hierarchy, self._identity)

    # -- what is told -------------------------------------------------------------------------------------------

    def take_events(self) -> Iterable[Any]:
        """Stored and removed chunks of the tier, if the entry has ``enable_kv_events``."""
        return as_vllm_events([event for event in self.hierarchy.take_events() if event.level], self._below)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Called in the front end, which has no tier: wrong settings end here already."""
        parse_secondary("secondary_tiers", extra_config)
        return _metrics.level_definitions()

    def get_stats(self) -> Any:
        return self._metrics.take_level(self.hierarchy.levels[1], self._label)

    def shutdown(self) -> None:
        """Save the order, close the tier, end the thread. Idempotent.

        Raises:
            TierError: a copy hangs and may still touch vLLM's memory, which vLLM then keeps.
        """
        if not self._below.close(self.hierarchy):
            raise TierError(self._level.name, "a copy did not end within its time; vLLM's pool must outlive it")
        self._rows.close()


def _rule(options: SecondaryOptions, clock: Clock) -> Declining | None:
    if options.tier.admission is None:
        return None
    return Declining(parse_admission("admission", options.tier.admission, clock=clock))


def _emits(level: LowerLevel, spec: Any) -> bool:
    if level.emits_events and not spec.kv_events_config.enable_kv_cache_events:
        logger.warning("enable_kv_events has no effect: KV cache events are off in the engine")
    return bool(level.emits_events and spec.kv_events_config.enable_kv_cache_events)


def _index_of(spec: Any, settings: Mapping[str, Any]) -> int:
    """Which entry of ``secondary_tiers`` these settings are: vLLM tells a tier everything but that."""
    keys_of_vllm = {"type", "module_path", "backpressure"}
    entries: Sequence[Mapping[str, Any]] = getattr(spec, "secondary_tier_configs", ())
    for index, entry in enumerate(entries):
        if {key: value for key, value in entry.items() if key not in keys_of_vllm} == settings:
            return index
    return 0
