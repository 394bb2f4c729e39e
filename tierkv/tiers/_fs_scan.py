"""What is on the root already: list it, bring it under the limit, and only then let it into the books and the feed.

A scan runs on its own thread: once at open over everything, later over the files of a dead owner whose ids we took.
Leaves that nothing changed since a clean close come from the index; the others are listed, by name and size alone.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tierkv.tiers._fs_books import Books, Leaver
from tierkv.tiers._fs_feed import Feed, Listed
from tierkv.tiers._fs_format import (
    LEAVES,
    FileName,
    file_name,
    is_namespace_dir,
    leaf_of,
    padded_nbytes,
    parse_file_name,
)
from tierkv.tiers._fs_index import BadIndexError, Index, take_index
from tierkv.tiers._fs_io import ChunkFiles, NotRegularError, Tally, is_whole, open_directory, unlink_quietly
from tierkv.tiers._fs_owners import Seat
from tierkv.types import Chunk, ChunkKey

_log = logging.getLogger(__name__)

_RETRY_S: Final = 1.0
Gate = Callable[[int, int], None]
"""Called before each leaf with (leaves done, leaves in all); a test holds the scan by not returning."""

_LAST_INDEXED: Final = 2.0
"""Order of files: indexed ones by their place in it, from 1 to 2; the others by their time, after those."""


class ScanStoppedError(Exception):
    """The tier closes: the scan ends where it is."""


class Scanner:
    """Lists a root, trims it and hands over what stays.

    Attributes:
        writable: True once the total is known and under the limit.

    Concurrency: ``first`` and ``adopted`` on the scan's one thread; the rest from any.
    """

    def __init__(
        self, name: str, root_fd: int, *, digest: bytes, files: ChunkFiles, books: Books, seat: Seat, feed: Feed,
        tally: Tally, gate: Gate | None,
    ) -> None:  # fmt: skip
        self.writable = False
        self._name = name
        self._root_fd = root_fd
        self._digest = digest
        self._files = files
        self._books = books
        self._seat = seat
        self._feed = feed
        self._tally = tally
        self._gate = gate
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
        """The scan at open: every file of ours, in every namespace."""
        if self._until_done(self._seat.held_ids(), first=True):
            self.writable = True

    def adopted(self, owners: Sequence[str]) -> None:
        """A scan for the files of owners that died while we live."""
        self._until_done(list(owners), first=False)

    def _until_done(self, owners: list[str], *, first: bool) -> bool:
        """Scan, again and again if the file system refuses: a leaf left out would be bytes that nobody counts."""
        while not self._stop.is_set():
            try:
                self._scan(owners, first=first)
                return True
            except ScanStoppedError:
                return False
            except OSError as error:
                if self._tally.add("failed_scans") == 1:
                    _log.warning("%s: cannot list the root (%s), trying again every second", self._name, error)
                self._stop.wait(_RETRY_S)
        return False

    def _scan(self, owners: list[str], *, first: bool) -> None:
        indexes = self._take_indexes(owners)
        listed: list[Listed] = []
        leavers: list[Leaver] = []
        lister = _Lister(self._seat, self._tally, set(owners), adopt_orphans=first)
        mine = self._digest.hex()
        for namespace in _namespaces(self._root_fd):
            if namespace == mine:
                listed = self._list_mine(lister, indexes, owners)
            else:
                leavers += self._list_other(lister, namespace)
        self._enter(listed, leavers)
        self._books.end_scan(sum(self._seat.reserved_of.pop(owner, 0) for owner in owners))
        self._release_empty(owners, listed, leavers)

    def _take_indexes(self, owners: Sequence[str]) -> list[Index]:
        indexes = []
        for owner in owners:
            try:
                index = take_index(self._root_fd, owner, self._digest)
            except BadIndexError as error:
                self._tally.add("bad_index")
                _log.info("%s: ignoring the index of owner %s (%s), listing the tree", self._name, owner, error)
            else:
                indexes += [] if index is None else [index]
        return indexes

    def _list_mine(self, lister: _Lister, indexes: list[Index], owners: list[str]) -> list[Listed]:
        hints = _Hints(indexes, self._seat)
        trusts_any = bool(indexes) and set(owners) <= {owner for index in indexes for owner in index.covers}
        listed: list[Listed] = []
        namespace_fd = open_directory(self._digest.hex(), self._root_fd)
        try:
            for leaf in self._leaves(namespace_fd):
                with _leaf_opened(leaf, namespace_fd) as leaf_fd:
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

    def _list_other(self, lister: _Lister, namespace: str) -> Iterator[Leaver]:
        try:
            namespace_fd = open_directory(namespace, self._root_fd)
        except (FileNotFoundError, NotRegularError):
            return
        try:
            for leaf in self._leaves(namespace_fd, gated=False):
                with _leaf_opened(leaf, namespace_fd) as leaf_fd:
                    if leaf_fd is not None:
                        yield from lister.leavers(namespace, leaf, leaf_fd)
        finally:
            os.close(namespace_fd)

    def _leaves(self, namespace_fd: int, *, gated: bool = True) -> Iterator[str]:
        """Names of leaf directories; those that somebody waits for first."""
        with os.scandir(namespace_fd) as entries:
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

    def _enter(self, listed: list[Listed], leavers: list[Leaver]) -> None:
        """Trim to the limit, coldest first, then count what stays and announce it."""
        listed.sort(key=lambda item: (item.order, item.key))
        leavers.sort()
        books = self._books
        fresh = []
        for item in listed:
            held = books.get(item.key)
            if held is None:
                fresh.append(item)
            elif held.slot != item.slot:
                self._remove(item)  # we hold the key under another id already: one is enough
        excess = sum(item.nbytes for item in fresh) + sum(leaver.nbytes for leaver in leavers)
        excess += books.counted_nbytes - books.limit_nbytes
        n_leavers, excess = self._trim_leavers(leavers, excess)
        for leaver in leavers[n_leavers:]:
            books.add_leaver(leaver)
        staying = []
        for item in fresh:
            if excess > 0 and books.claim(item.key, item.slot):
                self._remove(item)
                self._tally.add("trimmed")
                excess -= item.nbytes
            elif books.add(item.key, item.slot, item.nbytes) is not None:
                staying.append(item)
        self._feed.put(staying)

    def _trim_leavers(self, leavers: Sequence[Leaver], excess: int) -> tuple[int, int]:
        n = 0
        for leaver in leavers:
            if excess <= 0:
                break
            remove_leaver(self._root_fd, leaver)
            self._tally.add("trimmed")
            excess -= leaver.nbytes
            n += 1
        return n, excess

    def _remove(self, item: Listed) -> None:
        try:
            self._files.remove(item.key, self._seat.ids[item.slot])
        except OSError as error:
            _log.warning("%s: cannot remove a chunk file to make room: %s", self._name, error)
            with self._books.lock:
                self._books.fixed_nbytes += item.nbytes  # it stays, so it counts, though nobody may use it

    def _release_empty(self, owners: Sequence[str], listed: Sequence[Listed], leavers: Sequence[Leaver]) -> None:
        used = {self._seat.ids[item.slot] for item in listed}
        used |= {parsed.owner for leaver in leavers if (parsed := parse_file_name(leaver.name)) is not None}
        for owner in owners:
            if owner not in used and owner != self._seat.id:
                self._seat.release(owner)


class _Hints:
    """What the indexes say, by leaf."""

    def __init__(self, indexes: Sequence[Index], seat: Seat) -> None:
        self._by_leaf: dict[str, list[Listed]] = {}
        self._chunks: dict[ChunkKey, tuple[float, Chunk]] = {}
        for index in indexes:
            slots = {owner: seat.slot_of(owner) for owner in index.covers}
            step = 1.0 / max(1, len(index.entries))
            for place, (owner, nbytes, chunk) in enumerate(index.entries):
                order, slot = 1.0 + place * step, slots[owner]
                self._chunks[chunk.key] = (order, chunk)
                if slot is not None:
                    listed = Listed(order, chunk.key, slot, nbytes, chunk)
                    self._by_leaf.setdefault(leaf_of(chunk.key), []).append(listed)

    def of(self, leaf: str) -> list[Listed]:
        return self._by_leaf.get(leaf, [])

    def about(self, key: ChunkKey, mtime_ns: int) -> tuple[float, Chunk | None]:
        """(order, record) of a file that was listed."""
        known = self._chunks.get(key)
        return known if known is not None else (_LAST_INDEXED + mtime_ns * 1e-9, None)


class _Lister:
    """Goes through one directory and puts away what is unfinished or broken. Touches only files with our ids."""

    def __init__(self, seat: Seat, tally: Tally, owners: set[str], *, adopt_orphans: bool) -> None:
        self._seat = seat
        self._tally = tally
        self._owners = owners
        self._adopt_orphans = adopt_orphans
        self._known = {*seat.held_ids(), *seat.foreign_ids}

    def chunks(self, leaf: str, leaf_fd: int, hints: _Hints) -> list[Listed]:
        """Whole files of ours in a leaf of our namespace, one a key."""
        best: dict[ChunkKey, Listed] = {}
        for name, parsed, found in self._ours(leaf_fd):
            if leaf_of(parsed.key) != leaf:
                self._tally.add("corrupt")  # moved here by hand: no lookup would ever find it
                unlink_quietly(name, leaf_fd)
                continue
            slot = self._seat.slot_of(parsed.owner)
            assert slot is not None
            order, chunk = hints.about(parsed.key, found.st_mtime_ns)
            item = Listed(order, parsed.key, slot, found.st_size, chunk)
            other = best.get(parsed.key)
            if other is not None:
                item, worse = (item, other) if item.order >= other.order else (other, item)
                unlink_quietly(file_name(worse.key, self._seat.ids[worse.slot]), leaf_fd)
            best[item.key] = item
        return list(best.values())

    def leavers(self, namespace: str, leaf: str, leaf_fd: int) -> Iterator[Leaver]:
        """Files of ours in a leaf of another namespace."""
        for name, _, found in self._ours(leaf_fd):
            yield Leaver(found.st_mtime_ns, namespace, leaf, name, padded_nbytes(found.st_size))

    def _ours(self, leaf_fd: int) -> Iterator[tuple[str, FileName, os.stat_result]]:
        with os.scandir(leaf_fd) as entries:
            for entry in entries:
                parsed = parse_file_name(entry.name)
                if parsed is None:
                    continue
                name = entry.name
                if parsed.owner not in self._owners:
                    orphan = self._adopt_orphans and parsed.owner not in self._known
                    if not orphan or not self._take_orphan(name, parsed, leaf_fd):
                        continue
                    parsed = parsed._replace(owner=self._seat.id)
                    name = file_name(parsed.key, parsed.owner)
                found = self._whole(name, parsed, leaf_fd)
                if found is not None:
                    yield name, parsed, found

    def _whole(self, name: str, parsed: FileName, leaf_fd: int) -> os.stat_result | None:
        try:
            found = os.stat(name, dir_fd=leaf_fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if parsed.is_part:
            self._tally.add("unfinished")
        elif not stat.S_ISREG(found.st_mode):
            self._tally.add("not_regular")
        elif not is_whole(found.st_size):
            self._tally.add("corrupt")
        else:
            return found
        unlink_quietly(name, leaf_fd)
        return None

    def _take_orphan(self, name: str, parsed: FileName, leaf_fd: int) -> bool:
        """A file whose owner has no lock file any more becomes ours by a new name."""
        if self._seat.has_lock_file(parsed.owner):
            return False  # joined since we looked
        if parsed.is_part:
            unlink_quietly(name, leaf_fd)
            return False
        os.rename(name, file_name(parsed.key, self._seat.id), src_dir_fd=leaf_fd, dst_dir_fd=leaf_fd)
        self._tally.add("orphans")
        return True


_LEAF_SET: Final = frozenset(LEAVES)


class _leaf_opened:  # noqa: N801 - reads as the function it would be, were generators as cheap
    """Descriptor of a leaf for a ``with`` block; None if it is gone or no directory."""

    def __init__(self, leaf: str, namespace_fd: int) -> None:
        self._leaf = leaf
        self._namespace_fd = namespace_fd
        self._fd: int | None = None

    def __enter__(self) -> int | None:
        try:
            self._fd = open_directory(self._leaf, self._namespace_fd)
        except (FileNotFoundError, NotRegularError):
            self._fd = None
        return self._fd

    def __exit__(self, *exc: object) -> None:
        if self._fd is not None:
            os.close(self._fd)


def remove_leaver(root_fd: int, leaver: Leaver) -> None:
    """Remove a file of ours in another namespace; gone already is as good."""
    try:
        namespace_fd = open_directory(leaver.namespace, root_fd)
    except (FileNotFoundError, NotRegularError):
        return
    try:
        with _leaf_opened(leaver.leaf, namespace_fd) as leaf_fd:
            if leaf_fd is not None:
                unlink_quietly(leaver.name, leaf_fd)
    finally:
        os.close(namespace_fd)


def _namespaces(root_fd: int) -> list[str]:
    with os.scandir(root_fd) as entries:
        return [e.name for e in entries if is_namespace_dir(e.name) and e.is_dir(follow_symlinks=False)]
