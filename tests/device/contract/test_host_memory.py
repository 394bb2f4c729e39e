"""Pinned, registered, pageable: which it is changes who waits, never which bytes arrive."""

from __future__ import annotations

import pytest

from tests.device.contract.rigs import slots_of
from tests.device.contract.server import Server, Shape
from tierkv.device.runtime import HostKind

SHAPE = Shape(((4096, 4096),), ((0,),), 2)


def test_the_devices_own_memory_is_zeroed_and_aligned(make_rig):
    """In pieces, each at a multiple of 4096; what a failed allocation had got before is let go."""
    rig = make_rig()
    memory = rig.runtime.alloc_host(3 * 4096)
    assert memory.kind is HostKind.PINNED
    assert memory.address % 4096 == 0
    slots = slots_of(rig, HostKind.PINNED, 5, 4096, per_piece=2)
    assert [piece.nbytes for piece in slots.pieces] == [8192, 8192, 4096]
    slots.close()
    rig.close()


def test_registering_is_all_or_nothing(make_rig):
    """If one piece of the slots cannot be page-locked the others are released, and copies go on without."""
    rig = make_rig()
    standin = getattr(rig, "standin", None)
    if standin is None:
        rig.close()
        pytest.skip("only the stand-in counts page locks")
    before = standin.count("registered"), standin.count("unregistered")
    standin.set(register_limit=1)
    server = Server(rig, SHAPE, HostKind.REGISTERED)
    locked, released = standin.count("registered") - before[0], standin.count("unregistered") - before[1]
    assert server.slots.kind is HostKind.PAGEABLE
    assert locked == released
    server.store(0, [0, 1, 2, 3], 0, [0, 5])
    server.engine.wait()
    assert [done.error for done in server.poll()] == [None]
    server.close()


def test_page_locks_are_given_back(make_rig):
    """After close as many ranges were unlocked as locked, and copies of registered slots did not block."""
    rig = make_rig()
    standin = getattr(rig, "standin", None)
    if standin is None:
        rig.close()
        pytest.skip("only the stand-in counts page locks")
    before = [standin.count(name) for name in ("registered", "unregistered", "pageable_copies")]
    server = Server(rig, SHAPE, HostKind.REGISTERED)
    kind = server.slots.kind
    server.store(0, [0, 1, 2, 3], 0, [0, 5])
    server.engine.wait()
    server.poll()
    server.close()
    locked, released, waited = (
        standin.count(name) - n
        for name, n in zip(("registered", "unregistered", "pageable_copies"), before, strict=True)
    )
    assert locked == released
    assert (waited == 0) == (kind is HostKind.REGISTERED)
