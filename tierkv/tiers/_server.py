"""The creator's side of the rendezvous: a daemon thread that hands the memory to each member of the engine once."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import threading
import time
import weakref

from tierkv.errors import ConfigError, bad_setting
from tierkv.tiers._rendezvous import Geometry, Hello, Member, Peer, Reply, described, socket_name

_logger = logging.getLogger(__name__)
_BACKLOG = 128
_HELLO_NBYTES = 256
_CLASH_S = 1.0
"""How long to ask whose name it is: the owner may be between its bind and its listen, or just ending."""


class Server:
    """Serves one memfd under one name.

    Made in two steps, so that the name is reserved before the memory is made and nothing is made for a clash:
    the constructor binds, :meth:`serve` begins to answer. Joiners that come in between wait in the backlog.

    Raises:
        ConfigError: another process of this user serves this id; the message names its pid.
    """

    def __init__(self, shared_id: str, geometry: Geometry, creator: Member) -> None:
        self._geometry = geometry
        self._joined: dict[Member, tuple[bytes, int]] = {creator: (b"", os.getpid())}
        self._listener = _bind(shared_id, geometry)
        self._connections: set[socket.socket] = set()
        self._fd = -1
        self._nbytes = 0
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        _servers.add(self)

    def serve(self, fd: int, nbytes: int) -> None:
        """Answer from now on with a duplicate of ``fd``, which stays the caller's."""
        self._fd, self._nbytes = os.dup(fd), nbytes
        self._thread = threading.Thread(target=self._run, name="tierkv-pool-server", daemon=True)
        self._thread.start()

    @property
    def open(self) -> bool:
        """True until :meth:`close`, in the process that made it."""
        return not self._stop.is_set()

    def close(self) -> None:
        """Give the name back and hang up on every member: the pool is closed to newcomers. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        self._release()

    def _release(self) -> None:
        for sock in (self._listener, *self._connections):
            sock.close()
        for fd in (self._fd, self._wake):
            if fd >= 0:
                os.close(fd)
        self._fd = self._wake = -1
        self._connections.clear()

    def _abandon(self) -> None:
        """In a forked child: its copies of the sockets must not hold the name and the connections of a dead creator."""
        if not self._stop.is_set():
            self._stop = (
                threading.Event()
            )  # the old one's lock may have been held by the thread that did not come along
            self._stop.set()
            self._release()

    def _run(self) -> None:
        # poll, not epoll: an epoll set is one kernel object that a forked child would share with us.
        with selectors.PollSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while not self._stop.is_set():
                for key, _ in selector.select():
                    if key.fileobj is self._listener:
                        self._welcome(selector)
                    elif isinstance(key.fileobj, socket.socket) and not self._answer(key.fileobj):
                        selector.unregister(key.fileobj)
                        self._connections.discard(key.fileobj)
                        key.fileobj.close()

    def _welcome(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            # Out of descriptors, most likely: without a pause the level-triggered poll would spin until some are free.
            if error.errno not in (errno.EAGAIN, errno.ECONNABORTED):
                _logger.warning("host pool: cannot take in a joiner (%s)", error)
                self._stop.wait(0.1)
            return
        if Peer.of(connection).uid != os.geteuid():
            connection.close()
            return
        connection.setblocking(False)
        self._connections.add(connection)
        selector.register(connection, selectors.EVENT_READ)

    def _answer(self, connection: socket.socket) -> bool:
        """Answer a hello; False if the connection has ended. A member keeps it open: its end tells it that we ended."""
        try:
            message = connection.recv(_HELLO_NBYTES)
            if not message:
                return False
            reply = self._judge(message, Peer.of(connection))
            fds = [] if reply.refusal else [self._fd]
            socket.send_fds(connection, [reply.pack()], fds)
        except OSError:
            return False
        return True

    def _judge(self, message: bytes, peer: Peer) -> Reply:
        try:
            hello = Hello.unpack(message)
            refusal = self._geometry.differs(hello.asked) or self._duplicate(hello, peer)
        except ValueError as error:
            refusal = f"the joiner {error}"
        return Reply(self._geometry, self._nbytes, refusal)

    def _duplicate(self, hello: Hello, peer: Peer) -> str:
        """Why this member may not join; else it has, once for ever: a successor could not know what is where."""
        nonce, pid = self._joined.setdefault(hello.member, (hello.nonce, peer.pid))
        if nonce != hello.nonce:
            return f"{hello.member} has joined already, as {described(pid)}"
        return ""


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _abandon_all() -> None:
    for server in list(_servers):
        server._abandon()  # noqa: SLF001 - this module's own hook


os.register_at_fork(after_in_child=_abandon_all)


def _bind(shared_id: str, geometry: Geometry) -> socket.socket:
    name = socket_name(shared_id, geometry.purpose)
    deadline = time.monotonic() + _CLASH_S
    while True:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind(name)
            listener.listen(_BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"shared_id is {shared_id!r}, but its socket cannot be made ({error})") from error
        owner = _owner_pid(name)
        if owner is not None or time.monotonic() > deadline:
            who = "a process that does not answer" if owner is None else described(owner)
            allowed = f"the id of no other running engine: {who} serves a {geometry.purpose.label} under it"
            raise bad_setting("shared_id", shared_id, allowed)
        time.sleep(0.01)


def _owner_pid(name: bytes) -> int | None:
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    with probe, contextlib.suppress(OSError):
        probe.connect(name)
        return Peer.of(probe).pid
    return None
