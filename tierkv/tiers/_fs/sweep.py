"""Removal from a root from outside, with or without engines running on it.

Who owns what changes only under the root's lock. So removals go in short turns: take that lock, look who lives, remove
for some milliseconds, let go. An engine that starts meanwhile waits for one turn, and the next turn sees it alive.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import Final, NamedTuple

from tierkv.tiers._fs.dirs import directory, names_in, unlink, unlink_quietly
from tierkv.tiers._fs.format import LEAVES, PAGE_NBYTES, ROOT_LOCK, is_namespace_dir, parse_owner_file
from tierkv.tiers._fs.found import Found, found_at
from tierkv.tiers._fs.inspection import Owner, Root
from tierkv.tiers._fs.page import processes

SPEAK_S: Final = 2.0
"""Two heartbeats: a living owner whose lock file was removed by hand has made it anew by then."""
_TURN_S: Final = 0.02
_BETWEEN_TURNS_S: Final = 0.006
"""Engines look every 2 ms whether the root's lock is free."""
_BATCH: Final = 256


class Census:
    """Who was there at one instant.

    Args:
        owners: all lock files.
        orphans: ids in file names whose owners had no lock file two heartbeats long.
    """

    def __init__(self, owners: Sequence[Owner], orphans: frozenset[str] = frozenset()) -> None:
        self.owners = owners
        self._living = {owner.id: owner for owner in owners if owner.alive}
        self._dead = {owner.id for owner in owners if not owner.alive} | (orphans - self._living.keys())

    def is_dead(self, owner: str) -> bool:
        """Surely dead: an id without a lock file may live until it was given time to speak."""
        return owner in self._dead

    def users(self, namespace: str | None = None) -> list[Owner]:
        """Living processes, or those that read a namespace; one that has not said what it reads reads everything."""
        return [
            owner
            for owner in self._living.values()
            if owner.page is None
            or (
                (owner.page.holder == owner.id or owner.page.holder not in self._living)
                and namespace in (None, owner.page.namespace)
            )
        ]

    @property
    def read_by_nobody(self) -> Callable[[str], bool]:
        """Whether no living process reads a namespace."""
        users = self.users()
        if any(owner.page is None for owner in users):
            return lambda _namespace: False
        read = {owner.page.namespace for owner in users if owner.page is not None}
        return lambda namespace: namespace not in read


class Fate(StrEnum):
    """What became of something that was to be removed."""

    REMOVED = "removed"
    SPARED = "spared"
    """Somebody alive owns it by now, or it is another file by now."""
    GONE = "gone"
    STAYS = "stays"
    """The file system refused."""


class Swept(NamedTuple):
    """One removal, done or not."""

    found: Found
    why: str
    fate: Fate
    error: OSError | None = None


@dataclass(frozen=True, slots=True)
class Broom:
    """Removes what it is handed from one root.

    Args:
        may: asked in every turn, of each file: whether it may be removed, given who lives now. Whatever it raises ends
            the sweep.
        changed_too: also what is no longer the file that was found.
        orphans: as :class:`Census`.
    """

    root: Root
    may: Callable[[Census, Found], bool]
    changed_too: bool = False
    orphans: frozenset[str] = frozenset()

    def sweep(self, items: Iterable[tuple[Found, str]]) -> Iterator[Swept]:
        """Remove each; memory does not grow with them. Raises TimeoutError as :meth:`Root.held`."""
        source = iter(items)
        while batch := deque(islice(source, _BATCH)):
            while batch:
                yield from self._turn(batch)
                time.sleep(_BETWEEN_TURNS_S)

    def _turn(self, batch: deque[tuple[Found, str]]) -> list[Swept]:
        done: list[Swept] = []
        with self.root.held(make_lock=True) as owners:
            census, until = Census(owners, self.orphans), time.monotonic() + _TURN_S
            while batch and (not done or time.monotonic() < until):
                found, why = batch[0]
                if self.may(census, found):
                    done.append(self._remove(found, why))
                else:
                    done.append(Swept(found, why, Fate.SPARED))
                batch.popleft()
        return done

    def _remove(self, found: Found, why: str) -> Swept:
        namespace, leaf, name = _parts(found.place)
        try:
            with directory(namespace, self.root.fd) as namespace_fd:
                if namespace_fd is None:
                    return Swept(found, why, Fate.GONE)
                if not leaf:  # a slab, as a whole
                    unlink(name, namespace_fd)
                else:
                    with directory(leaf, namespace_fd) as leaf_fd:
                        if leaf_fd is None:
                            return Swept(found, why, Fate.GONE)
                        if not self.changed_too:
                            now = found_at(namespace, leaf, name, os.stat(name, dir_fd=leaf_fd, follow_symlinks=False))
                            if now != found:
                                return Swept(found, why, Fate.SPARED)
                        unlink(name, leaf_fd)
        except FileNotFoundError:
            return Swept(found, why, Fate.GONE)
        except OSError as error:
            return Swept(found, why, Fate.STAYS, error)
        return Swept(found, why, Fate.REMOVED)


