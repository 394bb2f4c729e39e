"""What a thread of the fs tier has seen may be gone, or be there again, by the time it says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fs_kit import (
    LONGEST,
    NAMESPACE,
    _mount,
    capacity_for,
    chunk_of,
    fetch,
    first_batches,
    key_of,
    kill,
    layout,  # noqa: F401
    n_on_disk,
    only_files,
    only_slab,
    opened,
    path_of,
    scanned,
    store,
    write,
)
from tests.patience import PATIENCE_S
from tierkv import Chunk, ChunkKey, Event, EventKind, Level, MemoryTier, TieredCache, _driver
from tierkv.policies import LRU
from tierkv.tiers.fs import FSTier
from tierkv.types import Found, Reason, Status

pytestmark = pytest.mark.timeout(60)
K = key_of(0)


class Look:
    """The next look at the disk waits before it, until :meth:`go`, and after it, until :meth:`tell`."""

    def __init__(self, tier: FSTier, monkeypatch: pytest.MonkeyPatch) -> None:
        self._asked, self._may, self._seen, self._told = (threading.Event() for _ in range(4))
        store = _mount(tier).lookups._store
        look = store.look

        def slowly(*args: Any) -> Any:
            monkeypatch.setattr(store, "look", look)
            self._asked.set()
            self._may.wait(PATIENCE_S)
            seen = look(*args)
            self._seen.set()
            self._told.wait(PATIENCE_S)
            return seen

        monkeypatch.setattr(store, "look", slowly)

    async def asked(self) -> None:
        assert await asyncio.to_thread(self._asked.wait, PATIENCE_S)

    async def go(self) -> None:
        self._may.set()
        assert await asyncio.to_thread(self._seen.wait, PATIENCE_S)

    def tell(self) -> None:
        self._told.set()


async def leave_two(root: Path) -> None:
    """What the next one to open this root finds there: two chunks of one that was killed."""
    async with opened(root, n_chunks=4) as before:
        await store(before, chunk_of(0), chunk_of(1))
        kill(before)


async def test_a_late_probe_does_not_bring_back_what_was_deleted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen, then evicted by another thread: it is not announced, which would acknowledge a chunk that nobody has."""
    async with opened(root, n_chunks=1) as tier:
        await store(tier, chunk_of(0))
        look = Look(tier, monkeypatch)
        probe = asyncio.ensure_future(tier.probe([K]))
        await look.go()
        await tier.delete([K])
        look.tell()
        assert await probe == [None]
        assert tier.usage()["n_chunks"] == tier.usage()["chunks_nbytes"] == n_on_disk(root) == 0
        assert tier.settled(K)
        await store(tier, chunk_of(1))  # its room is free
        _mount(tier).books.check()


