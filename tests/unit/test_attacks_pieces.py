"""What happens to a long chunk between two of its pieces: another takes its slot or its file, or the disk gives up."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fs_kit import (
    LAYOUTS,
    PAGE,
    _mount,
    chunk_of,
    context,
    flip,
    is_slab,
    key_of,
    opened,
    path_of,
    payload_of,
    recount,
    set_time,
    slots,
    using,
)
from tests.patience import PATIENCE_S
from tierkv.tiers._fs.pieces import LONG_NBYTES, PIECE_NBYTES
from tierkv.tiers.fs import FSTier
from tierkv.types import Outcome, Status

LONGEST = LONG_NBYTES + PIECE_NBYTES
CTX = context(longest=LONGEST, stride=LONGEST)
N_PIECES = LONGEST // PIECE_NBYTES
OK, MISSING = Status.OK, Status.MISSING


@pytest.fixture(autouse=True, params=["slab"])
def in_layout(request: pytest.FixtureRequest) -> Iterator[None]:
    with using(request.param):
        yield


in_both = pytest.mark.parametrize("in_layout", LAYOUTS, indirect=True)
in_files = pytest.mark.parametrize("in_layout", ["files"], indirect=True)


class Between:
    """Within, each long ``preadv`` stops before it begins, until it is told to go on."""

    def __init__(self) -> None:
        self._arrived, self._go = threading.Semaphore(0), threading.Semaphore(0)
        self._is_on = False
        self._real = os.preadv

    def preadv(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        if self._is_on and sum(map(len, parts)) >= PIECE_NBYTES // 2:
            self._arrived.release()
            assert self._go.acquire(timeout=PATIENCE_S)
        return self._real(fd, parts, offset)

    async def piece(self) -> None:
        """A read stands before its next piece."""
        assert await asyncio.to_thread(self._arrived.acquire, timeout=PATIENCE_S)

    def go(self) -> None:
        self._go.release()

    def __enter__(self) -> None:
        self._is_on = True

    def __exit__(self, *exc: object) -> None:
        self.off()

    def off(self) -> None:
        """Stop nobody any more."""
        self._is_on = False
        for _ in range(N_PIECES):
            self.go()


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Between:
    made = Between()
    monkeypatch.setattr(os, "preadv", made.preadv)
    return made


async def put(tier: FSTier, i: int, nbytes: int = LONGEST) -> None:
    (source,) = slots(1, LONGEST)
    source[:nbytes] = payload_of(key_of(i), nbytes)
    (outcome,) = await tier.write([(chunk_of(i, nbytes), source)])
    assert outcome.ok, outcome


async def take(tier: FSTier, i: int, nbytes: int = LONGEST) -> Outcome:
    """Read; what came back OK is right."""
    (target,) = slots(1, LONGEST)
    (outcome,) = await tier.read([(key_of(i), target)])
    if outcome.ok:
        assert target == payload_of(key_of(i), nbytes) + bytes(LONGEST - nbytes)
    return outcome


async def evict(tier: FSTier) -> None:
    await tier.delete([key_of(1)])


async def hole(tier: FSTier) -> None:
    await tier.delete([key_of(1)])
    assert _mount(tier)._slabs.give_back(1 << 40) > 0


def first_slot_next(tier: FSTier) -> None:
    """The next chunk goes into the first slot, if that is idle."""
    _mount(tier)._slabs.at(_mount(tier)._ownership.id, PAGE + LONGEST)._cursor = 0


async def another(tier: FSTier) -> None:
    await evict(tier)
    first_slot_next(tier)
    await put(tier, 2)
    assert _mount(tier).books.get(key_of(2)).at == 0


async def put_for_both(owner: FSTier, other: FSTier) -> None:
    """A chunk of the owner's, and each knows of the other's slab."""
    _mount(owner).beat()
    _mount(other).beat()
    await put(owner, 1)


async def midway(reader: FSTier, between: Between) -> asyncio.Future[Outcome]:
    """A read of that chunk, whose first piece is here and whose second is about to be read."""
    reading = asyncio.ensure_future(take(reader, 1))
    await between.piece()
    between.go()
    await between.piece()
    return reading


@pytest.mark.parametrize("is_foreign", [False, True])
@pytest.mark.parametrize("before", range(1, N_PIECES))
@pytest.mark.parametrize("happens", [evict, another, hole])
async def test_a_slot_that_goes_between_two_pieces(
    root: Path, between: Between, is_foreign: bool, before: int, happens: Callable[[FSTier], Any]
) -> None:
    """Its reader misses, nobody counts a corrupt chunk, and whoever has the slot now keeps it."""
    async with opened(root, capacity="64MiB", ctx=CTX) as owner, opened(root, capacity="64MiB", ctx=CTX) as other:
        _mount(owner).beat()
        _mount(other).beat()
        await put(owner, 1)
        assert _mount(owner).books.get(key_of(1)).at == 0
        with between:
            reading = asyncio.ensure_future(take(other if is_foreign else owner, 1))
            for piece in range(N_PIECES):
                await between.piece()
                if piece == before:
                    await happens(owner)
                    if happens is hole:  # which a read may find at once, or after its last piece
                        break
                between.go()
            between.off()
            outcome = await reading
        # An idle slot still has what it had: that is as good.
        assert outcome.status is (OK if happens is evict else MISSING), outcome
        for tier in (owner, other):
            assert tier.counters()["corrupt"] == tier.counters()["failed_reads"] == 0
        if happens is another:
            assert (await take(owner, 2)).ok
            assert (await take(other, 2)).ok
        await put(owner, 1)
        assert (await take(other, 1)).ok
        _mount(owner).books.check()
        assert recount(root) <= 64 << 20


@pytest.mark.parametrize("n_times", [1, 2])
@pytest.mark.parametrize("is_foreign", [False, True])
async def test_a_chunk_that_comes_back_into_its_slot_between_two_pieces(
    root: Path, monkeypatch: pytest.MonkeyPatch, between: Between, is_foreign: bool, n_times: int
) -> None:
    """In the tenth of a second that rows can tell, while a piece of another's was read, or again: it is not corrupt."""
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)
    async with opened(root, capacity="64MiB", ctx=CTX) as owner, opened(root, capacity="64MiB", ctx=CTX) as other:
        await put_for_both(owner, other)
        with between:
            reading = await midway(other if is_foreign else owner, between)
            for n_left in reversed(range(n_times)):
                await another(owner)
                between.go()
                await between.piece()
                await owner.delete([key_of(2)])
                first_slot_next(owner)
                await put(owner, 1)
                assert _mount(owner).books.get(key_of(1)).at == 0
                for _ in range(N_PIECES - 1 if n_left else 0):  # to the end, and into the next read's midst
                    between.go()
                    await between.piece()
            between.off()
            outcome = await reading
        assert outcome.status in (OK, MISSING)
        for tier in (owner, other):
            assert tier.counters()["corrupt"] == tier.counters()["failed_reads"] == 0
            assert (await take(tier, 1)).ok
        _mount(owner).books.check()
        assert recount(root) <= 64 << 20


