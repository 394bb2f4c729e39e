"""KV caches of several tensors a layer, as the canonical pages that vLLM's workers are given.

A layer's cache is one or more *parts*: K and V, a latent part and a rotary one, scales, states, perhaps a view of the
whole beside them. A part has rows along its first dimension, and ``n`` rows of each part make one block of the engine,
the same ``n`` for all parts. Which bytes a row has is proven by :func:`~tierkv.device.pages.kv_pages`; that they make
up exactly vLLM's blocks is proven here. What is not is refused: a wrong guess would serve bytes of another block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

from tierkv.device.pages import kv_pages
from tierkv.errors import TierError
from tierkv.vllm import _compat


def split_caches(kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> CanonicalKVCaches:
    """The pages of all layers that vLLM offloads, over their own memory; bytes that layers share are there once.

    Args:
        kv_cache_config: vLLM's ``KVCacheConfig``.
        kv_caches: for each layer a tensor, or a tuple or list of them.

    Raises:
        TierError: names the layer that is not as the module says, with shapes and strides.
    """
    layers: dict[str, Any] = {}
    groups: list[list[str]] = []
    n_blocks = kv_cache_config.num_blocks
    for group_id in _compat.offloaded_groups(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[group_id]
        for layer in group.layer_names:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(layer, group.kv_cache_spec)
            layers[layer] = _blocks(layer, kv_caches[layer], n_blocks, _page_nbytes(spec))
        groups.append(list(group.layer_names))
    pages = kv_pages(layers, groups, n_blocks=n_blocks)
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in pages.tensors],
        [[CanonicalKVCacheRef(ref.tensor, ref.nbytes) for ref in refs] for refs in pages.groups],
    )


def _page_nbytes(spec: Any) -> int:
    """Bytes of a block of one layer, without padding."""
    unpadded = getattr(spec, "unpadded_page_size_bytes", None)
    return int(replace(spec, page_size_padded=None).page_size_bytes if unpadded is None else unpadded)


def _blocks(layer: str, cache: Any, n_blocks: int, page_nbytes: int) -> list[torch.Tensor]:
    """The parts with vLLM's blocks as their first dimension."""
    parts = [cache] if isinstance(cache, torch.Tensor) else list(cache)
    row_nbytes = sum(kv_pages({layer: parts}).page_nbytes)
    n_rows, rest = divmod(page_nbytes, row_nbytes)
    if rest or not n_rows:
        _refuse(layer, parts, f"have rows of {row_nbytes} bytes in all, which do not make up blocks of {page_nbytes}")
    if any(len(part) < n_blocks * n_rows for part in parts):
        _refuse(layer, parts, f"have fewer rows than {n_blocks} blocks of {n_rows}")
    return [part[: n_blocks * n_rows].unflatten(0, (n_blocks, n_rows)) for part in parts]


def _refuse(layer: str, parts: list[torch.Tensor], why: str) -> None:
    told = "; ".join(f"{part.dtype} {list(part.shape)} with strides {list(part.stride())}" for part in parts)
    raise TierError("device", f"layer {layer}: its tensors ({told}) {why}")
