"""What an attack on the cache has broken once: bad listeners, tiers that lie, leases of twins, resets in mid-scan."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import tierkv.cache
from tests.patience import PATIENCE_S
from tests.toys import NBYTES, STRIDE, ThreadTier, ToyChunker, buffers, cache_of, payload, prompt, shorten_deadline
from tierkv import Chunk, ChunkKey, Level, MemoryTier, MoverLimits, Outcome, Scope, Status, TieredCache
from tierkv.policies import LRU
from tierkv.tiers._fs.file_io import ChunkFiles
from tierkv.tiers.fs import FSTier
from tierkv.types import Event, Found


async def served(cache: TieredCache, tokens: Sequence[int]) -> int:
    """How many leading chunks come back; every byte of them is right."""
    async with cache.lease(await cache.lookup(tokens)) as lease:
        assert all(lease.view(chunk) == payload(chunk) for chunk in lease.chunks)
        return len(lease.chunks)


async def store(cache: TieredCache, tokens: Sequence[int]) -> None:
    assert all(outcome.ok for outcome in await cache.store(tokens, buffers(cache.chunks(tokens))))


async def test_a_listener_that_raises_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Stores, copies to the level below and waiting go on; what was raised is in the log."""
    events: list[Event] = []

    def on_event(event: Event) -> None:
        events.append(event)
        raise ValueError("not my day")

    async with cache_of(MemoryTier(name="lower"), on_event=on_event) as cache:
        await store(cache, prompt(0))
        assert await cache.wait_idle(PATIENCE_S)
        assert cache.statistics()["lower"].n_chunks == 4
    assert len(events) == 8
    assert "not my day" in caplog.text


NONSENSE = [
    None,
    5,
    "x",
    [None] * 4,
    [Outcome(ChunkKey(b"another"), Status.OK)] * 4,
    [Outcome(ChunkKey(b"another"), "ok")] * 4,  # type: ignore[arg-type]
]


