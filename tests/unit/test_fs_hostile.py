"""What lies on the disk is not what was written: each case is a miss, counted, and never a wrong byte."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fs_kit import (
    CHARGE,
    LONGEST,
    NAMESPACE,
    PAGE,
    _mount,
    chunk_of,
    context,
    fetch,
    files_under,
    first_batches,
    is_slab,
    key_of,
    layout,  # noqa: F401
    only_files,
    opened,
    path_of,
    read,
    recount,
    slots,
    store,
)
from tierkv.errors import CorruptChunkError, TierError
from tierkv.tiers._fs.format import leaf_of, namespace_digest
from tierkv.tiers.fs import FSTier
from tierkv.types import Status

OK, MISSING, CORRUPT = Status.OK, Status.MISSING, Status.CORRUPT


def flip(at: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 0x10
        path.write_bytes(data)

    damage.__name__ = f"flip_{at}"
    return damage


def cut(nbytes: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        os.truncate(path, nbytes if nbytes >= 0 else path.stat().st_size + nbytes)

    damage.__name__ = f"cut_{nbytes}"
    return damage


def append_a_page(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(PAGE))


def triple(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 3)


def put_a_pickle_there(path: Any) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
            return os.mkdir, (str((path if isinstance(path, Path) else path.slab).with_name("exploded")),)

    path.write_bytes(pickle.dumps(Bomb()).ljust(CHARGE, b"\0"))


def zeros(path: Path) -> None:
    path.write_bytes(bytes(len(path.read_bytes())))


DAMAGES = [
    flip(0), flip(20), flip(90), flip(PAGE - 1), flip(PAGE), flip(PAGE + LONGEST - 1),
    cut(0), cut(1), cut(100), cut(PAGE), cut(-1), cut(-PAGE), append_a_page, triple, put_a_pickle_there, zeros,
]  # fmt: skip
SLOT_DAMAGES = [damage for damage in DAMAGES if damage.__name__.startswith("flip")] + [put_a_pickle_there, zeros]


@only_files
@pytest.mark.parametrize("damage", [cut(100), cut(0), triple], ids=lambda d: d.__name__)
async def test_a_probe_puts_away_what_it_can_see_is_broken(root: Path, damage: Callable[[Path], None]) -> None:
    """By its length; a file left lying there would be bytes that nobody counts."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1))
        path = path_of(root, key_of(1), tier)
        damage(path)
        (found,) = await tier.probe([key_of(1)])
        assert found is None
        assert tier.counters()["corrupt"] == 1 and not path.exists()
        assert tier.usage()["chunks_nbytes"] == 0


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("restart", [False, True])
async def test_damage_is_a_miss_and_heals(root: Path, damage: Callable[[Path], None], restart: bool) -> None:
    """Bits, lengths, contents: the chunk is gone and counted, its neighbours are kept, the next store serves again.

    https://github.com/vllm-project/vllm/issues/54363 https://github.com/vllm-project/vllm/issues/49176
    """
    if is_slab() and damage not in SLOT_DAMAGES:
        pytest.skip("a slot has no length of its own")
    async with opened(root) as tier:
        await store(tier, chunk_of(0), chunk_of(1), chunk_of(2))
        path = path_of(root, key_of(1), tier)
        if not restart:
            damage(path)
            await _expect_healed(tier, path)
    if restart:
        damage(path)
        async with opened(root) as tier:
            await _expect_healed(tier, path)
    assert not list(root.rglob("exploded"))


async def _expect_healed(tier: FSTier, path: Path) -> None:
    statuses = await fetch(tier, chunk_of(0), chunk_of(1), chunk_of(2))
    assert statuses[0] is OK and statuses[2] is OK and statuses[1] in (CORRUPT, MISSING)
    assert not path.exists()
    assert tier.counters()["corrupt"] == 1
    assert tier.usage()["chunks_nbytes"] == 2 * CHARGE
    assert list(await tier.contains([key_of(1)])) == [False]
    await store(tier, chunk_of(1))
    assert await fetch(tier, chunk_of(1)) == [OK]


