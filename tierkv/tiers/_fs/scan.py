"""What is on the root already: list it, bring it under the limit, and only then let it into the books and the feed.

A scan runs on its own thread: once at open over everything, later over the files of a dead owner whose ids we took.
Leaves that nothing changed since a clean close come from the index; the others are listed, by name and size alone.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, cast

from tierkv.errors import TierError
from tierkv.tiers._fs.books import Books, Held, Leaver
from tierkv.tiers._fs.catalogue import Row
from tierkv.tiers._fs.dirs import NotRegularError, entries_in, open_directory
from tierkv.tiers._fs.feed import BATCH, Feed, Listed
from tierkv.tiers._fs.file_io import Tally
from tierkv.tiers._fs.format import LEAVES, PAGE_NBYTES, file_name, leaf_of
from tierkv.tiers._fs.index import Index, index_nbytes, read_indexes
from tierkv.tiers._fs.leavers import shrink_leaver
from tierkv.tiers._fs.leftovers import Leftovers
from tierkv.tiers._fs.listing import Hints, Lister, in_order, leaf_opened, namespaces, total_nbytes
from tierkv.tiers._fs.owners import Ownership
from tierkv.tiers._fs.slab import Slab
from tierkv.tiers._fs.slabs import Slabs
from tierkv.tiers._fs.store import Store
from tierkv.tiers._fs.unchanged import enter, is_unchanged, located
from tierkv.types import ChunkKey

_log = logging.getLogger(__name__)

_LEAF_SET: Final = frozenset(LEAVES)
_RETRY_S: Final = 1.0
_TWO_HEARTBEATS_S: Final = 2.0
Gate = Callable[[int, int], object]
"""Called before each leaf with (leaves done, leaves in all); a test holds the scan by not returning."""


class ScanStoppedError(Exception):
    """The tier closes: the scan ends where it is."""


class Scanner:
    """Lists a root, trims it and hands over what stays.

    Attributes:
        writable: True once the total is known and under the limit.

    Concurrency: ``first`` and ``adopted`` on the scan's one thread; the rest from any.
    """

    def __init__(
        self, name: str, root_fd: int, *, digest: bytes, store: Store, slabs: Slabs, books: Books, ownership: Ownership,
        feed: Feed, leftovers: Leftovers, tally: Tally, gate: Gate | None, refresh: Callable[[], None],
        index_room_nbytes: int,
    ) -> None:  # fmt: skip
        self.writable = False
        self._name = name
        self._root_fd = root_fd
        self._digest = digest
        self._store = store
        self._slabs = slabs
        self._books = books
        self._ownership = ownership
        self._feed = feed
        self._leftovers = leftovers
        self._tally = tally
        self._gate = gate
        self._refresh = refresh
        self._index_room_nbytes = index_room_nbytes
        self._stop = threading.Event()
        self._front: deque[str] = deque()
        # Counts as scanning from the start: until the first scan has ended, no negative answer is final.
        books.begin_scan()

    def stop(self) -> None:
        """Let a running scan end early; what it has listed is forgotten."""
        self._stop.set()

    def ask_first(self, leaf: str) -> None:
        """List this leaf next: somebody looks for a key in it."""
        if len(self._front) < len(LEAVES):
            self._front.append(leaf)

    def first(self) -> None:
        """The scan at open: every file of ours and of dead owners, in every namespace."""
        self._until_done(self._scan, self._ownership.held_ids(), self._ownership.trusted_ids())
        # Only now the pages say what dead owners' files occupy, so only now our own limit is right.
        if self._until_done(self._refresh):
            self.writable = True

    def adopted(self, owners: Sequence[str]) -> None:
        """A scan for the files of owners whose ids we took over later."""
        if self._until_done(self._scan, list(owners), None) and self._ownership.go_on_as_adopted():
            self._until_done(self._refresh)

    def _until_done(self, work: Callable[..., None], *args: object) -> bool:
        """Again and again if the file system refuses: a leaf left out would be bytes that nobody counts."""
        while not self._stop.is_set():
            try:
                work(*args)
                return True
            except ScanStoppedError:
                return False
            except (OSError, TierError) as error:
                if self._tally.add("failed_scans") == 1:
                    _log.warning("%s: cannot list the root (%s), trying again every second", self._name, str(error))
                self._stop.wait(_RETRY_S)
        return False

    def _scan(self, owners: list[str], trusted: list[str] | None) -> None:
        """Count the files of ``owners``; at open also those of the ``trusted``, which are trimmed and handed back."""
        first = trusted is not None
        if first:
            owners = [*owners, *self._orphaned_slabs({*owners, *(trusted or ())})]
        everybody = [*owners, *(trusted or ())]
        indexes = read_indexes(self._name, self._root_fd, self._digest, owners, trusted or (), tally=self._tally)
        listed: list[Listed] = []
        leavers: list[Leaver] = []
        lister = Lister(self._ownership, self._tally, set(everybody), adopt_orphans=first, let_owners_speak=self._wait)
        mine = self._digest.hex()
        for namespace in sorted(namespaces(self._root_fd), key=mine.__eq__):
            if namespace == mine:
                listed = self._list_mine(lister, indexes, everybody, total_nbytes((), leavers))
            else:
                leavers += self._list_other(lister, namespace)
        leavers.sort()
        if trusted is not None:
            listed, leavers = self._settle_trust(trusted, listed, leavers)
        self._enter(listed, leavers)
        self._books.end_scan(sum(self._ownership.reserved_of.pop(owner, 0) for owner in owners))
        self._release_empty(owners, listed, leavers)

    def _orphaned_slabs(self, known: set[str]) -> list[str]:
        """Ids with a slab of our namespace and no lock file: they are ours from now on."""
        strangers = self._slabs.owners() - known - set(self._ownership.foreign_ids)
        if strangers:
            self._wait()  # an owner that lives makes its lock file anew
        taken = []
        for owner in sorted(strangers):
            if self._ownership.has_lock_file(owner):
                continue
            if self._slabs.take_over(owner):
                self._tally.add("orphans")
            elif self._ownership.take_orphan(owner):
                self._tally.add("orphans")
                taken.append(owner)
        return taken

    def _wait(self) -> None:
        if self._stop.wait(_TWO_HEARTBEATS_S):
            raise ScanStoppedError

    def _list_mine(self, lister: Lister, indexes: list[Index], owners: list[str], leavers_nbytes: int) -> list[Listed]:
        """Our namespace's chunks, one a key, coldest first; without those that could be entered at once."""
        if is_unchanged(indexes, owners, self._root_fd, self._digest):
            listed = self._enter_unchanged(indexes[0], owners, leavers_nbytes)
            if listed is not None:
                return listed
        hints = Hints(indexes, owners)
        listed = self._list_files(lister, indexes, owners, hints)
        in_slabs: dict[ChunkKey, Listed] = {}
        self._pass_slabs(owners)
        for owner, slab, rows in self._rows(owners):
            for row in rows:
                self._keep_better(in_slabs, hints.about_row(row, owner, slab.slot_nbytes))
        if in_slabs:
            for item in listed:
                self._keep_better(in_slabs, item)
            listed = list(in_slabs.values())
        return in_order(listed)

    def _pass_slabs(self, owners: list[str]) -> None:
        if self._gate is not None and not self._slabs.owners().isdisjoint(owners):
            self._gate(0, 1)

    def _rows(self, owners: list[str]) -> Iterator[tuple[str, Slab, list[Row]]]:
        for owner in owners:
            for slab, rows in self._slabs.load(owner, self._stop.is_set):
                if self._stop.is_set():
                    raise ScanStoppedError
                yield owner, slab, rows

    def _enter_unchanged(self, index: Index, owners: list[str], leavers_nbytes: int) -> list[Listed] | None:
        """Count and announce at once what an index lists. Returns what somebody else has counted.

        None, and nothing is counted, if not all of it is ours, lies where the index says and may stay.
        """
        held = [number for owner in index.covers if (number := self._ownership.number_of(owner)) is not None]
        slabs = self._slabs.open_ones(owners)
        if len(held) < len(index.covers) or slabs is None:
            return None
        self._pass_slabs(owners)
        match = located(index, slabs, self._slabs.count, self._rows(owners))
        # What a probe has announced counts twice here: where that is too much, each is weighed by itself.
        most_nbytes = min(self._limit_nbytes(), self._ownership.room_nbytes())
        if match is None or match.nbytes > most_nbytes - leavers_nbytes - self._books.counted_nbytes:
            return None
        self._tally.add("leaves_from_index", sum(map(bool, index.leaf_times_ns.values())))
        return enter(match, held, self._books, self._feed)

    def _keep_better(self, found: dict[ChunkKey, Listed], item: Listed) -> None:
        """A key that was written anew may have its earlier copy still, if a kill came in between."""
        other = found.setdefault(item.key, item)
        if other is not item:
            item, worse = (item, other) if item.order >= other.order else (other, item)
            found[item.key] = item
            self._remove(worse)

    def _list_files(self, lister: Lister, indexes: list[Index], owners: list[str], hints: Hints) -> list[Listed]:
        trusts_any = bool(indexes) and set(owners) <= {owner for index in indexes for owner in index.covers}
        listed: list[Listed] = []
        namespace_fd = open_directory(self._digest.hex(), self._root_fd)
        try:
            for leaf in self._leaves(namespace_fd):
                with leaf_opened(leaf, namespace_fd) as leaf_fd:
                    if leaf_fd is None:
                        continue
                    if trusts_any and all(i.leaf_times_ns[leaf] == os.fstat(leaf_fd).st_mtime_ns for i in indexes):
                        self._tally.add("leaves_from_index")
                        listed += hints.of(leaf)
                    else:
                        listed += lister.chunks(leaf, leaf_fd, hints)
        finally:
            os.close(namespace_fd)
        return listed

    def _list_other(self, lister: Lister, namespace: str) -> Iterator[Leaver]:
        try:
            namespace_fd = open_directory(namespace, self._root_fd)
        except (FileNotFoundError, NotRegularError):
            return
        try:
            yield from lister.slab_leavers(namespace, namespace_fd)
            for leaf in self._leaves(namespace_fd, gated=False):
                with leaf_opened(leaf, namespace_fd) as leaf_fd:
                    if leaf_fd is not None:
                        yield from lister.leavers(namespace, leaf, leaf_fd)
        finally:
            os.close(namespace_fd)

    def _leaves(self, namespace_fd: int, *, gated: bool = True) -> Iterator[str]:
        """Names of leaf directories; those that somebody waits for first."""
        with entries_in(namespace_fd) as entries:
            left = dict.fromkeys(sorted(e.name for e in entries if e.name in _LEAF_SET))
        total = len(left)
        while left:
            if self._stop.is_set():
                raise ScanStoppedError
            if gated and self._gate is not None:
                self._gate(total - len(left), total)
            wanted = self._front.popleft() if gated and self._front else next(iter(left))
            if wanted in left:
                del left[wanted]
                yield wanted

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
                self._remove(item)
        return fresh

    def _settle_trust(
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
            if owner not in with_files:
                self._slabs.retire(owner)
        if trusted:
            self._ownership.hand_back({owner: other_nbytes[owner] for owner in with_files})
        for owner in trusted:
            self._slabs.forget(owner)
        ours = set(self._ownership.held_ids())
        return [i for i in listed if i.owner in ours], [i for i in leavers if i.owner in ours]

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

    def _limit_nbytes(self) -> int:
        """What ours may occupy; before the first scan has ended our own reservation says nothing yet."""
        return self._books.limit_nbytes if self.writable else self._ownership.share_nbytes

    def _enter(self, listed: list[Listed], leavers: list[Leaver]) -> None:
        """Trim ours to the limit, coldest first, then count what stays and announce it."""
        books, limit_nbytes = self._books, self._limit_nbytes()
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

    def _trim(self, listed: list[Listed], excess: int) -> tuple[list[Listed], int]:
        """Remove the coldest until ``excess`` bytes are gone; what a probe has announced meanwhile stays."""
        if excess <= 0:
            return listed, excess
        staying = []
        for item in listed:
            if excess > 0 and self._books.claim(item.key, item.owner):
                self._remove(item)
                self._tally.add("trimmed")
                excess -= item.nbytes
            else:
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

    def _remove(self, item: Listed) -> None:
        try:
            held = Held(0, item.nbytes, item.at)  # the number is of the owner, who is told beside it
            self._store.remove(item.key, item.owner, held, keep_slot=False)
        except OSError as error:
            _log.warning("%s: cannot remove a chunk file to make room: %s", self._name, error)
            name = file_name(item.key, item.owner)
            self._leftovers.add(leaf_of(item.key), name, (name,), item.nbytes)

    def _release_empty(self, owners: Sequence[str], listed: Sequence[Listed], leavers: Sequence[Leaver]) -> None:
        used = {item.owner for item in listed} | {leaver.owner for leaver in leavers}
        idle = [owner for owner in owners if owner not in used and owner not in self._ownership.own_ids]
        counted = {self._ownership.ids[number] for number in self._books.numbers()} if idle else set()
        for owner in idle:
            if owner not in counted and self._slabs.retire(owner):
                self._ownership.release(owner)
