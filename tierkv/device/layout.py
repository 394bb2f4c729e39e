"""How a device's KV blocks lie in the bytes of a primary slot.

A device tensor is seen as ``int8 [n_blocks, page_nbytes]``: one page a block. A chunk is ``blocks_per_chunk`` blocks of
one group; in its slot each tensor of the device has an area of its own, in tensor order, and in that area one place for
each block of the chunk::

    slot | rank 0: tensor 0 [block 0 | block 1 | ..] tensor 1 [block 0 | ..] .. | rank 1: .. | padding |

Groups may share tensors (hybrid models overlay them), so an area belongs to the tensor and not to the group. A page and
its place correspond by :class:`Run`: one run of the whole page where the layout is direct, several strided ones where
all ranks write into canonical pages, in which no rank's count shows. Pure arithmetic: no torch, no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

from tierkv.errors import TierError


class Run(NamedTuple):
    """A strided correspondence, in bytes.

    Fragment ``i`` lies at ``page_offset + i * page_stride`` of a block's page and at
    ``place_offset + i * place_stride`` of the block's place in the slot.
    """

    page_offset: int
    place_offset: int
    fragment_nbytes: int
    n_fragments: int = 1
    page_stride: int = 0
    place_stride: int = 0


@dataclass(frozen=True, slots=True)
class CanonicalPage:
    """How one rank's page maps into a page that looks the same whatever the parallelism."""

    nbytes: int
    """Length of the canonical page."""
    runs: tuple[Run, ...]
    n_writers: int = 1
    """Ranks that hold these same bytes; they take turns, block by block of the pool."""
    writer: int = 0
    """This rank's turn."""
    portable: bool = True
    """True if any parallel configuration gives the same canonical bytes."""


@dataclass(frozen=True, slots=True)
class PageRef:
    """A group's use of one tensor: the leading ``nbytes`` of each of its pages."""

    tensor: int
    nbytes: int
    canonical: CanonicalPage | None = None


class Place(NamedTuple):
    """One run of one tensor, placed: block ``b`` of a chunk starts at ``offset + b * block_stride`` of the slot."""

    tensor: int
    offset: int
    block_stride: int
    run: Run
    n_writers: int = 1
    writer: int = 0


class Span(NamedTuple):
    """Bytes of a slot: ``start <= offset < stop``."""

    start: int
    stop: int


