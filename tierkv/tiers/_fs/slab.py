"""One slab: a preallocated file of equal slots, which of them are taken, and the bytes in them.

Decides nothing about room or keys: see slabs.py. What makes a chunk visible is its row in the catalogue.
"""

from __future__ import annotations

import array
import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from tierkv.tiers._fs.catalogue import Catalogue, Row
from tierkv.tiers._fs.descriptor import Descriptor, open_regular
from tierkv.tiers._fs.dirs import sync_upwards
from tierkv.tiers._fs.file_io import TOUCH_AFTER_S, Identity, Tally
from tierkv.tiers._fs.holes import allocate, punch
from tierkv.types import ChunkKey

_log = logging.getLogger(__name__)

_HOLE, _IDLE, _TAKEN, _UNKNOWN = range(4)
"""No blocks; blocks and no chunk; a chunk, or a write under way; not loaded yet."""
_NO_ROW: Final = 0xFFFFFFFF


class Slab:
    """The slots of one file.

    Args:
        name: of the file, in ``dir_fd``.
        catalogue_file: the catalogue's, which ``catalogue`` reads and writes.

    Concurrency: any thread. One thread loads it, and until then no slot can be taken.
    """

    def __init__(
        self, owner: str, slot_nbytes: int, name: str, dir_fd: int, *, catalogue_file: Descriptor,
        catalogue: Catalogue, direct: bool, tally: Tally,
    ) -> None:  # fmt: skip
        """Raises OSError."""
        self.owner = owner
        self.slot_nbytes = slot_nbytes
        self.catalogue = catalogue
        self._catalogue_file = catalogue_file
        self._name = name
        self._buffered = open_regular(name, dir_fd)
        self._direct = open_regular(name, dir_fd, direct=True) if direct else self._buffered
        self._tally = tally
        self._lock = threading.Lock()
        self._dir_fd = dir_fd
        self._names_are_safe = False
        self._cursor = 0
        self._states = bytearray()
        self._lines = array.array("I")
        self._used = array.array("Q")
        """When each slot's chunk was last used by its row, in whole seconds."""
        self.is_loaded = False
        self.catalogue_charge_nbytes = 0
        """What is charged for its catalogue beyond what was set aside for one."""
        self.n_found_idle = 0
        """Slots that were idle when it was loaded, less those that were released before."""
        self._measure()

    @property
    def n_slots(self) -> int:
        return len(self._states)

    @property
    def n_idle(self) -> int:
        """Slots that have blocks and no chunk."""
        return self._states.count(_IDLE)

    @property
    def n_taken(self) -> int:
        """Slots that have a chunk, or are being written."""
        return self._states.count(_TAKEN)

    @property
    def is_linked(self) -> bool:
        """False if somebody removed its files, or replaced its catalogue."""
        return all(os.fstat(file.fd).st_nlink for file in (self._buffered, self._catalogue_file))

    # -- what is there ----------------------------------------------------------------------------------------------

    def load(self) -> Iterator[list[Row]]:
        """All rows whose slots can hold what they say, in pieces. Afterwards slots can be taken.

        Slots without a row are idle; if the file has holes anywhere, they become holes, as nobody knows which are.
        """
        if not self.is_loaded:
            with self._lock:
                self._measure()
        pieces = self.catalogue.rows()
        while True:
            # A deletion between a row's reading and its entering would leave a slot that nobody frees.
            with self._lock:
                piece = next(pieces, None)
                if piece is None:
                    break
                rows = self._enter(piece)
            yield rows
        with self._lock:
            self._settle_the_rest()

    def trust(self, slots: Sequence[int], rows: Sequence[int], stamp: bytes) -> bool:
        """``load`` for a catalogue that has not changed since its stamp was taken, when these slots had these rows.

        False: it is as it was before, and its rows are to be read.
        """
        with self._lock:
            if self.is_loaded or self.catalogue.stamp() != stamp:
                return False
            self._measure()
            if max(slots, default=0) >= max(1, self.n_slots) or not self.catalogue.claim(rows):
                return False
            for slot, row in zip(slots, rows, strict=True):
                self._states[slot] = _TAKEN
                self._lines[slot] = row
            self._settle_the_rest()
            return True

    def row_in(self, slot: int) -> int | None:
        """The line of a taken slot's row; None if there is no such slot, or it has none."""
        return None if slot >= self.n_slots or self._lines[slot] == _NO_ROW else self._lines[slot]

    def _settle_the_rest(self) -> None:
        """All rows are known. Caller holds the lock."""
        found = os.fstat(self._buffered.fd)
        if found.st_size != self.n_slots * self.slot_nbytes:
            os.ftruncate(self._buffered.fd, self.n_slots * self.slot_nbytes)
        whole = found.st_blocks * 512 >= self.n_slots * self.slot_nbytes
        for slot, n in self._runs(_UNKNOWN):
            if not whole:
                punch(self._buffered.fd, slot * self.slot_nbytes, n * self.slot_nbytes)
            self._mark(slot, n, _IDLE if whole else _HOLE)
            self.n_found_idle += n if whole else 0
        self.is_loaded = True

    def _measure(self) -> None:
        """As many slots as the file has now; it may have been another process's since it was opened.

        Never more than its catalogue has rows for: somebody may have made the file as long as he likes.
        """
        n_slots = min(os.fstat(self._buffered.fd).st_size // self.slot_nbytes, self.catalogue.n_slots)
        del self._states[n_slots:], self._lines[n_slots:], self._used[n_slots:]
        self._states += bytes([_UNKNOWN]) * (n_slots - self.n_slots)
        self._lines.extend([_NO_ROW] * (n_slots - len(self._lines)))
        self._used.extend([0] * (n_slots - len(self._used)))

    def _enter(self, piece: list[Row]) -> list[Row]:
        """Caller holds the lock. Two rows for a slot, or a slot that is not there: the row goes."""
        states, lines, used, n_slots = self._states, self._lines, self._used, self.n_slots
        wrong: set[int] = set()
        for line, slot, used_s, _ in piece:
            if slot < n_slots and states[slot] == _UNKNOWN:
                states[slot], lines[slot], used[slot] = _TAKEN, line, int(used_s)
            elif slot >= n_slots or lines[slot] != line:
                self.catalogue.clear(line)
                wrong.add(line)
        return [row for row in piece if row.line not in wrong] if wrong else piece

    # -- slots ------------------------------------------------------------------------------------------------------

    def take(self, n: int) -> range:
        """Up to ``n`` idle slots that lie side by side, the next ones after those taken last; they are the caller's."""
        with self._lock:
            if not self.is_loaded:
                return range(0)
            first = self._states.find(_IDLE, self._cursor)
            if first < 0:
                first = self._states.find(_IDLE)
            if first < 0:
                return range(0)
            end = first + 1
            while end < min(first + n, self.n_slots) and self._states[end] == _IDLE:
                end += 1
            self._mark(first, end - first, _TAKEN)
            self._cursor = end
            return range(first, end)

    def commit(self, slots: range, keys: Sequence[ChunkKey]) -> list[OSError | None]:
        """Each slot holds its key's whole chunk; or why nobody can find it."""
        errors: list[OSError | None] = [None] * len(keys)
        with self._lock:
            now_s = time.time()
            for i, (slot, key) in enumerate(zip(slots, keys, strict=True)):
                try:
                    self._lines[slot] = self.catalogue.put(key, slot, now_s)
                    self._used[slot] = int(now_s)
                except OSError as error:
                    errors[i] = error
        return errors

    def are_cold(self, first: int, n: int, now_s: float) -> bool:
        """Whether one of these slots would be renewed if it were read now."""
        # Without the lock: a slot that changes hands meanwhile is found out by ``renew``.
        return now_s - min(self._used[first : first + n], default=0) > TOUCH_AFTER_S

    def renew(self, slot: int, key: ChunkKey, now_s: float) -> None:
        """It was read: if it was as cold as ``TOUCH_AFTER_S`` by its row, it is no longer. Raises OSError."""
        if not self.are_cold(slot, 1, now_s):
            return
        with self._lock:
            line = self._lines[slot] if slot < self.n_slots else _NO_ROW
            row = None if line == _NO_ROW else self.catalogue.row(line)
            if row is not None and row.key == key:
                self.catalogue.put_at(line, key, slot)
                self._used[slot] = int(now_s)

    def row_of(self, slot: int, key: ChunkKey) -> Row | None:
        """The slot's row if it is the key's."""
        with self._lock:
            line = self._lines[slot] if slot < self.n_slots else _NO_ROW
        # A row of a slab that is not loaded has no known line.
        row = self.catalogue.find(key) if line == _NO_ROW else self.catalogue.row(line)
        return row if row is not None and (row.slot, row.key) == (slot, key) else None

    def erase(self, slot: int, key: ChunkKey, line: int | None = None) -> bool:
        """Clear the slot's row if it is the key's; the slot stays taken. False if it is another's or nobody's.

        ``line`` is that of its row, for a slab that is not loaded. Raises OSError: the row stands.
        """
        with self._lock:
            if slot >= self.n_slots:
                return False
            if self._lines[slot] == _NO_ROW and line is not None:
                self._lines[slot] = line
            if not self._holds(slot, key):
                return False
            self.catalogue.clear(self._lines[slot])
            self._lines[slot] = _NO_ROW
            self._states[slot] = _TAKEN  # also in a slab that is being loaded: whoever erased it will release it
            return True

    def reclaim(self, slot: int) -> bool:
        """True once, if the slot's row was cleared by somebody else: the slot is the caller's to release."""
        with self._lock:
            line = self._lines[slot] if slot < self.n_slots else _NO_ROW
            try:
                if line == _NO_ROW or self.catalogue.row(line) is not None:
                    return False
                self.catalogue.clear(line)  # a bit may have been wrong only as it was read
            except OSError:
                return False  # not now
            self._lines[slot] = _NO_ROW
            return True

    def release(self, slot: int) -> None:
        """Nobody uses the slot any more; its row is gone."""
        with self._lock:
            self._states[slot] = _IDLE

    def discard(self, slot: int) -> None:
        """As ``release``, and its blocks are given back. Raises OSError; then it stays taken."""
        with self._lock:
            self._drop_blocks(slot, 1)

    # -- blocks -----------------------------------------------------------------------------------------------------

    def grow(self, n: int) -> int:
        """Give up to ``n`` slots blocks, holes first. Returns how many are idle now that were not.

        Raises OSError: the file system has none to give.
        """
        with self._lock:
            hole = next(self._runs(_HOLE), None)
            first, length = (self.n_slots, self.catalogue.n_slots - self.n_slots) if hole is None else hole
            n = min(n, length)
            if n <= 0:
                return 0
            try:
                allocate(self._buffered.fd, first * self.slot_nbytes, n * self.slot_nbytes)
            except OSError:
                with contextlib.suppress(OSError):  # what it got before it said no
                    punch(self._buffered.fd, first * self.slot_nbytes, n * self.slot_nbytes)
                    os.ftruncate(self._buffered.fd, self.n_slots * self.slot_nbytes)
                raise
            if hole is None:
                self._states += bytes([_IDLE]) * n
                self._lines.extend([_NO_ROW] * n)
                self._used.extend([0] * n)
            else:
                self._mark(first, n, _IDLE)
            return n

    def give_back(self, n: int) -> int:
        """Take the blocks of up to ``n`` idle slots away, from the file's end on. Returns how many. Raises OSError."""
        given = 0
        with self._lock:
            while given < n:
                last = self._states.rfind(_IDLE)
                if last < 0:
                    break
                first = last
                while first and last - first + 1 < n - given and self._states[first - 1] == _IDLE:
                    first -= 1
                self._drop_blocks(first, last - first + 1)
                given += last - first + 1
        return given

    def _drop_blocks(self, first: int, n: int) -> None:
        punch(self._buffered.fd, first * self.slot_nbytes, n * self.slot_nbytes)
        self._mark(first, n, _HOLE)
        n_left = len(self._states.rstrip(bytes([_HOLE])))
        if n_left < self.n_slots:
            os.ftruncate(self._buffered.fd, n_left * self.slot_nbytes)
            del self._states[n_left:], self._lines[n_left:], self._used[n_left:]

    # -- bytes ------------------------------------------------------------------------------------------------------

    def read(self, slot: int, parts: Sequence[memoryview], skip_nbytes: int = 0) -> bool:
        """Fill ``parts`` from ``skip_nbytes`` behind the slot's begin. False: the file ends before. Raises OSError."""
        total = sum(map(len, parts))
        offset = slot * self.slot_nbytes + skip_nbytes
        if self._direct is not self._buffered:
            try:
                return os.preadv(self._direct.fd, parts, offset) == total
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            self._count_buffered(offset)
        return os.preadv(self._buffered.fd, parts, offset) == total

    def covers(self, slot: int) -> bool:
        """Whether the file is as long as to hold this slot."""
        return os.fstat(self._buffered.fd).st_size >= (slot + 1) * self.slot_nbytes

    def write(self, slot: int, parts: Sequence[memoryview], skip_nbytes: int = 0) -> None:
        """Write ``parts`` into a taken slot without a row, ``skip_nbytes`` behind its begin. Raises OSError."""
        offset = slot * self.slot_nbytes + skip_nbytes
        if not self._write_direct(offset, parts):
            n = os.pwritev(self._buffered.fd, parts, offset)
            if n != sum(map(len, parts)):
                raise OSError(errno.ENOSPC, "the write ended short")

    def sync(self) -> None:
        """What was written before is on the disk, and so is the way to it. Raises OSError."""
        os.fdatasync(self._buffered.fd)
        if not self._names_are_safe:
            # Whoever made the slab, and the directories above it, need not have synced their names.
            os.fsync(self._dir_fd)
            sync_upwards(self._dir_fd)
            self._names_are_safe = True

    def sync_rows(self) -> None:
        """The rows written before are on the disk. Raises OSError."""
        os.fdatasync(self._catalogue_file.fd)

    def _write_direct(self, offset: int, parts: Sequence[memoryview]) -> bool:
        if self._direct is self._buffered:
            return False
        try:
            n = os.pwritev(self._direct.fd, parts, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._count_buffered(offset)
            return False
        return n == sum(map(len, parts))

    def _count_buffered(self, offset: int) -> None:
        # Of a long chunk's pieces the one with its header counts.
        if offset % self.slot_nbytes == 0 and self._tally.add("buffered") == 1:
            _log.warning("memory that is not aligned to 4096 bytes: its chunks go through the page cache")

    def _holds(self, slot: int, key: ChunkKey) -> bool:
        line = self._lines[slot]
        row = None if line == _NO_ROW else self.catalogue.row(line)
        return row is not None and row.key == key

    def _mark(self, first: int, n: int, state: int) -> None:
        self._states[first : first + n] = bytes([state]) * n

    def _runs(self, state: int) -> Iterator[tuple[int, int]]:
        """(first, number) of slots of a state that lie side by side."""
        first = self._states.find(state)
        while first >= 0:
            end = first
            while end < self.n_slots and self._states[end] == state:
                end += 1
            yield first, end - first
            first = self._states.find(state, end)


class Berth(NamedTuple):
    """Where a chunk lies: a slab, and the row that says so."""

    slab: Slab
    row: Row

    @property
    def identity(self) -> Identity:
        """Tells it from what may lie in the same slot later; a row that is fresh does so only for other keys."""
        return (self.row.slot, int(self.row.used_s * 10))
