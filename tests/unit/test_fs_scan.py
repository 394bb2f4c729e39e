"""Opening a root that has a past: index, scan, trim, probes, and what the ledger is told."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fs_kit import (
    CHARGE,
    LONGEST,
    NAMESPACE,
    PAGE,
    STRIDE,
    capacity_for,
    charge_of,
    chunk_bytes,
    chunk_of,
    context,
    fetch,
    files_under,
    first_batches,
    is_slab,
    key_of,
    kill,
    layout,  # noqa: F401
    only_files,
    opened,
    path_of,
    payload_of,
    recount,
    scanned,
    set_time,
    store,
    write,
)
from tests.patience import PATIENCE_S
from tierkv import Level, MemoryTier, TieredCache
from tierkv.policies import LRU
from tierkv.tiers._fs import listing as _fs_list
from tierkv.tiers._fs.feed import BATCH, Listed
from tierkv.tiers._fs.format import charge_nbytes, file_name, leaf_of, namespace_digest
from tierkv.tiers.fs import FSTier
from tierkv.types import Chunk, ChunkKey, Found, Reason, Status

OK = Status.OK


async def opened_and_killed(root: Path, n: int, namespace: bytes = NAMESPACE) -> FSTier:
    """A root with chunks 0..n-1, a second apart in age, whose owner was killed."""
    tier = FSTier(root, capacity=capacity_for(20), min_free=0)
    await tier.open(context(namespace=namespace))
    await scanned(tier)
    await store(tier, *(chunk_of(i) for i in range(n)))
    now = time.time()
    for i in range(n):
        set_time(root, key_of(i), tier, now - 100 + i, namespace)
    kill(tier)
    return tier


def index_files(root: Path) -> list[Path]:
    return [p for p in files_under(root) if p.name.endswith(".index")]


async def test_a_clean_close_restores_order_and_records_exactly(root: Path) -> None:
    """The order given to save_order comes back, coldest first, with everything the chunks knew."""
    chunks = [chunk_of(i, 100 + i, parent=key_of(i - 1), group=i % 2, end_token=i, tenant="t" * i) for i in range(9)]
    chunks[4] = chunks[4]._replace(parent=None, partial=True)
    order = [chunks[i] for i in (3, 1, 4, 0, 5, 8, 2, 6, 7)]
    async with opened(root) as tier:
        await store(tier, *chunks)
        await tier.save_order(order)
    async with opened(root) as tier:
        assert await first_batches(tier) == [Found(c.key, charge_of(c.nbytes), True, c) for c in order]
        n_leaves = 0 if is_slab() else len({leaf_of(c.key) for c in chunks})
        assert tier.counters()["leaves_from_index"] == n_leaves
        assert index_files(root) == []  # taken, so that a kill cannot leave a stale one
        assert await fetch(tier, *chunks) == [OK] * 9


async def test_chunks_that_the_order_does_not_name_are_coldest(root: Path) -> None:
    """The ledger may have let go of a key whose file is still there; foreign keys in the order are ignored."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1), chunk_of(2), chunk_of(3))
        await tier.save_order([chunk_of(2), chunk_of(77), chunk_of(1)])
    async with opened(root) as tier:
        assert [f.key for f in await first_batches(tier)] == [key_of(3), key_of(2), key_of(1)]


async def test_without_an_order_the_index_keeps_that_of_writing(root: Path) -> None:
    """A caller that never ranked its chunks still gets the quick open."""
    async with opened(root) as tier:
        await store(tier, chunk_of(2))
        await store(tier, chunk_of(1))
    async with opened(root) as tier:
        assert [f.key for f in await first_batches(tier)] == [key_of(2), key_of(1)]


