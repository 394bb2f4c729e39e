"""The levels below the primary, as the scheduler sees them: who is open, what is sent down, what comes back up.

The tiers and the Mover live on a thread of their own (:class:`~tierkv.vllm._loop.MoverLoop`). Here, on the scheduler's
thread, is all that touches the hierarchy: ends and scan results wait in a queue until :meth:`Below.drain` takes them,
in bounded slices.

A level is CLOSED until all workers have said which model and layout they have, and agree; then it OPENs under a
namespace made of that and of the epoch. A reset takes it through DRAINING, in which everything under way under the old
namespace ends, to a new epoch that nothing finds again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from tierkv._answers import Answers
from tierkv._breaker import Traffic
from tierkv._level import LevelPlan, Writes
from tierkv._mover import Completion
from tierkv.protocols import Admission, Charging, Clock, EvictionPolicy, Tier
from tierkv.types import ChunkKey, Transfer, TransferKind
from tierkv.vllm import _compat
from tierkv.vllm._books import EpochHierarchy
from tierkv.vllm._control import Identities
from tierkv.vllm._identity import agreed_identity
from tierkv.vllm._loop import Absorbed, Closed, Doors, MoverLoop, News, Opened

logger = logging.getLogger("vllm.tierkv.below")


class Identified(Protocol):
    """Who says under which identity the levels may open: the control page of our own spec, or its stand-in."""

    def identities(self) -> Identities | None: ...


EPOCH_NBYTES = 16
FIRST_EPOCH = bytes(EPOCH_NBYTES)
"""Of every start: so a restart finds what an earlier run of the same model has stored."""

_SLICE = 2_000
"""Ends, and scan results, that enter the ledgers in one hook."""


class LevelState(Enum):
    CLOSED = "closed"
    REFUSED = "refused"
    OPENING = "opening"
    OPEN = "open"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(slots=True)
class LowerLevel:
    """One level below the primary. The tier changes with the epoch; the level stays."""

    name: str
    make_tier: Callable[[], Tier]
    capacity_nbytes: int
    """0: the tier's own default."""
    medium: Any
    locality: Any = None
    emits_events: bool = False
    state: LevelState = LevelState.CLOSED
    reads: Traffic = Traffic.FLOWS
    writes: Traffic = Traffic.FLOWS
    """What its breakers let through."""
    tier: Tier | None = None
    since_s: float = 0.0
    """When it came to its state, where that matters: FAILED or DRAINING."""
    n_failed: int = 0
    """Openings in a row that failed."""
    retry_s: float = 5.0
    """Until a tier that could not be opened is tried again."""
    answers: Answers | None = None
    """The tier's."""
    charging: Answers | None = None
    """Of the latest tier that said what a chunk occupies; for what it took even while another one opens."""

    def attach(self, tier: Any) -> None:
        """Take another tier, or None."""
        self.tier = tier
        self.answers = None if tier is None else Answers(tier, self.capacity_nbytes)
        self.charging = self.answers if isinstance(tier, Charging) else self.charging

    def plan(
        self, policy: EvictionPolicy, writes: Writes, queue_nbytes: int, admission: Admission | None = None
    ) -> LevelPlan:
        """What the hierarchy is told; it asks whatever tier is current."""
        return LevelPlan(
            name=self.name,
            capacity_nbytes=self.capacity_nbytes,
            policy=policy,
            admission=admission,
            writes=writes,
            charge=lambda nbytes: nbytes if self.charging is None else self.charging.charge_nbytes(nbytes),
            queue_nbytes=queue_nbytes,
            settled=lambda key: self.answers is None or self.answers.settled(key),
            owns=lambda key: self.answers is None or self.answers.owns(key),
            writable=lambda: self.answers is not None and self.answers.writable(),
            share=lambda: self.capacity_nbytes if self.answers is None else self.answers.share_nbytes(),
        )


