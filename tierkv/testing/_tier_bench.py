"""A place to try a tier at: a directory of its own, memory with canaries, and calls whose form is always checked."""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from tierkv.protocols import ScanTier, Tier, TierContext
from tierkv.testing._keys import AWKWARD, CANARY, payload
from tierkv.testing._leaks import no_leaks
from tierkv.testing._rules import fail, require
from tierkv.types import Chunk, ChunkKey, Found, Outcome, Status

_OS_PAGE: Final = 4096
_PATIENCE_S: Final = 60.0
_PAUSE_S: Final = 0.002


class RawDoor(Protocol):
    """A way to a tier's medium that does not lead through the tier, so that the tier is not its own witness."""

    def get(self, key: ChunkKey) -> bytes | None:
        """The payload that lies on the medium under this key, or None."""
        ...

    def set(self, chunk: Chunk, data: bytes) -> None:
        """Put a whole, valid chunk there. Raise NotImplementedError if that cannot be done from outside."""
        ...

    def corrupt(self, key: ChunkKey, change: Callable[[bytes], bytes]) -> None:
        """Replace all that lies there for this key, headers and checksums too, by what ``change`` makes of it."""
        ...

    def remove(self, key: ChunkKey) -> None:
        """Make it as if the chunk had never been there, without telling the tier."""
        ...


TierFactory = Callable[[Path], Tier]
"""Makes a tier over a directory of its own, empty at first; made again for it, a persistent one finds its chunks."""
DoorFactory = Callable[[Tier], RawDoor]


class Settings(NamedTuple):
    """What :func:`check_tier` was given, less Hypothesis."""

    factory: TierFactory
    raw: DoorFactory | None
    chunk_nbytes: int
    capacity_nbytes: int
    verifies: bool | None


class Slots:
    """Page-aligned slots as a primary has them, each between two stretches of memory that nobody may touch."""

    def __init__(self, n: int, stride_nbytes: int) -> None:
        self._stride_nbytes = stride_nbytes
        self._memory = memoryview(mmap.mmap(-1, (2 * n + 1) * stride_nbytes))
        self._memory[:] = bytes([CANARY]) * len(self._memory)
        self.views = [self._at(2 * i + 1) for i in range(n)]

    def check(self) -> None:
        canaries = bytes([CANARY]) * self._stride_nbytes
        guards = [self._at(2 * i) for i in range(len(self.views) + 1)]
        require(
            all(guard == canaries for guard in guards), "a tier writes into the buffers it was given, not beside them"
        )

    def _at(self, i: int) -> memoryview:
        return self._memory[i * self._stride_nbytes : (i + 1) * self._stride_nbytes]


