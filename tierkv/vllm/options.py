"""What an operator wrote into ``kv_connector_extra_config``, checked and frozen. Needs no vLLM and creates nothing.

Every wrong setting ends here, in one sentence, before a pool, a thread or a file exists. vLLM's own keys keep their
names and meaning; ours are added. An unknown key of a tier, or one that looks like a slip of a known key, is an error;
any other unknown key is one warning, because vLLM adds keys with every release.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tierkv.errors import ConfigError, bad_setting, closest, unknown_setting
from tierkv.recorder import DEFAULT_LIMIT_NBYTES, LEAST_LIMIT_NBYTES
from tierkv.tiers.parse import third_party_names
from tierkv.vllm._settings import TOP, Reader, nearest_name

MAX_THREADS = 256
"""Bulk threads a tier may have in each direction: far past what any disk needs, far below what a process can start."""

WRITES = ("cascade", "demote")
DURABILITIES = ("process", "power")
LAYOUTS = ("auto", "slab", "files")
LOCALITIES = ("LOCAL", "REMOTE")
POOLS = ("auto", "private", "shared")
TIER_TYPES = ("fs",)

_CPU_ONLY = "CPUOffloadingSpec has host memory only; TieringOffloadingSpec and TierKVOffloadingSpec have tiers below it"
_QUEUES = "tierkv bounds each tier's queue in bytes and has a breaker of its own"

_TOP_KEYS = frozenset({
    # vLLM's, and vLLM Ascend's former name of the pool's size
    "spec_name", "spec_module_path", "cpu_bytes_to_use", "block_size", "blocks_per_chunk", "eviction_policy",
    "cache_policy_module_path", "store_threshold", "max_tracker_size", "offload_prompt_only", "canonical_layout",
    "self_describing_kv_events", "backpressure", "secondary_tiers", "num_cpu_blocks",
    # ours
    "admission", "lookup_deadline_s", "pool", "record_trace", "record_trace_bytes", "store_reserve",
    "transfer_deadline_s", "ttl_s",
})  # fmt: skip
_IGNORED_KEYS = frozenset({"sync_load_budget_bytes", "tier_poll_interval_s"})
"""Keys of vLLM 0.33 that its connector reads, or that only its own spec needs: no warning."""
_COMMON_TIER_KEYS = frozenset({
    "type", "locality", "enable_kv_events", "backpressure", "capacity", "eviction_policy", "ttl_s", "admission",
    "writes", "queue_bytes", "breaker_cooldown_s",
})  # fmt: skip
FS_KEYS = _COMMON_TIER_KEYS | {
    "root_dir", "n_read_threads", "n_write_threads", "min_free", "durability", "layout", "checksum_key_file",
    "checksum_key_env",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TierOptions:
    """One entry of ``secondary_tiers``. ``extra`` holds what only a third party's tier understands."""

    type: str
    root_dir: str = ""
    n_read_threads: int | None = None
    n_write_threads: int | None = None
    locality: str | None = None
    enable_kv_events: bool = False
    capacity_nbytes: int | None = None
    min_free_nbytes: int | None = None
    eviction_policy: Any = "lru"
    ttl_s: float | None = None
    admission: Any = None
    writes: str = "cascade"
    durability: str = "process"
    layout: str = "auto"
    checksum_key_file: str | None = None
    checksum_key_env: str | None = None
    queue_nbytes: int | None = None
    breaker_cooldown_s: float = 5.0
    """Pause before a tier that failed is tried again."""
    module_path: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    type_key: str = "type"
    """The key under which the type was written, for messages."""

    @property
    def is_foreign(self) -> bool:
        """A third party's tier, by module or by entry point."""
        return self.module_path is not None or self.type not in TIER_TYPES


