"""The fs tier: checked chunks on disk, under a hard capacity, on a root that processes may share and outlive."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Final, Literal, cast

from tierkv._threads import Lane
from tierkv.errors import ClosedError, TierWriteError, bad_setting, closest
from tierkv.protocols import Clock, TierContext
from tierkv.settings import parse_count
from tierkv.sizes import format_size, parse_size
from tierkv.tiers._fs.format import charge_nbytes
from tierkv.tiers._fs.mount import Mount
from tierkv.tiers._fs.scan import Gate
from tierkv.tiers._fs.secret import SecretSource
from tierkv.tiers._fs.wishes import LAYOUTS, Wishes
from tierkv.types import Chunk, ChunkKey, Found, Outcome

_SMALL_NBYTES: Final = 256 * 1024
"""Below this a chunk costs more in system calls and GIL than in waiting: more threads than cores make it slower."""
_MOST_THREADS: Final = 256
_DURABILITIES: Final = ("process", "power")


class FSTier:
    """A persistent tier under ``root``: chunks with a header and a checksum each, in one file of slots or a file each.

    - *Bounded*: everything of ours on the root, rounded up to 4 KiB, stays within the capacity, unfinished files and
      the files of all processes, namespaces and earlier runs included. What is found above it at open is trimmed
      first, coldest first, and until then nothing is written (``writable``). Files that are not ours are not touched.
    - *Verified*: every read checks header, identity and payload (xxh3-128, or keyed BLAKE2b); what fails is removed and
      a miss.
    - *Restartable*: after a kill what is there is scanned in the background while :meth:`probe` finds single keys at
      once; after a clean close an index restores the exact order.
    - *Shared*: several processes may use one root. Each has its share, evicts only what it wrote, and reads what the
      others wrote in its namespace. Where ``flock`` does not work only one process may use the root.

    Args:
        root: directory; made if need be (mode 0700). A relative path is resolved here, once; a symbolic link at open.
        capacity: most bytes on the root, as an integer or text like ``"500GiB"``; None takes the level's, and if that
            has none either, half of what is free or ours already. The least of all processes on a root counts.
        min_free: bytes to leave free on the file system, whoever fills it; None is 5 % of it, at most 1 GiB. Less
            than the file system has.
        n_read_threads: most reads in flight, 1 to 256. Reads never wait behind writes.
        n_write_threads: most writes and removals in flight, 1 to 256.
        durability: what an acknowledged chunk survives: the end of the process, or with "power" (a sync a chunk)
            that of the machine.
        checksum_key_file: file with a secret of 16 bytes at least. Chunks are then proven by keyed BLAKE2b instead of
            xxh3-128: what somebody without the secret has written or changed is a miss. Read once, at open. Chunks of
            another secret, or of none, are another namespace's: not found, and left alone until the room is needed.
        checksum_key_env: name of a variable of the environment that has the secret instead.
        layout: how new chunks lie on the disk; both are read. "slab" is one file of equal slots, "files" one file a
            chunk, "auto" a slab wherever the file system and the capacity allow one. See docs/explanation/slab.md.
        name: used in metrics and messages.
        clock: seconds, for how long a negative answer holds.

    Raises:
        ConfigError: a setting is wrong; nothing was created.

    Concurrency: the async methods from one event loop, ``writable``, ``settled``, ``owns``, ``share_nbytes`` and
    ``counters`` from any thread. A buffer belongs to the tier until its call has returned, even if the call is
    cancelled. A batch is spread over threads; one that names a key twice is done in order instead.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        capacity: int | str | None = None,
        min_free: int | str | None = None,
        n_read_threads: int = 4,
        n_write_threads: int = 4,
        durability: Literal["process", "power"] = "process",
        checksum_key_file: str | os.PathLike[str] | None = None,
        checksum_key_env: str | None = None,
        layout: Literal["auto", "slab", "files"] = "auto",
        name: str = "fs",
        clock: Clock = time.monotonic,
        _scan_gate: Gate | None = None,
    ) -> None:
        _check(name, root=root, durability=durability, clock=clock, layout=layout)
        self._wishes = Wishes(
            root=os.path.abspath(root),
            capacity_nbytes=None if capacity is None else parse_size(f"{name}.capacity", capacity),
            min_free_nbytes=None if min_free is None else parse_size(f"{name}.min_free", min_free, low=0),
            n_workers=parse_count(f"{name}.n_read_threads", n_read_threads, 1, _MOST_THREADS)
            + parse_count(f"{name}.n_write_threads", n_write_threads, 1, _MOST_THREADS),
            durable=durability == "power",
            clock=clock,
            gate=_scan_gate,
            secret=_secret_source(name, checksum_key_file, checksum_key_env),
            layout=layout,
        )
        self._slot_nbytes = 0
        self._n_read_threads = n_read_threads
        self._n_write_threads = n_write_threads
        self._name = name
        self._mount: Mount | None = None
        self._opening: asyncio.Future[Mount] | None = None
        self._closing: asyncio.Future[None] | None = None
        self._order: Sequence[Chunk] | None = None
        self._n_cores = os.cpu_count() or 1

    @property
    def name(self) -> str:
        return self._name

    def __repr__(self) -> str:
        mount = self._mount
        if mount is None:
            return f"FSTier({self._wishes.root!r}, not open)"
        used, limit = format_size(mount.books.used_nbytes), format_size(mount.books.limit_nbytes)
        return f"FSTier({self._wishes.root!r}, {len(mount.books)} chunks, {used} of {limit})"

    async def open(self, ctx: TierContext) -> None:
        """Take a place on the root and start the scan; returns before the scan has ended.

        Raises:
            ConfigError: the root is no directory or may not be written, the capacity does not hold one chunk, or
                ``min_free`` leaves no room for one on any disk of that size; nothing was created.
            TierError: another process uses the root and they cannot share it.
            OSError: the root cannot be used.
            ClosedError: the tier is open, or was closed: make another one.
        """
        if self._opening is not None or self._closing is not None:
            raise ClosedError(f"{self._name}: a tier opens once")
        self._read_lane = Lane(f"tierkv-{self._name}-read", self._n_read_threads)
        self._write_lane = Lane(f"tierkv-{self._name}-write", self._n_write_threads)
        self._probe_lane = Lane(f"tierkv-{self._name}-probe", 1)
        # Opening cannot be interrupted half-way: a cancelled open still ends, and aclose waits for it.
        self._opening = self._probe_lane.run(Mount.open, self._name, self._wishes, ctx)
        try:
            mount = await asyncio.shield(self._opening)
        except Exception:
            self._close_lanes()
            raise
        if mount.in_memory:
            # Nothing to wait for: more threads than cores would only fight for the GIL.
            for lane in (self._read_lane, self._write_lane):
                lane.n_threads = min(lane.n_threads, self._n_cores)
        mount.start()
        self._slot_nbytes = mount.slot_nbytes
        self._mount = mount

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        mount = self._opened()
        return await self._probe_lane.run(mount.operations.contains, list(keys))

    async def read(self, items: Sequence[tuple[ChunkKey, memoryview]]) -> Sequence[Outcome]:
        """Fill each buffer with its verified chunk, zeros behind it. A buffer whose outcome is not OK holds anything.

        MISSING: no file, or something at its path that is none. CORRUPT: not what was written; it was removed.
        FAILED: the file may be intact (EIO, EMFILE, a buffer shorter than the chunk).
        """
        mount = self._opened()
        outcomes: list[Outcome | None] = [None] * len(items)
        if items:
            is_set = len({key for key, _ in items}) == len(items)
            n_workers = self._n_workers(self._read_lane, len(items), len(items[0][1])) if is_set else 1
            plan = partial(mount.batches.plan_reads, items, n_workers, in_order=not is_set)
            await self._read_lane.spread(partial(mount.batches.read, items, outcomes), plan, n_workers)
        return cast("list[Outcome]", outcomes)

    async def write(self, items: Sequence[tuple[Chunk, memoryview]]) -> Sequence[Outcome]:
        """Store each chunk; an earlier copy is replaced in one step.

        REFUSED: ``SCANNING`` before the start-up trim has ended, ``FULL`` beyond this process's share, ``NO_SPACE`` on
        a full disk, ``TOO_LARGE`` for a payload over ``chunk_nbytes`` or a key over 115 bytes. FAILED: the file system
        said something else. In each of these cases nothing is left behind.
        """
        mount = self._opened()
        outcomes: list[Outcome | None] = [None] * len(items)
        if items:
            is_set = len({chunk.key for chunk, _ in items}) == len(items)
            n_workers = self._n_workers(self._write_lane, len(items), len(items[0][1])) if is_set else 1
            plan = partial(mount.batches.plan_writes, items, n_workers, in_order=not is_set)
            await self._write_lane.spread(partial(mount.batches.write, items, outcomes), plan, n_workers)
        return cast("list[Outcome]", outcomes)

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove files of ours. A file that is gone already is as good; other owners' files stay.

        Raises:
            TierWriteError: the file system refused to remove those in ``keys``; the others are gone.
        """
        mount = self._opened()
        keys = list(keys)
        errors: dict[ChunkKey, OSError] = {}
        if keys:
            n_workers = self._n_workers(self._write_lane, len(keys), 0)
            await self._write_lane.spread(partial(mount.operations.delete_some, errors), partial(iter, keys), n_workers)
        if errors:
            raise TierWriteError(
                self._name, f"{len(errors)} chunk files stay: {next(iter(errors.values()))}", [*errors]
            )

    async def aclose(self) -> None:
        """Wait for calls under way, write the index, let go of the root. Idempotent.

        If it is cancelled, the same is still done on a thread; a call that hangs on a dead disk keeps its descriptor
        open until it returns, and holds up nothing else.
        """
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    def charge_nbytes(self, chunk_nbytes: int) -> int:
        """Header page plus payload, in whole pages of 4 KiB; in a slab always a whole slot."""
        return max(self._slot_nbytes, charge_nbytes(chunk_nbytes))

    def share_nbytes(self) -> int:
        """What the chunks of this process may occupy now; 0 while not open."""
        mount = self._mount
        return 0 if mount is None else mount.share_nbytes()

    @property
    def writable(self) -> bool:
        mount = self._mount
        return mount is not None and mount.settlement.writable

    def settled(self, key: ChunkKey) -> bool:
        mount = self._mount
        return mount is None or mount.lookups.settled(key)

    def owns(self, key: ChunkKey) -> bool:
        mount = self._mount
        return mount is not None and key in mount.books

    async def scan(self) -> AsyncIterator[Sequence[Found]]:
        """Batches of at most 2,000, coldest first, once the start-up trim has ended; then adoptions until closed."""
        feed = self._opened().feed
        while (batch := await feed.take()) is not None:
            yield batch

    async def probe(self, keys: Sequence[ChunkKey]) -> Sequence[Found | None]:
        mount = self._opened()
        return await self._probe_lane.run(mount.lookups.probe, list(keys))

    async def save_order(self, chunks: Sequence[Chunk]) -> None:
        self._opened()
        self._order = chunks

    def counters(self) -> dict[str, int]:
        """What happened since the tier was opened, by name; see docs/explanation/fs-tier.md. Empty while not open."""
        mount = self._mount
        return {} if mount is None else mount.counters()

    def usage(self) -> Mapping[str, int]:
        """Bytes now: what lies on the root and is ours, our limit, the root's capacity; and how many share it."""
        mount = self._mount
        return {} if mount is None else mount.usage()

    def _opened(self) -> Mount:
        if self._mount is None or self._closing is not None:
            raise ClosedError(f"{self._name}: the tier is not open")
        return self._mount

    def _n_workers(self, lane: Lane, n_chunks: int, nbytes: int) -> int:
        return min(n_chunks, lane.n_threads if nbytes >= _SMALL_NBYTES else min(lane.n_threads, self._n_cores))

    async def _close(self) -> None:
        if self._opening is None:
            return
        try:
            mount = await asyncio.shield(self._opening)
        except Exception:  # noqa: BLE001 - whatever it was, open has raised it and cleaned up
            return
        mount.stop()
        closer = Lane(f"tierkv-{self._name}-close", 1)
        given_up = False
        try:
            await asyncio.shield(closer.run(self._drain, mount))
            data = await asyncio.shield(closer.run(mount.pack_index, self._order or ()))
            if data is not None:
                await mount.save_index(data, closer.executor())
        except asyncio.CancelledError:
            given_up = True  # the loop ends: it must not wait for a call that hangs on a dead disk
            raise
        finally:
            # One thread, first come first served: even if we are cancelled, this runs after what was begun above.
            released = closer.run(mount.release)
            closer.close()
            if not given_up:
                await asyncio.shield(released)

    def _drain(self, mount: Mount) -> None:
        for lane in (self._read_lane, self._write_lane, self._probe_lane):
            lane.wait_idle()
        self._close_lanes()
        mount.drain()

    def _close_lanes(self) -> None:
        for lane in (self._read_lane, self._write_lane, self._probe_lane):
            lane.close()


