"""An open root: every part of the fs tier put together, and taken apart again in the right order."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final

from tierkv._threads import Lane
from tierkv.errors import TierError, bad_setting
from tierkv.protocols import TierContext
from tierkv.tiers._fs.batch import Batches
from tierkv.tiers._fs.books import Books
from tierkv.tiers._fs.catalogue import catalogue_nbytes
from tierkv.tiers._fs.dirs import NotRegularError, discard_root_lock, make_directory, make_root
from tierkv.tiers._fs.feed import Feed
from tierkv.tiers._fs.file_io import ChunkFiles, Tally, direct_works
from tierkv.tiers._fs.format import Sums, charge_nbytes, namespace_digest, padded_nbytes
from tierkv.tiers._fs.holes import is_in_memory
from tierkv.tiers._fs.index import IndexEntry, discard_part, index_room_nbytes, pack_index, save_index
from tierkv.tiers._fs.leftovers import Leftovers
from tierkv.tiers._fs.listing import leaf_times_ns
from tierkv.tiers._fs.lookup import Lookups
from tierkv.tiers._fs.memory import ScratchRing
from tierkv.tiers._fs.ops import Operations
from tierkv.tiers._fs.owners import Ownership
from tierkv.tiers._fs.scan import Scanner
from tierkv.tiers._fs.settle import Settlement
from tierkv.tiers._fs.slab_files import SlabFiles
from tierkv.tiers._fs.slab_io import MOST_IN_RUN, SlabIO
from tierkv.tiers._fs.slabs import Slabs
from tierkv.tiers._fs.store import Store
from tierkv.tiers._fs.wishes import Wishes, least_capacity_nbytes
from tierkv.types import Chunk, ChunkKey

_log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 1.0
"""How often an owner looks at the others: it bounds how long a newcomer waits for its share."""
_A_ROOT: Final = "a directory to write in, or a path where one can be made"
_NEVER_A_ROOT: Final = (errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOENT)
_NOT_OURS: Final = (errno.EROFS, errno.EACCES, errno.EPERM)
COUNTERS: Final = (
    "corrupt",  # files that were not what was written under their key, or not whole
    "vanished",  # files that somebody else removed
    "not_regular",  # links, FIFOs, devices, directories at a chunk's path
    "failed_reads",
    "failed_writes",
    "failed_deletes",
    "failed_scans",
    "no_space",
    "deleted",
    "trimmed",  # files removed by a scan to come under the limit
    "unfinished",  # files that a dead owner was writing
    "leavers_removed",  # files that nobody alive could read, removed for room
    "unreadable",  # files of another model, format version or checksum key, found by a scan
    "orphans",  # files whose owner's lock file was gone
    "adopted_owners",
    "bad_index",
    "leaves_from_index",
    "buffered",  # chunks whose memory was not aligned for direct I/O
)


class Mount:
    """One tier's use of one root, from open to close.

    Concurrency: ``open``, ``close`` and ``beat`` block on I/O; the rest is cheap.
    """

    @classmethod
    def open(cls, name: str, wishes: Wishes, ctx: TierContext) -> Mount:
        """Raises what :meth:`FSTier.open` raises; then nothing of ours is left behind."""
        path = os.path.realpath(wishes.root)
        if os.path.lexists(path) and not os.path.isdir(path):
            raise bad_setting(f"{name}.root", wishes.root, _A_ROOT)
        wishes.refuse_small(name, ctx)
        sums = wishes.secret.read(f"{name}.checksum_key_file", f"{name}.checksum_key_env")
        made: list[str] = []
        root_fd = None
        try:
            make_root(path, made)
            root_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            return cls(name, wishes, ctx, path, root_fd, sums=sums)
        except BaseException as error:
            if root_fd is not None:
                discard_root_lock(root_fd)
                os.close(root_fd)
            for directory in reversed(made):
                with contextlib.suppress(OSError):  # somebody else uses it already
                    os.rmdir(directory)
            if isinstance(error, OSError):
                if error.errno in _NOT_OURS or (root_fd is None and error.errno in _NEVER_A_ROOT):
                    raise bad_setting(f"{name}.root", wishes.root, f"{_A_ROOT} ({error.strerror})") from None
                error.filename = os.path.join(path, error.filename or "")  # it may be relative to the root
            raise

    def __init__(self, name: str, wishes: Wishes, ctx: TierContext, path: str, root_fd: int, *, sums: Sums) -> None:
        self.books = Books()
        self.feed = Feed()
        self._name = name
        self._path = path
        self._root_fd = root_fd
        self._wishes = wishes
        self._ctx = ctx
        self._tally = Tally()
        self._digest = namespace_digest(ctx.namespace, sums)
        self._slot_nbytes: int | None = None
        self._min_free_nbytes = wishes.least_free_nbytes(name, ctx, root_fd)
        self._stop = threading.Event()
        self._ownership = Ownership(
            name, root_fd, namespace=self._digest.hex(), books=self.books, spare_nbytes=self.spare_nbytes,
            clock=wishes.clock,
        )  # fmt: skip
        self._namespace_fd = self._join()
        direct = direct_works(f"owner-{self._ownership.id}.lock", root_fd)
        if not direct:
            _log.warning("%s: no direct I/O on %s: chunks go through the page cache", name, path)
        self._put_together(direct=direct, sums=sums)
        self._scan_lane = Lane(f"tierkv-{name}-scan", 1)
        self._keeper = threading.Thread(target=self._keep, name=f"tierkv-{name}-keeper", daemon=True)

    def _put_together(self, *, direct: bool, sums: Sums) -> None:
        books, ownership, tally, durable = self.books, self._ownership, self._tally, self._wishes.durable
        files = ChunkFiles(self._namespace_fd, self._digest, direct=direct, durable=durable, tally=tally, sums=sums)
        slab_files = SlabFiles(self._namespace_fd, self._digest, direct, durable, tally, sums)
        self._leftovers = Leftovers(self._namespace_fd, books)
        self._slabs = Slabs(
            slab_files, books=books, ownership=ownership,
            slot_nbytes=self._slot_nbytes, usual_nbytes=charge_nbytes(self._ctx.chunk_nbytes), n_slots=self._n_slots,
            spare_nbytes=self.spare_nbytes,
        )  # fmt: skip
        with contextlib.suppress(OSError):  # not now: the scan and the heartbeat try again
            self._slabs.look_around()
        self._slabs.fit_catalogue()
        self.in_memory = is_in_memory(self._namespace_fd)
        slab_io = SlabIO(self._digest, durable=durable, in_memory=self.in_memory, sums=sums)
        store = Store(files, self._slabs, slab_io)
        self.settlement = Settlement(
            self._name, self._root_fd, store=store, slabs=self._slabs, books=books, ownership=ownership, feed=self.feed,
            leftovers=self._leftovers, tally=tally, index_room_nbytes=self._index_room_nbytes,
        )  # fmt: skip
        self.scanner = Scanner(
            self._name, self._root_fd, digest=self._digest, slabs=self._slabs, books=books, ownership=ownership,
            feed=self.feed, settlement=self.settlement, leftovers=self._leftovers, tally=tally, gate=self._wishes.gate,
            refresh=self.beat,
        )  # fmt: skip
        self.lookups = Lookups(
            store=store, books=books, ownership=ownership, scanner=self.scanner, leftovers=self._leftovers, tally=tally,
            clock=self._wishes.clock,
        )  # fmt: skip
        ring = ScratchRing(self._wishes.n_workers, MOST_IN_RUN)
        self.operations = Operations(
            self._name, self._root_fd, files=files, store=store, books=books, ownership=ownership,
            settlement=self.settlement, lookups=self.lookups, leftovers=self._leftovers, tally=tally,
            chunk_nbytes=self._ctx.chunk_nbytes, spare_nbytes=self.spare_nbytes,
        )  # fmt: skip
        self.batches = Batches(
            self.operations, slabs=self._slabs, slab_io=slab_io, books=books, ownership=ownership, ring=ring,
            slot_nbytes=self._slot_nbytes,
        )  # fmt: skip

    def start(self) -> None:
        """Scan in the background, and keep an eye on the other owners."""
        self._scan_lane.post(self.scanner.first)
        self._keeper.start()

    def stop(self) -> None:
        """No more news: the feed ends, a scan under way is given up."""
        self._stop.set()
        self.scanner.stop()
        self.feed.close()

    def drain(self) -> None:
        """Wait for the threads that look after the root; ``stop`` was called."""
        if self._keeper.ident is not None:  # an open that was cancelled never started it
            self._keeper.join()
        self._scan_lane.wait_idle()
        self._scan_lane.close()

    def pack_index(self, order: Sequence[Chunk]) -> bytes | None:
        """The index of what is held, chunks in ``order`` last; None if there is none or no room for it."""
        if self.books.is_scanning:
            return None
        ids, books = self._ownership.ids, self.books
        ordered = {chunk.key: chunk for chunk in order}
        covers, held_keys = self._ownership.held_ids(), books.keys()
        slabs = self._slabs.open_ones(covers) or {}
        entries = []
        # What the ledger never heard of or has let go is colder than all it knows.
        for key in (*(key for key in held_keys if key not in ordered), *ordered):
            held = books.get(key)
            if held is not None:
                chunk = ordered.get(key) or Chunk(ChunkKey(key))
                slab = None if held.at is None else slabs.get((ids[held.number], held.nbytes))
                row = 0 if slab is None or held.at is None else slab.row_in(held.at)
                if row is not None:  # else it is not where the books say, which nobody has found out yet
                    entries.append(IndexEntry(ids[held.number], held.nbytes, chunk, held.at, row))
        stamps = {which: at for which, slab in slabs.items() if (at := slab.catalogue.stamp_at_rest()) is not None}
        data = pack_index(covers, leaf_times_ns(self._namespace_fd), stamps, entries, self._digest)
        more_nbytes = padded_nbytes(len(data)) - self._index_room_nbytes
        if not self._ownership.has_page or (more_nbytes > 0 and not books.start_write(more_nbytes)):
            _log.info("%s: no room for an index of %d chunks: the next open lists the tree", self._name, len(entries))
            return None
        return data

    async def save_index(self, data: bytes, executor: Executor) -> None:
        """Small, and written once: through aiofiles, on our own threads."""
        try:
            await save_index(self._root_fd, self._ownership.id, data, executor)
        except OSError as error:
            _log.warning("%s: no index written (%s): the next open lists the tree", self._name, error)

    def release(self) -> None:
        """Let go of the root. Nothing is under way any more."""
        try:
            discard_part(self._root_fd, self._ownership.id)
            owns_files = self._owns_files()
            held = self._ownership.held_ids()
            kept = {owner for owner in held if owns_files(owner) or not self._slabs.retire(owner)}
            self._ownership.leave(kept.__contains__)
        finally:
            self._slabs.close()
            os.close(self._namespace_fd)
            os.close(self._root_fd)

    def beat(self) -> None:
        """Look at the other owners once: shares, capacity, adoptions."""
        try:
            new = self._ownership.refresh()
        finally:  # a root that was removed as a whole took its slabs along
            self._slabs.look_around()
        if new:
            _log.info("%s: adopted the files of dead owners %s", self._name, ", ".join(new))
            self._tally.add("adopted_owners", len(new))
            self._scan_lane.post(self.scanner.adopted, new)
        excess = self.books.used_nbytes - self.books.limit_nbytes
        if excess > 0 and not self.books.is_scanning:  # a scan knows better what is there, and does this itself
            self._slabs.give_back(excess)

    @property
    def slot_nbytes(self) -> int:
        """What a new chunk occupies, however short it is; 0 if each has a file of its own."""
        return self._slot_nbytes or 0

    def share_nbytes(self) -> int:
        """The part of our limit that chunks can have: all but lock files and room for the index."""
        share_nbytes = max(0, self.books.limit_nbytes - self.books.fixed_nbytes)
        return share_nbytes if self._slot_nbytes is None else min(share_nbytes, self._slabs.most_nbytes())

    def spare_nbytes(self) -> int:
        """What the file system can still give us and keep ``min_free``; negative if that is not kept now."""
        found = os.fstatvfs(self._root_fd)
        # f_bavail: f_bfree counts what is reserved for root.
        return found.f_bavail * found.f_frsize - self._min_free_nbytes

    def counters(self) -> dict[str, int]:
        counts = self._tally.counts()
        return {name: counts[name] for name in (*COUNTERS, *sorted(counts.keys() - set(COUNTERS)))}

    def usage(self) -> dict[str, int]:
        return {
            "used_nbytes": self.books.counted_nbytes,
            "chunks_nbytes": self.books.chunks_nbytes,
            "limit_nbytes": self.books.limit_nbytes,
            "capacity_nbytes": self._ownership.capacity_nbytes,
            "n_chunks": len(self.books),
            "n_owners": self._ownership.n_owners,
        }

    def _keep(self) -> None:
        failed = False
        while not self._stop.wait(HEARTBEAT_S):
            try:
                self.beat()
                self._leftovers.retry()
                self._slabs.retry()
                self.operations.retry()
                failed = False
            except (OSError, TierError) as error:
                if not failed:
                    _log.warning("%s: cannot look after the other owners of the root: %s", self._name, error)
                failed = True

    def _join(self) -> int:
        """Join the owners and open our namespace's directory, or leave nothing behind."""
        try:
            self._ownership.join(partial(self._wishes.root_capacity_nbytes, self._name, self._ctx, self._root_fd))
            # No more than the disk can ever give us: else a large capacity on a small disk is all index room.
            usable_nbytes = max(0, self.spare_nbytes()) + self.books.used_nbytes
            slot_nbytes = charge_nbytes(self._ctx.chunk_nbytes)
            self._n_slots = max(1, min(self._ownership.wish_nbytes, usable_nbytes) // slot_nbytes)
            usable_nbytes = min(self._ownership.share_nbytes, usable_nbytes)
            self._index_room_nbytes = index_room_nbytes(max(1, usable_nbytes // slot_nbytes))
            self.books.add_fixed(self._index_room_nbytes)
            namespace_fd = self._open_namespace()
            if self._slot_nbytes is not None:
                self.books.add_fixed(catalogue_nbytes(self._n_slots))
            return namespace_fd
        except BaseException as error:
            self._ownership.leave(lambda owner: owner != self._ownership.new_id)
            if isinstance(error, NotRegularError):
                raise TierError(self._name, f"no directory where our namespace belongs: {error}") from None
            raise

    def _open_namespace(self) -> int:
        """Open our namespace's directory and decide how new chunks will lie in it."""
        namespace_fd = make_directory(self._digest.hex(), self._root_fd)
        layout = self._wishes.layout
        why_not = None if layout == "files" else self._why_no_slab(namespace_fd)
        if layout != "files" and why_not is None:
            self._slot_nbytes = charge_nbytes(self._ctx.chunk_nbytes)
        if layout == "auto":
            level = logging.INFO if why_not is None else logging.WARNING
            chosen = f"each into a file of its own: {why_not}" if why_not else "into a slab"
            _log.log(level, "%s: new chunks go %s, on %s", self._name, chosen, self._path)
        if layout != "slab" or why_not is None:
            return namespace_fd
        os.close(namespace_fd)
        with contextlib.suppress(OSError):  # it was there before
            os.rmdir(self._digest.hex(), dir_fd=self._root_fd)
        raise bad_setting(f"{self._name}.layout", "slab", f'"files" here: {why_not}', "files")

    def _why_no_slab(self, namespace_fd: int) -> str | None:
        least = least_capacity_nbytes(self._ctx.chunk_nbytes, in_slab=True)
        if self._ownership.capacity_nbytes < least:
            return f"a slab needs a capacity of {least} bytes at least"
        files = SlabFiles(namespace_fd, self._digest, direct=False, durable=False, tally=self._tally)
        error = files.refused(self._ownership.id)
        if error is None:
            return None
        return f"this file system cannot give a file blocks and take them back ({error.strerror})"

    def _owns_files(self) -> Callable[[str], bool]:
        """Whether an owner id is in some file's name, as far as we know."""
        books = self.books
        if books.is_scanning or len(self._leftovers):
            return lambda _owner: True
        owners = {self._ownership.ids[n] for n in books.numbers()} | {leaver.owner for leaver in books.leavers}
        return owners.__contains__
