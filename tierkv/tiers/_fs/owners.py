"""Who owns what on a root that several processes share: ids, adoption, and each owner's part of the capacity.

Each owner has ``owner-<id>.lock``, flock-held while it lives, with one page of text that says what it may hold and
holds. ``tierkv.lock`` is held for moments by whoever reads all pages to change its own, so the sum of the reserved
bytes never exceeds the root's capacity: an owner lowers its own part whenever it likes, and raises it only into what
the others have left.

The kernel drops a flock when its holder dies, however it dies. Whoever then takes the lock keeps the id, and owns the
files that carry it in their names. A process that starts takes one dead id at once. Further ones are left for
``ADOPT_AFTER_S``, readable meanwhile: when all processes of a server restart, each finds its part again instead of the
first one taking everything and having to throw most of it away as the others come.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

from tierkv.errors import TierError
from tierkv.protocols import Clock
from tierkv.tiers._fs.books import MAX_IDS, Books
from tierkv.tiers._fs.locks import LockFiles, Other, by_process
from tierkv.tiers._fs.own_pages import OwnPages
from tierkv.tiers._fs.page import FRESH_S

_log = logging.getLogger(__name__)

ADOPT_AFTER_S: Final = 60.0


class Ownership:
    """What this process owns on a root: the ids that it holds, and its part of the capacity.

    An id that was taken keeps its number, from 0 on, for life; ``ids[number]`` is the id.

    Args:
        spare_nbytes: what the file system can still give us; negative if it should get some back.

    Concurrency: any thread.
    """

    def __init__(
        self, name: str, root_fd: int, *, namespace: str, books: Books, spare_nbytes: Callable[[], int], clock: Clock
    ) -> None:
        self.ids: list[str] = []
        self.foreign_ids: tuple[str, ...] = ()
        """Ids that are not ours: their files may be read."""
        self.n_owners = 1
        self.capacity_nbytes = 0
        """The root's: the least of the living owners'."""
        self._next_id: str | None = None
        """An adopted id, for new files once its own have been listed."""
        self.new_id: str | None = None
        """The id that we made up because no dead owner left one."""
        self.reserved_of: dict[str, int] = {}
        """What taken ids had reserved, until a scan has counted their files."""
        self._name = name
        self._namespace = namespace
        self._books = books
        self._spare_nbytes = spare_nbytes
        self._clock = clock
        self._locks = LockFiles(name, root_fd)
        self._pages = OwnPages(books, namespace)
        self._others_reserved_nbytes = 0
        self._living_reserved_nbytes = 0
        self._others_capacity_nbytes: int | None = None
        self._numbers: dict[str, int] = {}
        self._trust: dict[str, Other] = {}
        self._dead_since: dict[str, float] = {}

    @property
    def id(self) -> str:
        """The id that new files carry."""
        return self._pages.id

    @property
    def wish_nbytes(self) -> int:
        """What we want the root's capacity to be."""
        return self._pages.wish_nbytes

    @property
    def exclusive(self) -> bool:
        """True where flock does not work: then this process must be the only one on the root."""
        return self._locks.exclusive

    @property
    def own_ids(self) -> tuple[str | None, ...]:
        """The id that new files carry, and the one that they will."""
        return (self.id, self._next_id)

    @property
    def has_page(self) -> bool:
        """Whether others can see that we hold anything: until then we may hold nothing."""
        return self._pages.speaker is not None

    @property
    def share_nbytes(self) -> int:
        """An equal part of the root's capacity, which is the most that each living owner may hold."""
        return self.capacity_nbytes // self.n_owners

    def number_of(self, owner: str) -> int | None:
        """Of an id that this process holds; None of another one."""
        return self._numbers.get(owner)

    def held_ids(self) -> list[str]:
        return list(self._numbers)

    def trusted_ids(self) -> list[str]:
        """Dead owners' ids that we keep locked while the first scan counts and trims their files."""
        return list(self._trust)

    def has_lock_file(self, owner: str) -> bool:
        return self._locks.exists(owner)

    def room_nbytes(self) -> int:
        """What the files of all dead owners and ours may occupy together."""
        return self.capacity_nbytes - self._living_reserved_nbytes

    def join(self, decide_capacity: Callable[[int], int]) -> None:
        """Take a dead owner's id, or a new one, and publish what we want.

        Args:
            decide_capacity: our wish for the root's capacity in bytes, given what all owners together hold.

        Raises:
            TierError: the root's lock could not be had, or flock does not work and another owner is alive.
        """
        with self._locks.root_locked():
            others = self._locks.others(ours=())
            try:
                self._refuse_company(others)
                self._pages.wish_nbytes = decide_capacity(sum(o.page.used_nbytes for o in others if o.page is not None))
                dead = sorted((o for o in others if o.fd is not None), key=self._likeness)
                read_by_others = _namespaces_read_by(others)
                mine = [o for o in dead if self._may_take(o, read_by_others)]
                if mine:
                    # One of our namespace, and its files, if there is one: so restarts do not add lock files.
                    self._take(mine[0])
                    self._pages.id = mine[0].owner
                else:
                    self._make_up_an_id()
                self._trust = {o.owner: o for o in dead if o.owner != self.id}
            finally:
                self._close_untaken(others)
            self._mark_trust()
            self._see([o for o in others if o.owner not in self._numbers])
            self._publish()

    def hand_back(self, nbytes_of: Mapping[str, int]) -> None:
        """Unlock the dead owners' ids that the first scan was entrusted with; those without files end here.

        Args:
            nbytes_of: what the files of each occupy, lock file and index included, now that they have been counted
                and trimmed.
        """
        with self._locks.root_locked():
            # One page may speak for several ids: it is lowered when theirs speak for themselves.
            for owner, other in sorted(
                self._trust.items(), key=lambda item: nbytes_of.get(item[0], 0) < item[1].reserved_nbytes
            ):
                assert other.fd is not None
                nbytes = nbytes_of.get(owner, 0)
                if nbytes:
                    page = other.page or self._pages.page(owner)
                    page = replace(page, holder=owner, reserved_nbytes=nbytes, used_nbytes=nbytes)
                    os.pwrite(other.fd, page.pack(), 0)
                else:
                    self._locks.remove(owner)
                del self._trust[owner]
                os.close(other.fd)

    def refresh(self) -> list[str]:
        """Look at the others, adopt the dead, take or give back capacity, and publish. Returns the newly held ids."""
        with self._locks.root_locked():
            self._make_lost_locks_anew()
            others = self._locks.others(ours={*self._numbers, *self._trust})
            try:
                new = self._adopt(others)
            finally:
                self._close_untaken(others)
            self._see([*(o for o in others if o.owner not in self._numbers), *self._trust.values()])
            self._publish()
            return new

    def _make_lost_locks_anew(self) -> None:
        """Somebody removed lock files of ours: nobody sees that we live any more, nor counts what we hold."""
        for owner, fd in self._pages:
            if self._locks.is_linked(owner, fd):
                continue
            with contextlib.suppress(FileExistsError):  # another file has its name: whoever put it there knows why
                self._pages.renew(owner, self._locks.make(owner))
                _log.warning("%s: the lock file of owner %s had been removed and was made anew", self._name, owner)

    def go_on_as_adopted(self) -> bool:
        """Give new files the adopted id, if there is one to go on with: its files have been listed. False if not.

        Not before: that scan removes what is unfinished under the id, and could not tell what we are writing from it.
        """
        if self._next_id is None:
            return False
        self._pages.id, self._next_id = self._next_id, None
        return True

    def take_orphan(self, owner: str) -> bool:
        """Hold an id whose lock file is gone, by a new one; False if somebody has made it anew."""
        with self._locks.root_locked():
            if len(self.ids) >= MAX_IDS or self._locks.exists(owner):
                return False
            with contextlib.suppress(FileExistsError):
                self._hold(owner, self._namespace, self._locks.make(owner))
                return True
            return False

    def release(self, owner: str) -> None:
        """Give up an id that no file carries any more, and its lock file with it; not the one that speaks for all."""
        with self._locks.root_locked():
            if owner != self._pages.speaker:
                self._locks.remove(owner)
                self._let_go(owner)

    def leave(self, keep: Callable[[str], bool]) -> None:
        """Unlock every id; those that ``keep`` refuses lose their lock file. Never raises."""
        try:
            if not self._numbers:
                return
            with self._locks.root_locked():
                kept = set(filter(keep, self.held_ids()))
                # Before any page goes: until then the one that stays may say nothing of what we hold.
                speaker = self._pages.say_last(kept) if kept else self._pages.speaker
                kept |= {speaker} if kept and speaker is not None else set()
                for owner in sorted(self._numbers.keys() - kept, key=speaker.__eq__):
                    self._locks.remove(owner)
        except (OSError, TierError) as error:
            _log.warning("%s: leaving the root without a last word to its other owners: %s", self._name, error)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close every descriptor, as the kernel does for a killed process: nothing is written."""
        for owner in self.held_ids():
            self._let_go(owner)
        for other in self._trust.values():
            assert other.fd is not None
            os.close(other.fd)
        self._trust.clear()

    def _likeness(self, other: Other) -> tuple[bool, int, str]:
        """Least for whom we would rather take: one of our namespace, then the one that has most."""
        used = 0 if other.page is None else other.page.used_nbytes
        return (other.namespace != self._namespace, -used, other.owner)

    def _may_take(self, other: Other, read_by_others: set[str]) -> bool:
        """False if somebody alive can read its files and we cannot: they are left to him."""
        return other.namespace == self._namespace or other.namespace not in read_by_others

    def _refuse_company(self, others: Iterable[Other]) -> None:
        if not self.exclusive:
            return
        for page in (o.page for o in others):
            if page is None or abs(time.time() - page.heartbeat_s) > FRESH_S:
                continue
            if page.boot != self._pages.boot or (page.pid != os.getpid() and os.path.exists(f"/proc/{page.pid}")):
                raise TierError(self._name, f"the root is in use by process {page.pid}, and flock does not work on it")

    def _make_up_an_id(self) -> None:
        owner = secrets.token_hex(8)
        self._pages.id = self.new_id = owner
        self._hold(owner, self._namespace, self._locks.make(owner))

    def _adopt(self, others: Iterable[Other]) -> list[str]:
        """Take ids of owners that have been dead for long, unless somebody alive can read their files and we cannot.

        All that one process held, or nothing of it: what was left behind would be covered by no page, and whoever
        lives would write beyond the capacity. A process that began with an id of its own making and has written nothing
        takes one at once, to go on with.
        """
        others = list(others)
        read_by_others = _namespaces_read_by(others)
        dead = by_process(o for o in others if o.fd is not None)
        dead.sort(key=lambda ids: self._likeness(_speaker_of(ids)))
        now = self._clock()
        self._dead_since = {o.owner: self._dead_since.get(o.owner, now) for ids in dead for o in ids}
        is_fresh = self.id == self.new_id and not len(self._books) and not self._books.is_scanning
        new: list[str] = []
        for ids in dead:
            speaker = _speaker_of(ids)
            mine = speaker.namespace == self._namespace
            if not self._may_take(speaker, read_by_others) or len(self.ids) + len(ids) > MAX_IDS:
                continue
            died = max(self._dead_since[other.owner] for other in ids)
            if now - died < ADOPT_AFTER_S and not (is_fresh and mine):
                continue
            if not new:
                # Before the id stops being foreign: a lookup in between must not take "unknown" for "absent".
                self._books.begin_scan()
            for other in ids:
                self._take(other)
                new.append(other.owner)
            if is_fresh and mine:
                self._next_id, is_fresh = speaker.owner, False
        return new

    def _take(self, other: Other) -> None:
        assert other.fd is not None
        self._hold(other.owner, other.namespace, other.fd)
        self.reserved_of[other.owner] = other.reserved_nbytes
        with self._books.lock:
            self._books.adopting_nbytes += other.reserved_nbytes

    def _hold(self, owner: str, namespace: str, fd: int) -> None:
        self._pages.add(owner, namespace, fd)
        self.ids.append(owner)
        self._numbers[owner] = len(self.ids) - 1

    def _let_go(self, owner: str) -> None:
        del self._numbers[owner]
        self._pages.drop(owner)

    def _mark_trust(self) -> None:
        """Let others see that these locks are ours: no living owners of their own, though their bytes count."""
        for other in self._trust.values():
            if other.page is not None and other.fd is not None:
                os.pwrite(other.fd, replace(other.page, holder=self.id).pack(), 0)

    def _see(self, left: Iterable[Other]) -> None:
        """Remember what the others hold and want, for the next ``_publish``."""
        left = list(left)
        living = [o for o in left if o.fd is None]
        self.foreign_ids = tuple(o.owner for o in left)
        self.n_owners = 1 + len({o.holder for o in living} - set(self._numbers))
        self._others_reserved_nbytes = sum(o.reserved_nbytes for o in left)
        self._living_reserved_nbytes = sum(o.reserved_nbytes for o in living)
        self._others_capacity_nbytes = min(
            (o.page.capacity_nbytes for o in living if o.page is not None and o.holder == o.owner), default=None
        )

    def _publish(self) -> None:
        others, wish = self._others_capacity_nbytes, self.wish_nbytes
        self._pages.make((wish if others is None else others) - self._others_reserved_nbytes)
        self.capacity_nbytes = wish if others is None else min(wish, others)
        free_nbytes = self.capacity_nbytes - self._others_reserved_nbytes
        limit = max(0, min(self.share_nbytes, free_nbytes))
        # Lowered before it is written and raised after, so what is written there always covers what we hold.
        self._pages.say(limit)
        if self.has_page:
            with self._books.lock:
                self._books.limit_nbytes = max(0, min(limit, self._books.used_nbytes + self._spare_nbytes()))

    def _close_untaken(self, others: Iterable[Other]) -> None:
        kept = {*(fd for _, fd in self._pages), *(o.fd for o in self._trust.values())}
        for other in others:
            if other.fd is not None and other.fd not in kept:
                os.close(other.fd)


def _speaker_of(ids: Iterable[Other]) -> Other:
    """Of those that one process held, the one whose page speaks for all of them."""
    return max(ids, key=lambda other: (other.reserved_nbytes, other.owner == other.holder, other.owner))


def _namespaces_read_by(others: Iterable[Other]) -> set[str]:
    return {other.namespace for other in others if other.fd is None}
