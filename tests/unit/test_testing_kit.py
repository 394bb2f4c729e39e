"""The tools of the kit do what they promise: clock, gate, faults, leak checks, blocking calls."""

from __future__ import annotations

import asyncio
import copy
import os
import threading
import time
import traceback
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tierkv import Chunk, ChunkKey, MemoryTier, Outcome, Reason, Status
from tierkv.protocols import ScanTier, TierContext
from tierkv.testing import (
    ConformanceError,
    Does,
    Fault,
    FaultTier,
    Gate,
    ManualClock,
    Report,
    blocking_calls,
    no_leaked_tasks,
    no_leaks,
)
from tierkv.tiers.fs import FSTier

A, B = ChunkKey(b"a"), ChunkKey(b"b")
NBYTES = 10


# -- clock ----------------------------------------------------------------------------------------------------------


def test_time_passes_only_when_told() -> None:
    """It starts where it is told to, advances by what it is told, and never runs backwards."""
    clock = ManualClock(5.0)
    assert clock() == clock() == 5.0
    assert clock.advance(2.5) == clock() == 7.5
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)
    clock.restart()
    assert clock() == 5.0


def test_a_copy_of_a_clock_is_the_clock() -> None:
    """A copied policy keeps the time of the original."""
    clock = ManualClock()
    copied = copy.deepcopy({"clock": clock})["clock"]
    clock.advance(1)
    assert copied() == 1
    assert copy.copy(clock) is clock


# -- gate -----------------------------------------------------------------------------------------------------------


async def test_a_gate_holds_and_lets_through_in_order() -> None:
    """Waiters are seen by label; let() counts the first ones through, open() everybody, also who comes later."""
    gate = Gate()
    passed: list[str] = []

    async def pass_by(label: str) -> None:
        await gate.wait(label)
        passed.append(label)

    async with asyncio.TaskGroup() as tasks:
        for label in ("one", "two", "three"):
            tasks.create_task(pass_by(label))
        await gate.arrived(3)
        assert gate.waiting == ("one", "two", "three")
        assert not passed
        gate.let()
        assert gate.n_waiting == 2, "who is let through does not wait any more, though its task has not run yet"
        await asyncio.sleep(0)
        assert passed == ["one"]
        with pytest.raises(ValueError, match="3 were to pass, but 2 wait"):
            gate.let(3)
        gate.open()
        await pass_by("four")
    assert sorted(passed) == ["four", "one", "three", "two"]
    assert gate.n_passed == 4
    gate.close()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(gate.wait(), 0.01)
    assert gate.n_waiting == 0, "a cancelled waiter is not counted"


async def test_waiting_for_somebody_who_does_not_come_ends() -> None:
    """arrived() says what was there instead of hanging the test."""
    gate = Gate()
    waiter = asyncio.create_task(gate.wait("only"))
    with pytest.raises(TimeoutError, match=r"2 were to come .* there are 1: \('only',\)"):
        await gate.arrived(2, timeout_s=0.01)
    gate.open()
    await waiter


# -- faults ---------------------------------------------------------------------------------------------------------


def buffer(byte: int = 0) -> memoryview:
    return memoryview(bytearray([byte]) * NBYTES)


def items(*keys: ChunkKey) -> list[tuple[Chunk, memoryview]]:
    return [(Chunk(key, nbytes=NBYTES), buffer(key[0])) for key in keys]


@pytest.fixture
async def tier() -> AsyncIterator[FaultTier]:
    made = FaultTier(MemoryTier())
    await made.open(TierContext(NBYTES, 4096, b"", 4 * 4096))
    await made.write(items(A, B))
    yield made
    await made.aclose()


async def read(tier: FaultTier, *keys: ChunkKey) -> tuple[list[Outcome], list[bytes]]:
    views = [buffer(0xEE) for _ in keys]
    outcomes = await tier.read(list(zip(keys, views, strict=True)))
    return list(outcomes), [bytes(view) for view in views]


async def test_without_a_fault_it_is_the_inner_tier(tier: FaultTier) -> None:
    """Calls go through and are counted."""
    outcomes, data = await read(tier, B, A)
    assert [outcome.ok for outcome in outcomes] == [True, True]
    assert data == [b"b" * NBYTES, b"a" * NBYTES]
    assert tier.n_calls == {"open": 1, "write": 1, "read": 1}
    assert not tier.struck


