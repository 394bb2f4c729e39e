"""Copies between an accelerator's paged KV tensors and primary slots. Needs torch and numpy.

:mod:`tierkv.device.layout` says where each byte lies; a runtime (:func:`open_runtime`) moves them.
"""

from tierkv.device.engine import CopyDone, CopyJob, CopyRuntime, open_runtime
from tierkv.device.layout import CanonicalPage, DeviceLayout, GroupCopy, PageRef, Run
from tierkv.device.runtime import Direction

__all__ = [
    "CanonicalPage",
    "CopyDone",
    "CopyJob",
    "CopyRuntime",
    "DeviceLayout",
    "Direction",
    "GroupCopy",
    "PageRef",
    "Run",
    "open_runtime",
]
