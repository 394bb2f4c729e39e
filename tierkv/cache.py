"""The asynchronous face: :class:`TieredCache` over levels, for serving code without vLLM.

Decisions are the hierarchy's, taken synchronously between awaits; copies are the mover's and the port's. One cache
belongs to one event loop; its methods may be called by any number of tasks of that loop at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from enum import Enum, auto
from types import TracebackType
from typing import Any, Self, cast

from tierkv._driver import Driver
from tierkv._hierarchy import UNSETTLED
from tierkv._hints import Hint, Hinted
from tierkv._lease import Lease, Pins
from tierkv._ledger import PENDING, READY, Entry
from tierkv._mover import MoverLimits, padded_nbytes
from tierkv._ports import HostPort, uncancelled
from tierkv._setup import Level, capacities_of, check_rest, chunk_nbytes_of, cooldowns_of, namespace_of, plan_of
from tierkv.errors import ClosedError, bad_setting
from tierkv.protocols import (
    Chunker,
    Clock,
    Port,
    PortJob,
    ScanTier,
    Tier,
    TierContext,
)
from tierkv.types import (
    Chunk,
    ChunkKey,
    Event,
    LevelStatistics,
    Outcome,
    PrefixHit,
    Reason,
    Status,
    Stop,
)

_log = logging.getLogger(__name__)

_TIER_CLOSE_S = 10.0
"""How long a tier may take to write down what it holds and let go of it, at least."""


class Scope(Enum):
    """What :meth:`TieredCache.reset` forgets."""

    MEMORY = auto()
    """Every level that does not outlive the process; what lies on disk is found again."""
    ALL = auto()
    """Everything, also what a scan has not found yet. What other processes wrote on a shared root is theirs and stays:
    new weights take another ``Namespace``, not a reset."""


class TieredCache:
    """Keeps chunks of KV cache in a hierarchy of memories and gives them back byte for byte, or not at all.

    Args:
        chunker: cuts tokens into chunks and names them.
        levels: fastest first; the first in host memory.
        device: copies between the device's blocks and host slots. Without one, ``store`` and ``load`` take buffers.
        chunk_nbytes: payload of the largest chunk in bytes, or text such as "1MiB"; by default the chunker's or
            the device's.
        namespace: identity under which keys mean anything; by default the chunker's.
        on_event: told of each chunk that became readable at a level or stopped being so; on the loop, must not block.
        limits: deadlines and parallelism of transfers.
        clock: monotonic seconds.

    Raises:
        ConfigError: from the constructor or on entering; nothing has been created then.
    """

    def __init__(
        self,
        *,
        chunker: Chunker,
        levels: Sequence[Level],
        device: Port | None = None,
        chunk_nbytes: int | str | None = None,
        namespace: bytes | None = None,
        on_event: Callable[[Event], None] | None = None,
        limits: MoverLimits | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._limits = check_rest(chunker=chunker, device=device, on_event=on_event, limits=limits, clock=clock)
        self._chunker = chunker
        self._port: Port = HostPort() if device is None else device
        self._blocks_per_chunk: int | None = None if device is None else getattr(chunker, "blocks_per_chunk", 1)
        self._chunk_nbytes = chunk_nbytes_of(chunk_nbytes, chunker, device)
        self._namespace = namespace_of(namespace, chunker)
        self._capacities = capacities_of(levels, self._chunk_nbytes)
        self._levels = tuple(levels)
        self._cooldowns_s = cooldowns_of(levels, self._limits)
        self._on_event = on_event
        self._clock = clock
        self._stride_nbytes = padded_nbytes(self._chunk_nbytes)
        self._driver: Driver | None = None
        self._closing: asyncio.Task[None] | None = None

    # -- life ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._driver is not None:
            raise ClosedError("a cache is entered once")
        opened: list[Tier] = []
        try:
            for level, capacity in zip(self._levels, self._capacities, strict=True):
                opened.append(level.tier)
                await level.tier.open(TierContext(self._chunk_nbytes, self._stride_nbytes, self._namespace, capacity))
            plans = [
                plan_of(level, index, self._capacities[index], self._stride_nbytes)
                for index, level in enumerate(self._levels)
            ]
            driver = Driver(
                opened,
                plans,
                on_event=self._on_event,
                limits=self._limits,
                cooldowns_s=self._cooldowns_s,
                stride_nbytes=self._stride_nbytes,
                clock=self._clock,
            )
            self._port.attach(driver.primary, self._stride_nbytes)
        except BaseException:
            await uncancelled(asyncio.create_task(_give_up(opened), name="tierkv-give-up"))
            raise
        self._driver = driver
        self._driver.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self, timeout_s: float = 10.0) -> None:
        """Finish the copies under way, at most ``timeout_s``, then close every tier, slowest first. Idempotent.

        Whatever happens, also a cancellation, everything is released. Copies that hang stay in threads that end with
        the process, and a tier that has not saved its order, or has not closed, after ``timeout_s`` (10 s at least) is
        left to itself with a warning. Raises an ExceptionGroup of what the tiers raised.
        """
        if self._driver is None:
            return
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(timeout_s), name="tierkv-close")
        await uncancelled(self._closing)

    async def _close(self, timeout_s: float) -> None:
        driver = self._opened(closing=True)
        await driver.stop(timeout_s)
        self._port.close()
        limit_s = max(timeout_s, _TIER_CLOSE_S)
        errors: list[Exception] = []
        for level, books in reversed(list(zip(self._levels, driver.hierarchy.levels, strict=True))):
            try:
                if books.plan.scans:
                    saving = cast("ScanTier", level.tier).save_order(books.ledger.coldest_first())
                    await _within(limit_s, level.tier, "order not saved", saving)
            except Exception as error:  # noqa: BLE001 - the tier must be closed all the same
                errors.append(error)
            try:
                await _within(limit_s, level.tier, "not closed", level.tier.aclose())
            except Exception as error:  # noqa: BLE001 - so must the others
                errors.append(error)
        if errors:
            raise ExceptionGroup("tiers failed to close", errors)

    # -- asking -------------------------------------------------------------------------------------------------

    def chunks(self, tokens: Sequence[int], *, extra: bytes = b"", tenant: str = "") -> list[Chunk]:
        """The chunks of these tokens, found or not. Pure."""
        if not isinstance(tenant, str):
            msg = f"tenant must be text, not {type(tenant).__name__}"
            raise TypeError(msg)
        return [
            chunk._replace(nbytes=chunk.nbytes or self._chunk_nbytes, tenant=tenant)
            for chunk in self._chunker.chunks(tokens, extra=extra)
        ]

    async def lookup(self, tokens: Sequence[int], *, extra: bytes = b"") -> PrefixHit:
        """The longest prefix that some level holds: where each chunk lies, and why it stopped. Moves nothing.

        A chunk that a tier may hold without our knowing yet (a scan under way, another process on the same root) is
        looked for once, for a tenth of a second at most; past that it is a miss.
        """
        driver = self._opened()
        chunks = self.chunks(tokens, extra=extra)
        hit = driver.hierarchy.lookup(chunks)
        if hit.stop is Stop.MISS:
            unknown = [c.key for c in chunks[len(hit.chunks) :] if driver.hierarchy.find(c.key) == UNSETTLED]
            if unknown:
                await driver.probe(unknown)
                hit = driver.hierarchy.lookup(chunks)
        driver.hierarchy.count_hits(hit)
        return hit

    def statistics(self) -> Mapping[str, LevelStatistics]:
        """Each level's numbers at this instant, by tier name. O(1) a level."""
        driver = self._opened(closing=True)
        return {record.name: record for record in driver.hierarchy.statistics()}

    # -- using --------------------------------------------------------------------------------------------------

    def lease(self, hit: PrefixHit) -> Lease:
        """Promote a hit's chunks to the primary and pin them: ``async with cache.lease(hit) as lease``."""
        return Lease(Pins(self._opened(), 2 * self._limits.deadline_s), hit)

    async def load(self, hit: PrefixHit, places: Sequence[Any]) -> int:
        """Copy a hit's chunks to where the caller wants them; returns how many tokens really arrived.

        Args:
            hit: from :meth:`lookup`.
            places: with a device the block ids of the prefix, else one writable buffer of ``chunk.nbytes`` a chunk.

        Cancelled while a copy runs, it returns (and re-raises) only when that copy has ended: the blocks are the
        caller's again then.
        """
        driver = self._opened()
        jobs = self._jobs(hit.chunks, places)
        async with self.lease(hit) as lease:
            run = [job._replace(slot=slot) for job, slot in zip(jobs, lease.slots, strict=False)]
            arrived = await uncancelled(driver.own(self._port.load_chunks(run))) if run else []
        n_chunks = arrived.index(False) if False in arrived else len(arrived)
        return hit.chunks[n_chunks - 1].end_token if n_chunks else 0

    async def store(
        self, tokens: Sequence[int], places: Sequence[Any], *, extra: bytes = b"", tenant: str = ""
    ) -> Sequence[Outcome]:
        """Keep the chunks of these tokens; returns when the primary holds their bytes. Lower levels follow.

        Args:
            tokens: the whole prefix, from its first token.
            places: with a device the block ids of the prefix, else one buffer of ``chunk.nbytes`` bytes a chunk.
            extra: what else makes the bytes differ (a LoRA adapter, a salt); part of every key.
            tenant: whose chunks these are.

        Returns:
            Per chunk OK (stored, or there already), REFUSED with the reason, or FAILED.

        Cancelled while the copy runs, it re-raises only when the copy has ended.
        """
        driver = self._opened()
        chunks = self.chunks(tokens, extra=extra, tenant=tenant)
        jobs = {job.chunk.key: job for job in self._jobs(chunks, places)}
        outcomes: dict[ChunkKey, Outcome] = {}
        todo: Sequence[Chunk] = chunks
        deadline = self._clock() + self._limits.deadline_s
        while todo:
            offer = driver.hierarchy.offer(todo, tentative=self._clock() < deadline)
            driver.hierarchy.access([entry.chunk for entry in offer.present])
            driver.kick()
            outcomes.update((c.key, Outcome(c.key, Status.REFUSED, reason)) for c, reason in offer.refused)
            if offer.reserved:
                run = [jobs[entry.key]._replace(slot=entry.slot) for entry in offer.reserved]
                stored = await uncancelled(driver.own(self._fill(offer.reserved, run)))
                outcomes.update((outcome.key, outcome) for outcome in stored)
            outcomes.update((outcome.key, outcome) for outcome in await self._present(offer.present, deadline))
            todo = [chunk for chunk, reason in offer.refused if reason is Reason.FULL] if offer.retry else ()
            if todo:
                await driver.change(deadline - self._clock())
        return [outcomes[chunk.key] for chunk in chunks]

    async def prefetch(self, hit: PrefixHit) -> int:
        """Start bringing a hit's chunks to the primary, without waiting or pinning; returns how many are on the way."""
        driver = self._opened()
        before = driver.hierarchy.primary.n_pending
        driver.hierarchy.promote(hit.chunks, limit=Pins(driver).allowance(hit.chunks))
        on_the_way = driver.hierarchy.primary.n_pending - before
        driver.kick()
        return on_the_way

    def hint(self, keys: Iterable[ChunkKey], hint: Hint) -> Hinted:
        """Say what is known of the future of chunks: a session has ended, a system prompt will be back.

        Args:
            keys: of chunks, in prefix order; those that no level holds are ignored and counted. What is being stored
                counts as held.
            hint: ``Hint.DEAD``, ``Hint.KEEP`` or ``Hint.TTL(seconds)``.

        Raises:
            ConfigError: ``hint`` is none of these.
        """
        driver = self._opened()
        if isinstance(keys, (bytes, str)):
            msg = "keys must be a collection of keys, not one"
            raise TypeError(msg)
        return driver.hints.give(keys, hint)

    async def delete(self, chunks: Iterable[Chunk]) -> None:
        """Forget chunks everywhere: they are misses at once, their space is freed in the background."""
        driver = self._opened()
        driver.hierarchy.delete(chunk.key for chunk in chunks)
        driver.kick()

    async def reset(self, scope: Scope = Scope.ALL) -> None:
        """Forget everything in memory, or everything everywhere; also what is being stored right now."""
        driver = self._opened()
        levels = driver.hierarchy.levels
        driver.hierarchy.reset([level.index for level in levels if scope is Scope.ALL or not level.plan.scans])
        driver.kick()

    async def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until no copy, write or deletion is under way. False if ``timeout_s`` passed first."""
        driver = self._opened()
        return await driver.until(lambda: driver.idle, timeout_s)

    # -- copies -------------------------------------------------------------------------------------------------

    def _jobs(self, chunks: Sequence[Chunk], places: Sequence[Any]) -> list[PortJob]:
        """Which place belongs to which chunk. Raises ConfigError or ChunkSizeError if they do not fit."""
        per_chunk = self._blocks_per_chunk
        if per_chunk is None:
            parts: list[Any] = list(places[: len(chunks)])
        else:
            parts = [places[i * per_chunk : (i + 1) * per_chunk] for i in range(len(chunks))]
        if len(parts) < len(chunks) or (per_chunk is not None and parts and not len(parts[-1])):
            raise bad_setting("places", len(places), f"enough for {len(chunks)} chunks", len(chunks) * (per_chunk or 1))
        jobs = [PortJob(-1, chunk, part) for chunk, part in zip(chunks, parts, strict=True)]
        self._port.check(jobs)
        return jobs

    async def _fill(self, entries: Sequence[Entry], jobs: Sequence[PortJob]) -> list[Outcome]:
        """Fill reserved slots and commit them: runs to its end whatever becomes of the caller."""
        driver = self._opened(closing=True)
        error: Exception | None = None
        try:
            arrived: Sequence[bool] = await self._port.store_chunks(jobs)
        except Exception as raised:  # noqa: BLE001 - a failed copy is an outcome; its slots must be given back
            arrived, error = [False] * len(entries), raised
        outcomes = []
        gone = {id(entry) for entry in entries if entry.state is not PENDING}
        # In one go: a tier below that is on trial takes what comes at once, and nothing beside it.
        driver.hierarchy.commit_store([entry for entry, ok in zip(entries, arrived, strict=True) if ok])
        driver.hierarchy.abort_store(
            [entry for entry, ok in zip(entries, arrived, strict=True) if not ok], Reason.DEVICE_ERROR
        )
        for entry, ok in zip(entries, arrived, strict=True):
            if ok and id(entry) not in gone:
                outcomes.append(Outcome(entry.key, Status.OK))
            else:
                reason = Reason.DEVICE_ERROR if not ok else Reason.RESET
                outcomes.append(Outcome(entry.key, Status.FAILED if not ok else Status.REFUSED, reason, error))
        driver.wake()
        driver.kick()
        return outcomes

    async def _present(self, entries: Sequence[Entry], deadline: float) -> list[Outcome]:
        """Chunks that somebody else stores or promotes right now: theirs to finish, ours to wait for."""
        driver = self._opened(closing=True)
        await driver.until(lambda: not any(e.state is PENDING for e in entries), deadline - self._clock())
        return [
            Outcome(entry.key, Status.OK) if entry.state is READY else Outcome(entry.key, Status.REFUSED, Reason.BUSY)
            for entry in entries
        ]

    def _opened(self, *, closing: bool = False) -> Driver:
        if self._driver is None:
            raise ClosedError("the cache is not open: use `async with TieredCache(...) as cache`")
        if self._closing is not None and not closing:
            raise ClosedError("the cache is closed")
        return self._driver

    def __repr__(self) -> str:
        if self._driver is None:
            return "<TieredCache not open>"
        parts = [
            f"{level.name}: {len(level.ledger)} chunks, {level.ledger.free_nbytes} bytes free"
            for level in self._driver.hierarchy.levels
        ]
        return f"<TieredCache {'; '.join(parts)}>"


async def _give_up(opened: Sequence[Tier]) -> None:
    """Close what was opened, slowest first. Never raises: what kept the others from opening is what counts."""
    for tier in reversed(opened):
        try:
            await _within(_TIER_CLOSE_S, tier, "not closed", tier.aclose())
        except Exception as error:  # noqa: BLE001 - see above
            _log.warning("%s: closing raised %r", tier.name, error)


async def _within(limit_s: float, tier: Tier, otherwise: str, call: Coroutine[Any, Any, None]) -> None:
    """Wait for a call of a tier; one that hangs (a dead disk) goes on by itself and is not waited for any longer."""
    task = asyncio.ensure_future(call)
    done, _ = await asyncio.wait({task}, timeout=limit_s)
    if done:
        return task.result()
    _log.warning("%s: %s after %g s; what still runs there ends with the process", tier.name, otherwise, limit_s)
    task.cancel()
    return None
