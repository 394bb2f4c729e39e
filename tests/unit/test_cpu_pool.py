"""Private and shared pools: views, closing under users, faulting in, joining, and everything that must not join."""

import ctypes
import fcntl
import gc
import mmap
import os
import resource
import secrets
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.pool_process import PoolProcess
from tierkv.errors import ClosedError, ConfigError, TierError
from tierkv.tiers._mapping import SlotMapping
from tierkv.tiers._pool import PrivatePool, SharedPool
from tierkv.tiers._rendezvous import (
    SEALS,
    Geometry,
    Member,
    NotServedError,
    Purpose,
    Role,
    join,
    make_sealed,
    socket_name,
)
from tierkv.tiers._server import Server

STRIDE = 4096
MIB = 1 << 20


@pytest.fixture
def shared_id():
    return secrets.token_hex(8)


def create(shared_id: str, n_slots: int = 4) -> SharedPool:
    return SharedPool.create(shared_id, n_slots, STRIDE, populate=False)


def scheduler_joins(shared_id: str, **asked) -> SharedPool:
    """Waits for the answer of somebody who serves; with ``deadline_s=0`` where nobody does."""
    return SharedPool.join(shared_id, role=Role.SCHEDULER, rank=0, **{"deadline_s": PATIENCE_S} | asked)


def kinds(shared_id: str):
    yield PrivatePool(4, STRIDE, populate=False)
    yield create(shared_id)


def test_views_and_buffer_are_the_same_bytes(shared_id):
    """A slot's view is its part of the whole; slots are apart; numbers outside are IndexErrors."""
    for pool in kinds(shared_id):
        pool.view(2)[:] = b"x" * STRIDE
        assert pool.buffer == bytes(2 * STRIDE) + b"x" * STRIDE + bytes(STRIDE)
        assert (pool.n_slots, pool.stride_nbytes, pool.nbytes) == (4, STRIDE, 4 * STRIDE)
        for outside in (-1, 4):
            with pytest.raises(IndexError):
                pool.view(outside)
        pool.close()


def test_closing_under_a_live_view_leaves_it_alive(shared_id):
    """Canary: a view that outlives its pool still works; the mapping goes with the last one, counted once."""
    for pool in kinds(shared_id):
        view = pool.view(1)
        view[:6] = b"canary"
        address = _address_of(pool)
        before = SlotMapping.n_left_mapped
        pool.close()
        pool.close()
        assert SlotMapping.n_left_mapped == before + 1
        assert view[:6] == b"canary"
        view[6:7] = b"!"
        assert _is_mapped(address)
        with pytest.raises(ClosedError):
            pool.view(1)
        with pytest.raises(ClosedError):
            _ = pool.buffer
        del view
        gc.collect()
        assert not _is_mapped(address)


def test_closing_without_users_unmaps_at_once(shared_id):
    """No view, no mapping, and nothing counted."""
    for pool in kinds(shared_id):
        address, before = _address_of(pool), SlotMapping.n_left_mapped
        pool.close()
        assert not _is_mapped(address)
        assert SlotMapping.n_left_mapped == before


def _address_of(pool: SlotMapping) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(pool.buffer))


def _is_mapped(address: int) -> bool:
    """Whether /proc/self/maps has a range over it; ranges of neighbours may be merged."""
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


@pytest.mark.parametrize("shared", [False, True])
def test_populating_faults_everything_in_and_changes_nothing(shared_id, shared):
    """All pages become resident in the background while a slot is in use; its bytes stay."""
    n_slots = 96 * MIB // STRIDE
    pool: SlotMapping
    pool = (
        SharedPool.create(shared_id, n_slots, STRIDE, populate=False)
        if shared
        else PrivatePool(n_slots, STRIDE, populate=False)
    )
    pool.view(n_slots - 1)[:4] = b"live"
    before = _resident_nbytes()
    pool.populate()
    assert pool.wait_populated(PATIENCE_S)
    assert pool.populated_nbytes == pool.nbytes
    assert _resident_nbytes() - before > 90 * MIB
    assert bytes(pool.view(n_slots - 1)[:4]) == b"live"
    pool.close()