@dataclass(frozen=True, slots=True)
class Options:
    """All of the adapter's settings. Sizes in bytes, times in seconds."""

    cpu_nbytes: int
    """0 if the pool's size is given in chunks."""
    n_cpu_chunks: int = 0
    """vLLM Ascend's former ``num_cpu_blocks``; 0 if the pool's size is given in bytes."""
    blocks_per_chunk: int | None = None
    tokens_per_chunk: int | None = None
    """vLLM's ``block_size``: the chunk size in tokens."""
    eviction_policy: Any = "lru"
    """Text or nested objects, as :func:`tierkv.policies.parse.parse_policy` reads them; seen to parse."""
    policy_module_path: str | None = None
    ttl_s: float | None = None
    admission: Any = None
    """As :func:`tierkv.admission.parse_admission` reads it; seen to parse."""
    store_threshold: int = 0
    max_tracker_size: int = 64_000
    offload_prompt_only: bool = True
    canonical_layout: bool = False
    self_describing_kv_events: bool = False
    pool: str = "auto"
    store_reserve: int | float | None = None
    """Bytes, or a fraction of the primary below 1; None is the larger of one chunk and 12.5 %."""
    lookup_deadline_s: float = 5.0
    transfer_deadline_s: float = 30.0
    record_trace: str | None = None
    """File to which the requests are recorded; see :class:`~tierkv.recorder.TraceRecorder`."""
    record_trace_nbytes: int = DEFAULT_LIMIT_NBYTES
    tiers: tuple[TierOptions, ...] = ()
    warnings: tuple[str, ...] = ()
    """Sentences for whoever has a logger: keys that nobody reads."""


def parse_options(extra_config: Mapping[str, Any], *, tiered: bool = True) -> Options:
    """Check ``kv_connector_extra_config``.

    Args:
        extra_config: what the operator wrote.
        tiered: False for the CPU-only spec, which reads no ``secondary_tiers`` and says so.

    Raises:
        ConfigError: the first wrong setting, in one sentence.
    """
    warnings = _check_names(extra_config)
    get = Reader(extra_config, TOP)
    _check_chunk_size(extra_config)
    tiers = _parse_tiers(extra_config.get("secondary_tiers"), warnings)
    if tiers and not tiered:
        warnings.append(f"secondary_tiers is ignored: {_CPU_ONLY}")
        tiers = ()
    _ignore_backpressure(get, warnings)
    cpu_nbytes, n_cpu_chunks = _pool_size(get, warnings)
    return Options(
        cpu_nbytes=cpu_nbytes,
        n_cpu_chunks=n_cpu_chunks,
        blocks_per_chunk=get.count("blocks_per_chunk", at_least=1),
        tokens_per_chunk=get.count("block_size", at_least=1),
        eviction_policy=get.order("eviction_policy", module_path=get.text("cache_policy_module_path")),
        policy_module_path=get.text("cache_policy_module_path"),
        ttl_s=get.seconds("ttl_s"),
        admission=get.rule("admission"),
        store_threshold=get.count("store_threshold", at_least=0) or 0,
        max_tracker_size=get.count("max_tracker_size", at_least=1) or 64_000,
        offload_prompt_only=get.flag("offload_prompt_only", default=True),
        canonical_layout=get.flag("canonical_layout", default=False),
        self_describing_kv_events=get.flag("self_describing_kv_events", default=False),
        pool=get.choice("pool", POOLS, default="auto"),
        store_reserve=get.reserve("store_reserve"),
        lookup_deadline_s=_or(get.seconds("lookup_deadline_s"), 5.0),
        transfer_deadline_s=_or(get.seconds("transfer_deadline_s"), 30.0),
        record_trace=get.file("record_trace"),
        record_trace_nbytes=get.size("record_trace_bytes", low=LEAST_LIMIT_NBYTES) or DEFAULT_LIMIT_NBYTES,
        tiers=tiers,
        warnings=tuple(warnings),
    )