class Below:
    """See the module. The scheduler's thread only.

    Args:
        levels: fastest first; level ``i`` here is level ``i + 1`` of the hierarchy.
        loop: the Mover's thread.
        clock: seconds, monotonic.
    """

    def __init__(self, levels: Sequence[LowerLevel], loop: MoverLoop, clock: Clock = time.monotonic) -> None:
        self.levels = tuple(levels)
        self._loop = loop
        self._clock = clock
        self._epoch = FIRST_EPOCH
        self._identity: bytes | None = None
        self._settled = False
        """Nothing left for :meth:`keep_open` to do: every level is open or refused."""

    @property
    def opening(self) -> bool:
        """Some level will be open in a moment, and what is not found yet may be found then: not after a reset."""
        starting = self._epoch == FIRST_EPOCH and not self._settled
        return starting and any(level.state is LevelState.OPENING for level in self.levels)

    def allows(self, context: Any, index: int) -> bool:
        """Whether the request lets us load from this level of the hierarchy."""
        level = self.levels[index - 1]
        return _compat.allows(context, level.medium, level.locality)

    # -- opening ------------------------------------------------------------------------------------------------

    def keep_open(self, hierarchy: EpochHierarchy, page: Identified | None) -> None:
        """Open what can be opened, move on what drains, follow shares. Cheap; once a step."""
        if not self._settled:
            self._advance(hierarchy, page)
        hierarchy.refresh()

    def _advance(self, hierarchy: EpochHierarchy, page: Identified | None) -> None:
        if self._identity is None and page is not None:
            self._identify(page)
        self._settled = True
        for index, level in enumerate(self.levels, 1):
            if level.state is LevelState.DRAINING and self._drained(hierarchy, index):
                hierarchy.abandon(index)
                level.state = LevelState.CLOSED
            if level.state is LevelState.FAILED and self._clock() - level.since_s >= level.retry_s:
                level.state = LevelState.CLOSED
            if level.state is LevelState.CLOSED and self._identity is not None:
                level.attach(None)
                level.state = LevelState.OPENING
                self._loop.open(index, level.make_tier(), level.capacity_nbytes, self._namespace())
            if level.state not in {LevelState.OPEN, LevelState.REFUSED}:
                self._settled = False

    def _drained(self, hierarchy: EpochHierarchy, index: int) -> bool:
        """Whether all has ended that was under way before a reset. What hangs past every deadline is given up."""
        level = self.levels[index - 1]
        if hierarchy.busy(index) and self._clock() - level.since_s >= self._loop.deadline_s:
            logger.warning("Tier %s hangs in copies from before a reset and is opened anew beside them", level.name)
            hierarchy.disown(index)
        return not hierarchy.busy(index)

    def _identify(self, page: Identified) -> None:
        identities = page.identities()
        if identities is None:
            return
        self._identity = agreed_identity(identities.models, identities.layouts)
        if self._identity is not None:
            return
        for level in self.levels:
            if level.state is LevelState.CLOSED:
                level.state = LevelState.REFUSED
        logger.error("The workers serve different models: the tiers below host memory stay closed")

    def _namespace(self) -> bytes:
        assert self._identity is not None
        return b"tierkv vllm 1\0" + self._identity + self._epoch

    def new_epoch(self, hierarchy: EpochHierarchy) -> None:
        """After a reset: what was stored below belongs to other weights. Nothing is deleted, nothing is found again."""
        self._epoch = os.urandom(EPOCH_NBYTES)
        self._settled = False
        for index, level in enumerate(self.levels, 1):
            hierarchy.set_open(index, is_open=False)
            if level.state in {LevelState.OPEN, LevelState.OPENING, LevelState.FAILED}:
                level.state, level.since_s = LevelState.DRAINING, self._clock()

    # -- down and up ----------------------------------------------------------------------------------------------

    def send(self, transfers: Sequence[Transfer], probes: Sequence[ChunkKey] = ()) -> None:
        """Hand transfers to the Mover, and keys that no ledger knows to the tiers that may know them."""
        if transfers:
            self._loop.submit(transfers)
        for index, level in enumerate(self.levels, 1):
            if probes and level.state is LevelState.OPEN and level.answers is not None:
                settled = level.answers.settled
                unsure = [key for key in probes if not settled(key)]
                if unsure:
                    self._loop.probe(index, unsure)

    def drain(self, hierarchy: EpochHierarchy) -> None:
        """Let ends and scan results take effect, at most a slice of each."""
        ends: list[Completion] = []
        for _ in range(_SLICE):
            news = self._loop.next_news()
            if isinstance(news, Completion):
                ends.append(news)
                continue
            if ends:
                hierarchy.finish_all(ends)
                ends = []
            if news is None:
                break
            self._take(hierarchy, news)
        else:
            hierarchy.finish_all(ends)  # those with which the slice ends
        n_found = 0
        while n_found < _SLICE:
            found = self._loop.next_found()
            if found is None:
                break
            n_found += len(found.found)
            if self.levels[found.level - 1].tier is found.tier:
                hierarchy.absorb(found.level, found.found)

    def _take(self, hierarchy: EpochHierarchy, news: News) -> None:
        level = self.levels[news.level - 1]
        if isinstance(news, Doors):
            level.reads, level.writes = news.reads, news.writes
        elif isinstance(news, Opened) and level.state is LevelState.OPENING:
            level.attach(news.tier)
            level.state, level.n_failed = LevelState.OPEN, 0
            hierarchy.refresh()
        elif isinstance(news, Closed) and level.state is LevelState.OPENING:
            level.state, level.since_s = LevelState.FAILED, self._clock()
            level.n_failed += 1
            if level.n_failed & (level.n_failed - 1) == 0:
                logger.error(
                    "Tier %s could not be opened and is tried again every %g s: %s",
                    level.name,
                    level.retry_s,
                    news.error,
                )
        elif isinstance(news, Absorbed) and level.tier is news.tier:
            hierarchy.absorb(news.level, news.found)
        if level.state is LevelState.OPEN:
            hierarchy.set_traffic(news.level, reads=level.reads, writes=level.writes)
        else:
            hierarchy.set_open(news.level, is_open=False)

    # -- end ----------------------------------------------------------------------------------------------------

    def close(self, hierarchy: EpochHierarchy) -> bool:
        """Let copies end for a moment, save each level's order, close the tiers, end the thread. False: one hangs."""
        orders = {
            index: hierarchy.levels[index].ledger.coldest_first()
            for index, level in enumerate(self.levels, 1)
            if level.state is LevelState.OPEN
        }
        return self._loop.close(orders)


def is_read(transfer: Transfer) -> bool:
    return transfer.kind is TransferKind.PROMOTE
