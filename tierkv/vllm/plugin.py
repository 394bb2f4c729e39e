"""The ``vllm.general_plugins`` entry point: makes tierkv the backend behind vLLM's own spec names.

On NPU and CPU platforms, whose offloading vLLM's specs refuse, ``CPUOffloadingSpec`` and ``TieringOffloadingSpec``
become tierkv's, so that the JSON of vLLM's and vLLM Ascend's guides works unchanged. Elsewhere that takes
``TIERKV_VLLM=1``, and ``TIERKV_VLLM=0`` leaves vLLM alone everywhere. ``TierKVOffloadingSpec`` is always available.

vllm-ascend registers the same two names from a plugin of its own, and the order of plugins is not ours to choose. So
the names are not only registered: each time the factory is asked for a spec, what it knows then is put right first.

On NPU two things more. ``NPUOffloadingSpec``, vLLM Ascend's own name of former days, means ``CPUOffloadingSpec``. And
vLLM's connector takes KV caches of one tensor a layer only, while Ascend has K and V apart: where vllm-ascend has not
put a connector of its own in its place, ours stands there, which takes both.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from tierkv.errors import bad_setting

TAKEN_OVER = ("CPUOffloadingSpec", "TieringOffloadingSpec")
OWN = "TierKVOffloadingSpec"
ALIASES = {"NPUOffloadingSpec": "CPUOffloadingSpec"}
_SPEC_MODULE = "tierkv.vllm.spec"
_CONNECTOR = "OffloadingConnector"


def register() -> None:
    """Called by vLLM in every process, once or more. Idempotent.

    Raises:
        ConfigError: ``TIERKV_VLLM`` is neither 0 nor 1.
    """
    from vllm.logger import init_logger  # noqa: PLC0415 (vLLM is importing us)
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory  # noqa: PLC0415

    names: tuple[str, ...] = (OWN,)
    if wants_names():
        names = (*TAKEN_OVER, OWN)
        if _device_type() == "npu":
            names += tuple(ALIASES)
            _take_split_caches()
    if _hold(OffloadingSpecFactory, names):
        logger = init_logger("vllm.tierkv.plugin")
        logger.info("tierkv provides the offloading specs %s", ", ".join(names))


def wants_names() -> bool:
    """Whether vLLM's own names are to become tierkv's here."""
    choice = os.environ.get("TIERKV_VLLM", "")
    if choice not in {"", "0", "1"}:
        near = {"yes": 1, "true": 1, "on": 1, "no": 0, "false": 0, "off": 0}.get(choice.lower())
        raise bad_setting("environment variable TIERKV_VLLM", choice, "0 or 1, or unset", near)
    if choice:
        return choice == "1"
    return _device_type() in {"cpu", "npu"}


def _device_type() -> str:
    from vllm.platforms import current_platform  # noqa: PLC0415

    return str(current_platform.device_type)


def _take_split_caches() -> None:
    """Let our connector stand in for vLLM's own, and for nobody else's. Idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    registry = KVConnectorFactory._registry  # noqa: SLF001 (there is no public override)
    registered = registry.get(_CONNECTOR)
    if registered is None or hasattr(registered, "tierkv_name"):
        return

    def load() -> type:
        cls = registered()
        if not cls.__module__.startswith("vllm."):
            return cls  # vllm-ascend's
        return getattr(importlib.import_module("tierkv.vllm.connector"), _CONNECTOR)  # type: ignore[no-any-return]

    load.tierkv_name = _CONNECTOR  # type: ignore[attr-defined]
    registry[_CONNECTOR] = load


def _hold(factory: Any, names: tuple[str, ...]) -> bool:
    """Register ``names`` and keep them ours. False if that was done before."""
    asked = factory.get_spec_cls.__func__
    if getattr(asked, "tierkv_names", ()) == names:
        _put_right(factory, names)
        return False
    original = getattr(asked, "tierkv_original", asked)

    @functools.wraps(original)
    def get_spec_cls(cls: Any, extra_config: Mapping[str, Any]) -> Any:
        _put_right(cls, names)
        return original(cls, extra_config)

    get_spec_cls.tierkv_names = names  # type: ignore[attr-defined]
    get_spec_cls.tierkv_original = original  # type: ignore[attr-defined]
    factory.get_spec_cls = classmethod(get_spec_cls)
    _put_right(factory, names)
    return True


def _put_right(factory: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(factory._registry.get(name), "tierkv_name", None) != name:  # noqa: SLF001 (there is no public override)
            factory._registry[name] = _loader(name)  # noqa: SLF001


def _loader(name: str) -> Callable[[], type]:
    def load() -> type:
        return getattr(importlib.import_module(_SPEC_MODULE), ALIASES.get(name, name))  # type: ignore[no-any-return]

    load.tierkv_name = name  # type: ignore[attr-defined]
    return load
