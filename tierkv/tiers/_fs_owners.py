"""Who owns what on a root that several processes share: lock files, adoption, and each owner's part of the capacity.

Each owner has ``owner-<id>.lock``, flock-held while it lives, with one page of text that says what it may hold and
holds (:class:`OwnerPage`). ``tierkv.lock`` is held for moments by whoever reads all pages to change its own, so the sum
of the reserved bytes never exceeds the root's capacity: an owner lowers its own part whenever it likes, and raises it
only into what the others have left.

The kernel drops a flock when its holder dies, however it dies. Then the first living owner that takes the lock keeps
the id, and with it the files that carry it in their names.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from tierkv.errors import TierError
from tierkv.tiers._fs_books import MAX_IDS, Books
from tierkv.tiers._fs_format import PAGE_NBYTES, ROOT_LOCK, parse_owner_file
from tierkv.tiers._fs_io import unlink_quietly
from tierkv.tiers._fs_page import OwnerPage

_log = logging.getLogger(__name__)

_NO_FLOCK: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_OPEN: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ROOT_LOCK_TIMEOUT_S: Final = 10.0
_FRESH_S: Final = 10.0
"""Without flock, an owner whose heartbeat is younger than this counts as alive."""


@dataclass(frozen=True)
class _Other:
    """A lock file that is not ours."""

    owner: str
    page: OwnerPage | None
    fd: int | None
    """Open and flock-held by us if its holder is dead; None if it lives."""


class Seat:
    """This process's place among the owners of a root.

    ``ids[0]`` is the id that new files carry; the others belonged to dead owners. An id keeps its index for life.

    Args:
        spare_nbytes: what the file system can still give us; negative if it should get some back.

    Concurrency: any thread.
    """

    def __init__(self, name: str, root_fd: int, namespace: str, books: Books, spare_nbytes: Callable[[], int]) -> None:
        self._name = name
        self._spare_nbytes = spare_nbytes
        self._root_fd = root_fd
        self._namespace = namespace
        self._books = books
        self._capacity_nbytes = 0
        self._others_reserved_nbytes = 0
        self._others_capacity_nbytes: int | None = None
        self._mutex = threading.Lock()
        self._fds: dict[str, int] = {}
        self._has_page: set[str] = set()
        self._namespace_of: dict[str, str] = {}
        self._slots: dict[str, int] = {}
        self.reserved_of: dict[str, int] = {}
        """What taken ids had reserved, until a scan has counted their files."""
        self._boot = _boot_id()
        self.ids: list[str] = []
        self.foreign_ids: tuple[str, ...] = ()
        """Ids that others hold: their files may be read."""
        self.n_owners = 1
        self.capacity_nbytes = 0
        """The root's: the least of the living owners'."""
        self.new_id: str | None = None
        """Our own id if no dead owner had it before."""
        self.exclusive = False
        """True where flock does not work: then this process must be the only one on the root."""

    @property
    def id(self) -> str:
        return self.ids[0]

    def slot_of(self, owner: str) -> int | None:
        """Index of an id that this process holds."""
        return self._slots.get(owner)

    def held_ids(self) -> list[str]:
        return list(self._slots)

    def has_lock_file(self, owner: str) -> bool:
        try:
            os.stat(f"owner-{owner}.lock", dir_fd=self._root_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def join(self, decide_capacity: Callable[[int], int]) -> None:
        """Take a dead owner's id, or a new one, and publish what we want.

        Args:
            decide_capacity: our wish for the root's capacity in bytes, given what all owners together hold.

        Raises:
            TierError: the root's lock could not be had in 10 s, or flock does not work and another owner is alive.
        """
        with self._root_locked():
            others = self._others()
            try:
                self._refuse_company(others)
                ours_nbytes = sum(o.page.used_nbytes for o in others if o.page is not None)
                self._capacity_nbytes = decide_capacity(ours_nbytes)
                self._adopt(others, first=True)
                if not self.ids:
                    self.new_id = secrets.token_hex(8)
                    self._take(self.new_id, self._namespace, self._new_lock(self.new_id))
            finally:
                self._close_untaken(others)
            self._publish()

    def refresh(self) -> list[str]:
        """Look at the others, adopt the dead, take or give back capacity, and publish. Returns the newly held ids."""
        with self._root_locked():
            others = self._others()
            try:
                new = self._adopt(others, first=False)
            finally:
                self._close_untaken(others)
            self._publish()
            return new

    def release(self, owner: str) -> None:
        """Give up an id that no file carries any more, and its lock file with it."""
        with self._root_locked():
            unlink_quietly(f"owner-{owner}.index", self._root_fd)
            unlink_quietly(f"owner-{owner}.lock", self._root_fd)
            self._let_go(owner)

    def leave(self, keep: Callable[[str], bool]) -> None:
        """Unlock every id; those that ``keep`` refuses lose their lock file. Never raises."""
        try:
            with self._root_locked():
                if not self.ids:
                    return
                for owner in self.held_ids():
                    if not keep(owner):
                        unlink_quietly(f"owner-{owner}.lock", self._root_fd)
                self._capacity_nbytes = 0  # nothing more to write: give back all but what we hold
                self._publish()
        except (OSError, TierError) as error:
            _log.warning("%s: leaving the root without a last word to its other owners: %s", self._name, error)
        finally:
            for owner in self.held_ids():
                self._let_go(owner)

    def abandon(self) -> None:
        """Close every descriptor as the kernel does for a killed process: nothing is written."""
        for owner in self.held_ids():
            self._let_go(owner)

    def _let_go(self, owner: str) -> None:
        os.close(self._fds.pop(owner))
        del self._slots[owner]
        if owner in self._has_page:
            self._has_page.discard(owner)
            with self._books.lock:
                self._books.fixed_nbytes -= PAGE_NBYTES

    @contextmanager
    def _root_locked(self) -> Iterator[None]:
        with self._mutex, self._root_flocked():
            yield

    @contextmanager
    def _root_flocked(self) -> Iterator[None]:
        fd = os.open(ROOT_LOCK, _OPEN | os.O_CREAT, 0o600, dir_fd=self._root_fd)
        try:
            _make_private(fd)
            deadline = time.monotonic() + _ROOT_LOCK_TIMEOUT_S
            while not self._flock(fd):
                if time.monotonic() > deadline:
                    raise TierError(self._name, f"{ROOT_LOCK} has been held for {_ROOT_LOCK_TIMEOUT_S:g} s")
                time.sleep(0.002)
            yield
        finally:
            os.close(fd)

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

    def _others(self) -> list[_Other]:
        """Every lock file but ours, the dead ones locked."""
        found = []
        for entry in os.listdir(self._root_fd):
            parsed = parse_owner_file(entry)
            if parsed is None or parsed[1] != "lock" or parsed[0] in self._fds:
                continue
            other = self._look_at(parsed[0])
            if other is not None:
                found.append(other)
        return self._without_half_dead(found)

    def _look_at(self, owner: str) -> _Other | None:
        try:
            fd = os.open(f"owner-{owner}.lock", _OPEN, dir_fd=self._root_fd)
        except OSError as error:
            _log.debug("%s: cannot open the lock file of owner %s: %s", self._name, owner, error)
            return None
        try:
            page = OwnerPage.unpack(os.pread(fd, PAGE_NBYTES, 0))
            dead = self._flock(fd)
        except OSError as error:
            _log.debug("%s: cannot read the lock file of owner %s: %s", self._name, owner, error)
            os.close(fd)
            return None
        if not dead:
            os.close(fd)
        return _Other(owner, page, fd if dead else None)

    def _without_half_dead(self, others: list[_Other]) -> list[_Other]:
        """Let the ids of one dying process change hands together, or not yet.

        Its reserved bytes stand in its own page alone; the kernel drops its locks one after another.
        """
        alive = {holder_of(o) for o in others if o.fd is None}
        result = []
        for other in others:
            if other.fd is not None and holder_of(other) in alive:
                os.close(other.fd)
                result.append(_Other(other.owner, other.page, None))
            else:
                result.append(other)
        return result

    def _refuse_company(self, others: list[_Other]) -> None:
        if not self.exclusive:
            return
        for page in (o.page for o in others):
            if page is None or abs(time.time() - page.heartbeat_s) > _FRESH_S:
                continue
            if page.boot != self._boot or (page.pid != os.getpid() and os.path.exists(f"/proc/{page.pid}")):
                raise TierError(self._name, f"the root is in use by process {page.pid}, and flock does not work on it")

    def _adopt(self, others: list[_Other], *, first: bool) -> list[str]:
        """Take dead owners' ids: those of our namespace, and those whose namespace nobody alive reads."""
        read_by_others = {o.page.namespace for o in others if o.fd is None and o.page is not None}
        dead = [o for o in others if o.fd is not None]
        if first:
            # Their lock file and index become ours, so restarts do not add lock files.
            dead.sort(key=lambda o: (o.page is None or o.page.namespace != self._namespace, o.owner))
        new = []
        for other in dead:
            namespace = other.page.namespace if other.page is not None else ""
            mine = namespace == self._namespace or namespace not in read_by_others
            if mine and len(self.ids) < MAX_IDS:
                self._take_over(other, namespace)
                new.append(other.owner)
        if new and not first:
            # Before the ids stop being foreign: a lookup in between must not take "unknown" for "absent".
            self._books.begin_scan()
        taken = set(self._fds)
        self.foreign_ids = tuple(o.owner for o in others if o.owner not in taken)
        self._see([o for o in others if o.owner not in taken])
        return new

    def _take_over(self, other: _Other, namespace: str) -> None:
        fd = other.fd
        assert fd is not None
        self._take(other.owner, namespace, fd)
        with self._books.lock:
            if os.fstat(fd).st_size:
                self._has_page.add(other.owner)
                self._books.fixed_nbytes += PAGE_NBYTES
            if other.page is not None:
                self.reserved_of[other.owner] = other.page.reserved_nbytes
                self._books.adopting_nbytes += other.page.reserved_nbytes

    def _see(self, left: list[_Other]) -> None:
        """Remember what the others hold and want, for the next ``_publish``."""
        pages = [o.page for o in left if o.page is not None]
        self.n_owners = 1 + len({holder_of(o) for o in left if o.fd is None})
        self._others_reserved_nbytes = sum(page.reserved_nbytes for page in pages)
        self._others_capacity_nbytes = min(
            (o.page.capacity_nbytes for o in left if o.fd is None and o.page is not None and o.page.holder == o.owner),
            default=None,
        )

    def _publish(self) -> None:
        others, wish = self._others_capacity_nbytes, self._capacity_nbytes
        self._make_page(wish if others is None else others)
        self.capacity_nbytes = wish if others is None else min(wish, others)
        free_nbytes = self.capacity_nbytes - self._others_reserved_nbytes
        limit = max(0, min(self.capacity_nbytes // self.n_owners, free_nbytes))
        with self._books.lock:
            # Lowered before it is written and raised after, so what is written there always covers what we hold.
            self._books.limit_nbytes = min(limit, self._books.limit_nbytes)
            used = self._books.used_nbytes
        if self.id not in self._has_page:
            return
        for owner in self._has_page:
            own = owner == self.id
            page = OwnerPage(
                owner=owner,
                holder=self.id,
                namespace=self._namespace if own else self._namespace_of[owner],
                capacity_nbytes=wish,
                reserved_nbytes=max(limit, used) if own else 0,
                used_nbytes=used if own else 0,
                heartbeat_s=time.time(),
                pid=os.getpid(),
                boot=self._boot,
            )
            os.pwrite(self._fds[owner], page.pack(), 0)
        with self._books.lock:
            self._books.limit_nbytes = max(0, min(limit, self._books.counted_nbytes + self._spare_nbytes()))

    def _make_page(self, capacity_nbytes: int) -> None:
        """Give our lock files their page once the root has room for it; until then they are empty and cost nothing."""
        room = capacity_nbytes - self._others_reserved_nbytes
        for owner in self.held_ids():
            if owner in self._has_page or room < PAGE_NBYTES:
                continue
            room -= PAGE_NBYTES
            self._has_page.add(owner)
            with self._books.lock:
                self._books.fixed_nbytes += PAGE_NBYTES

    def _take(self, owner: str, namespace: str, fd: int) -> None:
        self._fds[owner] = fd
        self._slots[owner] = len(self.ids)
        self._namespace_of[owner] = namespace
        self.ids.append(owner)

    def _new_lock(self, owner: str) -> int:
        fd = os.open(f"owner-{owner}.lock", _OPEN | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._root_fd)
        _make_private(fd)
        self._flock(fd)
        return fd

    def _close_untaken(self, others: list[_Other]) -> None:
        taken = set(self._fds.values())
        for other in others:
            if other.fd is not None and other.fd not in taken:
                os.close(other.fd)


def holder_of(other: _Other) -> str:
    return other.owner if other.page is None else other.page.holder


def _make_private(fd: int) -> None:
    if os.fstat(fd).st_mode & 0o777 != 0o600:
        os.fchmod(fd, 0o600)


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