def _resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


class Steps(threading.Event):
    """A pool's stop event, which its populating thread asks before each step: it says so."""

    def __init__(self, pool: SlotMapping, *, most: int) -> None:
        super().__init__()
        self.pool, self.most = pool, most
        self.n_begun, self.done_nbytes = 0, 0
        self.begins = threading.Event()

    def is_set(self) -> bool:
        """After ``most`` steps it waits until it is set."""
        if self.n_begun == self.most:
            self.wait(PATIENCE_S)
        self.n_begun, self.done_nbytes = self.n_begun + 1, self.pool.populated_nbytes
        self.begins.set()
        return super().is_set()


def test_populating_lets_other_threads_run():
    """While pages are faulted in this thread runs: it finds a step that has begun and not ended.

    Nobody is made to let go of the interpreter here, so a step that kept it would never be met in its middle.
    """
    pool = PrivatePool(512 * MIB // STRIDE, STRIDE, populate=False)
    steps = pool._stop = Steps(pool, most=-1)
    interval_s, n_met = sys.getswitchinterval(), 0
    sys.setswitchinterval(PATIENCE_S)
    try:
        pool.populate()
        while not pool.wait_populated(0):
            if steps.begins.wait(0.01):
                steps.begins.clear()
                n_met += pool.populated_nbytes == steps.done_nbytes
    finally:
        sys.setswitchinterval(interval_s)
    pool.close()
    assert n_met > 0


def test_closing_stops_the_populating():
    """A pool that is closed does not wait for all of its bytes: the thread ends after its step, and is gone."""
    pool = PrivatePool(512 * MIB // STRIDE, STRIDE, populate=False)
    pool._stop = Steps(pool, most=1)
    pool.populate()
    pool.close()
    assert 0 < pool.populated_nbytes < pool.nbytes
    assert "tierkv-populate" not in [thread.name for thread in threading.enumerate()]


def test_one_process_may_be_both_sides(shared_id):
    """An in-process engine: the scheduler joins what this very process made, and both see each other's bytes."""
    pool = create(shared_id)
    joined = scheduler_joins(shared_id)
    joined.view(3)[:] = b"s" * STRIDE
    pool.view(0)[:] = b"w" * STRIDE
    assert pool.view(3) == b"s" * STRIDE
    assert joined.view(0) == b"w" * STRIDE
    assert joined.generation == pool.generation != 0
    assert joined.creator_pid == os.getpid()
    joined.close()
    pool.close()


def test_processes_share_bytes_in_any_order_of_start(shared_id):
    """A worker and a scheduler that come first wait for rank 0; then what one writes the others read."""
    with PoolProcess() as first, PoolProcess() as second, PoolProcess() as creator:
        first.start("join", shared_id=shared_id, role="WORKER", rank=1, deadline_s=PATIENCE_S)
        second.start("join", shared_id=shared_id, role="SCHEDULER", rank=0, deadline_s=PATIENCE_S)
        generation = creator.ask("create", shared_id=shared_id, n_slots=4, stride_nbytes=STRIDE)
        assert first.wait() == second.wait() == generation
        for slot, process in enumerate((creator, first, second)):
            process.ask("fill", slot=slot, byte=slot + 1)
        for process in (creator, first, second):
            assert [process.ask("peek", slot=slot) for slot in range(4)] == [[1], [2], [3], [0]]


def test_the_same_id_twice_names_the_owner(shared_id):
    """A second engine with the same id is refused with the pid of the first, whose bytes stay as they are."""
    with PoolProcess() as first, PoolProcess() as second:
        first.ask("create", shared_id=shared_id, n_slots=4, stride_nbytes=STRIDE)
        first.ask("fill", slot=0, byte=7)
        with pytest.raises(
            RuntimeError, match=f"ConfigError: shared_id is '{shared_id}', .*process {first.pid} serves"
        ):
            second.ask("create", shared_id=shared_id, n_slots=4, stride_nbytes=STRIDE)
        assert first.ask("peek", slot=0) == [7]


def test_different_ids_are_different_pools():
    """Replicas whose ids differ in their index only do not see each other."""
    pools = [create(f"engine_dp{rank}") for rank in range(2)]
    pools[0].view(0)[:1] = b"0"
    assert pools[1].view(0)[0] == 0
    for pool in pools:
        pool.close()


def test_each_role_and_rank_joins_once(shared_id):
    """A second bearer of a role and rank is refused, even after the first has left, and so is the creator's double."""
    pool = create(shared_id)
    joined = SharedPool.join(shared_id, role=Role.WORKER, rank=1)
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"worker rank 1 has joined already, as process {os.getpid()}"):
            SharedPool.join(shared_id, role=Role.WORKER, rank=1)
        joined.close()
    with pytest.raises(ConfigError, match="worker rank 0 has joined already"):
        SharedPool.join(shared_id, role=Role.WORKER, rank=0)
    scheduler_joins(shared_id).close()
    pool.close()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"n_slots": 5}, "n_slots is 4, not 5"),
        ({"stride_nbytes": 8192}, "stride_nbytes is 4096, not 8192"),
        ({"generation": 9}, "its generation is .*, not 9"),
    ],
)
def test_another_geometry_is_refused(shared_id, asked, says):
    """Slots, stride and generation must be the creator's; a refused joiner may come back with the right ones."""
    pool = create(shared_id)
    with pytest.raises(ConfigError, match=says):
        scheduler_joins(shared_id, **asked)
    scheduler_joins(shared_id, n_slots=4, stride_nbytes=STRIDE, generation=pool.generation).close()
    pool.close()


