"""Copies between device and primary that vLLM was told to run: their tickets, and the slots that they keep.

vLLM tells of a job's end by its keys; the workers tell of it on the control page, by ticket. A store counts by its
stamps alone. What nobody waits for any more, because a reset came between, keeps its slots here until the stamps show
that every copy on them has ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

from tierkv._hierarchy import Hierarchy
from tierkv._ledger import Entry
from tierkv.types import ChunkKey, Reason
from tierkv.vllm._control import ControlPage, CopyStatus, Direction
from tierkv.vllm._requests import Request
from tierkv.vllm._spec_types import SlotSpec

_STORE = Direction.STORE  # to look it up in its class takes as long as to read a stamp
_make_job = tuple.__new__  # half the cost of StoreJob(...), which a request in pieces of 1 pays each time
_Name = ChunkKey | frozenset[ChunkKey]
"""What an open job is found by: all of its keys, or its only one."""


class StoreJob(NamedTuple):
    """Entries in the order in which they were given room, and their slots."""

    ticket: int
    entries: Sequence[Entry]
    slots: Sequence[int]
    request: Request


class LoadJob(NamedTuple):
    ticket: int
    entries: list[Entry]


class Abandoned(NamedTuple):
    """A copy that runs on although nobody waits for it."""

    direction: Direction
    ticket: int
    entry: Entry


class Jobs:
    """All open jobs. One thread's, like the hierarchy.

    Args:
        hierarchy: whose primary the slots are.
        only_group: the engine's KV-cache group where it has but one.
    """

    def __init__(self, hierarchy: Hierarchy, only_group: int | None = None) -> None:
        self._hierarchy = hierarchy
        self._only_group = only_group
        # One counter for all slots: a number that rises over all of them rises on each of them.
        self._tickets = itertools.count(1)
        # By their keys, which is all that vLLM says when one has ended. A key has one open store; but equal loads may
        # run at once.
        self._stores: dict[_Name, StoreJob] = {}
        self._loads: dict[_Name, list[LoadJob]] = {}
        self.abandoned: list[Abandoned] = []
        """Copies that run on although nobody waits for them."""

    # -- begin --------------------------------------------------------------------------------------------------

    def open_store(
        self, entries: Sequence[Entry], request: Request, generation: int
    ) -> tuple[list[ChunkKey], SlotSpec]:
        """Draw a ticket for a store into reserved slots; ``entries`` in the order of the keys that vLLM will copy."""
        if len(entries) == 1:
            return [entries[0].key], self.open_store_of_one(entries[0], request, generation)
        ticket, group = next(self._tickets), self._only_group
        keys, slots = [entry.key for entry in entries], tuple([entry.slot for entry in entries])
        groups = tuple([entry.group for entry in entries]) if group is None else (group,) * len(slots)
        self._stores[frozenset(keys)] = _make_job(StoreJob, (ticket, entries, slots, request))
        return keys, SlotSpec(slots, (ticket,) * len(slots), generation, groups)

    def open_store_of_one(self, entry: Entry, request: Request, generation: int) -> SlotSpec:
        """:meth:`open_store` for one entry: what a request in pieces of 1 pays each time."""
        ticket, slots = next(self._tickets), (entry.slot,)
        self._stores[entry.key] = _make_job(StoreJob, (ticket, (entry,), slots, request))
        return SlotSpec(slots, (ticket,), generation, (entry.group,))

    def open_load(self, keys: Collection[ChunkKey], entries: list[Entry], generation: int) -> SlotSpec:
        """Draw a ticket for a load; pins every entry until :meth:`close_load`."""
        ticket, group, name = next(self._tickets), self._only_group, _name(keys)
        each_once = isinstance(name, frozenset) and len(name) == len(entries)
        pinned = entries if each_once else [*dict.fromkeys(entries)]
        self._hierarchy.primary.hold(*pinned)
        self._loads.setdefault(name, []).append(LoadJob(ticket, pinned))
        slots = tuple([entry.slot for entry in entries])
        groups = tuple([entry.group for entry in entries]) if group is None else (group,) * len(slots)
        return SlotSpec(slots, (ticket,) * len(slots), generation, groups)

    # -- end ----------------------------------------------------------------------------------------------------

    def close_store(
        self, keys: Collection[ChunkKey], page: ControlPage | None
    ) -> Sequence[tuple[StoreJob, Sequence[Entry]]]:
        """These stores have ended, says vLLM: commit those whose stamps all say so, drop the others.

        Returns:
            The dropped entries, by job, oldest first. Keys without an open job are ignored: they are late.
        """
        name: _Name
        if len(keys) == 1:  # what a request in pieces of 1 pays each time
            (name,) = keys
        else:
            name = _name(keys)
        job = self._stores.pop(name, None)
        if job is None:
            return self._close_in_part(keys, page)
        if page is not None and page.all_ok(_STORE, job.slots, job.ticket):
            self._hierarchy.commit_store(job.entries)
            return ()
        bad = self._commit_good(job, page)
        return [(job, bad)] if bad else ()

    def _close_in_part(
        self, keys: Collection[ChunkKey], page: ControlPage | None
    ) -> Sequence[tuple[StoreJob, Sequence[Entry]]]:
        """:meth:`close_store` for keys that are not one job's: of each job that has some of them, those have ended."""
        dropped: list[tuple[StoreJob, Sequence[Entry]]] = []
        for name, job in list(self._stores.items()):
            ended = [entry for entry in job.entries if entry.key in keys]
            if not ended:
                continue
            del self._stores[name]
            rest = [entry for entry in job.entries if entry.key not in keys]
            if rest:
                self._stores[_name([entry.key for entry in rest])] = _part(job, rest)
            dropped.append((job, self._commit_good(_part(job, ended), page)))
        return sorted([each for each in dropped if each[1]], key=lambda each: each[0].ticket)

    def close_load(self, keys: Collection[ChunkKey]) -> None:
        """A load has ended on every rank, says vLLM. Keys without an open load are ignored: they are late."""
        name = _name(keys)
        jobs = self._loads.pop(name, None)
        if jobs is None:
            return
        job = jobs.pop(0)
        if jobs:
            self._loads[name] = jobs
        self._hierarchy.release(*job.entries)

    def abandon(self) -> None:
        """A reset: forget every open job, but let no slot go before its copy has ended."""
        for store in self._stores.values():
            self._abandon_stores(store.ticket, store.entries, Reason.RESET)
        for job in (job for jobs in self._loads.values() for job in jobs):
            self.abandoned += [Abandoned(Direction.LOAD, job.ticket, entry) for entry in job.entries]
        self._stores.clear()
        self._loads.clear()

    def sweep(self, page: ControlPage | None) -> None:
        """Let go of abandoned slots whose stamps have come."""
        if not self.abandoned or page is None:
            return
        waiting = []
        for copy in self.abandoned:
            if not page.ended(copy.entry.slot, copy.direction, copy.ticket):
                waiting.append(copy)
            elif copy.direction is Direction.STORE:
                self._hierarchy.abort_store((copy.entry,), Reason.RESET)
            else:
                self._hierarchy.release(copy.entry)
        self.abandoned = waiting

    # -- inside -------------------------------------------------------------------------------------------------

    def _commit_good(self, job: StoreJob, page: ControlPage | None) -> Sequence[Entry]:
        """Commit the entries whose copies went well on every rank; the others, dropped, are returned."""
        ticket, entries, slots, _ = job
        if page is None:
            self._abandon_stores(ticket, entries, Reason.DEVICE_ERROR)
            return entries
        statuses = page.statuses(_STORE, slots, [ticket] * len(entries))
        bad: list[Entry] = []
        for entry, status in zip(entries, statuses, strict=True):
            if status is CopyStatus.OK:
                self._hierarchy.commit_store((entry,))
                continue
            bad.append(entry)
            if status is CopyStatus.FAILED:
                self._hierarchy.abort_store((entry,), Reason.DEVICE_ERROR)
            else:
                self._abandon_stores(ticket, (entry,), Reason.DEVICE_ERROR)
        return bad

    def _abandon_stores(self, ticket: int, entries: Sequence[Entry], reason: Reason) -> None:
        self._hierarchy.abort_store(entries, reason, ended=False)
        self.abandoned += [Abandoned(Direction.STORE, ticket, entry) for entry in entries]


def _part(job: StoreJob, entries: Sequence[Entry]) -> StoreJob:
    return job._replace(entries=entries, slots=[entry.slot for entry in entries])


def _name(keys: Collection[ChunkKey]) -> _Name:
    if len(keys) != 1:
        name = frozenset(keys)
        if len(name) != 1:
            return name
        keys = name
    (key,) = keys
    return key