async def test_a_late_probe_does_not_forget_what_was_stored_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to be gone, then stored again in the same place: it stays known, and its bytes stay charged."""
    async with opened(root, n_chunks=1) as tier:
        await store(tier, chunk_of(0))
        look = Look(tier, monkeypatch)
        probe = asyncio.ensure_future(tier.probe([K]))
        await look.asked()
        await tier.delete([K])
        await look.go()
        await store(tier, chunk_of(0))
        look.tell()
        (found,) = await probe
        assert found is not None
        assert found.key == K
        assert tier.usage()["n_chunks"] == n_on_disk(root) == 1
        assert await fetch(tier, chunk_of(0)) == [Status.OK]
        (outcome,) = await write(tier, chunk_of(1))
        assert outcome.reason is Reason.FULL, "the one place is taken"
        assert tier.counters()["vanished"] == 0


@only_files
@pytest.mark.parametrize("asks", ["read", "probe", "delete"])
async def test_a_chunk_that_is_just_being_deleted_counts_once(
    root: Path, monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    """Its file is gone and its record not yet: it has been deleted, and has not vanished as well."""
    async with opened(root, n_chunks=2, n_read_threads=1) as tier:
        await store(tier, chunk_of(0))
        files = _mount(tier).operations._files
        remove, removed, may = files.remove, threading.Event(), threading.Event()

        def slowly(*args: Any, **options: Any) -> bool:
            monkeypatch.setattr(files, "remove", remove)
            done = bool(remove(*args, **options))
            removed.set()
            assert may.wait(PATIENCE_S)
            return done

        monkeypatch.setattr(files, "remove", slowly)
        deletion = asyncio.ensure_future(tier.delete([K]))
        assert await asyncio.to_thread(removed.wait, PATIENCE_S)
        if asks == "read":
            assert await fetch(tier, chunk_of(0)) == [Status.MISSING]
        elif asks == "probe":
            assert await tier.probe([K]) == [None]
        else:
            _mount(tier).operations._delete(K, {})
        may.set()
        await deletion
        counters = tier.counters()
        assert (counters["deleted"], counters["vanished"], tier.usage()["n_chunks"]) == (1, 0, 0)
        await store(tier, chunk_of(0))
        path_of(root, K, tier).unlink()
        assert await fetch(tier, chunk_of(0)) == [Status.MISSING]
        assert tier.counters()["vanished"] == 1, "what somebody else removed has vanished still"


@only_slab
async def test_a_probe_beside_a_deletion_leaves_its_bytes_charged(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is gone and the slot not idle yet: the chunk has not vanished, and what it occupies still counts."""
    async with opened(root, n_chunks=2) as tier:
        await store(tier, chunk_of(0))
        slab = _mount(tier)._slabs.find(K, _mount(tier)._ownership.id).slab
        erase, erased, may = slab.erase, threading.Event(), threading.Event()

        def slowly(*args: Any) -> bool:
            done = bool(erase(*args))
            erased.set()
            assert may.wait(PATIENCE_S)
            return done

        monkeypatch.setattr(slab, "erase", slowly)
        used_nbytes = tier.usage()["used_nbytes"]
        deletion = asyncio.ensure_future(tier.delete([K]))
        assert await asyncio.to_thread(erased.wait, PATIENCE_S)
        assert await tier.probe([K]) == [None]
        assert tier.usage()["used_nbytes"] == used_nbytes
        may.set()
        await deletion
        counters = tier.counters()
        assert (counters["deleted"], counters["vanished"], tier.usage()["n_chunks"]) == (1, 0, 0)
        assert tier.usage()["used_nbytes"] == used_nbytes, "the slot is idle, and keeps its blocks"


async def test_a_probe_beside_the_scan_does_not_bring_back_what_was_deleted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen and deleted before the scan has come to it: neither the probe nor the scan makes a record of it."""
    await leave_two(root)
    gate = threading.Event()
    async with opened(root, n_chunks=4, wait=False, _scan_gate=lambda *_: gate.wait(PATIENCE_S)) as tier:
        look = Look(tier, monkeypatch)
        probe = asyncio.ensure_future(tier.probe([K]))
        await look.go()
        await tier.delete([K])
        look.tell()
        assert await probe == [None]
        assert not tier.owns(K)
        gate.set()
        await scanned(tier)
        assert tier.usage()["n_chunks"] == n_on_disk(root) == 1


async def test_a_deletion_between_the_trim_and_the_books_is_final(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the scan was about to enter is deleted: there is no record of it, and nobody hears of it."""
    await leave_two(root)
    listing = threading.Event()
    async with opened(root, n_chunks=4, wait=False, _scan_gate=lambda *_: listing.wait(PATIENCE_S)) as tier:
        settlement, operations = _mount(tier).settlement, _mount(tier).operations
        trim = settlement._trim

        def and_a_deletion(*args: Any) -> Any:
            result = trim(*args)
            operations.delete_some({}, iter([K]))
            return result

        monkeypatch.setattr(settlement, "_trim", and_a_deletion)
        listing.set()
        assert {found.key for found in await first_batches(tier)} == {key_of(1)}
        assert tier.usage()["n_chunks"] == n_on_disk(root) == 1


async def test_a_probe_that_outlasts_the_scan_does_not_bring_back_what_was_deleted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen while the scan ran, deleted after it had ended, when removals are no longer remembered for it."""
    await leave_two(root)
    gate = threading.Event()
    async with opened(root, n_chunks=4, wait=False, _scan_gate=lambda *_: gate.wait(PATIENCE_S)) as tier:
        look = Look(tier, monkeypatch)
        probe = asyncio.ensure_future(tier.probe([K]))
        await look.go()
        gate.set()
        await scanned(tier)
        await tier.delete([K])
        look.tell()
        assert await probe == [None]
        assert tier.usage()["n_chunks"] == n_on_disk(root) == 1
        assert {found.key for found in await first_batches(tier)} >= {key_of(1)}


async def test_a_probe_in_the_middle_of_the_trim_costs_no_chunk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full root is opened; between the list and the sum of what is counted a probe enters what is in both."""
    async with opened(root, n_chunks=4) as before:
        await store(before, *(chunk_of(i) for i in range(4)))
        kill(before)
    listing = threading.Event()
    async with opened(root, n_chunks=4, wait=False, _scan_gate=lambda *_: listing.wait(PATIENCE_S)) as tier:
        settlement, probe = _mount(tier).settlement, _mount(tier).lookups.probe
        without, unseen = settlement._without, [key_of(i) for i in range(4)]

        def and_a_probe(*args: Any) -> Any:
            fresh = without(*args)
            assert not unseen or probe([unseen.pop()]) != [None]
            return fresh

        monkeypatch.setattr(settlement, "_without", and_a_probe)
        listing.set()
        await scanned(tier)
        assert len(unseen) < 4
        assert tier.counters()["trimmed"] == 0
        assert tier.usage()["n_chunks"] == n_on_disk(root) == 4
        assert await fetch(tier, *(chunk_of(i) for i in range(4))) == [Status.OK] * 4
        _mount(tier).books.check()


