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


class StoreJob(NamedTuple):
    """Entries in the order in which they were given room."""

    ticket: int
    entries: list[Entry]
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
        self._stores: dict[ChunkKey, StoreJob] = {}
        # By exactly their keys, which is all that vLLM says when one has ended; equal loads may run at once.
        self._loads: dict[frozenset[ChunkKey], list[LoadJob]] = {}
        self.abandoned: list[Abandoned] = []
        """Copies that run on although nobody waits for them."""

    # -- begin --------------------------------------------------------------------------------------------------

    def open_store(self, entries: list[Entry], request: Request, generation: int) -> SlotSpec:
        """Draw a ticket for a store into reserved slots; ``entries`` in the order of the keys that vLLM will copy."""
        job = StoreJob(next(self._tickets), entries, request)
        stores = self._stores
        for entry in entries:
            stores[entry.key] = job
        return self._spec(job.ticket, entries, generation)

    def open_store_of_one(self, entry: Entry, request: Request, generation: int) -> SlotSpec:
        """:meth:`open_store` for one entry."""
        ticket = next(self._tickets)
        self._stores[entry.key] = StoreJob(ticket, [entry], request)
        return SlotSpec((entry.slot,), (ticket,), generation, (entry.chunk.group,))

    def open_load(self, keys: Collection[ChunkKey], entries: list[Entry], generation: int) -> SlotSpec:
        """Draw a ticket for a load; pins every entry until :meth:`close_load`."""
        job = LoadJob(next(self._tickets), entries)
        self._hierarchy.primary.hold(*entries)
        self._loads.setdefault(frozenset(keys), []).append(job)
        return self._spec(job.ticket, entries, generation)

    def _spec(self, ticket: int, entries: Sequence[Entry], generation: int) -> SlotSpec:
        slots, group = [entry.slot for entry in entries], self._only_group
        groups = [entry.chunk.group for entry in entries] if group is None else (group,) * len(slots)
        return SlotSpec(slots, (ticket,) * len(slots), generation, groups)

    # -- end ----------------------------------------------------------------------------------------------------

    def close_store(self, keys: Collection[ChunkKey], page: ControlPage | None) -> list[tuple[StoreJob, list[Entry]]]:
        """These stores have ended, says vLLM: commit those whose stamps all say so, drop the others.

        Returns:
            The dropped entries, by job, oldest first. Keys without an open job are ignored: they are late.
        """
        if len(keys) == 1:
            (only,) = keys
            job = self._stores.get(only)
            if job is not None and len(job.entries) == 1:
                del self._stores[only]
                return [(job, bad)] if (bad := self._commit(job.ticket, job.entries, page)) else []
        jobs: dict[int, StoreJob] = {}
        closed: list[ChunkKey] = []
        pop, latest = self._stores.pop, None
        for key in keys:  # a set: the order is taken from our own record
            job = pop(key, None)
            if job is not None:
                closed.append(key)
                if job is not latest:
                    latest = jobs[job.ticket] = job
        dropped: list[tuple[StoreJob, list[Entry]]] = []
        for ticket in sorted(jobs) if len(jobs) > 1 else jobs:
            job = jobs[ticket]
            entries = job.entries
            if len(entries) != len(closed) or len(jobs) > 1:
                now = frozenset(closed)
                entries = [entry for entry in entries if entry.key in now]
            bad = self._commit(ticket, entries, page)
            if bad:
                dropped.append((job, bad))
        return dropped

    def close_load(self, keys: Collection[ChunkKey]) -> None:
        """A load has ended on every rank, says vLLM. Keys without an open load are ignored: they are late."""
        of_keys = frozenset(keys)
        jobs = self._loads.get(of_keys)
        if jobs is None:
            return
        job = jobs.pop(0)
        if not jobs:
            del self._loads[of_keys]
        self._hierarchy.release(*job.entries)

    def abandon(self) -> None:
        """A reset: forget every open job, but let no slot go before its copy has ended."""
        for store in {store.ticket: store for store in self._stores.values()}.values():
            open_entries = [entry for entry in store.entries if self._stores.get(entry.key) is store]
            self._abandon_stores(store.ticket, open_entries, Reason.RESET)
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

    def _commit(self, ticket: int, entries: list[Entry], page: ControlPage | None) -> list[Entry]:
        """Commit the entries whose copies went well on every rank; the others, dropped, are returned."""
        if page is None:
            self._abandon_stores(ticket, entries, Reason.DEVICE_ERROR)
            return entries
        slots = [entry.slot for entry in entries]
        if page.all_ok(Direction.STORE, slots, ticket):
            self._hierarchy.commit_store(entries)
            return []
        statuses = page.statuses(Direction.STORE, slots, [ticket] * len(entries))
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
