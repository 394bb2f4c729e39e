"""KV caches of several tensors a layer, as the canonical pages that vLLM's workers are given.

A layer's cache is one or more *parts*: K and V, a latent part and a rotary one, scales, states. A part has rows along
its first dimension, and ``n`` rows of each part make one block of the engine, the same ``n`` for all parts. Nothing is
copied: each part becomes ``int8 [n_blocks, page_nbytes]`` over its own memory. A layout that is not proven to be such
is refused, since a wrong guess would serve bytes of another block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

from tierkv.errors import TierError
from tierkv.vllm import _compat


class _Part(NamedTuple):
    """Rows of one tensor, in bytes of its storage."""

    tensor: Any
    storage: int
    start: int
    row_nbytes: int
    stride_nbytes: int

    @property
    def stop(self) -> int:
        """End of the first row."""
        return self.start + self.row_nbytes

    @property
    def end(self) -> int:
        """End of the last row."""
        return self.stop + (len(self.tensor) - 1) * self.stride_nbytes

    def holds(self, other: _Part) -> bool:
        """Whether each row of ``other`` lies within the same row of this one."""
        return (
            self.storage == other.storage
            and self.stride_nbytes == other.stride_nbytes
            and self.start <= other.start
            and other.stop <= self.stop
            and len(self.tensor) >= len(other.tensor)
        )

    def apart(self, other: _Part) -> bool:
        """Whether no byte belongs to both."""
        if self.storage != other.storage or self.end <= other.start or other.end <= self.start:
            return True
        low, high = sorted((self, other), key=lambda part: part.start)
        # Interleaved rows: one's lies in the gap behind the other's, row for row.
        return (
            low.stride_nbytes == high.stride_nbytes
            and low.stop <= high.start < high.stop <= low.start + low.stride_nbytes
        )


def split_caches(kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> CanonicalKVCaches:
    """The pages of all layers that vLLM offloads, layers that share memory once.

    Args:
        kv_cache_config: vLLM's ``KVCacheConfig``.
        kv_caches: for each layer a tensor, or a tuple or list of them.

    Raises:
        TierError: names the layer that is not as the module says, with shapes and strides.
    """
    tensors: list[CanonicalKVCacheTensor] = []
    known: dict[tuple[int, int, int], int] = {}
    groups: list[list[CanonicalKVCacheRef]] = []
    for group_id in _compat.offloaded_groups(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[group_id]
        refs: list[CanonicalKVCacheRef] = []
        for layer in group.layer_names:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(layer, group.kv_cache_spec)
            for pages in _pages(layer, kv_caches[layer], kv_cache_config.num_blocks, _page_nbytes(spec)):
                key = (pages.data_ptr(), pages.stride(0), pages.shape[1])
                if key not in known:
                    known[key] = len(tensors)
                    tensors.append(CanonicalKVCacheTensor(pages, pages.shape[1]))
                refs.append(CanonicalKVCacheRef(known[key], pages.shape[1]))
        groups.append(refs)
    return CanonicalKVCaches(tensors, groups)


def _page_nbytes(spec: Any) -> int:
    """Bytes of a block of one layer, without padding."""
    unpadded = getattr(spec, "unpadded_page_size_bytes", None)
    return int(replace(spec, page_size_padded=None).page_size_bytes if unpadded is None else unpadded)


def _pages(layer: str, cache: Any, n_blocks: int, page_nbytes: int) -> list[Any]:
    """``int8 [n_blocks, n bytes]`` of each part that is needed to have all bytes once."""
    tensors = [cache] if isinstance(cache, torch.Tensor) else list(cache)
    told = _told(layer, tensors)
    parts = [_part(tensor, told) for tensor in tensors]
    # Ascend also hands over views of the whole beside its parts: what another part holds is in it already.
    whole = [
        part
        for i, part in enumerate(parts)
        if not any(other.holds(part) and (j < i or not part.holds(other)) for j, other in enumerate(parts) if j != i)
    ]
    if not all(part.apart(other) for i, part in enumerate(whole) for other in whole[:i]):
        raise TierError("device", f"{told} has parts that overlap")
    row_nbytes = sum(part.row_nbytes for part in whole)
    n_rows, rest = divmod(page_nbytes, row_nbytes) if row_nbytes else (0, 0)
    if rest or not n_rows:
        raise TierError("device", f"{told} does not make up blocks of {page_nbytes} bytes")
    for part in whole:
        if len(part.tensor) < n_blocks * n_rows:
            raise TierError("device", f"{told} has fewer rows than {n_blocks} blocks of {n_rows} rows")
        if n_rows > 1 and part.stride_nbytes != part.row_nbytes:
            raise TierError("device", f"{told} has gaps between the {n_rows} rows of a block")
    return [_view(part, n_blocks, n_rows) for part in whole]


def _part(tensor: Any, told: str) -> _Part:
    if not isinstance(tensor, torch.Tensor) or tensor.ndim < 1 or not tensor.numel():
        raise TierError("device", f"{told} has a part that is no tensor with rows")
    row = tensor[0]
    if not row.is_contiguous():
        raise TierError("device", f"{told} has rows that are not in one piece")
    size = tensor.element_size()
    row_nbytes = row.numel() * size
    stride_nbytes = tensor.stride(0) * size if len(tensor) > 1 else row_nbytes
    if stride_nbytes < row_nbytes:
        raise TierError("device", f"{told} has rows that overlap")
    storage = tensor.untyped_storage().data_ptr()
    return _Part(tensor, storage, tensor.data_ptr() - storage, row_nbytes, stride_nbytes)


def _view(part: _Part, n_blocks: int, n_rows: int) -> Any:
    memory = torch.empty(0, dtype=torch.int8, device=part.tensor.device).set_(part.tensor.untyped_storage())
    return memory.as_strided((n_blocks, part.row_nbytes * n_rows), (part.stride_nbytes * n_rows, 1), part.start)


def _told(layer: str, tensors: Sequence[Any]) -> str:
    shown = (
        f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
        if isinstance(tensor, torch.Tensor)
        else type(tensor).__name__
        for tensor in tensors
    )
    return f"the KV cache of layer {layer} ({'; '.join(shown) or 'nothing'})"