@pytest.mark.parametrize(("calls", "struck"), [(2, [2]), (range(2, 4), [2, 3]), ({1, 4}, [1, 4]), (None, [1, 2, 3, 4])])
async def test_a_fault_strikes_on_the_calls_it_names(tier: FaultTier, calls, struck) -> None:
    """The nth, some, or all; other verbs are left alone; the error is the one that was given."""
    tier.faults.append(Fault("contains", Does.RAISE, calls, error=OSError(28, "full")))
    failed = []
    for call in range(1, 5):
        try:
            await tier.contains([A])
        except OSError as error:
            failed.append((call, error.errno))
        assert (await read(tier, A))[0][0].ok
    assert failed == [(call, 28) for call in struck]
    assert tier.struck == [("contains", call, Does.RAISE) for call in struck]


async def test_short_and_reordered_answers(tier: FaultTier) -> None:
    """The work is done; the answer is one short, or in the wrong order."""
    tier.faults += [Fault("read", Does.SHORT, 1), Fault("read", Does.REORDER, 2), Fault("contains", Does.SHORT)]
    outcomes, data = await read(tier, A, B)
    assert [outcome.key for outcome in outcomes] == [A]
    assert data[1] == b"b" * NBYTES
    outcomes, _ = await read(tier, A, B)
    assert [outcome.key for outcome in outcomes] == [B, A]
    assert list(await tier.contains([A, B])) == [True]


async def test_lies(tier: FaultTier) -> None:
    """Wrong bytes said to be right; writes and deletes that did not happen; the opposite of what is there."""
    tier.faults += [Fault(verb, Does.LIE, 1) for verb in ("read", "delete", "contains")] + [Fault("write", Does.LIE, 2)]
    outcomes, data = await read(tier, A)
    assert outcomes[0].ok
    assert data[0] not in (b"a" * NBYTES, bytes([0xEE]) * NBYTES)
    assert list(await tier.contains([A, ChunkKey(b"c")])) == [False, True]
    await tier.delete([A])
    assert list(await tier.contains([A])) == [True]
    assert [outcome.ok for outcome in await tier.write(items(ChunkKey(b"c")))] == [True]
    assert list(await tier.contains([ChunkKey(b"c")])) == [False]


async def test_values_that_say_no(tier: FaultTier) -> None:
    """FAIL and MISS are outcomes, not exceptions, and nothing was done."""
    tier.faults += [Fault("read", Does.FAIL, 1), Fault("read", Does.MISS, 2), Fault("write", Does.MISS)]
    (outcome,), (data,) = await read(tier, A)
    assert (outcome.status, outcome.reason) == (Status.FAILED, Reason.TIER_ERROR)
    assert data == bytes([0xEE]) * NBYTES
    assert (await read(tier, A))[0][0].status is Status.MISSING
    (outcome,) = await tier.write(items(A))
    assert (outcome.status, outcome.reason) == (Status.REFUSED, Reason.FULL)
    tier.faults.clear()
    assert (await read(tier, A))[0][0].ok


async def test_raising_after_the_work_was_done(tier: FaultTier) -> None:
    """The caller hears of a failure, and the chunk is there."""
    tier.faults.append(Fault("write", Does.RAISE_AFTER))
    with pytest.raises(OSError, match="planted"):
        await tier.write(items(ChunkKey(b"c")))
    assert list(await tier.contains([ChunkKey(b"c")])) == [True]


async def test_a_hung_call_goes_on_late(tier: FaultTier) -> None:
    """It waits at the gate, is seen there, and does its work when it is let through; aclose opens the gate."""
    tier.faults.append(Fault("read", Does.HANG))
    hung = [asyncio.create_task(read(tier, key)) for key in (A, B)]
    await tier.gate.arrived(2)
    tier.gate.let()
    outcomes, data = await hung[0]
    assert outcomes[0].ok
    assert data == [b"a" * NBYTES]
    assert not hung[1].done()
    await tier.aclose()
    with pytest.raises(Exception, match="not open"):
        await hung[1]


