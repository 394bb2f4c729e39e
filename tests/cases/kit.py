"""What the cases share: caches over real files, an ear for events, and the books recounted (DESIGN's invariants)."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import selectors
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest

from tests.fs_kit import SlotPath, capacity_for, recount, rows_under
from tests.patience import PATIENCE_S
from tests.toys import NBYTES, STRIDE, ToyChunker, buffers, loop_time, payload
from tierkv import (
    Event,
    EventKind,
    Level,
    MemoryTier,
    MoverLimits,
    Namespace,
    Outcome,
    PrefixChunker,
    TieredCache,
    Writes,
    _ports,
)
from tierkv.policies import LRU
from tierkv.protocols import EvictionPolicy, Tier
from tierkv.tiers._fs.format import charge_nbytes
from tierkv.tiers.fs import FSTier
from tierkv.types import ChunkKey, Reason

P = ParamSpec("P")
T = TypeVar("T")
_CHUNK_FILE = re.compile(r"[0-9a-f]{16,}\.[0-9a-f]{16}")
CHARGE = charge_nbytes(NBYTES)
LIMITS = MoverLimits(deadline_s=PATIENCE_S, breaker_cooldown_s=0.05)
"""Patient: a case must not depend on how fast the machine is."""


class Ear:
    """Listens to events: per level and key they alternate, and what they add up to is the index (invariant 10)."""

    def __init__(self) -> None:
        self.known: set[tuple[int, ChunkKey]] = set()
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        place = (event.level, event.key)
        assert (place in self.known) == (event.kind is EventKind.REMOVED), f"{event.kind} twice"
        self.known.symmetric_difference_update({place})
        self.events.append(event)

    def removed(self, reason: Reason | None = None, level: int = 0) -> list[ChunkKey]:
        """Keys that left, in order."""
        return [
            event.key
            for event in self.events
            if event.kind is EventKind.REMOVED and event.level == level and reason in (None, event.reason)
        ]


def cache_over(
    *lower: Tier,
    n_slots: int = 8,
    n_chunks: int = 64,
    capacity: int | None = None,
    bounded: bool = True,
    queue: int = 1 << 30,
    policy: EvictionPolicy | None = None,
    writes: Writes = Writes.CASCADE,
    **options: Any,
) -> TieredCache:
    """A primary of slots over levels below; an :class:`Ear` listens, see :func:`ear`."""
    levels = [Level(MemoryTier(name="primary"), LRU() if policy is None else policy, capacity=n_slots * STRIDE)]
    size = room_for(n_chunks) if capacity is None and bounded else capacity
    levels += [Level(tier, LRU(), capacity=size, writes=writes, queue=queue) for tier in lower]
    options.setdefault("chunker", ToyChunker())
    options.setdefault("limits", LIMITS)
    options.setdefault("on_event", Ear())
    options.setdefault("namespace", b"toy")
    options.setdefault("clock", loop_time)
    return TieredCache(levels=levels, **options)


def prefixes(namespace: Namespace, **options: Any) -> PrefixChunker:
    """The real chunker, two tokens a chunk."""
    return PrefixChunker(namespace=namespace, tokens_per_block=2, blocks_per_chunk=1, chunk_nbytes=NBYTES, **options)


def fs_tier(root: Path | str, **settings: Any) -> FSTier:
    return FSTier(root, min_free=0, **settings)


@asynccontextmanager
async def opened(cache: TieredCache, *, settled: bool = True) -> Any:
    """Open it; in the end its books must be right, and everything at rest if ``settled``."""
    async with cache:
        yield cache
        if settled:
            await settle(cache)
        else:
            cache._opened().hierarchy.check()


def ear(cache: TieredCache) -> Ear:
    assert isinstance(cache._on_event, Ear)
    return cache._on_event


async def settle(cache: TieredCache) -> None:
    """Wait until nothing is under way; then count (invariants 1 and 10)."""
    assert await cache.wait_idle(PATIENCE_S), f"not at rest: {cache.statistics()}"
    hierarchy = cache._opened().hierarchy
    hierarchy.check()
    for record in cache.statistics().values():
        assert record.n_pending == record.n_pinned == record.n_quarantined == 0, record
        sum_nbytes = record.free_nbytes + record.ready_nbytes + record.pending_nbytes + record.quarantined_nbytes
        assert sum_nbytes == record.capacity_nbytes, record
        assert record.n_offered == record.n_stored + record.n_present + sum(record.refused.values()), record
    index = {(level.index, entry.key) for level in hierarchy.levels for entry in level.ledger}
    assert ear(cache).known == index, "the events tell of another index"


async def store(cache: TieredCache, tokens: Sequence[int], **options: Any) -> list[Outcome]:
    """Store the right bytes of a prefix."""
    return list(await cache.store(tokens, buffers(cache.chunks(tokens, **options)), **options))


async def keep(cache: TieredCache, tokens: Sequence[int], **options: Any) -> None:
    """Store, and expect that all was taken."""
    outcomes = await store(cache, tokens, **options)
    assert all(outcome.ok for outcome in outcomes), outcomes


async def fetch(cache: TieredCache, tokens: Sequence[int], **options: Any) -> int:
    """How many leading chunks come back; every byte of them is right (invariant 2)."""
    hit = await cache.lookup(tokens, **options)
    places = [bytearray(NBYTES) for _ in hit.chunks]
    n_tokens = await cache.load(hit, places)
    n_chunks = sum(chunk.end_token <= n_tokens for chunk in hit.chunks)
    for chunk, place in zip(hit.chunks[:n_chunks], places, strict=False):
        assert place == payload(chunk), "wrong bytes"
    return n_chunks


async def forget_primary(cache: TieredCache) -> None:
    """Host memory forgets everything; what lies below stays."""
    await settle(cache)
    cache._opened().hierarchy.reset([0])
    cache._opened().kick()
    await settle(cache)


def room_for(n_chunks: int) -> int:
    """The capacity of a root that holds so many chunks and no more."""
    return capacity_for(n_chunks, CHARGE)


def chunk_files(root: Path | str) -> dict[str, Any]:
    """Whole chunks by their key: a path for each that is a file, and what comes closest for one in a slab."""
    files: dict[str, Any] = {key.hex(): slot for key, slot in rows_under(root)}
    return files | {
        path.name.split(".")[0]: path
        for path in sorted(Path(root).rglob("*"))
        if _CHUNK_FILE.fullmatch(path.name) and path.is_file()
    }


def file_of(root: Path | str, key: bytes) -> Any:
    return chunk_files(root)[key.hex()]


def place_of(root: Path | str, key: bytes) -> dict[str, Any]:
    """What a rule of :class:`~tests.faults.Faults` says to be about reads of a chunk that is there, and of no other."""
    file = file_of(root, key)
    return {"path": ".slab", "within": file.span} if isinstance(file, SlotPath) else {"path": f"/{key.hex()}"}


def litter(root: Path | str) -> list[str]:
    """What no clean root has: unfinished files."""
    return sorted(name for _, _, names in os.walk(root) for name in names if ".part" in name)


def within(root: Path | str, capacity_nbytes: int) -> bool:
    return recount(root) <= capacity_nbytes


def start(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Begin something that a case cancels, or waits for later."""
    return asyncio.create_task(work)


async def turns_until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Let others run until it is so: for what has no event, such as a thread's doings."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.001)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop whose time passes only when all wait, and then at once: delays are exact, whatever the machine does.

    For what runs without threads: time would run past whatever a thread still does. Copies between slots and buffers
    have none there, however large they are.
    """

    def __init__(self) -> None:
        selector = selectors.DefaultSelector()
        super().__init__(selector)
        self._now_s = 0.0
        select = selector.select

        def skip(timeout: float | None = None) -> Any:
            assert timeout is not None, "all wait, and for nothing that would come"
            self._now_s += max(timeout, 0.0)
            return select(0)

        selector.select = skip  # type: ignore[method-assign]

    def time(self) -> float:
        return self._now_s


def in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        patch.setattr(_ports, "_INLINE_NBYTES", 1 << 40)
        return runner.run(work)


def virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test whose time is the loop's own: a deadline passes only where all wait for it, never for a slow machine."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        in_virtual_time(test(*args, **kwargs))

    return run
