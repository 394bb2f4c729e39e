"""A thread with an event loop for the tiers and the Mover, and two queues back to the scheduler's thread.

The scheduler never waits for it: what it sends is appended to the loop, what comes back is appended to a deque, both
without a lock of ours. Scan results have a queue of their own with a limit, so that a large root neither fills memory
nor delays the ends of transfers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tierkv._answers import found_in
from tierkv._breaker import Traffic
from tierkv._mover import Completion, Mover, MoverLimits
from tierkv.protocols import ScanTier, Tier, TierContext
from tierkv.types import Chunk, ChunkKey, Found, Transfer

logger = logging.getLogger("vllm.tierkv.loop")

_MAX_FOUND = 20_000
"""Scan results that may wait for the scheduler; the scan waits behind them."""
_CLOSE_S = 10.0
_OPENING = "tierkv-opening-"


class Slots(Protocol):
    """The pool as the Mover needs it."""

    def view(self, slot: int) -> memoryview: ...

    def close(self) -> None: ...


class Opened(NamedTuple):
    level: int
    tier: Tier


class Closed(NamedTuple):
    """A tier that could not be opened."""

    level: int
    error: str


class Doors(NamedTuple):
    """One of a level's breakers changed."""

    level: int
    reads: Traffic
    writes: Traffic


class Absorbed(NamedTuple):
    """Chunks that a tier has found, by scan or probe."""

    level: int
    tier: object
    """Which one was asked: by then another may stand in its place."""
    found: Sequence[Found]
    asked: Sequence[ChunkKey] = ()
    """What a probe was about."""


News = Opened | Closed | Doors | Absorbed


