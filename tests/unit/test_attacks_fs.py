"""What an attack on the fs tier has broken once: full disks, tidy operators, hostile files, no descriptors left."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.fs_kit import (
    CHARGE,
    PAGE,
    _mount,
    capacity_for,
    chunk_of,
    context,
    fetch,
    files_under,
    key_of,
    opened,
    path_of,
    read,
    recount,
    set_time,
    store,
    using,
    write,
)
from tests.patience import PATIENCE_S
from tierkv import ConfigError
from tierkv.tiers._fs import format as _fs_format
from tierkv.tiers._fs.locks import LockFiles
from tierkv.tiers._fs.page import OwnerPage
from tierkv.tiers.fs import FSTier
from tierkv.types import Reason, Status

OK, REFUSED, CORRUPT = Status.OK, Status.REFUSED, Status.CORRUPT


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "parent" / "root"


def no_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write that would make a file longer fails, as on a full disk."""
    real, real_v = os.pwrite, os.pwritev

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if offset + len(data) > os.fstat(fd).st_size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    def pwritev(fd: int, parts: list[memoryview], offset: int) -> int:
        if offset + sum(map(len, parts)) > os.fstat(fd).st_size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_v(fd, parts, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "pwritev", pwritev)


async def test_a_full_disk_at_start_is_no_obstacle(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier opens, holds nothing while the disk is full, and begins by itself once there is space.

    https://github.com/vllm-project/vllm/issues/54779
    """
    no_space(monkeypatch)
    async with opened(root) as tier:
        assert [outcome.status for outcome in await write(tier, chunk_of(1))] == [REFUSED]
        assert recount(root) == 0
        monkeypatch.undo()
        _mount(tier).beat()
        await store(tier, chunk_of(1))
        assert await fetch(tier, chunk_of(1)) == [OK]


@pytest.mark.parametrize("fails", ["pwrite", "statvfs"])
async def test_an_open_that_fails_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """Not the root, not its lock, not a parent that was missing; and the error says which root."""
    if fails == "pwrite":

        def broken(*_: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "pwrite", broken)
    else:
        tiny = os.statvfs_result((4096, 4096, 4, 4, 4, 99, 99, 99, 0, 255))
        monkeypatch.setattr(os, "fstatvfs", lambda _: tiny)
    tier = FSTier(root, min_free=0)
    with pytest.raises(OSError if fails == "pwrite" else ConfigError, match=str(root)):
        await tier.open(context())
    assert list(root.parent.parent.iterdir()) == []


@pytest.mark.parametrize(
    "path",
    [lambda root: root / ("n" * 300), lambda _: Path("/proc/no/such"), lambda _: Path("/proc/self/stat/below")],
    ids=["long", "proc", "below a file"],
)
async def test_a_root_that_cannot_be_is_a_wrong_setting(root: Path, path: Callable[[Path], Path]) -> None:
    """One sentence that names the option, and nothing was made."""
    tier = FSTier(path(root), capacity="1MiB")
    with pytest.raises(ConfigError, match=r"fs\.root is .*, but must be"):
        await tier.open(context())
    assert not root.exists()


@pytest.mark.parametrize("settings", [{"name": ""}, {"name": 5}, {"clock": 5}, {"root": "/tmp/\ud800"}], ids=repr)
def test_wrong_settings_are_told_at_once(settings: dict[str, Any]) -> None:
    """Before anything is opened."""
    with pytest.raises(ConfigError, match="but must be"):
        FSTier(**({"root": "/tmp/x"} | settings))


async def test_a_large_capacity_on_a_small_disk_stores_chunks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for an index is no larger than for the chunks that the disk can hold, whatever the capacity says."""
    small = os.statvfs_result((4096, 4096, 100, 100, 100, 99, 99, 99, 0, 255))
    monkeypatch.setattr(os, "fstatvfs", lambda _: small)
    async with opened(root, capacity="1GiB") as tier:
        assert tier.share_nbytes() > 10 * CHARGE
        await store(tier, chunk_of(1))


async def test_lock_files_that_somebody_removed_are_made_anew(root: Path) -> None:
    """The capacity holds, nobody takes the files of a living owner for nobody's, and a newcomer waits for that.

    https://github.com/vllm-project/vllm/issues/54779
    """
    async with opened(root, 20) as first:
        await store(first, *(chunk_of(i) for i in range(16)))
        for path in root.glob("*.lock"):
            path.unlink()
        async with opened(root, 20) as second:
            _mount(first).beat()
            _mount(second).beat()
            for i in range(100, 120):
                await write(second, chunk_of(i))
                assert recount(root) <= capacity_for(20)
            assert (first.usage()["n_owners"], second.usage()["n_owners"]) == (2, 2)
            assert second.counters()["orphans"] == 0
        assert await fetch(first, *(chunk_of(i) for i in range(16))) == [OK] * 16


async def test_an_owner_that_cannot_be_seen_counts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of descriptors: the other owner's lock file cannot be opened, and its bytes are not given away."""
    async with opened(root, 20) as first, opened(root, 20) as second:
        _mount(first).beat()
        _mount(second).beat()
        limit_nbytes, foreign = _mount(second).books.limit_nbytes, _mount(second)._ownership.foreign_ids
        assert foreign
        real = os.open

        def scarce(path: str, *args: Any, **kwargs: Any) -> int:
            if path.startswith("owner-"):
                raise OSError(errno.EMFILE, "Too many open files")
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", scarce)
        with pytest.raises(OSError, match="Too many open files"):
            _mount(second)._ownership.refresh()
        monkeypatch.undo()
        assert (_mount(second).books.limit_nbytes, _mount(second)._ownership.foreign_ids) == (limit_nbytes, foreign)


async def test_a_hostile_header_is_one_corrupt_chunk(root: Path) -> None:
    """Sound checksum, tenant that is no text: its neighbours in the batch are served.

    https://github.com/vllm-project/vllm/pull/50321
    """
    async with opened(root) as tier:
        await store(tier, chunk_of(1, tenant="abcd"), chunk_of(2))
        path = path_of(root, key_of(1), tier)
        raw = bytearray(path.read_bytes())
        at = raw.index(b"abcd")
        raw[at : at + 4] = b"\xff\xfe\xff\xfe"
        raw[_fs_format._SUM_AT : PAGE] = xxhash.xxh3_128_digest(bytes(raw[: _fs_format._SUM_AT]))
        path.write_bytes(raw)
        assert await fetch(tier, chunk_of(1), chunk_of(2)) == [CORRUPT, OK]
        assert not path.exists()


@pytest.mark.parametrize("alive", [True, False])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reserved_nbytes", "x"),
        ("reserved_nbytes", -(10**15)),
        ("reserved_nbytes", 10**30),
        ("capacity_nbytes", None),
        ("capacity_nbytes", 1.5),
        ("capacity_nbytes", True),
        ("holder", 5),
        ("namespace", ["a"]),
        ("used_nbytes", "x"),
        ("pid", "x"),
    ],
)
async def test_an_owner_page_that_makes_no_sense_is_none(root: Path, field: str, value: Any, alive: bool) -> None:
    """A sound checksum over nonsense counts as a torn page."""
    root.mkdir(parents=True)
    owner = "ab" * 8
    fields = OwnerPage(owner, owner, "00" * 16, 10**9, PAGE, PAGE, 1.0, 1, "b").__dict__ | {field: value}
    body = json.dumps(fields).encode()
    lock = os.open(root / f"owner-{owner}.lock", os.O_RDWR | os.O_CREAT)
    os.pwrite(lock, (body + b"\n" + xxhash.xxh3_64_hexdigest(body).encode() + b"\n").ljust(PAGE), 0)
    if alive:
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        async with opened(root) as tier:
            _mount(tier).beat()
            await store(tier, chunk_of(1))
    finally:
        os.close(lock)


