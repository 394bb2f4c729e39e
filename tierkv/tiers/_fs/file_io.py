"""Chunk files of one namespace: create, read, check and remove them. One ``pwritev`` a chunk; a ``preadv``, or several.

Every open is relative to a directory descriptor, non-blocking, never follows a symbolic link and is checked to be a
regular file, so whatever somebody plants in the tree is at worst a miss.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import logging
import mmap
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from tierkv.errors import ChunkSizeError
from tierkv.tiers._fs.dirs import NotRegularError, make_directory, open_directory, sync_upwards, unlink, unlink_first
from tierkv.tiers._fs.format import (
    HEADER_NBYTES,
    PAGE_NBYTES,
    PLAIN,
    BadHeaderError,
    Header,
    Sums,
    file_name,
    header_of,
    leaf_of,
    pack_header,
    part_name,
)
from tierkv.tiers._fs.memory import Scratch, zero
from tierkv.tiers._fs.pieces import LONG_NBYTES, PIECE_NBYTES, in_pages, sum_of_pieces
from tierkv.types import Chunk, ChunkKey

_log = logging.getLogger(__name__)

_SAFE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECT: Final = getattr(os, "O_DIRECT", 0)
NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
TOUCH_AFTER_S: Final = 60.0
"""A read renews the file's time if it is older than this: recency that survives a kill, at one inode write a minute."""
Identity = tuple[int, int]
"""Inode and time of last change: tells a file from one that replaced it, whose inode may be the same. In a slab, the
slot and the time of its row."""


def identity_of(found: os.stat_result) -> Identity:
    return (found.st_ino, found.st_mtime_ns)


class CorruptFileError(Exception):
    """What lies at a chunk's path is not that chunk. ``identity`` tells it from one that replaced it meanwhile."""

    def __init__(self, why: str, identity: Identity) -> None:
        super().__init__(why)
        self.identity = identity


class LeftoverError(OSError):
    """A write failed, and then the file that it had begun could not be removed: it lies under one of ``names``."""

    def __init__(self, error: OSError, leaf: str, name: str, names: tuple[str, ...]) -> None:
        super().__init__(error.errno, error.strerror)
        self.leaf = leaf
        self.name = name
        """The final name of what was to be written."""
        self.names = names


