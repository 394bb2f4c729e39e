"""Many short copies between host memory and host memory, in as few calls as there are stretches of slots.

A call from Python costs 0.7 us, what 6 KiB take to copy, so pages are not copied singly where one call of numpy's can
move many. ``take(out=)`` gathers rows from anywhere into one contiguous stretch, an indexed assignment scatters one
contiguous stretch to rows anywhere; both copy once, in C, without the GIL. A chunk lies in its slot in one stretch, so
it is one call, however many tensors its pages come from.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from itertools import pairwise, repeat
from typing import Any, NamedTuple

import numpy as np

from tierkv.device.runtime import CopyBatch, Direction

Array = Any  # numpy.ndarray

_GRANULE_NBYTES = 256
"""Rows are numbered in units that all their addresses share. Below this one, one call a row is as fast: 64 bytes made
3 to 5 GB/s where one large copy made 9."""

_SLOW_GRANULES = range(1024, 4096)
"""memcpy has a dip there: 4 to 5 GB/s, where 512 and 4096 made 7 to 9 of 9. Halves are taken instead."""

_PAIRS_A_STRETCH = 4
"""A stretch costs as much as so many calls of one row each."""

_ROW_NBYTES = 8192
"""Singly, from here on one call a row is faster than a gather and a scatter through a temporary, which copy twice."""

_PIECE_NBYTES = 256 << 10
"""A temporary of this size stays in the cache."""


def copy_rows(batch: CopyBatch) -> None:
    """Copy a batch now. The GIL is free while bytes move, but for short rows that lie scattered on both sides."""
    if not len(batch.host):
        return
    order = np.argsort(batch.host, kind="stable")
    rows = _Rows(batch.device[order], batch.host[order], batch.nbytes[order])
    for side in _sides(rows):
        if not _copy_stretches(batch.direction, side):
            _copy_singly(batch.direction, side)


class _Rows(NamedTuple):
    """Pairs of addresses, ascending by slot; ``int64`` each."""

    device: Array
    host: Array
    nbytes: Array


def _sides(rows: _Rows) -> Iterator[_Rows]:
    """The rows whose tensors lie below the slots, and those above.

    One array over both would reach across the slots, and numpy would copy twice, for fear of an overlap.
    """
    below = rows.device < rows.host[0]
    n_below = np.count_nonzero(below)
    if 0 < n_below < len(below):
        for side in (below, ~below):
            yield _Rows(*(column[side] for column in rows))
    else:
        yield rows


def _copy_stretches(direction: Direction, rows: _Rows) -> bool:
    """One call a stretch of the slots; False, and nothing copied, where rows are better copied singly."""
    device, host, nbytes = rows
    edges: Array = np.flatnonzero(host[1:] != host[:-1] + nbytes[:-1]) + 1
    if (len(edges) + 1) * _PAIRS_A_STRETCH > len(host):
        return False
    base, end = _span(device, nbytes)
    host_base, host_end = _span(host, nbytes)
    granule = _granule(device - base, host - host_base, nbytes)
    if granule < _GRANULE_NBYTES or (base < host_end and host_base < end):
        return False
    counts = nbytes // granule
    stops = np.cumsum(counts)
    indices = np.repeat((device - base) // granule - (stops - counts), counts) + np.arange(stops[-1])
    cuts = [0, *stops[edges - 1].tolist(), int(stops[-1])]
    places = (host[np.concatenate(([0], edges))] - host_base) // granule
    pages = _memory(base, end, granule)
    slots = _memory(host_base, host_end, granule)
    for (first, stop), place in zip(pairwise(cuts), places.tolist(), strict=True):
        stretch = slots[place : place + stop - first]
        if direction is Direction.STORE:
            pages.take(indices[first:stop], 0, stretch, "clip")  # the mode that writes straight into `out`
        else:
            pages[indices[first:stop]] = stretch
    return True


def _span(addresses: Array, nbytes: Array) -> tuple[int, int]:
    return int(addresses.min()), int((addresses + nbytes).max())


def _granule(*offsets: Array) -> int:
    """The largest power of two that divides all of them and is copied fast."""
    bits = 0
    for each in offsets:
        bits |= int(np.bitwise_or.reduce(each))
    granule = bits & -bits
    return _SLOW_GRANULES.start // 2 if granule in _SLOW_GRANULES else granule


class _Raw:
    """Memory by address, as numpy's array protocol wants it. It keeps nothing alive: the batch does."""

    def __init__(self, **interface: Any) -> None:
        self.__array_interface__ = {"version": 3, **interface}


def _memory(base: int, end: int, granule: int) -> Array:
    """``uint8 [n, granule]``: what lies between the lowest row and the highest may be anybody's, and is not touched."""
    return np.asarray(_Raw(data=(base, False), typestr="|u1", shape=((end - base) // granule, granule)))


def _copy_singly(direction: Direction, rows: _Rows) -> None:
    for nbytes in np.unique(rows.nbytes).tolist():
        same = rows.nbytes == nbytes
        device, host = rows.device[same], rows.host[same]
        targets, sources = (host, device) if direction is Direction.STORE else (device, host)
        if nbytes >= _ROW_NBYTES or len(targets) < _PAIRS_A_STRETCH:
            deque(map(ctypes.memmove, targets.tolist(), sources.tolist(), repeat(nbytes)), maxlen=0)
        else:
            _copy_gathered(targets, sources, nbytes)


def _copy_gathered(targets: Array, sources: Array, nbytes: int) -> None:
    to, targets = _items(targets, nbytes)
    of, sources = _items(sources, nbytes)
    at_once = max(1, _PIECE_NBYTES // nbytes)
    for first in range(0, len(targets), at_once):
        piece = slice(first, first + at_once)
        to[targets[piece]] = of[sources[piece]]


def _items(addresses: Array, nbytes: int) -> tuple[Array, Array]:
    """An array whose item ``i`` is ``nbytes`` bytes from byte ``i`` on, so items overlap; and the rows' indices."""
    base = int(addresses.min())
    offsets = addresses - base
    shape = (int(offsets.max()) + 1,)
    return np.asarray(_Raw(data=(base, False), typestr=f"|V{nbytes}", shape=shape, strides=(1,))), offsets
