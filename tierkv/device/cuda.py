"""The runtime for CUDA: torch's streams and events, vLLM's batched copy where its operators are loaded.

Never run on a GPU by us; ``pytest -m cuda`` runs the contract suite where there is one.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from tierkv.device._torch import CopyWay, TorchRuntime, descriptors
from tierkv.device.runtime import CopyBatch, Direction, Memory
from tierkv.errors import TierError

logger = logging.getLogger(__name__)


class CudaRuntime(TorchRuntime):
    """One CUDA device. Raises TierError if torch sees none."""

    name = "cuda"

    def __init__(self, device: Any) -> None:
        if not torch.cuda.is_available():
            raise TierError("device", f"{device}: torch {torch.__version__} sees no CUDA device")
        super().__init__(device)

    def batched(self) -> tuple[str, CopyWay] | None:
        """VLLM's operator: one driver call for a whole batch from CUDA 12.8 on."""
        try:
            operator = torch.ops._C_cache_ops.swap_blocks_batch  # noqa: SLF001 - how torch names libraries of operators
        except AttributeError:
            return None

        def copy(batch: CopyBatch) -> Any:
            arrays = descriptors(batch)
            # A load's sources are host slots that no stream writes meanwhile; a store's may still be written.
            operator(*arrays, batch.direction is Direction.LOAD)
            return arrays

        return "_C_cache_ops.swap_blocks_batch", copy

    def pin(self, memory: Memory, /) -> Any:
        runtime = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            error = runtime.cudaHostRegister(memory.address, memory.nbytes, 0)
        if int(error) != 0:
            logger.info("cudaHostRegister refused %d bytes: %s", memory.nbytes, error)
            return None
        return _Registered(memory.address)


class _Registered:
    def __init__(self, address: int) -> None:
        self._address = address

    def release(self) -> None:
        error = torch.cuda.cudart().cudaHostUnregister(self._address)
        if int(error) != 0:
            raise TierError("device", f"cudaHostUnregister: {error}")