class Tally:
    """Counts of what happened, by name. Concurrency: any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, what: str, n: int = 1) -> int:
        """Returns the new count."""
        with self._lock:
            self._counts[what] += n
            return self._counts[what]

    def counts(self) -> Counter[str]:
        """A copy."""
        with self._lock:
            return self._counts.copy()


class ChunkFiles:
    """The files under ``root/<namespace digest>``.

    Args:
        namespace_fd: open directory; stays the caller's.
        digest: the namespace's digest, written into and checked against every header.
        direct: use O_DIRECT; a chunk whose memory is not aligned for it goes through the page cache by itself.
        durable: sync data and every directory on the way to it before a write counts as done (power loss).
        sums: how chunks are proven.

    Concurrency: any number of threads, on different keys.
    """

    def __init__(
        self, namespace_fd: int, digest: bytes, *, direct: bool, durable: bool, tally: Tally, sums: Sums = PLAIN
    ) -> None:
        self._namespace_fd = namespace_fd
        self._digest = digest
        self._sums = sums
        self._durable = durable
        self._tally = tally
        self._direct = bool(direct and _DIRECT)
        self._durable_leaves: set[str] = set()

    def write(self, chunk: Chunk, buffer: memoryview, owner: str, scratch: Scratch) -> None:
        """Put a whole chunk at its path, replacing what was there, or raise OSError and leave nothing behind.

        A write that ends short raises ENOSPC. Where not even what was begun can be removed, LeftoverError says what
        lies there.
        """
        payload = buffer[: chunk.nbytes]
        pack_header(scratch.header, chunk, self._digest, owner, self._sums.of(payload), sums=self._sums)
        parts = (scratch.header, *in_pages(payload, scratch.tail))
        name = file_name(chunk.key, owner)
        part = part_name(name, scratch.worker)
        leaf_fd = self._make_leaf(leaf_of(chunk.key))
        is_whole_part = False
        try:
            self._write_part(leaf_fd, part, parts)
            is_whole_part = True
            os.rename(part, name, src_dir_fd=leaf_fd, dst_dir_fd=leaf_fd)
            if self._durable:
                os.fsync(leaf_fd)
        except BaseException as error:
            # A rename may have been done, whatever was said: then it has its name, and nobody counts it there.
            names = (part, name) if is_whole_part else (part,)
            if not unlink_first(names, leaf_fd) and isinstance(error, OSError):
                raise LeftoverError(error, leaf_of(chunk.key), name, names) from error
            raise
        finally:
            os.close(leaf_fd)

    def read(self, key: ChunkKey, buffer: memoryview, owner: str, scratch: Scratch, *, touch: bool) -> Header:
        """Fill ``buffer`` with a verified chunk and zeros behind it.

        Raises:
            FileNotFoundError: no such file.
            NotRegularError: no file at its path that could be one of ours.
            CorruptFileError: it is not what was written under this key, or not whole.
            ChunkSizeError: the chunk is longer than the buffer.
            OSError: it could not be read now (EIO, EMFILE, ...); says nothing about the file.
        """
        leaf_fd = self.open_leaf(leaf_of(key))
        try:
            fd = self._open_chunk(file_name(key, owner), leaf_fd)
        finally:
            os.close(leaf_fd)
        try:
            return self._read_open(fd, key, buffer, scratch, touch=touch)
        finally:
            os.close(fd)

    def look(self, key: ChunkKey, owner: str) -> os.stat_result | None:
        """What lies at the key's path, unread, links not followed; None if nothing does."""
        try:
            leaf_fd = self.open_leaf(leaf_of(key))
        except (FileNotFoundError, NotRegularError):
            return None
        try:
            return os.stat(file_name(key, owner), dir_fd=leaf_fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        finally:
            os.close(leaf_fd)

    def remove(self, key: ChunkKey, owner: str, *, identity: Identity | None = None) -> bool:
        """Remove the key's file; False if it was gone already. With ``identity``, only that very file.

        A link or FIFO at the path is removed itself, never what it points to; a directory with anything in it stays
        and raises OSError.
        """
        name = file_name(key, owner)
        try:
            leaf_fd = self.open_leaf(leaf_of(key))
        except (FileNotFoundError, NotRegularError):
            return False
        try:
            if identity is not None:
                found = os.stat(name, dir_fd=leaf_fd, follow_symlinks=False)
                if identity_of(found) != identity:
                    return False
            unlink(name, leaf_fd)
        except FileNotFoundError:
            return False
        finally:
            os.close(leaf_fd)
        return True

    def open_leaf(self, leaf: str) -> int:
        """Descriptor of a leaf directory. Raises FileNotFoundError, NotRegularError, OSError."""
        return open_directory(leaf, self._namespace_fd)

    def _make_leaf(self, leaf: str) -> int:
        try:
            leaf_fd = self.open_leaf(leaf)
        except FileNotFoundError:
            leaf_fd = make_directory(leaf, self._namespace_fd)
        except NotRegularError as error:
            raise NotADirectoryError(errno.ENOTDIR, str(error)) from None
        if self._durable and leaf not in self._durable_leaves:
            # Also one that was there: whoever made it, another thread a moment ago, say, may not have synced its name.
            try:
                if not self._durable_leaves:
                    sync_upwards(self._namespace_fd)
                os.fsync(self._namespace_fd)
            except BaseException:
                os.close(leaf_fd)
                raise
            self._durable_leaves.add(leaf)
        return leaf_fd

    def _write_part(self, leaf_fd: int, part: str, parts: Sequence[memoryview]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE | (_DIRECT if self._direct else 0)
        try:
            fd = os.open(part, flags, 0o600, dir_fd=leaf_fd)
        except FileExistsError:
            # Left by a write of ours that could not clean up, or planted: either way not a chunk.
            os.unlink(part, dir_fd=leaf_fd)
            fd = os.open(part, flags, 0o600, dir_fd=leaf_fd)
        try:
            if os.fstat(fd).st_mode & 0o777 != 0o600:  # a umask took our own bits away
                os.fchmod(fd, 0o600)
            self._pwrite_all(fd, parts)
            if self._durable:
                os.fdatasync(fd)
        finally:
            os.close(fd)

    def _pwrite_all(self, fd: int, parts: Sequence[memoryview]) -> None:
        total = sum(map(len, parts))
        if self._direct:
            try:
                if os.pwritev(fd, parts, 0) == total:
                    return
            except OSError as error:
                self._count_refused(error)
            _leave_direct(fd)
        if os.pwritev(fd, parts, 0) != total:
            raise OSError(errno.ENOSPC, "the write ended short")

    def _open_chunk(self, name: str, leaf_fd: int) -> int:
        flags = os.O_RDONLY | _SAFE
        try:
            return os.open(name, flags | (_DIRECT if self._direct else 0), dir_fd=leaf_fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise NotRegularError(os.strerror(error.errno)) from None
            if error.errno != errno.EINVAL:
                raise
        # Opening a FIFO with O_DIRECT says EINVAL, and so do file systems that have no O_DIRECT.
        if not stat.S_ISREG(os.stat(name, dir_fd=leaf_fd, follow_symlinks=False).st_mode):
            raise NotRegularError("not a regular file")
        return os.open(name, flags, dir_fd=leaf_fd)

    def _read_open(self, fd: int, key: ChunkKey, buffer: memoryview, scratch: Scratch, *, touch: bool) -> Header:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise NotRegularError("not a regular file")
        if not is_whole(found.st_size):
            raise CorruptFileError(f"{found.st_size} bytes are no whole chunk", identity_of(found))
        payload_nbytes = found.st_size - HEADER_NBYTES
        # Whole pages go straight into the buffer; the last one through scratch if the buffer has no room for its zeros.
        straight_nbytes = min(payload_nbytes, len(buffer) & -PAGE_NBYTES)
        in_pieces = straight_nbytes == payload_nbytes > LONG_NBYTES
        parts = [scratch.header, buffer[: PIECE_NBYTES if in_pieces else straight_nbytes]]
        if straight_nbytes < payload_nbytes:
            parts.append(scratch.tail)
        fill = partial(self._pread_all, fd, found)
        fill(parts)
        try:
            header = header_of(scratch.header, key, self._digest, found.st_size, sums=self._sums)
        except BadHeaderError as error:
            raise CorruptFileError(str(error), identity_of(found)) from None
        nbytes = header.chunk.nbytes
        if nbytes > len(buffer):
            raise ChunkSizeError(f"a buffer of {len(buffer)} bytes for a chunk of {nbytes}")
        if nbytes > straight_nbytes:
            buffer[straight_nbytes:nbytes] = scratch.tail[: nbytes - straight_nbytes]
        its_sum = sum_of_pieces(self._sums, buffer, nbytes, fill) if in_pieces else self._sums.of(buffer[:nbytes])
        if not hmac.compare_digest(its_sum, header.checksum):
            raise CorruptFileError("payload checksum", identity_of(found))
        zero(buffer, nbytes)
        if touch and time.time() - found.st_mtime > TOUCH_AFTER_S:
            with contextlib.suppress(OSError):  # a file system that turned read-only still serves
                os.utime(fd)
        return header

    def _pread_all(self, fd: int, found: os.stat_result, parts: Sequence[memoryview], offset: int = 0) -> None:
        total = sum(map(len, parts))
        if self._direct:
            try:
                if os.preadv(fd, parts, offset) == total:
                    return
            except OSError as error:
                self._count_refused(error)
            _leave_direct(fd)
        if os.preadv(fd, parts, offset) != total:
            if os.fstat(fd).st_size == found.st_size:  # the file is as long as it was: not its fault
                raise OSError(errno.EIO, "the read ended short")
            raise CorruptFileError("the file ends short", identity_of(found))

    def _count_refused(self, error: OSError) -> None:
        """Direct I/O refuses memory that is not aligned for it. Raises what is any other error."""
        if error.errno != errno.EINVAL:
            raise error
        if self._tally.add("buffered") == 1:
            _log.warning("memory that is not aligned to %d bytes: its chunks go through the page cache", PAGE_NBYTES)


def _leave_direct(fd: int) -> None:
    """Let this one descriptor go through the page cache: it was refused, or ended short, which says nothing yet."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_DIRECT)


def direct_works(name: str, dir_fd: int) -> bool:
    """Try O_DIRECT by a write: rewrite the first page of an existing file of ours with itself.

    Some file systems let the open pass and refuse every write. An empty file is left alone and answers True: a chunk
    that finds out otherwise goes through the page cache by itself.
    """
    page = memoryview(mmap.mmap(-1, PAGE_NBYTES))
    try:
        fd = os.open(name, os.O_RDWR | _DIRECT | _SAFE, dir_fd=dir_fd)
    except OSError:
        return False
    try:
        if os.fstat(fd).st_size == 0:
            return True
        return os.preadv(fd, [page], 0) == PAGE_NBYTES and os.pwritev(fd, [page], 0) == PAGE_NBYTES
    except OSError:
        return False
    finally:
        os.close(fd)


def damage(found: os.stat_result) -> str | None:
    """The counter for what can be told to be no chunk file without reading it; None if it may be one."""
    if not stat.S_ISREG(found.st_mode):
        return "not_regular"
    return None if is_whole(found.st_size) else "corrupt"


def is_whole(file_nbytes: int) -> bool:
    """True if a chunk file can have this length."""
    return file_nbytes >= HEADER_NBYTES and file_nbytes % PAGE_NBYTES == 0


def as_far_as_there_is_room(grow: Callable[[int], int], n: int) -> int:
    """``grow(n)``, by less where the file system has no room for so much: a quota shows in no other way.

    Raises OSError.
    """
    while True:
        try:
            return grow(n)
        except OSError as error:
            if error.errno not in NO_SPACE or n <= 1:
                raise
            n = max(1, n // 4)
