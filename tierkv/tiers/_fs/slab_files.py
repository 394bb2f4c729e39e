"""The two files of a slab: make them, open them, mend them, remove them."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tierkv.tiers._fs.catalogue import (
    PART,
    SLAB,
    SLOTS,
    BadCatalogueError,
    Catalogue,
    allocated_nbytes,
    catalogue_nbytes,
    head_of,
    n_buckets_for,
    parse_slab_name,
    slab_name,
)
from tierkv.tiers._fs.descriptor import SAFE, open_regular
from tierkv.tiers._fs.dirs import names_in, sync_upwards, unlink_first, unlink_quietly
from tierkv.tiers._fs.file_io import Tally
from tierkv.tiers._fs.format import HEADER_NBYTES, PLAIN, BadHeaderError, Header, Sums, unpack_header
from tierkv.tiers._fs.holes import UNSUPPORTED, allocate, punch
from tierkv.tiers._fs.slab import Slab
from tierkv.types import ChunkKey

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlabFiles:
    """The slabs of one namespace as files.

    Concurrency: one thread at a time for each owner.
    """

    dir_fd: int
    digest: bytes
    direct: bool
    durable: bool
    tally: Tally
    sums: Sums = PLAIN

    def listed(self) -> set[tuple[str, int]]:
        """(owner, slot bytes) of every slab here, whole or not."""
        names = map(parse_slab_name, names_in(self.dir_fd))
        return {(name.owner, name.slot_nbytes) for name in names if name is not None}

    def open(self, owner: str, slot_nbytes: int) -> Slab:
        """Raises BadCatalogueError, OSError: it cannot be used as it is."""
        file = open_regular(slab_name(owner, slot_nbytes, SLOTS), self.dir_fd)
        catalogue = Catalogue(file.fd, slot_nbytes, self.digest)
        return Slab(
            owner, slot_nbytes, slab_name(owner, slot_nbytes, SLAB), self.dir_fd, catalogue_file=file,
            catalogue=catalogue, direct=self.direct, tally=self.tally,
        )  # fmt: skip

    def make(self, owner: str, slot_nbytes: int, n_slots: int) -> Slab:
        """A new slab without slots, for at most so many. Raises OSError, and then nothing is left behind."""
        name = slab_name(owner, slot_nbytes, SLAB)
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFE, 0o600, dir_fd=self.dir_fd)
        try:
            _make_private(fd)
            self._write_catalogue(owner, slot_nbytes, n_slots, ())
            return self.open(owner, slot_nbytes)
        except BadCatalogueError as error:
            self.remove(owner, slot_nbytes)
            raise OSError(errno.EIO, str(error)) from None
        except BaseException:
            self.remove(owner, slot_nbytes)
            raise
        finally:
            os.close(fd)

    def mend(self, owner: str, slot_nbytes: int, n_slots: int, stopped: Callable[[], bool]) -> Slab:
        """Write the catalogue of a slab anew, by what its slots say of themselves: all of it or none.

        Raises OSError: the slab itself is no use either; ECANCELED once ``stopped``, as a large one takes minutes.
        """
        slab = open_regular(slab_name(owner, slot_nbytes, SLAB), self.dir_fd)
        found = os.fstat(slab.fd)
        # Somebody may have made it as long as he likes; so many slots can have something in them.
        n_slots = max(1, n_slots, found.st_blocks * 512 // slot_nbytes)
        rows: list[tuple[ChunkKey, int, float]] = []
        for slot in _with_data(slab.fd, slot_nbytes, n_slots):
            if stopped():
                raise OSError(errno.ECANCELED, "the tier closes")
            header = header_at(slab.fd, slot * slot_nbytes, self.sums)
            if header is not None and header.namespace_digest == self.digest:
                rows.append((header.chunk.key, slot, found.st_mtime))  # no slot tells its time: none is younger
        self._write_catalogue(owner, slot_nbytes, n_slots, rows)
        _log.warning("slab of owner %s: its catalogue was lost and written anew with %d chunks", owner, len(rows))
        return self.open(owner, slot_nbytes)

    def resize(self, slab: Slab, n_slots: int) -> Slab:
        """The same slab with a catalogue for ``n_slots``; ``slab`` is of no use any more. Raises OSError."""
        # One a slot, and only for slots that are there: a slab that was cut short has far more rows than that.
        rows = {row.slot: row for piece in slab.catalogue.rows() for row in piece if row.slot < slab.n_slots}
        told = ((row.key, row.slot, row.used_s) for row in rows.values())
        self._write_catalogue(slab.owner, slab.slot_nbytes, max(n_slots, slab.n_slots), told)
        return self.open(slab.owner, slab.slot_nbytes)

    def rename(self, owner: str, to: str, slot_nbytes: int) -> None:
        """Another owner's from now on. Raises OSError."""
        for kind in (SLAB, SLOTS):
            old, new = slab_name(owner, slot_nbytes, kind), slab_name(to, slot_nbytes, kind)
            with contextlib.suppress(FileNotFoundError):
                os.rename(old, new, src_dir_fd=self.dir_fd, dst_dir_fd=self.dir_fd)

    def remove(self, owner: str, slot_nbytes: int) -> int | None:
        """What is left of it in bytes: all from the first file on that could not be removed. None if nothing is.

        The slots go first: of them alone ``mend`` would bring back what was evicted, if a kill came in between.
        """
        names = [slab_name(owner, slot_nbytes, kind) for kind in (SLAB, SLOTS, SLOTS + PART)]
        while names and unlink_first(names[:1], self.dir_fd):
            del names[0]
        return sum(map(self._nbytes_of, names)) if names else None

    def _nbytes_of(self, name: str) -> int:
        with contextlib.suppress(OSError):
            return allocated_nbytes(os.stat(name, dir_fd=self.dir_fd, follow_symlinks=False))
        return 0

    def tidy(self, owner: str, slot_nbytes: int) -> None:
        """Remove what a process that was killed had not finished."""
        for kind in (SLAB, SLOTS):
            unlink_quietly(slab_name(owner, slot_nbytes, kind) + PART, self.dir_fd)

    def refused(self, owner: str) -> OSError | None:
        """Why this file system cannot hold slabs; None if it can, or if nothing could be tried.

        Where there are slabs it is not tried again: on a full root the trial's pages would be over the capacity.
        """
        if self.listed():
            return None
        name = f"{owner}.0000.{SLAB}{PART}"
        with contextlib.suppress(OSError):
            fd = os.open(name, os.O_RDWR | os.O_CREAT | SAFE, 0o600, dir_fd=self.dir_fd)
            try:
                allocate(fd, 0, 8192)
                punch(fd, 0, 4096)
            except OSError as error:
                return error if error.errno in UNSUPPORTED else None
            finally:
                os.close(fd)
                unlink_quietly(name, self.dir_fd)
        return None

    def _write_catalogue(
        self, owner: str, slot_nbytes: int, n_slots: int, rows: Iterable[tuple[ChunkKey, int, float]]
    ) -> None:
        """A whole catalogue in place of the one that is there, or none."""
        name = slab_name(owner, slot_nbytes, SLOTS)
        unlink_quietly(name + PART, self.dir_fd)
        fd = os.open(name + PART, os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFE, 0o600, dir_fd=self.dir_fd)
        try:
            _make_private(fd)
            allocate(fd, 0, catalogue_nbytes(n_slots))
            os.pwrite(fd, head_of(slot_nbytes, n_buckets_for(n_slots), self.digest), 0)
            catalogue = Catalogue(fd, slot_nbytes, self.digest)
            catalogue.put_all(rows)
            if self.durable:
                os.fsync(fd)
            os.rename(name + PART, name, src_dir_fd=self.dir_fd, dst_dir_fd=self.dir_fd)
            if self.durable:
                os.fsync(self.dir_fd)
                sync_upwards(self.dir_fd)
        except BaseException:
            unlink_quietly(name + PART, self.dir_fd)
            raise
        finally:
            os.close(fd)


def header_at(fd: int, offset: int, sums: Sums) -> Header | None:
    """What a slot says about itself, whether it has a row or not; None if nothing that can be read. Raises OSError."""
    page = os.pread(fd, HEADER_NBYTES, offset)
    with contextlib.suppress(BadHeaderError):
        return unpack_header(memoryview(page), sums=sums) if len(page) == HEADER_NBYTES else None
    return None


def _with_data(fd: int, slot_nbytes: int, n_slots: int) -> Iterator[int]:
    """Slots that are no holes. Raises OSError."""
    at = 0
    while at < n_slots * slot_nbytes:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # holes to its end
                return
            raise
        slot = at // slot_nbytes
        if slot < n_slots:
            yield slot
        at = (slot + 1) * slot_nbytes


def _make_private(fd: int) -> None:
    if os.fstat(fd).st_mode & 0o777 != 0o600:
        os.fchmod(fd, 0o600)
