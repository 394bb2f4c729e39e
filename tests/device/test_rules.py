"""The engine's rules on the simulated device: right under every schedule, and every planted bug is found.

A seed draws the traffic, the schedule's choices and the size of chunks. CI runs a tenth of what the nightly run does.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tierkv.device
from tests.device.planted import ENGINE_BUGS, SCHEDULER_BUGS, StoreWithoutProducer, WaitsForTheDevice
from tests.device.workload import N_BLOCKS, N_SLOTS, SimMachine, Workload
from tierkv.device import HostKind, HostSlots, TransferEngine, staging
from tierkv.device.runtime import Direction
from tierkv.errors import ClosedError, TierError
from tierkv.testing.simdevice import RaceError, SimSchedule, overlaps

PER_CHUNK = (1, 3, 4, 8)
CI_SEEDS = range(20)
NIGHTLY_SEEDS = range(20, 200)

schedules = pytest.mark.parametrize("schedule", list(SimSchedule))
bugs = pytest.mark.parametrize(
    "bug", [*ENGINE_BUGS, *SCHEDULER_BUGS], ids=lambda bug: bug if isinstance(bug, str) else bug.__name__
)


def workload(seed: int, schedule: SimSchedule, bug=None, **kwargs) -> Workload:
    engine = bug if isinstance(bug, type) else TransferEngine
    machine = SimMachine(seed, schedule, per_chunk=PER_CHUNK[seed % 4], engine=engine, **kwargs)
    return Workload(machine, seed, (bug,) if isinstance(bug, str) else ())


def runs_clean(seed: int, schedule: SimSchedule) -> None:
    work = workload(seed, schedule, host=list(HostKind)[seed % 2])
    assert work.run() == [], (seed, schedule)
    assert not work.errors
    assert work.n_stored > 0, "nothing was tried"
    check_at_rest(work)
    work.m.engine.close()
    assert work.m.runtime.closed and not work.m.runtime.n_pinned


def check_at_rest(work: Workload) -> None:
    """Every slot and every block is somewhere, once."""
    slots = [*work.free_slots, *(chunk.slot for chunk in work.ready.values())]
    assert sorted(slots) == list(range(N_SLOTS))
    assert sorted(work.free_blocks) == list(range(N_BLOCKS))
    assert not any(chunk.n_readers for chunk in work.ready.values())
    assert not work.m.engine.n_open


def finds(bug, seed: int, schedule: SimSchedule) -> None:
    with pytest.raises(RaceError):
        workload(seed, schedule, bug).run(1000)  # it ends with the first race


@schedules
def test_no_race_and_every_byte(schedule):
    """Stores, loads, evictions and preemptions of two groups that share a tensor: all bytes right, no false alarm."""
    for seed in CI_SEEDS:
        runs_clean(seed, schedule)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@schedules
def test_no_race_and_every_byte_at_length(schedule):
    """The other 180 seeds."""
    for seed in NIGHTLY_SEEDS:
        runs_clean(seed, schedule)


@bugs
def test_a_planted_bug_is_found(bug):
    """On every seed, under schedules in turn, by the race check alone."""
    for seed in CI_SEEDS:
        finds(bug, seed, list(SimSchedule)[seed % 6])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@schedules
@bugs
def test_a_planted_bug_is_found_at_length(bug, schedule):
    """On every one of 200 seeds under every schedule."""
    for seed in range(200):
        finds(bug, seed, schedule)


def test_without_the_race_check_a_bug_shows_as_wrong_bytes():
    """The workload looks at bytes too: a store that overtakes its kernel is seen, if the schedule lets it."""
    wrong = workload(1, SimSchedule.COPIES_FIRST, StoreWithoutProducer, races="ignore").run()
    assert any("instead of" in text for text in wrong)


@given(
    actions=st.lists(st.sampled_from(["store", "load", "settle", "preempt"]), max_size=40),
    seed=st.integers(0, 2**32),
    schedule=st.sampled_from(list(SimSchedule)),
    per_chunk=st.sampled_from(PER_CHUNK),
    host=st.sampled_from([HostKind.PINNED, HostKind.REGISTERED]),
)
def test_any_sequence_of_jobs(actions, seed, schedule, per_chunk, host):
    """Drawn sequences, unaligned first blocks, any schedule: bytes right, no race, nothing left over."""
    work = Workload(SimMachine(seed, schedule, per_chunk=per_chunk, host=host), seed)
    for action in actions:
        getattr(work, action)()
    assert work.finish() == []
    check_at_rest(work)


@pytest.mark.parametrize("seed", range(4))
def test_pageable_slots_are_copied_from_threads(seed):
    """Copies that block whoever submits them: bytes right, and it is never the submitting thread that waits."""
    work = workload(seed, SimSchedule.RANDOM, host=HostKind.PAGEABLE)
    for _ in range(60):
        work.rng.choice((work.store, work.load, work.settle))()
    names = {thread for _, thread in work.m.sim.host_waits}
    assert work.finish() == []  # it waits itself, at the very end
    copiers = {"tierkv-store", "tierkv-load"}
    assert names <= copiers and copiers & {thread for _, thread in work.m.sim.host_waits}
    work.m.engine.close()


class TestStaging:
    """Pageable slots by way of a pinned ring: the same bytes, with halves that hold few pairs or all of them."""

    @pytest.mark.parametrize("half_nbytes", [320, 1000, 1 << 16], ids=["one pair", "a few", "all"])
    def test_every_byte(self, half_nbytes):
        """Whole workloads: no race with a half that is still read, every byte right, the submitter never waits."""
        for seed in range(6):
            work = workload(seed, list(SimSchedule)[seed], host=HostKind.PAGEABLE, staged_nbytes=half_nbytes)
            assert work.run() == [], seed
            assert work.n_stored and not work.errors
            check_at_rest(work)
            assert "staged" in work.m.engine.stats().path
            assert work.m.runtime.n_calls["copy_batch"] > 0
            work.m.engine.close()

    def test_a_pair_that_is_longer_than_a_half_goes_without(self):
        """A page of 300 bytes and halves of 256: the batch is left to the device."""
        work = workload(1, SimSchedule.RANDOM, host=HostKind.PAGEABLE, staged_nbytes=256)
        assert work.run() == []
        assert work.n_stored and work.n_loaded
        work.m.engine.close()

    def test_a_half_that_is_used_again_too_early_is_seen(self, monkeypatch):
        """Without the wait for its event the next part overwrites what the device still reads."""
        monkeypatch.setattr(staging._Half, "wait", lambda half: None)
        for seed in range(6):
            work = workload(seed, SimSchedule.RANDOM, host=HostKind.PAGEABLE, staged_nbytes=320)
            with pytest.raises(RaceError):
                work.run(200)
            work.m.engine.close()

    def test_faults(self):
        """Every seventh call fails: what is committed is right, and a half is not used while a copy of it runs."""
        for what in ("copy_batch", "record"):
            for seed in range(4):
                work = workload(seed, SimSchedule.RANDOM, host=HostKind.PAGEABLE, staged_nbytes=400)
                work.m.runtime.fail(what, *range(7, 10_000, 7))
                assert work.run() == [], (what, seed)
                check_at_rest(work)
                assert work.m.engine.stats().n_retried or work.errors
                work.m.engine.close()


class TestOverlap:
    """Copies run beside the model, and the submitting thread never waits for them."""

    @staticmethod
    def steps(engine: type[TransferEngine], seed: int = 3) -> Workload:
        """A model's steps: kernels, a store of what they wrote, a load, and more kernels."""
        work = workload(seed, SimSchedule.RANDOM, engine)
        for _ in range(12):
            work.store()
            work.load()
            for block in list(work.free_blocks)[-4:]:
                work.m.fill(0, block, 7)
            work.settle()
        return work

    @staticmethod
    def n_overlapping(work: Workload) -> int:
        trace = work.m.sim.trace
        copies = [span for span in trace if span.stream != "compute"]
        kernels = [span for span in trace if span.stream == "compute"]
        return sum(any(overlaps(copy, kernel) for kernel in kernels) for copy in copies)

    @pytest.mark.parametrize("seed", range(5))
    def test_copies_overlap_kernels(self, seed):
        """In the trace most copies were under way while a kernel was; the host waited for nothing."""
        work = self.steps(TransferEngine, seed)
        assert not work.m.sim.host_waits
        assert work.finish() == []
        n_copies = sum(span.stream != "compute" for span in work.m.sim.trace)
        assert self.n_overlapping(work) > n_copies / 2

    @pytest.mark.parametrize("seed", range(5))
    def test_a_planted_synchronisation_is_seen(self, seed):
        """The same engine with one wait in ``submit``: no copy overlaps a kernel that was queued behind it."""
        work = self.steps(WaitsForTheDevice, seed)
        assert work.m.sim.host_waits
        assert work.finish() == []
        assert self.n_overlapping(work) == 0


