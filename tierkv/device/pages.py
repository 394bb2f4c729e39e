"""A server's KV tensors as pages: ``int8 [n_blocks, page_nbytes]`` views of the same memory, never a copy.

Servers hand over many shapes: one tensor a layer; K, V and scales apart; parts of different widths; two views of the
same bytes; pages with padding behind them; layers of several groups in one buffer. What counts is one thing: which
bytes of the storage are block ``i``. So each tensor becomes intervals of bytes within a row, rows being as far apart as
its blocks; intervals that overlap are merged, and each one that remains is a page view. What that does not describe
exactly, or would make two blocks share a byte, is refused: a copy that is wrong by one byte shows as wrong text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, NamedTuple, NoReturn

import torch

from tierkv.device.layout import PageRef
from tierkv.errors import TierError

_MAX_PIECES = 256
"""Byte runs of one block of one tensor. More would mean descriptors by the hundred thousand in each batch."""


@dataclass(frozen=True, slots=True)
class KVPages:
    """What a device tier copies."""

    tensors: tuple[torch.Tensor, ...]
    """Each ``int8 [n_blocks, page_nbytes]`` over the server's memory, rows at any stride."""
    groups: tuple[tuple[PageRef, ...], ...]
    """The tensors that each group uses."""
    n_blocks: int

    @property
    def page_nbytes(self) -> tuple[int, ...]:
        return tuple(int(tensor.shape[1]) for tensor in self.tensors)


class _View(NamedTuple):
    """One tensor that the server gave."""

    layer: str
    group: int
    tensor: torch.Tensor
    base: int
    """Bytes from the storage's beginning to its first."""
    row: int
    """Bytes from one block to the next."""
    pieces: tuple[tuple[int, int], ...]
    """(start, stop) of its bytes within a row, from ``base`` on, ascending and apart."""

    @property
    def end(self) -> int:
        return self.pieces[-1][1]


def kv_pages(
    kv_caches: Mapping[str, Any] | Sequence[Any],
    groups: Sequence[Sequence[str]] | None = None,
    *,
    n_blocks: int | None = None,
) -> KVPages:
    """See KV tensors as pages.

    Args:
        kv_caches: by layer name (or in order, layers then being called "0", "1", ...) a tensor, or a tuple or list of
            tensors, also nested: K and V, scales, latent parts, states. Each has the block as its first dimension.
        groups: the layer names of each group; None if all layers are one.
        n_blocks: how many blocks the server uses, where tensors have more; None takes the least that any tensor has.

    Raises:
        TierError: a tensor cannot be seen as pages without a copy; says which, with its shape and strides.
    """
    layers = dict(kv_caches) if isinstance(kv_caches, Mapping) else {str(i): kv for i, kv in enumerate(kv_caches)}
    of_groups = [list(layers)] if groups is None else [list(names) for names in groups]
    _check_names(layers, of_groups)
    found = [
        (name, group, tensor)
        for group, names in enumerate(of_groups)
        for name in names
        for tensor in _tensors(name, layers[name])
    ]
    if not found:
        raise TierError("device", "no KV tensors were given")
    n = _n_blocks(found, n_blocks)
    views = [_view(name, group, tensor, n) for name, group, tensor in found]
    tensors: list[torch.Tensor] = []
    refs: list[list[PageRef]] = [[] for _ in of_groups]
    for rows in _rows(views, n):
        for start, stop, used_by in _cut(rows):
            for group in used_by:
                refs[group].append(PageRef(len(tensors), stop - start))
            tensors.append(_bytes_of(rows[0].tensor, rows[0].base + start, n, stop - start, rows[0].row))
    return KVPages(tuple(tensors), tuple(map(tuple, refs)), n)


