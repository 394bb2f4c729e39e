"""A18, A19, A42, A43: what a killed process, a bad disk or a cut file leaves, and that only whole chunks are served."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cases.kit import (
    CHARGE,
    cache_over,
    chunk_files,
    fetch,
    file_of,
    forget_primary,
    fs_tier,
    keep,
    litter,
    opened,
    place_of,
    room_for,
    settle,
    turns_until,
)
from tests.faults import Child, Faults, in_child
from tests.fs_kit import is_slab, only_files, recount
from tests.patience import PATIENCE_S
from tests.toys import prompt
from tierkv import Stop, TieredCache

pytestmark = pytest.mark.usefixtures("layout")


async def _write_for_ever(_: Faults, root: str, first: str) -> None:
    """Chunks first, first + 1, ..., each acknowledged in a file beside the root once its event is out."""
    said = os.open(f"{root}.said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(said, b"begun\n")
    async with cache_over(fs_tier(root, n_write_threads=1), n_chunks=20) as cache:
        for n in itertools.count(int(first)):
            await keep(cache, [n, n])
            await cache.wait_idle(PATIENCE_S)
            if cache._opened().hierarchy.levels[1].ledger.get(cache.chunks([n, n])[0].key):
                os.write(said, b"%d\n" % n)
            else:
                await asyncio.sleep(0.001)  # a newcomer has no share yet, and is told so at once


def _said(root: Path) -> list[int]:
    words = Path(f"{root}.said").read_text().split() if Path(f"{root}.said").exists() else []
    return [int(word) for word in words if word.isdigit()]


async def _scanned(cache: TieredCache) -> None:
    tier = cache._levels[1].tier
    await turns_until(lambda: tier.writable)  # type: ignore[attr-defined]
    await settle(cache)


@only_files
async def test_a18_unfinished_files_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    """Temp files of killed writers stayed for ever, and age alone cannot tell a dead writer from a slow one.

    https://github.com/llm-d/llm-d-kv-cache/issues/721

    Of the kind: one process killed between its last byte and the rename, one stalled there and alive, a third that
    starts: the dead one's file goes, the living one's stays, counts towards the limit and gets its name; foreign files
    and links stay. A sweep that fails (EIO on unlink) does not keep the third from starting.
    """
    root = tmp_path / "root"
    with (
        Child(_write_for_ever, root, 1000, folder=tmp_path / "dead") as dead,
        Child(_write_for_ever, root, 2000, folder=tmp_path / "alive") as alive,
    ):
        stalled = [child.faults.add("rename", path=f"{root}/", hang=True, first=2) for child in (dead, alive)]
        for rule in stalled:
            await rule.met(waiting=True)
        assert len(litter(root)) == 2
        dead.kill()
        leaf = next(root.rglob("*.part*")).parent
        foreign = [root / "notes", leaf / "notes.part0", leaf / "x.part"]
        for path in foreign:
            path.write_text("somebody's")
        (leaf / "link").symlink_to(foreign[0])
        in_child(_opens_though_it_cannot_sweep, root, folder=tmp_path)
        async with opened(cache_over(fs_tier(root), n_chunks=20)) as cache:
            await _scanned(cache)
            await turns_until(lambda: len(litter(root)) == 3)  # the living one's and two that are nobody's
            assert recount(root) - sum(4096 for _ in foreign) <= room_for(20)
            stalled[1].let_go()
            await turns_until(lambda: len(_said(root)) >= 5)
            stalled[1].remove()
            again = alive.faults.add("rename", path=f"{root}/", hang=True)
            await again.met(waiting=True)  # else it might have evicted, by now, what it said last
            n = _said(root)[-1]
            assert await fetch(cache, [n, n]) == 1, "it got its name, and others read it"
        assert all(path.read_text() == "somebody's" for path in foreign) and (leaf / "link").is_symlink()


async def _opens_though_it_cannot_sweep(faults: Faults, root: str) -> None:
    rule = faults.add("unlink", path=".part", error=5)
    async with opened(cache_over(fs_tier(root), n_chunks=20)) as cache:
        await _scanned(cache)
        await keep(cache, [7, 7])
        assert await fetch(cache, [7, 7]) == 1
    rule.remove()


def _flip(path: Path, _: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096 + 4000] ^= 0x20
    path.write_bytes(data)


def _flip_the_header(path: Path, _: Path) -> None:
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)


def _append(path: Path, _: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(4096))


def _treble(path: Path, _: Path) -> None:
    path.write_bytes(path.read_bytes() * 3)


def _another_chunks(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


def _zeros(path: Path, _: Path) -> None:
    path.write_bytes(bytes(len(path.read_bytes())))


async def _lies(faults: Faults, root: str) -> None:
    async with opened(cache_over(fs_tier(root))) as cache:
        await keep(cache, prompt(1))
        await forget_primary(cache)
        rule = faults.add("read", flip=True, **place_of(root, cache.chunks(prompt(1))[1].key))
        assert await fetch(cache, prompt(1)) == 1, "what the medium says is wrong, the file is not: a miss"
        rule.remove()
        await keep(cache, prompt(1))
        await forget_primary(cache)
        assert await fetch(cache, prompt(1)) == 4


async def test_a19_the_right_length_and_the_wrong_bytes(tmp_path: Path) -> None:
    """Only a short file was noticed: bit rot or another chunk's bytes of equal length were fed to the model.

    https://github.com/vllm-project/vllm/issues/54363

    Of the kind: one bit of the payload, of the header; appended, trebled, zeroed; another chunk's whole file; each
    while the tier is open and across a restart, with and without index; and a medium that lies while the file is right.
    """
    damages: list[Callable[[Path, Path], None]] = [_flip, _flip_the_header, _another_chunks, _zeros]
    if not is_slab():  # where a slot ends another one begins
        damages += [_append, _treble]
    for damage in damages:
        for restart in (False, True):
            root = tmp_path / f"{damage.__name__}-{restart}"
            async with opened(cache_over(fs_tier(root))) as cache:
                await keep(cache, prompt(1))
                await forget_primary(cache)
                chunks = cache.chunks(prompt(1))
                bad, other = (file_of(root, chunks[i].key) for i in (1, 2))
                if not restart:
                    damage(bad, other)
                    await _expect_a_miss(cache, root, bad)
            if restart:
                damage(bad, other)
                if damage is _zeros:
                    next(root.glob("*.index")).unlink()
                async with opened(cache_over(fs_tier(root))) as cache:
                    await _scanned(cache)
                    await _expect_a_miss(cache, root, bad)
    in_child(_lies, tmp_path / "lies", folder=tmp_path)


async def _expect_a_miss(cache: TieredCache, root: Path, bad: Path) -> None:
    assert await fetch(cache, prompt(1)) == 1
    assert (await cache.lookup(prompt(1))).stop is Stop.MISS
    assert cache._levels[1].tier.counters()["corrupt"] == 1  # type: ignore[attr-defined]
    assert not bad.exists() and len(chunk_files(root)) == 3, "neighbours are kept"
    await keep(cache, prompt(1))
    await forget_primary(cache)
    assert await fetch(cache, prompt(1)) == 4


class _Instant(NamedTuple):
    """Where a kill hits: a call on the way of a write, in front of it or behind it, or in its middle."""

    call: str
    path: str = ".part"
    at_most: int | None = None
    n: int = 25


FILE_INSTANTS = {
    "before it is opened": _Instant("open"),
    "after half the bytes": _Instant("write", at_most=4096),
    "before the close": _Instant("close"),
    "before the rename": _Instant("rename", path="/"),
    "before an eviction": _Instant("unlink", path="/"),
    "while listing": _Instant("list", path="/"),
}
SLAB_INSTANTS = {
    "before the bytes": _Instant("write", path=".slab"),
    "after half the bytes": _Instant("write", path=".slab", at_most=4096),
    "before a row, or an eviction": _Instant("write", path=".slots"),
    "before the next": _Instant("write", path=".slots", n=26),
    "while listing": _Instant("list", path="/"),
}


async def test_a42_a_kill_in_mid_write(tmp_path: Path) -> None:
    """SIGKILL in the middle of a write, at each of its calls, of an eviction and of a scan, round after round.

    After each: only whole, verified chunks are served, what was acknowledged is there, nothing unfinished is left, and
    the disk holds no more than its limit. A thousand kills, at every call: ``nox -s crash``.
    """
    root = tmp_path / "root"
    first = 0
    for instant in (SLAB_INSTANTS if is_slab() else FILE_INSTANTS).values():
        first += 1000
        if instant.call == "list":  # else the index spares it
            next(root.glob("*.index")).unlink()
        with Child(_write_for_ever, root, first, folder=tmp_path / f"{first}") as child:
            path, n_calls = instant.path, 1 if instant.call == "list" else instant.n
            path = f"{root}/" if path == "/" else path
            if instant.at_most is not None:  # the rest of it, which is written next, hangs
                child.faults.add(instant.call, path=path, at_most=instant.at_most, first=n_calls, count=1)
            rule = child.faults.add(instant.call, path=path, hang=True, first=n_calls)
            await rule.met(waiting=True)
            child.kill()
        assert recount(root) <= room_for(20)
        async with opened(cache_over(fs_tier(root), n_chunks=20)) as cache:
            await _scanned(cache)
            await turns_until(lambda: cache.statistics()["fs"].n_chunks == len(chunk_files(root)))
            assert litter(root) == []
            files = chunk_files(root)
            assert all(len(path.read_bytes()) == CHARGE for path in files.values())
            keys = {cache.chunks([n, n])[0].key.hex(): n for n in range(first + 1000)}
            assert [await fetch(cache, [keys[key]] * 2) for key in files] == [1] * len(files)
            acknowledged = [n for n in _said(root) if n >= first][-10:]
            assert instant.call == "list" or len(acknowledged) == 10
            kept = {cache.chunks([n, n])[0].key.hex() for n in acknowledged}
            assert kept <= set(files), "what was acknowledged last is there"
            assert cache._levels[1].tier.counters()["corrupt"] == 0
    assert recount(root) <= room_for(20)


@only_files
async def test_a43_truncated_files(tmp_path: Path) -> None:
    """Chunk files of 0 bytes, 1 byte, half a header, a header alone, a page less and a byte less than they should have.

    Each is a miss, is put away, and is written again by the next store: while the tier is open, found by the scan of a
    restart, and by a lookup that comes before the scan. A slab that was cut: tests/unit/test_attacks_slab.py.
    """
    for nbytes in (0, 1, 2000, 4096, CHARGE - 4096, CHARGE - 1):
        for when in ("open", "restart"):
            root = tmp_path / f"{nbytes}-{when}"
            async with opened(cache_over(fs_tier(root))) as cache:
                await keep(cache, prompt(1))
                await forget_primary(cache)
                bad = file_of(root, cache.chunks(prompt(1))[1].key)
                if when == "open":
                    os.truncate(bad, nbytes)
                    await _expect_a_miss(cache, root, bad)
            if when == "restart":
                os.truncate(bad, nbytes)
                async with opened(cache_over(fs_tier(root))) as cache:
                    assert await fetch(cache, prompt(1)) <= 1, "before or after the scan"
                    await _scanned(cache)
                    await fetch(cache, prompt(1))
                    assert len(chunk_files(root)) == 3
                    await keep(cache, prompt(1))
                    await forget_primary(cache)
                    assert await fetch(cache, prompt(1)) == 4
