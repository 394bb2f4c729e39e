"""Directories of a root: what lies in them, and what the index says about it."""

from __future__ import annotations

import contextlib
import heapq
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Final

from tierkv.tiers._fs.books import Leaver
from tierkv.tiers._fs.catalogue import SLAB, Row, SlabName, allocated_nbytes, parse_slab_name, slab_name
from tierkv.tiers._fs.dirs import NotRegularError, entries_in, open_directory, unlink_first, unlink_quietly
from tierkv.tiers._fs.feed import BATCH, Listed
from tierkv.tiers._fs.file_io import Tally, damage
from tierkv.tiers._fs.format import (
    LEAVES,
    PAGE_NBYTES,
    FileName,
    file_name,
    is_namespace_dir,
    leaf_of,
    padded_nbytes,
    parse_file_name,
)
from tierkv.tiers._fs.index import Index, Span
from tierkv.tiers._fs.leftovers import Leftovers
from tierkv.tiers._fs.owners import Ownership
from tierkv.types import ChunkKey

_LAST_INDEXED: Final = 2.0
"""Order of files: indexed ones by their place in it, from 1 to 2; the others by their time, after those."""


IN_SLAB: Final = -1


class Hints:
    """What the indexes say, by leaf."""

    def __init__(self, indexes: Sequence[Index], owners: Sequence[str]) -> None:
        self._indexes = indexes
        self._owners = frozenset(owners)

    @cached_property
    def _known(self) -> dict[ChunkKey, Listed]:
        return {item.key: item for index in self._indexes for item in listed_in(index)}

    @cached_property
    def _by_leaf(self) -> dict[str, list[Listed]]:
        leaves: dict[str, list[Listed]] = {}
        for item in (item for index in self._indexes for item in listed_in(index)):
            if item.owner in self._owners and item.at is None:
                leaves.setdefault(leaf_of(item.key), []).append(item)
        return leaves

    def of(self, leaf: str) -> list[Listed]:
        return self._by_leaf.get(leaf, [])

    def about(self, key: ChunkKey, owner: str, found: os.stat_result) -> Listed:
        """A file that was found in a directory, with what the index knows of its key."""
        known = self._known.get(key)
        if known is None:
            return Listed(_LAST_INDEXED + found.st_mtime_ns * 1e-9, key, owner, found.st_size, None, 0)
        return known._replace(owner=owner, nbytes=found.st_size, at=None)

    def about_row(self, row: Row, owner: str, slot_nbytes: int) -> Listed:
        """A chunk that was found in a slab, with what the index knows of its key."""
        known = self._known.get(row.key)
        if known is None:
            return Listed(_LAST_INDEXED + row.used_s, row.key, owner, slot_nbytes, None, 0, row.slot)
        return known._replace(owner=owner, nbytes=slot_nbytes, at=row.slot)


def listed_in(index: Index, span: Span | None = None) -> Iterator[Listed]:
    """What an index lists, or a part of it, coldest first; what it has in slabs is ``IN_SLAB`` for a slot."""
    step = 1.0 / max(1, len(index))
    for part in index.spans(BATCH) if span is None else (span,):
        places = enumerate(zip(part.keys, part.ids, part.pages, part.in_slab, strict=True), part.first)
        for place, (key, i, pages, in_slab) in places:
            at = IN_SLAB if in_slab else None
            yield Listed(1.0 + place * step, key, index.covers[i], pages * PAGE_NBYTES, index, place, at)


def in_order(listed: list[Listed]) -> list[Listed]:
    """Sorted, coldest first, in pieces: one sort of a million items would hold the GIL for a second."""
    pieces = [sorted(listed[at : at + BATCH]) for at in range(0, len(listed), BATCH)]
    return list(heapq.merge(*pieces))


def total_nbytes(listed: Sequence[Listed], leavers: Sequence[Leaver]) -> int:
    """What all of them occupy."""
    return sum(item.nbytes for item in listed) + sum(leaver.nbytes for leaver in leavers)


def leaf_times_ns(namespace_fd: int) -> dict[str, int]:
    """When each leaf directory last changed; 0 where there is none, or none that we may look at: then it is listed."""
    return {leaf: _time_ns(leaf, namespace_fd) for leaf in LEAVES}


def _time_ns(leaf: str, namespace_fd: int) -> int:
    try:
        return os.stat(leaf, dir_fd=namespace_fd, follow_symlinks=False).st_mtime_ns
    except OSError:  # a close does not fail because somebody took the directory away
        return 0