def _check_names(layers: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> None:
    named = [name for group in groups for name in group]
    if unknown := [name for name in named if name not in layers]:
        raise TierError("device", f"groups name the layers {unknown}, which have no KV cache")
    if unused := [name for name in layers if name not in named]:
        raise TierError("device", f"the layers {unused} belong to no group")


def _tensors(layer: str, given: Any) -> Iterable[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (tuple, list)) and given:
        for part in given:
            yield from _tensors(layer, part)
    else:
        raise TierError(
            "device", f"layer {layer}: {type(given).__name__} is neither a tensor nor a tuple or list of them"
        )


def _n_blocks(found: Sequence[tuple[str, int, torch.Tensor]], wanted: int | None) -> int:
    devices = {str(tensor.device) for _, _, tensor in found}
    if len(devices) > 1:
        raise TierError("device", f"KV tensors lie on several devices: {', '.join(sorted(devices))}")
    for layer, _, tensor in found:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            _refuse(layer, tensor, "is no plain strided tensor")
        if tensor.ndim < 2 or not tensor.numel():
            _refuse(layer, tensor, "is not [n_blocks, ...] with bytes in each block")
        if wanted is not None and tensor.shape[0] < wanted:
            hint = "; K and V stacked in front are passed as tensor.unbind(0)" if tensor.shape[0] == 2 else ""
            _refuse(
                layer, tensor, f"has {tensor.shape[0]} blocks in its first dimension, but {wanted} are in use{hint}"
            )
    return min(int(tensor.shape[0]) for _, _, tensor in found) if wanted is None else wanted


def _view(layer: str, group: int, tensor: torch.Tensor, n_blocks: int) -> _View:
    item = tensor.element_size()
    row = tensor.stride(0) * item
    pieces = _pieces(layer, tensor)
    if n_blocks > 1 and row < pieces[-1][1]:
        _refuse(layer, tensor, f"has blocks {row} bytes apart that span {pieces[-1][1]}: they share bytes")
    return _View(layer, group, tensor, tensor.storage_offset() * item, max(row, pieces[-1][1]), pieces)


def _pieces(layer: str, tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """The bytes of one block, in whatever order its dimensions lie."""
    run = tensor.element_size()
    outer: list[tuple[int, int]] = []
    for stride, size in sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True)):
        if size == 1:
            continue
        if stride == 0:
            _refuse(layer, tensor, "repeats elements (a stride of 0)")
        if not outer and stride * tensor.element_size() == run:
            run *= size
        else:
            outer.append((stride * tensor.element_size(), size))
    n_pieces = 1
    for _, size in outer:
        n_pieces *= size
    if n_pieces > _MAX_PIECES:
        _refuse(
            layer, tensor, f"has blocks in {n_pieces} pieces of {run} bytes; at most {_MAX_PIECES} are copied singly"
        )
    starts = sorted(sum(steps) for steps in product(*(range(0, stride * size, stride) for stride, size in outer)))
    if any(b - a < run for a, b in pairwise(starts)):
        _refuse(layer, tensor, "has elements that overlap")
    return tuple(_merged((start, start + run) for start in starts))


def _rows(views: Sequence[_View], n_blocks: int) -> list[list[_View]]:
    """Views of one storage whose blocks lie in the same rows, together; each list begins with the lowest."""
    by_storage: dict[int, list[_View]] = {}
    for view in views:
        by_storage.setdefault(view.tensor.untyped_storage().data_ptr(), []).append(view)
    found: list[list[_View]] = []
    for own in by_storage.values():
        open_rows: list[list[_View]] = []
        for view in sorted(own, key=lambda view: view.base):
            for rows in open_rows:
                origin = rows[0]
                if view.base >= origin.base + (n_blocks - 1) * origin.row + max(
                    v.base - origin.base + v.end for v in rows
                ):
                    continue  # begins behind the last of them
                if view.row == origin.row and view.base + view.end <= origin.base + origin.row:
                    rows.append(view)
                    break
                told = f"shares bytes with layer {origin.layer} ({_told(origin.tensor)}), of other blocks"
                _refuse(view.layer, view.tensor, told)
            else:
                open_rows.append([view])
        found += open_rows
    return found


def _cut(rows: Sequence[_View]) -> Iterable[tuple[int, int, tuple[int, ...]]]:
    """(start, stop, groups) of the bytes of a row: as few intervals as are used by the same groups throughout."""
    origin = rows[0].base
    used: dict[int, list[tuple[int, int]]] = {}
    for view in rows:
        shift = view.base - origin
        used.setdefault(view.group, []).extend((start + shift, stop + shift) for start, stop in view.pieces)
    merged = {group: _merged(sorted(pieces)) for group, pieces in used.items()}
    edges = sorted({edge for pieces in merged.values() for piece in pieces for edge in piece})
    last: tuple[int, int, tuple[int, ...]] | None = None
    for start, stop in pairwise(edges):
        groups = tuple(
            sorted(group for group, pieces in merged.items() if any(a <= start and stop <= b for a, b in pieces))
        )
        if last is not None and last[1:] == (start, groups):
            last = (last[0], stop, groups)
            continue
        if last is not None and last[2]:
            yield last
        last = (start, stop, groups)
    if last is not None and last[2]:
        yield last


def _merged(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending intervals, joined where they touch or overlap."""
    out: list[tuple[int, int]] = []
    for start, stop in pieces:
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out


def _bytes_of(tensor: torch.Tensor, offset: int, n_rows: int, nbytes: int, row: int) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.int8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), offset, (n_rows, nbytes), (row, 1))


def _told(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"


def _refuse(layer: str, tensor: torch.Tensor, why: str) -> NoReturn:
    raise TierError("device", f"layer {layer}: a tensor of {_told(tensor)} {why}")
