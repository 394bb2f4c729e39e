"""Aligned pages beside the caller's memory, and zeros."""

from __future__ import annotations

import mmap
from collections import deque
from typing import Final, NamedTuple

from tierkv.tiers._fs_format import PAGE_NBYTES

_ZEROS: Final = memoryview(bytes(64 * 1024))


class Scratch(NamedTuple):
    """Two aligned pages for one worker: a header, and the last page of a payload that does not fill it."""

    header: memoryview
    tail: memoryview
    worker: int
    """Number of whoever holds these pages; no two do at a time."""


class ScratchRing:
    """Aligned scratch pages, handed round among workers. An mmap: heap memory is not aligned enough for O_DIRECT.

    Concurrency: ``take`` and ``give`` from any thread; each is one atomic deque operation.
    """

    def __init__(self, n: int) -> None:
        memory = memoryview(mmap.mmap(-1, n * 2 * PAGE_NBYTES))
        pages = [memory[i * PAGE_NBYTES : (i + 1) * PAGE_NBYTES] for i in range(2 * n)]
        self._free = deque(Scratch(pages[2 * i], pages[2 * i + 1], i) for i in range(n))

    def take(self) -> Scratch:
        return self._free.popleft()

    def give(self, scratch: Scratch) -> None:
        self._free.append(scratch)


def zero(buffer: memoryview, start: int) -> None:
    """Zero ``buffer`` from ``start`` on, in pieces short enough not to hold the GIL for long."""
    for at in range(start, len(buffer), len(_ZEROS)):
        piece = buffer[at : at + len(_ZEROS)]
        piece[:] = _ZEROS[: len(piece)]
