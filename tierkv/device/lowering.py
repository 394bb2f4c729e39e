"""From blocks and slots to addresses, vectorised: on a server's model thread a batch has tens of thousands of pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tierkv.device.layout import DeviceLayout, GroupCopy, Place
from tierkv.device.runtime import CopyBatch, DeviceRuntime, Direction, Memory, Strip
from tierkv.device.slots import HostSlots, bytes_at
from tierkv.errors import TierError

Array = Any  # numpy.ndarray

_SMALLEST_PAIRS = 1024


class Pages(NamedTuple):
    """One device tensor of the layout: ``n_blocks`` pages, ``row_nbytes`` apart, the first at ``memory.address``."""

    memory: Memory
    n_blocks: int
    page_nbytes: int
    row_nbytes: int


def pages_of(runtime: DeviceRuntime, tensor: Any) -> Pages:
    """A page view of torch's or numpy's kind. Raises TierError if it lies on another device."""
    n_blocks, page_nbytes = tensor.shape
    row_nbytes = max(_strides(tensor)[0], int(page_nbytes))  # one block has no distance to the next
    return Pages(runtime.memory(tensor), int(n_blocks), int(page_nbytes), int(row_nbytes))


def check_page_views(tensors: Sequence[Any], page_nbytes: Sequence[int]) -> None:
    """Raises TierError if one is not ``[n_blocks, page_nbytes]`` of one-byte elements with pages in one piece."""
    for index, (tensor, nbytes) in enumerate(zip(tensors, page_nbytes, strict=True)):
        _check_page_view(index, tensor, nbytes)


def _check_page_view(index: int, tensor: Any, page_nbytes: int) -> None:
    shape = tuple(tensor.shape)
    fits = len(shape) == 2 and shape[1] == page_nbytes and _item_nbytes(tensor) == 1 and _strides(tensor)[1] == 1
    if not fits or (shape[0] > 1 and _strides(tensor)[0] < page_nbytes):
        raise TierError(
            "device",
            f"tensor {index} is {tensor.dtype} {list(shape)} with strides {list(_strides(tensor))}, "
            f"but must be int8 [n_blocks, {page_nbytes}] with pages in one piece",
        )


def _strides(tensor: Any) -> tuple[int, ...]:
    """In elements, which are bytes here."""
    return tuple(tensor.stride()) if callable(getattr(tensor, "stride", None)) else tuple(tensor.strides)


def _item_nbytes(tensor: Any) -> int:
    return int(tensor.element_size()) if hasattr(tensor, "element_size") else int(tensor.itemsize)


class DescriptorPool:
    """Descriptor arrays for batches. A batch of 64 layers takes megabytes: fresh ones would be faulted in each time.

    One is given back only once the event of its batch was seen: a device may read descriptors late.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Array]] = {}

    def take(self, n_pairs: int) -> Array:
        """``int64 [3, >= n_pairs]``."""
        size = max(_SMALLEST_PAIRS, 1 << (n_pairs - 1).bit_length())
        free = self._free.get(size)
        return free.pop() if free else np.empty((3, size), np.int64)

    def give_back(self, descriptors: Array) -> None:
        self._free.setdefault(descriptors.shape[1], []).append(descriptors)


class _Class(NamedTuple):
    """Places of one group with the same number of fragments, whose pairs one expression computes."""

    places: tuple[Place, ...]
    pages: tuple[Pages, ...]
    n_fragments: int
    device: Array
    """``[n_places, 1, n_fragments]``: address of each fragment of block 0."""
    row: Array
    """``[n_places, 1, 1]``: distance of blocks."""
    place: Array
    """``[n_places, 1, n_fragments]``: offset of each fragment in a slot, in sub-block 0."""
    sub: Array
    """``[n_places, 1, 1]``: distance of sub-blocks."""
    nbytes: Array
    """``[n_places, 1]``: of each fragment."""
    takes_turns: bool
    """Whether other ranks hold the same bytes of any of them."""


class _Part(NamedTuple):
    """Blocks of one group whose slots lie in one piece."""

    group: int
    blocks: Array
    slots: Array
    subs: Array
    piece: int


class Zeroes(NamedTuple):
    """Bytes ``start`` to ``stop`` of some slots of one piece."""

    piece: Array
    """``uint8 [n_slots, stride]``."""
    rows: Array
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return len(self.rows) * (self.stop - self.start)

    def fill(self) -> None:
        self.piece[self.rows, self.start : self.stop] = 0

    def ranges(self) -> Iterator[tuple[int, int]]:
        """(address, length) of each."""
        base, stride = self.piece.__array_interface__["data"][0], self.piece.strides[0]
        return ((base + row * stride + self.start, self.stop - self.start) for row in self.rows.tolist())


