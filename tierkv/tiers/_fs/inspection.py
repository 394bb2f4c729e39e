"""A root looked at from outside, with or without engines running on it. Changes nothing in it; see sweep.py.

What vanishes meanwhile is passed over: a living owner evicts as it likes. Links are not followed, only files opened.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from tierkv.errors import bad_setting
from tierkv.tiers._fs.catalogue import FRESH_ROW_S, SlabName, is_fresh, is_still_there, parse_slab_name
from tierkv.tiers._fs.dirs import directory, entries_of, names_in
from tierkv.tiers._fs.format import (
    HEADER_NBYTES,
    LEAVES,
    PAGE_NBYTES,
    PLAIN,
    ROOT_LOCK,
    BadHeaderError,
    Header,
    Sums,
    header_in_slot,
    header_of,
    is_namespace_dir,
    padded_nbytes,
    parse_owner_file,
)
from tierkv.tiers._fs.found import Found, foreign_at, found_at, in_slab
from tierkv.tiers._fs.page import FRESH_S, OwnerPage, processes

_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_STEP_NBYTES: Final = 1 << 20
_LOCK_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Owner:
    """A lock file of a root, and who holds it."""

    id: str
    alive: bool
    page: OwnerPage | None
    """What it says; None if that is empty or torn."""
    index_nbytes: int

    @property
    def holder(self) -> str:
        """Id of the process that holds it, or held it last."""
        return self.id if self.page is None else self.page.holder

    @property
    def charge_nbytes(self) -> int:
        """What its own files count against the root's capacity."""
        return PAGE_NBYTES + padded_nbytes(self.index_nbytes)


