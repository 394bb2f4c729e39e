"""Real disks in real trouble: full, turned read-only by the kernel, not ours to write. Most of it needs root."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.faults import need
from tests.patience import PATIENCE_S

NOBODY: Final = 65534
_A_MIB: Final = 1 << 20


class SmallDisk:
    """A file system of its own, small enough to fill."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "somebody's"

    def fill(self, leave_nbytes: int = 0) -> None:
        """Somebody else takes all that is free, but for so many bytes."""
        with self._filler.open("ab") as file:
            free_nbytes = self.free_nbytes
            with contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), file.tell(), max(1, free_nbytes - leave_nbytes))
        if not leave_nbytes:
            self._to_the_brim()

    def _to_the_brim(self) -> None:
        with self._filler.open("ab", buffering=0) as file:
            while self.free_nbytes > 0:
                try:
                    file.write(bytes(4096))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    return

    def empty(self) -> None:
        """Whoever filled it tidies up."""
        self._filler.unlink(missing_ok=True)

    @property
    def free_nbytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize


@contextlib.contextmanager
def small_disk(path: Path, nbytes: int = 16 * _A_MIB) -> Iterator[SmallDisk]:
    """A tmpfs of so many bytes at a path, until the context ends."""
    need(may_mount(), "root and the right to mount")
    path.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=755", "tierkv-test", str(path))
    try:
        yield SmallDisk(path)
    finally:
        _unmount(path)


class Ext4Disk(SmallDisk):
    """An ext4 that can be broken as a bad sector breaks one: the kernel turns it read-only under open files."""

    def __init__(self, path: Path, device: str) -> None:
        super().__init__(path)
        self._device = device

    def turn_read_only(self) -> None:
        name = Path(self._device).name
        Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("a test's\n")
        deadline = time.monotonic() + PATIENCE_S
        while self._is_writable():  # what the mount's flags say differs from kernel to kernel
            assert time.monotonic() < deadline, "the kernel did not turn it read-only"
            time.sleep(0.01)

    def _is_writable(self) -> bool:
        try:
            self._filler.touch()
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            return False
        return True

    def repair(self) -> None:
        """An operator mounts it anew, which takes that nobody has a file open there."""
        _run("umount", str(self.path))
        _run("mount", "-o", "errors=remount-ro", self._device, str(self.path))


@contextlib.contextmanager
def ext4_disk(path: Path, nbytes: int = 16 * _A_MIB, *, extents: bool = True) -> Iterator[Ext4Disk]:
    """An ext4 on a loop device at a path, until the context ends. Without extents, as ext3 was: no ``fallocate``."""
    need(may_mount() and _has_ext4(), "root, loop devices and mkfs.ext4")
    image = path.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(nbytes)
    features = "^has_journal" if extents else "^has_journal,^extent,^64bit"
    _run("mkfs.ext4", "-q", "-F", "-O", features, str(image))
    path.mkdir(parents=True, exist_ok=True)
    device = _run("losetup", "--find", "--show", str(image)).strip()
    try:
        _run("mount", "-o", "errors=remount-ro", device, str(path))
        try:
            yield Ext4Disk(path, device)
        finally:
            _unmount(path)
    finally:
        _run("losetup", "--detach", device)
        image.unlink()


@contextlib.contextmanager
def unprivileged(*paths: Path) -> Iterator[None]:
    """This process is nobody for a while, all of its threads; ``paths`` are given to nobody before, as they are."""
    need(os.geteuid() == 0, "root")
    for path in paths:
        os.chown(path, NOBODY, NOBODY)
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def may_mount() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0


def _has_ext4() -> bool:
    return bool(shutil.which("mkfs.ext4") and Path("/dev/loop-control").exists() and Path("/sys/fs/ext4").exists())


def _unmount(path: Path) -> None:
    if subprocess.run(["umount", str(path)], check=False, capture_output=True).returncode:
        _run("umount", "--lazy", str(path))


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
