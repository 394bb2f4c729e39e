"""Payloads in whole pages, and long ones piece by piece: while one is summed up, the disk has those of other workers.

A worker that reads 8 MiB at once and then sums them up leaves its place at the disk empty for that long, and finds none
of it in a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from tierkv.tiers._fs.format import HEADER_NBYTES, PAGE_NBYTES, Sums, padded_nbytes
from tierkv.tiers._fs.memory import zero

PIECE_NBYTES: Final = 1 << 20
LONG_NBYTES: Final = 2 * PIECE_NBYTES
"""Payloads that are longer move in pieces: the last may be short, and is then little beside the others."""
Fill = Callable[[Sequence[memoryview], int], None]
"""Fill parts from the place that lies so many bytes behind the header's begin on, or raise."""


def in_pages(payload: memoryview, tail: memoryview) -> tuple[memoryview, ...]:
    """The parts to write for a payload, or a piece of one that begins at a page.

    Never the caller's own last page, unless it is full: behind the payload it may hold another tenant's bytes.
    """
    tail_nbytes = len(payload) % PAGE_NBYTES
    if not tail_nbytes:
        return (payload,)
    tail[:tail_nbytes] = payload[-tail_nbytes:]
    zero(tail, tail_nbytes)
    return (payload[:-tail_nbytes], tail)


def sum_of_pieces(sums: Sums, buffer: memoryview, nbytes: int, fill: Fill) -> bytes:
    """Read the rest of a payload whose first piece is in ``buffer``, which has room for its last page; its sum."""
    hasher = sums.hasher()
    hasher.update(buffer[: min(PIECE_NBYTES, nbytes)])
    for at in range(PIECE_NBYTES, nbytes, PIECE_NBYTES):
        end = min(at + PIECE_NBYTES, nbytes)
        fill([buffer[at : padded_nbytes(end)]], HEADER_NBYTES + at)
        hasher.update(buffer[at:end])
    return hasher.digest()  # type: ignore[no-any-return]