async def test_a_corrupt_chunk_is_read_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a row that was written a moment ago is worth another look."""
    async with opened(root, capacity="64MiB", ctx=CTX) as tier:
        await put(tier, 1)
        set_time(root, key_of(1), tier, time.time() - 10)
        flip(path_of(root, key_of(1), tier), PAGE)
        real, calls = os.preadv, []

        def counting(fd: int, parts: Sequence[memoryview], offset: int) -> int:
            calls.append(offset)
            return real(fd, parts, offset)

        monkeypatch.setattr(os, "preadv", counting)
        assert (await take(tier, 1)).status is Status.CORRUPT
        assert len(calls) == N_PIECES


def replaced(path: Path) -> None:
    """As a rewrite by another process does it; here by other bytes, to tell the two apart."""
    new = path.with_name("new")
    new.write_bytes(b"another" * 1000)
    new.rename(path)


def cut(path: Path) -> None:
    os.truncate(path, PAGE + PIECE_NBYTES)


@in_files
@pytest.mark.parametrize("is_foreign", [False, True])
@pytest.mark.parametrize("happens", [replaced, Path.unlink, cut])
async def test_a_file_that_goes_between_two_pieces(
    root: Path, between: Between, is_foreign: bool, happens: Callable[[Path], None]
) -> None:
    """An open file is whole whatever becomes of its name. One that is cut is a miss, and is not there afterwards."""
    async with opened(root, capacity="64MiB", ctx=CTX) as owner, opened(root, capacity="64MiB", ctx=CTX) as other:
        await put_for_both(owner, other)
        with between:
            reading = await midway(other if is_foreign else owner, between)
            happens(path_of(root, key_of(1), owner))
            between.off()
            outcome = await reading
        assert outcome.ok is (happens is not cut), outcome
        assert outcome.status is not Status.FAILED, "what is cut is no fault of the disk"
        assert not (await take(owner, 1)).ok
        assert (await take(owner, 1)).status is MISSING
        await put(owner, 1)
        assert (await take(other, 1)).ok
        _mount(owner).books.check()


@in_both
@pytest.mark.parametrize("nbytes", [LONG_NBYTES + 1, LONGEST - PAGE, LONGEST - 1, LONGEST])
async def test_buffers_about_as_long_as_the_chunk(root: Path, nbytes: int) -> None:
    """One that is too short says so and costs no chunk; one that ends in its last page is filled to its end."""
    async with opened(root, capacity="64MiB", ctx=CTX) as tier:
        await put(tier, 1, nbytes)
        for length in (nbytes - PAGE, nbytes - 1, nbytes, nbytes + 1, LONGEST + 1):
            target = slots(1, LONGEST + 2 * PAGE)[0][:length]
            (outcome,) = await tier.read([(key_of(1), target)])
            assert outcome.status is (OK if length >= nbytes else Status.FAILED), outcome
            if outcome.ok:
                assert target == payload_of(key_of(1), nbytes) + bytes(length - nbytes)
        assert tier.counters()["corrupt"] == tier.counters()["buffered"] == 0


@in_both
@pytest.mark.parametrize("number", [1, N_PIECES])
async def test_direct_io_refuses_a_piece(root: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """It goes through the page cache. A chunk all of whose pieces do is counted once."""
    calls: list[int] = []
    refused: list[int] = []

    def refusing(real: Callable[..., int], *, always: bool) -> Callable[..., int]:
        def call(fd: int, parts: Sequence[memoryview], offset: int) -> int:
            if sum(map(len, parts)) >= PIECE_NBYTES:
                calls.append(offset)
                if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT and (always or len(calls) == number):
                    refused.append(offset)
                    raise OSError(errno.EINVAL, "not aligned")
            return real(fd, parts, offset)

        return call

    async with opened(root, capacity="64MiB", ctx=CTX) as tier:
        for name in ("pwritev", "preadv"):
            for always in (False, True):
                with monkeypatch.context() as patched:
                    calls.clear()
                    refused.clear()
                    patched.setattr(os, name, refusing(getattr(os, name), always=always))
                    n_before = tier.counters()["buffered"]
                    await put(tier, 1)
                    assert (await take(tier, 1)).ok
                    if always:  # a root without direct I/O has nothing to refuse
                        assert tier.counters()["buffered"] - n_before == min(1, len(refused))


@in_both
@pytest.mark.parametrize(("name", "durability"), [("pwritev", "process"), ("pwritev", "power"), ("preadv", "process")])
@pytest.mark.parametrize("number", range(N_PIECES))
async def test_the_disk_gives_up_at_a_piece(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str, durability: Any
) -> None:
    """The call fails, what was there stays, what was not is not, and every byte is counted as before."""
    async with opened(root, capacity="64MiB", ctx=CTX, durability=durability) as tier:
        await put(tier, 2)
        if name == "preadv":
            await put(tier, 1)
        books, real, calls = _mount(tier).books, getattr(os, name), []
        before = (books.used_nbytes, books.chunks_nbytes, books.idle_nbytes)

        def failing(fd: int, parts: Sequence[memoryview], offset: int) -> int:
            if sum(map(len, parts)) >= PIECE_NBYTES:
                calls.append(offset)
                if len(calls) == number + 1:
                    raise OSError(errno.EIO, "gone")
            return int(real(fd, parts, offset))

        with monkeypatch.context() as patched:
            patched.setattr(os, name, failing)
            source, target = slots(2, LONGEST)
            items: Any = [(chunk_of(1, LONGEST), source)] if name == "pwritev" else [(key_of(1), target)]
            (outcome,) = await (tier.write(items) if name == "pwritev" else tier.read(items))
        if name == "pwritev" and not is_slab() and number:
            assert outcome.ok, "a file is written at once"
            return
        assert outcome.status is Status.FAILED
        assert (books.used_nbytes, books.chunks_nbytes, books.idle_nbytes) == before
        assert (await take(tier, 1)).status is (OK if name == "preadv" else MISSING)
        assert (await take(tier, 2)).ok
        assert tier.counters()["corrupt"] == 0
        await put(tier, 1)
        assert (await take(tier, 1)).ok


async def test_every_piece_is_safe_before_the_row_is_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``durability: "power"``: all pieces, one sync of the slab, the row, one sync of the catalogue."""
    calls: list[str] = []

    def traced(name: str) -> None:
        real = getattr(os, name)

        def call(fd: int, *asked: Any) -> Any:
            suffix = Path(os.readlink(f"/proc/self/fd/{fd}")).suffix
            if suffix in (".slab", ".slots"):
                calls.append(f"{name} {suffix}")
            return real(fd, *asked)

        monkeypatch.setattr(os, name, call)

    async with opened(root, capacity="64MiB", ctx=CTX, durability="power") as tier:
        await put(tier, 1)  # which makes the slab
        for name in ("pwritev", "pwrite", "fdatasync"):
            traced(name)
        await put(tier, 2)
    assert calls[: N_PIECES + 3] == ["pwritev .slab"] * N_PIECES + [
        "fdatasync .slab", "pwrite .slots", "fdatasync .slots",
    ]  # fmt: skip
