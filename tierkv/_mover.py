"""Runs transfers: the asynchronous half of tierkv. Decides nothing about chunks; knows queues, deadlines and breakers.

A :class:`Mover` belongs to one event loop. It gathers transfers into batches, one tier call each, keeps reads, writes
and deletions of a level in lanes of their own so that no read waits behind a write, gives every transfer a deadline,
and reports each end through one callback. What a deadline cuts off goes on behind it: the transfer is reported twice,
first as failed with its space still in use, then as ended.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from collections import deque
from collections.abc import Awaitable, Callable, Container, Sequence
from typing import Any, NamedTuple, Protocol

from tierkv._breaker import Breaker, Traffic
from tierkv.errors import TierError, TierKVError
from tierkv.protocols import Clock, Tier
from tierkv.types import Chunk, ChunkKey, Outcome, Reason, Status, Transfer, TransferKind

_log = logging.getLogger(__name__)


class Completion(NamedTuple):
    """The end of a transfer, for :meth:`~tierkv._hierarchy.Hierarchy.finish`."""

    transfer_id: int
    outcome: Outcome
    ended: bool


class BreakerCallback(Protocol):
    def __call__(self, level: int, /, *, reads: Traffic, writes: Traffic) -> None: ...


class Queued(NamedTuple):
    transfer: Transfer
    deadline: float


class MoverLimits(NamedTuple):
    """How much is under way at once. Seconds count from the moment a transfer was submitted."""

    deadline_s: float = 30.0
    n_batches: int = 4
    """Batches of one lane that may run at once."""
    batch_nbytes: int = 32 << 20
    """Payload of one batch, at most (one chunk at least)."""
    breaker_failures: int = 3
    """Batches in a row without a single success that open the breaker; a missed deadline opens it at once."""
    breaker_cooldown_s: float = 5.0
    """How long it stays open before something is tried, and again after each trial that failed."""


class Lane:
    """One level's reads, writes or deletions."""

    __slots__ = ("breaker", "is_read", "level", "n_running", "name", "queue")

    def __init__(self, level: int, name: str, breakers: Sequence[Breaker], *, is_read: bool) -> None:
        self.level = level
        self.name = name
        self.is_read = is_read
        self.breaker = breakers[not is_read]
        self.queue: deque[Queued] = deque()
        self.n_running = 0


