"""What a file system can do and Python cannot ask of it: give a file blocks, take them back, say that it is memory."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from typing import Final

_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2
_MEMORY: Final = frozenset({0x01021994, 0x858458F6})
UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})


def allocate(fd: int, start: int, nbytes: int) -> None:
    """Blocks for a range, which may lie behind the file's end; what they hold reads as zeros.

    Not ``os.posix_fallocate``: where the file system cannot do it, the C library writes every block instead.

    Raises OSError: ENOSPC, and then a part of the range may have blocks; or one of ``UNSUPPORTED``.
    """
    _fallocate(fd, 0, start, nbytes)


def punch(fd: int, start: int, nbytes: int) -> None:
    """Give the blocks of a range back. Raises OSError."""
    _fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, start, nbytes)


def is_in_memory(fd: int) -> bool:
    """Whether this is a file of tmpfs or ramfs; False if nobody knows."""
    found = (ctypes.c_long * 64)()  # more than the structure has; it begins with the file system's number
    return _libc().fstatfs(fd, found) == 0 and found[0] & 0xFFFFFFFF in _MEMORY


def _fallocate(fd: int, mode: int, start: int, nbytes: int) -> None:
    fallocate = _libc().fallocate
    while fallocate(fd, mode, ctypes.c_int64(start), ctypes.c_int64(nbytes)) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)  # not PyDLL: the calls let go of the GIL
