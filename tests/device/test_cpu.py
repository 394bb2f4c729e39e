"""Host memory as a device: order, no blocking, every end told once, nothing touched after close."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from tests.device.shapes import Copier, Shape, copier, dirty_slots
from tests.patience import PATIENCE_S
from tierkv.device import CopyJob, DeviceTier, Direction, HostSlots, cpu, open_runtime
from tierkv.errors import ClosedError, TierError

SHAPE = Shape([(64, 64)], [[0]], 2)
DEADLINE_S = PATIENCE_S


@pytest.fixture
def gate(monkeypatch):
    """Copies that begin only when the gate opens: (opened, entered)."""
    opened, entered = threading.Event(), threading.Event()
    copy = cpu.copy_rows

    def held(batch):
        entered.set()
        assert opened.wait(DEADLINE_S)
        copy(batch)

    monkeypatch.setattr(cpu, "copy_rows", held)
    yield opened, entered
    opened.set()


@pytest.fixture
def held(gate):
    slots = dirty_slots(8, SHAPE.nbytes)
    with copier(SHAPE.tensors(), SHAPE.layout(), slots) as made:
        yield made.engine, slots
        gate[0].set()


def job(i: int, slot: int, direction: Direction = Direction.STORE) -> CopyJob:
    return CopyJob(i, direction, SHAPE.layout().split([slot, slot + 1], [2], [0], [slot]))


def test_submitting_never_waits_and_jobs_end_in_order(held, gate):
    """A hundred jobs are taken while the first cannot begin; each direction ends in the order of submission."""
    engine, _ = held
    for i in range(100):
        engine.submit(job(i, i % 7, Direction.STORE if i % 2 else Direction.LOAD))
    assert gate[1].wait(DEADLINE_S)
    assert not engine.poll()
    gate[0].set()
    engine.wait()
    ended = engine.poll()
    for direction, parity in ((Direction.STORE, 1), (Direction.LOAD, 0)):
        assert [d.job.id for d in ended if d.job.direction is direction] == list(range(parity, 100, 2))


def test_waiting_for_one_job_waits_for_no_later_one(held, gate):
    """``wait`` returns when the named job has ended, which is told once; unknown ones have ended."""
    engine, _ = held
    engine.submit(job(1, 0))
    engine.wait({(Direction.LOAD, 1), (Direction.STORE, 77)})
    assert not engine.poll()
    gate[0].set()
    engine.wait({(Direction.STORE, 1)})
    assert [done.job.id for done in engine.poll()] == [1]
    assert not engine.poll()


def test_close_waits_for_what_was_submitted(held, gate):
    """Close returns only when no thread touches a slot; a late job fails at once and touches nothing."""
    engine, slots = held
    for i in range(3):
        engine.submit(job(i, 2 * i))
    assert gate[1].wait(DEADLINE_S)
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate[0].set()
    closing.join(DEADLINE_S)
    assert [done.error for done in engine.poll()] == [None] * 3
    before = slots.copy()
    engine.submit(job(9, 6))
    assert isinstance(engine.poll()[0].error, ClosedError)
    np.testing.assert_array_equal(slots, before)


def test_a_failed_copy_is_an_outcome_and_the_next_one_runs(monkeypatch):
    """A block that does not exist fails its job alone, and so does a store whose copy raises."""
    tensors, slots = SHAPE.tensors(), dirty_slots(8, SHAPE.nbytes)
    copy, calls = cpu.copy_rows, []

    def second_fails(batch):
        calls.append(batch)
        if len(calls) == 2:
            raise OSError("on purpose")
        copy(batch)

    monkeypatch.setattr(cpu, "copy_rows", second_fails)
    with copier(tensors, SHAPE.layout(), slots) as made:
        made.engine.submit(CopyJob(0, Direction.STORE, SHAPE.layout().split([0, 10_000], [2], [0], [0])))
        for i in range(1, 4):
            made.engine.submit(job(i, 2 * i - 2))
        made.engine.wait()
        ends = made.engine.poll()
    assert [type(done.error) for done in ends] == [TierError, type(None), OSError, type(None)]
    assert slots[4].tobytes() == tensors[0][4:6].tobytes()


@pytest.mark.parametrize("plain_fails", [False, True])
def test_a_failed_load_is_tried_once_more_plainly(monkeypatch, plain_fails):
    """The second way brings the bytes; if it fails too, the load fails, and nothing else does."""
    tensors, slots = SHAPE.tensors(), dirty_slots(8, SHAPE.nbytes)
    copy = cpu.copy_rows

    def broken(*_):
        raise OSError("on purpose")

    monkeypatch.setattr(cpu, "copy_rows", broken)
    if plain_fails:
        monkeypatch.setattr(cpu.CpuRuntime, "copy_plain", broken)
    with copier(tensors, SHAPE.layout(), slots) as made:
        made.engine.submit(job(0, 0, Direction.LOAD))
        made.engine.wait()
        (done,) = made.engine.poll()
        stats = made.engine.stats()
        monkeypatch.setattr(cpu, "copy_rows", copy)
        made.copy(job(1, 2))
    assert (done.error is not None) is plain_fails
    assert (tensors[0][:2] == slots[0, 0]).all() is np.bool_(not plain_fails)
    assert (stats.n_retried, stats.n_failed[Direction.LOAD]) == (1, int(plain_fails))
    assert slots[2].tobytes() == tensors[0][2:4].tobytes()


def test_closing_lets_the_mapping_go():
    """After close no view of the slots is left, so the pool can be unmapped."""
    slots = bytearray(8 * SHAPE.nbytes)
    tier = DeviceTier(blocks_per_chunk=2)
    tier.register_pages(SHAPE.tensors(), SHAPE.layout())
    tier.bind(HostSlots.over(memoryview(slots), SHAPE.nbytes))
    tier.submit(Direction.STORE, [0, 1], [0])
    tier.close()
    assert tier.poll()[0].error is None
    slots.extend(b"x")  # BufferError while anything exports it


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (np.zeros((8, 64), np.float32), "tensor 0"),
        (np.zeros((8, 65), np.int8), "tensor 0"),
        (np.zeros((64, 8), np.int8).T, "tensor 0"),
        (np.lib.stride_tricks.as_strided(np.zeros(200, np.int8), (8, 64), (16, 1)), "tensor 0"),
    ],
    ids=["wide elements", "another length", "pages in pieces", "pages that overlap"],
)
def test_what_is_no_page_view_is_refused(tensor, says):
    """Tensors that are not what the layout says: one sentence with shape and strides."""
    with pytest.raises(TierError, match=says):
        DeviceTier(blocks_per_chunk=2).register_pages([tensor], SHAPE.layout())


def test_slots_that_are_too_short_and_devices_without_a_runtime():
    """Both are refused with the numbers, before anything is copied."""
    tier = DeviceTier(blocks_per_chunk=2)
    tier.register_pages(SHAPE.tensors(), SHAPE.layout())
    with pytest.raises(TierError, match="128 bytes"):
        tier.bind(HostSlots.over(memoryview(bytearray(1024)), 64))
    with pytest.raises(TierError, match="no runtime for meta"):
        open_runtime("meta")


@pytest.mark.parametrize("row_nbytes", [100, 8192])
def test_pieces_and_rows_copy_the_same(row_nbytes):
    """More rows than one piece holds, short rows gathered and long ones copied singly, against one assignment."""
    shape = Shape([(row_nbytes, row_nbytes)], [[0]], 1, n_blocks=15_000 if row_nbytes == 100 else 200)
    tensors, n = shape.tensors(), shape.n_blocks
    order = np.random.default_rng(1).permutation(n)
    slots = dirty_slots(n, row_nbytes)
    with copier(tensors, shape.layout(), slots) as made:
        made.copy(CopyJob(0, Direction.STORE, shape.layout().split(range(n), [n], [0], order.tolist())))
    np.testing.assert_array_equal(slots[order], tensors[0])


def test_large_gaps_are_zeroed_beside_the_copy():
    """Half a mebibyte of another group's area is zeroed by a thread, and the job ends only after that."""
    wide = 300_000
    shape = Shape([(64, 64), (wide, wide)], [[0], [1]], 2)
    slots = dirty_slots(2, shape.nbytes)
    with copier(shape.tensors(), shape.layout(), slots) as made:
        made.copy(CopyJob(0, Direction.STORE, shape.layout().split([1, 2], [2, 0], [0, 0], [1])))
    assert not slots[1, 128:].any()
    assert slots[0].all()


