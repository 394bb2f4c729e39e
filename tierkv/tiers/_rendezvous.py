"""How processes of one engine find a memfd that one of them made: an abstract unix socket, a hello and a descriptor.

The creator binds a name derived from the engine's id; whoever connects and fits is handed the descriptor once. Nothing
lies in the file system, and the kernel takes name and memory back when the last process ends, however it ends. Joiners
never create: two creators would be two pools of which each process sees one. The states of both sides are tabled in
``docs/explanation/cpu-pool.md``.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import hashlib
import os
import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from tierkv.errors import ConfigError, TierError, bad_setting

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Nobody can cut the file under a peer's mapping (SIGBUS) or take the seals off."""
MAX_RANK = (1 << 32) - 1

_MAGIC = b"tierkv\0\1"
_VERSION = 1
_HELLO = struct.Struct("<8sIIQQ16sII16s")
_REPLY = struct.Struct("<8sIIQQ16sQI")
_TEXT_NBYTES = 512
_REPLY_WAIT_S = 1.0
_LEAST_WAIT_S = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1


class Purpose(IntEnum):
    """What the memory is for; part of the name, and compared again in the hello."""

    POOL = 1
    CONTROL = 2

    @property
    def label(self) -> str:
        return {Purpose.POOL: "cpu pool", Purpose.CONTROL: "control page"}[self]


class Role(IntEnum):
    """Which of an engine's processes this is. Each (role, rank) joins once."""

    WORKER = 1
    SCHEDULER = 2


class Member(NamedTuple):
    """One process's place in an engine."""

    role: Role
    rank: int

    def __str__(self) -> str:
        return f"{self.role.name.lower()} rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Geometry:
    """What both sides must agree on. In a hello, 0 means "whatever the creator has"."""

    purpose: Purpose
    n_slots: int
    stride_nbytes: int
    generation: int = 0
    """128 random bits, drawn at each creation: tells a pool from an earlier one under the same id."""

    def differs(self, asked: Geometry) -> str:
        """Why a joiner that asked for ``asked`` must not have this; empty if it may."""
        for what in ("purpose", "n_slots", "stride_nbytes", "generation"):
            mine, theirs = getattr(self, what), getattr(asked, what)
            if theirs not in (0, mine):
                return f"its {what} is {mine!r}, not {theirs!r}"
        return ""


_nonces: dict[tuple[int, bytes, Member], bytes] = {}
"""Nonces of joins not answered yet, by process (a fork copies this), name and member."""


class NotServedError(TierError):
    """Nobody serves this memory here and now. It may be served later; a refusal is a ConfigError and final."""


class Peer(NamedTuple):
    """Who is at the other end of a unix socket, as the kernel tells it."""

    pid: int
    uid: int
    gid: int

    @classmethod
    def of(cls, sock: socket.socket) -> Peer:
        size = struct.calcsize("3i")
        return cls(*struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)))


class Hello(NamedTuple):
    """A joiner's message."""

    asked: Geometry
    member: Member
    nonce: bytes
    """16 bytes, one per join: a joiner that lost the answer asks again under it and is not taken for a duplicate."""

    def pack(self) -> bytes:
        asked = self.asked
        generation = asked.generation.to_bytes(16, "little")
        return _HELLO.pack(
            _MAGIC, _VERSION, asked.purpose, asked.n_slots, asked.stride_nbytes, generation,
            self.member.role, self.member.rank, self.nonce,
        )  # fmt: skip

    @classmethod
    def unpack(cls, message: bytes) -> Hello:
        """Raises ValueError, with the reason for the joiner, if this version cannot read it."""
        if len(message) != _HELLO.size:
            raise ValueError(_spoken(message))
        magic, version, purpose, n_slots, stride_nbytes, generation, role, rank, nonce = _HELLO.unpack(message)
        if (magic, version) != (_MAGIC, _VERSION) or purpose not in list(Purpose) or role not in list(Role):
            raise ValueError(_spoken(message))
        asked = Geometry(Purpose(purpose), n_slots, stride_nbytes, int.from_bytes(generation, "little"))
        return cls(asked, Member(Role(role), rank), nonce)


class Reply(NamedTuple):
    """The creator's answer; the descriptor travels beside it."""

    geometry: Geometry
    nbytes: int
    refusal: str = ""

    def pack(self) -> bytes:
        mine, text = self.geometry, self.refusal.encode()[:_TEXT_NBYTES]
        head = _REPLY.pack(
            _MAGIC, _VERSION, mine.purpose, mine.n_slots, mine.stride_nbytes, mine.generation.to_bytes(16, "little"),
            self.nbytes, len(text),
        )  # fmt: skip
        return head + text

    @classmethod
    def unpack(cls, message: bytes) -> Reply:
        """Raises ValueError if it is not a reply of this version."""
        if len(message) < _REPLY.size or message[:12] != struct.pack("<8sI", _MAGIC, _VERSION):
            raise ValueError(_spoken(message))
        _, _, purpose, n_slots, stride_nbytes, generation, nbytes, n_text = _REPLY.unpack_from(message)
        geometry = Geometry(Purpose(purpose), n_slots, stride_nbytes, int.from_bytes(generation, "little"))
        return cls(geometry, nbytes, message[_REPLY.size : _REPLY.size + n_text].decode(errors="replace"))


class Membership(NamedTuple):
    """What a joiner gets. It owns both; closing ``connection`` tells the creator that it has left."""

    fd: int
    geometry: Geometry
    nbytes: int
    creator_pid: int
    connection: socket.socket


