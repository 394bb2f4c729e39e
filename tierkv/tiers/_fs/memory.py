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
    """Side by side in ``all_headers``."""
    tails: tuple[memoryview, ...]
    worker: int
    """Number of whoever holds these pages; no two do at a time."""
    all_headers: memoryview

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
        set_nbytes = n_chunks * PAGE_NBYTES
        memory = memoryview(mmap.mmap(-1, n * 2 * set_nbytes))
        sets = [memory[i * set_nbytes : (i + 1) * set_nbytes] for i in range(n * 2)]
        workers = enumerate(zip(sets[::2], sets[1::2], strict=True))
        self._free = deque(Scratch(_pages(headers), _pages(tails), i, headers) for i, (headers, tails) in workers)

    def take(self) -> Scratch:
        return self._free.popleft()

    def give(self, scratch: Scratch) -> None:
        self._free.append(scratch)


def _pages(memory: memoryview) -> tuple[memoryview, ...]:
    return tuple(memory[at : at + PAGE_NBYTES] for at in range(0, len(memory), PAGE_NBYTES))


def zero(buffer: memoryview, start: int) -> None:
    """Zero ``buffer`` from ``start`` on, in pieces short enough not to hold the GIL for long."""
    for at in range(start, len(buffer), len(_ZEROS)):
        piece = buffer[at : at + len(_ZEROS)]
        piece[:] = _ZEROS[: len(piece)]