def check_capacity(cpu_nbytes: int, stride_nbytes: int, *, n_ranks: int, shared: bool, n_chunks: int = 0) -> int:
    """Chunks that fit into the primary.

    Args:
        cpu_nbytes: ``cpu_bytes_to_use``, the total across all workers.
        n_chunks: as many as that instead, if not 0.
        stride_nbytes: bytes of one slot of the pool.
        n_ranks: workers.
        shared: whether they share one pool; private pools have ``n_ranks`` slots, one each, for every chunk.

    Raises:
        ConfigError: not even one fits.
    """
    per_chunk_nbytes = stride_nbytes * (1 if shared else n_ranks)
    if per_chunk_nbytes <= 0:
        raise ConfigError("the model has no KV cache to offload: vLLM reports 0 bytes a block")
    if n_chunks:
        return n_chunks
    if cpu_nbytes < per_chunk_nbytes:
        raise bad_setting(
            "cpu_bytes_to_use", cpu_nbytes, f"at least {per_chunk_nbytes}, the bytes of one chunk across all workers",
            per_chunk_nbytes,
        )  # fmt: skip
    return cpu_nbytes // per_chunk_nbytes


def check_tier_capacity(index: int, tier: TierOptions, charge_nbytes: int) -> None:
    """Raise ConfigError if the tier could not hold one chunk, which occupies ``charge_nbytes`` there."""
    if tier.capacity_nbytes is not None and tier.capacity_nbytes < charge_nbytes:
        raise bad_setting(
            f"secondary_tiers[{index}].capacity", tier.capacity_nbytes,
            f"at least {charge_nbytes}, the bytes that one chunk occupies there", charge_nbytes,
        )  # fmt: skip


def check_reserve(options: Options, n_slots: int, stride_nbytes: int) -> int:
    """Slots kept free of promotions, so that running requests can store. At least 1 unless the pool has only one."""
    return reserved_slots("store_reserve", options.store_reserve, n_slots, stride_nbytes)


