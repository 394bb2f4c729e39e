"""What passes between the scheduler's thread and the Mover's, at the moments that are unlikely."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Collection
from typing import Any, ClassVar

import pytest

from tests.patience import PATIENCE_S
from tierkv import MemoryTier
from tierkv._mover import MoverLimits
from tierkv.types import ChunkKey, Found
from tierkv.vllm._loop import Absorbed, MoverLoop, Opened

N_BATCHES = 3


class Batch(list[Found]):
    """One chunk. Who counts it on the Mover's thread once it waits there does so when the scheduler has taken it."""

    waiting: ClassVar[Collection[Absorbed]] = ()

    def __init__(self) -> None:
        super().__init__([Found(ChunkKey(bytes(32)), 4096)])
        self.taken = threading.Event()

    def __len__(self) -> int:
        if (
            any(told.found is self for told in tuple(self.waiting))
            and threading.current_thread().name == "tierkv-mover"
        ):
            assert self.taken.wait(PATIENCE_S)
        return super().__len__()


class Scanned(MemoryTier):
    writable = True

    def settled(self, key: ChunkKey) -> bool:
        return False

    async def probe(self, keys: Any) -> Any:
        return [None] * len(keys)

    async def save_order(self, chunks: Any) -> None:
        pass

    async def scan(self) -> AsyncIterator[Batch]:
        for _ in range(N_BATCHES):
            yield Batch()


class Pool:
    def view(self, slot: int) -> memoryview:
        return memoryview(bytearray(4096))

    def close(self) -> None:
        pass


def test_a_scan_goes_on_whenever_its_results_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that was taken while it was being counted waited for ever: the scan stood still behind it."""
    monkeypatch.setattr("tierkv.vllm._loop._MAX_FOUND", 0)
    loop = MoverLoop(2, Pool, chunk_nbytes=4096, stride_nbytes=4096, limits=MoverLimits())
    monkeypatch.setattr(Batch, "waiting", loop._found)
    loop.open(1, Scanned(n_slots=8, name="below"), 0, b"")
    n_taken, deadline = 0, time.monotonic() + PATIENCE_S
    try:
        while n_taken < N_BATCHES and time.monotonic() < deadline:
            told = loop.next_found()
            if told is None:
                time.sleep(0.001)
                continue
            assert isinstance(told.found, Batch)
            told.found.taken.set()
            n_taken += 1
    finally:
        assert loop.close({})
    assert n_taken == N_BATCHES


class Telling(Scanned):
    """Tells of something else than chunks."""

    async def probe(self, keys: Any) -> Any:
        return [Found(ChunkKey(bytes(32)), -1)]

    async def scan(self) -> AsyncIterator[Any]:
        yield [None, 7]


def test_nonsense_from_a_scan_or_a_probe_does_not_reach_the_scheduler() -> None:
    """It ended the engine: the ledgers took it for what it was called."""
    loop = MoverLoop(2, Pool, chunk_nbytes=4096, stride_nbytes=4096, limits=MoverLimits())
    loop.open(1, Telling(n_slots=8, name="below"), 0, b"")
    key = ChunkKey(bytes(32))
    told: list[Any] = []
    asked, deadline = False, time.monotonic() + PATIENCE_S
    try:
        while not any(isinstance(news, Absorbed) for news in told) and time.monotonic() < deadline:
            news = loop.next_news()
            if news is None:
                time.sleep(0.001)
                continue
            told.append(news)
            if isinstance(news, Opened) and not asked:
                loop.probe(1, [key])
                asked = True
        assert loop.next_found() is None
    finally:
        assert loop.close({})
    (answer,) = [news for news in told if isinstance(news, Absorbed)]
    assert answer.asked == [key] and not answer.found
