"""tierkv as vLLM's KV offloading backend. Names are resolved on first use: the plugin must cost nothing to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierkv.vllm.spec import CPUOffloadingSpec, TieringOffloadingSpec, TierKVOffloadingSpec

__all__ = ["CPUOffloadingSpec", "TierKVOffloadingSpec", "TieringOffloadingSpec"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tierkv.vllm import spec  # noqa: PLC0415 (imports vLLM and torch)

    return getattr(spec, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
