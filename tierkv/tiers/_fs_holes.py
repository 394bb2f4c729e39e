"""Give a file its blocks before they are written, and take them away again from its middle."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from typing import Final

_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2
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


def _fallocate(fd: int, mode: int, start: int, nbytes: int) -> None:
    fallocate = _libc().fallocate
    while fallocate(fd, mode, ctypes.c_int64(start), ctypes.c_int64(nbytes)) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)  # not PyDLL: the calls let go of the GIL