class GroupCopy(NamedTuple):
    """The blocks of one group in one copy: ``blocks[i]`` is block ``subs[i]`` of the chunk in ``slots[i]``."""

    group: int
    blocks: Sequence[int]
    slots: Sequence[int]
    subs: Sequence[int]
    touched: Sequence[int]
    """The slots, once each."""
    skipped: Sequence[tuple[int, int]]
    """(slot, sub) of the blocks of these chunks that are not copied; a store zeroes their places."""


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """Where every byte of a chunk lies, for one rank. Build it with :meth:`direct` or :meth:`canonical`."""

    blocks_per_chunk: int
    page_nbytes: tuple[int, ...]
    """Padded page length of each tensor."""
    groups: tuple[tuple[PageRef, ...], ...]
    places: tuple[tuple[Place, ...], ...]
    """What is copied, by group."""
    gaps: tuple[tuple[Span, ...], ...]
    """What a store of a whole chunk leaves unwritten and this rank must zero, by group."""
    span: Span
    """This rank writes within these bytes of a slot and nowhere else."""
    is_canonical: bool

    @classmethod
    def direct(
        cls,
        page_nbytes: Sequence[int],
        groups: Sequence[Sequence[PageRef]],
        *,
        blocks_per_chunk: int,
        start_nbytes: int = 0,
        stop_nbytes: int | None = None,
    ) -> DeviceLayout:
        """Every rank's pages as they are, one rank behind the other.

        Args:
            page_nbytes: padded page length of each tensor.
            groups: the tensors that each group uses.
            blocks_per_chunk: blocks of a chunk.
            start_nbytes: where in a slot this rank's bytes begin.
            stop_nbytes: where they end; the last rank also owns the slot's padding. Default: after the last tensor.

        Raises:
            TierError: the pages do not fit, or a group uses a tensor that is not there.
        """
        _check(page_nbytes, groups, blocks_per_chunk)
        *offsets, end = accumulate((n * blocks_per_chunk for n in page_nbytes), initial=start_nbytes)
        span = Span(start_nbytes, end if stop_nbytes is None else stop_nbytes)
        _check_fit(page_nbytes, blocks_per_chunk, end, span)
        places: list[tuple[Place, ...]] = []
        gaps: list[tuple[Span, ...]] = []
        for group in groups:
            placed: dict[int, Place] = {}
            for ref in sorted(group, key=lambda ref: ref.nbytes):  # of two uses of one tensor the longer holds both
                run = Run(0, 0, ref.nbytes)
                placed[ref.tensor] = Place(ref.tensor, offsets[ref.tensor], page_nbytes[ref.tensor], run)
            places.append(tuple(placed.values()))
            gaps.append(
                _gaps(
                    span,
                    (
                        Span(start, start + place.run.fragment_nbytes)
                        for place in placed.values()
                        for start in _starts(place.offset, place.block_stride, blocks_per_chunk)
                    ),
                )
            )
        frozen = tuple(tuple(group) for group in groups)
        return cls(blocks_per_chunk, tuple(page_nbytes), frozen, tuple(places), tuple(gaps), span, is_canonical=False)

    @classmethod
    def canonical(
        cls,
        page_nbytes: Sequence[int],
        groups: Sequence[Sequence[PageRef]],
        *,
        blocks_per_chunk: int,
        stop_nbytes: int | None = None,
        zeroes_gaps: bool = True,
    ) -> DeviceLayout:
        """All ranks' pages woven into canonical pages, from the slot's beginning.

        Args:
            page_nbytes: padded page length of each of this rank's tensors.
            groups: the tensors that each group uses; every one with its canonical page.
            blocks_per_chunk: blocks of a chunk.
            stop_nbytes: the slot's length. Default: after the last canonical page.
            zeroes_gaps: True for exactly one rank: it zeroes what no rank writes.

        Raises:
            TierError: a page has no canonical form, or the pages do not fit.
        """
        _check(page_nbytes, groups, blocks_per_chunk)
        areas = [0] * len(page_nbytes)
        for ref in chain.from_iterable(groups):
            areas[ref.tensor] = max(areas[ref.tensor], _canonical(ref).nbytes)
        *offsets, end = accumulate((n * blocks_per_chunk for n in areas), initial=0)
        span = Span(0, end if stop_nbytes is None else stop_nbytes)
        _check_fit(areas, blocks_per_chunk, end, span)
        places: list[tuple[Place, ...]] = []
        gaps: list[tuple[Span, ...]] = []
        for group in groups:
            placed: list[Place] = []
            written: list[Span] = []
            for ref in dict.fromkeys(group):
                page, offset, stride = _canonical(ref), offsets[ref.tensor], areas[ref.tensor]
                placed += (Place(ref.tensor, offset, stride, run, page.n_writers, page.writer) for run in page.runs)
                written += (Span(at, at + page.nbytes) for at in _starts(offset, stride, blocks_per_chunk))
            places.append(tuple(placed))
            gaps.append(_gaps(span, written) if zeroes_gaps else ())
        frozen = tuple(tuple(group) for group in groups)
        return cls(blocks_per_chunk, tuple(page_nbytes), frozen, tuple(places), tuple(gaps), span, is_canonical=True)

    def split(
        self,
        blocks: Sequence[int],
        group_sizes: Sequence[int],
        first_blocks: Sequence[int],
        slots: Sequence[int],
        *,
        slot_groups: Sequence[int] | None = None,
        whole: bool = False,
    ) -> list[GroupCopy]:
        """The pairs of block and place of one copy, by group.

        Args:
            blocks: device blocks, groups one behind the other.
            group_sizes: how many of them belong to each group.
            first_blocks: for each group the index, in the request, of its first block: chunks start at multiples of
                ``blocks_per_chunk``, so the first chunk may be entered in its middle.
            slots: a slot for each chunk touched, in the same order.
            slot_groups: for each slot its group, to be checked against what the blocks say.
            whole: the last block of each group must be the last of its chunk. For stores whose chunks may have holes:
                one in the middle moves the blocks behind it to wrong places, and shows in their count only.

        Raises:
            TierError: blocks and slots do not match; no pair of them can be trusted.
        """
        if not len(group_sizes) == len(first_blocks) == len(self.groups) or sum(group_sizes) != len(blocks):
            raise TierError(
                "device",
                f"a copy of {len(blocks)} blocks in groups of {list(group_sizes)}, first blocks {list(first_blocks)}, "
                f"does not fit a device of {len(self.groups)} groups",
            )
        per_chunk = self.blocks_per_chunk
        leads = [first % per_chunk for first in first_blocks]
        n_chunks = [
            -(-(lead + size) // per_chunk) if size else 0 for lead, size in zip(leads, group_sizes, strict=True)
        ]
        groups = [group for group, n in enumerate(n_chunks) for _ in range(n)]
        if len(groups) != len(slots) or (slot_groups is not None and groups != list(slot_groups)):
            raise TierError(
                "device",
                f"{list(group_sizes)} blocks from {list(first_blocks)} on touch chunks of the groups {groups}, "
                f"but there are {len(slots)} slots of the groups {list(slot_groups or ())}",
            )
        copies: list[GroupCopy] = []
        at_block = at_slot = 0
        for group, size in enumerate(group_sizes):
            if not size:
                continue
            own = slots[at_slot : at_slot + n_chunks[group]]
            copies.append(self._group_copy(group, blocks[at_block : at_block + size], leads[group], own))
            at_block += size
            at_slot += len(own)
            if whole and (leads[group] + size) % per_chunk:
                raise TierError("device", f"group {group}: a chunk has a hole behind its first block")
        return copies

    def _group_copy(self, group: int, blocks: Sequence[int], lead: int, slots: Sequence[int]) -> GroupCopy:
        per_chunk = self.blocks_per_chunk
        end = lead + len(blocks)
        return GroupCopy(
            group,
            blocks,
            [slots[i // per_chunk] for i in range(lead, end)],
            [i % per_chunk for i in range(lead, end)],
            slots,
            [(slots[i // per_chunk], i % per_chunk) for i in (*range(lead), *range(end, len(slots) * per_chunk))],
        )


def _starts(offset: int, stride: int, n: int) -> range:
    return range(offset, offset + n * stride, stride)


def _canonical(ref: PageRef) -> CanonicalPage:
    if ref.canonical is None:
        raise TierError("device", f"tensor {ref.tensor} has no canonical page: nobody vouches for its layout")
    return ref.canonical


def _check(page_nbytes: Sequence[int], groups: Sequence[Sequence[PageRef]], blocks_per_chunk: int) -> None:
    if blocks_per_chunk < 1 or any(n < 1 for n in page_nbytes):
        raise TierError(
            "device", f"pages of {list(page_nbytes)} bytes, {blocks_per_chunk} blocks a chunk: all must be > 0"
        )
    for ref in chain.from_iterable(groups):
        if not (0 <= ref.tensor < len(page_nbytes) and 0 < ref.nbytes <= page_nbytes[ref.tensor]):
            raise TierError(
                "device",
                f"a group uses {ref.nbytes} bytes of the pages of tensor {ref.tensor}, "
                f"but the pages of tensors 0 to {len(page_nbytes) - 1} have {list(page_nbytes)} bytes",
            )


def _check_fit(page_nbytes: Sequence[int], blocks_per_chunk: int, end: int, span: Span) -> None:
    if end > span.stop:
        raise TierError(
            "device",
            f"{len(page_nbytes)} tensors with pages of {list(page_nbytes)} bytes, {blocks_per_chunk} blocks a chunk, "
            f"need {end - span.start} bytes of a slot, but only {span.stop - span.start} are theirs",
        )


def _gaps(within: Span, written: Iterable[Span]) -> tuple[Span, ...]:
    """What of ``within`` is not written."""
    gaps: list[Span] = []
    at = within.start
    for span in sorted(written):
        if span.start > at:
            gaps.append(Span(at, span.start))
        at = max(at, span.stop)
    if within.stop > at:
        gaps.append(Span(at, within.stop))
    return tuple(gaps)