async def test_a_corrupt_chunk_says_why(root: Path) -> None:
    """The outcome carries the error with tier and key."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1))
        flip(PAGE)(path_of(root, key_of(1), tier))
        (outcome,) = await tier.read([(key_of(1), slots(1)[0])])
        assert isinstance(outcome.error, CorruptChunkError) and outcome.error.keys == (key_of(1),)
        assert "payload checksum" in str(outcome.error)


async def test_one_bad_chunk_asked_for_many_times_is_found_bad_once(root: Path) -> None:
    """One read finds and counts it, to the others it is gone; within one batch, to those that come later."""
    async with opened(root, n_read_threads=4) as tier:
        await store(tier, chunk_of(1))
        flip(PAGE)(path_of(root, key_of(1), tier))
        answers = await asyncio.gather(*(read(tier, key_of(1)) for _ in range(20)))
        assert sorted(status.value for (status,), _ in answers) == ["corrupt"] + ["missing"] * 19
        await store(tier, chunk_of(1), chunk_of(1))
        flip(PAGE)(path_of(root, key_of(1), tier))
        statuses, _ = await read(tier, *[key_of(1)] * 20)
        assert statuses == [CORRUPT] + [MISSING] * 19
        assert tier.counters()["corrupt"] == 2


async def test_failed_outcomes_hold_no_buffers(root: Path) -> None:
    """An error that keeps its traceback keeps the slot that was read into, for as long as somebody keeps the error."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1))
        for length, status in ((LONGEST - 1, Status.FAILED), (LONGEST, CORRUPT)):
            memory = bytearray(LONGEST)
            view = memoryview(memory)[:length]
            (outcome,) = await tier.read([(key_of(1), view)])
            assert outcome.status is status and outcome.error is not None
            view.release()
            memory.append(0)  # BufferError if any view of it is alive
            flip(PAGE)(path_of(root, key_of(1), tier)) if status is Status.FAILED else None


async def test_a_flipped_bit_in_the_padding_is_not_delivered(root: Path) -> None:
    """Bytes behind the payload are zero in the slot whatever the file says."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1))
        flip(PAGE + LONGEST)(path_of(root, key_of(1), tier))
        assert await fetch(tier, chunk_of(1)) == [OK]


@pytest.mark.parametrize("restart", [False, True])
async def test_two_swapped_files_are_two_misses(root: Path, restart: bool) -> None:
    """Right length, right checksum, wrong key."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1), chunk_of(2))
        one, two = (path_of(root, key_of(i), tier) for i in (1, 2))
        bytes_of_one, bytes_of_two = one.read_bytes(), two.read_bytes()
        one.write_bytes(bytes_of_two)
        two.write_bytes(bytes_of_one)
        if not restart:
            assert await fetch(tier, chunk_of(1), chunk_of(2)) == [CORRUPT] * 2
    async with opened(root) as tier:
        if restart:
            assert await fetch(tier, chunk_of(1), chunk_of(2)) == [CORRUPT] * 2
        assert await fetch(tier, chunk_of(1), chunk_of(2)) == [MISSING] * 2
        assert not one.exists() and not two.exists()


async def test_another_namespaces_file_under_our_path_is_a_miss(root: Path) -> None:
    """Same key, same length, whole file, other model: the digest in the header decides."""
    async with opened(root, ctx=context(namespace=b"other")) as tier:
        await store(tier, chunk_of(1))
        theirs = path_of(root, key_of(1), tier, b"other").read_bytes()
    async with opened(root) as tier:
        await store(tier, chunk_of(1))
        path_of(root, key_of(1), tier).write_bytes(theirs)
        assert await fetch(tier, chunk_of(1)) == [CORRUPT]
        assert tier.counters()["corrupt"] == 1


def fifo(path: Path, _: Path) -> None:
    os.mkfifo(path)


