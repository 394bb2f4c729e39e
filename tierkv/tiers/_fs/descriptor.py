"""Open files of slabs: regular ones only, closed once nobody holds them."""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

SAFE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECT: Final = getattr(os, "O_DIRECT", 0)


class Descriptor:
    """An open file, closed once nobody holds it: calls may be under way when its owner is seen to be gone."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


def open_regular(name: str, dir_fd: int, *, direct: bool = False) -> Descriptor:
    """Open for reading and writing if we may, never through a link. Raises OSError; ELOOP for what is no file."""
    flags = SAFE | (_DIRECT if direct else 0)
    try:
        file = Descriptor(os.open(name, os.O_RDWR | flags, dir_fd=dir_fd))
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        file = Descriptor(os.open(name, os.O_RDONLY | flags, dir_fd=dir_fd))
    if not stat.S_ISREG(os.fstat(file.fd).st_mode):
        raise OSError(errno.ELOOP, "not a regular file")
    return file
