"""Puts the scheduler's half together from checked settings: levels, orders, tiers, and who opens what when."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_offload.base import Locality, Medium

from tierkv._level import LevelPlan, Writes
from tierkv._mover import MoverLimits
from tierkv.admission import All, parse_admission
from tierkv.errors import ClosedError, bad_setting
from tierkv.policies import TTL
from tierkv.policies.parse import parse_policy
from tierkv.protocols import Admission, Charging, Clock, EvictionPolicy, Tier
from tierkv.tiers.parse import third_party_tier
from tierkv.types import Chunk, ChunkKey
from tierkv.vllm import _compat
from tierkv.vllm._below import Below, LowerLevel
from tierkv.vllm._books import EpochHierarchy
from tierkv.vllm._identity import passing_keys
from tierkv.vllm._loop import MoverLoop
from tierkv.vllm._meeting import PageDoor, join_pool
from tierkv.vllm._metrics import Metrics
from tierkv.vllm._recording import make_recording
from tierkv.vllm._requests import Group
from tierkv.vllm.manager import TierKVManager
from tierkv.vllm.options import Options, TierOptions

logger = logging.getLogger("vllm.tierkv.spec")

_QUEUE_NBYTES = 1 << 30


# -- the scheduler's half -------------------------------------------------------------------------------------------


def make_manager(spec: Any, clock: Clock = time.monotonic) -> TierKVManager:
    """The manager of a spec, with everything below it."""
    options, config = spec.options, spec.config
    levels = [lower_level(index, tier) for index, tier in enumerate(options.tiers)]
    plans = [primary_plan(spec, clock)]
    for level, tier in zip(levels, options.tiers, strict=True):
        writes = Writes.CASCADE if tier.writes == "cascade" else Writes.DEMOTE
        queue_nbytes = tier.queue_nbytes or _queue_nbytes(spec, level)
        rule = None if tier.admission is None else parse_admission("admission", tier.admission, clock=clock)
        order = make_order(tier.eviction_policy, tier.ttl_s, clock)
        plans.append(level.plan(order, writes, queue_nbytes, rule))
    hierarchy = EpochHierarchy(plans, record_events=config.enable_kv_cache_events)
    for index in range(1, len(plans)):
        hierarchy.set_open(index, is_open=False)
    logger.info(
        "tierkv: %d chunks of %d bytes in host memory (%s pool), below it: %s",
        spec.n_slots,
        spec.geometry.chunk_nbytes,
        "shared" if spec.shared else "private",
        ", ".join(map(_described, levels, options.tiers)) or "nothing",
    )
    groups = groups_of(spec)
    metrics, recording = Metrics(store_threshold=options.store_threshold), make_recording(spec, groups)
    metrics.recorder = None if recording is None else recording.recorder
    return TierKVManager(
        hierarchy,
        groups,
        PageDoor(spec),
        below=Below(levels, _mover_loop(spec, len(plans)), clock) if levels else None,
        store_reserve=spec.store_reserve,
        lookup_deadline_s=options.lookup_deadline_s,
        metrics=metrics,
        recording=recording,
        clock=clock,
    )


def _queue_nbytes(spec: Any, level: LowerLevel) -> int:
    """Bytes that may wait for a tier: what waits is pinned, so at most three quarters of the primary."""
    # A tier that cannot say what it charges before it is open may charge as much as a slot, and not what is in it.
    charge = max(charge_nbytes(level.make_tier(), spec.geometry.chunk_nbytes), spec.geometry.stride_nbytes)
    return min(_QUEUE_NBYTES, max(1, spec.n_slots * 3 // 4) * charge)


def _mover_loop(spec: Any, n_levels: int) -> MoverLoop:
    return MoverLoop(
        n_levels,
        lambda: join_pool(spec),
        chunk_nbytes=spec.geometry.chunk_nbytes,
        stride_nbytes=spec.geometry.stride_nbytes,
        limits=MoverLimits(deadline_s=spec.options.transfer_deadline_s),
        cooldowns_s=cooldowns_of(spec.options.tiers),
    )


def cooldowns_of(tiers: Sequence[TierOptions]) -> list[float]:
    """Each level's pause of its breakers; the primary has none."""
    return [0.0, *(tier.breaker_cooldown_s for tier in tiers)]


def primary_plan(spec: Any, clock: Clock) -> LevelPlan:
    """The primary as the hierarchy is told of it."""
    options, stride_nbytes = spec.options, spec.geometry.stride_nbytes
    # Where leaving takes a copy, the stores' share is kept free beforehand: vLLM offers nothing twice.
    demotes = bool(options.tiers) and options.tiers[0].writes == "demote"
    water = {"high_water": spec.store_reserve / spec.n_slots, "low_water": spec.store_reserve / spec.n_slots}
    return LevelPlan(
        name="primary",
        capacity_nbytes=spec.n_slots * stride_nbytes,
        policy=make_order(options.eviction_policy, options.ttl_s, clock, module_path=options.policy_module_path),
        admission=make_rule(options, clock),
        n_slots=spec.n_slots,
        slot_nbytes=stride_nbytes,
        **(water if demotes else {}),
    )