def _check(name: object, *, root: object, durability: object, clock: object, layout: object) -> None:
    """Raise ConfigError for what has no parser of its own."""
    if not _is_text(name):
        raise bad_setting("FSTier.name", name, "text", example="fs")
    if not callable(clock):
        raise bad_setting(f"{name}.clock", clock, "a function that gives seconds", example="time.monotonic")
    if not _is_path(root):
        raise bad_setting(f"{name}.root", root, "the path of a directory", example="/var/cache/tierkv")
    if isinstance(root, os.PathLike) and os.fspath(root) == os.curdir:
        allowed = "the path of a directory, in full if it is the current one: that is what an empty Path is, too"
        raise bad_setting(f"{name}.root", root, allowed, os.getcwd())
    if durability not in _DURABILITIES:
        raise bad_setting(
            f"{name}.durability", durability, '"process" or "power"', closest(str(durability), _DURABILITIES)
        )
    if layout not in LAYOUTS:
        raise bad_setting(f"{name}.layout", layout, '"auto", "slab" or "files"', closest(str(layout), LAYOUTS))


def _is_text(name: object) -> bool:
    return isinstance(name, str) and bool(name)


def _secret_source(name: str, file: object, env: object) -> SecretSource:
    if file is not None and not _is_path(file):
        raise bad_setting(f"{name}.checksum_key_file", file, "the path of a file", example="/etc/tierkv/checksum.key")
    if env is not None and (not _is_text(env) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(env))):
        # Not its value: whoever writes the secret itself there should not find it in a log.
        allowed = "the name of a variable: letters, digits and underscores"
        raise bad_setting(f"{name}.checksum_key_env", "not a name", allowed, example="TIERKV_CHECKSUM_KEY")
    return SecretSource(None if file is None else os.fspath(cast("str", file)), cast("str | None", env))


def _is_path(root: object) -> bool:
    path = os.fspath(root) if isinstance(root, (str, os.PathLike)) else ""
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        return False
    try:
        os.fsencode(path)
    except UnicodeEncodeError:  # a lone surrogate that stands for no byte
        return False
    return True
