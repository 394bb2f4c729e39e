"""A hierarchy and a mover joined on one event loop: what is decided gets done, what is done gets told.

Owned by :class:`~tierkv.TieredCache`. Every method runs on the loop that made it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tierkv._answers import found_in
from tierkv._breaker import Traffic
from tierkv._faults import Faults
from tierkv._hierarchy import Hierarchy
from tierkv._hints import Hints
from tierkv._level import LevelPlan
from tierkv._mover import Completion, Mover, MoverLimits
from tierkv.errors import ClosedError
from tierkv.protocols import Clock, HostTier, ScanTier, Tier
from tierkv.types import ChunkKey, Event, Reason

_log = logging.getLogger(__name__)

_TICK_S = 0.25
"""How often shares, expiry and tiers that became writable are looked at."""
_SLICE = 256
"""Scan results that enter the ledgers in one turn of the loop."""
_LEAST_S = 1.0
"""How long a scan has to end, at least, however little time a close is given."""
_PROBE_S = 0.1
"""How long a lookup waits for tiers that may hold more than the ledgers know."""


class Driver:
    """See the module.

    Args:
        tiers: one a level, open; the first is the primary.
        plans: what the hierarchy is told of each.
        on_event: told of each event, on the loop; must not block. What it raises is logged and goes no further.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        plans: Sequence[LevelPlan],
        *,
        on_event: Callable[[Event], None] | None,
        limits: MoverLimits,
        cooldowns_s: Sequence[float],
        stride_nbytes: int,
        clock: Clock,
    ) -> None:
        primary = tiers[0]
        assert isinstance(primary, HostTier)
        self.primary = primary
        self.hierarchy = Hierarchy(plans, record_events=on_event is not None)
        self.hints = Hints([level.ledger for level in self.hierarchy.levels], clock)
        self.mover = Mover(
            tiers,
            primary.slot_view,
            self._on_done,
            on_breaker=self._on_breaker,
            stride_nbytes=stride_nbytes,
            limits=limits,
            cooldowns_s=cooldowns_s,
            clock=clock,
        )
        self._scans = [(index, tier) for index, tier in enumerate(tiers) if isinstance(tier, ScanTier)]
        self._on_event = on_event
        self.clock = clock
        self._progress = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._copies: set[asyncio.Task[Any]] = set()
        self._faults = Faults(_log)
        self._stopped = False

    def start(self) -> None:
        for work in [self._tick(), *(self._scan(index, tier) for index, tier in self._scans)]:
            self._tasks.add(asyncio.create_task(work))

    async def stop(self, timeout_s: float) -> None:
        """Let copies end, then stop the background work and the mover, each within ``timeout_s`` or a little more."""
        await self.until(lambda: self._quiet, timeout_s)
        for task in self._tasks:
            task.cancel()
        _, scanning = await asyncio.wait(self._tasks, timeout=max(timeout_s, _LEAST_S))
        if scanning:
            _log.warning("scans that do not end when told to are left to themselves: %d", len(scanning))
        await self.mover.aclose(timeout_s=min(timeout_s, 5.0))
        self._stopped = True
        self.wake()

    @property
    def idle(self) -> bool:
        """Nothing is under way, also no reset that waits for what a scan has yet to find."""
        return self._quiet and self.hierarchy.at_rest

    @property
    def _quiet(self) -> bool:
        """As ``idle``, but for deletions that a medium refuses: no close waits for its better days."""
        purging = any(level.purging and level.serves for level in self.hierarchy.levels)
        return self.hierarchy.is_quiet and not self._copies and not purging

    def own(self, copy: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a copy between slots and their user as the cache's own task: its end does not depend on the caller."""
        task = asyncio.create_task(copy)
        self._copies.add(task)
        task.add_done_callback(self._copy_ended)
        return task

    def _copy_ended(self, task: asyncio.Task[Any]) -> None:
        self._copies.discard(task)
        self.wake()

    def kick(self) -> None:
        """Hand over the transfers and events that the hierarchy made. Call after every change."""
        transfers = self.hierarchy.take_transfers()
        if transfers:
            self.mover.submit(transfers)
        if self._on_event is not None:
            for event in self.hierarchy.take_events():
                try:
                    self._on_event(event)
                except Exception as error:  # noqa: BLE001 - whoever watches must not stop what is watched
                    self._faults.tell("on_event raised", error)

    def _name(self, index: int) -> str:
        return self.hierarchy.levels[index].name

    def _on_done(self, completion: Completion) -> None:
        self.hierarchy.finish(completion.transfer_id, completion.outcome, ended=completion.ended)
        if completion.outcome.reason is Reason.NO_SPACE:
            self.hierarchy.refresh()  # the share has shrunk: room is to be made before the next write asks for it
        self.wake()
        self.kick()

    def _on_breaker(self, level: int, *, reads: Traffic, writes: Traffic) -> None:
        self.hierarchy.set_traffic(level, reads=reads, writes=writes)
        self.wake()
        self.kick()

    def wake(self) -> None:
        """Something changed: whoever waits looks again."""
        self._progress.set()
        self._progress = asyncio.Event()

    def _refuse_if_stopped(self) -> None:
        if self._stopped:
            raise ClosedError("the cache was closed meanwhile")

    async def change(self, timeout_s: float) -> None:
        """Wait for the next change of anything, at most ``timeout_s``. Raises ClosedError once nothing will change."""
        self._refuse_if_stopped()
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                await self._progress.wait()
        except TimeoutError:
            pass

    async def until(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait for a condition over the hierarchy. False if ``timeout_s`` (None: no limit) passed first.

        Raises ClosedError if the condition does not hold and nothing will change any more: copies that hang when the
        mover stops never report.
        """
        deadline = None if timeout_s is None else self.clock() + timeout_s
        while not condition():
            self._refuse_if_stopped()
            left_s = None if deadline is None else deadline - self.clock()
            if left_s is not None and left_s <= 0:
                return False
            try:
                async with asyncio.timeout(left_s):
                    await self._progress.wait()
            except TimeoutError:
                return condition()
        return True

    async def _tick(self) -> None:
        """What changes without a completion: shares of a root, tiers that became writable, expiry."""
        while True:
            await asyncio.sleep(_TICK_S)
            self.hierarchy.refresh()
            self.wake()
            self.kick()

    async def _scan(self, index: int, tier: ScanTier) -> None:
        try:
            async for told in tier.scan():
                found = found_in(told)
                for at in range(0, len(found), _SLICE):
                    self.hierarchy.absorb(index, found[at : at + _SLICE])
                    self.wake()
                    self.kick()
                    # A tier that has listed all need not wait for its next batch: without this nobody else had a turn.
                    await asyncio.sleep(0)
        except Exception as error:  # noqa: BLE001 - a bad tier is never worse than none: what it does not tell is a miss
            self._faults.tell(
                f"{self._name(index)}: the scan ended early, what it has not told of will be missed", error
            )

    async def probe(self, keys: Sequence[ChunkKey]) -> None:
        """Ask the tiers about keys that no ledger knows, once and not for long; what is found enters the ledgers."""
        for index, tier in self._scans:
            try:
                unknown = [key for key in keys if not tier.settled(key)]
                async with asyncio.timeout(_PROBE_S):
                    found = found_in(await tier.probe(unknown))
            except TimeoutError:
                continue
            except Exception as error:  # noqa: BLE001 - EMFILE, EIO, a closed connection: no answer is a miss
                self._faults.tell(f"{self._name(index)}: a probe failed", error)
                continue
            self.hierarchy.absorb(index, found)
        self.kick()
