"""What the file system below a root can do, found out by a probe file that is removed again."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from tierkv.tiers._fs.dirs import unlink_quietly
from tierkv.tiers._fs.file_io import direct_works
from tierkv.tiers._fs.format import PAGE_NBYTES
from tierkv.tiers._fs.holes import UNSUPPORTED, allocate, punch

DEFAULT_MIN_FREE_PART = 20
MOST_DEFAULT_FREE_NBYTES = 1 << 30


def default_min_free_nbytes(found: os.statvfs_result) -> int:
    """What a tier leaves free without being told: a twentieth of the file system, 1 GiB at most."""
    return min(MOST_DEFAULT_FREE_NBYTES, found.f_blocks * found.f_frsize // DEFAULT_MIN_FREE_PART)


@dataclass(frozen=True, slots=True)
class Abilities:
    """What worked. ``error`` is why nothing could be tried: no file could be made."""

    error: OSError | None = None
    flock: bool = False
    direct: bool = False
    slab: bool = False
    """A file can be given blocks, and they can be taken back."""


def try_out(directory: str) -> Abilities:
    """Make a file of a name that is none of ours, see what can be done with it, remove it."""
    try:
        dir_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        return Abilities(error)
    name = f".tierkv-doctor-{secrets.token_hex(8)}"
    try:
        with _probe_file(name, dir_fd) as fd:
            return Abilities(None, _flock_excludes(name, fd, dir_fd), direct_works(name, dir_fd), _holds_slabs(fd))
    except OSError as error:
        return Abilities(error)
    finally:
        unlink_quietly(name, dir_fd)
        os.close(dir_fd)


@contextlib.contextmanager
def _probe_file(name: str, dir_fd: int) -> Iterator[int]:
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    try:
        if os.pwrite(fd, bytes(PAGE_NBYTES), 0) < PAGE_NBYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield fd
    finally:
        os.close(fd)


def _holds_slabs(fd: int) -> bool:
    """Whether ``layout: "auto"`` will take a slab; what else is wrong, such as a full disk, has its own finding."""
    try:
        allocate(fd, 0, 2 * PAGE_NBYTES)
        punch(fd, 0, PAGE_NBYTES)
    except OSError as error:
        return error.errno not in UNSUPPORTED
    return True


def _flock_excludes(name: str, fd: int, dir_fd: int) -> bool:
    """A second descriptor must not get what the first one holds: some file systems say yes to everybody."""
    other = os.open(name, os.O_RDWR | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(other)
    return False
