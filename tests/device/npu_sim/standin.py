"""The stand-in under torch_npu in this process, and its knobs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

from tests.device.npu_sim.build import MAIN, RealCannError, StandInFiles, build, torch_npu_package

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""``import torch`` imports an installed torch_npu too unless this is 0: then nothing could be loaded before it."""


class StandIn:
    """A loaded stand-in. Its state is the process's: set knobs back."""

    def __init__(self, files: StandInFiles) -> None:
        libraries = [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in files.libraries]
        self.acl = libraries[0]
        """The simulated AscendCL, for calls that torch_npu has no word for."""
        self.acl.npu_sim_set.argtypes = [ctypes.c_char_p, ctypes.c_long]
        self.acl.npu_sim_count.argtypes = [ctypes.c_char_p]
        self.acl.npu_sim_count.restype = ctypes.c_long
        self.acl.npu_sim_hold.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self.acl.npu_sim_place.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.files = files

    def set(self, **knobs: int) -> None:
        """Turn knobs; src/knobs.h says what there is."""
        for knob, value in knobs.items():
            if self.acl.npu_sim_set(knob.encode(), value):
                raise ValueError(f"npu_sim has no knob {knob!r}")

    def count(self, counter: str) -> int:
        """How often something has happened; src/knobs.h says what is counted."""
        n: int = self.acl.npu_sim_count(counter.encode())
        if n < 0:
            raise ValueError(f"npu_sim has no counter {counter!r}")
        return n

    @contextlib.contextmanager
    def held(self, raw_stream: int) -> Iterator[None]:
        """Meanwhile the stream begins nothing."""
        self.acl.npu_sim_hold(raw_stream, 1)
        try:
            yield
        finally:
            self.acl.npu_sim_hold(raw_stream, 0)

    def settle(self) -> None:
        """Wait until no stream can go on: each is empty, held, or behind one that is."""
        self.acl.npu_sim_settle()

    def place(self, address: int, nbytes: int = 1) -> str:
        """``pageable``, ``locked`` or ``device``."""
        return ("pageable", "locked", "device")[self.acl.npu_sim_place(address, nbytes)]


@functools.cache
def load() -> StandIn:
    """Build the stand-in where that is needed, and load it before torch_npu is. Once a process.

    Raises:
        RealCannError: the real CANN is here, so this is no place for us.
        CannotBuildError: there is no torch-npu here, or no compiler.
    """
    package = torch_npu_package()
    with contextlib.suppress(OSError):
        ctypes.CDLL(MAIN)
        raise RealCannError("CANN is installed: the real one is used, not the stand-in")
    return StandIn(build(package))


def import_torch_npu() -> Any:
    """torch, with torch_npu behind it and its device open. After :func:`load`, or with the real CANN.

    Raises:
        ImportError: no torch_npu, or no CANN under it.
    """
    os.environ[AUTOLOAD] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of things that a machine without an NPU lacks
        torch = importlib.import_module("torch")
        importlib.import_module("torch_npu")
        torch.empty(1, dtype=torch.uint8, device="npu")
    return torch
