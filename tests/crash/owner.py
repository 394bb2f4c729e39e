"""One of several processes on a root, each with a cache of its own; the tests start it, hold it and kill it.

``python -m tests.crash.owner ROOT N_CHUNKS NUMBER starts N``: N times, each when told to by a line on standard input,
enter a cache, store, read what everybody stored, leave. ``... roam``: the same in one cache, until standard input ends.
Lines on standard output say what happened; whatever is wrong ends the process with an exception.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import Counter
from pathlib import Path

from tests.cases.kit import CHARGE, Ear, ear, fetch, forget_primary, store, turns_until
from tests.fs_kit import OVERHEAD
from tests.patience import PATIENCE_S, be_patient
from tests.toys import STRIDE, ToyChunker, prompt
from tierkv import Event, Level, MemoryTier, MoverLimits, Reason, Status, TieredCache
from tierkv.policies import LRU
from tierkv.tiers._fs import locks as _fs_locks
from tierkv.tiers._fs import owners as _fs_owners
from tierkv.tiers.fs import FSTier

N_BRANCHES = 40


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Listener(Ear):
    """Counts what left a root because somebody else removed it."""

    n_vanished = 0

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        self.n_vanished += event.level == 1 and event.reason is Reason.VANISHED
        self.events.clear()


def cache_on(root: Path, n_chunks: int) -> TieredCache:
    """A primary of a few slots over the root."""
    return TieredCache(
        chunker=ToyChunker(),
        namespace=b"toy",
        levels=[
            Level(MemoryTier(name="primary"), LRU(), capacity=12 * STRIDE),
            Level(FSTier(root, min_free=0), LRU(), capacity=n_chunks * CHARGE + OVERHEAD),
        ],
        on_event=Listener(),
        limits=MoverLimits(deadline_s=PATIENCE_S),
    )


async def use(cache: TieredCache, draw: random.Random, seen: Counter[str]) -> None:
    """Store a prompt and read another one; who stored it does not matter."""
    outcomes = await store(cache, prompt(draw.randrange(N_BRANCHES)))
    assert all(outcome.status in (Status.OK, Status.REFUSED) for outcome in outcomes), outcomes
    if draw.random() < 0.3:
        await forget_primary(cache)
    tokens = prompt(draw.randrange(N_BRANCHES))
    await cache.lookup(tokens)  # enters what others have stored
    disk = cache._opened().hierarchy.levels[1].ledger
    entries = [disk.get(chunk.key) for chunk in cache.chunks(tokens)]
    n_chunks = await fetch(cache, tokens)
    seen["shared"] += any(entry is not None and not entry.owned for entry in entries[:n_chunks])


async def starts(root: Path, n_chunks: int, number: int, n_starts: int) -> None:
    """Every start of ours at the same moment as the other's."""
    draw, seen = random.Random(number), Counter[str]()
    for _ in range(n_starts):
        say("waiting")
        sys.stdin.readline()
        async with cache_on(root, n_chunks) as cache:
            if draw.random() < 0.5:  # else it begins before its scan has ended
                await turns_until(lambda: cache._levels[1].tier.writable)  # type: ignore[attr-defined]
            await use(cache, draw, seen)
            if draw.random() < 0.5:  # else it leaves with writes under way, or waiting for its scan to end
                await cache.wait_idle(PATIENCE_S)
            record = cache.statistics()["fs"]
            seen.update(stored=record.n_stored, failed=record.refused.get("tier_error", 0))
            assert not record.broken
        say("left")
    say("ended", *(f"{what}={n}" for what, n in seen.items()))


async def roam(root: Path, n_chunks: int, number: int) -> None:
    """Until standard input ends. Dead owners' files are taken over sooner than an operator would want."""
    _fs_owners.ADOPT_AFTER_S = 0.2  # type: ignore[misc]
    draw, seen = random.Random(number), Counter[str]()
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(0, ended.set)
    async with cache_on(root, n_chunks) as cache:
        tier = cache._levels[1].tier
        assert isinstance(tier, FSTier) and tier._mount is not None
        seen["taken_over"] = int(tier._mount._ownership.new_id is None)
        while not ended.is_set():
            await use(cache, draw, seen)
            seen["vanished"] = ear(cache).n_vanished  # type: ignore[attr-defined]
            seen["adopted"] = tier.counters()["adopted_owners"]
            assert not cache.statistics()["fs"].broken
            say("seen", *(f"{what}={n}" for what, n in seen.items()))
    loop.remove_reader(0)
    say("ended")


async def main(root: str, n_chunks: str, number: str, what: str, *more: str) -> None:
    if what == "starts":
        await starts(Path(root), int(n_chunks), int(number), int(more[0]))
    else:
        await roam(Path(root), int(n_chunks), int(number))


if __name__ == "__main__":
    be_patient()
    # Stopped for each look, and on a busy machine, one may hold the root's lock for longer than an operator would bear.
    _fs_locks._ROOT_LOCK_TIMEOUT_S = PATIENCE_S  # type: ignore[misc]
    asyncio.run(main(*sys.argv[1:]))
