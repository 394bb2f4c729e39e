"""What SIGKILL leaves of a pool: nothing. And what a small /dev/shm and a dead creator do to one."""

import contextlib
import os
import random
import secrets
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.leaks import Snapshot
from tests.patience import PATIENCE_S
from tests.pool_process import PoolProcess
from tierkv.tiers._rendezvous import Purpose, socket_name

pytestmark = pytest.mark.crash

MIB = 1 << 20
STRIDE = MIB
N_SLOTS = 64
SMALL_SHM = 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"'


def may_unshare() -> bool:
    return (
        os.geteuid() == 0
        and subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode == 0
    )


def shmem_nbytes() -> int:
    (line,) = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("Shmem:")]
    return int(line.split()[1]) * 1024


def names_left(shared_id: str) -> list[str]:
    ours = {"@" + socket_name(shared_id, purpose)[1:].decode() for purpose in Purpose}
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if line.split()[-1] in ours]


def wait_until(true, timeout_s: float = PATIENCE_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.timeout(600)
def test_twenty_kills_leave_nothing():
    """A scheduler and two workers die together, in mid-start or mid-write; the next start finds name and bytes free."""
    shared_id, seed = secrets.token_hex(8), 20
    pause = random.Random(seed)
    shm_before, shmem_before = Snapshot.take(), shmem_nbytes()
    for turn in range(20):
        with PoolProcess() as creator, PoolProcess() as worker, PoolProcess() as scheduler:
            processes = (creator, worker, scheduler)
            creator.start("create", shared_id=shared_id, n_slots=N_SLOTS, stride_nbytes=STRIDE, populate=True)
            worker.start("join", shared_id=shared_id, role="WORKER", rank=1, deadline_s=PATIENCE_S)
            scheduler.start("join", shared_id=shared_id, role="SCHEDULER", rank=0, deadline_s=PATIENCE_S)
            if turn % 4 == 3:
                time.sleep(pause.uniform(0, 0.5))  # any instant of a start is an instant to be killed at
            else:
                assert len({process.wait() for process in processes}) == 1, "two generations side by side"
                assert scheduler.ask("peek", slot=0) == [0], "bytes of an earlier engine"
                for slot, process in enumerate(processes):
                    process.ask("fill", slot=slot, byte=slot + 1)
                creator.ask("create_page", shared_id=shared_id, n_ranks=2, n_slots=N_SLOTS)
                for process in processes:
                    process.start("fill", slot=3, byte=9)
            for process in processes:
                os.kill(process.pid, signal.SIGKILL)
        assert wait_until(lambda: not names_left(shared_id)), names_left(shared_id)
    assert [entry for entry in shm_before.leaked(Snapshot.take()) if "/dev/shm" in entry] == []
    # One pool of grace for whatever else runs on this machine; twenty of them would be left if pools were.
    assert wait_until(lambda: shmem_nbytes() - shmem_before < N_SLOTS * STRIDE), shmem_nbytes() - shmem_before


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_any_one_of_three_may_die(victim):
    """Whoever is killed, the others keep their bytes, and only the creator's death closes the pool."""
    shared_id = secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(PoolProcess()) for _ in range(3)]
        processes[0].ask("create", shared_id=shared_id, n_slots=2, stride_nbytes=STRIDE)
        processes[1].ask("join", shared_id=shared_id, role="WORKER", rank=1)
        processes[2].ask("join", shared_id=shared_id, role="SCHEDULER", rank=0)
        processes[victim].ask("fill", slot=1, byte=7)
        processes[victim].kill()
        for survivor in [process for process in processes if process is not processes[victim]]:
            assert survivor.ask("peek", slot=1) == [7]
            assert survivor.ask("creator_alive") is (victim != 0)


def test_a_dead_creators_pool_is_closed_to_newcomers():
    """No split brain: a newcomer is refused instead of making a second pool, while the survivor reads on."""
    shared_id = secrets.token_hex(8)
    with PoolProcess() as creator, PoolProcess() as survivor, PoolProcess() as newcomer:
        generation = creator.ask("create", shared_id=shared_id, n_slots=2, stride_nbytes=STRIDE)
        survivor.ask("join", shared_id=shared_id, role="WORKER", rank=1)
        survivor.ask("fill", slot=0, byte=7)
        creator.kill()
        with pytest.raises(RuntimeError, match=r"NotServedError: .*its creator has not started, is gone"):
            newcomer.ask("join", shared_id=shared_id, role="SCHEDULER", rank=0, deadline_s=0.3)
        assert survivor.ask("peek", slot=0) == [7]
        # The next engine under this id is another generation, which who belongs to the first can tell.
        with PoolProcess() as successor:
            assert successor.ask("create", shared_id=shared_id, n_slots=2, stride_nbytes=STRIDE) != generation
            with pytest.raises(RuntimeError, match=r"ConfigError: .*its generation is"):
                newcomer.ask(
                    "join", shared_id=shared_id, role="SCHEDULER", rank=0, generation=generation, deadline_s=PATIENCE_S
                )
            newcomer.ask("join", shared_id=shared_id, role="SCHEDULER", rank=0, deadline_s=PATIENCE_S)
            assert newcomer.ask("peek", slot=0) == [0]
            assert survivor.ask("creator_alive") is False


def test_a_forked_child_does_not_keep_the_name():
    """A child that the creator forked outlives it: the name is free and members see that the creator has gone."""
    shared_id = secrets.token_hex(8)
    with PoolProcess() as creator, PoolProcess() as member:
        creator.ask("create", shared_id=shared_id, n_slots=1, stride_nbytes=STRIDE)
        member.ask("join", shared_id=shared_id, role="WORKER", rank=1)
        child = creator.ask("fork_sleeper")
        try:
            assert member.ask("creator_alive") is True
            creator.kill()
            assert wait_until(lambda: not names_left(shared_id))
            assert member.ask("creator_alive") is False
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.skipif(not may_unshare(), reason="mounting a small /dev/shm needs root and mount namespaces")
def test_a_small_dev_shm_is_no_limit():
    """In a container whose /dev/shm has 16 MiB, a pool of 64 MiB is made, faulted in whole, filled and shared."""
    shared_id = secrets.token_hex(8)
    prefix = ("unshare", "-m", "sh", "-c", SMALL_SHM, "sh")
    with PoolProcess(*prefix) as creator, PoolProcess() as member:
        creator.ask("create", shared_id=shared_id, n_slots=N_SLOTS, stride_nbytes=STRIDE, populate=True)
        assert creator.ask("shm_nbytes") == 16 * MIB
        assert creator.ask("populated") == N_SLOTS * STRIDE
        creator.ask("fill", slot=N_SLOTS - 1, byte=3)
        member.ask("join", shared_id=shared_id, role="WORKER", rank=1)
        assert member.ask("peek", slot=N_SLOTS - 1) == [3]


def test_a_pool_larger_than_memory_is_refused_and_leaves_nothing():
    """Asked for more than is available, a process gets the numbers, makes nothing, and can make a smaller one."""
    shared_id = secrets.token_hex(8)
    with PoolProcess() as creator:
        with pytest.raises(RuntimeError, match=rf"capacity is {STRIDE << 30}, but must be at most the \d+ bytes"):
            creator.ask("create", shared_id=shared_id, n_slots=1 << 30, stride_nbytes=STRIDE)
        assert names_left(shared_id) == []
        creator.ask("create", shared_id=shared_id, n_slots=1, stride_nbytes=STRIDE)