async def test_a_deletion_in_the_middle_of_the_trim_counts_as_room(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was listed and is gone by the time of the sum is trimmed no more, and nothing is trimmed for it."""
    async with opened(root, n_chunks=4) as before:
        await store(before, *(chunk_of(i) for i in range(4)))
        kill(before)
    listing = threading.Event()
    # A share of three chunks: one has to go, and one goes.
    async with opened(root, n_chunks=3, wait=False, _scan_gate=lambda *_: listing.wait(PATIENCE_S)) as tier:
        settlement, operations = _mount(tier).settlement, _mount(tier).operations
        without, unseen = settlement._without, [key_of(3)]

        def and_a_deletion(*args: Any) -> Any:
            fresh = without(*args)
            if unseen:
                operations.delete_some({}, iter([unseen.pop()]))
            return fresh

        monkeypatch.setattr(settlement, "_without", and_a_deletion)
        listing.set()
        await scanned(tier)
        assert tier.counters()["trimmed"] == 0
        assert tier.usage()["n_chunks"] == n_on_disk(root) == 3
        assert await fetch(tier, *(chunk_of(i) for i in range(3))) == [Status.OK] * 3


class LateTier(FSTier):
    """The first answer of one verb is told once the gate is open."""

    def __init__(self, late: str, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.gate, self.answered = asyncio.Event(), asyncio.Event()
        self._late = late

    async def probe(self, keys: Sequence[ChunkKey]) -> Sequence[Found | None]:
        answers = await super().probe(keys)
        await self._pass("probe")
        return answers

    async def scan(self) -> AsyncIterator[Sequence[Found]]:
        async for found in super().scan():
            await self._pass("scan")
            yield found

    async def _pass(self, verb: str) -> None:
        if verb == self._late and not self.answered.is_set():
            self.answered.set()
            await self.gate.wait()


class OneByOne:
    """A token a chunk, without parents."""

    chunk_nbytes = LONGEST

    def chunks(self, tokens: Sequence[int], *, extra: bytes = b"") -> Sequence[Chunk]:
        return [chunk_of(token, end_token=place + 1) for place, token in enumerate(tokens)]


@pytest.mark.parametrize("late", ["probe", "scan"])
async def test_an_answer_older_than_a_deletion_acknowledges_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """A chunk is found twice: the second answer comes first, the chunk is deleted, then the first answer arrives.

    A stored event after that would promise a chunk that nobody has.
    """
    monkeypatch.setattr(_driver, "_PROBE_S", 30.0)
    await leave_two(root)
    listing = threading.Event()
    tier = LateTier(late, root, capacity=capacity_for(4), min_free=0, _scan_gate=lambda *_: listing.wait(PATIENCE_S))
    events: list[Event] = []
    levels = [Level(MemoryTier(name="primary"), LRU(), capacity="1MiB"), Level(tier, LRU())]
    async with TieredCache(chunker=OneByOne(), namespace=NAMESPACE, levels=levels, on_event=events.append) as cache:
        driver = cache._opened()
        if late == "scan":
            listing.set()
        first = asyncio.ensure_future(cache.lookup([0])) if late == "probe" else None
        await asyncio.wait_for(tier.answered.wait(), 30)
        assert (await cache.lookup([0])).n_tokens == 1
        await cache.delete([chunk_of(0)])
        assert await driver.until(lambda: not tier.owns(K) and driver.hierarchy.is_quiet, 30)
        listing.set()
        tier.gate.set()
        if first is not None:
            assert (await first).n_tokens == 0
        assert await driver.until(lambda: any(event.chunk.key == key_of(1) for event in events), 30)
        assert [event.kind for event in events if event.chunk.key == K] == [EventKind.STORED, EventKind.REMOVED]
        assert (await cache.lookup([0])).n_tokens == 0
