"""FSTier by its protocol: bytes in, the same bytes out, one outcome a key, and nothing on disk that was not stored."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import os
import resource
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fs_kit import (
    CHARGE,
    LONGEST,
    PAGE,
    STRIDE,
    charge_of,
    chunk_bytes,
    chunk_of,
    chunks_and_fixed,
    context,
    fetch,
    files_under,
    key_of,
    layout,  # noqa: F401
    only_files,
    opened,
    path_of,
    payload_of,
    read,
    slots,
    store,
    write,
)
from tests.patience import PATIENCE_S
from tierkv.errors import ChunkSizeError, ClosedError, TierReadError, TierWriteError
from tierkv.protocols import Bounded, Charging, ScanTier
from tierkv.tiers._fs.format import HEADER_NBYTES, unpack_header
from tierkv.tiers._fs.memory import zero
from tierkv.tiers.fs import FSTier
from tierkv.types import Chunk, ChunkKey, Reason, Status

OK = Status.OK


async def test_satisfies_the_protocols(root: Path) -> None:
    """A persistent tier that charges headers and follows a share."""
    async with opened(root) as tier:
        for protocol in (Charging, Bounded, ScanTier):
            assert isinstance(tier, protocol)
    assert tier.charge_nbytes(1) == charge_of(1) and tier.name == "fs"


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, LONGEST])
async def test_chunks_of_any_length_come_back_with_zeros_behind(root: Path, nbytes: int) -> None:
    """Lengths around the page size; ``fetch`` compares every byte of the slot."""
    async with opened(root) as tier:
        await store(tier, *(chunk_of(i, nbytes) for i in range(5)))
        assert await fetch(tier, *(chunk_of(i, nbytes) for i in range(5))) == [OK] * 5


@pytest.mark.parametrize("length", [LONGEST, LONGEST + 1, 2 * PAGE + 4000, STRIDE, 2 * STRIDE])
async def test_reading_into_buffers_of_any_sufficient_length(root: Path, length: int) -> None:
    """A buffer needs room for the payload alone; whatever is behind it is zeroed."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1))
        (view,) = slots(1, 2 * STRIDE)
        (outcome,) = await tier.read([(key_of(1), view[:length])])
        assert outcome.ok
        assert view[:length] == payload_of(key_of(1), LONGEST) + bytes(length - LONGEST)
        assert all(byte == 0xEE for byte in view[length:])


async def test_the_file_is_header_payload_and_zeros(root: Path) -> None:
    """What a slot holds behind the payload never reaches the disk; the header says all about the chunk."""
    chunk = chunk_of(1, LONGEST, parent=key_of(0), group=2, end_token=64, tenant="acme", partial=True)
    async with opened(root) as tier:
        await store(tier, chunk)
        data = path_of(root, chunk.key, tier).read_bytes()
    assert data[HEADER_NBYTES:] == payload_of(chunk.key, LONGEST) + bytes(STRIDE - LONGEST)
    assert unpack_header(memoryview(data)[:HEADER_NBYTES]).chunk == chunk
    assert len(data) == CHARGE


async def test_padding_never_holds_what_another_chunk_left(root: Path) -> None:
    """Workers reuse the page in which a payload's end is padded: a long end before a short one must not show."""
    async with opened(root, n_write_threads=1, n_read_threads=1) as tier:
        for i in range(3):  # through every scratch page
            await store(tier, chunk_of(i, PAGE - 1))
        await store(tier, chunk_of(9, 5))
        data = path_of(root, key_of(9), tier).read_bytes()
    assert data[HEADER_NBYTES : HEADER_NBYTES + PAGE] == payload_of(key_of(9), 5) + bytes(PAGE - 5)


@only_files
async def test_one_pwritev_and_one_preadv_a_chunk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Header, payload and padding go in one call, straight from and into the caller's memory."""
    calls: list[tuple[str, list[int]]] = []

    def counting(name: str) -> Any:
        real = getattr(os, name)

        def call(fd: int, buffers: Sequence[memoryview], *rest: int) -> int:
            calls.append((name, [len(b) for b in buffers]))
            return int(real(fd, buffers, *rest))

        return call

    async with opened(root) as tier:
        for name in ("pwritev", "preadv"):
            monkeypatch.setattr(os, name, counting(name))
        await store(tier, chunk_of(1), chunk_of(2))
        await fetch(tier, chunk_of(1))
    assert calls == [("pwritev", [PAGE, 2 * PAGE, PAGE])] * 2 + [("preadv", [PAGE, 3 * PAGE])]


