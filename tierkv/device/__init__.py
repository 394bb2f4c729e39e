"""Copies between an accelerator's paged KV tensors and primary slots.

Needs numpy, and torch for torch's devices: the extra ``torch`` brings both, the extra ``npu`` torch-npu as well.

:class:`DeviceTier` binds tensors to slots. Inside, :mod:`tierkv.device.layout` says where each byte lies,
:mod:`tierkv.device.engine` orders the copies, and a :class:`DeviceRuntime` is what one kind of device offers.
"""

from tierkv.device import _needs  # noqa: F401 - before all others
from tierkv.device.engine import CopyDone, CopyJob, EngineStats, TransferEngine
from tierkv.device.layout import CanonicalPage, DeviceLayout, GroupCopy, PageRef, Run
from tierkv.device.runtime import CopyBatch, DeviceRuntime, Direction, HostKind, Memory, open_runtime
from tierkv.device.slots import HostSlots
from tierkv.device.tier import DeviceTier

__all__ = [
    "CanonicalPage",
    "CopyBatch",
    "CopyDone",
    "CopyJob",
    "DeviceLayout",
    "DeviceRuntime",
    "DeviceTier",
    "Direction",
    "EngineStats",
    "GroupCopy",
    "HostKind",
    "HostSlots",
    "Memory",
    "PageRef",
    "Run",
    "TransferEngine",
    "open_runtime",
]
