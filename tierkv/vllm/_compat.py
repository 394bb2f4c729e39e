"""All that differs between vLLM versions (written for 0.30 to 0.33). Nothing else here asks which version it is."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import vllm.config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.kv_offload import base

try:  # 0.32
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # 0.30 and 0.31 never ask for the source of a load
    CacheHitSource = None

try:  # 0.32
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
except ImportError:
    get_offloading_group_ids = None

__all__ = [
    "CacheHitSource",
    "OffloadingConnectorStats",
    "allows",
    "callers_local",
    "current_vllm_config",
    "detector_argument",
    "event",
    "key_positions",
    "offloaded_groups",
    "position_getter",
    "record",
    "recurrent_group_ids",
    "request_state",
    "sliding_group_ids",
    "sliding_groups",
    "software",
]

_State = TypeVar("_State")
_FRAMES = 16
"""Callers to look through for the KV-cache configuration: the manager is made 2 to 6 calls below its owner."""


def request_state(context: Any, kind: type[_State], make: Callable[[Any], _State]) -> _State:
    """The record of ``kind`` that belongs to this request context, made at first use.

    It hangs on the context object, not on the request id: an id can be used again while copies of its first bearer run.
    """
    get = getattr(context, "get_state", None)
    if get is None:
        states = context.__dict__.setdefault("_tierkv_states", {})
        if kind not in states:
            states[kind] = make(context)
        return states[kind]
    state = get(kind)
    if state is None:
        state = make(context)
        context.set_state(state)
    return state


def position_getter(context: Any) -> Callable[[Any], int | None] | None:
    """``key -> end token`` for this request; None in 0.30, which has no positions: then call order has to do."""
    positions = getattr(context, "_offload_key_positions", None)  # whose own method costs a third: see key_positions()
    return positions.get if positions is not None else getattr(context, "get_offload_key_position", None)


def key_positions(context: Any) -> Mapping[Any, int]:
    """``key -> end token`` of all the keys of a request, in the order in which vLLM made them; empty in 0.30.

    Every key gets its position when the request arrives, so this is the request's whole prefix, also the part that vLLM
    does not offer because it is stored already. There is no public way to ask for it.
    """
    return getattr(context, "_offload_key_positions", {})


def allows(context: Any, medium: Any, locality: Any) -> bool:
    """Whether the request lets us load from such a tier (0.30: every request does)."""
    tier_filter = getattr(context, "load_tier_filter", None)
    return tier_filter is None or tier_filter.allows(medium, locality)


def sliding_groups(config: Any) -> frozenset[int]:
    """Groups that are no prefix groups: sliding windows, local attention, recurrent state.

    0.33 says so in ``OffloadingConfig``. Before that nobody tells the manager; but whoever makes it holds the KV-cache
    configuration, so it is looked up there. If that fails, all groups count as prefix groups: nothing wrong is served,
    and a window of such a group may be reserved in part.
    """
    groups = config.groups
    if all(hasattr(group, "sliding_window_size_in_chunks") for group in groups):
        return frozenset(g.group_id for g in groups if g.sliding_window_size_in_chunks is not None)
    known = {group.group_id for group in groups}
    return sliding_group_ids() & known


def sliding_group_ids() -> frozenset[int]:
    """The same for whoever is given no ``OffloadingConfig``, as a ``CachePolicy`` is."""
    kv_cache_config = callers_local("kv_cache_config", "kv_cache_groups")
    groups = enumerate(getattr(kv_cache_config, "kv_cache_groups", ()))
    return frozenset(i for i, group in groups if not isinstance(group.kv_cache_spec, FullAttentionSpec))


def recurrent_group_ids() -> frozenset[int]:
    """Groups that keep a state instead of tokens; empty where no caller holds the KV-cache configuration."""
    kv_cache_config = callers_local("kv_cache_config", "kv_cache_groups")
    groups = enumerate(getattr(kv_cache_config, "kv_cache_groups", ()))
    return frozenset(i for i, group in groups if isinstance(group.kv_cache_spec, MambaSpec))


def callers_local(name: str, attribute: str) -> Any:
    """What some caller up the stack calls ``name`` and has ``attribute``, or None."""
    frame = sys._getframe(1)  # noqa: SLF001 (the documented way to look at callers)
    for _ in range(_FRAMES):
        found = frame.f_locals.get(name)
        if hasattr(found, attribute):
            return found
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def offloaded_groups(kv_cache_config: Any) -> Sequence[int]:
    """Indices of the KV-cache groups that vLLM offloads; before it chose among them, all."""
    if get_offloading_group_ids is None:
        return range(len(kv_cache_config.kv_cache_groups))
    return get_offloading_group_ids(kv_cache_config)


def event(keys: list[Any], medium: Any, *, removed: bool, locality: Any, ownership: str | None) -> Any:
    """An ``OffloadingEvent``."""
    more = {"locality": locality, "ownership": ownership, "removal_expected": True}
    return record(base.OffloadingEvent, keys=keys, medium=medium, removed=removed, **more)


def record(kind: Any, **values: Any) -> Any:
    """A dataclass of vLLM's, with those of these fields that this version has."""
    return kind(**{name: value for name, value in values.items() if name in kind.__dataclass_fields__})


def detector_argument(detector: Any) -> tuple[Any, ...]:
    """What the constructor of a secondary tier takes for backpressure: nothing in 0.30."""
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager  # noqa: PLC0415 (only such a tier needs it)

    known = inspect.signature(SecondaryTierManager.__init__).parameters
    return (detector,) if "backpressure_detector" in known else ()


def software() -> dict[str, Any]:
    """What decides, beside the configuration, how vLLM lays out a KV cache: version, platform, its environment."""
    from vllm.platforms import current_platform  # noqa: PLC0415

    try:
        device = current_platform.get_device_name()
    except Exception:  # noqa: BLE001 - not every platform can say it in every process
        device = None
    environment = {name: os.environ.get(name) for name in ("VLLM_ATTENTION_BACKEND", "VLLM_KV_CACHE_LAYOUT")}
    return {
        "vllm": vllm.__version__,
        "platform": current_platform.device_type,
        "device": device,
        "environment": environment,
    }


def current_vllm_config() -> Any:
    """The ``VllmConfig`` of the engine that starts a worker on this thread, or None: nobody passes it to a worker."""
    get = getattr(vllm.config, "get_current_vllm_config_or_none", None)
    return get() if get is not None else None
