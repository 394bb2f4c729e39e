"""tierkv as vLLM's KV offloading backend. Names are resolved on first use: the plugin must cost nothing to import.

Besides the names of ``__all__`` the text of any eviction order is one: the class that vLLM's ``CachePolicy`` is to be,
since vLLM looks its ``eviction_policy`` up here when ``cache_policy_module_path`` is ``tierkv.vllm``.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierkv.vllm.policy import TierKVCachePolicy
    from tierkv.vllm.secondary import TierKVSecondaryTier
    from tierkv.vllm.spec import CPUOffloadingSpec, TieringOffloadingSpec, TierKVOffloadingSpec

__all__ = [
    "CPUOffloadingSpec",
    "TierKVCachePolicy",
    "TierKVOffloadingSpec",
    "TierKVSecondaryTier",
    "TieringOffloadingSpec",
]

_ROOMS = {"TierKVCachePolicy": "policy", "TierKVSecondaryTier": "secondary"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.{_ROOMS.get(name, 'spec')}"), name)  # loads vLLM and torch
    if name.startswith("_") or (name.isidentifier() and importlib.util.find_spec(f"{__name__}.{name}")):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tierkv.vllm._names import policy_by_text  # noqa: PLC0415

    return policy_by_text(name, __all__)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