async def test_unaligned_memory_goes_through_the_page_cache_for_that_chunk_only(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Direct I/O refuses odd addresses; such a chunk is stored and read all the same, its neighbours stay direct.

    https://github.com/vllm-project/vllm/pull/43674
    """
    big = memoryview(bytearray(STRIDE + 8))
    odd = big[1 : 1 + STRIDE] if _address(big) % 2 == 0 else big[:STRIDE]
    odd[:LONGEST] = payload_of(key_of(1), LONGEST)
    (even,) = slots(1)
    even[:LONGEST] = payload_of(key_of(2), LONGEST)
    async with opened(root) as tier:
        outcomes = await tier.write([(chunk_of(1), odd), (chunk_of(2), even)])
        assert [o.status for o in outcomes] == [OK, OK]
        # A file system that takes odd addresses (tmpfs) needs no second way.
        n_buffered = tier.counters()["buffered"]
        assert n_buffered <= 1
        assert await fetch(tier, chunk_of(1), chunk_of(2)) == [OK, OK]
        outcomes = await tier.read([(key_of(2), odd)])
        assert outcomes[0].ok and odd[:LONGEST] == payload_of(key_of(2), LONGEST)
        assert tier.counters()["buffered"] == 2 * n_buffered
    assert len([r for r in caplog.records if "aligned" in r.message]) == min(1, n_buffered)
    assert [p for p in files_under(root) if ".part" in p.name] == []


async def test_a_file_system_without_direct_io_gets_one_warning(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether direct I/O works is tried once, by a write; the fallback is the whole tier's and said once."""
    real = os.pwritev

    def refuse_direct(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refuse_direct)
    async with opened(root) as tier:
        await store(tier, chunk_of(1), chunk_of(2))
        assert await fetch(tier, chunk_of(1), chunk_of(2)) == [OK, OK]
        assert tier.counters()["buffered"] == 0
    assert len([r for r in caplog.records if "direct I/O" in r.message]) == 1


async def test_read_only_memory_can_be_written_from(root: Path) -> None:
    """A caller may hand over bytes it does not want changed."""
    async with opened(root) as tier:
        payload = payload_of(key_of(1), LONGEST)
        (outcome,) = await tier.write([(chunk_of(1), memoryview(payload))])
        assert outcome.ok
        assert await fetch(tier, chunk_of(1)) == [OK]


async def test_a_batch_answers_per_key_in_order(root: Path) -> None:
    """Unknown keys, refused and short buffers do not touch their neighbours.

    https://github.com/vllm-project/vllm/pull/50321
    """
    async with opened(root) as tier:
        short, other = slots(2)
        items = [
            (chunk_of(0), _slot(0)),
            (chunk_of(1, STRIDE + 1), slots(1, 2 * STRIDE)[0]),
            (chunk_of(2), short[: LONGEST - 1]),
            (Chunk(ChunkKey(bytes(200)), nbytes=8), short),
            (Chunk(ChunkKey(b""), nbytes=8), short),
            (chunk_of(5), _slot(5)),
        ]
        outcomes = await tier.write(items)
        assert [(o.status, o.reason) for o in outcomes] == [
            (OK, None),
            (Status.REFUSED, Reason.TOO_LARGE),
            (Status.FAILED, Reason.TIER_ERROR),
            (Status.REFUSED, Reason.TOO_LARGE),
            (Status.REFUSED, Reason.TOO_LARGE),
            (OK, None),
        ]
        assert isinstance(outcomes[2].error, ChunkSizeError)
        assert await fetch(tier, *(chunk_of(i) for i in range(6))) == [OK, *[Status.MISSING] * 4, OK]
        outcomes = await tier.read([(key_of(0), short[: LONGEST - 1]), (key_of(5), other)])
        assert [o.status for o in outcomes] == [Status.FAILED, OK]
        assert isinstance(outcomes[0].error, ChunkSizeError)
        assert await fetch(tier, chunk_of(0)) == [OK]


async def test_two_writes_of_one_key_at_once_leave_one_whole_chunk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that was cancelled may come again while its first write still runs: neither touches the other's file."""
    async with opened(root, n_write_threads=2) as tier:
        barrier, real = threading.Barrier(2), os.pwritev

        def together(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            barrier.wait(PATIENCE_S)
            n = real(fd, buffers, offset)
            barrier.wait(PATIENCE_S)
            return n

        monkeypatch.setattr(os, "pwritev", together)
        outcomes = await asyncio.gather(write(tier, chunk_of(1)), write(tier, chunk_of(1)))
        assert all(o.ok for (o,) in outcomes)
        monkeypatch.undo()
        assert await fetch(tier, chunk_of(1)) == [OK]
        assert tier.usage()["chunks_nbytes"] == CHARGE == chunk_bytes(root, tier)


async def test_rewriting_replaces_and_deleting_frees(root: Path) -> None:
    """Bytes are charged once a key; absent keys are ignored."""
    async with opened(root) as tier:
        before = chunks_and_fixed(tier)
        await store(tier, chunk_of(1, 100), chunk_of(2))
        await store(tier, chunk_of(1))
        assert chunks_and_fixed(tier) == before + 2 * CHARGE
        assert await fetch(tier, chunk_of(1)) == [OK]
        assert list(await tier.contains([key_of(1), key_of(3)])) == [True, False]
        await tier.delete([key_of(1), key_of(3), key_of(2)])
        assert chunks_and_fixed(tier) == before
        assert await fetch(tier, chunk_of(1), chunk_of(2)) == [Status.MISSING] * 2


@only_files
@pytest.mark.parametrize("name", ["pwritev", "preadv"])
async def test_a_call_that_ends_short_is_no_refusal_of_direct_io(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """It says nothing of the memory: it is not counted as such, and nobody is told to align anything."""
    real, n_short = getattr(os, name), 1

    def short(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal n_short
        if n_short:
            n_short -= 1
            return int(real(fd, [buffers[0]], offset))
        return int(real(fd, buffers, offset))

    async with opened(root) as tier:
        await store(tier, chunk_of(1))
        monkeypatch.setattr(os, name, short)
        if name == "preadv":
            assert await fetch(tier, chunk_of(1)) == [OK]
        else:
            await store(tier, chunk_of(2))
        assert tier.counters()["buffered"] == 0
    assert not [r for r in caplog.records if "aligned" in r.message]


async def test_modes_are_private_whatever_the_umask(root: Path) -> None:
    """0600 and 0700, also under a umask that takes the owner's own bits."""
    for mask in (0o000, 0o777):
        old = os.umask(mask)
        try:
            async with opened(root / str(mask)) as tier:
                await store(tier, chunk_of(1))
        finally:
            os.umask(old)
        here = root / str(mask)
        assert {stat.S_IMODE(p.stat().st_mode) for p in files_under(here)} == {0o600}
        assert {stat.S_IMODE(p.stat().st_mode) for p in [here, *here.rglob("*")] if p.is_dir()} == {0o700}


@only_files
async def test_a_full_disk_refuses_and_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC and a write that ends short, at the third of eight chunks: the others are stored, no file is left."""
    real, calls = os.pwritev, iter(range(100))

    def full(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        n = next(calls)
        if n == 2:
            raise OSError(errno.ENOSPC, "no space")
        # Short twice: direct I/O and then the page cache.
        return real(fd, [buffers[0]], offset) if n in (5, 6) else real(fd, buffers, offset)

    async with opened(root, n_write_threads=1) as tier:
        before = tier.usage()["used_nbytes"]
        monkeypatch.setattr(os, "pwritev", full)
        outcomes = await write(tier, *(chunk_of(i) for i in range(8)))
        monkeypatch.undo()
        bad = [o for o in outcomes if not o.ok]
        assert [(o.status, o.reason) for o in bad] == [(Status.REFUSED, Reason.NO_SPACE)] * 2
        assert tier.usage()["used_nbytes"] == before + 6 * CHARGE
        assert tier.usage()["chunks_nbytes"] == 6 * CHARGE == chunk_bytes(root, tier)
        assert tier.counters()["no_space"] == 2
        await store(tier, *(Chunk(o.key, nbytes=LONGEST) for o in bad))


@only_files
@pytest.mark.parametrize("where", ["open", "fdatasync", "rename"])
async def test_other_write_errors_fail_their_chunk_and_leave_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """EIO anywhere on the way: FAILED with a TierWriteError, no bytes charged, no file, the next write works."""
    async with opened(root, durability="power") as tier:
        await store(tier, chunk_of(0))
        before = tier.usage()["used_nbytes"]

        def broken(*args: Any, **kwargs: Any) -> Any:
            if where == "open" and not args[1] & os.O_CREAT:
                return real(*args, **kwargs)
            raise OSError(errno.EIO, "input/output error")

        real = getattr(os, where)
        monkeypatch.setattr(os, where, broken)
        (outcome,) = await write(tier, chunk_of(1))
        monkeypatch.undo()
        assert outcome.status is Status.FAILED and isinstance(outcome.error, TierWriteError)
        assert outcome.error.keys == (key_of(1),)
        assert tier.usage()["used_nbytes"] == before
        assert chunk_bytes(root, tier) == CHARGE
        await store(tier, chunk_of(1))


async def test_a_read_error_keeps_the_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO says nothing about the chunk: FAILED once, and a hit again afterwards."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1))

        def broken(*_: object) -> int:
            raise OSError(errno.EIO, "input/output error")

        monkeypatch.setattr(os, "preadv", broken)
        (view,) = slots(1)
        (outcome,) = await tier.read([(key_of(1), view)])
        monkeypatch.undo()
        assert outcome.status is Status.FAILED and isinstance(outcome.error, TierReadError)
        assert await fetch(tier, chunk_of(1)) == [OK]


@only_files
async def test_out_of_descriptors_is_transient(root: Path) -> None:
    """EMFILE during 8 reads and 8 writes: no file is lost or called corrupt, hits again afterwards, no leak."""
    async with opened(root) as tier:
        await store(tier, *(chunk_of(i) for i in range(8)))
        _, hard = old = resource.getrlimit(resource.RLIMIT_NOFILE)
        n_open = len(os.listdir("/proc/self/fd"))
        lowest_free = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        hog = []
        while True:  # every descriptor below the limit is taken
            fd = os.dup(0)
            hog.append(fd)
            if fd >= lowest_free:
                break
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(hog) + 1, hard))
        try:
            statuses, _ = await read(tier, *(key_of(i) for i in range(8)))
            outcomes = await write(tier, *(chunk_of(i) for i in range(8, 16)))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, old)
            for fd in hog:
                os.close(fd)
        assert statuses == [Status.FAILED] * 8
        assert [o.status for o in outcomes] == [Status.FAILED] * 8
        assert len(os.listdir("/proc/self/fd")) <= n_open
        assert await fetch(tier, *(chunk_of(i) for i in range(8))) == [OK] * 8
        await store(tier, *(chunk_of(i) for i in range(8, 16)))
        assert tier.counters()["corrupt"] == 0


@only_files
async def test_durability_power_syncs_data_before_the_name_and_the_directory_after(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that a power loss needs: data, rename, directory; and none of it by default."""
    for durability, expected in (("process", ["rename"]), ("power", ["fdatasync", "rename", "fsync"])):
        async with opened(root / durability, durability=durability) as tier:
            await store(tier, chunk_of(0))  # makes the leaf
            calls: list[str] = []
            for name in ("fdatasync", "rename", "fsync"):
                monkeypatch.setattr(os, name, _recorded(name, calls))
            await store(tier, chunk_of(0))
            monkeypatch.undo()
            assert calls == expected


async def test_reads_do_not_wait_for_writes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every write thread stuck in the disk, a read is answered."""
    async with opened(root, n_write_threads=2, n_read_threads=1) as tier:
        await store(tier, chunk_of(0))
        release, stuck, real = threading.Event(), threading.Semaphore(0), os.pwritev

        def slow(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            stuck.release()
            release.wait(PATIENCE_S)
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "pwritev", slow)
        writing = asyncio.ensure_future(write(tier, *(chunk_of(i) for i in range(1, 6))))
        for _ in range(2):
            assert await asyncio.to_thread(stuck.acquire, timeout=PATIENCE_S)
        assert await fetch(tier, chunk_of(0)) == [OK]
        assert list(await tier.contains([key_of(0)])) == [True]
        release.set()
        assert all(o.ok for o in await writing)


async def test_one_hop_a_worker_and_batch(root: Path) -> None:
    """A batch of 12 costs as many queue entries as workers, not as chunks."""
    async with opened(root, n_read_threads=2) as tier:
        await store(tier, *(chunk_of(i) for i in range(12)))
        submitted: list[object] = []
        real = tier._read_lane._submit
        tier._read_lane._submit = lambda job: (submitted.append(job), real(job))[1]  # type: ignore[method-assign,func-returns-value]
        assert await fetch(tier, *(chunk_of(i) for i in range(12))) == [OK] * 12
        assert len(submitted) <= 2


async def test_closed_means_closed(root: Path) -> None:
    """Idempotent close; every call after it, or before open, raises ClosedError."""
    tier = FSTier(root, capacity="1MiB")
    with pytest.raises(ClosedError):
        await tier.contains([key_of(1)])
    assert tier.share_nbytes() == 0 and not tier.writable and tier.settled(key_of(1)) and tier.counters() == {}
    await tier.aclose()
    with pytest.raises(ClosedError):
        await tier.open(context())
    assert not root.exists()
    tier = FSTier(root, capacity="1MiB")
    await tier.open(context())
    with pytest.raises(ClosedError):
        await tier.open(context())
    await tier.aclose()
    await tier.aclose()
    for call in (tier.read([]), tier.write([]), tier.delete([]), tier.probe([]), tier.contains([])):
        with pytest.raises(ClosedError):
            await call


async def test_close_waits_for_calls_under_way_even_when_it_is_cancelled(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled aclose still releases everything once the last thread is out of the caller's memory."""
    tier = FSTier(root, capacity="1MiB", min_free=0)
    await tier.open(context())
    await asyncio.to_thread(tier._mount._scan_lane.wait_idle)  # type: ignore[union-attr]
    release, stuck, real = threading.Event(), threading.Event(), os.pwritev

    def slow(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        stuck.set()
        release.wait(PATIENCE_S)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    writing = asyncio.ensure_future(write(tier, chunk_of(1)))
    await asyncio.to_thread(stuck.wait, PATIENCE_S)
    closing = asyncio.ensure_future(tier.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    release.set()
    assert (await writing)[0].ok
    await tier.aclose()
    assert not [fd for fd in os.listdir("/proc/self/fd") if str(root) in _target(fd)]


async def test_a_cancelled_open_is_cleaned_up_by_aclose(root: Path) -> None:
    """Nothing leaks (the fixture looks) if the opener was cancelled half-way."""
    tier = FSTier(root, capacity="1MiB")
    opening = asyncio.ensure_future(tier.open(context()))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await tier.aclose()


async def test_repr_says_how_full_it_is(root: Path) -> None:
    """What an operator sees in a log line."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1))
        assert "1 chunks" in repr(tier) and "KiB of" in repr(tier)
    assert "not open" in repr(FSTier(root))


@only_files
async def test_a_read_renews_an_old_files_time(root: Path) -> None:
    """Recency survives a kill coarsely: a file's time is that of its last use, give or take a minute."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1), chunk_of(2))
        for i in (1, 2):
            os.utime(path_of(root, key_of(i), tier), (1, 1))
        await fetch(tier, chunk_of(1))
        assert path_of(root, key_of(1), tier).stat().st_mtime > 1
        assert path_of(root, key_of(2), tier).stat().st_mtime == 1


def test_zeroing_covers_more_than_one_piece() -> None:
    """The tail behind a short chunk in a long slot is zeroed to its end."""
    buffer = memoryview(bytearray(b"\xee" * 200_000))
    zero(buffer, 3)
    assert buffer[:3] == b"\xee" * 3 and not any(buffer[3:])


def _slot(i: int) -> memoryview:
    (slot,) = slots(1)
    slot[:LONGEST] = payload_of(key_of(i), LONGEST)
    return slot


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _recorded(name: str, calls: list[str]) -> Any:
    real = getattr(os, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return real(*args, **kwargs)

    return call


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    """Make threads interleave more than they would."""
    old = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    yield
    sys.setswitchinterval(old)