async def test_after_a_kill_recency_is_that_of_the_files_times(root: Path) -> None:
    """No index: the tree is listed, coldest first by time, and no record is known yet."""
    await opened_and_killed(root, 6)
    async with opened(root) as tier:
        assert await first_batches(tier) == [Found(key_of(i), CHARGE) for i in range(6)]
        assert tier.counters()["leaves_from_index"] == 0
        assert await fetch(tier, *(chunk_of(i) for i in range(6))) == [OK] * 6


@only_files
async def test_the_index_is_advice_and_the_files_are_the_truth(root: Path) -> None:
    """Files removed, added or cut between close and open are seen: only untouched leaves are taken from the index."""
    async with opened(root) as tier:
        await store(tier, *(chunk_of(i) for i in range(5)))
        await tier.save_order([chunk_of(i) for i in range(5)])
        paths = [path_of(root, key_of(i), tier) for i in range(7)]
    paths[1].unlink()
    os.truncate(paths[2], 100)
    os.utime(paths[2].parent)  # a cut alone does not show in the directory: the first read would find it
    paths[5].parent.mkdir(exist_ok=True)
    paths[5].write_bytes(bytes(CHARGE))
    async with opened(root) as tier:
        keys = [f.key for f in await first_batches(tier)]
        assert keys == [key_of(0), key_of(3), key_of(4), key_of(5)]
        assert tier.usage()["chunks_nbytes"] == 4 * CHARGE


@pytest.mark.parametrize(
    "damage", ["torn", "empty", "flipped", "grown", "other namespace", "link", "fifo", "directory"]
)
async def test_a_bad_index_is_ignored_and_counted(root: Path, damage: str) -> None:
    """Whatever lies there: the tree is listed instead, nothing is lost, the index is gone."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1), chunk_of(2))
    (index,) = index_files(root)
    data = index.read_bytes()
    if damage == "other namespace":
        async with opened(root.with_name("other"), ctx=context(namespace=b"other")) as tier:
            await store(tier, chunk_of(1))
        index.write_bytes(index_files(root.with_name("other"))[0].read_bytes())
    elif damage in ("link", "fifo", "directory"):
        index.unlink()
        {"link": lambda p: p.symlink_to(root / "tierkv.lock"), "fifo": os.mkfifo, "directory": os.mkdir}[damage](index)
    else:
        index.write_bytes(
            {
                "torn": data[: len(data) // 2],
                "empty": b"",
                "flipped": data[:-40] + b"!" + data[-39:],
                "grown": data * 2,
            }[damage]
        )
    async with opened(root) as tier:
        assert {f.key for f in await first_batches(tier)} == {key_of(1), key_of(2)}
        assert tier.counters()["bad_index"] == 1
        assert await fetch(tier, chunk_of(1), chunk_of(2)) == [OK] * 2
        if damage != "directory":
            assert not os.path.lexists(index)


@only_files
async def test_an_index_without_room_is_not_written(root: Path) -> None:
    """The capacity is hard for the index too; the next open lists the tree."""

    def long_key(i: int) -> ChunkKey:
        return ChunkKey(key_of(i).ljust(115, b"x"))

    chunks = [Chunk(long_key(i), parent=long_key(i - 1), nbytes=1) for i in range(59)]
    capacity = 3 * PAGE + 60 * charge_nbytes(1)
    async with opened(root, capacity=capacity) as tier:
        await store(tier, *chunks)
        await tier.save_order(chunks)
    assert index_files(root) == [] and recount(root) <= capacity
    async with opened(root, capacity=capacity) as tier:
        assert len(await first_batches(tier)) == 59


async def test_batches_are_bounded(root: Path) -> None:
    """At most 2,000 chunks a batch, whatever the scan found."""
    async with opened(root, capacity="1GiB") as tier:
        await store(tier, chunk_of(0))
        owner = tier._mount._ownership.id  # type: ignore[union-attr]
    _plant(root, owner, range(1, BATCH + 5))
    async with opened(root, capacity="1GiB") as tier:
        sizes: list[int] = []
        async for batch in tier.scan():
            sizes.append(len(batch))
            if sum(sizes) == BATCH + 5:
                break
        assert sizes == [BATCH, 5]


async def test_a_fuller_root_is_trimmed_coldest_first_before_anything_is_written(root: Path) -> None:
    """10 chunks meet room for 4: the 6 coldest go, and until they are gone a write is refused."""
    await opened_and_killed(root, 10)
    gate = threading.Event()
    async with opened(root, n_chunks=4, wait=False, _scan_gate=lambda *_: gate.wait(PATIENCE_S)) as tier:
        assert not tier.writable
        (outcome,) = await write(tier, chunk_of(20))
        assert (outcome.status, outcome.reason) == (Status.REFUSED, Reason.SCANNING)
        gate.set()
        await scanned(tier)
        assert tier.writable
        assert [f.key for f in await first_batches(tier)] == [key_of(i) for i in range(6, 10)]
        assert tier.counters()["trimmed"] == 6
        assert recount(root) <= capacity_for(4)
        (outcome,) = await write(tier, chunk_of(20))
        assert outcome.reason is Reason.FULL
        await tier.delete([key_of(6)])
        await store(tier, chunk_of(20))
        assert recount(root) <= capacity_for(4)


async def test_a_chunk_that_a_probe_announced_is_not_trimmed(root: Path) -> None:
    """The ledger knows it, so it is the ledger's to evict: the trim takes the next coldest instead."""
    await opened_and_killed(root, 10)
    gate = threading.Event()
    async with opened(root, n_chunks=4, wait=False, _scan_gate=lambda *_: gate.wait(PATIENCE_S)) as tier:
        assert await tier.probe([key_of(0)]) == [Found(key_of(0), CHARGE)]
        gate.set()
        assert [f.key for f in await first_batches(tier)] == [key_of(i) for i in range(7, 10)]
        assert await fetch(tier, chunk_of(0)) == [OK]


