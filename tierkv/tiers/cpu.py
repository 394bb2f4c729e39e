"""Host memory in equal slots: the usual primary, private to one process or shared by the processes of one engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence

from tierkv.errors import ChunkSizeError, ClosedError, TierError, bad_setting, closest
from tierkv.protocols import TierContext
from tierkv.settings import parse_count, parse_seconds
from tierkv.tiers._mapping import SlotMapping
from tierkv.types import Chunk, ChunkKey, Outcome, Reason, Status

_ROLES = ("worker", "scheduler")
_MAX_RANK = (1 << 32) - 1
_JOIN_PAUSE_S = 0.02


class CPUTier:
    """One mapping of ``capacity_nbytes // stride_nbytes`` slots of host memory.

    As the primary only ``slot_view`` is used. The keyed calls serve a private pool that is a lower level: they copy on
    the calling thread without awaiting half-way, and a chunk occupies a whole slot whatever its length. Constructors
    do no I/O: ``open`` checks the size against the machine's and the cgroup's free memory and refuses with the numbers.

    With ``shared_id`` the processes of one engine open one pool: worker rank 0 makes it, all others join, in any order.
    Its slots are assigned by one ledger, so only ``slot_view`` is for use there.

    Args:
        name: used in metrics and messages.
        shared_id: what the processes of one engine, and nobody else, have in common; None keeps the pool private.
        role: "worker" or "scheduler"; each (role, rank) opens a shared pool once.
        rank: of this process within its role.
        join_deadline_s: how long ``open`` waits for the process that makes the pool.
        populate: fault all pages in from a background thread after ``open``, so that no store has to.
        pool: slots that somebody else has made, and closes; ``open`` then only checks that they fit.
    """

    def __init__(
        self, *, name: str = "cpu", shared_id: str | None = None, role: str = "worker", rank: int = 0,
        join_deadline_s: float = 60.0, populate: bool = True, pool: SlotMapping | None = None,
    ) -> None:  # fmt: skip
        if not _is_text(name):
            raise bad_setting("CPUTier.name", name, "text", example="cpu")
        if shared_id is not None and not _is_text(shared_id):
            raise bad_setting(f"{name}.shared_id", shared_id, "text that only this engine has, or None")
        if not isinstance(populate, bool):
            raise bad_setting(f"{name}.populate", populate, "True or False", bool(populate))
        if role not in _ROLES:
            raise bad_setting(f"{name}.role", role, " or ".join(_ROLES), closest(str(role), _ROLES))
        if shared_id is not None and pool is not None:
            raise bad_setting(f"{name}.shared_id", shared_id, "None where a pool is handed over")
        self._name = name
        self._shared_id = shared_id
        self._role = role
        self._rank = parse_count(f"{name}.rank", rank, 0, _MAX_RANK)
        self._join_deadline_s = parse_seconds(f"{name}.join_deadline_s", join_deadline_s)
        self._populate = populate
        self._handed_over = pool
        self._ctx: TierContext | None = None
        self._pool: SlotMapping | None = None
        self._free: list[int] = []
        self._held: dict[ChunkKey, tuple[int, int]] = {}

    @property
    def name(self) -> str:
        return self._name

    @property
    def n_slots(self) -> int:
        """0 while the tier is not open."""
        return 0 if self._pool is None else self._pool.n_slots

    @property
    def buffer(self) -> memoryview:
        """The whole mapping, writable, for pinning and for tensors over it. It outlives ``aclose``."""
        return self._opened()[0].buffer

    def slot_view(self, slot: int) -> memoryview:
        """Writable bytes of one slot; it outlives ``aclose``. Raises IndexError outside ``range(n_slots)``."""
        return self._opened()[0].view(slot)

    def charge_nbytes(self, chunk_nbytes: int) -> int:
        """A chunk occupies whole slots, however short it is."""
        stride_nbytes = self._opened()[1].stride_nbytes
        return max(1, -(-chunk_nbytes // stride_nbytes)) * stride_nbytes

    async def open(self, ctx: TierContext) -> None:
        """Make or join the pool.

        Raises:
            ConfigError: the capacity is below one slot or above what the machine or cgroup has left; or a shared pool
                is another engine's, or of another size, or has been joined as this (role, rank).
            TierError: nobody served the shared pool before the deadline, or the tier is open.
        """
        if self._pool is not None:
            raise TierError(self._name, "the tier is open already")
        n_slots = ctx.capacity_nbytes // ctx.stride_nbytes
        if n_slots < 1:
            allowed = f"at least one chunk, which takes {ctx.stride_nbytes} bytes here"
            raise bad_setting(f"{self._name}.capacity", ctx.capacity_nbytes, allowed, ctx.stride_nbytes)
        self._pool = await self._acquire(n_slots, ctx.stride_nbytes)
        self._ctx = ctx
        self._free = list(range(n_slots - 1, -1, -1))

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        self._opened()
        return [key in self._held for key in keys]

    async def read(self, items: Sequence[tuple[ChunkKey, memoryview]]) -> Sequence[Outcome]:
        """A buffer shorter than its chunk is left alone and answered ``FAILED`` with ChunkSizeError."""
        pool, _ = self._opened()
        return [self._read_one(pool, key, buffer) for key, buffer in items]

    async def write(self, items: Sequence[tuple[Chunk, memoryview]]) -> Sequence[Outcome]:
        """Refuses what is larger than ``chunk_nbytes`` or finds all slots taken; see :class:`~tierkv.Reason`.

        Raises:
            TierError: the pool is shared: two processes would each assign its slots by themselves.
        """
        pool, ctx = self._opened()
        if pool.shared:
            raise TierError(self._name, "a shared pool's slots are assigned by one ledger; it takes no keyed writes")
        return [self._write_one(pool, ctx, chunk, buffer) for chunk, buffer in items]

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        self._opened()
        for key in keys:
            held = self._held.pop(key, None)
            if held is not None:
                self._free.append(held[0])

    async def aclose(self) -> None:
        """Waits for the unmapping, which no cancellation stops. Memory still looked at goes with its last view."""
        pool, self._pool, self._ctx = self._pool, None, None
        self._free, self._held = [], {}
        if pool is not None and pool is not self._handed_over:
            await _in_thread(pool)

    async def _acquire(self, n_slots: int, stride_nbytes: int) -> SlotMapping:
        # Sockets, ctypes and the like are loaded with the first pool: `import tierkv` is to be cheap.
        from tierkv.tiers._pool import PrivatePool, SharedPool  # noqa: PLC0415

        option = f"{self._name}.capacity"
        given = self._handed_over
        if given is not None:
            if (given.n_slots, given.stride_nbytes) != (n_slots, stride_nbytes):
                has = f"the {given.nbytes} bytes of the pool handed over, in slots of {given.stride_nbytes}"
                raise bad_setting(option, n_slots * stride_nbytes, has, given.nbytes)
            return given
        if self._shared_id is None:
            return PrivatePool(n_slots, stride_nbytes, populate=self._populate, option=option)
        if (self._role, self._rank) == ("worker", 0):
            return SharedPool.create(self._shared_id, n_slots, stride_nbytes, populate=self._populate, option=option)
        return await self._join(self._shared_id, n_slots, stride_nbytes)

    async def _join(self, shared_id: str, n_slots: int, stride_nbytes: int) -> SlotMapping:
        from tierkv.tiers._pool import SharedPool  # noqa: PLC0415
        from tierkv.tiers._rendezvous import NotServedError, Role  # noqa: PLC0415

        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._join_deadline_s
        while True:
            try:
                return SharedPool.join(
                    shared_id, role=Role[self._role.upper()], rank=self._rank,
                    n_slots=n_slots, stride_nbytes=stride_nbytes, deadline_s=0,
                )  # fmt: skip
            except NotServedError as error:
                if loop.time() >= deadline:
                    raise NotServedError(self._name, f"not open after {self._join_deadline_s:g} s: {error}") from error
            await asyncio.sleep(_JOIN_PAUSE_S)

    def _opened(self) -> tuple[SlotMapping, TierContext]:
        if self._pool is None or self._ctx is None:
            raise ClosedError(f"{self._name}: the tier is not open")
        return self._pool, self._ctx

    def _read_one(self, pool: SlotMapping, key: ChunkKey, buffer: memoryview) -> Outcome:
        if key not in self._held:
            return Outcome(key, Status.MISSING)
        slot, nbytes = self._held[key]
        if len(buffer) < nbytes:
            return self._too_short(key, buffer, nbytes)
        buffer[:nbytes] = pool.view(slot)[:nbytes]
        buffer[nbytes:] = bytes(len(buffer) - nbytes)
        return Outcome(key, Status.OK)

    def _write_one(self, pool: SlotMapping, ctx: TierContext, chunk: Chunk, buffer: memoryview) -> Outcome:
        if chunk.nbytes > ctx.chunk_nbytes:
            return Outcome(chunk.key, Status.REFUSED, Reason.TOO_LARGE)
        if len(buffer) < chunk.nbytes:
            return self._too_short(chunk.key, buffer, chunk.nbytes)
        if chunk.key in self._held:
            slot = self._held[chunk.key][0]
        elif self._free:
            slot = self._free.pop()
        else:
            return Outcome(chunk.key, Status.REFUSED, Reason.FULL)
        pool.view(slot)[: chunk.nbytes] = buffer[: chunk.nbytes]
        self._held[chunk.key] = (slot, chunk.nbytes)
        return Outcome(chunk.key, Status.OK)

    def _too_short(self, key: ChunkKey, buffer: memoryview, nbytes: int) -> Outcome:
        error = ChunkSizeError(f"{self._name}: a buffer of {len(buffer)} bytes for a chunk of {nbytes}")
        return Outcome(key, Status.FAILED, Reason.TIER_ERROR, error)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


async def _in_thread(pool: SlotMapping) -> None:
    """Close a pool in a daemon thread: unmapping takes 0.2 s a GiB, and no cancellation stops a thread."""
    loop = asyncio.get_running_loop()
    closed = asyncio.Event()

    def close() -> None:
        pool.close()
        with contextlib.suppress(RuntimeError):  # the loop ended before the unmapping did; nobody waits any more
            loop.call_soon_threadsafe(closed.set)

    threading.Thread(target=close, name="tierkv-unmap", daemon=True).start()
    await closed.wait()
