"""vLLM's offloading connector for KV caches of several tensors a layer, as Ascend's attention has them.

The class has vLLM's name: `MultiConnector` looks the connector of its statistics up by the name of its class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector as _VllmConnector

from tierkv.vllm._split_caches import split_caches


class OffloadingConnector(_VllmConnector):  # type: ignore[misc]
    """As vLLM's, but for what :meth:`register_kv_caches` takes."""

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Args: for each layer a tensor, or a tuple or list of them (K and V; a latent part and a rotary one; scales).

        Raises:
            TierError: a layout that cannot be proven right; says which layer, with shapes and strides.
        """
        if all(isinstance(cache, torch.Tensor) for cache in kv_caches.values()):
            super().register_kv_caches(kv_caches)
            return
        half = self.connector_worker
        assert half is not None, "vLLM registers KV caches with workers only"
        half.worker = half.spec.get_worker(split_caches(self._kv_cache_config, kv_caches))
