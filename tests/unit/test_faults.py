"""The faults are real: what a process with the shim sees, and what the disks that tests make really do."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import leaks
from tests.faults import Faults, in_child
from tests.faults.disks import ext4_disk, small_disk, unprivileged
from tierkv.tiers._fs import holes


def _read_elsewhere(file: str) -> None:
    """By another process that has the same rules."""
    read = "import os, sys; os.pread(os.open(sys.argv[1], os.O_RDONLY), 8, 0)"
    subprocess.run([sys.executable, "-c", read, file], check=True)


async def _every_fault(faults: Faults, folder: str) -> None:
    file = os.path.join(folder, "file")
    fd = os.open(file, os.O_RDWR | os.O_CREAT)
    os.pwritev(fd, [b"abcd", b"efgh"], 0)

    rule = faults.add("read", path="/file", error=errno.EIO, first=2, count=1)
    assert os.pread(fd, 8, 0) == b"abcdefgh"
    with pytest.raises(OSError, match="Input/output error"):
        os.preadv(fd, [bytearray(8)], 0)
    assert os.pread(fd, 8, 0) == b"abcdefgh"
    assert (rule.n_seen, rule.n_struck) == (3, 1)
    rule.remove()

    cut = faults.add("read", "write", path="/file", at_most=5)
    parts = [bytearray(4), bytearray(4)]
    assert os.preadv(fd, parts, 0) == 5
    assert parts == [b"abcd", b"e\0\0\0"]
    assert os.pwritev(fd, [b"ABCDEFGH"], 0) == 5
    cut.remove()
    assert os.pread(fd, 8, 0) == b"ABCDEfgh"

    flip = faults.add("read", path="/file", flip=True)
    assert os.pread(fd, 8, 0) == b"ABCDEfgi"
    flip.remove()

    part = faults.add("read", path="/file", flip=True, within=(2, 4))
    assert os.pread(fd, 8, 0) == b"ABCEEfgh"
    assert os.pread(fd, 4, 4) == b"Efgh" and os.pread(fd, 2, 0) == b"AB"
    assert part.n_seen == 1
    part.remove()

    ours = faults.add("read", path="/file", claimed=True)
    os.pread(fd, 8, 0)
    assert ours.n_seen == 0, "nobody's yet"
    ours.only_here()
    os.pread(fd, 8, 0)
    _read_elsewhere(file)
    assert ours.n_seen == 1, "not another process's"
    ours.remove()

    full = faults.add("size", path="/file", error=errno.ENOSPC)
    for allocate in (holes.allocate, os.posix_fallocate):
        with pytest.raises(OSError, match="No space left on device"):
            allocate(fd, 0, 4096)
    full.remove()

    late = faults.add("rename", path="/there", error=errno.EIO, after=True)
    with pytest.raises(OSError, match="Input/output error"):
        os.rename(file, file.replace("file", "there"))
    assert os.listdir(folder) == ["there"]
    late.remove()

    stale = faults.add("open", "stat", "list", error=errno.ESTALE, path=folder)
    for call in (os.stat, os.listdir, lambda path: os.open(path, os.O_RDONLY)):
        with pytest.raises(OSError, match="Stale file handle"):
            call(folder)
    stale.remove()

    hang = faults.add("sync", path="/there", hang=True)
    sync = asyncio.create_task(asyncio.to_thread(os.fsync, fd))
    await hang.met(waiting=True)
    assert not sync.done()
    hang.let_go()
    await sync

    now, monotonic = time.time(), time.monotonic()
    faults.shift_clock(-86400)
    assert time.time() < now - 86300 and time.monotonic() - monotonic < 3600
    faults.shift_clock(0)

    closing = faults.add("close", path="/there", error=errno.ENOSPC)
    with pytest.raises(OSError, match="No space"):
        os.close(fd)
    closing.remove()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_every_fault_that_a_rule_can_plant(tmp_path: Path) -> None:
    """Each is what the process's own calls meet, counted, and over when its rule is."""
    (tmp_path / "folder").mkdir()
    in_child(_every_fault, tmp_path / "folder", folder=tmp_path)


async def _fails(_: Faults) -> None:
    raise AssertionError("as it should")


async def _leaks(_: Faults) -> None:
    leaks.GRACE_S = 0.0
    os.open("/", os.O_RDONLY)


@pytest.mark.parametrize(("function", "told"), [(_fails, "as it should"), (_leaks, "left behind: descriptor")])
def test_a_child_that_fails_or_leaks_fails_its_test(tmp_path: Path, function: object, told: str) -> None:
    """With what it said."""
    with pytest.raises(AssertionError, match=told):
        in_child(function, folder=tmp_path)


def test_a_small_disk_is_full_and_empty_again(tmp_path: Path) -> None:
    """Real ENOSPC, to the last page."""
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            (disk.path / "file").write_bytes(bytes(4096))
        disk.empty()
        assert disk.free_nbytes >= 1 << 19
        disk.fill(leave_nbytes=64 << 10)
        assert 32 << 10 <= disk.free_nbytes <= 96 << 10


def test_an_ext4_that_the_kernel_turns_read_only(tmp_path: Path) -> None:
    """Under a file that is open for writing, which no remount could do."""
    with ext4_disk(tmp_path / "disk") as disk:
        with (disk.path / "file").open("wb", buffering=0) as file:
            file.write(b"x")
            os.fsync(file.fileno())
            disk.turn_read_only()
            with pytest.raises(OSError, match="Read-only file system"):
                (disk.path / "other").touch()
        disk.repair()
        (disk.path / "other").touch()
        assert (disk.path / "file").read_bytes() == b"x"


def test_nobody_may_not_write_what_is_roots(tmp_path: Path) -> None:
    """And is root again afterwards."""
    (tmp_path / "roots").mkdir(mode=0o700)
    with unprivileged(), pytest.raises(PermissionError):
        (tmp_path / "roots" / "file").touch()
    (tmp_path / "roots" / "file").touch()