class Accelerator(cpu.CpuRuntime):
    """Host memory that behaves as an accelerator's: copies to pageable memory block whoever submits them."""

    blocks_on_pageable = True


@pytest.mark.parametrize("has_pinned", [True, False])
def test_slots_that_cannot_be_locked_go_through_a_ring(monkeypatch, caplog, has_pinned):
    """If the device has pinned memory for one, else straight: a warning names the way, and every byte comes back."""
    if not has_pinned:

        def none_left(self, nbytes, /):
            raise TierError("device", "none left")

        monkeypatch.setattr(Accelerator, "alloc_host", none_left)
    tensors, slots = SHAPE.tensors(), dirty_slots(8, SHAPE.nbytes)
    want = tensors[0].copy()
    tier = DeviceTier(blocks_per_chunk=2, runtime=Accelerator())
    tier.register_pages(tensors, SHAPE.layout())
    tier.bind(HostSlots.over(slots.data.cast("B"), SHAPE.nbytes))
    tier.submit(Direction.STORE, [4, 5], [3])
    tier.wait()
    tensors[0][4:6] = 0
    tier.submit(Direction.LOAD, [4, 5], [3])
    tier.wait()
    assert [done.error for done in tier.poll()] == [None, None]
    np.testing.assert_array_equal(tensors[0], want)
    assert tier.stats().slots.value == "pageable"
    assert ("staged" in tier.stats().path) is has_pinned
    assert ("no pinned memory" in caplog.text) is not has_pinned
    assert "cannot page-lock the 8 slots" in caplog.text
    tier.close()


