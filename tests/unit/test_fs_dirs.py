"""Listings of a directory that is open once and read by several threads."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tierkv.tiers
from tierkv.tiers._fs.dirs import entries_in, names_in

N_FILES = 3_000
"""More than the kernel hands over in one call."""


@pytest.fixture
def dir_fd(tmp_path: Path) -> Iterator[int]:
    for i in range(N_FILES):
        (tmp_path / f"a name of some length {i}").touch()
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_two_listings_through_one_descriptor_both_see_all(dir_fd: int) -> None:
    """One half-way while the other runs: the place in a directory belongs to the open file, so each has its own.

    The scan of a root looked for the slabs of an owner that had just died while the heartbeat listed the same
    directory: it found none, gave the owner's id up and left its files there, counted by nobody.
    """
    with entries_in(dir_fd) as entries:
        seen = [next(entries).name]
        assert len(names_in(dir_fd)) == N_FILES
        seen += [entry.name for entry in entries]
    assert len(seen) == len(set(seen)) == N_FILES


def test_one_open_file_would_not_do(dir_fd: int) -> None:
    """The same with what the standard library does by itself: were it enough, the test above could not fail."""
    with os.scandir(dir_fd) as entries:
        next(entries)
        os.listdir(dir_fd)
        assert sum(1 for _ in entries) != N_FILES - 1  # a part of the rest, or all from the start


def test_nobody_lists_a_root_in_another_way() -> None:
    """In the tiers' files ``os.scandir`` stands here and where a leaf was opened to be listed; the others nowhere."""
    folder = Path(tierkv.tiers.__file__).parent
    pattern = re.compile(r"os\.(?:listdir|scandir|walk|fwalk)\(.*?\)")
    calls = {
        (path.relative_to(folder).as_posix(), call)
        for path in folder.rglob("*.py")
        for call in pattern.findall(path.read_text())
    }
    assert calls == {("_fs/dirs.py", "os.scandir(fd)"), ("_fs/listing.py", "os.scandir(leaf_fd)")}