class Lowering:
    """Turns the group copies of a job into a :class:`CopyBatch`, every address within its memory.

    Raises:
        TierError: pages or slots do not fit the layout.
    """

    def __init__(self, layout: DeviceLayout, pages: Sequence[Pages], slots: HostSlots) -> None:
        _check(layout, pages, slots)
        self._layout = layout
        self._slots = slots
        self._stride = slots.stride_nbytes
        self._n_blocks = [
            min((pages[place.tensor].n_blocks for place in places), default=0) for places in layout.places
        ]
        self._classes = [_classes(places, pages) for places in layout.places]
        self._rows = [bytes_at(piece).reshape(-1, self._stride) for piece in slots.pieces]

    def batch(self, direction: Direction, copies: Sequence[GroupCopy], pool: DescriptorPool) -> tuple[CopyBatch, Array]:
        """The batch, and its descriptors for the pool.

        Raises:
            TierError: a block or a slot does not exist; nothing was taken from the pool.
        """
        parts = [part for copy in copies for part in self._parts(copy)]
        n_pairs = sum(
            len(part.blocks) * cls.n_fragments * len(cls.places) for part in parts for cls in self._classes[part.group]
        )
        pairs = _Pairs(pool.take(max(1, n_pairs)))
        for part in parts:
            for cls in self._classes[part.group]:
                self._add(pairs, cls, part, takes_turns=direction is Direction.STORE)
        device, host, nbytes = (row[: pairs.n] for row in pairs.descriptors)
        return CopyBatch(direction, device, host, nbytes, tuple(pairs.strips)), pairs.descriptors

    def zeroes(self, copies: Sequence[GroupCopy]) -> Iterator[Zeroes]:
        """What a store leaves unwritten of its slots and this rank has to zero."""
        for copy in copies:
            gaps = self._layout.gaps[copy.group]
            for piece, rows in self._by_piece(np.asarray(copy.touched, np.int64)) if gaps else ():
                for start, stop in gaps:
                    yield Zeroes(self._rows[piece], rows, start, stop)
            for slot, sub in copy.skipped:
                piece, row = divmod(slot, self._slots.slots_per_piece)
                for place in self._layout.places[copy.group]:
                    if _is_mine(place, slot, sub, self._layout.blocks_per_chunk):
                        for start, stop in _fragments(place, sub):
                            yield Zeroes(self._rows[piece], np.array([row]), start, stop)

    def close(self) -> None:
        """Let go of pages and slots."""
        self._rows, self._classes = [], []

    def _by_piece(self, slots: Array) -> Iterator[tuple[int, Array]]:
        if len(self._rows) == 1:
            yield 0, slots
            return
        pieces, rows = np.divmod(slots, self._slots.slots_per_piece)
        for piece in np.unique(pieces).tolist():
            yield piece, rows[pieces == piece]

    def _parts(self, copy: GroupCopy) -> Iterator[_Part]:
        """The copy, cut where its slots go on in another piece."""
        blocks, slots, subs = (np.asarray(ids, np.int64) for ids in (copy.blocks, copy.slots, copy.subs))
        if not len(blocks):
            return
        n_blocks, n_slots = self._n_blocks[copy.group], self._slots.n_slots
        for what, ids, n in (("block", blocks, n_blocks), ("slot", slots, n_slots)):
            if ids.min() < 0 or ids.max() >= n:
                wrong = int(ids.max() if ids.max() >= n else ids.min())
                raise TierError("device", f"{what} {wrong} of group {copy.group} does not exist: there are {n}")
        if len(self._rows) == 1:
            yield _Part(copy.group, blocks, slots, subs, 0)
            return
        pieces = slots // self._slots.slots_per_piece
        for piece in np.unique(pieces).tolist():
            mine = pieces == piece
            yield _Part(copy.group, blocks[mine], slots[mine], subs[mine], piece)

    def _add(self, pairs: _Pairs, cls: _Class, part: _Part, *, takes_turns: bool) -> None:
        memory = self._slots.pieces[part.piece]
        start = memory.address + (part.slots - part.piece * self._slots.slots_per_piece) * self._stride
        device = cls.device + cls.row * part.blocks[None, :, None]
        host = cls.place + cls.sub * part.subs[None, :, None] + start[None, :, None]
        if not (takes_turns and cls.takes_turns):
            pairs.add_all(device, host, cls, memory)
            return
        for i, place in enumerate(cls.places):
            mine: Any = slice(None)
            if place.n_writers > 1:
                mine = _is_mine(place, part.slots, part.subs, self._layout.blocks_per_chunk)
            pairs.add(device[i, mine], host[i, mine], place.run.fragment_nbytes, cls.pages[i].memory, memory)


