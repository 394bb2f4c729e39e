"""Wrong settings end in one sentence before anything is created."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests.faults.disks import ext4_disk
from tests.fs_kit import LONGEST, STRIDE, chunk_of, context, opened, store
from tierkv.errors import ConfigError
from tierkv.tiers._fs.wishes import least_capacity_nbytes
from tierkv.tiers.fs import FSTier


@pytest.mark.parametrize("option", ["n_read_threads", "n_write_threads"])
@pytest.mark.parametrize("value", [0, -1, 257, 10_000, 1_000_000, "8", 2.5, 8.0, math.nan, True, None, [4]])
def test_thread_counts(tmp_path: Path, option: str, value: object) -> None:
    """A plain whole number from 1 to 256; everything else is refused, with the nearest if it is some number."""
    settings: dict[str, Any] = {option: value}
    nearest = "" if str(value) in {"None", "nan", "[4]"} else r"; nearest valid value: \d+"
    with pytest.raises(ConfigError, match=rf"fs\.{option} is .* from 1 to 256{nearest}$"):
        FSTier(tmp_path / "root", **settings)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("value", [0, -1, "0", "-1GiB", "8 GiBB", "lots", 1.5, True, math.inf, []])
@pytest.mark.parametrize("option", ["capacity", "min_free"])
def test_sizes(tmp_path: Path, option: str, value: object) -> None:
    """Positive bytes as integer or text; 0 is a meaningful min_free only."""
    settings: dict[str, Any] = {option: value}
    if option == "min_free" and value in (0, "0") and value is not True:
        FSTier(tmp_path / "root", **settings)
        return
    with pytest.raises(ConfigError, match=rf"fs\.{option} is "):
        FSTier(tmp_path / "root", **settings)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("value", ["", "  ", "\t", None, b"/x", 5, "a\0b", True])
def test_root(value: Any) -> None:
    """It must be a path, and not a blank one."""
    with pytest.raises(ConfigError, match=r"fs\.root is .*, but must be the path of a directory; for example: /var"):
        FSTier(value)


def test_an_empty_path_is_not_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``Path("")`` is ``Path(".")``: a variable that nobody has set would fill the directory one happens to be in."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"^fs\.root is PosixPath\('\.'\), .*; nearest valid value: {tmp_path}$"):
        FSTier(Path(""))
    for named in (tmp_path, ".", Path("kv")):
        assert str(tmp_path) in repr(FSTier(named))


def test_durability(tmp_path: Path) -> None:
    """Two values."""
    with pytest.raises(ConfigError, match=r'durability is .* "process" or "power"'):
        FSTier(tmp_path, durability="fsync")  # type: ignore[arg-type]


async def test_constructors_do_no_io(tmp_path: Path) -> None:
    """Nothing exists before open."""
    FSTier(tmp_path / "root", capacity="1GiB", n_read_threads=256, name="disk")
    assert list(tmp_path.iterdir()) == []


async def test_a_root_that_is_no_directory(tmp_path: Path) -> None:
    """A file, or a link to one."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("file", "link"):
        with pytest.raises(ConfigError, match=r"fs\.root is .*must be a directory"):
            await FSTier(tmp_path / name, capacity="1MiB").open(context())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]


@pytest.mark.parametrize("of_the_level", [False, True])
async def test_capacity_under_one_chunk(tmp_path: Path, of_the_level: bool) -> None:
    """One byte less than a chunk needs is refused with the numbers; exactly one chunk works.

    What a chunk needs is its file, our lock file and the room for an index.
    """
    least = least_capacity_nbytes(LONGEST)
    for nbytes in (least - 1, STRIDE, 1):
        settings = {} if of_the_level else {"capacity": nbytes}
        tier = FSTier(tmp_path / "root", **settings)  # type: ignore[arg-type]
        with pytest.raises(
            ConfigError, match=f"capacity is {nbytes}, .*at least {least} .*nearest valid value: {least}"
        ):
            await tier.open(context(nbytes if of_the_level else 0))
        assert not (tmp_path / "root").exists()
        await tier.aclose()
    async with opened(tmp_path / "root", capacity=least) as tier:
        assert tier.share_nbytes() == tier.charge_nbytes(LONGEST)