def socket_name(shared_id: str, purpose: Purpose) -> bytes:
    """Abstract address: a hash, since names end at 107 bytes; other users and other boots have other names."""
    if not shared_id:
        raise bad_setting("shared_id", shared_id, "a text that only the processes of one engine share")
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot_id = ""
    parts = (purpose.label, str(os.geteuid()), boot_id, shared_id)
    return b"\0tierkv/" + hashlib.blake2b("\0".join(parts).encode(), digest_size=20).hexdigest().encode()


def new_generation() -> int:
    """128 random bits that are not 0, which means "any"."""
    return int.from_bytes(os.urandom(16), "little") or 1


def make_sealed(label: str, nbytes: int) -> int:
    """A memfd of exactly ``nbytes`` zeros that no process can resize. The caller owns the descriptor.

    Raises:
        ConfigError: the process may not make a file of this size (RLIMIT_FSIZE) or the kernel has no memfd.
    """
    fd = -1
    try:
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except (OSError, OverflowError) as error:
        if fd >= 0:
            os.close(fd)
        hint = "; see `ulimit -f`" if getattr(error, "errno", None) == errno.EFBIG else ""
        raise ConfigError(
            f"capacity is {nbytes}, but no shared memory of this size can be made ({error}{hint})"
        ) from error
    return fd


def join(shared_id: str, asked: Geometry, member: Member, deadline_s: float) -> Membership:
    """Be handed the memory that the creator serves under this id; wait until ``deadline_s`` for it to be served.

    Blocking. A deadline of 0 tries once, for callers that come back on their own.

    Raises:
        NotServedError: nobody served it in time.
        ConfigError: the creator refused (other geometry, other generation, this (role, rank) has joined), or the name
            belongs to another user.
    """
    name = socket_name(shared_id, asked.purpose)
    # Kept until answered: who polls with deadline 0 and lost an answer comes back as the same joiner, not as a second.
    call = (os.getpid(), name, member)
    hello = Hello(asked, member, _nonces.setdefault(call, os.urandom(16)))
    deadline, pause_s = time.monotonic() + deadline_s, _FIRST_PAUSE_S
    try:
        while not isinstance(state := _attempt(name, shared_id, hello, deadline), Membership):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise _not_served(shared_id, hello, deadline_s, state)
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    except ConfigError:
        _nonces.pop(call, None)
        raise
    _nonces.pop(call, None)
    return state


def is_served(connection: socket.socket) -> bool:
    """False once the creator at the other end has closed its memory to newcomers or ended, or we have hung up."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False


def described(pid: int) -> str:
    """A peer for messages; the kernel calls one that another pid namespace hides process 0."""
    return f"process {pid}" if pid else "a process in another container"


def _not_served(shared_id: str, hello: Hello, deadline_s: float, state: str) -> NotServedError:
    within = f" within {deadline_s:g} s" if deadline_s else ""
    return NotServedError(
        f"{hello.asked.purpose.label} {shared_id!r}",
        f"{hello.member} could not join{within}: {state}; its creator has not started, is gone, or runs in "
        "another network namespace or on another host, where it cannot be reached",
    )


def _attempt(name: bytes, shared_id: str, hello: Hello, deadline: float) -> Membership | str:
    """Join, or say what to tell the user if this was the last attempt."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        sock.settimeout(min(_REPLY_WAIT_S, max(_LEAST_WAIT_S, deadline - time.monotonic())))
        try:
            sock.connect(name)
        except (ConnectionError, TimeoutError, BlockingIOError):
            # Nobody there; or bound and not yet listening; or more joiners at once than its backlog holds.
            return "nobody serves it"
        owner = Peer.of(sock)
        if owner.uid != os.geteuid():
            allowed = f"another: {described(owner.pid)} of uid {owner.uid} holds its name"
            raise bad_setting("shared_id", shared_id, allowed)
        try:
            sock.send(hello.pack())
            message, fds = _receive(sock)
        except (ConnectionError, TimeoutError):
            return f"{described(owner.pid)} holds its name but did not answer"
        for fd in fds:
            undo.callback(os.close, fd)
        if not message:
            return f"{described(owner.pid)} hung up"
        membership = _accept(message, fds, shared_id, owner, sock)
        undo.pop_all()
        return membership


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    # Not socket.recv_fds: it drops its flags (CPython 3.11), and without this one a child started meanwhile by another
    # thread would inherit the pool.
    room = socket.CMSG_SPACE(struct.calcsize("i"))
    message, control, _, _ = sock.recvmsg(_REPLY.size + _TEXT_NBYTES, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) // fds.itemsize * fds.itemsize])
    return message, list(fds)


def _accept(message: bytes, fds: list[int], shared_id: str, owner: Peer, sock: socket.socket) -> Membership:
    """Believe a reply only as far as it can be checked."""
    served_by = f"shared_id is {shared_id!r}, but {described(owner.pid)}, which serves it,"
    try:
        reply = Reply.unpack(message)
    except ValueError as error:
        raise ConfigError(f"{served_by} {error}") from error
    what = reply.geometry.purpose.label
    if reply.refusal:
        raise ConfigError(f"{served_by} refused us its {what}: {reply.refusal}; every engine needs an id of its own")
    if len(fds) != 1 or os.fstat(fds[0]).st_size != reply.nbytes or fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) != SEALS:
        raise ConfigError(f"{served_by} handed over something that is not a {what}")
    sock.setblocking(False)
    return Membership(fds[0], reply.geometry, reply.nbytes, owner.pid, sock)


def _spoken(message: bytes) -> str:
    """What to say about a message that this version cannot read."""
    if len(message) >= 12 and message[:8] == _MAGIC:
        return f"speaks version {struct.unpack_from('<I', message, 8)[0]}, not {_VERSION}"
    return "does not speak tierkv's protocol"
