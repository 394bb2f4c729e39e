"""The runtime for Ascend NPUs: torch's generic streams and events over torch_npu, imported when one is opened.

Copies go by vLLM Ascend's batched operator where it is loaded, else by ``torch._foreach_copy_``, which torch_npu hands
to CANN's batched copy. Never run on an NPU by us; ``pytest -m npu`` runs the contract suite where there is one.
"""

from __future__ import annotations

import importlib
import logging
from contextlib import AbstractContextManager
from typing import Any

import torch

from tierkv._extras import missing
from tierkv.device._npu_queue import NpuEvent, NpuStream, Watch, new_event, new_stream, using
from tierkv.device._torch import CopyWay, TorchRuntime, descriptors
from tierkv.device.runtime import CopyBatch, Direction, Memory
from tierkv.errors import TierError

logger = logging.getLogger(__name__)

_H2D, _D2H = 0, 1
_REGISTER_PINNED = 0x10000000
_LINEAR_FORMATS = frozenset({-1, 0, 2, 30})
"""Undefined, NCHW, ND, NCDHW: elements lie in the order of their indices. Others are tiled."""


class NpuRuntime(TorchRuntime):
    """One NPU. Raises TierError if torch_npu is missing, cannot be loaded, or sees none.

    After an error it looks whether the device still does anything; if not, all that follows raises DeviceLostError.
    """

    name = "npu"

    def __init__(self, device: Any) -> None:
        try:
            self._npu: Any = importlib.import_module("torch_npu").npu
        except ModuleNotFoundError as error:
            raise TierError("device", f"{device} needs {missing(error)}") from error
        except (ImportError, OSError) as error:
            raise TierError("device", f"{device}: torch_npu cannot be loaded: {error}") from error
        if not self._npu.is_available():
            raise TierError("device", f"{device}: torch_npu sees no NPU")
        self._watch = Watch(torch.device(device))
        super().__init__(device)

    def new_stream(self) -> NpuStream:
        return new_stream(self.device, self._watch)

    def new_event(self) -> NpuEvent:
        return new_event(self.device, self._watch)

    def use(self, stream: Any, /) -> AbstractContextManager[Any]:
        return using(stream, self._watch)

    def copy_batch(self, batch: CopyBatch, /) -> Any:
        with self._watch.guard():
            return super().copy_batch(batch)

    def copy_plain(self, batch: CopyBatch, /) -> None:
        with self._watch.guard():
            super().copy_plain(batch)

    def memory(self, tensor: Any) -> Memory:
        npu_format = _format(tensor)
        if npu_format not in _LINEAR_FORMATS:
            raise TierError(
                "device",
                f"a tensor of {list(tensor.shape)} has the tiled NPU format {npu_format}, in which nobody can tell "
                "where the bytes of a block lie; keep the KV cache in ND",
            )
        return super().memory(tensor)

    def batched(self) -> tuple[str, CopyWay] | None:
        """VLLM Ascend's operator. It reads the current stream's handle anew for each call, behind what waits there."""
        try:
            operator = torch.ops._C_ascend.swap_blocks_batch  # noqa: SLF001 - how torch names libraries of operators
        except AttributeError:
            return None

        def copy(batch: CopyBatch) -> Any:
            arrays = descriptors(batch)
            operator(*arrays, _H2D if batch.direction is Direction.LOAD else _D2H)
            return arrays

        return "_C_ascend.swap_blocks_batch", copy

    def pin(self, memory: Memory, /) -> Any:
        """Page-lock and prove it: older stacks lock memory that torch_npu still takes for pageable, and then blocks."""
        try:
            runtime = self._npu.npurt()
            error = runtime.npuHostRegister(memory.address, memory.nbytes, _REGISTER_PINNED)
            if int(error) != 0:
                logger.info("npuHostRegister refused %d bytes: error %s", memory.nbytes, error)
                return None
        except Exception as error:  # noqa: BLE001 - a library without the call, or one that raises: pageable then
            logger.info("npuHostRegister refused %d bytes: %r", memory.nbytes, error)
            return None
        pin = _Registered(runtime, memory.address)
        if self._is_pinned(memory):
            return pin
        logger.info("npuHostRegister took %d bytes, but torch_npu does not see them as pinned", memory.nbytes)
        pin.release()
        return None

    def _is_pinned(self, memory: Memory) -> bool:
        try:
            return bool(self._views.flat(memory).is_pinned())
        except Exception as error:  # noqa: BLE001 - who cannot tell says no
            logger.info("is_pinned raised %r", error)
            return False
        finally:
            self._views.clear()


class _Registered:
    def __init__(self, runtime: Any, address: int) -> None:
        self._runtime = runtime
        self._address = address

    def release(self) -> None:
        error = self._runtime.npuHostUnregister(self._address)
        if int(error) != 0:
            raise TierError("device", f"npuHostUnregister: error {error}")


def _format(tensor: Any) -> int:
    try:
        return int(importlib.import_module("torch_npu").get_npu_format(tensor))
    except (AttributeError, RuntimeError, TypeError):
        return -1  # no such question on this version: a plain storage
