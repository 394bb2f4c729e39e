"""Who waits for whom, shown by a stream that does not run until it is let."""

from __future__ import annotations

import pytest

from tests.device.contract.server import LOAD, STORE, Server, Shape
from tierkv.device.runtime import HostKind

SHAPE = Shape(((512, 512), (192, 160)), ((0, 1),), 4)
KINDS = list(HostKind)


@pytest.fixture
def make_server(make_rig):
    made = []

    def make(kind: HostKind = HostKind.PINNED, *, holds: bool = True) -> Server:
        rig = make_rig()
        if holds and not rig.holds(kind):
            rig.close()
            pytest.skip("the producer's stream cannot be held back here")
        made.append(Server(rig, SHAPE, kind))
        return made[-1]

    yield make
    for server in made:
        server.abandon()


def filled(server: Server, blocks: list[int], slot: int) -> None:
    """A chunk in a slot."""
    server.store(0, blocks, 0, [slot])
    server.engine.wait()
    server.poll()
    server.rig.synchronize()


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_waits_for_the_stream_that_writes_its_blocks(make_server, kind):
    """The kernel is queued before the store and runs after it was submitted: the slot gets the kernel's bytes."""
    server = make_server(kind)
    with server.rig.late():
        for tensor in (0, 1):
            server.write(tensor, 3, bytes([7]) * SHAPE.pages[tensor][1])
        server.store(0, [3], 0, [2])
        server.nothing_ends()
        assert server.engine.n_open == 1
    server.engine.wait()
    assert [done.error for done in server.poll()] == [None]
    server.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_waits_for_earlier_work_on_its_target(make_server, kind):
    """A kernel that zeroes the target is queued before the load and runs after it was submitted."""
    server = make_server(kind)
    filled(server, [0, 1, 2, 3], 5)
    with server.rig.late():
        for tensor in (0, 1):
            server.write(tensor, 9, bytes(SHAPE.pages[tensor][1]))
        server.load(0, [9], 0, [5])
        server.nothing_ends()
    server.engine.wait()
    server.poll()
    server.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_consumer_waits_for_the_load(make_server, kind):
    """After ``consume`` a kernel on the consumer's own stream sees the load's bytes, though nobody polled."""
    server = make_server(kind)
    filled(server, [0, 1, 2, 3], 5)
    consumer = server.rig.runtime.new_stream()
    with server.rig.late():
        for tensor in (0, 1):
            server.write(tensor, 9, bytes(SHAPE.pages[tensor][1]))
        flying = server.load(0, [9], 0, [5])
        if kind is not HostKind.PAGEABLE:  # which submits from a thread: that is waited for, here in vain
            server.engine.consume([flying.job.id], stream=consumer)
            flying.read_early = True
            with server.rig.runtime.use(consumer):
                server._read(flying)
    server.engine.wait()
    server.poll()
    server.close()


@pytest.mark.parametrize("kind", KINDS)
def test_submitting_never_waits_for_the_device(make_server, kind):
    """Sixteen jobs of both directions are taken while nothing can run. With a host that waited this would not end."""
    server = make_server(kind)
    for slot in range(3):
        filled(server, [4 * slot, 4 * slot + 1, 4 * slot + 2, 4 * slot + 3], slot)
    with server.rig.late():
        server.write(0, 12, bytes(512))
        for i in range(3):
            server.store(0, [12 + i], 0, [3 + i])
            server.load(0, [18 + i], 0, [i])
        assert server.poll() == []
        assert server.engine.n_open == 6
    server.engine.wait()
    ends = server.poll()
    for direction in (STORE, LOAD):
        ids = [done.job.id for done in ends if done.job.direction is direction]
        assert len(ids) == 3
        assert ids == sorted(ids)
    server.close()


def test_the_directions_do_not_wait_for_each_other(make_server):
    """A load that was submitted before the producer was held ends while a store behind it cannot."""
    server = make_server()
    filled(server, [0, 1, 2, 3], 0)
    loaded = server.load(0, [8], 0, [0])
    with server.rig.late():
        server.write(0, 12, bytes(512))
        stored = server.store(0, [12], 0, [3])
        server.engine.wait([(LOAD, loaded.job.id)])
        assert [done.job for done in server.poll()] == [loaded.job]
        server.nothing_ends()
        assert server.engine.n_open == 1
    server.engine.wait([(STORE, stored.job.id)])
    assert [done.job for done in server.poll()] == [stored.job]
    server.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_handed_on_after_its_store_was_told_is_nobody_elses(make_server, kind):
    """A request is preempted, its blocks are stored and then written by the next one: each slot has its own bytes."""
    server = make_server(kind, holds=False)
    for turn in range(12):
        for tensor in (0, 1):
            server.write(tensor, 1, bytes([turn + 1]) * SHAPE.pages[tensor][1])
        server.store(0, [1], 0, [turn % 6])
        server.engine.wait()
        server.poll()
    assert not server.failed
    server.close()


@pytest.mark.parametrize("kind", KINDS)
def test_closing_waits_for_what_is_under_way(make_server, kind):
    """After close every job's end was told, and its bytes had arrived."""
    server = make_server(kind, holds=False)
    for slot in range(3):
        server.store(0, [slot], 0, [slot])
    kept, views = server.slots.pieces, [server.slots.view(slot) for slot in range(3)]
    server.engine.close()
    assert [done.error for done in server.engine.poll()] == [None] * 3
    assert server.engine.n_open == 0
    for slot, view in enumerate(views):
        assert bytes(view[:512]) == server.content[0, slot]
    del kept