def link_to_a_chunk(path: Path, other: Path) -> None:
    path.symlink_to(other)


def dangling_link(path: Path, _: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def unix_socket(path: Path, _: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as sock:  # a name of more than 107 bytes cannot be bound: bind and rename
            sock.bind(f"/proc/self/fd/{here}/s")
    finally:
        os.close(here)
    (path.parent / "s").rename(path)


def device(path: Path, _: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("device files need privileges")


def empty_directory(path: Path, _: Path) -> None:
    path.mkdir()


def directory(path: Path, _: Path) -> None:
    path.mkdir()
    (path / "file").write_text("somebody's")


PLANTS = [fifo, link_to_a_chunk, dangling_link, unix_socket, device, empty_directory, directory]


@only_files
@pytest.mark.parametrize("plant", PLANTS, ids=lambda p: p.__name__)
@pytest.mark.parametrize("restart", [False, True])
async def test_what_is_no_file_is_a_miss_and_is_not_followed(
    root: Path, plant: Callable[[Path, Path], None], restart: bool
) -> None:
    """At a chunk's path: never opened through, never waited for, its target untouched; a store replaces it."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1), chunk_of(2))
        path, other = (path_of(root, key_of(i), tier) for i in (1, 2))
        if not restart:
            path.unlink()
            plant(path, other)
            await _expect_miss(tier, plant)
    if restart:
        path.unlink()
        plant(path, other)
        async with opened(root) as tier:
            await _expect_miss(tier, plant)


async def _expect_miss(tier: FSTier, plant: Callable[[Path, Path], None]) -> None:
    assert await fetch(tier, chunk_of(1), chunk_of(2)) == [MISSING, OK]
    assert tier.counters()["not_regular"] == 1
    assert tier.usage()["chunks_nbytes"] == CHARGE
    if plant is not directory:  # what it holds is not ours: it stays, and is in the way
        await store(tier, chunk_of(1))
        assert await fetch(tier, chunk_of(1)) == [OK]


@only_files
async def test_planted_unfinished_names_do_not_lead_writes_astray(root: Path, tmp_path: Path) -> None:
    """A link at the name that a write starts with is replaced, not written through."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    async with opened(root, n_read_threads=1, n_write_threads=1) as tier:
        await store(tier, chunk_of(1))
        path = path_of(root, key_of(1), tier)
        for plant in (lambda p: p.symlink_to(victim), lambda p: p.symlink_to(tmp_path / "new"), os.mkfifo):
            for worker in range(2):
                part = path.with_name(f"{path.name}.part{worker}")
                part.unlink(missing_ok=True)
                plant(part)
            await store(tier, chunk_of(1))
            assert await fetch(tier, chunk_of(1)) == [OK]
    assert victim.read_bytes() == b"precious" and not (tmp_path / "new").exists()


@only_files
async def test_a_linked_directory_is_not_followed(root: Path, tmp_path: Path) -> None:
    """A leaf or namespace that is a link elsewhere: misses and failed writes, and nothing changes over there."""
    elsewhere = tmp_path / "elsewhere"
    async with opened(root) as tier:
        await store(tier, chunk_of(1))
        leaf = path_of(root, key_of(1), tier).parent
        shutil.move(leaf, elsewhere)
        before = [(p, p.read_bytes()) for p in files_under(elsewhere)]
        leaf.symlink_to(elsewhere)
        statuses, _ = await read(tier, key_of(1))
        assert statuses == [MISSING]
        (outcome,) = await tier.write([(chunk_of(1), slots(1)[0])])
        assert outcome.status is Status.FAILED
        await tier.delete([key_of(1)])
    async with opened(root) as tier:
        assert await first_batches(tier) == []
    assert [(p, p.read_bytes()) for p in files_under(elsewhere)] == before
    namespace = root / namespace_digest(NAMESPACE).hex()
    shutil.rmtree(namespace)
    namespace.symlink_to(elsewhere)
    with pytest.raises(TierError, match="namespace"):
        await FSTier(root, capacity="1MiB").open(context())
    assert [(p, p.read_bytes()) for p in files_under(elsewhere)] == before


async def test_the_root_may_be_a_link(root: Path, tmp_path: Path) -> None:
    """Resolved once, at open: where an operator mounts the disk is his business."""
    (tmp_path / "disk").mkdir()
    root.symlink_to(tmp_path / "disk")
    async with opened(root) as tier:
        await store(tier, chunk_of(1))
        assert await fetch(tier, chunk_of(1)) == [OK]
    assert files_under(tmp_path / "disk")


async def test_foreign_files_are_neither_counted_nor_touched(root: Path) -> None:
    """Files, directories and links that we did not name survive everything, a trim to the minimum included."""
    async with opened(root) as tier:
        await store(tier, *(chunk_of(i) for i in range(10)))
    leaf = root / namespace_digest(NAMESPACE).hex() / leaf_of(key_of(1))
    leaf.mkdir(exist_ok=True)
    foreign = [
        root / "notes.txt",
        root / "owner-zz.lock",
        leaf / "notes.txt",
        leaf / "00.tmp",
        leaf.parent / "x",
        root / "d" / "f",
    ]
    foreign[-1].parent.mkdir()
    for path in foreign:
        path.write_bytes(b"x" * 100_000)
    (root / "link").symlink_to(root / "notes.txt")
    async with opened(root, n_chunks=1) as tier:
        (found,) = await first_batches(tier)
        assert tier.usage()["chunks_nbytes"] == CHARGE
        await tier.delete([found.key])
        await store(tier, chunk_of(11))
    assert all(path.read_bytes() == b"x" * 100_000 for path in foreign) and (root / "link").is_symlink()


async def test_files_that_vanish_are_counted_and_their_bytes_come_back(root: Path) -> None:
    """Somebody removes half of the files: reads miss, deletes succeed, storing goes on up to the capacity.

    https://github.com/LMCache/LMCache/issues/1981
    """
    async with opened(root, n_chunks=8) as tier:
        await store(tier, *(chunk_of(i) for i in range(8)))
        for i in range(4):
            path_of(root, key_of(i), tier).unlink()
        assert await fetch(tier, chunk_of(0), chunk_of(1)) == [MISSING] * 2
        await tier.delete([key_of(2)])
        assert (await tier.probe([key_of(3)]))[0] is None
        assert tier.counters()["vanished"] == 4
        await store(tier, *(chunk_of(i) for i in range(8, 12)))
        assert recount(root) <= tier.usage()["used_nbytes"] <= tier.usage()["capacity_nbytes"]


async def test_the_whole_root_vanishes(root: Path) -> None:
    """An operator removes everything under a running tier: misses and failures, no exception, and close works."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1))
        shutil.rmtree(root)
        if is_slab():  # which is open: its owner finds out as it looks around
            assert await fetch(tier, chunk_of(1)) == [OK]
            with contextlib.suppress(OSError):
                await asyncio.to_thread(_mount(tier).beat)
        assert await fetch(tier, chunk_of(1)) == [MISSING]
        (outcome,) = await tier.write([(chunk_of(2), slots(1)[0])])
        assert outcome.status is Status.FAILED
        await tier.delete([key_of(1)])


@only_files
async def test_a_chunk_moved_to_another_leaf_is_put_away_by_the_scan(root: Path) -> None:
    """No lookup would ever find it, and its bytes would count for ever."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1))
        path = path_of(root, key_of(1), tier)
    other = path.parent.with_name("00" if leaf_of(key_of(1)) != "00" else "01")
    other.mkdir(exist_ok=True)
    moved = other / path.name
    path.rename(moved)
    async with opened(root) as tier:
        assert await first_batches(tier) == []
        assert tier.counters()["corrupt"] == 1
    assert not moved.exists()