def _described(level: LowerLevel, options: TierOptions) -> str:
    return f"{level.name} in {options.root_dir}" if options.root_dir else level.name


def groups_of(spec: Any) -> list[Group]:
    """The engine's groups. All have slots of the same size: each block id stands for the same bytes in every group."""
    sliding = _compat.sliding_groups(spec.config)
    return [
        Group(
            group.group_id,
            group.tokens_per_block * spec.blocks_per_chunk,
            group.group_id in sliding,
            spec.geometry.chunk_nbytes,
        )
        for group in spec.config.groups
    ]


class OfferCount:
    """Admits a chunk at its n-th offer (vLLM's ``store_threshold``), counted for the most recently offered keys.

    Args:
        threshold: offers that it takes, this one included.
        n_tracked: keys that are counted (``max_tracker_size``).
    """

    def __init__(self, threshold: int, n_tracked: int) -> None:
        self._threshold = threshold
        self._n_tracked = n_tracked
        self._counts: OrderedDict[ChunkKey, int] = OrderedDict()

    def admits(self, chunk: Chunk) -> bool:
        count = self._counts.pop(chunk.key, 0) + 1
        self._counts[chunk.key] = count
        if len(self._counts) > self._n_tracked:
            self._counts.popitem(last=False)
        return count >= self._threshold


# -- levels below ---------------------------------------------------------------------------------------------------


def make_order(written: object, ttl_s: float | None, clock: Clock, *, module_path: str | None = None) -> EvictionPolicy:
    """An eviction order as an operator wrote it, with its expiry."""
    order = parse_policy("eviction_policy", written, clock=clock, module_path=module_path)
    return order if ttl_s is None else TTL(order, ttl_s, clock)


def make_rule(options: Options, clock: Clock) -> Admission | None:
    """Who may enter the primary: vLLM's ``store_threshold`` and our ``admission``, both if both are given."""
    rules: list[Admission] = []
    if options.store_threshold > 1:
        rules.append(OfferCount(options.store_threshold, options.max_tracker_size))
    if options.admission is not None:
        rules.append(parse_admission("admission", options.admission, clock=clock))
    return All(*rules) if rules else None


def make_tier(index: int, options: TierOptions) -> Tier:
    """A tier of the kind that was asked for. Does no I/O.

    Raises:
        ConfigError: it does not take these settings, or what it needs is not installed.
    """
    if options.is_foreign:
        where = f"secondary_tiers[{index}].{options.type_key}"
        return third_party_tier(where, options.type, options.extra, module_path=options.module_path)
    try:
        from tierkv.tiers.fs import FSTier  # noqa: PLC0415 (needs the fs extra, and nobody else does)
    except ImportError as error:
        allowed = f"a tier whose packages are installed: {error}"
        raise bad_setting(f"secondary_tiers[{index}].{options.type_key}", options.type, allowed) from error
    settings = {
        "capacity": options.capacity_nbytes,
        "min_free": options.min_free_nbytes,
        "n_read_threads": options.n_read_threads,
        "n_write_threads": options.n_write_threads,
        "checksum_key_file": options.checksum_key_file,
        "checksum_key_env": options.checksum_key_env,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    given |= {"durability": options.durability, "layout": options.layout}
    return FSTier(options.root_dir, name="fs", **given)  # type: ignore[arg-type]


def check_secret(index: int, options: TierOptions) -> None:
    """Raise ConfigError if a tier's checksum key is not where it should be: at start, not once the tier opens."""
    if options.checksum_key_file is not None or options.checksum_key_env is not None:
        from tierkv.tiers._fs.secret import SecretSource  # noqa: PLC0415 (needs the fs extra, and nobody else does)

        where = f"secondary_tiers[{index}].checksum_key"
        SecretSource(options.checksum_key_file, options.checksum_key_env).read(f"{where}_file", f"{where}_env")


def charge_nbytes(tier: Tier, chunk_nbytes: int) -> int:
    """Bytes that a chunk occupies in a tier, as far as it can say so before it is open."""
    try:
        return tier.charge_nbytes(chunk_nbytes) if isinstance(tier, Charging) else chunk_nbytes
    except ClosedError:
        return chunk_nbytes


def lower_level(index: int, options: TierOptions) -> LowerLevel:
    """A level that makes its tier anew for each epoch. Raises ConfigError as ``make_tier`` and ``check_secret``."""
    check_secret(index, options)
    algorithm = passing_keys(_compat.callers_local("vllm_config", "model_config") or _compat.current_vllm_config())
    if algorithm is not None:
        logger.warning(
            "prefix_caching_hash_algo is %s and PYTHONHASHSEED is not set, so vLLM's keys are others in each process: "
            "secondary_tiers[%d] fills with chunks that no later start and no other engine finds; set PYTHONHASHSEED "
            "to one number for all engines, or take sha256",
            algorithm,
            index,
        )
    return LowerLevel(
        name=make_tier(index, options).name,
        make_tier=lambda: make_tier(index, options),
        capacity_nbytes=options.capacity_nbytes or 0,
        medium=Medium.STORAGE,
        locality=Locality(options.locality) if options.locality is not None else None,
        emits_events=options.enable_kv_events,
        retry_s=options.breaker_cooldown_s,
    )
