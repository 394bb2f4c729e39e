"""Faults for engines in this process: copies that are slow, corrupt or failing, reads that come back wrong."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tierkv.device import CopyJob, Direction
from tierkv.device.cpu import CpuRuntime
from tierkv.tiers.fs import FSTier


class InFlight:
    """Copies that were submitted and have not ended, counted by direction, and how much longer each takes."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self._open: dict[Direction, int] = dict.fromkeys(Direction, 0)
        self._lock = threading.Lock()

    def add(self, direction: Direction, n: int) -> None:
        with self._lock:
            self._open[direction] += n

    @property
    def both(self) -> bool:
        with self._lock:
            return all(self._open.values())


def slow_copies(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> InFlight:
    """Every copy takes this much longer, as it would on a busy link."""
    copy, submit = CpuRuntime.copy, CpuRuntime.submit
    in_flight = InFlight(delay_s)

    def slow(self: CpuRuntime, job: CopyJob) -> int:
        time.sleep(in_flight.delay_s)
        try:
            return copy(self, job)
        finally:
            in_flight.add(job.direction, -1)

    def counted(self: CpuRuntime, job: CopyJob) -> None:
        in_flight.add(job.direction, 1)
        submit(self, job)

    monkeypatch.setattr(CpuRuntime, "copy", slow)
    monkeypatch.setattr(CpuRuntime, "submit", counted)
    return in_flight


def corrupt_loads(monkeypatch: pytest.MonkeyPatch, *groups: int) -> None:
    """Loads into these groups (none given: all) put other bytes into the blocks, and say that all went well."""
    copy = CpuRuntime.copy

    def corrupt(self: CpuRuntime, job: CopyJob) -> int:
        n_copied = copy(self, job)
        if job.direction is Direction.LOAD:
            for one in job.copies:
                if not groups or one.group in groups:
                    for bound in self._bound[one.group]:
                        bound.pages[list(one.blocks)] ^= 0x11
        return n_copied

    monkeypatch.setattr(CpuRuntime, "copy", corrupt)


def fail_copies(monkeypatch: pytest.MonkeyPatch, direction: Direction, *, every: int = 2) -> list[int]:
    """Every n-th copy in this direction raises; returns a list that grows with the ids of those that did."""
    copy = CpuRuntime.copy
    failed: list[int] = []
    seen = [0]

    def failing(self: CpuRuntime, job: CopyJob) -> int:
        if job.direction is direction:
            seen[0] += 1
            if seen[0] % every == 0:
                failed.append(job.id)
                raise OSError("a device error, on purpose")
        return copy(self, job)

    monkeypatch.setattr(CpuRuntime, "copy", failing)
    return failed


def corrupt_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that the fs tier has verified are changed on their way into the primary: what a missed bit would do."""
    read = FSTier.read

    async def corrupt(self, items):
        outcomes = await read(self, items)
        for (_, buffer), outcome in zip(items, outcomes, strict=True):
            if outcome.ok:
                for i in range(0, len(buffer), 64):
                    buffer[i + 2] ^= 0x11
        return outcomes

    monkeypatch.setattr(FSTier, "read", corrupt)


def slow_open(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> None:
    """The fs tier takes this much longer to open."""
    opening = FSTier.open

    async def slow(self, ctx):
        await asyncio.sleep(delay_s)
        await opening(self, ctx)

    monkeypatch.setattr(FSTier, "open", slow)


def hung_open(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The fs tier does not open until the event is set."""
    opening, gate = FSTier.open, threading.Event()

    async def hung(self, ctx):
        await asyncio.to_thread(gate.wait)
        await opening(self, ctx)

    monkeypatch.setattr(FSTier, "open", hung)
    return gate
