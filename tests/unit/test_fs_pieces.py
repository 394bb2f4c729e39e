"""Long chunks, which go piece by piece: the same bytes as in one call, in both layouts, and every piece is proven."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.fs_kit import chunk_of, context, flip, is_slab, key_of, opened, path_of, payload_of, recount, slots, using
from tierkv.tiers._fs import pieces
from tierkv.tiers._fs.format import PAGE_NBYTES, PLAIN, Sums, padded_nbytes
from tierkv.tiers._fs.pieces import LONG_NBYTES, PIECE_NBYTES, in_pages, sum_of_pieces
from tierkv.types import Reason, Status

LONGEST = LONG_NBYTES + PIECE_NBYTES
CTX = context(longest=LONGEST, stride=LONGEST)


@pytest.fixture(autouse=True, params=["slab", "files"])
def _in_layout(request: pytest.FixtureRequest) -> Iterator[None]:
    with using(request.param):
        yield


def calls_of(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Bytes of each long ``preadv`` or ``pwritev`` from now on."""
    real = getattr(os, name)
    seen: list[int] = []

    def call(fd: int, parts: Sequence[memoryview], offset: int) -> int:
        if sum(map(len, parts)) > PIECE_NBYTES // 2:
            seen.append(sum(map(len, parts)))
        return int(real(fd, parts, offset))

    monkeypatch.setattr(os, name, call)
    return seen


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("nbytes", [1, PIECE_NBYTES, LONG_NBYTES, LONG_NBYTES + 1, LONGEST - 5, LONGEST])
async def test_the_same_bytes_and_zeros(
    root: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, in_memory: bool
) -> None:
    """Around every bound; and a flipped bit in the last byte is found."""
    monkeypatch.setattr("tierkv.tiers._fs.mount.is_in_memory", lambda _: in_memory)
    async with opened(root, capacity="64MiB", ctx=CTX) as tier:
        source, target = slots(2, LONGEST)
        source[:nbytes] = payload_of(key_of(1), nbytes)
        source[nbytes:] = b"\xaa" * (LONGEST - nbytes)  # another tenant's: must stay here
        assert [o.ok for o in await tier.write([(chunk_of(1, nbytes), source)])] == [True]
        assert [o.ok for o in await tier.read([(key_of(1), target)])] == [True]
        assert target == bytes(source[:nbytes]) + bytes(LONGEST - nbytes)
        lies = path_of(root, key_of(1), tier).read_bytes()[PAGE_NBYTES : PAGE_NBYTES + padded_nbytes(nbytes)]
        assert lies == bytes(source[:nbytes]) + bytes(padded_nbytes(nbytes) - nbytes)
        flip(path_of(root, key_of(1), tier), PAGE_NBYTES + nbytes - 1)
        assert [o.status for o in await tier.read([(key_of(1), target)])] == [Status.CORRUPT]


@pytest.mark.parametrize("at", [0, PIECE_NBYTES - 1, PIECE_NBYTES, LONG_NBYTES])
async def test_each_piece_is_proven(root: Path, at: int) -> None:
    """A flipped bit in any piece is a miss, and the chunk is gone."""
    async with opened(root, capacity="64MiB", ctx=CTX) as tier:
        source, target = slots(2, LONGEST)
        await tier.write([(chunk_of(1, LONGEST), source)])
        flip(path_of(root, key_of(1), tier), PAGE_NBYTES + at)
        assert [o.status for o in await tier.read([(key_of(1), target)])] == [Status.CORRUPT]
        assert [o.status for o in await tier.read([(key_of(1), target)])] == [Status.MISSING]


