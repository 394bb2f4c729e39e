"""What stands for an Ascend NPU where there is none: the platform's name, and what vllm-ascend's plugin registers.

``register_connector`` does to vLLM's two factories what that plugin does: it takes the names out and puts classes of
its own in. They are vLLM's, renamed, so that a test can tell whose was made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any
from unittest import mock

import vllm.platforms
import vllm.plugins
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

OURS = EntryPoint("tierkv", "tierkv.vllm.plugin:register", vllm.plugins.DEFAULT_PLUGINS_GROUP)
THEIRS = EntryPoint("ascend_kv_connector", f"{__name__}:register_connector", vllm.plugins.DEFAULT_PLUGINS_GROUP)


class NPUPlatform(CpuPlatform):
    """A CPU that says it is an NPU."""

    device_type = "npu"
    device_name = "npu"


class NPUOffloadingSpec(CPUOffloadingSpec):
    """vllm-ascend's, as far as the factory can tell."""


class NPUTieringOffloadingSpec(TieringOffloadingSpec):
    """The same below host memory."""


class AscendOffloadingConnector(OffloadingConnector):
    """vllm-ascend's connector, which takes K and V apart."""


def register_connector() -> None:
    """As the entry point of vllm-ascend. May run more than once."""
    registered = OffloadingSpecFactory._registry
    for name, class_name in (
        ("CPUOffloadingSpec", "NPUOffloadingSpec"),
        ("TieringOffloadingSpec", "NPUTieringOffloadingSpec"),
    ):
        registered.pop(name, None)
        OffloadingSpecFactory.register_spec(name, __name__, class_name)
    KVConnectorFactory._registry.pop("OffloadingConnector", None)
    KVConnectorFactory.register_connector("OffloadingConnector", __name__, "AscendOffloadingConnector")


@contextmanager
def npu_platform() -> Iterator[None]:
    """Factories as vLLM makes them, on a platform that says it is an NPU; put back afterwards."""
    ask = OffloadingSpecFactory.get_spec_cls.__func__
    specs = {
        name: loader for name, loader in OffloadingSpecFactory._registry.items() if not hasattr(loader, "tierkv_name")
    }
    connectors = dict(KVConnectorFactory._registry)
    with (
        mock.patch.object(vllm.platforms, "_current_platform", NPUPlatform()),
        mock.patch.object(OffloadingSpecFactory, "_registry", specs),
        mock.patch.object(OffloadingSpecFactory, "get_spec_cls", classmethod(getattr(ask, "tierkv_original", ask))),
        mock.patch.object(KVConnectorFactory, "_registry", connectors),
        mock.patch.object(vllm.plugins, "plugins_loaded", new=False),
        mock.patch.dict("os.environ"),
    ):
        for name, room in (("CPUOffloadingSpec", "cpu"), ("TieringOffloadingSpec", "tiering")):
            if name not in specs:
                OffloadingSpecFactory.register_spec(name, f"vllm.v1.kv_offload.{room}.spec", name)
        yield


def load_plugins(*plugins: EntryPoint) -> None:
    """Through vLLM's own loader, in this order, as each of an engine's processes does."""
    known = EntryPoints(plugins)

    def entry_points(**which: Any) -> EntryPoints:
        return known.select(**which)

    vllm.plugins.plugins_loaded = False
    with mock.patch("importlib.metadata.entry_points", entry_points):
        vllm.plugins.load_general_plugins()