class _Pairs:
    """Descriptors as they are written."""

    def __init__(self, descriptors: Array) -> None:
        self.descriptors = descriptors
        self.strips: list[Strip] = []
        self.n = 0

    def add(self, device: Array, host: Array, nbytes: int, device_memory: Memory, host_memory: Memory) -> None:
        first, self.n = self.n, self.n + device.size
        if first == self.n:
            return
        to = slice(first, self.n)
        self.descriptors[0, to], self.descriptors[1, to], self.descriptors[2, to] = device.ravel(), host.ravel(), nbytes
        self.strips.append(Strip(first, self.n, nbytes, device_memory, host_memory))

    def add_all(self, device: Array, host: Array, cls: _Class, host_memory: Memory) -> None:
        """All places of a class at once: a model has a hundred, and a call for each costs what a page takes to copy."""
        each = device[0].size
        first, self.n = self.n, self.n + device.size
        to = slice(first, self.n)
        self.descriptors[0, to], self.descriptors[1, to] = device.ravel(), host.ravel()
        self.descriptors[2, to].reshape(-1, each)[:] = cls.nbytes
        self.strips += [
            Strip(start, start + each, place.run.fragment_nbytes, pages.memory, host_memory)
            for start, place, pages in zip(range(first, self.n, each), cls.places, cls.pages, strict=True)
        ]


def _fragments(place: Place, sub: int) -> Iterator[tuple[int, int]]:
    """(start, stop) in a slot of each fragment of one block."""
    start = place.offset + sub * place.block_stride + place.run.place_offset
    for fragment in range(place.run.n_fragments):
        first = start + fragment * place.run.place_stride
        yield first, first + place.run.fragment_nbytes


def _is_mine(place: Place, slots: Any, subs: Any, blocks_per_chunk: int) -> Any:
    """Which pairs this rank writes, of ranks that hold the same bytes and take turns."""
    return (slots * blocks_per_chunk + subs) % place.n_writers == place.writer


def _classes(places: Sequence[Place], pages: Sequence[Pages]) -> list[_Class]:
    by_fragments: dict[int, list[Place]] = {}
    for place in places:
        by_fragments.setdefault(place.run.n_fragments, []).append(place)
    return [_class(tuple(of), pages, n) for n, of in by_fragments.items()]


def _class(places: tuple[Place, ...], pages: Sequence[Pages], n_fragments: int) -> _Class:
    own = tuple(pages[place.tensor] for place in places)
    runs = [place.run for place in places]
    fragments: Array = np.arange(n_fragments, dtype=np.int64)[None, None, :]
    return _Class(
        places,
        own,
        n_fragments,
        _column(p.memory.address + r.page_offset for p, r in zip(own, runs, strict=True))
        + _column(r.page_stride for r in runs) * fragments,
        _column(p.row_nbytes for p in own),
        _column(p.offset + p.run.place_offset for p in places) + _column(r.place_stride for r in runs) * fragments,
        _column(p.block_stride for p in places),
        _column(r.fragment_nbytes for r in runs)[:, 0],
        any(p.n_writers > 1 for p in places),
    )


def _column(values: Any) -> Array:
    return np.array(list(values), np.int64)[:, None, None]


def _check(layout: DeviceLayout, pages: Sequence[Pages], slots: HostSlots) -> None:
    """Once here, so that a valid block and a valid slot always give addresses within their memories."""
    if layout.span.stop > slots.stride_nbytes:
        raise TierError("device", f"a chunk takes {layout.span.stop} bytes of a slot, but it has {slots.stride_nbytes}")
    if len(pages) != len(layout.page_nbytes):
        raise TierError("device", f"{len(pages)} tensors for a layout of {len(layout.page_nbytes)}")
    for index, (own, nbytes) in enumerate(zip(pages, layout.page_nbytes, strict=True)):
        end = (own.n_blocks - 1) * own.row_nbytes + own.page_nbytes
        if own.page_nbytes != nbytes or own.n_blocks < 1 or own.row_nbytes < 1 or end > own.memory.nbytes:
            raise TierError(
                "device",
                f"tensor {index} has {own.n_blocks} pages of {own.page_nbytes} bytes, {own.row_nbytes} apart, in "
                f"{own.memory.nbytes} bytes; the layout wants pages of {nbytes}",
            )