async def test_no_call_is_longer_than_a_piece_and_a_header(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of a long chunk is as many calls as pieces. So is a write into a slot; a file is written at once."""
    async with opened(root, capacity="64MiB", ctx=CTX) as tier:
        source, target = slots(2, LONGEST)
        writes, reads = calls_of(monkeypatch, "pwritev"), calls_of(monkeypatch, "preadv")
        await tier.write([(chunk_of(1, LONGEST), source)])
        await tier.read([(key_of(1), target)])
        in_pieces = [PIECE_NBYTES] * (LONGEST // PIECE_NBYTES - 1)
        assert reads == [PIECE_NBYTES + PAGE_NBYTES, *in_pieces]
        assert writes == ([*in_pieces, PIECE_NBYTES + PAGE_NBYTES] if is_slab() else [LONGEST + PAGE_NBYTES])


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_a_write_that_ends_short_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Whichever piece finds the disk full: refused, not found, and the next one may have the room."""
    async with opened(root, capacity="64MiB", ctx=CTX) as tier:
        source, target = slots(2, LONGEST)
        source[:] = payload_of(key_of(1), LONGEST)
        real, left = os.pwritev, [number]

        def full(fd: int, parts: Sequence[memoryview], offset: int) -> int:
            if sum(map(len, parts)) >= PIECE_NBYTES:
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(errno.ENOSPC, "no space left")
            return real(fd, parts, offset)

        with monkeypatch.context() as patched:
            patched.setattr(os, "pwritev", full)
            (outcome,) = await tier.write([(chunk_of(1, LONGEST), source)])
        if number and not is_slab():
            assert outcome.ok, "a file is written at once"
            return
        assert (outcome.status, outcome.reason) == (Status.REFUSED, Reason.NO_SPACE)
        assert [o.status for o in await tier.read([(key_of(1), target)])] == [Status.MISSING]
        assert recount(root) <= 64 << 20
        assert [o.ok for o in await tier.write([(chunk_of(1, LONGEST), source)])] == [True]
        assert [o.ok for o in await tier.read([(key_of(1), target)])] == [True]
        assert target == bytes(source)


async def test_a_read_that_ends_short_in_a_later_piece_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is as long as it was, so it is not its fault: the chunk stays, and the next read finds it."""
    async with opened(root, capacity="64MiB", ctx=CTX) as tier:
        source, target = slots(2, LONGEST)
        await tier.write([(chunk_of(1, LONGEST), source)])
        real, calls = os.preadv, []

        def short(fd: int, parts: Sequence[memoryview], offset: int) -> int:
            n = real(fd, parts, offset)
            calls.append(n)
            return n if len(calls) < 2 else n - PAGE_NBYTES

        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", short)
            assert [o.status for o in await tier.read([(key_of(1), target)])] == [Status.FAILED]
        assert [o.ok for o in await tier.read([(key_of(1), target)])] == [True]


@pytest.mark.parametrize("sums", [PLAIN, Sums(b"sixteen bytes or more")])
@pytest.mark.parametrize("nbytes", [PIECE_NBYTES + 1, LONG_NBYTES, LONG_NBYTES + PAGE_NBYTES - 1])
def test_the_sum_is_that_of_the_whole(nbytes: int, sums: Sums) -> None:
    """Pieces come from where they lie, in whole pages; the sum is of the payload alone."""
    whole = os.urandom(-(-nbytes // PAGE_NBYTES) * PAGE_NBYTES)
    buffer = memoryview(bytearray(len(whole)))
    buffer[:PIECE_NBYTES] = whole[:PIECE_NBYTES]

    def fill(parts: Sequence[memoryview], offset: int) -> None:
        (part,) = parts
        assert len(part) % PAGE_NBYTES == 0
        part[:] = whole[offset - PAGE_NBYTES : offset - PAGE_NBYTES + len(part)]

    assert sum_of_pieces(sums, buffer, nbytes, fill) == sums.of(memoryview(whole)[:nbytes])
    assert buffer == whole


def test_a_full_last_page_is_the_callers_own() -> None:
    """Only where it is not full is it copied, with zeros behind."""
    payload, tail = memoryview(bytearray(b"x" * (2 * PAGE_NBYTES))), memoryview(bytearray(b"y" * PAGE_NBYTES))
    (same,) = in_pages(payload, tail)
    assert same == payload
    assert tail[0] == ord("y")
    first, last = in_pages(payload[: PAGE_NBYTES + 3], tail)
    assert len(first) == PAGE_NBYTES
    assert last == b"xxx" + bytes(PAGE_NBYTES - 3)
    assert pieces.LONG_NBYTES % PAGE_NBYTES == PIECE_NBYTES % PAGE_NBYTES == 0