def test_a_lost_answer_does_not_make_a_duplicate(shared_id):
    """A joiner whose first try ended before the creator answered tries again and is let in, once."""
    geometry = Geometry(Purpose.POOL, 1, STRIDE, 1)
    server = Server(shared_id, geometry, _member(0))
    member = _member(1)
    with pytest.raises(NotServedError, match="holds its name but did not answer"):
        join(shared_id, geometry, member, 0)
    fd = make_sealed("test", STRIDE)
    server.serve(fd, STRIDE)  # answers the hello that waits in the backlog, whose sender has gone
    membership = join(shared_id, geometry, member, PATIENCE_S)
    with pytest.raises(ConfigError, match="joined already"):
        join(shared_id, geometry, member, PATIENCE_S)
    os.close(membership.fd)
    os.close(fd)
    membership.connection.close()
    server.close()


def test_nobody_there_is_one_sentence(shared_id):
    """The deadline ends the wait; the message says what may be wrong; it is an error that another try may cure."""
    started = time.monotonic()
    with pytest.raises(NotServedError, match=r"within 0.2 s: nobody serves it; .*another network namespace") as error:
        scheduler_joins(shared_id, deadline_s=0.2)
    assert time.monotonic() - started >= 0.2
    assert isinstance(error.value, TierError)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="making a network namespace needs root")
def test_another_network_namespace_cannot_join(shared_id):
    """A process there finds nobody, says so in one sentence, and makes no second pool."""
    pool = create(shared_id)
    says = r"NotServedError: .*another network namespace"
    with PoolProcess("unshare", "-n") as other, pytest.raises(RuntimeError, match=says):
        other.ask("join", shared_id=shared_id, role="WORKER", rank=1, deadline_s=0.2)
    pool.close()


