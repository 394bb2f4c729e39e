"""What passes between the scheduler's thread and the Mover's, at the moments that are unlikely."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tierkv import MemoryTier
from tierkv._mover import MoverLimits
from tierkv.types import ChunkKey, Found
from tierkv.vllm._loop import MoverLoop

N_BATCHES = 3


class Batch(list[Found]):
    """One chunk. Who counts it on the Mover's thread does so when the scheduler has taken it, and no sooner."""

    def __init__(self) -> None:
        super().__init__([Found(ChunkKey(bytes(32)), 4096)])
        self.taken = threading.Event()

    def __len__(self) -> int:
        if threading.current_thread().name == "tierkv-mover":
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
