"""What this process tells the other owners of a root, in the pages of the ids that it holds.

One page speaks for all of them, the others say that they hold nothing. What lies on a root is never more than what all
pages of the root say together, after any single write and wherever a kill comes: each owner grows into what the pages
of the others leave.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace

from tierkv.tiers._fs.books import Books
from tierkv.tiers._fs.file_io import NO_SPACE
from tierkv.tiers._fs.format import PAGE_NBYTES
from tierkv.tiers._fs.page import OwnerPage, boot_id


class OwnPages:
    """The locked lock files of one process.

    Attributes:
        id: the id that new files carry.
        wish_nbytes: what we want the root's capacity to be.

    Concurrency: under the root's lock.
    """

    def __init__(self, books: Books, namespace: str) -> None:
        self.id = ""
        self.wish_nbytes = 0
        self.boot = boot_id()
        self._books = books
        self._namespace = namespace
        self._fds: dict[str, int] = {}
        self._namespace_of: dict[str, str] = {}
        self._written: set[str] = set()

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Ids and descriptors, in the order in which they came."""
        return iter(list(self._fds.items()))

    @property
    def speaker(self) -> str | None:
        """The id whose page speaks for all of ours: the one that we write under, once it has a page."""
        return next((owner for owner in (self.id, *self._fds) if owner in self._written), None)

    def add(self, owner: str, namespace: str, fd: int) -> None:
        """A lock file of ours, which may have a page already."""
        self._fds[owner] = fd
        self._namespace_of[owner] = namespace
        if os.fstat(fd).st_size:
            self._written.add(owner)
            self._books.add_fixed(PAGE_NBYTES)

    def renew(self, owner: str, fd: int) -> None:
        """Another file in place of one that somebody removed; its page comes with the next word."""
        os.close(self._fds[owner])
        self._fds[owner] = fd

    def drop(self, owner: str) -> None:
        """Unlock a file, which may be gone."""
        os.close(self._fds.pop(owner))
        if owner in self._written:
            self._written.discard(owner)
            self._books.add_fixed(-PAGE_NBYTES)

    def make(self, most_nbytes: int) -> None:
        """Give empty files their page while we hold no more than this; until then they cost nothing."""
        for owner in [owner for owner in self._fds if owner not in self._written]:
            with self._books.lock:
                if self._books.used_nbytes + PAGE_NBYTES > most_nbytes:
                    return
                self._books.fixed_nbytes += PAGE_NBYTES
            try:
                # It speaks for itself until the speaker's says more.
                os.pwrite(self._fds[owner], replace(self.page(owner), reserved_nbytes=PAGE_NBYTES).pack(), 0)
            except OSError as error:
                self._books.add_fixed(-PAGE_NBYTES)
                if error.errno not in NO_SPACE:
                    raise
                return  # the disk is full: until it is not, this owner holds nothing
            self._written.add(owner)

    def say(self, limit_nbytes: int) -> None:
        """Lower our limit to this, and claim that or what we hold, whatever is more."""
        if self.speaker is None:
            self._lower(limit_nbytes)
        else:
            self._say(self.speaker, self.id, limit_nbytes)

    def say_last(self, kept: set[str]) -> str | None:
        """Claim what we leave behind in the page of an id that is kept, or else of another, which must be kept then.

        Returns that id; None if no id of ours has a page.
        """
        speaker = next((owner for owner in (self.id, *self._fds) if owner in kept & self._written), self.speaker)
        if speaker is not None:
            self._say(speaker, speaker, 0)
        return speaker

    def page(self, owner: str) -> OwnerPage:
        """Of an id that holds nothing by itself."""
        return OwnerPage(
            owner=owner,
            holder=self.id,
            namespace=self._namespace if owner == self.id else self._namespace_of.get(owner, self._namespace),
            capacity_nbytes=self.wish_nbytes,
            reserved_nbytes=0,
            used_nbytes=0,
            heartbeat_s=time.time(),
            pid=os.getpid(),
            boot=self.boot,
            host=os.uname().nodename,
        )

    def _say(self, speaker: str, holder: str, limit_nbytes: int) -> None:
        used_nbytes = self._lower(limit_nbytes)
        # The speaker's first: it may have been another's word until now, and a kill may come after any of them.
        for owner in (speaker, *(self._written - {speaker})):
            page = replace(self.page(owner), holder=holder)
            if owner == speaker:
                page = replace(page, reserved_nbytes=max(limit_nbytes, used_nbytes), used_nbytes=used_nbytes)
            os.pwrite(self._fds[owner], page.pack(), 0)

    def _lower(self, limit_nbytes: int) -> int:
        """What we hold once we may hold no more. Before it is written, so what is written always covers that."""
        with self._books.lock:
            self._books.limit_nbytes = min(limit_nbytes, self._books.limit_nbytes)
            return self._books.used_nbytes