async def test_a_probe_in_the_middle_of_the_trim_wins(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the decision to trim and the removal a lookup found the chunk: what was answered "found" stays."""
    await opened_and_killed(root, 10)
    gate = threading.Event()
    async with opened(root, n_chunks=4, wait=False, _scan_gate=lambda *_: gate.wait(PATIENCE_S)) as tier:
        mount = tier._mount
        assert mount is not None
        remove, answers = mount.settlement.remove, []

        def remove_and_probe(item: Listed) -> bool:
            answers.extend(mount.lookups.probe([key_of(1)]) if item.key == key_of(0) else [])
            return remove(item)

        monkeypatch.setattr(mount.settlement, "remove", remove_and_probe)
        gate.set()
        await scanned(tier)
        assert answers == [Found(key_of(1), CHARGE)]
        assert await fetch(tier, chunk_of(0), chunk_of(1)) == [Status.MISSING, OK]
        assert tier.usage()["chunks_nbytes"] == 4 * CHARGE == chunk_bytes(root, tier)


async def test_a_chunk_deleted_while_the_scan_holds_it_does_not_come_back(root: Path) -> None:
    """Listed, then probed and deleted, before the scan's end: neither announced nor counted."""
    await opened_and_killed(root, 10)
    gate, nearly_done = threading.Event(), threading.Event()

    def hold(n_done: int, n_total: int) -> None:
        if n_done == n_total - 1:
            nearly_done.set()
            gate.wait(PATIENCE_S)

    async with opened(root, n_chunks=12, wait=False, _scan_gate=hold) as tier:
        await asyncio.to_thread(nearly_done.wait, PATIENCE_S)
        await tier.probe([key_of(i) for i in range(10)])
        await tier.delete([key_of(i) for i in range(5)])
        gate.set()
        assert await first_batches(tier) == []  # the probes said all there was to say
        assert tier.usage()["chunks_nbytes"] == 5 * CHARGE == chunk_bytes(root, tier)


@only_files
async def test_probes_find_what_the_scan_has_not_reached_and_move_it_to_the_front(root: Path) -> None:
    """While the scan stands still, single keys are found by name; a miss holds for a second, then is asked again."""
    await opened_and_killed(root, 10)
    now = [0.0]
    gate = threading.Semaphore(0)
    order: list[int] = []

    def hold(n_done: int, _: int) -> None:
        order.append(n_done)
        gate.acquire(timeout=PATIENCE_S)

    async with opened(root, wait=False, _scan_gate=hold, clock=lambda: now[0]) as tier:
        assert not tier.settled(key_of(3)) and not tier.settled(key_of(50))
        assert await tier.probe([key_of(3), key_of(50)]) == [Found(key_of(3), CHARGE), None]
        assert not tier.settled(key_of(3))  # it is there
        assert tier.settled(key_of(50))
        now[0] = 0.999
        assert tier.settled(key_of(50))
        now[0] = 1.0
        assert not tier.settled(key_of(50))
        assert leaf_of(key_of(50)) in tier._mount.scanner._front  # type: ignore[union-attr]
        assert await fetch(tier, chunk_of(3), chunk_of(4), chunk_of(50)) == [OK, OK, Status.MISSING]
        for _ in range(300):
            gate.release()
        await scanned(tier)
        assert tier.settled(key_of(50)) and not tier.settled(key_of(4))
        now[0] = 100.0
        assert tier.settled(key_of(50))  # alone on the root and all listed: final


@only_files
async def test_a_leaf_that_a_probe_asked_for_is_listed_next(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan goes through leaves in order, but for those that somebody waits for."""
    await opened_and_killed(root, 10)
    leaves = sorted({leaf_of(key_of(i)) for i in range(10)})
    missing = next(i for i in range(50, 10**6) if leaf_of(key_of(i)) == leaves[-1])
    held, gate, listed = threading.Event(), threading.Event(), []

    def hold(n_done: int, _: int) -> None:
        if n_done == 1:
            held.set()
            gate.wait(PATIENCE_S)

    real = _fs_list.leaf_opened

    def recording(leaf: str, namespace_fd: int) -> object:
        listed.append(leaf)
        return real(leaf, namespace_fd)

    monkeypatch.setattr("tierkv.tiers._fs.scan.leaf_opened", recording)
    async with opened(root, wait=False, _scan_gate=hold) as tier:
        await asyncio.to_thread(held.wait, PATIENCE_S)
        assert await tier.probe([key_of(missing)]) == [None]
        gate.set()
        await scanned(tier)
    assert listed == [leaves[0], leaves[-1], *leaves[1:-1]]


async def test_lookups_never_list_a_directory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup's cost is that of its own keys.

    https://github.com/sgl-project/sglang/issues/28653
    """
    async with opened(root) as tier:
        await store(tier, chunk_of(1))

        def forbidden(*_: object) -> None:
            raise AssertionError("a directory was listed")

        for name in ("scandir", "listdir"):
            monkeypatch.setattr(os, name, forbidden)
        assert list(await tier.contains([key_of(1), key_of(2)])) == [True, False]
        assert await fetch(tier, chunk_of(1), chunk_of(2)) == [OK, Status.MISSING]
        await tier.delete([key_of(1)])
        monkeypatch.undo()


@only_files
async def test_a_scan_that_the_disk_refuses_is_tried_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO while listing: no leaf is left out, since its bytes would not count; the scan starts over."""
    await opened_and_killed(root, 3)
    monkeypatch.setattr("tierkv.tiers._fs.scan._RETRY_S", 0.01)
    real, failures = os.scandir, iter([True, False, True])

    def flaky(path: object = ".") -> object:
        scans = threading.current_thread().name.startswith("tierkv-fs-scan")  # opening lists the owners, and fails
        if scans and next(failures, False):
            raise OSError(5, "input/output error")
        return real(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", flaky)
    async with opened(root) as tier:
        monkeypatch.undo()
        assert tier.writable and tier.counters()["failed_scans"] == 2
        assert len(await first_batches(tier)) == 3


@only_files
async def test_namespaces_that_nobody_reads_leave_first(root: Path) -> None:
    """Another model's files stay while there is room (it may come back), and go before any chunk that can be read."""
    await opened_and_killed(root, 4, namespace=b"old model")
    async with opened(root, n_chunks=6) as tier:
        assert await first_batches(tier) == []
        assert tier.share_nbytes() == 6 * CHARGE  # they are no reason to store less
        await store(tier, chunk_of(0), chunk_of(1))
        assert recount(root) <= capacity_for(6) and len(_of_namespace(root, b"old model")) == 4
        await store(tier, chunk_of(2), chunk_of(3))
        assert _of_namespace(root, b"old model") == {key_of(2), key_of(3)}  # the coldest went
        await store(tier, chunk_of(4), chunk_of(5))
        assert _of_namespace(root, b"old model") == set()
        assert tier.counters()["leavers_removed"] == 4
        assert await fetch(tier, *(chunk_of(i) for i in range(6))) == [OK] * 6


@only_files
async def test_a_model_that_comes_back_hits_its_files(root: Path) -> None:
    """Two namespaces take turns on one root, each keeps what there is room for."""
    await opened_and_killed(root, 3, namespace=b"one")
    await opened_and_killed(root, 3, namespace=b"two")
    async with opened(root, ctx=context(namespace=b"one")) as tier:
        assert await fetch(tier, *(chunk_of(i) for i in range(3))) == [OK] * 3
    async with opened(root, ctx=context(namespace=b"two")) as tier:
        assert await fetch(tier, *(chunk_of(i) for i in range(3))) == [OK] * 3


@only_files
async def test_at_open_other_namespaces_are_trimmed_before_ours(root: Path) -> None:
    """However recent they are."""
    await opened_and_killed(root, 3)
    await opened_and_killed(root, 3, namespace=b"newer")
    async with opened(root, n_chunks=4) as tier:
        assert [f.key for f in await first_batches(tier)] == [key_of(i) for i in range(3)]
        assert _of_namespace(root, b"newer") == {key_of(2)}


async def test_files_whose_lock_file_is_gone_are_taken_in(root: Path) -> None:
    """Somebody cleaned the root's lock files away: the chunks are still whole, counted and served."""
    await opened_and_killed(root, 4)
    for path in root.glob("owner-*"):
        path.unlink()
    async with opened(root) as tier:
        assert len(await first_batches(tier)) == 4
        assert tier.counters()["orphans"] == (1 if is_slab() else 4)
        assert await fetch(tier, *(chunk_of(i) for i in range(4))) == [OK] * 4


async def test_closing_during_the_scan_leaves_everything_in_place(root: Path) -> None:
    """No index of half a tree is written; the next open lists it."""
    await opened_and_killed(root, 5)
    gate = threading.Event()
    tier = FSTier(root, capacity=capacity_for(5), min_free=0, _scan_gate=lambda *_: gate.wait(PATIENCE_S))
    await tier.open(context())
    closing = asyncio.ensure_future(tier.aclose())
    await asyncio.sleep(0.01)
    gate.set()
    await closing
    assert index_files(root) == []
    async with opened(root, n_chunks=5) as tier:
        assert len(await first_batches(tier)) == 5


async def test_the_scan_generator_ends_with_the_tier(root: Path) -> None:
    """It waits for news until close, and then ends."""
    async with opened(root) as tier:
        batches: list[object] = []

        async def listen() -> None:
            batches.extend([batch async for batch in tier.scan()])

        listening = asyncio.ensure_future(listen())
        await asyncio.sleep(0)
        assert not listening.done()
    await asyncio.wait_for(listening, PATIENCE_S)
    assert batches == []


@pytest.mark.timeout(600)
async def test_a_root_of_100_000_chunks_answers_at_once_while_the_scan_is_held(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tenth of the directories listed, a key in one of the others is found, read and verified."""
    async with opened(root, capacity="4GiB") as tier:
        await store(tier, *(chunk_of(i) for i in range(200)))
        owner = tier._mount._ownership.id  # type: ignore[union-attr]
        kill(tier)
    _plant(root, owner, range(200, 100_000))
    gate, held = threading.Event(), threading.Event()
    reached: list[int] = []

    def hold(n_done: int, n_total: int) -> None:
        if n_done >= n_total // 10:
            reached.append(n_done)
            held.set()
            gate.wait(PATIENCE_S)

    async with opened(root, capacity="4GiB", wait=False, _scan_gate=hold) as tier:
        await asyncio.to_thread(held.wait, PATIENCE_S)
        assert reached == [25]
        last = max(range(200), key=lambda i: leaf_of(key_of(i)))
        assert int(leaf_of(key_of(last)), 16) > 200
        real, listing = os.scandir, set[str]()

        def listed(at: Any) -> Any:
            listing.add(threading.current_thread().name)
            return real(at)

        monkeypatch.setattr(os, "scandir", listed)
        assert (await tier.probe([key_of(last)]))[0] is not None
        assert await fetch(tier, chunk_of(last)) == [OK]
        monkeypatch.undo()
        assert listing <= {"tierkv-fs-keeper"}, "no directory is read for it"
        assert not tier.writable
        gate.set()
        await scanned(tier)
        assert tier.usage()["n_chunks"] == 100_000
        kill(tier)
    await _first_request_after_the_kill(root, last)


async def _first_request_after_the_kill(root: Path, last: int) -> None:
    """The same through the whole cache: a disk hit, byte for byte, while the scan is held at a tenth."""
    gate, held = threading.Event(), threading.Event()

    def hold(n_done: int, n_total: int) -> None:
        if n_done >= n_total // 10:
            held.set()
            gate.wait(PATIENCE_S)

    disk = FSTier(root, min_free=0, _scan_gate=hold)
    levels = [Level(MemoryTier(), LRU(), capacity=8 * STRIDE), Level(disk, LRU(), capacity="4GiB")]
    async with TieredCache(chunker=_OneChunk(), namespace=NAMESPACE, chunk_nbytes=LONGEST, levels=levels) as cache:
        await asyncio.to_thread(held.wait, PATIENCE_S)
        hit = await cache.lookup([last])
        assert list(hit.levels) == [1]
        target = bytearray(LONGEST)
        assert await cache.load(hit, [target]) == 1
        assert bytes(target) == payload_of(key_of(last), LONGEST)
        assert not disk.writable
        gate.set()
        await scanned(disk)


class _OneChunk:
    """Each token is a chunk."""

    def chunks(self, tokens: Sequence[int], *, extra: bytes = b"") -> Sequence[Chunk]:
        return [chunk_of(i, end_token=n) for n, i in enumerate(tokens, 1)]


def _plant(root: Path, owner: str, numbers: range) -> None:
    """Empty-payload files by the thousand: names and sizes are all that a scan looks at."""
    base = root / namespace_digest(NAMESPACE).hex()
    fds: dict[str, int] = {}
    for i in numbers:
        key = key_of(i)
        leaf = leaf_of(key)
        if leaf not in fds:
            (base / leaf).mkdir(exist_ok=True, parents=True)
            fds[leaf] = os.open(base / leaf, os.O_RDONLY)
        fd = os.open(file_name(key, owner), os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=fds[leaf])
        os.ftruncate(fd, PAGE)
        os.close(fd)
    for fd in fds.values():
        os.close(fd)


def _of_namespace(root: Path, namespace: bytes) -> set[bytes]:
    folder = root / namespace_digest(namespace).hex()
    return {bytes.fromhex(p.name.split(".")[0]) for p in files_under(folder)}
