"""``python -m tests.soak``: many operations over three levels, with faults, cancellations and resets at random.

Several tasks use one :class:`tierkv.TieredCache` over host memory, a tier with moods and a real disk with weather (by
the preloaded library of :mod:`tests.faults`, where there is a compiler). At checkpoints everything must come to rest,
the books are recounted, the event stream must add up to the index, the files on the disk to the ledger, and what the
process holds is written down. Every byte that is served is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.cases.kit import Ear, chunk_files, litter, turns_until
from tests.faults import REPOSITORY, Faults
from tests.soak.measure import Holds, growth
from tests.soak.storm import MoodyTier, Weather
from tests.toys import ToyChunker
from tierkv import Chunk, Hint, Level, MemoryTier, MoverLimits, Scope, TieredCache, Writes
from tierkv.policies import LRU, S3FIFO
from tierkv.tiers.fs import FSTier

N_WORKERS = 8
NBYTES = 1000
N_BRANCHES = 400
N_CHECKPOINTS = 20
OPERATIONS_A_TURN = 2000
"""After so many the weather changes, and what hangs in the moody tier goes on."""
MOST_GROWTH = 0.01
MOST_GROWTH_OF_A_SHORT_RUN = 0.05
"""Below a million operations the interpreter's arenas are still filling in the second half."""


class SmallChunker(ToyChunker):
    """Remembers what it has cut: hashing is not what is tried here."""

    chunk_nbytes = NBYTES

    def __init__(self) -> None:
        self._cut: dict[tuple[int, ...], Sequence[Chunk]] = {}

    def chunks(self, tokens: Sequence[int], *, extra: bytes = b"") -> Sequence[Chunk]:
        key = tuple(tokens)
        if key not in self._cut:
            self._cut[key] = super().chunks(tokens, extra=extra)
        return self._cut[key]


class SetEar(Ear):
    """Keeps what the events add up to, and not the events."""

    def __init__(self) -> None:
        super().__init__()
        self.n_events = 0

    def __call__(self, event: object) -> None:
        super().__call__(event)  # type: ignore[arg-type]
        self.n_events += 1
        self.events.clear()