async def test_more_free_than_the_disk_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With it nothing could ever be stored, in silence; what the disk has but for one chunk is taken, with a word."""
    found = os.statvfs(tmp_path)
    most = (found.f_blocks - found.f_bfree + found.f_bavail) * found.f_frsize - least_capacity_nbytes(LONGEST)
    for nbytes in (most + 1, found.f_blocks * found.f_frsize, 500 << 40):
        tier = FSTier(tmp_path / "root", capacity="1MiB", min_free=nbytes)
        with pytest.raises(
            ConfigError, match=rf"^fs\.min_free is {nbytes}, but must be less than .* nearest valid value: {most}$"
        ):
            await tier.open(context())
        await tier.aclose()
        assert not (tmp_path / "root").exists()
    async with opened(tmp_path / "root", capacity="1MiB", min_free=most):
        pass  # the disk may be full for now: that is no mistake
    said = [record.getMessage() for record in caplog.records if "no room for a chunk" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith("fs: ") and "min_free leaves" in said[0]
    caplog.clear()
    async with opened(tmp_path / "root", capacity="1MiB", min_free=0):
        assert "no room" not in caplog.text


@pytest.mark.parametrize("layout", ["files", "slab"])
async def test_what_is_set_aside_for_root_is_not_free_for_us(tmp_path: Path, layout: str) -> None:
    """An ext4 keeps a twentieth back: a little below its whole size was taken, and no chunk ever stored."""
    with ext4_disk(tmp_path / "disk") as disk:
        found = os.statvfs(disk.path)
        assert found.f_bavail < found.f_bfree
        least = least_capacity_nbytes(LONGEST, in_slab=layout == "slab")
        most = (found.f_blocks - found.f_bfree + found.f_bavail) * found.f_frsize - least
        tier = FSTier(disk.path / "root", capacity="1MiB", min_free=most + 1, layout=layout)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=rf"^fs\.min_free is {most + 1}, .*; nearest valid value: {most}$"):
            await tier.open(context())
        await tier.aclose()
        directories_nbytes = 64 << 10
        settings: dict[str, Any] = {"min_free": most - directories_nbytes, "layout": layout}
        async with opened(disk.path / "root", capacity="1MiB", **settings) as tier:
            await store(tier, chunk_of(1))


async def test_a_root_on_a_read_only_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there, and nothing can be made in it."""
    real = os.open

    def read_only(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(30, "Read-only file system", str(path))
        return real(path, flags, *more, **options)

    (tmp_path / "root").mkdir()
    monkeypatch.setattr(os, "open", read_only)
    tier = FSTier(tmp_path / "root", capacity="1MiB")
    with pytest.raises(ConfigError, match=r"fs\.root is '.*/root', but .*\(Read-only file system\)"):
        await tier.open(context())
    monkeypatch.undo()
    await tier.aclose()
    assert not list((tmp_path / "root").iterdir())


async def test_a_root_without_permission_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option, its value, and the file system's own words; nothing is left open (the fixture looks)."""

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "root"))

    monkeypatch.setattr(os, "mkdir", denied)
    tier = FSTier(tmp_path / "root", capacity="1MiB")
    with pytest.raises(ConfigError, match=r"fs\.root is '.*/root', but must be a directory to write in.*denied"):
        await tier.open(context())
    monkeypatch.undo()
    await tier.aclose()
    assert not (tmp_path / "root").exists()


async def test_parents_of_the_root_are_made(tmp_path: Path) -> None:
    """As an operator expects of a path in a configuration."""
    async with opened(tmp_path / "a" / "b" / "root"):
        assert (tmp_path / "a" / "b" / "root").stat().st_mode & 0o777 == 0o700


async def test_a_relative_root_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below where the tier was made, however the process moves on before it opens; its repr shows the whole path."""
    monkeypatch.chdir(tmp_path)
    tier = FSTier("cache/kv", capacity="1MiB", min_free=0)
    assert str(tmp_path / "cache" / "kv") in repr(tier)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    await tier.open(context())
    await tier.aclose()
    assert (tmp_path / "cache" / "kv").is_dir()
    assert not list((tmp_path / "elsewhere").iterdir())
