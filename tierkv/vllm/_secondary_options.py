"""What an operator writes for :class:`~tierkv.vllm.TierKVSecondaryTier`: the keys of our own tiers, and a few more.

Needs no vLLM and creates nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tierkv.errors import bad_setting, unknown_setting
from tierkv.vllm import options
from tierkv.vllm._settings import Reader
from tierkv.vllm.options import TierOptions

OWN_KEYS = frozenset({"tier", "lookup_deadline_s", "store_reserve", "transfer_deadline_s"})
"""Beside those of a tier of ours, less ``type``, which names this class here, and ``writes``, which vLLM decides."""
_VLLM_KEYS = frozenset({"type", "module_path", "backpressure"})
"""vLLM's factory reads these and keeps them from us; its front end does not."""
KEYS = (options.FS_KEYS | OWN_KEYS) - {"type", "writes", "backpressure"}
"""Of a tier of ours."""


class SecondaryOptions(NamedTuple):
    """The settings of one tier, checked. Times in seconds."""

    tier: TierOptions
    lookup_deadline_s: float
    transfer_deadline_s: float
    store_reserve: int | float | None
    """Bytes, or a fraction of vLLM's primary below 1; None is the larger of one chunk and 12.5 %."""


def parse_secondary(where: str, raw: Mapping[str, Any]) -> SecondaryOptions:
    """Check the settings of one tier.

    Args:
        where: names it in messages.
        raw: what the operator wrote, with or without the keys that are vLLM's.

    Raises:
        ConfigError: the first wrong setting, in one sentence.
    """
    get = Reader(raw, where)
    if raw.get("writes") not in (None, "cascade"):
        why = '"cascade" or left out: vLLM\'s manager writes to each tier when a chunk is stored'
        raise bad_setting(f"{where}.writes", raw["writes"], why, "cascade")
    kind = raw.get("tier", "fs")
    if kind in options.TIER_TYPES:
        for key in sorted(raw.keys() - options.FS_KEYS - OWN_KEYS - _VLLM_KEYS):
            raise unknown_setting(str(key), where, KEYS)
    settings = {key: value for key, value in raw.items() if key not in OWN_KEYS | _VLLM_KEYS} | {"type": kind}
    return SecondaryOptions(
        options.parse_tier(where, settings, [], type_key="tier"),
        get.seconds("lookup_deadline_s") or 5.0,
        get.seconds("transfer_deadline_s") or 30.0,
        get.reserve("store_reserve"),
    )
