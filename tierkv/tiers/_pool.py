"""Where a CPU pool's bytes lie: in this process alone, or in a memfd that one process makes and others join."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket

from tierkv.errors import ConfigError, bad_setting
from tierkv.tiers._mapping import SlotMapping
from tierkv.tiers._memory_limits import check_memory
from tierkv.tiers._rendezvous import (
    Geometry,
    Member,
    Membership,
    Purpose,
    Role,
    is_served,
    join,
    make_sealed,
    new_generation,
)
from tierkv.tiers._server import Server

ALIGNMENT_NBYTES = 4096
JOIN_DEADLINE_S = 60.0
"""Rank 0 makes the pool right after its model is loaded; the other ranks come at about the same time."""


class PrivatePool(SlotMapping):
    """Slots in anonymous memory of this process. Sync; nothing is touched before the size was checked.

    Args:
        n_slots: at least 1.
        stride_nbytes: distance of slots, a multiple of 4,096.
        populate: fault the pages in from a background thread.
        option: the setting that the size came from, for the message.

    Raises:
        ConfigError: a size is wrong, or larger than the machine or the cgroup has left.
    """

    def __init__(self, n_slots: int, stride_nbytes: int, *, populate: bool = True, option: str = "capacity") -> None:
        nbytes = check_geometry(n_slots, stride_nbytes)
        check_memory(option, nbytes, stride_nbytes)
        super().__init__(_map(-1, nbytes), n_slots, stride_nbytes)
        if populate:
            self.populate()


class SharedPool(SlotMapping):
    """Slots that the processes of one engine share. Sync: made by :meth:`create` in one of them, else by :meth:`join`.

    The creator and joiners may be one process (an engine that runs in-process): then it holds two mappings of the same
    bytes. Who may touch which slot when is not settled here: one ledger assigns slots, and the control page says when
    copies have ended.

    Concurrency: as :class:`SlotMapping`.
    """

    shared = True

    def __init__(self, mapped: mmap.mmap, geometry: Geometry, creator_pid: int, held: Server | socket.socket) -> None:
        """Use :meth:`create` or :meth:`join`."""
        super().__init__(mapped, geometry.n_slots, geometry.stride_nbytes)
        self._generation = geometry.generation
        self._creator_pid = creator_pid
        self._held = held

    @classmethod
    def create(
        cls, shared_id: str, n_slots: int, stride_nbytes: int, *,
        role: Role = Role.WORKER, rank: int = 0, populate: bool = True, option: str = "capacity",
    ) -> SharedPool:  # fmt: skip
        """Make the pool and serve it until :meth:`close` or the end of this process.

        Args:
            shared_id: what the processes of one engine, and nobody else, have in common.
            n_slots: at least 1.
            stride_nbytes: distance of slots, a multiple of 4,096.
            role: of this process.
            rank: of this process.
            populate: fault the pages in from a background thread.
            option: the setting that the size came from, for the message.

        Raises:
            ConfigError: a size is wrong or larger than the machine or the cgroup has left, or another pool is served
                under this id (the message names its process).
        """
        nbytes = check_geometry(n_slots, stride_nbytes)
        check_memory(option, nbytes, stride_nbytes)
        geometry = Geometry(Purpose.POOL, n_slots, stride_nbytes, new_generation())
        mapped, server = serve_memory(shared_id, geometry, Member(role, rank), nbytes)
        pool = cls(mapped, geometry, os.getpid(), server)
        if populate:
            pool.populate()
        return pool

    @classmethod
    def join(
        cls, shared_id: str, *, role: Role, rank: int,
        n_slots: int = 0, stride_nbytes: int = 0, generation: int = 0, deadline_s: float = JOIN_DEADLINE_S,
    ) -> SharedPool:  # fmt: skip
        """Map the pool that another process, or another part of this one, has made or is about to make.

        Blocks until ``deadline_s``; 0 tries once.

        Args:
            shared_id: as given to :meth:`create`.
            role: of this process; each (role, rank) joins once.
            rank: of this process.
            n_slots: what the pool must have; 0 takes it as it is.
            stride_nbytes: likewise.
            generation: likewise.
            deadline_s: seconds to wait for the creator.

        Raises:
            NotServedError: nobody serves it; another try may succeed.
            ConfigError: the creator refused: another geometry or generation, or this (role, rank) has joined.
        """
        asked = Geometry(Purpose.POOL, n_slots, stride_nbytes, generation)
        mapped, membership = join_memory(shared_id, asked, Member(role, rank), deadline_s)
        geometry = membership.geometry
        if len(mapped) != geometry.n_slots * geometry.stride_nbytes:
            membership.connection.close()
            raise ConfigError(f"shared_id is {shared_id!r}, but its cpu pool of {geometry} has {len(mapped)} bytes")
        return cls(mapped, geometry, membership.creator_pid, membership.connection)

    @property
    def generation(self) -> int:
        """128 random bits of this pool's creation."""
        return self._generation

    @property
    def creator_pid(self) -> int:
        """0 if it lives in another pid namespace."""
        return self._creator_pid

    def creator_alive(self) -> bool:
        """False once the creator has closed the pool or ended: the bytes stay, newcomers are refused for ever."""
        held = self._held
        return held.open if isinstance(held, Server) else is_served(held)

    def close(self) -> None:
        """Leave the pool; for the creator also: close it to newcomers. Otherwise as :meth:`SlotMapping.close`."""
        self._held.close()
        super().close()


def serve_memory(shared_id: str, geometry: Geometry, creator: Member, nbytes: int) -> tuple[mmap.mmap, Server]:
    """Make shared memory of zeros, map it and serve it. The caller owns both results."""
    with contextlib.ExitStack() as undo:
        server = Server(shared_id, geometry, creator)
        undo.callback(server.close)
        fd = make_sealed(f"tierkv {geometry.purpose.label}", nbytes)
        try:
            mapped = _map(fd, nbytes)
            server.serve(fd, nbytes)
        finally:
            os.close(fd)
        undo.pop_all()
        return mapped, server


def join_memory(shared_id: str, asked: Geometry, member: Member, deadline_s: float) -> tuple[mmap.mmap, Membership]:
    """Join what another process serves and map it. The caller owns the mapping and the connection."""
    membership = join(shared_id, asked, member, deadline_s)
    try:
        mapped = _map(membership.fd, membership.nbytes)
    except ConfigError:
        membership.connection.close()
        raise
    finally:
        os.close(membership.fd)
    return mapped, membership


def check_geometry(n_slots: int, stride_nbytes: int) -> int:
    """Bytes of the pool. Raises ConfigError if it would have no slot or a stride that no direct I/O could use."""
    if stride_nbytes < ALIGNMENT_NBYTES or stride_nbytes % ALIGNMENT_NBYTES:
        nearest = max(1, -(-stride_nbytes // ALIGNMENT_NBYTES)) * ALIGNMENT_NBYTES
        raise bad_setting("stride_nbytes", stride_nbytes, f"a multiple of {ALIGNMENT_NBYTES}", nearest)
    if n_slots < 1:
        raise bad_setting("n_slots", n_slots, "at least 1", 1)
    return n_slots * stride_nbytes


def _map(fd: int, nbytes: int) -> mmap.mmap:
    """Map a descriptor, or private anonymous memory for -1."""
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        return mmap.mmap(fd, nbytes, flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"capacity is {nbytes}, but the kernel maps no such size here ({error})") from error
