"""The lock files of a root: open, flock, look at the others'. Decides nothing."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from tierkv.errors import TierError
from tierkv.tiers._fs.dirs import names_in, unlink_quietly
from tierkv.tiers._fs.format import PAGE_NBYTES, ROOT_LOCK, parse_owner_file
from tierkv.tiers._fs.page import OwnerPage, processes

_log = logging.getLogger(__name__)

_NO_FLOCK: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_NO_FILE: Final = (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR)
_OPEN: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ROOT_LOCK_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True)
class Other:
    """A lock file that is not ours."""

    owner: str
    page: OwnerPage | None
    """None if it is empty (an owner that has no room yet) or torn."""
    fd: int | None
    """Open and flock-held by us if its holder is dead; None if it lives."""

    @property
    def holder(self) -> str:
        return self.owner if self.page is None else self.page.holder

    @property
    def namespace(self) -> str:
        return "" if self.page is None else self.page.namespace

    @property
    def reserved_nbytes(self) -> int:
        return 0 if self.page is None else self.page.reserved_nbytes


def by_process(others: Iterable[Other]) -> list[list[Other]]:
    """As :func:`processes`."""
    by_owner = {other.owner: other for other in others}
    return [[by_owner[owner] for owner in ids] for ids in processes({o.owner: o.holder for o in by_owner.values()})]


class LockFiles:
    """Lock files in one root.

    Attributes:
        exclusive: flock does not work here: every other owner counts as dead, and only one process may use the root.

    Concurrency: ``root_locked`` excludes threads as well as processes; the other methods are called inside it.
    """

    def __init__(self, name: str, root_fd: int) -> None:
        self.exclusive = False
        self._name = name
        self._root_fd = root_fd
        self._mutex = threading.Lock()

    @contextmanager
    def root_locked(self) -> Iterator[None]:
        """Raises TierError if another process holds the root's lock for 10 s."""
        with self._mutex:
            fd = self._lock_root()
            try:
                yield
            finally:
                os.close(fd)

    def is_linked(self, owner: str, fd: int) -> bool:
        """Whether ``fd`` is what lies at the owner's lock file's path. Somebody may have tidied up."""
        return self._is_at(f"owner-{owner}.lock", fd)

    def others(self, ours: Container[str]) -> list[Other]:
        """Every lock file but ours, those of the dead locked; the caller closes their descriptors.

        The ids of one dying process are all dead, or none is yet: what it had reserved stands in one page, and the
        kernel drops its locks one after another.
        """
        found: list[Other] = []
        try:
            for entry in sorted(names_in(self._root_fd)):
                parsed = parse_owner_file(entry)
                if parsed is not None and parsed[1] == "lock" and parsed[0] not in ours:
                    other = self._look_at(parsed[0])
                    found += [] if other is None else [other]
        except BaseException:
            for other in found:
                if other.fd is not None:
                    os.close(other.fd)
            raise
        result = []
        for process in by_process(found):
            is_alive = any(other.fd is None for other in process)
            for other in process:
                if is_alive and other.fd is not None:
                    os.close(other.fd)
                    result.append(replace(other, fd=None))
                else:
                    result.append(other)
        return result

    def make(self, owner: str) -> int:
        """A new lock file, empty and locked."""
        fd = os.open(f"owner-{owner}.lock", _OPEN | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._root_fd)
        _make_private(fd)
        self._flock(fd)
        return fd

    def exists(self, owner: str) -> bool:
        """False also if something else than a file has its name."""
        try:
            mode = os.stat(f"owner-{owner}.lock", dir_fd=self._root_fd, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return False
        return stat.S_ISREG(mode)

    def remove(self, owner: str) -> None:
        """The owner's lock file and index."""
        for kind in ("index", "lock"):
            unlink_quietly(f"owner-{owner}.{kind}", self._root_fd)

    def _look_at(self, owner: str) -> Other | None:
        """None if there is no such lock file, or something that is none has its name.

        Any other error is raised: an owner that cannot be seen now (EMFILE, EIO) is there all the same, and what it
        holds counts.
        """
        try:
            fd = os.open(f"owner-{owner}.lock", _OPEN, dir_fd=self._root_fd)
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            return None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                return None
            page = OwnerPage.unpack(os.pread(fd, PAGE_NBYTES, 0))
            dead = self._flock(fd)
        except OSError:
            os.close(fd)
            raise
        if not dead:
            os.close(fd)
        return Other(owner, page, fd if dead else None)

    def _lock_root(self) -> int:
        deadline = time.monotonic() + _ROOT_LOCK_TIMEOUT_S
        while True:
            fd = os.open(ROOT_LOCK, _OPEN | os.O_CREAT, 0o600, dir_fd=self._root_fd)
            try:
                _make_private(fd)
                while not self._flock(fd):
                    self._wait_until(deadline)
                if self._is_at(ROOT_LOCK, fd):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # removed while we waited for it: it excludes nobody any more

    def _wait_until(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise TierError(self._name, f"{ROOT_LOCK} has been held for {_ROOT_LOCK_TIMEOUT_S:g} s")
        time.sleep(0.002)

    def _is_at(self, name: str, fd: int) -> bool:
        try:
            found = os.stat(name, dir_fd=self._root_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(fd))

    def _flock(self, fd: int) -> bool:
        if self.exclusive:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
            self.exclusive = True
            _log.warning(
                "%s: flock does not work on this root (%s): it must not be used by two processes at once",
                self._name,
                error,
            )
        return True


def _make_private(fd: int) -> None:
    if os.fstat(fd).st_mode & 0o777 != 0o600:
        os.fchmod(fd, 0o600)