def test_the_memory_cannot_be_resized_by_a_peer(shared_id):
    """What a joiner is handed is sealed: no peer can cut it under the others (SIGBUS) or unseal it."""
    pool = create(shared_id)
    membership = join(shared_id, Geometry(Purpose.POOL, 0, 0), _member(1), PATIENCE_S)
    for nbytes in (0, 8 * STRIDE):
        with pytest.raises(PermissionError):
            os.ftruncate(membership.fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(membership.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert fcntl.fcntl(membership.fd, fcntl.F_GET_SEALS) == SEALS
    assert not os.get_inheritable(membership.fd)
    os.close(membership.fd)
    membership.connection.close()
    pool.close()


def _member(rank: int) -> Member:
    return Member(Role.WORKER, rank)


@pytest.mark.parametrize("message", [b"", b"x", b"tierkv\0\1" + b"\xff" * 80, b"\0" * 200])
def test_strangers_get_no_memory_and_do_no_harm(shared_id, message):
    """Whoever says something else, or nothing, is told off without a descriptor; members still get in."""
    pool = create(shared_id)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(PATIENCE_S)
        stranger.connect(socket_name(shared_id, Purpose.POOL))
        if message:
            stranger.send(message)
            _, fds, _, _ = socket.recv_fds(stranger, 1024, 1)
            assert fds == []
        scheduler_joins(shared_id).close()
    pool.close()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200", b"tierkv\0\1\x63\0\0\0"])
def test_a_squatter_on_the_name_is_not_believed(shared_id, answer):
    """Another program of this user on our name: hanging up is retried until the deadline, nonsense is refused."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
        squatter.bind(socket_name(shared_id, Purpose.POOL))
        squatter.listen()

        def serve() -> None:
            connection, _ = squatter.accept()
            with connection:
                connection.recv(1024)
                connection.send(answer) if answer else None

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ConfigError if answer else NotServedError, match=f"process {os.getpid()}"):
            scheduler_joins(shared_id, deadline_s=PATIENCE_S if answer else 0)
        thread.join()


def test_a_descriptor_of_another_size_is_not_mapped(shared_id):
    """A creator that promises more bytes than it hands over is refused: touching the rest would be a SIGBUS."""
    fd = make_sealed("test", STRIDE)
    server = Server(shared_id, Geometry(Purpose.POOL, 2, STRIDE, 1), _member(0))
    server.serve(fd, 2 * STRIDE)
    with pytest.raises(ConfigError, match="not a cpu pool"):
        scheduler_joins(shared_id)
    os.close(fd)
    server.close()


def test_a_geometry_that_contradicts_itself_is_not_mapped(shared_id):
    """Slots times stride must be the bytes: else the last slot would lie outside."""
    fd = make_sealed("test", STRIDE)
    server = Server(shared_id, Geometry(Purpose.POOL, 2, STRIDE, 1), _member(0))
    server.serve(fd, STRIDE)
    with pytest.raises(ConfigError, match=f"has {STRIDE} bytes"):
        scheduler_joins(shared_id)
    os.close(fd)
    server.close()


@pytest.mark.parametrize(("n_slots", "stride"), [(0, STRIDE), (-1, STRIDE), (1, 0), (1, 4095), (1, 4097), (1, -4096)])
def test_wrong_sizes_make_nothing(shared_id, n_slots, stride):
    """No slot, or a stride that direct I/O cannot use: refused with the nearest, and nobody serves the id."""
    for make in (PrivatePool, lambda *size: SharedPool.create(shared_id, *size)):
        with pytest.raises(ConfigError, match=r"nearest valid value: (1|4096|8192)$"):
            make(n_slots, stride)
    with pytest.raises(NotServedError):
        scheduler_joins(shared_id, deadline_s=0)


def test_a_file_size_limit_is_named(shared_id):
    """RLIMIT_FSIZE holds for a memfd: the error says so, and the name is free again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (STRIDE, hard))
    try:
        with pytest.raises(ConfigError, match="ulimit -f"):
            create(shared_id)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    create(shared_id).close()


def test_an_empty_id_is_refused():
    """Everybody's id is nobody's."""
    with pytest.raises(ConfigError, match="shared_id"):
        create("")


def test_out_of_descriptors_the_server_goes_on(shared_id):
    """A joiner that comes while the creator has no descriptor left is let in once it has."""
    pool = create(shared_id)
    with PoolProcess() as other:
        other.ask("join", shared_id=shared_id, role="WORKER", rank=1, deadline_s=PATIENCE_S)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            other.start("join", shared_id=shared_id, role="WORKER", rank=2, deadline_s=PATIENCE_S)
            time.sleep(0.3)  # nothing can be waited for: the server fails to accept, meanwhile
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert other.wait() == pool.generation
    pool.close()
