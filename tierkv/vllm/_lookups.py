"""Answers to vLLM's lookups: what is ready, what is on its way, what can be brought up, and what is a miss.

vLLM asks key by key, one request at a time, all of a waiting request's keys again in every step. An answer changes
nothing but reservations: no completion is drained here, since a drained one could evict a key just answered as a hit.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext

from tierkv._hierarchy import UNSETTLED
from tierkv._ledger import READY, Entry
from tierkv.protocols import Clock
from tierkv.types import ChunkKey, Outcome, Reason, Status, Transfer
from tierkv.vllm import _compat
from tierkv.vllm._below import Below, is_read
from tierkv.vllm._books import EpochHierarchy
from tierkv.vllm._metrics import Metrics
from tierkv.vllm._requests import ChunkMaker, Leases, Request
from tierkv.vllm._scan import Answered, Reserved, Scan
from tierkv.vllm._wishes import WishReader

_HIT, _MISS = LookupResult.HIT, LookupResult.MISS
_PROBE_S = 0.1
"""How long a request waits for probes in all; after that what is unsure is a miss."""


class Lookups:
    """The part of the manager that answers lookups. One thread's.

    Args:
        hierarchy: the primary and what lies below it.
        maker: keys to chunks.
        leases: what waiting requests hold.
        below: the levels below; None if there are none.
        store_reserve: primary slots that promotions leave to stores.
        lookup_deadline_s: how long one request may be deferred in all.
        metrics: what is reported to vLLM.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        hierarchy: EpochHierarchy,
        maker: ChunkMaker,
        leases: Leases,
        below: Below | None,
        *,
        store_reserve: int,
        lookup_deadline_s: float,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self.hierarchy = hierarchy
        self._primary = hierarchy.primary
        self._get = hierarchy.primary.get
        self._wishes = WishReader()
        self._mind_expiry()
        self._slot_nbytes = hierarchy.levels[0].plan.slot_nbytes
        self._maker = maker
        self._leases = leases
        self._below = below
        self._store_reserve = store_reserve
        self._lookup_deadline_s = lookup_deadline_s
        self._metrics = metrics
        self._clock = clock
        self._answered = Answered()
        self._answer = self._answered.entries.append
        self._asker: ReqContext | None = None
        self._latest_context: ReqContext | None = None
        self._latest: Any = None
        self._scan: Scan | None = None
        self._scans: list[Scan] = []
        self._scan_start = 0
        self._boundary = 0
        self._unsent: dict[int, Transfer] = {}
        self._probes: dict[ChunkKey, None] = {}
        self._epoch = 0
        self._opening_until: float | None = None

    def _mind_expiry(self) -> None:
        """Ask of each chunk whether it has expired, if any can: others do not pay for the question."""
        if self._primary.expires:
            self.lookup = self._lookup_unexpired  # type: ignore[method-assign]

    def lookup(self, key: ChunkKey, req_context: ReqContext) -> LookupResult:
        """HIT, HIT_PENDING (being stored or promoted), RETRY (being probed for) or MISS. Drains nothing."""
        if req_context is not self._asker:
            self._begin_scan(req_context)
        entry = self._get(key)
        if entry is not None and entry.state is READY:
            self._answer(entry)
            return _HIT
        if entry is None and self._below is None:
            self._boundary = len(self._answered.entries)
            return _MISS
        return self._lookup_further(key, req_context, entry)

    def _lookup_unexpired(self, key: ChunkKey, req_context: ReqContext) -> LookupResult:
        """:meth:`lookup` where chunks expire: an expired one is a miss, and gone with the next trim."""
        entry = self._get(key)
        if entry is not None and self._primary.expired(entry):
            return self._missed(key)
        return Lookups.lookup(self, key, req_context)

    def _begin_scan(self, context: ReqContext | None) -> None:
        place = len(self._answered.entries)
        if self._scan is not None:
            self._scan.end = place
            self._scan = None
        self._asker = context
        self._scan_start = self._boundary = place

    def _request(self, context: ReqContext) -> Request:
        """The request's record; after a reset it begins again, but for its clock."""
        request: Request
        if context is self._latest_context:
            request = self._latest
            return request
        request = _compat.request_state(context, Request, self._new_request)
        if request.epoch != self._epoch:
            request.forget()
            request.epoch = self._epoch
        self._latest_context, self._latest = context, request
        return request

    def _new_request(self, context: ReqContext) -> Request:
        return Request(context, self._wishes.read(context), _compat.position_getter(context))

    def _lookup_further(self, key: ChunkKey, context: ReqContext, entry: Entry | None) -> LookupResult:
        """The key is not ready in the primary."""
        request = self._request(context)
        now = self._clock()
        if request.late(now):
            self._leases.end(request)
            return self._missed(key)
        if entry is not None:
            if entry.promoted:
                request.promoted.add(key)
            self._answer(entry)
            return self._defer(request, now, LookupResult.HIT_PENDING)
        assert self._below is not None, "without levels below, an absent key was answered before"
        where = self.hierarchy.find(key)
        if where == UNSETTLED or (where < 0 and self._below.opening):
            return self._unsure(key, request, now)
        if where < 0 or not self._below.allows(context, where):
            return self._missed(key)
        return self._promote(key, request, now)

    def _promote(self, key: ChunkKey, request: Request, now: float) -> LookupResult:
        """Reserve a slot for a chunk that lies below, within what waiting requests may take."""
        if self._n_available() <= self._store_reserve:
            self._metrics.promotion_refused += 1
            return self._missed(key)
        before = self._answered.entries[-1].key if len(self._answered.entries) > self._boundary else None
        if before is not None and before[-4:] != key[-4:]:
            before = None
        chunk = self._maker.one(key, request, before)
        entries = self.hierarchy.promote((chunk,), shielded=self._answered)
        if not entries:
            self._metrics.promotion_refused += 1
            return self._missed(key)
        entry = entries[0]
        self._answer(entry)
        request.promoted.add(key)
        answer = self._defer(request, now, LookupResult.HIT_PENDING)
        for transfer in self.hierarchy.take_transfers():
            self._unsent[transfer.id] = transfer
            if is_read(transfer) and transfer.chunk.key == key:
                assert self._scan is not None, "the request was deferred"
                self._scan.reserved.append(Reserved(len(self._answered.entries) - 1, entry, transfer))
        return answer

    def _n_available(self) -> int:
        """Slots that are free or could be: what nobody reads, writes, waits for or holds."""
        ledger = self._primary
        n_ready = len(ledger) - ledger.n_pending
        n_held_ready = ledger.n_held - self._leases.n_held_pending
        return ledger.free_nbytes // self._slot_nbytes + n_ready - n_held_ready

    def _unsure(self, key: ChunkKey, request: Request, now: float) -> LookupResult:
        """A tier may have the key although no ledger knows it: it is being opened, or its scan has not come so far."""
        if self._below is not None and self._below.opening:
            # The first requests after a start wait for the tiers, once for all of them: a tier that hangs in opening
            # must not cost every later request a deadline.
            if self._opening_until is None:
                self._opening_until = now + self._lookup_deadline_s
            if now < self._opening_until:
                return self._defer(request, now, LookupResult.RETRY)
            return self._missed(key)
        if request.probe_deadline is None:
            request.probe_deadline = now + _PROBE_S
        if now >= request.probe_deadline:
            return self._missed(key)
        self._probes[key] = None
        return self._defer(request, now, LookupResult.RETRY)

    def _defer(self, request: Request, now: float, answer: LookupResult) -> LookupResult:
        if request.deadline is None:
            request.deadline = now + self._lookup_deadline_s
        if self._scan is None:
            self._scan = Scan(request, self._scan_start)
            self._scans.append(self._scan)
        return answer

    def _missed(self, key: ChunkKey) -> LookupResult:
        """A miss ends a prefix scan; in a sliding-window scan it only breaks the window."""
        place = len(self._answered.entries)
        group = self._maker.group(key)
        if group.sliding and self._scan is not None:
            for reserved in self._scan.break_window(group, self._boundary, place):
                del self._unsent[reserved.transfer.id]
                self._cancel(reserved.transfer)
        self._boundary = place
        return _MISS

    def _cancel(self, transfer: Transfer) -> None:
        """A read that was never handed over."""
        self.hierarchy.finish(transfer.id, Outcome(transfer.chunk.key, Status.REFUSED, Reason.CANCELLED))

    def get_load_source(self, key: ChunkKey, req_context: ReqContext) -> Any:
        """Where the bytes of a hit came from: a promotion that this request waited for counts as the level below."""
        request = self._request(req_context)
        below = self._below is not None and key in request.promoted
        return _compat.CacheHitSource.DISK if below else _compat.CacheHitSource.HOST

    # -- ends of steps and scans ----------------------------------------------------------------------------------

    def _end_step(self) -> None:
        """Turn what deferred requests were told into their leases, and forget the step's other answers."""
        if self._asker is None:
            return  # nobody has asked
        self._begin_scan(None)
        for scan in self._scans:
            self._leases.renew(scan.request, scan.kept(self._answered.entries))
        self._scans.clear()
        self._answered.clear()
        self._begin_scan(None)

    def _take_unsent(self) -> list[Transfer]:
        """Everything that the hierarchy wants done, oldest first."""
        transfers = [*self._unsent.values(), *self.hierarchy.take_transfers()]
        self._unsent.clear()
        return transfers

    def _cancel_unsent_reads(self) -> None:
        """Give back every reservation whose read was not handed over."""
        for transfer in self._take_unsent():
            if is_read(transfer):
                self._cancel(transfer)
            else:
                self._unsent[transfer.id] = transfer