def payload(chunk: Chunk) -> bytes:
    return (bytes(chunk.key) * (NBYTES // len(chunk.key) + 1))[:NBYTES]


class Soak:
    """One run.

    Args:
        n_operations: calls of the cache's verbs in all.
        seed: of everything that is drawn; threads and the kernel's timing are not.
        root: of the fs tier.
        faults: rules for its system calls; None leaves them alone.
    """

    def __init__(self, n_operations: int, seed: int, root: Path, faults: Faults | None) -> None:
        self.n_operations = n_operations
        self.rng = random.Random(seed)
        self.root = root
        self.moody = MoodyTier(MemoryTier(name="moody"), self.rng)
        self.disk = FSTier(root, min_free=0)
        self.weather = Weather(faults, str(root), self.rng)
        self.ear = SetEar()
        self.done: Counter[str] = Counter()
        self.n_done = 0
        self.n_served = 0
        self.taken: list[Holds] = []
        self.cache = TieredCache(
            chunker=SmallChunker(),
            namespace=b"soak",
            levels=[
                Level(MemoryTier(name="primary"), LRU(), capacity=160 * 4096),
                Level(self.moody, S3FIFO(), capacity=200 * 4096),
                Level(self.disk, LRU(), capacity=400 * 8192, writes=Writes.DEMOTE, queue="256KiB"),
            ],
            on_event=self.ear,
            limits=MoverLimits(deadline_s=0.1, breaker_cooldown_s=0.02),
        )

    async def run(self) -> None:
        began_s = time.monotonic()
        async with self.cache:
            await self.start_threads()
            for i in range(1, N_CHECKPOINTS + 1):
                self.moody.rate = 0.005
                until = self.n_operations * i // N_CHECKPOINTS
                async with asyncio.TaskGroup() as group:
                    for _ in range(N_WORKERS):
                        group.create_task(self.work(until))
                await self.rest()
                self.taken.append(Holds.take(self.n_done))
                print(
                    f"{self.taken[-1].line()}, {self.n_done / (time.monotonic() - began_s):,.0f} a second", flush=True
                )
            print(f"done: {dict(self.done)}")
            print(f"chunks served {self.n_served:,}, events {self.ear.n_events:,}")
            print(f"moods {dict(self.moody.n_struck)}, weather {dict(self.weather.n_turns)}")
            for name, record in self.cache.statistics().items():
                print(f"{name}: {record}")

    async def start_threads(self) -> None:
        """All that the fs tier may ever have: it starts them when there is work for so many at once."""
        for lane in (self.disk._read_lane, self.disk._write_lane, self.disk._probe_lane):
            all_there = threading.Barrier(lane.n_threads)
            await asyncio.gather(*(lane.run(all_there.wait) for _ in range(lane.n_threads)))

    async def work(self, until: int) -> None:
        """One user of the cache."""
        while self.n_done < until:
            self.n_done += 1
            if self.n_done % OPERATIONS_A_TURN == 0:
                self.weather.turn()
                self.moody.gate.let(self.moody.gate.n_waiting)
            what = self.rng.choices(_NAMES, _WEIGHTS)[0]
            self.done[what] += 1
            verb = _VERBS[what](self, self.tokens())
            if self.rng.random() >= 0.02:
                await verb
                continue
            self.done["cancelled"] += 1
            task = asyncio.create_task(verb)
            for _ in range(self.rng.randrange(6)):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def tokens(self) -> list[int]:
        """A prompt: one of many that begin alike and go on apart, some far more often asked for than others."""
        branch = int(self.rng.paretovariate(0.5)) % N_BRANCHES
        return [branch % 5, 0, *[branch] * (2 * self.rng.randrange(5))]

    # -- verbs --------------------------------------------------------------------------------------------------

    async def lookup(self, tokens: list[int]) -> None:
        await self.cache.lookup(tokens)

    async def store(self, tokens: list[int]) -> None:
        chunks = self.cache.chunks(tokens)
        await self.cache.store(tokens, [payload(chunk) for chunk in chunks])

    async def load(self, tokens: list[int]) -> None:
        hit = await self.cache.lookup(tokens)
        places = [bytearray(NBYTES) for _ in hit.chunks]
        n_tokens = await self.cache.load(hit, places)
        for chunk, place in zip(hit.chunks, places, strict=True):
            if chunk.end_token <= n_tokens:
                assert place == payload(chunk), "wrong bytes"
                self.n_served += 1

    async def lease(self, tokens: list[int]) -> None:
        async with self.cache.lease(await self.cache.lookup(tokens)) as lease:
            for chunk in lease.chunks:
                assert lease.view(chunk) == payload(chunk), "wrong bytes"
            await asyncio.sleep(0)

    async def prefetch(self, tokens: list[int]) -> None:
        await self.cache.prefetch(await self.cache.lookup(tokens))

    async def delete(self, tokens: list[int]) -> None:
        await self.cache.delete(self.cache.chunks(tokens)[1:])

    async def hint(self, tokens: list[int]) -> None:
        hint = self.rng.choice((Hint.DEAD, Hint.KEEP, Hint.TTL(5)))
        self.cache.hint([chunk.key for chunk in self.cache.chunks(tokens)], hint)

    async def reset(self, tokens: list[int]) -> None:
        await self.cache.reset(self.rng.choice((Scope.MEMORY, Scope.ALL)))

    # -- rest ---------------------------------------------------------------------------------------------------

    async def rest(self) -> None:
        """The weather is fine: everything comes to rest, and all that is kept incrementally is counted again."""
        self.weather.clear()
        self.moody.rate = 0.0
        await turns_until(lambda: not litter(self.root))  # what could not be removed is tried again every second
        while not await self.cache.wait_idle(0.05):
            self.moody.gate.let(self.moody.gate.n_waiting)
        driver = self.cache._opened()
        hierarchy = driver.hierarchy
        hierarchy.check()
        for record in self.cache.statistics().values():
            assert record.n_pending == record.n_pinned == record.n_quarantined == 0, record
            sum_nbytes = record.free_nbytes + record.ready_nbytes + record.pending_nbytes + record.quarantined_nbytes
            assert sum_nbytes == record.capacity_nbytes, record
            assert record.n_offered == record.n_stored + record.n_present + sum(record.refused.values()), record
        index = {(level.index, entry.key) for level in hierarchy.levels for entry in level.ledger}
        assert self.ear.known == index, "the events tell of another index"
        listed = {entry.key for entry in hierarchy.levels[2].ledger}
        with contextlib.suppress(AssertionError):  # as with litter: an earlier copy of a chunk that was written anew
            await turns_until(lambda: set(chunk_files(self.root)) == {key.hex() for key in listed}, 10.0)
        on_disk = {bytes.fromhex(name) for name in chunk_files(self.root)}
        assert on_disk == listed, f"on disk alone {on_disk - listed}, in the ledger alone {listed - on_disk}"


_VERBS = {
    "lookup": Soak.lookup, "store": Soak.store, "load": Soak.load, "lease": Soak.lease, "prefetch": Soak.prefetch,
    "delete": Soak.delete, "hint": Soak.hint, "reset": Soak.reset,
}  # fmt: skip
_NAMES = list(_VERBS)
_WEIGHTS = [40, 15, 20, 10, 5, 2, 7.98, 0.02]


class _Counting(logging.Handler):
    """What is logged is counted: a bad day must not fill a log, nor this process."""

    n_records = 0

    def emit(self, record: logging.LogRecord) -> None:
        _Counting.n_records += 1


def inside(n_operations: int, seed: int) -> int:
    """In the process that is measured."""
    logging.getLogger().addHandler(_Counting())
    faults = Faults.attach() if "TIERKV_FAULTS" in os.environ else None
    with tempfile.TemporaryDirectory(prefix="tierkv-soak-") as folder:
        soak = Soak(n_operations, seed, Path(folder, "root"), faults)
        asyncio.run(soak.run())
    memory, *others = growth(soak.taken)
    print(f"logged {_Counting.n_records} records")
    print(f"second half: resident memory {memory:+.2%}, descriptors, threads, tasks {others}")
    most = MOST_GROWTH if n_operations >= 1_000_000 else MOST_GROWTH_OF_A_SHORT_RUN
    if memory >= most or any(each > 0 for each in others):
        print("it grows")
        return 1
    print("flat")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        return inside(given.operations, given.seed)
    print(f"{given.operations:,} operations, seed {given.seed}", flush=True)
    command = [sys.executable, "-m", "tests.soak", "--inside"]
    command += ["--operations", str(given.operations), "--seed", str(given.seed)]
    with tempfile.TemporaryDirectory(prefix="tierkv-soak-rules-") as folder:
        environment = dict(os.environ)
        if shutil.which("gcc") or shutil.which("cc"):
            environment |= Faults(Path(folder, "faults")).environment
        else:
            print("no C compiler: the disk has no weather")
        return subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