def _parts(place: str) -> tuple[str, str, str]:
    """Namespace, leaf and name; a slab lies in no leaf."""
    namespace, _, below = place.partition("/")
    leaf, _, name = below.rpartition("/")
    return namespace, leaf, name


def orphans_of(root: Root, found_ids: Iterable[str], sleep: Callable[[float], None] = time.sleep) -> frozenset[str]:
    """Those of the ids in file names that have no lock file, and get none while a living owner would make it anew."""
    missing = frozenset(found_ids) - {owner.id for owner in root.owners()}
    if missing:
        sleep(SPEAK_S)
        missing -= {owner.id for owner in root.owners()}
    return missing


def settle(root: Root, left_nbytes: Mapping[str, int], before: Sequence[Owner]) -> list[Owner]:
    """Make the books of dead owners agree with what is left of their files. Returns the owners that ended.

    Args:
        root: the root.
        left_nbytes: by owner, what its chunk files occupy; an owner without files is not in it.
        before: all owners as they were when the files were counted: who has changed since is left alone.
    """
    ended: list[Owner] = []
    with root.held(make_lock=True) as owners:
        for process in _dead_processes(owners, before):
            ended += _settle_process(root, process, left_nbytes)
        have_lock = {owner.id for owner in owners}
        for parsed in filter(None, map(parse_owner_file, names_in(root.fd))):
            if parsed[0] not in have_lock and parsed[1] != "lock":  # advice for an owner that is no more
                unlink_quietly(f"owner-{parsed[0]}.{parsed[1]}", root.fd)
    return ended


def ending(owners: Sequence[Owner], left_nbytes: Mapping[str, int]) -> list[Owner]:
    """The owners that :func:`settle` would end if nobody came meanwhile."""
    return [owner for process in _dead_processes(owners, owners) for owner in _ending(process, left_nbytes)]


def _dead_processes(owners: Sequence[Owner], before: Sequence[Owner]) -> Iterator[list[Owner]]:
    """The owners of each process that is dead and was so before, in the same state."""
    as_counted = {owner.id: owner for owner in owners if not owner.alive and owner in before}
    for ids in processes({owner.id: owner.holder for owner in owners}):
        if as_counted.keys() >= set(ids):
            yield [as_counted[owner] for owner in ids]


def _ending(owners: Sequence[Owner], left_nbytes: Mapping[str, int]) -> list[Owner]:
    """Those of one dead process that have left nothing; none of them while another has files and no page to say so."""
    if any(owner.page is None and owner.id in left_nbytes for owner in owners):
        return []
    return [owner for owner in owners if owner.id not in left_nbytes]


def _settle_process(root: Root, owners: Sequence[Owner], left_nbytes: Mapping[str, int]) -> list[Owner]:
    """The owners of one process that is dead, one of whose pages speaks for all. Returns those that ended."""
    for owner in owners:
        unlink_quietly(f"owner-{owner.id}.index.part", root.fd)
    ended = _ending(owners, left_nbytes)
    words = [
        (left_nbytes[owner.id] + owner.charge_nbytes - owner.page.reserved_nbytes, owner)
        for owner in owners
        if owner.id in left_nbytes and owner.page is not None
    ]
    if len(words) + len(ended) < len(owners):
        return []  # one has files and no page to say so
    # What speaks for the others is lowered, or goes, when they speak for themselves.
    for more_nbytes, owner in sorted(words, key=lambda word: word[0], reverse=True):
        assert owner.page is not None
        if more_nbytes < 0 or len(owners) > 1:
            _write_page(root, owner, owner.page.reserved_nbytes + more_nbytes)
    for owner in ended:
        for kind in ("index", "lock"):
            unlink_quietly(f"owner-{owner.id}.{kind}", root.fd)
    return ended


def _write_page(root: Root, owner: Owner, nbytes: int) -> None:
    """What a dead owner holds is not taken from the living any more."""
    assert owner.page is not None
    page = replace(owner.page, holder=owner.id, reserved_nbytes=nbytes, used_nbytes=nbytes)
    fd = os.open(f"owner-{owner.id}.lock", os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=root.fd)
    try:
        os.pwrite(fd, page.pack().ljust(PAGE_NBYTES), 0)
    finally:
        os.close(fd)


def remove_directories(root: Root, namespace: str | None) -> None:
    """Our empty directories, and the root's lock if there is no owner left; what a living process reads stays."""
    with root.held(make_lock=True) as owners:
        census = Census(owners)
        for name in names_in(root.fd):
            if not is_namespace_dir(name) or namespace not in (None, name) or census.users(name):
                continue
            with directory(name, root.fd) as namespace_fd:
                if namespace_fd is None:
                    continue
                for leaf in set(names_in(namespace_fd)).intersection(LEAVES):
                    with contextlib.suppress(OSError):  # not empty, or none of ours
                        os.rmdir(leaf, dir_fd=namespace_fd)
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=root.fd)
        if not any(map(parse_owner_file, names_in(root.fd))):
            unlink_quietly(ROOT_LOCK, root.fd)
