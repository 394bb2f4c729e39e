"""The catalogue of a slab: which key lies in which slot. A small file beside the slab, of rows in buckets by key.

::

    root/<namespace digest>/<owner id>.<slot bytes, hex>.slab    the slots: header, payload, whatever was there before
    root/<namespace digest>/<owner id>.<slot bytes, hex>.slots   a head of one page, then pages of 32 rows

A row is what a file's name is in the file layout: while it stands, its slot holds that key's whole chunk. It is written
after the slot and cleared before the slot is used again, each in one small ``pwrite`` through the page cache, which
outlives the process. So a slot that a kill left half-written has no row, and a chunk that was deleted stays deleted.

Any process finds a key by reading the page of its bucket. A bucket that is full lends from the next ones; whoever looks
for a key goes on past full buckets only, so a row can hide behind one that has become free since: a miss for other
processes, and of no account to the owner, who knows all rows.

It is read and written, never mapped: a mapped file that somebody cuts short ends the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, cast

from tierkv.tiers._fs.format import MAX_KEY_NBYTES, PAGE_NBYTES, VERSION, padded_nbytes
from tierkv.types import ChunkKey

SLAB: Final = "slab"
SLOTS: Final = "slots"
PART: Final = ".part"
_NAME = re.compile(r"([0-9a-f]{16})\.([0-9a-f]{4,12})\.(slab|slots)(\.part)?")

# checksum of the rest, slot, when it was last used (tenths of a second since the base), length of the key, key
_ROW = struct.Struct(f"<IIIB{MAX_KEY_NBYTES}s")
_SUMMED = struct.Struct(f"<IIB{MAX_KEY_NBYTES}s")
ROW_NBYTES: Final[int] = _ROW.size
_AT_LENGTH: Final = 12
_AT_KEY: Final = 13
ROWS_A_BUCKET: Final = PAGE_NBYTES // ROW_NBYTES
_NO_ROW: Final = bytes(ROW_NBYTES)
_BOOT_NBYTES: Final = 36
_STAMP = struct.Struct(f"<QQQq{_BOOT_NBYTES}s")  # device, inode, length, when it changed last, run of the machine
STAMP_NBYTES: Final[int] = _STAMP.size
FRESH_ROW_S: Final = 0.2
"""More than the step in which a row tells time."""
_TICK_S: Final = 0.02
"""More than the step in which a file system tells time."""
_make_row = tuple.__new__  # half the cost of Row(...)
_MOST_BUCKETS: Final = 64
"""How far a row may lie from its bucket; a reader gives up after so many full ones."""

_MAGIC: Final = b"tierkv-slots\r\n\0\0"
# magic, version, slot bytes, number of buckets, base time in Unix seconds, namespace digest, checksum
_HEAD = struct.Struct("<16sH6xQQQ16s")
_EARLIER_S: Final = 100_000_000
"""The base lies three years before the catalogue was made: what it takes over may be older than itself."""
_NO_FILE: Final = frozenset({errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO})
_PIECE: Final = 256
"""Buckets that are read, or written anew, at once."""


class BadCatalogueError(Exception):
    """Not a catalogue of ours, or not whole."""


def is_no_use(error: BadCatalogueError | OSError) -> bool:
    """False if the file may be whole and cannot be read now (EMFILE, EIO)."""
    return isinstance(error, BadCatalogueError) or error.errno in _NO_FILE


class SlabName(NamedTuple):
    """A file of a slab, by its name."""

    owner: str
    slot_nbytes: int
    kind: str
    is_part: bool


class Row(NamedTuple):
    """One chunk of a slab."""

    line: int
    """Number of the row: where in the catalogue it stands, as ``slot`` says where in the slab the chunk lies."""
    slot: int
    used_s: float
    """When it was written, or lately read; Unix seconds, to a tenth."""
    key: ChunkKey

    @property
    def is_fresh(self) -> bool:
        """Whether the same key, written into the same slot now, could get the same row."""
        return is_fresh(self.used_s)


def is_fresh(used_s: float) -> bool:
    """Whether a row that is written now could tell the same time."""
    return abs(time.time() - used_s) < FRESH_ROW_S


def slab_name(owner: str, slot_nbytes: int, kind: str) -> str:
    return f"{owner}.{slot_nbytes:04x}.{kind}"


def parse_slab_name(name: str) -> SlabName | None:
    """The parts of the name of a slab's file, or None if it is none of ours."""
    match = _NAME.fullmatch(name)
    if match is None or f"{int(match[2], 16):04x}" != match[2] or int(match[2], 16) % PAGE_NBYTES:
        return None
    parsed = SlabName(match[1], int(match[2], 16), match[3], match[4] is not None)
    return parsed if parsed.slot_nbytes or parsed.is_part else None