def reserved_slots(option: str, reserve: float | None, n_slots: int, stride_nbytes: int) -> int:
    """Slots that ``reserve`` stands for: bytes, or a fraction of the pool below 1; None is 12.5 %.

    Raises:
        ConfigError: nothing is left for promotions.
    """
    if reserve is None:
        n_reserved = max(1, n_slots // 8)
    elif isinstance(reserve, float):
        n_reserved = int(n_slots * reserve)
    else:
        n_reserved = int(-(-reserve // stride_nbytes))
    if n_reserved >= n_slots > 1:
        raise bad_setting(
            option, reserve, f"less than the primary, which holds {n_slots} chunks of {stride_nbytes} bytes",
            (n_slots - 1) * stride_nbytes,
        )  # fmt: skip
    return min(n_reserved, n_slots - 1)


# -- names ------------------------------------------------------------------------------------------------------------


def _check_names(extra_config: Mapping[str, Any]) -> list[str]:
    """Warnings for unknown keys; ConfigError for one that is within two edits of a known one."""
    unknown = []
    for key in extra_config:
        if key in _TOP_KEYS or key in _IGNORED_KEYS:
            continue
        near = nearest_name(str(key), _TOP_KEYS)
        if near is not None:
            raise bad_setting(f"{TOP} key {key!r}", extra_config[key], "spelled as a known key", near)
        unknown.append(str(key))
    if not unknown:
        return []
    return [f"kv_connector_extra_config has keys that tierkv does not read: {', '.join(sorted(unknown))}"]


# -- tiers ------------------------------------------------------------------------------------------------------------


def _parse_tiers(raw: object, warnings: list[str]) -> tuple[TierOptions, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, (list, tuple)):
        raise bad_setting("secondary_tiers", raw, "a list with one object for each tier")
    tiers = tuple(parse_tier(f"secondary_tiers[{index}]", tier, warnings) for index, tier in enumerate(raw))
    roots: dict[str, int] = {}
    for index, tier in enumerate(tiers):
        if tier.root_dir:
            root = os.path.realpath(tier.root_dir)
            if root in roots:
                allowed = f"another directory than that of secondary_tiers[{roots[root]}]"
                raise bad_setting(f"secondary_tiers[{index}].root_dir", tier.root_dir, allowed, f"{root}-{index}")
            roots[root] = index
    return tiers


def parse_tier(where: str, raw: object, warnings: list[str], *, type_key: str = "type") -> TierOptions:
    """Check one tier's object. ``where`` and ``type_key`` name it and its type in messages; warnings are added.

    Raises:
        ConfigError: the first wrong setting, in one sentence.
    """
    if not isinstance(raw, Mapping):
        raise bad_setting(where, raw, "an object with at least a type", example='{"type": "fs", "root_dir": "..."}')
    kind, module_path = raw.get("type"), raw.get("module_path")
    if not isinstance(kind, str) or not kind:
        raise bad_setting(f"{where}.{type_key}", kind, f"one of {', '.join(TIER_TYPES)}")
    if module_path is not None and (not isinstance(module_path, str) or not module_path):
        allowed = "the import path of a module"
        raise bad_setting(f"{where}.module_path", module_path, allowed, example="my_package.my_module")
    fs = module_path is None and kind in TIER_TYPES
    known = FS_KEYS if fs else _COMMON_TIER_KEYS
    if fs:
        for key in raw:
            if key not in known:
                raise unknown_setting(str(key), where, known)
    elif module_path is None and ":" not in kind and kind not in third_party_names():
        names = [*TIER_TYPES, *third_party_names()]
        allowed = f"one of {', '.join(names)}, module:Class, or a class of the module that module_path names"
        raise bad_setting(f"{where}.{type_key}", kind, allowed, closest(kind, names))
    get = Reader(raw, where)
    _ignore_backpressure(get, warnings)
    extra = {} if fs else {k: v for k, v in raw.items() if k not in known and k != "module_path"}
    return replace(_build_tier(get, kind, module_path, extra, fs=fs), type_key=type_key)


def _build_tier(get: Reader, kind: str, module_path: str | None, extra: Mapping[str, Any], *, fs: bool) -> TierOptions:
    return TierOptions(
        type=kind,
        root_dir=get.directory("root_dir") if fs else "",
        n_read_threads=get.count("n_read_threads", at_least=1, at_most=MAX_THREADS) if fs else None,
        n_write_threads=get.count("n_write_threads", at_least=1, at_most=MAX_THREADS) if fs else None,
        locality=get.choice("locality", LOCALITIES, default=None, upper=True),
        enable_kv_events=get.flag("enable_kv_events", default=False),
        capacity_nbytes=get.size("capacity"),
        min_free_nbytes=get.size("min_free", zero=True) if fs else None,
        eviction_policy=get.order("eviction_policy"),
        ttl_s=get.seconds("ttl_s"),
        admission=get.rule("admission"),
        writes=get.choice("writes", WRITES, default="cascade"),
        durability=get.choice("durability", DURABILITIES, default="process") if fs else "process",
        layout=get.choice("layout", LAYOUTS, default="auto") if fs else "auto",
        checksum_key_file=get.file("checksum_key_file") if fs else None,
        checksum_key_env=get.variable("checksum_key_env") if fs else None,
        queue_nbytes=get.size("queue_bytes"),
        breaker_cooldown_s=_or(get.seconds("breaker_cooldown_s"), 5.0),
        module_path=module_path,
        extra=extra,
    )


def _pool_size(get: Reader, warnings: list[str]) -> tuple[int, int]:
    """Bytes of the primary, or chunks in vLLM Ascend's former way."""
    n_chunks = get.count("num_cpu_blocks", at_least=1) or 0
    cpu_nbytes = get.size("cpu_bytes_to_use", required=not n_chunks)
    if cpu_nbytes is None:
        return 0, n_chunks
    if n_chunks:
        warnings.append("num_cpu_blocks has no effect: cpu_bytes_to_use says how large host memory is")
    return cpu_nbytes, 0


# -- values -----------------------------------------------------------------------------------------------------------


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _check_chunk_size(extra_config: Mapping[str, Any]) -> None:
    """At most one of the two ways to say how large a chunk is."""
    blocks, tokens = extra_config.get("blocks_per_chunk"), extra_config.get("block_size")
    if blocks is not None and tokens is not None:
        allowed = f"left out while block_size is {tokens!r}: a chunk's size is given in blocks or in tokens, not both"
        raise bad_setting("blocks_per_chunk", blocks, allowed, "leave out block_size")


def _ignore_backpressure(get: Reader, warnings: list[str]) -> None:
    if get.raw.get("backpressure") is not None:
        get.mapping("backpressure")
        warnings.append(f"{get.name('backpressure')} has no effect: {_QUEUES}")