class Lister:
    """Goes through one directory and puts away what is unfinished or broken. Touches only files with our ids.

    Args:
        leftovers: takes what should have gone and could not be removed.
        adopts: files of owners without a lock file are ours from now on.
        wait: long enough for a living owner whose lock file was removed to make it anew.
    """

    def __init__(
        self, ownership: Ownership, tally: Tally, owners: set[str], leftovers: Leftovers, *, adopts: bool,
        wait: Callable[[], None],
    ) -> None:  # fmt: skip
        self._ownership = ownership
        self._tally = tally
        self._owners = owners
        self._leftovers = leftovers
        self._adopt_orphans = adopts
        self._let_owners_speak = wait
        self._has_waited = False
        self._known = {*owners, *ownership.held_ids(), *ownership.foreign_ids}

    def chunks(self, leaf: str, leaf_fd: int, hints: Hints) -> list[Listed]:
        """Whole files of ours in a leaf of our namespace, one a key."""
        best: dict[ChunkKey, Listed] = {}
        for name, parsed, found, is_chunk in self._ours(leaf_fd):
            if not is_chunk:
                self._leave(leaf, parsed, name, found)
                continue
            if leaf_of(parsed.key) != leaf:
                self._tally.add("corrupt")  # moved here by hand: no lookup would ever find it
                if not unlink_first((name,), leaf_fd):
                    self._leave(leaf, parsed, name, found)
                continue
            item = hints.about(parsed.key, parsed.owner, found)
            other = best.get(parsed.key)
            if other is not None:
                item, worse = (item, other) if item.order >= other.order else (other, item)
                its_name = file_name(worse.key, worse.owner)
                if not unlink_first((its_name,), leaf_fd):
                    self._leftovers.add(leaf, its_name, (its_name,), worse.nbytes)
            best[item.key] = item
        return list(best.values())

    def leavers(self, namespace: str, leaf: str, leaf_fd: int) -> Iterator[Leaver]:
        """Files of ours in a leaf of another namespace, also those that should have gone and could not be removed."""
        for name, parsed, found, _ in self._ours(leaf_fd):
            yield Leaver(found.st_mtime_ns, namespace, leaf, name, parsed.owner, padded_nbytes(found.st_size))

    def _leave(self, leaf: str, parsed: FileName, name: str, found: os.stat_result) -> None:
        """What is of no use and cannot be removed counts until it can."""
        self._leftovers.add(leaf, file_name(parsed.key, parsed.owner), (name,), padded_nbytes(found.st_size))

    def slab_leavers(self, namespace: str, namespace_fd: int) -> Iterator[Leaver]:
        """Slabs of ours in another namespace, each with its catalogue."""
        with entries_in(namespace_fd) as entries:
            names = [(entry.name, parsed) for entry in entries if (parsed := parse_slab_name(entry.name)) is not None]
        nbytes: Counter[SlabName] = Counter()
        time_ns: Counter[SlabName] = Counter()
        for name, parsed in names:
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=namespace_fd, follow_symlinks=False)
                slab = SlabName(parsed.owner, parsed.slot_nbytes, SLAB, False)
                nbytes[slab] += allocated_nbytes(found)
                time_ns[slab] = max(time_ns[slab], found.st_mtime_ns)
        for slab in nbytes:
            owner = slab.owner
            if owner not in self._owners:
                if not self._adopt_orphans or owner in self._known or not self._is_orphan(owner):
                    continue
                owner = self._ownership.id
            name = slab_name(slab.owner, slab.slot_nbytes, SLAB)
            yield Leaver(time_ns[slab], namespace, "", name, owner, nbytes[slab])

    def _ours(self, leaf_fd: int) -> Iterator[tuple[str, FileName, os.stat_result, bool]]:
        """Files with our ids, and whether each may be a chunk: what is none has been removed, or is told of."""
        with os.scandir(leaf_fd) as entries:  # opened for this listing alone
            for entry in entries:
                parsed = parse_file_name(entry.name)
                if parsed is None:
                    continue
                name = entry.name
                if parsed.owner not in self._owners:
                    orphan = self._adopt_orphans and parsed.owner not in self._known
                    if not orphan or not self._take_orphan(name, parsed, leaf_fd):
                        continue
                    parsed = parsed._replace(owner=self._ownership.id)
                    name = file_name(parsed.key, parsed.owner)
                try:
                    found = os.stat(name, dir_fd=leaf_fd, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                what = "unfinished" if parsed.is_part else damage(found)
                if what is None:
                    yield name, parsed, found, True
                    continue
                self._tally.add(what)
                if not unlink_first((name,), leaf_fd) and stat.S_ISREG(found.st_mode):
                    yield name, parsed, found, False

    def _take_orphan(self, name: str, parsed: FileName, leaf_fd: int) -> bool:
        """A file whose owner has no lock file any more becomes ours by a new name."""
        if not self._is_orphan(parsed.owner):
            return False
        if parsed.is_part:
            unlink_quietly(name, leaf_fd)
            return False
        os.rename(name, file_name(parsed.key, self._ownership.id), src_dir_fd=leaf_fd, dst_dir_fd=leaf_fd)
        self._tally.add("orphans")
        return True

    def _is_orphan(self, owner: str) -> bool:
        """False if it joined since we looked, or lives and somebody had removed its lock file."""
        if not self._has_waited:
            self._has_waited = True
            self._let_owners_speak()
        return not self._ownership.has_lock_file(owner)


class leaf_opened:  # noqa: N801 - reads as the function it would be, were generators as cheap
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


def namespaces(root_fd: int) -> list[str]:
    with entries_in(root_fd) as entries:
        return [e.name for e in entries if is_namespace_dir(e.name) and e.is_dir(follow_symlinks=False)]