@pytest.mark.parametrize("fields", [{"end_token": 1 << 63}, {"group": 1 << 32}, {"group": -1}], ids=repr)
async def test_numbers_that_no_header_holds_are_refused(root: Path, fields: dict[str, int]) -> None:
    """Nothing is raised, nothing stays charged."""
    async with opened(root) as tier:
        (outcome,) = await write(tier, chunk_of(1, **fields))
        assert (outcome.status, outcome.reason) == (REFUSED, Reason.TOO_LARGE)
        _mount(tier).books.check()
        assert _mount(tier).books._writing_nbytes == 0


async def test_a_write_that_raises_is_not_charged(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it was: bytes that no file has must not stay in the books."""
    async with opened(root) as tier:

        def bug(*_: object) -> bytes:
            raise RuntimeError("a bug")

        monkeypatch.setattr(_fs_format.Sums, "of", bug)
        with pytest.raises(RuntimeError):
            await write(tier, chunk_of(1))
        assert _mount(tier).books._writing_nbytes == 0
        monkeypatch.undo()
        await store(tier, chunk_of(1))
        assert [path.name for path in files_under(root) if ".part" in path.name] == []


async def test_a_read_only_file_system_still_serves(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old chunk's time cannot be renewed, of its file or in its row: that is no reason not to read it."""
    for layout in ("files", "slab"):
        with using(layout), monkeypatch.context() as patched:
            async with opened(root / layout) as tier:
                await store(tier, chunk_of(1), chunk_of(2))
                for i in (1, 2):
                    set_time(root / layout, key_of(i), tier, 1.0)

                def read_only(*_: object) -> int:
                    raise OSError(errno.EROFS, "Read-only file system")

                patched.setattr(os, "utime" if layout == "files" else "pwrite", read_only)
                assert (await read(tier, key_of(1)))[0] == [OK]
                assert (await read(tier, key_of(1), key_of(2)))[0] == [OK, OK]
                patched.undo()


def test_a_root_lock_without_a_name_excludes_nobody(root: Path) -> None:
    """Somebody removes the lock file while another waits for it: that one takes the new file, not the nameless one."""
    root.mkdir(parents=True)
    root_fd = os.open(root, os.O_RDONLY)
    holder, waiter = LockFiles("holder", root_fd), LockFiles("waiter", root_fd)
    at_the_door, inside = threading.Event(), threading.Event()

    def wait() -> None:
        real = waiter._flock

        def flock(fd: int) -> bool:
            at_the_door.set()
            return real(fd)

        waiter._flock = flock  # type: ignore[method-assign]
        with waiter.root_locked(), open(root / "tierkv.lock") as file:
            with pytest.raises(BlockingIOError):  # what has the name is what it holds
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            inside.set()

    thread = threading.Thread(target=wait)
    try:
        with holder.root_locked():
            thread.start()
            assert at_the_door.wait(PATIENCE_S)
            (root / "tierkv.lock").unlink()
        thread.join(PATIENCE_S)
        assert inside.is_set()
    finally:
        os.close(root_fd)