class TestConsumers:
    """Whoever reads what a load brings: by a poll, or by letting its stream wait."""

    @staticmethod
    def loaded(per_chunk: int = 4) -> tuple[Workload, int, list[int]]:
        work = Workload(SimMachine(5, SimSchedule.LOADS_LAST, per_chunk=per_chunk), 5)
        while not work.ready:
            work.store()
            work.m.engine.wait()
            work.settle()
        work.m.sim.synchronize()
        before = set(work.free_blocks)
        while work.m.engine.n_open == 0:
            work.load()
        (flight,) = work.m.engine._flights[Direction.LOAD]
        return work, flight.job.id, sorted(before - set(work.free_blocks))

    def test_a_stream_waits_for_the_load(self):
        """After ``consume`` a kernel may read the block at once: no race, right bytes, and the host did not wait."""
        work, job_id, blocks = self.loaded()
        waits = len(work.m.sim.host_waits)
        work.m.engine.consume({job_id})
        (flight,) = work.m.engine._flights[Direction.LOAD]
        part = flight.job.tag.parts[0]
        seen = [work.m.read(part.group, block) for block in part.blocks]
        assert len(work.m.sim.host_waits) == waits
        work.m.sim.synchronize()
        assert [page[0][0] for page in seen] == part.values
        assert blocks

    def test_a_stream_that_does_not_wait_is_seen(self):
        """Without it the same read is a race."""
        work, _, _ = self.loaded()
        (flight,) = work.m.engine._flights[Direction.LOAD]
        part = flight.job.tag.parts[0]
        with pytest.raises(RaceError):
            work.m.read(part.group, part.blocks[0])


