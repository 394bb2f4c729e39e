"""What is on the root already: list it, and hand it over to be brought under the limit and counted (settle.py).

A scan runs on its own thread: once at open over everything, later over the files of a dead owner whose ids we took.
Leaves that nothing changed since a clean close come from the index; the others are listed, by name and size alone.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tierkv.errors import TierError
from tierkv.tiers._fs.books import Books, Leaver
from tierkv.tiers._fs.catalogue import Row
from tierkv.tiers._fs.dirs import NotRegularError, entries_in, open_directory
from tierkv.tiers._fs.feed import Feed, Listed
from tierkv.tiers._fs.file_io import Tally
from tierkv.tiers._fs.format import LEAVES
from tierkv.tiers._fs.index import Index, read_indexes
from tierkv.tiers._fs.leftovers import Leftovers
from tierkv.tiers._fs.listing import Hints, Lister, in_order, leaf_opened, namespaces, total_nbytes
from tierkv.tiers._fs.owners import Ownership
from tierkv.tiers._fs.settle import Settlement
from tierkv.tiers._fs.slab import Slab
from tierkv.tiers._fs.slabs import Slabs
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
    """Lists a root, once or again.

    Concurrency: ``first`` and ``adopted`` on the scan's one thread; the rest from any.
    """

    def __init__(
        self, name: str, root_fd: int, *, digest: bytes, slabs: Slabs, books: Books, ownership: Ownership, feed: Feed,
        settlement: Settlement, leftovers: Leftovers, tally: Tally, gate: Gate | None, refresh: Callable[[], None],
    ) -> None:  # fmt: skip
        self._name = name
        self._root_fd = root_fd
        self._digest = digest
        self._slabs = slabs
        self._books = books
        self._ownership = ownership
        self._feed = feed
        self._settlement = settlement
        self._leftovers = leftovers
        self._tally = tally
        self._gate = gate
        self._refresh = refresh
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
            self._settlement.writable = True

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
        lister = Lister(self._ownership, self._tally, set(everybody), self._leftovers, adopts=first, wait=self._wait)
        mine = self._digest.hex()
        for namespace in sorted(namespaces(self._root_fd), key=mine.__eq__):
            if namespace == mine:
                listed = self._list_mine(lister, indexes, everybody, total_nbytes((), leavers))
            else:
                leavers += self._list_other(lister, namespace)
        leavers.sort()
        if trusted is not None:
            listed, leavers = self._settlement.settle_trust(trusted, listed, leavers)
        self._settlement.enter(listed, leavers)
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
        most_nbytes = min(self._settlement.limit_nbytes(), self._ownership.room_nbytes())
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
            self._settlement.put_away(worse)

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

    def _release_empty(self, owners: Sequence[str], listed: Sequence[Listed], leavers: Sequence[Leaver]) -> None:
        used = {item.owner for item in listed} | {leaver.owner for leaver in leavers}
        idle = [owner for owner in owners if owner not in used and owner not in self._ownership.own_ids]
        counted = {self._ownership.ids[number] for number in self._books.numbers()} if idle else set()
        for owner in idle:
            if owner not in counted and self._slabs.retire(owner):
                self._ownership.release(owner)
