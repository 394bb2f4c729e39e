"""What a scan has listed, brought under the limit: the coldest leaves until the rest fits, and only then is it counted.

Probes go on meanwhile: they enter what somebody asks for, so what is counted is weighed anew before each decision.
"""

from __future__ import annotations

import logging
from collections.abc import Set as AbstractSet
from typing import cast

from tierkv._faults import Faults
from tierkv.tiers._fs.books import Books, Held, Leaver
from tierkv.tiers._fs.feed import BATCH, Feed, Listed
from tierkv.tiers._fs.file_io import Tally
from tierkv.tiers._fs.format import PAGE_NBYTES, file_name, leaf_of
from tierkv.tiers._fs.index import index_nbytes
from tierkv.tiers._fs.leavers import shrink_leaver
from tierkv.tiers._fs.leftovers import Leftovers
from tierkv.tiers._fs.listing import total_nbytes
from tierkv.tiers._fs.owners import Ownership
from tierkv.tiers._fs.slabs import Slabs
from tierkv.tiers._fs.store import Store
from tierkv.types import ChunkKey

_log = logging.getLogger(__name__)


class Settlement:
    """Trims what was listed, and lets the rest into the books and the feed.

    Args:
        index_room_nbytes: what is set aside for our index.

    Attributes:
        writable: True once the total is known and under the limit.

    Concurrency: the scan's one thread; ``writable`` is read by any.
    """

    def __init__(
        self, name: str, root_fd: int, *, store: Store, slabs: Slabs, books: Books, ownership: Ownership, feed: Feed,
        leftovers: Leftovers, tally: Tally, index_room_nbytes: int,
    ) -> None:  # fmt: skip
        self.writable = False
        self._name = name
        self._root_fd = root_fd
        self._store = store
        self._slabs = slabs
        self._books = books
        self._ownership = ownership
        self._feed = feed
        self._leftovers = leftovers
        self._tally = tally
        self._index_room_nbytes = index_room_nbytes
        self._faults = Faults(_log)
        self._second_copies: set[tuple[str, int, int | None]] = set()

    def limit_nbytes(self) -> int:
        """What ours may occupy; before the first scan has ended our own reservation says nothing yet."""
        return self._books.limit_nbytes if self.writable else self._ownership.share_nbytes

    def settle_trust(
        self, trusted: list[str], listed: list[Listed], leavers: list[Leaver]
    ) -> tuple[list[Listed], list[Leaver]]:
        """Bring all dead owners' files and ours under what the living leave, and hand the others' back.

        Returns what is ours.
        """
        listed, other_nbytes, excess = self._excess(trusted, listed, leavers)
        if excess > 0:
            for owner in trusted:
                self._slabs.give_back_idle(owner)
            self._slabs.give_back(excess)
            listed, other_nbytes, excess = self._excess(trusted, listed, leavers)
        leavers, excess = self._trim_leavers(leavers, excess)
        listed, _ = self._trim(listed, excess)
        with_files = set()
        for owner, nbytes in (*((i.owner, i.nbytes) for i in listed), *((i.owner, i.nbytes) for i in leavers)):
            if owner in other_nbytes:
                other_nbytes[owner] += nbytes
                with_files.add(owner)
        for owner in trusted:
            if owner not in with_files and not self._slabs.retire(owner):
                with_files.add(owner)  # what stays of it is to be counted by somebody
        if trusted:
            self._ownership.hand_back({owner: other_nbytes[owner] for owner in with_files})
        for owner in trusted:
            self._slabs.forget(owner)
        ours = set(self._ownership.held_ids())
        return [i for i in listed if i.owner in ours], [i for i in leavers if i.owner in ours]

    def enter(self, listed: list[Listed], leavers: list[Leaver]) -> None:
        """Trim ours to the limit, coldest first, then count what stays and announce it."""
        books, limit_nbytes = self._books, self.limit_nbytes()
        listed, counted_nbytes = self._weigh(listed)
        excess = total_nbytes(listed, leavers) + counted_nbytes - limit_nbytes
        if excess > 0:
            self._slabs.give_back(excess)
            listed, counted_nbytes = self._weigh(listed)
            excess = total_nbytes(listed, leavers) + counted_nbytes - limit_nbytes
        leavers, excess = self._trim_leavers(leavers, excess)
        listed, _ = self._trim(listed, excess)
        for leaver in leavers:
            books.add_leaver(leaver)
        self._tally.add("unreadable", len(leavers))
        numbers = {owner: self._ownership.number_of(owner) for owner in {item.owner for item in listed}}
        staying: list[Listed] = []
        for at in range(0, len(listed), BATCH):
            batch = listed[at : at + BATCH]
            added = books.add_all((i.key, cast("int", numbers[i.owner]), i.owner, i.nbytes, i.at) for i in batch)
            staying += (item for item, is_there in zip(batch, added, strict=True) if is_there)
        self._feed.put(staying)

    def remove(self, item: Listed) -> bool:
        """False if it stays a chunk: its slot's row cannot be cleared. A file that stays is none, and counts."""
        try:
            held = Held(0, item.nbytes, item.at)  # the number is of the owner, who is told beside it
            self._store.remove(item.key, item.owner, held, keep_slot=False)
        except OSError as error:
            self._faults.tell(f"{self._name}: cannot remove a chunk to make room", error)
            if item.at is not None:
                return False
            name = file_name(item.key, item.owner)
            self._leftovers.add(leaf_of(item.key), name, (name,), item.nbytes)
        return True

    def put_away(self, item: Listed) -> None:
        """Remove a second copy of a key. Where it stays it counts, until a restart finds it again."""
        which = (item.owner, item.nbytes, item.at)
        if not self.remove(item) and which not in self._second_copies:
            self._second_copies.add(which)
            self._books.add_fixed(item.nbytes)

    def _weigh(self, listed: list[Listed]) -> tuple[list[Listed], int]:
        """What of a list the books do not count, and what they count in bytes, both as of one instant.

        Probes go on: what one of them enters in between would be counted twice, and another chunk be trimmed for it.
        """
        listed = self._without(listed, self._books)
        counted_nbytes, moved = self._books.weigh()
        return self._without(listed, moved), counted_nbytes

    def _without(self, listed: list[Listed], known: Books | AbstractSet[ChunkKey]) -> list[Listed]:
        """Leave out what is counted or removed already, and put away a second copy of it under another id of ours."""
        if not len(known):
            return listed
        fresh = []
        for item in listed:
            number = self._ownership.number_of(item.owner)
            if number is None or item.key not in known:
                fresh.append(item)
                continue
            held = self._books.get(item.key)
            if held is None and not self._books.is_gone(item.key, item.owner):
                fresh.append(item)  # what was removed is another owner's copy
            elif held is not None and (held.number, held.at) != (number, item.at):
                self.put_away(item)
        return fresh

    def _excess(
        self, trusted: list[str], listed: list[Listed], leavers: list[Leaver]
    ) -> tuple[list[Listed], dict[str, int], int]:
        """What of a list is not counted, what each dead owner occupies besides, and what exceeds the root's room."""
        listed, counted_nbytes = self._weigh(listed)
        # Each gets room for an index as large as ours may be: whoever takes the id will set as much aside.
        besides_nbytes = {
            owner: PAGE_NBYTES
            + max(index_nbytes(self._root_fd, owner), self._index_room_nbytes)
            + self._slabs.besides_nbytes(owner)
            for owner in trusted
        }
        # But no room for one that has no files, such as a newcomer that died before it had any: it ends.
        with_files = {item.owner for item in listed} | {leaver.owner for leaver in leavers}
        excess = counted_nbytes + sum(besides_nbytes.get(owner, 0) for owner in with_files)
        return listed, besides_nbytes, excess + total_nbytes(listed, leavers) - self._ownership.room_nbytes()

    def _trim(self, listed: list[Listed], excess: int) -> tuple[list[Listed], int]:
        """Remove the coldest until ``excess`` bytes are gone; what a probe has announced meanwhile stays."""
        if excess <= 0:
            return listed, excess
        staying = []
        for item in listed:
            if excess > 0 and self._books.claim(item.key, item.owner):
                if self.remove(item):
                    self._tally.add("trimmed")
                    excess -= item.nbytes
                    continue
                self._books.disclaim(item.key, item.owner)
            staying.append(item)
        return staying, excess

    def _trim_leavers(self, leavers: list[Leaver], excess: int) -> tuple[list[Leaver], int]:
        staying = []
        for leaver in leavers:
            left = shrink_leaver(self._root_fd, leaver, excess) if excess > 0 else leaver
            if left is not leaver:
                self._tally.add("trimmed")
                excess -= leaver.nbytes - (0 if left is None else left.nbytes)
            staying += [] if left is None else [left]
        return staying, excess
