"""The CPU runtime's promises: order, no blocking, every end told once, nothing touched after close."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from tests.vllm.devices import Collector, Shape, dirty_slots, runtime_over
from tierkv.device import CopyJob, Direction, open_runtime
from tierkv.device.cpu import CpuRuntime
from tierkv.errors import ClosedError, TierError

SHAPE = Shape([(64, 64)], [[0]], 2)
DEADLINE_S = 10.0


class Held(CpuRuntime):
    """Copies that begin only when a gate opens."""

    def hold(self) -> None:
        self.gate, self.entered = threading.Event(), threading.Event()

    def copy(self, job: CopyJob) -> int:
        self.entered.set()
        assert self.gate.wait(DEADLINE_S)
        return super().copy(job)


@pytest.fixture
def held():
    collector = Collector()
    slots = dirty_slots(8, SHAPE.nbytes)
    runtime = Held(SHAPE.tensors(), SHAPE.layout(), memoryview(slots).cast("B"), SHAPE.nbytes, collector)
    runtime.hold()
    yield runtime, collector, slots
    runtime.gate.set()
    runtime.close()


def store(i: int, slot: int, direction: Direction = Direction.STORE) -> CopyJob:
    return CopyJob(i, direction, SHAPE.layout().split([slot, slot + 1], [2], [0], [slot]))


def test_submitting_never_waits_and_jobs_end_in_order(held):
    """A hundred jobs are taken while the first cannot begin; each direction ends in the order of submission."""
    runtime, collector, _ = held
    for i in range(100):
        runtime.submit(store(i, i % 8, Direction.STORE if i % 2 else Direction.LOAD))
    assert runtime.entered.wait(DEADLINE_S)
    assert not collector.done
    runtime.gate.set()
    runtime.wait()
    for direction, parity in ((Direction.STORE, 1), (Direction.LOAD, 0)):
        assert [d.job.id for d in collector.done if d.job.direction is direction] == list(range(parity, 100, 2))


def test_wait_returns_after_the_end_was_told(held):
    """Waiting for one job of one direction neither waits for later ones nor returns before ``done`` has run."""
    runtime, collector, _ = held
    runtime.submit(store(1, 0))
    runtime.submit(store(1, 0, Direction.LOAD))
    waited = threading.Thread(target=lambda: (runtime.wait({(Direction.STORE, 1)}), ended.append(len(collector.done))))
    ended: list[int] = []
    waited.start()
    assert runtime.entered.wait(DEADLINE_S)
    assert not ended
    runtime.gate.set()
    waited.join(DEADLINE_S)
    assert ended[0] >= 1
    runtime.wait({(Direction.STORE, 1), (Direction.STORE, 77)})


def test_close_ends_the_running_copy_and_fails_the_queued_ones(held):
    """Close returns only when no thread touches a slot; what had not begun never does, and its end is told."""
    runtime, collector, slots = held
    for i in range(3):
        runtime.submit(store(i, 2 * i))
    assert runtime.entered.wait(DEADLINE_S)
    closing = threading.Thread(target=runtime.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    runtime.gate.set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert [type(d.error) for d in collector.done] == [type(None), ClosedError, ClosedError]
    assert (slots[2:] == slots[7]).all()
    runtime.submit(store(9, 4))
    assert isinstance(collector.done[-1].error, ClosedError)
    with pytest.raises(ClosedError):
        runtime.copy_plain(store(10, 4))
    assert (slots[2:] == slots[7]).all()


def test_a_failed_copy_is_an_outcome_and_the_next_one_runs():
    """A block that does not exist fails its job alone; so does an observer that raises."""
    collector = Collector()
    tensors, slots = SHAPE.tensors(), dirty_slots(8, SHAPE.nbytes)

    def done(end):
        collector(end)
        if end.job.id == 1:
            raise RuntimeError("observer")

    runtime = runtime_over(tensors, SHAPE.layout(), slots, done)
    runtime.submit(CopyJob(0, Direction.STORE, SHAPE.layout().split([0, 10_000], [2], [0], [0])))
    runtime.submit(store(1, 0))
    runtime.submit(store(2, 2))
    runtime.wait()
    runtime.close()
    assert [d.error is None for d in collector.done] == [False, True, True]
    assert slots[2].tobytes() == tensors[0][2:4].numpy().tobytes()


def test_closing_lets_the_mapping_go():
    """After close no view of the slots is left, so the pool can be unmapped."""
    slots = bytearray(8 * SHAPE.nbytes)
    runtime = CpuRuntime(SHAPE.tensors(), SHAPE.layout(), memoryview(slots), SHAPE.nbytes, Collector())
    runtime.submit(store(0, 0))
    runtime.close()
    slots.extend(b"x")  # BufferError while anything exports it


def test_what_is_no_page_view_is_refused():
    """Wrong type, wrong width, pages in pieces, a device without a runtime, a slot too short: one sentence each."""
    layout, slots = SHAPE.layout(), memoryview(bytearray(1024))
    for tensor in (
        torch.zeros(8, 64, dtype=torch.float32),
        torch.zeros(8, 65, dtype=torch.int8),
        torch.zeros(64, 8, dtype=torch.int8).t(),
    ):
        with pytest.raises(TierError, match="tensor 0"):
            open_runtime([tensor], layout, slots, 128, Collector())
    with pytest.raises(TierError, match="meta: only the cpu runtime"):
        open_runtime([torch.zeros(8, 64, dtype=torch.int8, device="meta")], layout, slots, 128, Collector())
    with pytest.raises(TierError, match="128 bytes"):
        open_runtime(SHAPE.tensors(), layout, slots, 64, Collector())


@pytest.mark.parametrize("row_nbytes", [100, 8192])
def test_pieces_and_rows_copy_the_same(row_nbytes):
    """More rows than one piece holds, short rows gathered and long ones copied singly, against one assignment."""
    shape = Shape([(row_nbytes, row_nbytes)], [[0]], 1, n_blocks=15_000 if row_nbytes == 100 else 200)
    tensors = shape.tensors()
    n = shape.n_blocks
    order = np.random.default_rng(1).permutation(n)
    slots = dirty_slots(n, row_nbytes)
    runtime = runtime_over(tensors, shape.layout(), slots)
    runtime.copy(CopyJob(0, Direction.STORE, shape.layout().split(range(n), [n], [0], order.tolist())))
    np.testing.assert_array_equal(slots[order], tensors[0].numpy())
