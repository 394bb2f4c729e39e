"""``tierkv doctor`` finds each reason that is planted, and says nothing is wrong with a root that works."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults.disks import ext4_disk, small_disk, unprivileged
from tests.fs_kit import chunk_of, context, files_under, opened, store
from tierkv.cli._main import main
from tierkv.tiers._fs.page import OwnerPage

Capture = pytest.CaptureFixture[str]


def doctor(root: Path, capsys: Capture) -> tuple[int, list[str], list[str]]:
    """(exit code, what is wrong, notes)."""
    code = main(["doctor", str(root), "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return code, [row["text"] for row in rows if row["wrong"]], [row["text"] for row in rows if not row["wrong"]]


async def test_a_root_that_works_has_nothing_wrong(root: Path, capsys: Capture) -> None:
    """With a living owner and after it, exit code 0; nothing in the root has changed."""
    async with opened(root) as tier:
        await store(tier, *map(chunk_of, range(3)))
        before = files_under(root)
        code, wrong, notes = doctor(root, capsys)
        assert (code, wrong) == (0, [])
        said = [note for note in notes if "of memory are available" not in note]
        assert said == ['layout "auto" takes a slab here: new chunks go into one file an engine']
        assert files_under(root) == before
    code, wrong, notes = doctor(root, capsys)
    assert (code, wrong) == (0, [])
    assert any(note.startswith("1 dead owner: ") for note in notes)
    assert main(["doctor", str(root)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 wrong, ")


def test_a_root_that_is_not_there(tmp_path: Path, capsys: Capture) -> None:
    """It would be made where that is possible; below a file it cannot be, in one sentence."""
    code, wrong, notes = doctor(tmp_path / "a" / "b", capsys)
    assert (code, wrong) == (0, [])
    assert notes[0].endswith(f"an engine would make it in {tmp_path}")
    (tmp_path / "file").touch()
    assert main(["doctor", str(tmp_path / "file" / "x")]) == 2
    assert "but must be a directory that can be read (Not a directory)" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


async def test_a_namespace_that_matches_nothing(root: Path, capsys: Capture) -> None:
    """After a change of model the new engine's namespace is empty beside the old one's, which leaves first."""
    async with opened(root) as tier:
        await store(tier, *map(chunk_of, range(3)))
    async with opened(root, ctx=context(namespace=b"another model")):
        code, wrong, notes = doctor(root, capsys)
    assert (code, wrong) == (0, [])
    assert any("is empty, unlike 1 other:" in note for note in notes)
    assert any(re.fullmatch("first to leave: .* in 1 namespace that nobody alive reads", note) for note in notes)


@pytest.mark.parametrize("why", ["sticky", "others' things", "ours alone"])
async def test_a_directory_that_is_shared_is_not_to_be_closed(root: Path, capsys: Capture, why: str) -> None:
    """It said chmod 700 of /tmp: the advice is a directory of the tier's own, unless this one is."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1))
    root.chmod(0o1777 if why == "sticky" else 0o777)
    if why == "others' things":
        (root / "somebody's").mkdir()
    code, wrong, notes = doctor(root, capsys)
    assert (code, wrong) == (0, [])
    (note,) = [note for note in notes if "others can see or change" in note]
    assert note.endswith("; chmod 700") if why == "ours alone" else note.endswith(f"its own, such as {root}/tierkv")


@pytest.mark.parametrize("path", ["", "  "])
def test_an_empty_path(path: str, capsys: Capture) -> None:
    """A variable that nobody has set: it said that an engine would make it in the current directory."""
    assert main(["doctor", path]) == 2
    captured = capsys.readouterr()
    said = "but must be the path of a directory; for example: /var/cache/tierkv"
    assert (captured.out, captured.err) == ("", f"tierkv doctor: ROOT is {path!r}, {said}\n")


def edit_page(root: Path, **changes: Any) -> None:
    (lock,) = root.glob("owner-*.lock")
    page = OwnerPage.unpack(lock.read_bytes())
    assert page is not None
    lock.write_bytes(replace(page, **changes).pack())


