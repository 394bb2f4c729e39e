"""The scheduler's half of the adapter: an ``OffloadingManager`` over a :class:`~tierkv._hierarchy.Hierarchy`.

It runs inside vLLM's scheduling loop and never blocks. States and events are tabled in
``docs/explanation/vllm-states.md``, and so is the order in which vLLM calls. What copies bytes lives elsewhere: workers
between device and slots, the Mover's thread between slots and the levels below.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import compress
from typing import Any

from vllm.v1.kv_offload.base import (
    OffloadingManager,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)

from tierkv._entry import READY, Entry, chunks_of
from tierkv._hints import Hints
from tierkv.protocols import Clock
from tierkv.types import Chunk, ChunkKey, Reason
from tierkv.vllm import _compat
from tierkv.vllm._below import Below, is_read
from tierkv.vllm._books import EpochHierarchy
from tierkv.vllm._control import ControlPage
from tierkv.vllm._events import as_vllm_events
from tierkv.vllm._jobs import Jobs
from tierkv.vllm._lookups import Lookups
from tierkv.vllm._metrics import Metrics
from tierkv.vllm._recording import Recording
from tierkv.vllm._requests import ChunkMaker, Group, Hole, Leases, Request
from tierkv.vllm._spec_types import SlotSpec

logger = logging.getLogger("vllm.tierkv.manager")

_WARN_AGAIN_S = 10.0


class TierKVManager(Lookups, OffloadingManager):  # type: ignore[misc]
    """See the module.

    Args:
        hierarchy: the primary and what lies below it; this manager is its only caller.
        groups: the engine's KV-cache groups.
        page: gives the control page, or None while it cannot be joined yet; called on the scheduler's thread.
        below: runs the transfers to the levels below; None if there are none.
        store_reserve: primary slots that promotions leave to stores.
        lookup_deadline_s: how long one request may be deferred in all.
        metrics: what is reported to vLLM.
        recording: what is told of the requests; None records none.
        clock: seconds, monotonic.

    Concurrency: the scheduler's thread alone.
    """

    def __init__(
        self,
        hierarchy: EpochHierarchy,
        groups: Sequence[Group],
        page: Callable[[], ControlPage | None],
        *,
        below: Below | None = None,
        store_reserve: int = 1,
        lookup_deadline_s: float = 5.0,
        metrics: Metrics | None = None,
        recording: Recording | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        OffloadingManager.__init__(self)  # from 0.33 on it makes the lock that vLLM holds while it schedules
        Lookups.__init__(
            self,
            hierarchy,
            ChunkMaker(groups),
            Leases(hierarchy.hold, hierarchy.release),
            below,
            store_reserve=store_reserve,
            lookup_deadline_s=lookup_deadline_s,
            metrics=metrics or Metrics(),
            clock=clock,
        )
        self._page = page
        self._joined: ControlPage | None = None
        self._hints = Hints([level.ledger for level in hierarchy.levels], clock)
        self._jobs = Jobs(hierarchy, groups[0].group_id if len(groups) == 1 else None)
        self._sliding = frozenset(group.group_id for group in groups if group.sliding)
        self._many_groups = len(groups) > 1
        self._recording = recording
        self._n_dropped = 0
        self._next_warning = 0.0
        self._keep_open()

    # -- loads --------------------------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[ChunkKey], req_context: ReqContext) -> SlotSpec:
        """Pin chunks that were answered as hits in this step, until ``complete_load``."""
        entries: list[Any] = [*map(self._get, keys)]
        assert [entry.state for entry in entries].count(READY) == len(entries), "vLLM loads this step's hits only"
        page = self._joined or self._join()
        request = self._request(req_context)
        spec = self._jobs.open_load(keys, entries, page.generation if page is not None else 0)
        self._used(entries, self._maker.learned(entries, request), request)
        self._count_hits(keys, request)
        self._leases.end(request)
        return spec

    def complete_load(self, keys: Collection[ChunkKey], req_context: ReqContext) -> None:  # noqa: ARG002
        """Every rank has its copy. Late ends, of loads from before a reset, are ignored."""
        self._jobs.close_load(keys)

    def _used(self, entries: Sequence[Entry], learned: Sequence[Chunk] | None, request: Request) -> None:
        """Report the request's use of these to the orders of all levels, each chunk once a request.

        Where somebody has ``learned`` more of them than the entries' own chunks say, it is those that are told.
        """
        reached = request.accessed_to
        if reached:
            new = [told.end_token > reached.get(told.group, 0) for told in learned or entries]
            entries = list(compress(entries, new))
            learned = learned and list(compress(learned, new))
        if not entries:
            return
        if learned:
            self._primary.access(zip(entries, learned, strict=True))
        else:
            self._primary.touch(entries)
        for level in self.hierarchy.levels[1:]:
            get = level.ledger.get
            told = learned or chunks_of(entries)
            below = [(entry, chunk) for chunk in told if (entry := get(chunk.key)) is not None]
            if below:
                level.ledger.access(below)
        for last in learned or entries if self._many_groups else (learned or entries)[-1:]:
            self._reached(request, last.group, last.end_token)

    def _count_hits(self, keys: Collection[ChunkKey], request: Request) -> None:
        n_below = sum(key in request.promoted for key in keys) if request.promoted else 0
        self.hierarchy.levels[0].counts.hits += len(keys) - n_below
        if n_below:
            self.hierarchy.levels[1].counts.hits += n_below

    # -- stores -------------------------------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[ChunkKey], req_context: ReqContext) -> PrepareStoreOutput:
        """Give room to the leading part, by end token across groups, of what is not here yet. Never None.

        vLLM never offers a chunk again that was refused. So what is refused in a prefix group is a hole, and what lies
        behind a hole is refused too until the hole's key is resident: no lookup could reach it. ``evicted_keys`` stays
        empty: vLLM reads it nowhere, and what has left is told by :meth:`take_events`.
        """
        request = self._latest if req_context is self._latest_context else self._request(req_context)
        page = self._joined or self._join()
        if len(keys) == 1 and not self._many_groups and page is not None and request.hole is None:
            (key,) = keys
            return self._prepare_one(key, request, page)
        columns = self._maker.columns([*keys], request, self._primary.kinds) if keys else None
        if columns is not None and page is not None and request.hole is None:
            entries = self.hierarchy.offer_columns(columns, self._answered)
            if entries is not None:
                self._reached(request, columns.kind.group, columns.end_tokens[-1])
                return self._give(entries, request, page)
        chunks = self._maker.make(keys, request) if columns is None else columns.chunks()
        if page is None:
            self._refuse(chunks, Reason.CLOSED)
            return _nothing()
        if request.hole is not None:
            chunks = self._reachable(chunks, request)
        return self._prepared(keys, chunks, request, page)

    def _prepare_one(self, key: ChunkKey, request: Request, page: ControlPage) -> PrepareStoreOutput:
        """One chunk, new and with room for it: the usual case where requests come in pieces of 1, cheaply."""
        chunk = self._maker.make_one(key, request)
        entry = self.hierarchy.offer_one(chunk, self._answered)
        if entry is None:
            return self._prepared((key,), [chunk], request, page)
        self._reached(request, chunk[2], chunk[3])
        self._metrics.allocations.append(1)
        return PrepareStoreOutput([key], self._jobs.open_store_of_one(entry, request, page.generation), [])

    def _prepared(
        self,
        keys: Collection[ChunkKey],
        chunks: Sequence[Chunk],
        request: Request,
        page: ControlPage,
    ) -> PrepareStoreOutput:
        """Offer chunks, and open a store of what was given room."""
        entries = self._offer(chunks, request)
        for chunk in chunks if self._many_groups else chunks[-1:]:
            self._reached(request, chunk.group, chunk.end_token)
        if not entries:
            return _nothing()
        if self._many_groups:
            by_key = {entry.key: entry for entry in entries}
            entries = [by_key[key] for key in dict.fromkeys(keys) if key in by_key]
        return self._give(entries, request, page)

    def _give(self, entries: Sequence[Entry], request: Request, page: ControlPage) -> PrepareStoreOutput:
        """Open a store into reserved slots."""
        self._metrics.allocations.append(len(entries))
        stored, spec = self._jobs.open_store(entries, request, page.generation)
        return PrepareStoreOutput(stored, spec, [])

    def _join(self) -> ControlPage | None:
        """The control page, once it can be joined."""
        self._joined = self._page()
        return self._joined

    def _offer(self, chunks: Sequence[Chunk], request: Request) -> Sequence[Entry]:
        """Offer what may be here already, or find no room; what was given room."""
        offer = self.hierarchy.offer(chunks, shielded=self._answered)
        if offer.refused:
            # What a rule did not admit is offered by the next request again, and its rule counts what lies behind it.
            self._note_hole(request, [chunk for chunk, reason in offer.refused if reason is not Reason.NOT_ADMITTED])
        if offer.present:
            ready = [entry for entry in offer.present if entry.state is READY]
            self._used(ready, None, request)
        return offer.reserved

    def _reached(self, request: Request, group: int, end_token: int) -> None:
        """This request's use of a group was reported that far; storing is a use as well."""
        if end_token > request.accessed_to.get(group, 0):
            request.accessed_to[group] = end_token

    def _reachable(self, chunks: list[Chunk], request: Request) -> list[Chunk]:
        """Refuse what lies behind the request's hole, unless the hole was filled meanwhile."""
        hole = request.hole
        assert hole is not None
        if self._get(hole.key) is not None or self.hierarchy.find(hole.key) >= 0:
            request.hole = None
            return chunks
        self._refuse([chunk for chunk in chunks if chunk.end_token > hole.end_token], Reason.BEHIND_HOLE)
        return [chunk for chunk in chunks if chunk.end_token <= hole.end_token]

    def _note_hole(self, request: Request, lost: Iterable[Chunk]) -> None:
        """Remember the first prefix chunk that this request offered and that was not taken."""
        for chunk in lost:
            nearer = request.hole is None or chunk.end_token < request.hole.end_token
            if nearer and chunk.group not in self._sliding:
                request.hole = Hole(chunk.end_token, chunk.key)

    def _refuse(self, chunks: Sequence[Chunk], reason: Reason) -> None:
        counts = self.hierarchy.levels[0].counts
        counts.offered += len(chunks)
        counts.refuse(reason, len(chunks))

    def complete_store(
        self,
        keys: Collection[ChunkKey],
        req_context: ReqContext,  # noqa: ARG002
        success: bool = True,  # noqa: ARG002, FBT001, FBT002 (vLLM's signature; the stamps say more)
    ) -> None:
        """Every rank has reported: commit by stamps. Late ends, of stores from before a reset, are ignored."""
        for job, entries in self._jobs.close_store(keys, self._joined or self._join()):
            self._note_hole(job.request, [entry.chunk for entry in entries])
            self._warn_of_drops(len(entries))
        if self._below is not None:
            self._send_writes(self._below)

    def _warn_of_drops(self, n_chunks: int) -> None:
        """A broken device fails every copy: one line now and then, with their number."""
        self._n_dropped += n_chunks
        now = self._clock()
        if now >= self._next_warning:
            logger.warning("%d chunks were not stored: their copies from the device failed", self._n_dropped)
            self._n_dropped, self._next_warning = 0, now + _WARN_AGAIN_S

    def _send_writes(self, below: Below) -> None:
        """Cascades do not wait for the end of a step: after the last store of a busy time there may be none."""
        writes = []
        for transfer in self.hierarchy.take_transfers():
            if is_read(transfer):
                self._unsent[transfer.id] = transfer
            else:
                writes.append(transfer)
        below.send(writes)

    # -- requests and steps ---------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Nothing is kept until the request asks for something."""
        self._keep_open()
        self._drain()
        if self._recording is not None:
            self._recording.arrived(req_context)
        return RequestOffloadingContext()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """The step's leases are taken, ends are drained, reads and writes are handed over."""
        if self._asker is not None:
            self._end_step()
        if self._recording is not None:
            self._recording.scheduled(context.new_req_ids)
        if self._below is not None:
            self._drain()
        if self._jobs.abandoned:
            self._jobs.sweep(self._page())
        if self._leases.holders:
            self._end_leases(context)
        if self._below is not None:
            self._keep_open()
            self._below.send(self._take_unsent(), tuple(self._probes))
            if self._probes:
                self._probes.clear()
                # An engine that has nothing else to do spins, and the thread that probes would get the GIL every 5 ms.
                time.sleep(0)
        elif self._primary.expires:
            self.hierarchy.refresh()

    def _keep_open(self) -> None:
        """Levels below open as soon as the workers have said who they are: a first request should find them open."""
        if self._below is not None:
            self._below.keep_open(self.hierarchy, self._page())

    def _end_leases(self, context: ScheduleEndContext) -> None:
        """Of requests whose time is up, and of those that were scheduled without a load."""
        now = self._clock()
        for request in list(self._leases.holders.values()):
            if request.late(now) or request.req_id in context.new_req_ids:
                self._leases.end(request)

    def _drain(self) -> None:
        if self._below is not None:
            self._below.drain(self.hierarchy)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Its lease ends; open loads and stores keep their own pins until they have ended. Its hint takes effect.

        All its stores have been offered by now, though some may still be copied; a hint reaches those as well.
        """
        request = self._request(req_context)
        self._leases.end(request)
        self._latest_context = self._latest = None
        if self._recording is not None:
            self._recording.finished(req_context)
        if request.hint is not None:
            answer = self._hints.give(_compat.key_positions(req_context), request.hint)
            self._metrics.hinted[request.hint.name] += answer.n_chunks
            self._mind_expiry()

    def has_pending_work(self) -> bool:
        """Only while a quarantine lasts: stamps come with steps. Everything else waits for the next hook."""
        if self._jobs.abandoned:
            self._jobs.sweep(self._page())
        return bool(self._jobs.abandoned)

    def reset_cache(self) -> None:
        """Forget everything at once; what copies still touch stays in quarantine. Levels below begin a new epoch."""
        self._epoch += 1
        self._latest_context = self._latest = None
        self._end_step()
        for request in list(self._leases.holders.values()):
            self._leases.end(request)
        self._cancel_unsent_reads()
        self._jobs.abandon()
        self.hierarchy.reset((0,))
        if self._below is not None:
            self._below.new_epoch(self.hierarchy)

    def take_events(self) -> Iterable[Any]:
        """Stored and removed chunks of every level, in the order in which they happened."""
        return as_vllm_events(self.hierarchy.take_events(), self._below)

    def get_stats(self) -> Any:
        self._metrics.n_wishes_ignored = self._wishes.n_ignored
        return self._metrics.take(self.hierarchy)

    def shutdown(self) -> None:
        """Stop the Mover's thread and leave the pool. May never be called: nothing depends on it."""
        if self._below is not None:
            self._below.close(self.hierarchy)
        if self._recording is not None:
            self._recording.close()
        page = self._page()
        if page is not None:
            page.close()


def _nothing() -> PrepareStoreOutput:
    return PrepareStoreOutput([], SlotSpec((), ()), [])
