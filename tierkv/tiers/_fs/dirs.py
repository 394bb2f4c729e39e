"""Directories and names of a root: opened without following links, made private, removed whatever they are."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from typing import Final

from tierkv.tiers._fs.format import ROOT_LOCK

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class NotRegularError(Exception):
    """A link, FIFO, device, socket or directory lies at a chunk's path, or a link where a directory should be."""


def open_directory(name: str, dir_fd: int) -> int:
    """Open a sub-directory without following a link. Raises FileNotFoundError, NotRegularError, OSError."""
    try:
        return os.open(name, _DIRECTORY, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise NotRegularError(f"{name} is not a directory") from None
        raise


@contextlib.contextmanager
def entries_in(dir_fd: int) -> Iterator[Iterator[os.DirEntry[str]]]:
    """What lies in a directory, for a ``with`` block.

    Through an open file of its own, here and in ``names_in``. The place up to which a directory was read belongs to the
    open file: of two threads that listed through one, each would see a part, and take the rest for gone.
    """
    fd = open_directory(".", dir_fd)
    try:
        with os.scandir(fd) as entries:
            yield entries
    finally:
        os.close(fd)


def names_in(dir_fd: int) -> list[str]:
    """Names of what lies in a directory. Raises OSError."""
    with entries_in(dir_fd) as entries:
        return [entry.name for entry in entries]


def entries_of(dir_fd: int) -> Iterator[tuple[str, os.stat_result]]:
    """Names and what they are, links not followed; what vanishes meanwhile is passed over."""
    with entries_in(dir_fd) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                yield entry.name, entry.stat(follow_symlinks=False)


@contextlib.contextmanager
def directory(name: str, dir_fd: int) -> Iterator[int | None]:
    """A descriptor of it for a ``with`` block; None if it is gone or no directory."""
    try:
        fd = open_directory(name, dir_fd)
    except (FileNotFoundError, NotRegularError):
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def make_directory(name: str, dir_fd: int) -> int:
    """Make (if need be) and open a sub-directory, mode 0700 whatever the umask. Raises as ``open_directory``."""
    try:
        os.mkdir(name, 0o700, dir_fd=dir_fd)
    except FileExistsError:
        return open_directory(name, dir_fd)
    # A umask may have taken our own bits away, and then the directory cannot be opened yet.
    os.chmod(name, 0o700, dir_fd=dir_fd)
    return open_directory(name, dir_fd)


def make_root(path: str, made: list[str]) -> None:
    """Make a root, mode 0700, and its parents where they are missing; ``made`` takes what was made, in that order."""
    missing = [path]
    while (parent := os.path.dirname(missing[-1])) != missing[-1] and not os.path.isdir(parent):
        missing.append(parent)
    for directory in reversed(missing):
        try:
            os.mkdir(directory, 0o700 if directory == path else 0o777)
        except FileExistsError:
            continue
        made.append(directory)
        if directory == path:
            os.chmod(path, 0o700)  # a umask may have taken our own bits away


def discard_root_lock(root_fd: int) -> None:
    """Remove the lock of a root that nobody uses: an open that failed had made it."""
    with contextlib.suppress(OSError):
        if names_in(root_fd) == [ROOT_LOCK]:
            os.unlink(ROOT_LOCK, dir_fd=root_fd)


def unlink(name: str, dir_fd: int) -> None:
    """Remove whatever has a name of ours, an empty directory too. Raises OSError."""
    try:
        os.unlink(name, dir_fd=dir_fd)
    except IsADirectoryError:
        os.rmdir(name, dir_fd=dir_fd)


def unlink_first(names: Iterable[str], dir_fd: int) -> bool:
    """Remove what lies under the first of ``names`` that exists; False if it could not be removed."""
    try:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                unlink(name, dir_fd)
                break
    except OSError:
        return False
    return True


def unlink_quietly(name: str, dir_fd: int) -> bool:
    """Remove what is not worth an error; False if there was nothing, or it could not be removed."""
    with contextlib.suppress(OSError):
        unlink(name, dir_fd)
        return True
    return False


def sync_upwards(directory_fd: int) -> None:
    """Sync the directories above one, up to the top of its file system: none of their names may be lost."""
    at_fd = os.dup(directory_fd)
    try:
        while True:
            here = os.fstat(at_fd)
            try:
                above_fd = os.open("..", _DIRECTORY, dir_fd=at_fd)
            except PermissionError:
                return  # what we may not even list, we have not made
            os.close(at_fd)
            at_fd = above_fd
            above = os.fstat(at_fd)
            if above.st_dev != here.st_dev or above.st_ino == here.st_ino:
                return
            os.fsync(at_fd)
    finally:
        os.close(at_fd)
