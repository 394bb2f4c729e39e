"""Scan results on their way from the scan's thread to the one async reader."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from tierkv.tiers._fs.format import PAGE_NBYTES
from tierkv.tiers._fs.index import Index, Span
from tierkv.types import ChunkKey, Found

BATCH: Final = 2_000
"""Most chunks of one batch: what a step of the serving engine can take in."""


class Listed(NamedTuple):
    """One file of ours, or of a dead owner, in our namespace, as the scan found it."""

    order: float
    """Coldest first; comparable within one scan."""
    key: ChunkKey
    owner: str
    nbytes: int
    source: Index | None
    """Where its record is written, at ``place``; None if only its name is known."""
    place: int
    at: int | None = None
    """Slot of the owner's slab; None for a file."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some entries of an index that follow each other."""

    index: Index
    span: Span


class Feed:
    """A queue of batches. They are built when they are taken, so what waits here costs no more than the listing.

    Concurrency: ``put`` and ``close`` from any thread; ``take`` from one task at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: deque[Sequence[Listed] | Part] = deque()
        self._closed = False
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def put(self, listed: Sequence[Listed]) -> None:
        """Queue chunks, coldest first, in batches."""
        with self._lock:
            self._batches.extend(listed[at : at + BATCH] for at in range(0, len(listed), BATCH))
        self._wake()

    def put_span(self, index: Index, span: Span) -> None:
        """Queue one batch of an index."""
        with self._lock:
            self._batches.append(Part(index, span))
        self._wake()

    def close(self) -> None:
        """What is queued can still be taken, then the feed ends."""
        with self._lock:
            self._closed = True
        self._wake()

    async def take(self) -> list[Found] | None:
        """The next batch; None once the feed has ended."""
        event = asyncio.Event()
        with self._lock:
            self._waiter = (asyncio.get_running_loop(), event)
        while True:
            with self._lock:
                batch = self._batches.popleft() if self._batches else None
                closed = self._closed
                event.clear()
            if batch is not None:
                return [*_found_in(batch)] if isinstance(batch, Part) else [_found(item) for item in batch]
            if closed:
                return None
            await event.wait()

    def _wake(self) -> None:
        with self._lock:
            waiter = self._waiter
        if waiter is not None:
            loop, event = waiter
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:
                return  # the reader's loop is gone, and the reader with it


def _found(item: Listed) -> Found:
    chunk = None if item.source is None else item.source.chunk(item.place, item.key)
    return Found(item.key, item.nbytes, owned=True, chunk=chunk)


def _found_in(part: Part) -> Iterator[Found]:
    index, span = part.index, part.span
    for place, (key, pages) in enumerate(zip(span.keys, span.pages, strict=True), span.first):
        yield Found(key, pages * PAGE_NBYTES, owned=True, chunk=index.chunk(place, key))
