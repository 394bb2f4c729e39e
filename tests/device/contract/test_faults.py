"""A device that fails: a lost store, a load tried once more, never wrong bytes told as right, nothing kept."""

from __future__ import annotations

import pytest

from tests.device.contract.server import Server, Shape
from tierkv.device.runtime import HostKind

SHAPE = Shape(((512, 512), (192, 160)), ((0, 1),), 4)
KINDS = list(HostKind)
FAULTS = ["submit", "run", "query"]


@pytest.fixture
def make_server(make_rig):
    made = []

    def make(kind: HostKind) -> Server:
        made.append(Server(make_rig(), SHAPE, kind))
        server = made[-1]
        server.store(0, [0, 1, 2, 3], 0, [0])
        server.engine.wait()
        server.poll()
        server.rig.synchronize()
        return server

    yield make
    for server in made:
        server.abandon()


def fail(server: Server, fault: str) -> None:
    if not server.rig.fail(fault, server.slots.kind):
        pytest.skip(f"this device cannot be made to fail in a {fault}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_store_is_told_and_the_next_one_works(make_server, kind, fault):
    """One end with an error, then ends without; the slot that failed can be used again."""
    server = make_server(kind)
    fail(server, fault)
    server.store(0, [4, 5], 0, [1])
    if fault == "query":
        while not server.poll():
            server.rig.settle()
    else:
        server.engine.wait()
        server.poll()
    assert len(server.failed) == 1
    server.store(0, [4, 5], 0, [1])
    server.engine.wait()
    assert [done.error for done in server.poll()] == [None]
    assert server.engine.stats().n_failed[server.failed[0].job.direction] == 1
    server.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["submit", "run"])
def test_a_failed_load_is_copied_once_more(make_server, kind, fault):
    """The bytes arrive by the plain way and the end is a good one."""
    server = make_server(kind)
    fail(server, fault)
    server.load(0, [8, 9, 10], 1, [0])
    server.engine.wait()
    assert [done.error for done in server.poll()] == [None]
    assert server.engine.stats().n_retried == 1
    server.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_that_fails_twice_is_told(make_server, kind):
    """Never told as arrived; the blocks can be used again."""
    server = make_server(kind)
    fail(server, "submit")
    fail(server, "plain")
    server.load(0, [8, 9, 10], 1, [0])
    server.engine.wait()
    server.poll()
    assert len(server.failed) == 1
    for block in (8, 9, 10):
        for tensor, (padded, _) in enumerate(SHAPE.pages):
            server.write(tensor, block, bytes(padded))
    server.load(0, [8, 9, 10], 1, [0])
    server.engine.wait()
    assert [done.error for done in server.poll()] == [None]
    server.close()