async def test_a_slow_call_takes_its_time(tier: FaultTier) -> None:
    """At least the delay, and then it does what it should."""
    tier.faults.append(Fault("read", Does.SLOW, delay_s=0.02))
    before = time.monotonic()
    assert (await read(tier, A))[0][0].ok
    assert time.monotonic() - before >= 0.02


def test_a_wrong_verb_is_refused() -> None:
    """A fault that could never strike is a mistake of the test."""
    with pytest.raises(ValueError, match="a fault of 'raed': the verbs are open"):
        FaultTier(MemoryTier(), Fault("raed", Does.LIE))


async def test_capabilities_pass_through_and_can_be_struck(tmp_path: Path) -> None:
    """A wrapped persistent tier scans, probes and has a share; what is no verb is the inner tier's."""
    tier = FaultTier(FSTier(tmp_path / "root", min_free=0), Fault("probe", Does.MISS, 2), Fault("probe", Does.LIE, 3))
    assert isinstance(tier, ScanTier)
    assert not tier.writable
    await tier.open(TierContext(NBYTES, 4096, b"", 1 << 20))
    try:
        while not tier.writable:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.002)
        await tier.write(items(A))
        assert tier.share_nbytes() == tier.inner.share_nbytes() > 0
        assert tier.counters() == tier.inner.counters()
        for expected in ([A, None], [None, None], [None, B]):
            found = await tier.probe([A, B])
            assert [item and item.key for item in found] == expected
    finally:
        await tier.aclose()


# -- leaks and blocking ---------------------------------------------------------------------------------------------


def test_a_leaked_descriptor_is_seen() -> None:
    """By its number and what it leads to; one that is closed within the grace is none."""
    fds: list[int] = []
    with pytest.raises(ConformanceError, match=r"the test leaves nothing behind: 'descriptor \d+ -> /'"):  # noqa: SIM117
        with no_leaks("the test", grace_s=0.0):
            fds.append(os.open("/", os.O_RDONLY))
    os.close(fds.pop())
    with no_leaks():
        os.close(os.open("/", os.O_RDONLY))


def test_a_leaked_thread_is_seen() -> None:
    """By its name."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left alone")
    with pytest.raises(ConformanceError, match="thread 'left alone'"), no_leaks(grace_s=0.0):
        thread.start()
    stop.set()
    thread.join()


def test_an_exception_goes_before_a_leak() -> None:
    """What went wrong is more interesting than what it left behind."""
    with pytest.raises(ZeroDivisionError), no_leaks(grace_s=0.0):
        raise ZeroDivisionError


async def test_a_leaked_task_is_seen() -> None:
    """By its name; one that is about to end is none."""
    with pytest.raises(ConformanceError, match="no task running: 'left alone'"):
        async with no_leaked_tasks():
            task = asyncio.create_task(asyncio.sleep(60), name="left alone")
    task.cancel()
    async with no_leaked_tasks():
        ended = asyncio.create_task(asyncio.sleep(0))
    assert ended.done()


async def test_blocking_calls_are_seen_on_this_thread_only(tmp_path: Path) -> None:
    """A file that is opened here counts, one that is opened by a thread does not; nor what comes later."""
    with blocking_calls() as seen:
        await asyncio.to_thread((tmp_path / "there").write_bytes, b"")
        assert not seen
        time.sleep(0.0)  # noqa: ASYNC251 - to be seen
        (tmp_path / "here").write_bytes(b"")
    (tmp_path / "later").write_bytes(b"")
    assert [call.partition("(")[0] for call in seen] == ["time.sleep", "open"]


def test_a_report_reads_like_a_sentence() -> None:
    """For whoever prints it."""
    assert str(Report(("order", "memory"), ("Expiring",))) == "passed: order, memory; skipped: Expiring"
    assert str(Report(("order",))) == "passed: order"


async def test_an_error_that_is_raised_for_ever_keeps_no_frames() -> None:
    """One instance is raised at every call that a fault strikes: it must not remember all who have seen it."""
    tier = FaultTier(MemoryTier(), Fault("delete", Does.RAISE))
    lengths = set()
    for _ in range(3):
        with pytest.raises(OSError, match="planted") as raised:
            await tier.delete([])
        lengths.add(len(list(traceback.walk_tb(raised.value.__traceback__))))
    assert len(lengths) == 1
