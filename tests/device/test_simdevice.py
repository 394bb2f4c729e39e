"""The simulated accelerator itself: late, torn, out of step, replayable, and never wrong about a race."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from tests.patience import PATIENCE_S
from tierkv.testing.simdevice import (
    POISON,
    DeadlockError,
    RaceError,
    SimDevice,
    SimRuntime,
    SimSchedule,
    overlaps,
)

N = 256


def copy(sim: SimDevice, target, source, name: str = "copy") -> None:
    sim.copy(lambda: [(target.address, source.address, N)], name=name)


def pair(sim: SimDevice):
    source, target = sim.alloc(N), sim.alloc(N, fill=0)
    source.view[:] = bytes(range(N))
    return source, target


def copy_something(sim: SimDevice, name: str = "copy") -> None:
    source, target = pair(sim)
    copy(sim, target, source, name)


def test_importing_the_kit_loads_neither_torch_nor_numpy():
    """The machine is the standard library alone; only its runtime needs what the device tier needs."""
    code = (
        "import json, sys; import tierkv.testing, tierkv.testing.simdevice as s; s.SimDevice().alloc(64)\n"
        "print(json.dumps([name for name in ('torch', 'numpy', 'pytest') if name in sys.modules]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert json.loads(run.stdout) == []


def test_streams_run_late_and_events_order_them():
    """A copy on another stream after an event of the first sees what the first wrote; the host after a synchronize."""
    for seed in range(30):
        sim = SimDevice(seed)
        source, middle = pair(sim)
        target = sim.alloc(N, fill=0)
        copy(sim, middle, source)
        event, other = sim.new_event(), sim.new_stream("other")
        event.record(sim.compute)
        other.wait_event(event)
        with sim.use(other):
            copy(sim, target, middle)
            done = sim.new_event()
            done.record(other)
        done.synchronize()
        sim.host_access([(target.address, N)], is_write=False)
        assert bytes(target.view) == bytes(range(N))


def test_a_look_too_early_sees_torn_bytes():
    """Over some seeds a copy is seen not begun, poisoned, and half way: never as a mock would show it."""
    states = set()
    for seed in range(60):
        sim = SimDevice(seed, races="ignore")
        source, target = pair(sim)
        copy(sim, target, source)
        states.add(bytes(target.view))
    assert bytes(N) in states
    assert any(state[-1] == POISON and state[0] == 0 and state[1] == 1 for state in states)
    assert len(states) > 3


def test_eager_is_what_a_mock_does():
    """Everything happens at once, so nothing is ever seen half done."""
    for seed in range(10):
        sim = SimDevice(seed, SimSchedule.EAGER, races="ignore")
        source, target = pair(sim)
        copy(sim, target, source)
        assert bytes(target.view) == bytes(range(N))


@pytest.mark.parametrize("schedule", list(SimSchedule))
def test_a_seed_replays_exactly(schedule):
    """Same seed and calls, same trace and same torn bytes; another seed, another trace."""

    def run(seed: int):
        sim = SimDevice(seed, schedule, races="ignore")
        streams = [sim.new_stream() for _ in range(3)]
        seen = []
        buffers = [pair(sim) for _ in streams]
        for _ in range(4):
            for stream, (source, target) in zip(streams, buffers, strict=True):
                with sim.use(stream):
                    copy(sim, target, source)
                seen.append(bytes(target.view))
        sim.synchronize()
        return seen, sim.trace

    assert run(5) == run(5)
    if schedule is not SimSchedule.EAGER:
        assert run(5)[1] != run(6)[1]


@pytest.mark.parametrize(
    ("schedule", "last"),
    [(SimSchedule.LOADS_LAST, "load"), (SimSchedule.STORES_LAST, "store"), (SimSchedule.COPIES_FIRST, "kernel")],
)
def test_schedules_prefer(schedule, last):
    """With work on every stream, the one that a schedule starves ends last."""
    for seed in range(10):
        sim = SimDevice(seed, schedule)
        streams = [("kernel", sim.compute), ("store", sim.new_stream()), ("load", sim.new_stream())]
        for name, stream in streams * 5:
            with sim.use(stream):
                copy_something(sim, name)
        sim.synchronize()
        assert sim.trace[-1].name == last


def test_compute_first_ends_kernels_first():
    """The counterpart: copies wait for all kernels."""
    sim = SimDevice(1, SimSchedule.COMPUTE_FIRST)
    with sim.use(sim.new_stream()):
        copy_something(sim, "store")
    for _ in range(3):
        copy_something(sim, "kernel")
    sim.synchronize()
    assert [span.name for span in sim.trace] == ["kernel", "kernel", "kernel", "store"]


class TestRaces:
    """Whatever the schedule did: unordered conflicts are found, ordered ones and reads are not."""

    @pytest.mark.parametrize("schedule", list(SimSchedule))
    def test_host_against_stream(self, schedule):
        """A read of what a copy writes; a write of what it reads; not a read of what it reads; not after its event."""
        for seed in range(10):
            sim = SimDevice(seed, schedule)
            source, target = pair(sim)
            copy(sim, target, source)
            event = sim.new_event()
            event.record(sim.compute)
            sim.host_access([(source.address, N)], is_write=False)
            sim.host_access([(target.address + N, 64)], is_write=True)
            event.synchronize()
            sim.host_access([(source.address, N), (target.address, N)], is_write=True)
            for buffer, is_write in ((target, False), (source, True)):
                sim = SimDevice(seed, schedule)
                source, target = pair(sim)
                copy(sim, target, source)
                range_ = (target.address, 1) if buffer is not source and not is_write else (source.address + N - 1, 1)
                with pytest.raises(RaceError, match="which nothing orders"):
                    sim.host_access([range_], is_write=is_write)

    @pytest.mark.parametrize("ordered", [True, False])
    def test_stream_against_stream(self, ordered):
        """Two streams on the same bytes, with and without an event between them."""
        for seed in range(20):
            sim = SimDevice(seed, races="note")
            source, target = pair(sim)
            copy(sim, target, source)
            other = sim.new_stream()
            if ordered:
                event = sim.new_event()
                event.record(sim.compute)
                other.wait_event(event)
            with sim.use(other):
                copy(sim, target, source)
            sim.synchronize()
            assert bool(sim.races.found) is not ordered

    def test_an_event_before_the_work_orders_nothing(self):
        """Recorded too early, the event happens, and the race is still one."""
        sim = SimDevice(3)
        source, target = pair(sim)
        event, other = sim.new_event(), sim.new_stream()
        event.record(sim.compute)
        copy(sim, target, source)
        other.wait_event(event)
        with pytest.raises(RaceError), sim.use(other):
            copy(sim, target, source)

    def test_descriptors_may_be_read_late(self):
        """Arrays that a queued copy still reads must not be written; it copies what they say when it begins."""
        sim = SimDevice(4, SimSchedule.COMPUTE_FIRST)
        source, target = pair(sim)
        blocker = sim.new_stream()
        event = sim.new_event()
        with sim.use(blocker):
            copy(sim, sim.alloc(N), source)
            event.record(blocker)
        sim.compute.wait_event(event)
        arrays = sim.alloc(64)
        sim.copy(lambda: [(target.address, source.address, N)], descriptors=[(arrays.address, 64)])
        with pytest.raises(RaceError):
            sim.copy(list, descriptors=[(arrays.address + 8, 8)])

    def test_a_race_is_raised_again(self):
        """Code under test may take the first one for a failed copy: every later access tells it again."""
        sim = SimDevice(0)
        source, target = pair(sim)
        copy(sim, target, source)
        for _ in range(2):
            with pytest.raises(RaceError):
                sim.host_access([(target.address, 1)], is_write=False)
        with pytest.raises(RaceError):
            copy(sim, sim.alloc(N), source)


def test_a_wait_that_can_never_end_is_told():
    """Two streams, each waiting for an event that the other records later: the host hears it instead of hanging."""
    sim = SimDevice(1)
    one, two = sim.new_stream("one"), sim.new_stream("two")
    first, second = sim.new_event(), sim.new_event()
    first.n_recorded = second.n_recorded = 1  # as if recorded behind the waits below
    one.wait_event(second)
    two.wait_event(first)
    with pytest.raises(DeadlockError, match=r"stream one.*one: wait, two: wait"):
        one.synchronize()


def test_an_event_that_was_never_recorded_has_happened():
    """As torch's have: asking says yes, waiting holds nobody."""
    sim = SimDevice(0)
    event = sim.new_event()
    assert event.query()
    sim.compute.wait_event(event)
    sim.compute.synchronize()


def test_waits_of_the_host_are_noted_with_their_thread():
    """So that a test can say who waited, and that the submitting thread did not."""
    sim = SimDevice(0)
    copy_something(sim)
    assert sim.host_waits == []
    thread = threading.Thread(target=sim.synchronize, name="waiter")
    thread.start()
    thread.join()
    assert sim.host_waits == [("stream compute", "waiter")]


def test_the_trace_shows_overlap():
    """Two streams with work at once overlap in most runs, a stream never overlaps itself."""
    n = 0
    for seed in range(20):
        sim = SimDevice(seed)
        copy_something(sim)
        with sim.use(sim.new_stream()):
            copy_something(sim)
        copy_something(sim)
        sim.synchronize()
        a, b = (span for span in sim.trace if span.stream == "compute")
        assert not overlaps(a, b)
        assert a.submitted <= a.began <= a.ended
        (other,) = (span for span in sim.trace if span.stream != "compute")
        n += overlaps(a, other) or overlaps(b, other)
    assert n > 10


def test_faults_are_refused_by_name():
    """What cannot be made to fail is said at once."""
    with pytest.raises(ValueError, match=r"'launch' cannot.*copy_batch"):
        SimRuntime(SimDevice()).fail("launch", 1)