class TestAwaiting:
    """The same engine for asyncio: a thread sleeps until there is something to look at."""

    async def test_store_and_load_bring_every_byte_back(self):
        """Many at once, both directions, each answered when its own copy has ended."""
        tensors, slots = SHAPE.tensors(), dirty_slots(8, SHAPE.nbytes)
        want = tensors[0].copy()
        tier = DeviceTier(blocks_per_chunk=2)
        tier.register_pages(tensors, SHAPE.layout())
        tier.bind(HostSlots.over(slots.data.cast("B"), SHAPE.nbytes))
        assert await asyncio.gather(*(tier.store([2 * i, 2 * i + 1], [i]) for i in range(8))) == [True] * 8
        tensors[0][:16] = 0
        assert await asyncio.gather(*(tier.load([i], [2 * i + 1], first_blocks=[1]) for i in range(8))) == [True] * 8
        np.testing.assert_array_equal(tensors[0][1:16:2], want[1:16:2])
        assert not tensors[0][0:16:2].any()
        assert not tier.poll(), "what was awaited is told once"
        tier.close()

    async def test_a_cancelled_copy_returns_only_after_its_end(self, gate):
        """The blocks are the caller's again when the cancellation arrives, not before."""
        tier = DeviceTier(blocks_per_chunk=2)
        tier.register_pages(SHAPE.tensors(), SHAPE.layout())
        slots = dirty_slots(8, SHAPE.nbytes)
        tier.bind(HostSlots.over(slots.data.cast("B"), SHAPE.nbytes))
        task = asyncio.create_task(tier.store([0, 1], [0]))
        await asyncio.to_thread(gate[1].wait, DEADLINE_S)
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        gate[0].set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (slots[0] != slots[7, 0]).any()
        tier.close()


def test_a_copier_is_closed_with_its_threads():
    """No thread of an engine outlives its close."""
    before = threading.active_count()
    made = Copier(SHAPE.tensors(), SHAPE.layout(), dirty_slots(8, SHAPE.nbytes))
    made.copy(job(0, 0))
    made.close()
    assert threading.active_count() == before