class Bench:
    """One directory and what is needed to try tiers over it."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        self.settings = settings
        self.directory = directory
        self.stride_nbytes = -(-settings.chunk_nbytes // _OS_PAGE) * _OS_PAGE
        longest = settings.chunk_nbytes
        lengths = [longest, 1, longest // 2 + 1, longest - 1, min(longest, _OS_PAGE)]
        self.chunks = [
            Chunk(key, AWKWARD[i - 1] if i % 2 else None, i % 3, 16 * (i + 1), max(1, lengths[i % 5]), "red" * (i % 2))
            for i, key in enumerate(AWKWARD)
        ]
        """Sixteen chunks with keys that are hard to keep apart, of lengths that are no multiple of anything."""

    def context(self, *, namespace: bytes = b"conformance", capacity_nbytes: int | None = None) -> TierContext:
        capacity = self.settings.capacity_nbytes if capacity_nbytes is None else capacity_nbytes
        return TierContext(self.settings.chunk_nbytes, self.stride_nbytes, namespace, capacity)

    @asynccontextmanager
    async def opened(self, ctx: TierContext | None = None) -> AsyncIterator[Any]:
        """A tier over the directory, open and ready to be written to; closed afterwards."""
        tier = self.settings.factory(self.directory)
        try:
            await tier.open(ctx or self.context())
            await writable(tier)
            yield tier
        finally:
            await tier.aclose()

    def copied(self, name: str) -> Bench:
        """Another one, beside it, over a copy of what lies in its directory now; sockets and the like are left out."""
        copy = self.directory.with_name(name)
        shutil.copytree(self.directory, copy, symlinks=True, ignore=_specials)
        return Bench(self.settings, copy)

    def raw(self, tier: Tier) -> RawDoor:
        assert self.settings.raw is not None, "asked for only where there is one"
        return self.settings.raw(tier)

    async def offer(self, tier: Tier, *chunks: Chunk, edition: int = 0) -> Sequence[Outcome]:
        """Write chunks from slots with canaries behind the payload; the outcomes, in order."""
        slots = Slots(len(chunks), self.stride_nbytes)
        for chunk, view in zip(chunks, slots.views, strict=True):
            view[: chunk.nbytes] = payload(chunk.key, chunk.nbytes, edition)
        before = [bytes(view) for view in slots.views]
        outcomes = await tier.write(list(zip(chunks, slots.views, strict=True)))
        check_outcomes("write", [chunk.key for chunk in chunks], outcomes)
        require([bytes(view) for view in slots.views] == before, "a write leaves the caller's buffer alone")
        for view in slots.views:
            view[:] = bytes([CANARY]) * len(view)  # the memory is somebody else's from now on
        slots.check()
        return outcomes

    async def write(self, tier: Tier, *chunks: Chunk, edition: int = 0) -> None:
        """Write chunks that a tier with room must take."""
        for outcome in await self.offer(tier, *chunks, edition=edition):
            require(outcome.ok, "a tier with room takes a chunk", outcome)

    async def read(self, tier: Tier, *wanted: tuple[ChunkKey, int]) -> list[tuple[Status, bytes]]:
        """Read each key into a buffer of so many bytes, beside canaries; (status, bytes) in order."""
        slots = Slots(len(wanted), self.stride_nbytes)
        views = [view[:nbytes] for view, (_, nbytes) in zip(slots.views, wanted, strict=True)]
        outcomes = await tier.read([(key, view) for (key, _), view in zip(wanted, views, strict=True)])
        check_outcomes("read", [key for key, _ in wanted], outcomes)
        slots.check()
        for view, (_, nbytes) in zip(slots.views, wanted, strict=True):
            beyond = bytes([CANARY]) * (self.stride_nbytes - nbytes)
            require(view[nbytes:] == beyond, "a read ends where its buffer ends")
        return [(outcome.status, bytes(view)) for outcome, view in zip(outcomes, views, strict=True)]

    async def expect(self, tier: Tier, *chunks: Chunk, edition: int = 0) -> None:
        """Read chunks that must be there, byte for byte, zeros behind them."""
        answers = await self.read(tier, *((chunk.key, self.stride_nbytes) for chunk in chunks))
        for chunk, (status, data) in zip(chunks, answers, strict=True):
            require(status is Status.OK, "what was written is read", chunk, status)
            check_bytes(chunk, data, edition)

    async def expect_gone(self, tier: Tier, *chunks: Chunk) -> None:
        keys = [chunk.key for chunk in chunks]
        require(list(await tier.contains(keys)) == [False] * len(keys), "what is gone is not contained", keys)
        for chunk, (status, _) in zip(chunks, await self.read(tier, *((key, 64) for key in keys)), strict=True):
            require(status is Status.MISSING, "what is gone reads as MISSING", chunk.key, status)


def _specials(folder: str, names: list[str]) -> list[str]:
    """What cannot be copied: opening it would wait, or has an effect."""
    modes = {name: os.lstat(os.path.join(folder, name)).st_mode for name in names}
    return [
        name for name, mode in modes.items() if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))
    ]


def check_outcomes(verb: str, keys: Sequence[ChunkKey], outcomes: Sequence[Outcome]) -> None:
    require(len(outcomes) == len(keys), f"{verb} answers for every key", len(outcomes), len(keys))
    answered = [outcome.key for outcome in outcomes]
    require(answered == list(keys), f"{verb} answers in the order of the keys", answered, list(keys))
    require(all(isinstance(outcome.status, Status) for outcome in outcomes), f"{verb} answers with a Status", outcomes)


def check_bytes(chunk: Chunk, data: bytes, *editions: int) -> None:
    """The bytes are one of these editions of the chunk's, and zeros behind it."""
    head, tail = data[: chunk.nbytes], data[chunk.nbytes :]
    whole = any(head == payload(chunk.key, chunk.nbytes, edition) for edition in editions)
    require(whole, "what is read is what was written, whole", chunk, head[:16])
    require(not any(tail), "bytes behind the chunk are zeroed: they may be another's", chunk, tail[:16])


async def writable(tier: Tier) -> None:
    if isinstance(tier, ScanTier):
        await until(lambda: tier.writable, "a tier becomes writable some time after it was opened")


async def until(true: Callable[[], bool], rule: str) -> None:
    """Wait for something that offers no event."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            while not true():  # noqa: ASYNC110 - a tier offers no event for it
                await asyncio.sleep(_PAUSE_S)
    except TimeoutError:
        fail(f"{rule}; not within {_PATIENCE_S:g} s")


@asynccontextmanager
async def scanned(tier: ScanTier) -> AsyncIterator[list[Found]]:
    """Listen to a tier's scan, as a cache does from the start; what it has announced, in a list that fills."""
    found: list[Found] = []

    async def listen() -> None:
        async for batch in tier.scan():
            found.extend(batch)

    listener = asyncio.create_task(listen())
    try:
        yield found
    finally:
        listener.cancel()
        with suppress(asyncio.CancelledError):
            await listener


def run(settings: Settings, name: str, check: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    """One check in a directory and an event loop of its own, which leaves nothing behind."""

    async def within_patience() -> None:
        try:
            async with asyncio.timeout(2 * _PATIENCE_S):
                await check(bench)
        except TimeoutError as error:
            fail(f"a tier answers within {2 * _PATIENCE_S:g} s; it hung in {name!r}", error)

    with tempfile.TemporaryDirectory(prefix="tierkv-check-") as directory, no_leaks(f"a tier in {name!r}"):
        bench = Bench(settings, Path(directory, "tier"))
        bench.directory.mkdir()
        with asyncio.Runner() as runner:
            runner.run(within_patience())
