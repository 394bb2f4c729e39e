"""Copies between an accelerator's paged KV tensors and primary slots. Needs torch and numpy.

:mod:`tierkv.device.layout` says where each byte lies; a runtime (:func:`open_runtime`) moves them.
"""

from tierkv.device.layout import CanonicalPage, DeviceLayout, GroupCopy, PageRef, Run
from tierkv.device.runtime import CopyDone, CopyJob, DeviceRuntime, Direction, open_runtime

__all__ = [
    "CanonicalPage",
    "CopyDone",
    "CopyJob",
    "DeviceLayout",
    "DeviceRuntime",
    "Direction",
    "GroupCopy",
    "PageRef",
    "Run",
    "open_runtime",
]