class NonsenseTier(MemoryTier):
    """Does what it should and says ``answer``, or raises it."""

    def __init__(self, verb: str, answer: Any) -> None:
        super().__init__(name="lower")
        self.verb, self.answer = verb, answer

    async def read(self, items: Sequence[tuple[ChunkKey, memoryview]]) -> Sequence[Outcome]:
        return self._say("read", await super().read(items))

    async def write(self, items: Sequence[tuple[Chunk, memoryview]]) -> Sequence[Outcome]:
        return self._say("write", await super().write(items))

    def _say(self, verb: str, right: Sequence[Outcome]) -> Sequence[Outcome]:
        if verb != self.verb:
            return right
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("answer", [*NONSENSE, asyncio.CancelledError(), GeneratorExit()], ids=repr)
async def test_a_tier_that_answers_nonsense_is_a_miss_and_holds_nothing(verb: str, answer: Any) -> None:
    """Whatever is no outcome a key counts as a failure of the tier: nobody waits for it and no slot stays pinned."""
    async with cache_of(NonsenseTier(verb, answer), n_slots=5) as cache:
        for branch in (0, 2):  # the second pushes the tail of the first out of the primary
            await store(cache, prompt(branch))
            assert await cache.wait_idle(PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            assert 1 <= await served(cache, prompt(0)) < 4
            assert await cache.wait_idle(PATIENCE_S)
        primary = cache.statistics()["primary"]
        assert (primary.n_pinned, primary.n_pending, primary.n_quarantined) == (0, 0, 0)


class Persistent(MemoryTier):
    """It brings one chunk along, and nothing is wrong with it."""

    @property
    def writable(self) -> bool:
        return True

    def settled(self, _: ChunkKey) -> bool:
        return True

    async def scan(self) -> AsyncIterator[Sequence[Found]]:
        yield [Found(ChunkKey(b"found"), STRIDE)]

    async def probe(self, keys: Sequence[ChunkKey]) -> Sequence[Found | None]:
        return [None] * len(keys)

    async def save_order(self, _: Sequence[Chunk]) -> None:
        return


class RottenScanTier(Persistent):
    """Its news and probes fail."""

    def settled(self, _: ChunkKey) -> bool:
        return False

    async def scan(self) -> AsyncIterator[Sequence[Found]]:
        yield [Found(ChunkKey(b"found"), STRIDE)]
        raise OSError(5, "Input/output error")

    async def probe(self, _: Sequence[ChunkKey]) -> Sequence[Found | None]:
        raise OSError(24, "Too many open files")


async def test_a_probe_that_fails_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    """A lookup never raises what a tier raised (a process that is out of descriptors, say); the log says it."""
    async with cache_of(RottenScanTier(name="rotten")) as cache:
        assert (await cache.lookup(prompt(0))).n_tokens == 0
        await store(cache, prompt(0))
        assert await served(cache, prompt(0)) == 4
        assert cache.statistics()["rotten"].n_chunks >= 1, "what the scan told before it failed"
    assert "Too many open files" in caplog.text
    assert "Input/output error" in caplog.text


HELD = {"settled": 5, "owns": 4, "writable": 5, "share_nbytes": 5, "charge_nbytes": 1}
"""By what it cannot answer: which of four chunks that are sent down and one that it brings along."""


class SpeechlessTier(Persistent):
    """It can all that a tier may; once speechless it raises where ``question`` is asked, or gives no answer to it."""

    def __init__(self, question: str, answer: Any) -> None:
        super().__init__(name="speechless")
        self.question, self.answer = question, answer
        self.is_speechless = False

    def _say(self, question: str, right: Any) -> Any:
        if question != self.question or not self.is_speechless:
            return right
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    @property
    def writable(self) -> bool:
        return bool(self._say("writable", right=True))

    def settled(self, _: ChunkKey) -> bool:
        return bool(self._say("settled", right=True))

    def owns(self, key: ChunkKey) -> bool:
        return bool(self._say("owns", right=True))

    def share_nbytes(self) -> int:
        return self._say("share_nbytes", 64 * STRIDE)

    def charge_nbytes(self, chunk_nbytes: int) -> int:
        return self._say("charge_nbytes", STRIDE)


@pytest.mark.parametrize(
    ("question", "answer"),
    [*((question, RuntimeError("not now")) for question in HELD),
     *((question, answer) for question in ("share_nbytes", "charge_nbytes") for answer in (None, "much", -1))],
)  # fmt: skip
async def test_a_tier_that_cannot_answer_on_the_spot_is_no_worse_than_none(
    question: str, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What it raised reached whoever looked up or stored, and under vLLM would have ended the engine."""
    tier = SpeechlessTier(question, answer)
    async with cache_of(tier) as cache:
        tier.is_speechless = True
        await store(cache, prompt(0))
        cache._opened().hierarchy.refresh()  # as the next tick does
        assert await served(cache, prompt(0)) == 4
        assert (await cache.lookup(prompt(2))).n_tokens == 2, "what both have in common"
        assert await cache.wait_idle(PATIENCE_S)
        assert cache.statistics()["speechless"].n_chunks == HELD[question]
    assert f"speechless: {question} raised" in caplog.text


class Unchained(ToyChunker):
    """The same tokens have the same key wherever they stand."""

    def chunks(self, tokens: Sequence[int], *, extra: bytes = b"") -> Sequence[Chunk]:
        return [Chunk(ChunkKey(extra + bytes([tokens[end - 2]])), None, 0, end) for end in range(2, len(tokens) + 1, 2)]


async def test_a_key_that_comes_twice_is_leased_and_loaded_twice() -> None:
    """Each place gets the bytes of its own chunk, and no pin outlives the lease."""
    levels = [Level(MemoryTier(name="primary"), LRU(), capacity=8 * STRIDE)]
    async with TieredCache(chunker=Unchained(), namespace=b"toy", levels=levels) as cache:
        tokens = [1, 1, 1, 1, 2, 2, 1, 1]
        await store(cache, tokens)
        hit = await cache.lookup(tokens)
        async with cache.lease(hit) as lease:
            assert (len(lease.chunks), lease.n_tokens, len(lease.slots)) == (4, 8, 4)
        places = [bytearray(NBYTES) for _ in hit.chunks]
        assert await cache.load(hit, places) == 8
        assert places == buffers(hit.chunks)
        assert cache.statistics()["primary"].n_pinned == 0


async def closed_in_time(cache: TieredCache) -> None:
    async with asyncio.timeout(PATIENCE_S):
        async with cache:
            await store(cache, prompt(0))
            assert await cache.wait_idle(PATIENCE_S)
            await cache.aclose(0.1)


async def test_a_tier_that_does_not_close_is_left_to_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Closing has a limit, whatever a tier does, and closes the other tiers all the same."""
    monkeypatch.setattr(tierkv.cache, "_TIER_CLOSE_S", 0.1)

    class Stuck(MemoryTier):
        async def aclose(self) -> None:
            await asyncio.Event().wait()

    lower = MemoryTier(name="lower")
    await closed_in_time(cache_of(Stuck(name="stuck"), lower))
    assert "stuck: not closed" in caplog.text
    with pytest.raises(tierkv.ClosedError):
        await lower.contains([])


class Forgetful(Persistent):
    """It hangs where it is to write down what it knows of recency."""

    async def save_order(self, _: Sequence[Chunk]) -> None:
        await asyncio.Event().wait()


async def test_a_tier_that_does_not_save_its_order_is_closed_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that dies while recency is written down held the whole close up, and every tier behind it."""
    monkeypatch.setattr(tierkv.cache, "_TIER_CLOSE_S", 0.1)
    tier = Forgetful(name="stuck")
    await closed_in_time(cache_of(tier))
    assert "stuck: order not saved" in caplog.text
    with pytest.raises(tierkv.ClosedError):
        await tier.contains([])


class Talkative(Persistent):
    """Its scan does not end when it is told to."""

    over: asyncio.Event

    async def scan(self) -> AsyncIterator[Sequence[Found]]:
        yield []
        while not self.over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.over.wait()


async def test_a_scan_that_does_not_end_is_left_to_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A close waited for it without a limit, with every tier open behind it."""
    monkeypatch.setattr("tierkv._driver._LEAST_S", 0.1)
    tier = Talkative(name="talkative")
    tier.over = asyncio.Event()
    await closed_in_time(cache_of(tier))
    assert "left to themselves: 1" in caplog.text
    with pytest.raises(tierkv.ClosedError):
        await tier.contains([])
    tier.over.set()


def test_a_loop_that_ends_does_not_wait_for_a_dead_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read hangs for good: the cache closes within its limit and so does the loop; the read's own end is clean."""
    monkeypatch.setattr(tierkv.cache, "_TIER_CLOSE_S", 0.1)
    dead, real = threading.Event(), ChunkFiles.read

    def hang(*args: Any, **kwargs: Any) -> Any:
        dead.wait(PATIENCE_S)
        return real(*args, **kwargs)

    async def use() -> None:
        tier = FSTier(tmp_path / "root", min_free=0, layout="files")
        async with cache_of(tier, n_slots=5, limits=MoverLimits(deadline_s=PATIENCE_S)) as cache:  # type: ignore[arg-type]
            for branch in (0, 2):
                await store(cache, prompt(branch))
                assert await cache.wait_idle(PATIENCE_S)
            monkeypatch.setattr(ChunkFiles, "read", hang)
            shorten_deadline(cache, 0.2)
            assert 1 <= await served(cache, prompt(0)) < 4
            await cache.aclose(0.1)

    loop_ended = threading.Event()

    def run() -> None:
        asyncio.run(use())
        loop_ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    ended_in_time = loop_ended.wait(PATIENCE_S)
    dead.set()
    thread.join(PATIENCE_S)
    assert ended_in_time


@pytest.mark.parametrize("how", ["reset", "delete"])
async def test_what_is_forgotten_during_the_scan_does_not_come_back(tmp_path: Path, how: str) -> None:
    """Neither a probe nor the scan brings back what was forgotten before it was found.

    https://github.com/sgl-project/sglang/issues/26792
    """
    tokens = prompt(0)
    gate = threading.Event()
    async with cache_of(FSTier(tmp_path, min_free=0)) as cache:  # type: ignore[arg-type]
        await store(cache, tokens)
        assert await cache.wait_idle(PATIENCE_S)
    tier = FSTier(tmp_path, min_free=0, _scan_gate=lambda *_: gate.wait(PATIENCE_S))
    async with cache_of(tier) as cache:  # type: ignore[arg-type]
        if how == "reset":
            await cache.reset(Scope.ALL)
        else:
            await cache.delete(cache.chunks(tokens))
        assert (await cache.lookup(tokens)).n_tokens == 0
        gate.set()
        async with asyncio.timeout(PATIENCE_S):
            while not tier.writable:  # noqa: ASYNC110 - the scan's own end has no event
                await asyncio.sleep(0.01)
        assert (await cache.lookup(tokens)).n_tokens == 0
        assert await cache.wait_idle(PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            while tier.usage()["n_chunks"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await store(cache, tokens)
        assert await cache.wait_idle(PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            while cache.statistics()["fs"].n_chunks < 4:  # the reset ends with the next look at the tier
                await store(cache, tokens)
                await asyncio.sleep(0.05)


async def test_whoever_waits_when_the_cache_closes_is_told_at_once() -> None:
    """A copy below hangs and holds the primary; a store that waits for room, and one for that copy's chunk, both end.

    https://github.com/vllm-project/vllm/pull/48102
    """
    lower = ThreadTier()
    lower.gate = asyncio.Event()
    cache = cache_of(lower, n_slots=4)
    async with cache:
        await store(cache, prompt(0))  # its four slots stay held by the copies to the level below
        waiting = [asyncio.create_task(cache.store([n] * 4, [bytes(NBYTES)] * 2)) for n in (50, 60)]
        idle = asyncio.create_task(cache.wait_idle())
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            await cache.aclose(0)
            answers = await asyncio.gather(*waiting, idle, return_exceptions=True)
        assert [type(answer) for answer in answers] == [tierkv.ClosedError] * 3, answers
        lower.gate.set()
