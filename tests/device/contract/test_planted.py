"""The contract dies of the bugs that it is there for: an engine with one of them, under the order tests' own steps."""

from __future__ import annotations

import contextlib

import pytest

from tests.device.contract.server import Server, Shape
from tests.device.planted import EndedAtOnce, EventOnTheWrongStream, LoadWithoutProducer, StoreWithoutProducer
from tierkv.device.engine import TransferEngine
from tierkv.device.runtime import Direction, HostKind

SHAPE = Shape(((512, 512),), ((0,),), 4)


def _run(server: Server) -> None:
    """A store of a block that is being written, a load into one that is being zeroed; a store that cannot run yet."""
    server.store(0, [0, 1, 2, 3], 0, [5])
    server.engine.wait()
    server.poll()
    server.rig.synchronize()
    with server.rig.late():
        server.write(0, 6, bytes([6]) * 512)
        server.store(0, [6], 0, [2])
        server.write(0, 9, bytes(512))
        server.load(0, [9], 1, [5])
        server.nothing_ends()
    server.engine.wait()
    server.poll()
    with server.rig.late(server.engine._streams[Direction.STORE]):
        server.store(0, [10], 0, [1])
        server.nothing_ends()
    for _ in range(200):
        if not server.flying:
            break
        server.rig.settle()
        server.poll()
    server.close()


@pytest.mark.parametrize("kind", [HostKind.PINNED, HostKind.REGISTERED])
@pytest.mark.parametrize(
    "engine", [TransferEngine, StoreWithoutProducer, LoadWithoutProducer, EndedAtOnce, EventOnTheWrongStream]
)
def test_a_planted_bug_is_found(make_rig, engine, kind):
    """Wrong bytes, an end told too early, a race: each of them is an error here, and the engine as it is has none."""
    rig = make_rig()
    if not rig.holds(kind):
        rig.close()
        pytest.skip("the producer's stream cannot be held back here")
    server = Server(rig, SHAPE, kind, engine=engine)
    if server.slots.kind is HostKind.PAGEABLE:
        server.abandon()
        pytest.skip("this device does not register memory")
    if engine is TransferEngine:
        _run(server)
        return
    with pytest.raises(AssertionError):
        _run(server)
    with contextlib.suppress(AssertionError):
        server.abandon()
