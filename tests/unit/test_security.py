"""What the page on security says and no other test holds: other users, a root's mode, and what a checksum is not."""

from __future__ import annotations

import os
import secrets
import socket
import stat
from pathlib import Path

import pytest

from tests.faults.disks import NOBODY, unprivileged
from tests.fs_kit import LONGEST, NAMESPACE, PAGE, chunk_of, files_under, key_of, opened, path_of, read, store
from tests.patience import PATIENCE_S
from tierkv.errors import ConfigError
from tierkv.tiers._fs.format import checksum, namespace_digest, pack_header
from tierkv.tiers._rendezvous import Geometry, Hello, Member, Purpose, Role, join, make_sealed, socket_name
from tierkv.tiers._server import Server
from tierkv.types import Status

GEOMETRY = Geometry(Purpose.POOL, 1, PAGE, 1)
MAKER, JOINER = Member(Role.WORKER, 0), Member(Role.WORKER, 1)


def test_another_user_is_handed_nothing() -> None:
    """A correct hello of another user's connection: hung up on, no descriptor; a member of ours gets in afterwards."""
    shared_id = secrets.token_hex(8)
    server = Server(shared_id, GEOMETRY, MAKER)
    fd = make_sealed("test", PAGE)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(PATIENCE_S)
            with unprivileged():  # the kernel notes who connects; the server looks when it accepts, as us again
                stranger.connect(socket_name_of_root(shared_id))
            stranger.send(Hello(GEOMETRY, JOINER, bytes(16)).pack())
            server.serve(fd, PAGE)
            try:
                message, fds, _, _ = socket.recv_fds(stranger, 1024, 1)
            except ConnectionResetError:
                message, fds = b"", []
            assert (message, fds) == (b"", [])
        membership = join(shared_id, GEOMETRY, JOINER, 5)
        os.close(membership.fd)
        membership.connection.close()
    finally:
        server.close()
        os.close(fd)


def socket_name_of_root(shared_id: str) -> bytes:
    """The name has the user in it: a stranger who knows how it is made computes it, and so do we, as nobody."""
    uid = os.geteuid()
    assert uid == NOBODY
    os.seteuid(0)
    try:
        return socket_name(shared_id, Purpose.POOL)
    finally:
        os.seteuid(uid)


def test_another_users_server_is_not_believed() -> None:
    """Somebody else listens at our name: refused with his user id, and not told anything."""
    shared_id = secrets.token_hex(8)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
        squatter.bind(socket_name(shared_id, Purpose.POOL))
        with unprivileged():
            squatter.listen()
        with pytest.raises(ConfigError, match=f"of uid {NOBODY} holds its name"):
            join(shared_id, GEOMETRY, JOINER, 5)
        connection, _ = squatter.accept()
        with connection:
            assert connection.recv(1024) == b""


async def test_a_root_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    """It may be a group's on purpose; what is made inside is the engine's alone."""
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o775)
    async with opened(root) as tier:
        await store(tier, chunk_of(1))
    assert stat.S_IMODE(root.stat().st_mode) == 0o775
    assert {stat.S_IMODE(path.stat().st_mode) for path in files_under(root)} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_dir()} == {0o700}


async def test_a_forged_chunk_is_served(tmp_path: Path) -> None:
    """Whoever may write to a root may say what a chunk holds: checksums have no secret. Damage alone is found."""
    async with opened(tmp_path / "root") as tier:
        await store(tier, chunk_of(1))
        path = path_of(tmp_path / "root", key_of(1), tier)
        forged = (b"forged " * LONGEST)[:LONGEST]
        header = bytearray(PAGE)
        owner = path.slab.name[:16]
        pack_header(memoryview(header), chunk_of(1), namespace_digest(NAMESPACE), owner, checksum(memoryview(forged)))
        path.write_bytes((bytes(header) + forged).ljust(len(path.read_bytes()), b"\0"))
        statuses, buffers = await read(tier, key_of(1))
        assert statuses == [Status.OK]
        assert buffers[0][:LONGEST] == forged