@pytest.mark.parametrize(
    ("changes", "sentence", "is_wrong"),
    [
        (lambda: {"heartbeat_s": time.time() - 600}, "it hangs", True),
        (lambda: {"heartbeat_s": float("nan")}, "it hangs", True),
        (lambda: {"heartbeat_s": time.time() + 600}, "in the future: a clock is wrong", True),
        (lambda: {"reserved_nbytes": 0}, "lives and has no room yet", False),
        (lambda: {"capacity_nbytes": 1 << 60}, "it will not get there", False),
    ],
)
async def test_a_living_owner_in_trouble(  # noqa: PLR0917 - three fixtures and a table's row
    root: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    changes: Callable[[], dict[str, Any]],
    sentence: str,
    is_wrong: bool,
) -> None:
    """One that went silent, one from the future, one without room, one that the disk cannot hold."""
    monkeypatch.setattr("tierkv.tiers._fs.mount.HEARTBEAT_S", 3600.0)
    async with opened(root) as tier:
        await store(tier, chunk_of(1))
        edit_page(root, **changes())
        code, wrong, notes = doctor(root, capsys)
    assert any(sentence in text for text in (wrong if is_wrong else notes)), (wrong, notes)
    assert code == int(is_wrong)


async def test_what_else_lies_there(root: Path, capsys: Capture) -> None:
    """Damaged, planted and foreign things, files from the future and open permissions are notes."""
    async with opened(root, layout="files") as tier:
        await store(tier, *map(chunk_of, range(3)))
    one, two, three = (next(root.rglob(f"{chunk_of(i).key.hex()}.*")) for i in range(3))
    os.truncate(one, 1)
    two.unlink()
    two.symlink_to("/etc/passwd")
    os.utime(three, (2e9 + time.time(), 2e9 + time.time()))
    (root / "readme").touch()
    root.chmod(0o755)
    code, wrong, notes = doctor(root, capsys)
    assert (code, wrong) == (0, [])
    text = "\n".join(notes)
    for part in (
        "damaged: 1 file;",
        "not regular: 1 thing;",
        "foreign: 1 thing;",
        "after a kill: 1 file;",
        "has mode 755",
    ):
        assert part in text, text


def test_a_file_system_that_cannot(root: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where flock excludes nobody, two engines must not share: the probe finds out by two descriptors, not by faith."""
    root.mkdir(mode=0o700)
    monkeypatch.setattr("tierkv.tiers._fs.probe.fcntl.flock", lambda _fd, _how: None)
    _, wrong, _ = doctor(root, capsys)
    assert wrong == ["flock does not exclude anybody on this file system: two engines must not share this root"]
    assert list(root.iterdir()) == []


def test_a_file_system_that_gives_a_file_no_blocks(tmp_path: Path, capsys: Capture) -> None:
    """On a real one: it says which layout an engine takes there, and that is no fault."""
    with ext4_disk(tmp_path / "disk", extents=False) as disk:
        root = disk.path / "root"
        root.mkdir(mode=0o700)
        code, wrong, notes = doctor(root, capsys)
        assert (code, wrong) == (0, []) and list(root.iterdir()) == []
    assert any(note.startswith('layout "auto" takes files here') for note in notes), notes


def test_a_full_disk(tmp_path: Path, capsys: Capture) -> None:
    """On a real small file system: less left than is kept free; then not even a file can be made."""
    with small_disk(tmp_path / "disk") as disk:
        disk.fill(leave_nbytes=200 << 10)
        code, wrong, _ = doctor(disk.path, capsys)
        assert code == 1
        assert any("it shrinks instead of growing" in text for text in wrong), wrong
        disk.fill()
        code, wrong, _ = doctor(disk.path, capsys)
        assert code == 1
        assert any(text.startswith("no file can be made in") for text in wrong), wrong


def test_a_disk_that_has_turned_read_only(tmp_path: Path, capsys: Capture) -> None:
    """The kernel's own word is passed on."""
    with ext4_disk(tmp_path / "disk") as disk:
        disk.turn_read_only()
        code, wrong, _ = doctor(disk.path, capsys)
        assert code == 1
        assert any("Read-only file system" in text for text in wrong), wrong


def test_somebody_elses_root(capsys: Capture) -> None:
    """A root that this user may read and not write is wrong and says whose it is; one out of reach is refused."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        root = Path(folder, "root")
        root.mkdir(mode=0o755)
        with unprivileged():
            code, wrong, notes = doctor(root, capsys)
        assert code == 1
        assert any("is not readable and writable" in text for text in wrong), wrong
        assert any("belongs to uid 0" in text for text in notes), notes
        os.chmod(folder, 0o700)
        with unprivileged():
            assert main(["doctor", str(root)]) == 2
        assert "but must be a directory that can be read (Permission denied)" in capsys.readouterr().err