class Root:
    """An open root. ``sums`` is how its chunks are proven: those of other keys are not readable.

    Raises:
        ConfigError: there is no such directory, or it may not be read.
    """

    def __init__(self, option: str, path: str, sums: Sums = PLAIN) -> None:
        self.path = path
        self._sums = sums
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise bad_setting(option, path, f"a directory that can be read ({error.strerror})") from None

    @property
    def fd(self) -> int:
        """The open directory."""
        return self._fd

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def free_nbytes(self) -> int:
        """What the file system has left for us."""
        found = os.fstatvfs(self._fd)
        return found.f_bavail * found.f_frsize

    # -- who ----------------------------------------------------------------------------------------------------

    def owners(self) -> list[Owner]:
        """All lock files, by id. Raises TimeoutError if the root's lock is held for 10 s."""
        with self.held() as owners:
            return owners

    @contextlib.contextmanager
    def held(self, *, make_lock: bool = False) -> Iterator[list[Owner]]:
        """Its owners, who stay what they are while the block runs: nobody joins, adopts or hands back. Keep it short.

        Args:
            make_lock: make the root's lock where there is none, so that an engine that starts is kept out, too.

        Raises:
            TimeoutError: the root's lock is held for 10 s.
        """
        with self._root_locked(os.O_CREAT if make_lock else 0):
            ids = sorted(
                parsed[0]
                for parsed in map(parse_owner_file, names_in(self._fd))
                if parsed is not None and parsed[1] == "lock"
            )
            owners = [owner for owner in map(self._owner, ids) if owner is not None]
            alive = {owner.id for owner in owners if owner.alive}
            # The ids of one dying process end together: the kernel drops its locks one after another.
            together = processes({owner.id: owner.holder for owner in owners})
            alive = {owner for ids in together if not alive.isdisjoint(ids) for owner in ids}
            yield [replace(owner, alive=owner.id in alive) for owner in owners]

    def _owner(self, owner: str) -> Owner | None:
        fd = self._open_regular(f"owner-{owner}.lock", self._fd)
        if fd is None:
            return None
        try:
            page = OwnerPage.unpack(os.pread(fd, PAGE_NBYTES, 0))
            is_free = _lock_shared(fd)
            if is_free is None:
                is_free = page is None or abs(time.time() - page.heartbeat_s) > FRESH_S
            return Owner(owner, not is_free, page, self._nbytes_of(f"owner-{owner}.index"))
        finally:
            os.close(fd)

    def _nbytes_of(self, name: str) -> int:
        with contextlib.suppress(FileNotFoundError):
            return os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_size
        return 0

    @contextlib.contextmanager
    def _root_locked(self, flags: int) -> Iterator[None]:
        """Shared: owners look at each other's locks only while they hold this one, so none sees us try theirs."""
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            fd = self._open_regular(ROOT_LOCK, self._fd, flags)
            if fd is None and flags:
                raise FileExistsError(errno.EEXIST, "is no file", ROOT_LOCK)
            if fd is None:  # nobody has ever been here
                yield
                return
            try:
                while _lock_shared(fd) is False:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{ROOT_LOCK} has been held for {_LOCK_TIMEOUT_S:g} s")
                    time.sleep(0.002)
                if self._is_at(ROOT_LOCK, fd):
                    yield
                    return
            finally:
                os.close(fd)  # if it was removed while we waited for it, it excludes nobody any more

    def _is_at(self, name: str, fd: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.stat(name, dir_fd=self._fd, follow_symlinks=False), os.fstat(fd))
        return False

    # -- what ---------------------------------------------------------------------------------------------------

    def is_used(self) -> bool:
        """Whether anything in it is tierkv's: an engine leaves its locks, whatever is evicted."""
        return any(map(is_ours, names_in(self._fd)))

    def files(self, *, namespace: str | None = None, slots: bool = False) -> Iterator[Found]:
        """Everything in the tree but owners' files and our directories, as it lies; memory does not grow with it.

        With ``slots`` chunks in slabs are told of one by one, at places below their slab's; else as a part of the slab.
        """
        for name, found in entries_of(self._fd):
            if is_namespace_dir(name) and stat.S_ISDIR(found.st_mode):
                if namespace is None or name.startswith(namespace):
                    yield from self._in_namespace(name, slots=slots)
            elif parse_owner_file(name) is None and name != ROOT_LOCK and namespace is None:
                yield foreign_at(name, "", found)

    def _in_namespace(self, namespace: str, *, slots: bool) -> Iterator[Found]:
        with directory(namespace, self._fd) as namespace_fd:
            if namespace_fd is None:
                return
            for leaf, found in entries_of(namespace_fd):
                slab = parse_slab_name(leaf)
                if slab is not None and stat.S_ISREG(found.st_mode):
                    yield from in_slab(namespace, namespace_fd, slab, found, slots=slots)
                    continue
                if leaf not in LEAVES or not stat.S_ISDIR(found.st_mode):
                    yield foreign_at(f"{namespace}/{leaf}", namespace, found)
                    continue
                with directory(leaf, namespace_fd) as leaf_fd:
                    for name, inside in () if leaf_fd is None else entries_of(leaf_fd):
                        yield found_at(namespace, leaf, name, inside)

    def namespaces(self) -> list[str]:
        """Digests of those that have a directory."""
        return [name for name, found in entries_of(self._fd) if is_namespace_dir(name) and stat.S_ISDIR(found.st_mode)]

    def header(self, found: Found) -> Header:
        """What a chunk file says about itself.

        Raises:
            BadHeaderError: it is not what its place and name say; also for what is no regular file.
            FileNotFoundError: it is gone.
            OSError: it cannot be read now.
        """
        return self._steady(found, self._read_header)

    def _read_header(self, found: Found) -> Header:
        with self._opened(found) as (fd, start):
            return _header(fd, start, found, self._sums)

    def verify(self, found: Found, pace: Callable[[int], None] = lambda _: None) -> Header:
        """Read all of a chunk file and compare it with its checksums; ``pace`` is called with what was read.

        Raises:
            BadHeaderError, FileNotFoundError, OSError: as :meth:`header`.
        """
        return self._steady(found, partial(self._verify, pace=pace))

    def _verify(self, found: Found, pace: Callable[[int], None]) -> Header:
        with self._opened(found) as (fd, start):
            header = _header(fd, start, found, self._sums)
            digest, at = self._sums.hasher(), start + HEADER_NBYTES
            end = at + header.chunk.nbytes
            while at < end:
                data = os.pread(fd, min(_STEP_NBYTES, end - at), at)
                if not data:
                    raise BadHeaderError("the file ends short")
                digest.update(data)
                at += len(data)
                pace(len(data))
            if not hmac.compare_digest(digest.digest(), header.checksum):
                raise BadHeaderError("payload checksum")
            return header

    def _steady(self, found: Found, look: Callable[[Found], Header]) -> Header:
        """Look again, once, at a chunk so young that another may have had its slot meanwhile, of which no row tells."""
        may_be_busy = parse_slab_name(found.place.split("/")[1]) is not None and is_fresh(found.mtime_s)
        try:
            return look(found)
        except BadHeaderError:
            if not may_be_busy:
                raise
        time.sleep(2 * FRESH_ROW_S)
        return look(found)

    @contextlib.contextmanager
    def _opened(self, found: Found) -> Iterator[tuple[int, int]]:
        """A descriptor, and where in the file the chunk begins."""
        namespace, leaf, name = found.place.split("/")
        slab = parse_slab_name(leaf)
        with directory(namespace, self._fd) as namespace_fd:
            if namespace_fd is None:
                raise FileNotFoundError(found.place)
            if slab is not None:
                fd = self._open_regular(leaf, namespace_fd)
            else:
                with directory(leaf, namespace_fd) as leaf_fd:
                    fd = None if leaf_fd is None else self._open_regular(name, leaf_fd)
        if fd is None:
            raise FileNotFoundError(found.place)
        try:
            yield fd, 0 if slab is None else int(name) * slab.slot_nbytes
        except BadHeaderError:
            if slab is not None and not self._is_still_there(found, slab):
                raise FileNotFoundError(found.place) from None
            raise
        finally:
            os.close(fd)

    def _is_still_there(self, found: Found, slab: SlabName) -> bool:
        assert found.name is not None
        with directory(found.namespace, self._fd) as fd:
            row = (int(found.place.rpartition("/")[2]), found.mtime_s, found.name.key)
            return fd is not None and is_still_there(slab, fd, bytes.fromhex(found.namespace), row)

    def _open_regular(self, name: str, dir_fd: int, flags: int = 0) -> int | None:
        """None if there is no such file, or something else in its place."""
        try:
            if not flags and not stat.S_ISREG(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
                return None
            fd = os.open(name, _READ | flags, 0o600, dir_fd=dir_fd)
        except FileNotFoundError:
            return None
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        return None


def is_ours(name: str) -> bool:
    """Whether something that lies in a root itself has a name of tierkv's."""
    return name == ROOT_LOCK or parse_owner_file(name) is not None or is_namespace_dir(name)


def _lock_shared(fd: int) -> bool | None:
    """False if another process has it for itself; None where flock does not work."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _header(fd: int, start: int, found: Found, sums: Sums) -> Header:
    page = os.pread(fd, HEADER_NBYTES, start)
    if len(page) < HEADER_NBYTES:
        raise BadHeaderError("no whole header")
    assert found.name is not None
    namespace = bytes.fromhex(found.namespace)
    if "." in found.place.split("/")[1]:
        return header_in_slot(memoryview(page), found.name.key, namespace, found.nbytes, sums=sums)
    return header_of(memoryview(page), found.name.key, namespace, os.fstat(fd).st_size, sums=sums)
