"""Faults for engines in this process: copies that are slow, corrupt or failing, reads that come back wrong."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time

import numpy as np
import pytest

from tests.patience import PATIENCE_S
from tierkv.device import CopyBatch, CopyJob, Direction, TransferEngine, cpu
from tierkv.device.lowering import DescriptorPool, Lowering
from tierkv.tiers.fs import FSTier
from tierkv.vllm._lookups import Lookups


class InFlight:
    """Copies that were submitted and have not ended, counted by direction, and how much longer each takes."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.met = threading.Event()
        """There were copies in both directions since :meth:`meet`."""
        self.met.set()
        self._open: dict[Direction, int] = dict.fromkeys(Direction, 0)
        self._lock = threading.Lock()

    def meet(self) -> None:
        """From now on copies wait for one in the other direction, and then half a second longer."""
        self.met.clear()

    def add(self, direction: Direction, n: int) -> None:
        with self._lock:
            self._open[direction] += n
            if all(self._open.values()):
                self.met.set()

    def wait(self) -> None:
        """What a copy does first."""
        waits = not self.met.is_set()
        self.met.wait(PATIENCE_S)
        time.sleep(0.5 if waits else self.delay_s)


def slow_copies(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> InFlight:
    """Every copy takes this much longer, as it would on a busy link."""
    copy, submit = cpu.copy_rows, TransferEngine.submit
    in_flight = InFlight(delay_s)

    def slow(batch: CopyBatch) -> None:
        in_flight.wait()
        try:
            copy(batch)
        finally:
            in_flight.add(batch.direction, -1)

    def counted(self: TransferEngine, job: CopyJob, *, refused: Exception | None = None) -> None:
        if refused is None:
            in_flight.add(job.direction, 1)
        submit(self, job, refused=refused)

    monkeypatch.setattr(cpu, "copy_rows", slow)
    monkeypatch.setattr(TransferEngine, "submit", counted)
    return in_flight


def corrupt_loads(monkeypatch: pytest.MonkeyPatch, *groups: int) -> None:
    """Loads into these groups (none given: all) put other bytes into the blocks, and say that all went well."""
    copy, lower = cpu.copy_rows, Lowering.batch
    targets: dict[int, CopyBatch] = {}

    def lowered(self: Lowering, direction, copies, pool):
        batch, descriptors = lower(self, direction, copies, pool)
        chosen = [one for one in copies if not groups or one.group in groups]
        targets[id(descriptors)] = lower(self, direction, chosen, DescriptorPool())[0]
        return batch, descriptors

    def corrupt(batch: CopyBatch) -> None:
        copy(batch)
        if batch.direction is Direction.LOAD:
            chosen = targets[id(batch.device.base)]
            for address, nbytes in zip(chosen.device.tolist(), chosen.nbytes.tolist(), strict=True):
                np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)[:] ^= 0x11

    monkeypatch.setattr(Lowering, "batch", lowered)
    monkeypatch.setattr(cpu, "copy_rows", corrupt)


def fail_copies(monkeypatch: pytest.MonkeyPatch, direction: Direction, *, every: int = 2) -> list[int]:
    """Every n-th copy in this direction raises; returns a list that grows with the numbers of those that did."""
    copy = cpu.copy_rows
    failed: list[int] = []
    seen = [0]

    def failing(batch: CopyBatch) -> None:
        if batch.direction is direction:
            seen[0] += 1
            if seen[0] % every == 0:
                failed.append(seen[0])
                raise OSError("a device error, on purpose")
        copy(batch)

    monkeypatch.setattr(cpu, "copy_rows", failing)
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


def deferred(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Requests that were told to ask again later; grows."""
    defer, asked = Lookups._defer, set[str]()

    def watched(self, request, now, answer):
        asked.add(request.req_id)
        return defer(self, request, now, answer)

    monkeypatch.setattr(Lookups, "_defer", watched)
    return asked


def hung_open(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The fs tier does not open until the event is set."""
    opening, gate = FSTier.open, threading.Event()

    async def hung(self, ctx):
        await asyncio.to_thread(gate.wait)
        await opening(self, ctx)

    monkeypatch.setattr(FSTier, "open", hung)
    return gate