class MoverLoop:
    """See the module. Public methods are the scheduler thread's; nothing starts before the first tier is opened.

    Args:
        n_levels: levels of the hierarchy, the primary included.
        join_pool: maps the slots; called once, on the loop's thread, where it may block.
        chunk_nbytes: largest payload of a chunk.
        stride_nbytes: distance of slots.
        limits: see :class:`~tierkv._mover.MoverLimits`.
        cooldowns_s: each level's pause of its breakers; the limits' by default.
    """

    def __init__(
        self,
        n_levels: int,
        join_pool: Callable[[], Slots],
        *,
        chunk_nbytes: int,
        stride_nbytes: int,
        limits: MoverLimits,
        cooldowns_s: Sequence[float] | None = None,
    ) -> None:
        self._join_pool = join_pool
        self._chunk_nbytes = chunk_nbytes
        self._stride_nbytes = stride_nbytes
        self._limits = limits
        self._cooldowns_s = cooldowns_s
        self._tiers: list[Any] = [None] * n_levels
        self._pool: Slots | None = None
        self._mover: Mover | None = None
        self._scans: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._news: deque[News | Completion] = deque()
        self._found: deque[Absorbed] = deque()
        # Each is changed by one thread only: scan results that were queued, and that were taken.
        self._n_queued = self._n_taken = 0
        self._asked: set[tuple[int, ChunkKey]] = set()
        """Levels and keys of probes under way: an engine that waits asks for them again in every step."""
        self._room = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._n_left = 0
        """Batches and tiers that had not ended when they were given up."""

    @property
    def deadline_s(self) -> float:
        """After it every transfer has been reported, be it as one that hangs."""
        return self._limits.deadline_s

    # -- the scheduler's side -----------------------------------------------------------------------------------

    def open(self, index: int, tier: Tier, capacity_nbytes: int, namespace: bytes) -> None:
        """Open a tier in the place of whatever is there, which is closed first. :class:`Opened` or :class:`Closed`."""
        self._start()
        ctx = TierContext(self._chunk_nbytes, self._stride_nbytes, namespace, capacity_nbytes)
        self._run(self._open(index, tier, ctx), f"{_OPENING}{index}")

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """Each comes back as one or two :class:`~tierkv._mover.Completion`."""
        assert self._loop is not None, "nothing is sent to a level that was never opened"
        self._loop.call_soon_threadsafe(self._submit, transfers)

    def probe(self, index: int, keys: Sequence[ChunkKey]) -> None:
        """What is found comes back as :class:`Absorbed`; what is not is settled from then on."""
        keys = [key for key in keys if (index, key) not in self._asked]
        if keys:
            self._asked.update((index, key) for key in keys)
            self._run(self._probe(index, keys))

    def next_news(self) -> News | Completion | None:
        news = self._news.popleft() if self._news else None
        if isinstance(news, Absorbed):
            self._asked.difference_update([(news.level, key) for key in news.asked])
        return news

    def next_found(self) -> Absorbed | None:
        """Scan results, after everything else."""
        if not self._found:
            return None
        found = self._found.popleft()
        self._n_taken += len(found.found)
        if self._loop is not None and not self._is_full():
            self._loop.call_soon_threadsafe(self._room.set)
        return found

    def close(self, orders: Mapping[int, Sequence[Chunk]]) -> bool:
        """Blocks for at most ``_CLOSE_S``; a hung tier keeps its daemon thread and nothing else.

        Returns:
            False if a tier is left behind, and may still touch slots.
        """
        if self._loop is None or self._thread is None:
            return True
        self._run(self._close(orders))
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.warning("A tier did not close within %g s and is left behind", _CLOSE_S)
        self._loop = None
        return not self._thread.is_alive() and not self._n_left

    def _start(self) -> None:
        if self._thread is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._main, args=(self._loop,), name="tierkv-mover", daemon=True)
            self._thread.start()

    def _run(self, work: Coroutine[Any, Any, None], name: str | None = None) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._spawn, work, name)

    # -- the loop's side ----------------------------------------------------------------------------------------

    @staticmethod
    def _main(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.close()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str | None = None) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _submit(self, transfers: Sequence[Transfer]) -> None:
        assert self._mover is not None, "a level opens before anything is sent to it"
        self._mover.submit(transfers)

    async def _open(self, index: int, tier: Tier, ctx: TierContext) -> None:
        try:
            self._join()
            await self._replace(index)
            await tier.open(ctx)
        except BaseException as error:  # a third party's tier may raise anything; it must not stop the engine
            logger.debug("tier %s", tier.name, exc_info=True)
            with contextlib.suppress(Exception):
                await tier.aclose()  # what it had opened so far
            if not isinstance(error, Exception):
                raise
            self._news.append(Closed(index, str(error) or type(error).__name__))
            return
        self._tiers[index] = tier
        self._news.append(Opened(index, tier))
        if isinstance(tier, ScanTier):
            self._scans[index] = self._spawn(self._scan(index, tier))

    def _join(self) -> None:
        """Map the pool, once. Blocking is fine: this loop has nothing else to do before."""
        if self._pool is None:
            self._pool = self._join_pool()
            self._mover = Mover(
                self._tiers,
                self._pool.view,
                self._news.append,
                on_breaker=self._on_breaker,
                stride_nbytes=self._stride_nbytes,
                limits=self._limits,
                cooldowns_s=self._cooldowns_s,
            )

    def _on_breaker(self, level: int, *, reads: Traffic, writes: Traffic) -> None:
        self._news.append(Doors(level, reads, writes))

    async def _replace(self, index: int) -> None:
        """Stop the scan of the tier of an earlier epoch and close it."""
        scan, tier = self._scans.pop(index, None), self._tiers[index]
        self._tiers[index] = None
        if scan is not None:
            scan.cancel()
            await asyncio.wait({scan})
        if self._mover is not None:
            self._mover.renew(index)
        if tier is not None:
            # It may wait for a call that hangs; its successor does not.
            closing = self._spawn(self._close_quietly(tier))
            await asyncio.wait({closing}, timeout=_CLOSE_S / 3)

    @staticmethod
    async def _close_quietly(tier: Tier) -> None:
        try:
            await tier.aclose()
        except Exception as error:  # noqa: BLE001 - a third party's tier may raise anything; its successor opens all the same
            logger.debug("tier %s did not close: %r", tier.name, error)

    async def _scan(self, index: int, tier: ScanTier) -> None:
        try:
            async for told in tier.scan():
                found = found_in(told)
                self._found.append(Absorbed(index, tier, found))
                self._n_queued += len(found)
                while self._is_full():
                    self._room.clear()
                    await self._room.wait()
        except Exception:
            logger.exception("The scan of tier %d ended early; what it did not reach is found by probes", index)

    def _is_full(self) -> bool:
        """Scan results wait in such numbers that the scan waits, too."""
        return self._n_queued - self._n_taken > _MAX_FOUND

    async def _probe(self, index: int, keys: Sequence[ChunkKey]) -> None:
        tier = self._tiers[index]
        found: Sequence[Found] = ()
        try:
            if tier is not None:
                found = found_in(await tier.probe(keys))
        except Exception as error:  # noqa: BLE001 - as above
            logger.debug("probe of tier %d: %r", index, error)
        finally:
            self._news.append(Absorbed(index, tier, found, keys))

    async def _close(self, orders: Mapping[int, Sequence[Chunk]]) -> None:
        try:
            await self._stop_opening()
            if self._mover is not None:
                self._n_left += await self._mover.aclose(timeout_s=_CLOSE_S / 3)
            for index, tier in enumerate(self._tiers):
                if tier is not None:
                    await self._close_tier(index, tier, orders.get(index, ()))
        finally:
            for task in self._tasks - {asyncio.current_task()}:  # type: ignore[operator]
                task.cancel()
            if self._pool is not None:
                self._pool.close()
            asyncio.get_running_loop().stop()

    async def _stop_opening(self) -> None:
        """A tier that is still being opened is in no list of open ones: it closes itself when it is told to stop."""
        opening = [task for task in self._tasks if task.get_name().startswith(_OPENING)]
        for task in opening:
            task.cancel()
        if opening:
            await asyncio.wait(opening, timeout=_CLOSE_S / 3)

    async def _close_tier(self, index: int, tier: Tier, order: Sequence[Chunk]) -> None:
        if index in self._scans:
            self._scans[index].cancel()
        try:
            async with asyncio.timeout(_CLOSE_S / 3):
                if isinstance(tier, ScanTier) and order:
                    await tier.save_order(order)
                await tier.aclose()
        except TimeoutError:
            self._n_left += 1
        except Exception as error:  # noqa: BLE001 - a third party's tier may raise anything; the others close all the same
            logger.debug("tier %s did not close: %r", tier.name, error)