class TestFaults:
    """Devices that fail: no wrong byte, no leak, one outcome a job."""

    @pytest.mark.parametrize("what", ["copy_batch", "query", "record"])
    @schedules
    def test_calls_that_raise(self, what, schedule):
        """Every fifth call fails: stores are dropped, loads are copied once more; all that is committed is right."""
        for seed in range(4):
            work = workload(seed, schedule)
            work.m.runtime.fail(what, *range(5, 10_000, 5))
            assert work.run() == [], seed
            check_at_rest(work)
            assert {done.job.direction for done in work.errors} <= {Direction.STORE}
            stats = work.m.engine.stats()
            assert stats.n_failed[Direction.STORE] == len(work.errors)
            assert stats.n_failed[Direction.STORE] + stats.n_retried > 0, "no fault was met"

    def test_a_load_whose_second_try_fails_too(self):
        """It is told as failed, never as success; everything else goes on."""
        work = workload(2, SimSchedule.RANDOM)
        work.m.runtime.fail("copy_batch", *range(3, 10_000, 3))
        work.m.runtime.fail("copy_plain", *range(1, 10_000, 2))
        assert work.run() == []
        check_at_rest(work)
        assert work.m.engine.stats().n_failed[Direction.LOAD] > 0

    def test_a_lost_device_keeps_its_memory(self):
        """If nobody can say whether a copy has ended, page locks and memory are left alone at close."""
        machine = SimMachine(1, host=HostKind.REGISTERED)
        work = Workload(machine, 1)
        machine.runtime.fail("record", *range(2, 10_000))
        machine.runtime.fail("synchronize", *range(1, 10_000))
        while not machine.engine.n_open:
            work.store()
        machine.engine.close()
        assert all(done.error is not None for done in machine.engine.poll())
        assert machine.runtime.n_pinned > 0 and not machine.runtime.closed

    def test_a_piece_that_cannot_be_locked(self):
        """Of three pieces the last fails: the first two are released, and the slots stay pageable and usable."""
        machine = SimMachine(0)
        slots = HostSlots(machine.slots.pieces, machine.slots.stride_nbytes, machine.slots.slots_per_piece)
        slots.kind = HostKind.PAGEABLE
        machine.runtime.fail("pin", 3)
        assert not slots.register(machine.runtime, piece_nbytes=2 * slots.stride_nbytes)
        assert (machine.runtime.n_pinned, slots.kind) == (0, HostKind.PAGEABLE)
        assert slots.register(machine.runtime, piece_nbytes=2 * slots.stride_nbytes)
        assert (machine.runtime.n_pinned, slots.kind) == (3, HostKind.REGISTERED)
        slots.close()
        assert machine.runtime.n_pinned == 0

    def test_slots_are_locked_whole(self, monkeypatch):
        """A limit that is no multiple of a slot: no slot lies in two locked ranges, and all lie in one."""
        machine = SimMachine(0, host=HostKind.PAGEABLE)
        stride, (piece,) = machine.slots.stride_nbytes, machine.slots.pieces
        pin, locked = machine.runtime.pin, []

        def noted(memory, /):
            locked.append((memory.address - piece.address, memory.nbytes))
            return pin(memory)

        monkeypatch.setattr(machine.runtime, "pin", noted)
        assert machine.slots.register(machine.runtime, piece_nbytes=2 * stride + 4096 * (stride > 4096) + 1)
        assert [start for start, _ in locked] == [0, 2 * stride, 4 * stride]
        assert all(nbytes == 2 * stride for _, nbytes in locked)
        machine.engine.close()

    def test_memory_that_is_not_to_be_had(self, monkeypatch):
        """The second piece fails: the error says so, what was taken is given back to the machine."""
        machine = SimMachine(0)
        trimmed: list[bool] = []
        monkeypatch.setattr(machine.runtime, "trim_host", lambda: trimmed.append(True), raising=False)
        machine.runtime.fail("alloc_host", machine.runtime.n_calls["alloc_host"] + 2)
        with pytest.raises(TierError, match="planted"):
            HostSlots.allocate(machine.runtime, 4, 4096, piece_nbytes=8192)
        assert trimmed == [True]

    def test_after_close_a_job_fails_at_once(self):
        """Nothing is queued any more."""
        work = workload(0, SimSchedule.RANDOM)
        work.m.engine.close()
        while not work.ids:
            work.store()
        assert isinstance(work.m.engine.poll()[0].error, ClosedError)


@pytest.mark.parametrize("seed", range(5))
def test_polling_stops_at_the_first_that_has_not_ended(seed):
    """With several in flight a poll asks those that have ended, and one more in each direction: never all of them."""
    work = workload(seed, SimSchedule.COMPUTE_FIRST)
    n_most = 0
    for _ in range(20):
        for _ in range(4):
            work.rng.choice((work.store, work.load))()
        n_open, before = work.m.engine.n_open, work.m.runtime.n_calls["query"]
        work.settle()
        n_asked = work.m.runtime.n_calls["query"] - before
        n_most = max(n_most, n_open)
        assert n_asked <= n_open - work.m.engine.n_open + len(Direction)
    assert n_most >= 3, "nothing was in flight"
    assert work.finish() == []


def test_no_raw_handle_and_no_timing():
    """A raw stream handle overtakes what waits in a framework's queue, and reading timing events drains it."""
    for path in Path(tierkv.device.__file__).parent.glob("*.py"):
        found = re.findall(r"native_handle|npu_stream\b|cuda_stream\b|elapsed_time|enable_timing", path.read_text())
        assert not found, (path.name, found)
