"""Aligned pages beside the caller's memory, and zeros."""

from __future__ import annotations

import mmap
from collections import deque
from typing import Final, NamedTuple

from tierkv.tiers._fs.format import PAGE_NBYTES

_ZEROS: Final = memoryview(bytes(64 * 1024))


class Scratch(NamedTuple):
    """Aligned pages for one worker: for each chunk of a call a header, and the last page of its payload."""

    headers: tuple[memoryview, ...]
    tails: tuple[memoryview, ...]
    worker: int
    """Number of whoever holds these pages; no two do at a time."""

    @property
    def header(self) -> memoryview:
        return self.headers[0]

    @property
    def tail(self) -> memoryview:
        return self.tails[0]


class ScratchRing:
    """Aligned scratch pages, handed round among workers. An mmap: heap memory is not aligned enough for O_DIRECT.

    Args:
        n: workers.
        n_chunks: most chunks of one call.

    Concurrency: ``take`` and ``give`` from any thread; each is one atomic deque operation.
    """

    def __init__(self, n: int, n_chunks: int = 1) -> None:
        n_pages = n * 2 * n_chunks
        memory = memoryview(mmap.mmap(-1, n_pages * PAGE_NBYTES))
        pages = [memory[i * PAGE_NBYTES : (i + 1) * PAGE_NBYTES] for i in range(n_pages)]
        sets = [tuple(pages[at : at + n_chunks]) for at in range(0, n_pages, n_chunks)]
        self._free = deque(Scratch(sets[2 * i], sets[2 * i + 1], i) for i in range(n))

    def take(self) -> Scratch:
        return self._free.popleft()

    def give(self, scratch: Scratch) -> None:
        self._free.append(scratch)


def zero(buffer: memoryview, start: int) -> None:
    """Zero ``buffer`` from ``start`` on, in pieces short enough not to hold the GIL for long."""
    for at in range(start, len(buffer), len(_ZEROS)):
        piece = buffer[at : at + len(_ZEROS)]
        piece[:] = _ZEROS[: len(piece)]