class Mover:
    """See the module.

    Args:
        tiers: one for each level; index 0 is only reached through ``slot_view``.
        slot_view: writable view of a primary slot.
        on_done: told of every end, on the loop; must not block or raise.
        on_breaker: told when one of a level's breakers changes.
        stride_nbytes: distance of primary slots.
        limits: of all levels.
        cooldowns_s: each level's own ``breaker_cooldown_s``; the limits' by default.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        slot_view: Callable[[int], memoryview],
        on_done: Callable[[Completion], None],
        *,
        on_breaker: BreakerCallback | None = None,
        stride_nbytes: int,
        limits: MoverLimits | None = None,
        cooldowns_s: Sequence[float] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._tiers = tiers
        self._slot_view = slot_view
        self._on_done = on_done
        self._on_breaker = on_breaker
        self._stride_nbytes = stride_nbytes
        self._limits = limits = limits or MoverLimits()
        self._clock = clock
        self._lanes: dict[tuple[int, TransferKind], Lane] = {}
        self._cooldowns_s = cooldowns_s or [limits.breaker_cooldown_s] * len(tiers)
        self._breakers = [(Breaker(limits.breaker_failures), Breaker(limits.breaker_failures)) for _ in tiers]
        """Of each level's reads, and of its writes and deletions."""
        self._unread: set[int] = set()
        """Copies between lower levels that never came to be written: they say nothing of the level below."""
        self._reading: dict[int, tuple[Lane, Lane]] = {}
        """Copies between lower levels that are being read: their own lane, and that of the source's reads."""
        self._running: set[asyncio.Task[None]] = set()
        self._calls: set[asyncio.Future[Sequence[Outcome]]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    # -- in -----------------------------------------------------------------------------------------------------

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """Queue transfers; call it on the loop. Returns at once."""
        deadline = self._clock() + self._limits.deadline_s
        touched: dict[tuple[int, TransferKind], Lane] = {}
        for transfer in transfers:
            if self._closed:
                self._finish(transfer, _failed(transfer.chunk.key, Reason.CLOSED))
                continue
            level = transfer.source if transfer.kind is TransferKind.PROMOTE else transfer.target
            lane = self._lane(level, transfer.kind)
            lane.queue.append(Queued(transfer, deadline))
            touched[level, transfer.kind] = lane
        for lane in touched.values():
            self._start(lane)
        self._arm_sweep()

    def _lane(self, level: int, kind: TransferKind) -> Lane:
        lane = self._lanes.get((level, kind))
        if lane is None:
            is_read = kind is TransferKind.PROMOTE
            lane = Lane(level, self._tiers[level].name, self._breakers[level], is_read=is_read)
            self._lanes[level, kind] = lane
        return lane

    def renew(self, level: int) -> None:
        """Another tier takes a level's place: what still hangs in the old one keeps no lane, and opens no breaker."""
        for key in [key for key in self._lanes if key[0] == level]:
            lane = self._lanes.pop(key)
            while lane.queue:
                transfer = lane.queue.popleft().transfer
                self._finish(transfer, _failed(transfer.chunk.key, Reason.CLOSED))
        n_failures = self._limits.breaker_failures
        self._breakers[level] = (Breaker(n_failures), Breaker(n_failures))
        self._tell_breaker(level)

    @property
    def n_running(self) -> int:
        return len(self._running)

    async def aclose(self, timeout_s: float = 5.0) -> int:
        """Refuse what is queued, wait for what runs. Returns how many batches still run after ``timeout_s``."""
        self._closed = True
        for lane in self._lanes.values():
            while lane.queue:
                transfer = lane.queue.popleft().transfer
                self._finish(transfer, _failed(transfer.chunk.key, Reason.CLOSED))
        for timer in [*self._timers, self._sweep]:
            if timer is not None:
                timer.cancel()
        running = set(self._running)
        if running:
            _, running = await asyncio.wait(running, timeout=timeout_s)
            left: set[asyncio.Future[Any]] = {*running, *self._calls} if running else set()
            for future in left:
                future.cancel()
            if left:
                await asyncio.wait(left, timeout=1.0)
        return len(running)

    # -- batches ------------------------------------------------------------------------------------------------

    def _start(self, lane: Lane) -> None:
        while lane.queue and lane.n_running < self._limits.n_batches:
            batch = [lane.queue.popleft()]
            nbytes = batch[0].transfer.chunk.nbytes
            while lane.queue and nbytes + lane.queue[0].transfer.chunk.nbytes <= self._limits.batch_nbytes:
                batch.append(lane.queue.popleft())
                nbytes += batch[-1].transfer.chunk.nbytes
            lane.n_running += 1
            task = asyncio.create_task(self._run(lane, batch), name=f"tierkv-{lane.name}")
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(self, lane: Lane, batch: Sequence[Queued]) -> None:
        """One tier call with its deadline; the call itself is never cancelled, since its thread would go on."""
        transfers = [queued.transfer for queued in batch]
        call = asyncio.ensure_future(self._call(transfers))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            left_s = batch[0].deadline - self._clock()
            done, _ = await asyncio.wait({call}, timeout=max(left_s, 0.0))
            if not done:
                self._record(self._holding_up(lane, [t.id for t in transfers]), success=False, deadline=True)
                for transfer in transfers:
                    self._finish(transfer, _failed(transfer.chunk.key, Reason.DEADLINE), ended=False)
            outcomes = await asyncio.shield(call)
            judged = [o for t, o in zip(transfers, outcomes, strict=True) if t.id not in self._unread]
            self._unread.difference_update([t.id for t in transfers])
            if done and judged:
                error = next((o.error for o in judged if o.error is not None), None)
                self._record(lane, success=any(map(_answered, judged)), error=error)
            for transfer, outcome in zip(transfers, outcomes, strict=True):
                self._finish(transfer, outcome)
        finally:
            lane.n_running -= 1
            if not self._closed:
                self._start(lane)

    def _holding_up(self, lane: Lane, ids: Container[int]) -> Lane:
        """Whose fault it is that these transfers of a lane are late: a copy may hang where it is read."""
        reading = (reads for id_, (own, reads) in self._reading.items() if own is lane and id_ in ids)
        return next(reading, lane)

    async def _call(self, transfers: Sequence[Transfer]) -> Sequence[Outcome]:
        """Run a batch of one kind and level."""
        first = transfers[0]
        if first.kind is TransferKind.PROMOTE:
            work = self._read(transfers)
        elif first.kind is TransferKind.DELETE:
            work = self._delete(transfers)
        else:
            work = self._write(transfers)
        return await self._guarded(work, transfers)

    async def _guarded(self, work: Awaitable[Sequence[Outcome]], transfers: Sequence[Transfer]) -> Sequence[Outcome]:
        """Whatever the tier raises, or answers that means nothing, becomes an outcome per key."""
        try:
            outcomes = await work
            _refuse_nonsense(outcomes, transfers)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a third party's tier may raise anything, and nobody may wait for ever
            if self._closed and isinstance(error, asyncio.CancelledError):
                raise  # ours: see aclose
            told = error if isinstance(error, Exception) else TierKVError(f"a tier raised {error!r}")
            return [Outcome(t.chunk.key, Status.FAILED, Reason.TIER_ERROR, told) for t in transfers]
        return outcomes

    async def _read(self, transfers: Sequence[Transfer]) -> Sequence[Outcome]:
        return await self._tiers[transfers[0].source].read([(t.chunk.key, self._view(t)) for t in transfers])

    async def _delete(self, transfers: Sequence[Transfer]) -> Sequence[Outcome]:
        keys = [transfer.chunk.key for transfer in transfers]
        stayed: dict[bytes, TierError] = {}
        try:
            await self._tiers[transfers[0].source].delete(keys)
        except TierError as error:
            if not error.keys:
                raise
            stayed = dict.fromkeys(error.keys, error)
        return [
            Outcome(key, Status.FAILED, Reason.TIER_ERROR, stayed[key]) if key in stayed else Outcome(key, Status.OK)
            for key in keys
        ]

    async def _write(self, transfers: Sequence[Transfer]) -> Sequence[Outcome]:
        """From the primary in one call, between lower levels one by one; what one of them raises is its own end."""
        direct = [t for t in transfers if t.slot is not None]
        tiers = tuple(self._tiers)  # while one of them hangs, another may take its place
        if len(direct) == len(transfers):
            return await tiers[transfers[0].target].write([(t.chunk, self._view(t)) for t in direct])
        outcomes: dict[int, Outcome] = {}
        if direct:
            outcomes.update(zip([t.id for t in direct], await self._call(direct), strict=True))
        for transfer in transfers:
            if transfer.slot is None:
                outcomes[transfer.id] = await self._write_through_bounce(transfer, tiers)
        return [outcomes[t.id] for t in transfers]

    async def _write_through_bounce(self, transfer: Transfer, tiers: Sequence[Tier]) -> Outcome:
        """Between two lower levels, neither of which lends its memory: by way of a page-aligned buffer of our own."""
        buffer = memoryview(mmap.mmap(-1, self._stride_nbytes))
        reads = self._lane(transfer.source, TransferKind.PROMOTE)

        async def to_read() -> Sequence[Outcome]:
            return await tiers[transfer.source].read([(transfer.chunk.key, buffer)])

        async def to_write() -> Sequence[Outcome]:
            return await tiers[transfer.target].write([(transfer.chunk, buffer)])

        self._reading[transfer.id] = self._lane(transfer.target, transfer.kind), reads
        (read,) = await self._guarded(to_read(), [transfer])
        del self._reading[transfer.id]
        self._record(reads, success=_answered(read), error=read.error)
        if not read.ok:
            self._unread.add(transfer.id)
            return Outcome(read.key, Status.FAILED, Reason.TIER_ERROR, read.error)
        (outcome,) = await self._guarded(to_write(), [transfer])
        return outcome

    def _view(self, transfer: Transfer) -> memoryview:
        assert transfer.slot is not None
        return self._slot_view(transfer.slot)

    # -- out ----------------------------------------------------------------------------------------------------

    def _finish(self, transfer: Transfer, outcome: Outcome, *, ended: bool = True) -> None:
        self._on_done(Completion(transfer.id, outcome, ended))

    def _record(self, lane: Lane, *, success: bool, deadline: bool = False, error: Exception | None = None) -> None:
        breaker = lane.breaker
        if not breaker.record(success=success, deadline=deadline):
            return
        why = f"no answer within {self._limits.deadline_s:g} s" if deadline else str(error)
        self._log_change(lane, why)
        self._tell_breaker(lane.level)
        if breaker.traffic is not Traffic.STOPPED or self._closed:
            return

        def trial() -> None:
            self._timers.discard(timer)
            breaker.retry()
            self._tell_breaker(lane.level)

        timer = asyncio.get_running_loop().call_later(self._cooldowns_s[lane.level], trial)
        self._timers.add(timer)

    def _log_change(self, lane: Lane, why: str) -> None:
        """Every opening at first and then ever more rarely: a disk that stays dead must not fill the log."""
        breaker = lane.breaker
        name, verb = lane.name, "reads" if lane.is_read else "writes"
        if breaker.traffic is Traffic.FLOWS:
            _log.warning("%s: %s work again", name, verb)
        elif breaker.n_opened & (breaker.n_opened - 1) == 0:
            until = "they are misses" if lane.is_read else "chunks are dropped"
            pause_s = self._cooldowns_s[lane.level]
            _log.warning("%s: %s fail (%s): %s for %g s, then one is tried", name, verb, why, until, pause_s)

    def _tell_breaker(self, level: int) -> None:
        if self._on_breaker is not None:
            reads, writes = self._breakers[level]
            self._on_breaker(level, reads=reads.traffic, writes=writes.traffic)

    def _arm_sweep(self) -> None:
        """Transfers that a hung tier keeps in the queue must end too: one timer for the oldest of them."""
        oldest = min((lane.queue[0].deadline for lane in self._lanes.values() if lane.queue), default=None)
        if oldest is None or self._sweep is not None or self._closed:
            return
        delay_s = max(oldest - self._clock(), 0.0) + 0.01
        self._sweep = asyncio.get_running_loop().call_later(delay_s, self._expire_queued)

    def _expire_queued(self) -> None:
        self._sweep = None
        now = self._clock()
        for lane in self._lanes.values():
            expired = 0
            while lane.queue and lane.queue[0].deadline <= now:
                transfer = lane.queue.popleft().transfer
                self._finish(transfer, _failed(transfer.chunk.key, Reason.DEADLINE))
                expired += 1
            if expired:
                self._record(self._holding_up(lane, self._reading), success=False, deadline=True)
        self._arm_sweep()


def _refuse_nonsense(outcomes: object, transfers: Sequence[Transfer]) -> None:
    """Raise TierKVError unless a tier gave one whole outcome a key, in order: what else it says means nothing."""
    if not isinstance(outcomes, Sequence) or len(outcomes) != len(transfers):
        raise TierKVError(f"a tier answered {_brief(outcomes)} for {len(transfers)} keys")
    for outcome, transfer in zip(outcomes, transfers, strict=True):
        key, status, reason, _ = outcome if isinstance(outcome, Outcome) else (None,) * 4
        if key != transfer.chunk.key or not isinstance(status, Status) or not isinstance(reason, Reason | None):
            raise TierKVError(f"a tier answered {_brief(outcome)} for key {transfer.chunk.key.hex()}")


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _failed(key: ChunkKey, reason: Reason) -> Outcome:
    return Outcome(key, Status.FAILED, reason)


def _answered(outcome: Outcome) -> bool:
    """The tier works: a miss or a refusal is an answer (a full disk still serves what it holds), an error is not."""
    return outcome.status is not Status.FAILED


def padded_nbytes(chunk_nbytes: int) -> int:
    """Slot stride for chunks of this size: rounded up to an OS page, so that direct I/O can use the slots."""
    return -(-chunk_nbytes // 4096) * 4096


def zero_tail(view: memoryview, chunk: Chunk) -> None:
    """Clear a slot past its chunk's bytes, so that no earlier tenant's leftovers travel with it."""
    if chunk.nbytes < len(view):
        view[chunk.nbytes :] = bytes(len(view) - chunk.nbytes)