def allocated_nbytes(found: os.stat_result) -> int:
    """What a slab's file occupies, holes left out."""
    return padded_nbytes(min(found.st_size, found.st_blocks * 512))


def n_buckets_for(n_slots: int) -> int:
    """Buckets for so many slots: half as many rows again, so that few buckets are full."""
    return max(1, -(-n_slots * 3 // (2 * ROWS_A_BUCKET)))


def catalogue_nbytes(n_slots: int) -> int:
    """What the catalogue of a slab of so many slots occupies."""
    return PAGE_NBYTES * (1 + n_buckets_for(n_slots))


class Catalogue:
    """An open catalogue. The descriptor is the caller's.

    Concurrency: ``find`` from any thread and process; the rest under the slab's lock.
    """

    def __init__(self, fd: int, slot_nbytes: int, digest: bytes) -> None:
        """Raises BadCatalogueError, OSError."""
        page = os.pread(fd, PAGE_NBYTES, 0)
        if len(page) < PAGE_NBYTES or page[_HEAD.size : _HEAD.size + 4] != _sum(page[: _HEAD.size]):
            raise BadCatalogueError("no whole head")
        magic, version, its_slot_nbytes, n_buckets, base_s, its_digest = _HEAD.unpack_from(page)
        if (magic, version, its_slot_nbytes, its_digest) != (_MAGIC, VERSION, slot_nbytes, digest):
            raise BadCatalogueError("another format, slot or namespace")
        if n_buckets < 1 or os.fstat(fd).st_size != PAGE_NBYTES * (1 + n_buckets):
            raise BadCatalogueError("length")
        disk = os.fstatvfs(fd)
        if 0 < 2 * disk.f_blocks * disk.f_frsize < (n_buckets - 1) * ROWS_A_BUCKET * 2 // 3 * slot_nbytes:
            raise BadCatalogueError("more slots than the file system could have")
        self.n_buckets: int = n_buckets
        self.nbytes = PAGE_NBYTES * (1 + n_buckets)
        self._fd = fd
        self._base_s: int = base_s
        self._taken = bytearray(n_buckets * ROWS_A_BUCKET)

    @property
    def n_slots(self) -> int:
        """Most slots that it is meant for."""
        return max(1, self.n_buckets * ROWS_A_BUCKET * 2 // 3)

    def stamp(self) -> bytes:
        """Says which file this is and when it changed last, since when the machine runs: equal stamps, equal rows."""
        found = os.fstat(self._fd)
        return _STAMP.pack(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, _boot())

    def stamp_at_rest(self) -> bytes | None:
        """None if it changed a moment ago: a change still to come might have the same time."""
        is_at_rest = time.time() - os.fstat(self._fd).st_mtime > _TICK_S
        return self.stamp() if is_at_rest else None

    def claim(self, rows: Sequence[int]) -> bool:
        """Mark all rows that there are as taken; False, and nothing is marked, if these cannot be that."""
        taken = self._taken
        if any(taken) or max(rows, default=0) >= len(taken):
            return False
        for row in rows:
            taken[row] = 1
        if taken.count(1) == len(rows):
            return True
        taken[:] = bytes(len(taken))
        return False

    def find(self, key: ChunkKey) -> Row | None:
        """The key's row; None if it has none, or none that can be found from here."""
        bucket = self._bucket(key)
        for _ in range(min(self.n_buckets, _MOST_BUCKETS)):
            page = os.pread(self._fd, PAGE_NBYTES, PAGE_NBYTES * (1 + bucket))
            at = page.find(key)
            while at >= 0:
                row = self._unpack(page, at - _AT_KEY, bucket * ROWS_A_BUCKET) if at % ROW_NBYTES == _AT_KEY else None
                if row is not None and row.key == key:
                    return row
                at = page.find(key, at + 1)
            if len(page) < PAGE_NBYTES or 0 in page[_AT_LENGTH::ROW_NBYTES]:
                return None
            bucket = (bucket + 1) % self.n_buckets
        return None

    def row(self, line: int) -> Row | None:
        """What stands there now; None if nothing."""
        data = os.pread(self._fd, ROW_NBYTES, PAGE_NBYTES + line * ROW_NBYTES)
        return self._unpack(data, 0, line) if len(data) == ROW_NBYTES else None

    def put(self, key: ChunkKey, slot: int, used_s: float | None = None) -> int:
        """Write a row, as of now or of ``used_s``, and return its line. From now on the slot's chunk can be found.

        Raises OSError: there is no row.
        """
        line = self._line_for(key)
        try:
            self.put_at(line, key, slot, used_s)
        except OSError:
            if not self._stands(line, key, slot):
                raise
            # Done, and denied: it would bring the key back, in a slot that is another's by then.
        self._taken[line] = 1
        return line

    def put_all(self, rows: Iterable[tuple[ChunkKey, int, float]]) -> None:
        """Write all rows (key, slot, Unix seconds) of a catalogue that has none yet. Raises OSError.

        Whole pieces at once, and only those with a row: a catalogue is as large as its slab may become.
        """
        pieces: defaultdict[int, bytearray] = defaultdict(lambda: bytearray(_PIECE * PAGE_NBYTES))
        for key, slot, used_s in rows:
            line = self._line_for(key)
            at, within = divmod(line, _PIECE * ROWS_A_BUCKET)
            pieces[at][within * ROW_NBYTES : (within + 1) * ROW_NBYTES] = self._row(key, slot, used_s)
            self._taken[line] = 1
        for at, piece in sorted(pieces.items()):
            data = piece[: min(len(piece), self.nbytes - PAGE_NBYTES - at * len(piece))]
            if os.pwrite(self._fd, data, PAGE_NBYTES + at * len(piece)) != len(data):
                raise OSError(errno.ENOSPC, "the write ended short")

    def put_at(self, line: int, key: ChunkKey, slot: int, used_s: float | None = None) -> None:
        """Write a row that is known to be the key's, or nobody's. Raises OSError."""
        self._pwrite(self._row(key, slot, time.time() if used_s is None else used_s), line)

    def clear(self, line: int) -> None:
        """Nobody's row any more. Raises OSError, and then it stands."""
        self._pwrite(_NO_ROW, line)
        self._taken[line] = 0

    def rows(self, *, tidy: bool = True) -> Iterator[list[Row]]:
        """All rows, in pieces; with ``tidy`` what is no whole row is cleared. Marks them as taken."""
        for bucket in range(0, self.n_buckets, _PIECE):
            n = min(_PIECE, self.n_buckets - bucket)
            data = os.pread(self._fd, n * PAGE_NBYTES, PAGE_NBYTES * (1 + bucket))
            if len(data) < n * PAGE_NBYTES:
                raise BadCatalogueError("length")
            first = bucket * ROWS_A_BUCKET
            piece = self._unpack_all(data, first)
            for row in piece:
                self._taken[row[0]] = 1
            if tidy and len(piece) < n * ROWS_A_BUCKET:
                end = first
                for line in (*[row[0] for row in piece], first + n * ROWS_A_BUCKET):
                    if line > end:
                        self._tidy(data, end - first, line - first, first)
                    end = line + 1
            yield piece

    def _unpack_all(self, data: bytes, first: int) -> list[Row]:
        """The whole rows of some buckets. A million of them are read at an open, so in one expression."""
        base_s, crc = self._base_s, zlib.crc32
        return [
            _make_row(Row, (line, slot, base_s + tenths * 0.1, key[:length]))
            for line, (total, slot, tenths, length, key) in enumerate(_ROW.iter_unpack(data), first)
            if 0 < length <= MAX_KEY_NBYTES
            and total == crc(data[(at := (line - first) * ROW_NBYTES) + 4 : at + ROW_NBYTES])
        ]

    def _stands(self, line: int, key: ChunkKey, slot: int) -> bool:
        with contextlib.suppress(OSError):
            row = self.row(line)
            return row is not None and (row.slot, row.key) == (slot, key)
        return False

    def _tidy(self, data: bytes, begin: int, end: int, first: int) -> None:
        """Clear what is neither whole nor empty among some of the rows that begin with the ``first``."""
        if data[begin * ROW_NBYTES : end * ROW_NBYTES] == bytes((end - begin) * ROW_NBYTES):
            return
        for i in range(begin, end):
            if data[i * ROW_NBYTES : (i + 1) * ROW_NBYTES] != _NO_ROW:
                self.clear(first + i)

    def _line_for(self, key: ChunkKey) -> int:
        """A row that nobody has, as near behind the key's bucket as there is one. Raises OSError."""
        line = self._taken.find(0, self._bucket(key) * ROWS_A_BUCKET)
        if line < 0:
            line = self._taken.find(0)
        if line < 0:  # somebody made the slab longer than we would
            raise OSError(errno.ENOSPC, "more rows than the catalogue has lines for")
        return line

    def _row(self, key: ChunkKey, slot: int, used_s: float) -> bytes:
        tenths = min(max(0, int((used_s - self._base_s) * 10)), 0xFFFFFFFF)
        data = _SUMMED.pack(slot, tenths, len(key), key)
        return _sum(data) + data

    def _bucket(self, key: ChunkKey) -> int:
        return zlib.crc32(key) % self.n_buckets

    def _unpack(self, data: bytes, at: int, first: int) -> Row | None:
        total, slot, tenths, length, key = _ROW.unpack_from(data, at)
        if not 0 < length <= MAX_KEY_NBYTES or total != zlib.crc32(data[at + 4 : at + ROW_NBYTES]):
            return None
        return Row(first + at // ROW_NBYTES, slot, self._base_s + tenths * 0.1, cast("ChunkKey", key[:length]))

    def _pwrite(self, row: bytes, line: int) -> None:
        # Within one page and already allocated, so neither a kill nor a full disk leaves a part of it.
        if os.pwrite(self._fd, row, PAGE_NBYTES + line * ROW_NBYTES) != len(row):
            raise OSError(errno.EIO, "the write ended short")


def _boot() -> bytes:
    """What only this run of the machine has: a loss of power takes rows along, and leaves times as they were."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read(_BOOT_NBYTES)
    except OSError:
        return os.urandom(_BOOT_NBYTES)


def rows_of(slab: SlabName, dir_fd: int, digest: bytes) -> Iterator[Row]:
    """What a slab's catalogue says, read from outside; nothing if it cannot be read."""
    with contextlib.suppress(OSError, BadCatalogueError), opened(slab, dir_fd, digest) as catalogue:
        for rows in catalogue.rows(tidy=False):
            yield from rows


def is_still_there(slab: SlabName, dir_fd: int, digest: bytes, row: tuple[int, float, ChunkKey]) -> bool:
    """Whether (slot, used_s, key) is in a row still, read from outside: its slot may have been used again since."""
    with contextlib.suppress(OSError, BadCatalogueError), opened(slab, dir_fd, digest) as catalogue:
        now = catalogue.find(row[2])
        return now is not None and (now.slot, now.used_s, now.key) == row
    return False


@contextlib.contextmanager
def opened(slab: SlabName, dir_fd: int, digest: bytes) -> Iterator[Catalogue]:
    """A slab's catalogue, to be read from outside. Raises BadCatalogueError, OSError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(slab_name(slab.owner, slab.slot_nbytes, SLOTS), flags, dir_fd=dir_fd)
    try:
        yield Catalogue(fd, slab.slot_nbytes, digest)
    finally:
        os.close(fd)


def head_of(slot_nbytes: int, n_buckets: int, digest: bytes) -> bytes:
    """The first page of a new catalogue, whose rows are zeros."""
    head = _HEAD.pack(_MAGIC, VERSION, slot_nbytes, n_buckets, max(0, int(time.time()) - _EARLIER_S), digest)
    return (head + _sum(head)).ljust(PAGE_NBYTES, b"\0")


def _sum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")
