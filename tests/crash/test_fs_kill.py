"""SIGKILL in the middle of a write storm, and two live processes on one root, watched from outside."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fs_kit import (
    CHARGE,
    _mount,
    capacity_for,
    chunk_of,
    fetch,
    files_under,
    first_batches,
    key_of,
    opened,
    recount,
)
from tierkv.tiers._fs_format import parse_file_name, parse_owner_file
from tierkv.types import Status

pytestmark = pytest.mark.crash
REPOSITORY = Path(__file__).parents[2]


class Writer:
    """The child, and what it said."""

    def __init__(self, root: Path, n_chunks: int, first: int = 0, step: int = 1) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.fs_writer", str(root), str(n_chunks), str(first), str(step)],
            cwd=REPOSITORY, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.ready = threading.Event()
        self.acknowledged: dict[int, bool] = {}
        self.probes: list[str] = []
        self.n_stored = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, *rest = line.split() or [""]
            if word == "ready":
                self.ready.set()
            elif word == "probe":
                self.probes.append(rest[1])
            elif word in ("+", "-"):
                self.acknowledged[int(rest[0])] = word == "+"
                self.n_stored += word == "+"

    def kept(self) -> list[int]:
        """Chunks that were acknowledged and that nobody began to delete."""
        return [i for i, kept in self.acknowledged.items() if kept]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)
        self._reader.join(20)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def writers() -> Iterator[list[Writer]]:
    made: list[Writer] = []
    yield made
    for writer in made:
        if writer.process.poll() is None:
            writer.kill()


def kinds(root: Path) -> dict[str, int]:
    """How many files of each kind lie on the root; "?" for what should not be there."""
    counts = {"chunk": 0, "lock": 0, "index": 0, "?": 0}
    for path in files_under(root):
        parsed, owner = parse_file_name(path.name), parse_owner_file(path.name)
        if parsed is not None and not parsed.is_part and path.stat().st_size == CHARGE:
            counts["chunk"] += 1
        elif path.name == "tierkv.lock" or (owner is not None and owner[1] == "lock"):
            counts["lock"] += 1
        else:
            counts["index" if owner is not None and owner[1] == "index" else "?"] += 1
    return counts


async def test_twenty_kills_lose_and_leave_nothing(tmp_path: Path, writers: list[Writer]) -> None:
    """Each round: whatever instant the kill hit, a reopen serves what was acknowledged, whole, and sweeps the rest.

    Disk use does not grow over the rounds. https://github.com/llm-d/llm-d-kv-cache/issues/721
    """
    root, seed = tmp_path / "root", random.Random(7)
    n_chunks, unfinished = 60, 0
    for round_ in range(20):
        writer = Writer(root, n_chunks, first=1_000_000 * round_)
        writers.append(writer)
        assert writer.ready.wait(20)
        await asyncio.sleep(seed.uniform(0.0, 0.15))  # the kill is to hit anywhere, so there is nothing to wait for
        writer.kill()
        assert recount(root) <= capacity_for(n_chunks)
        async with opened(root, n_chunks=n_chunks) as tier:
            found = [f.key for f in await first_batches(tier)]
            kept = writer.kept()
            assert {key_of(i) for i in kept} <= set(found)
            statuses = await fetch(tier, *(chunk_of(_number(key)) for key in found))
            assert statuses == [Status.OK] * len(found)
            assert tier.counters()["corrupt"] == 0
            unfinished += tier.counters()["unfinished"]
            counts = kinds(root)
            assert counts == {"chunk": len(found), "lock": 2, "index": 0, "?": 0}
            assert tier.usage()["used_nbytes"] == recount(root) + _mount(tier)._index_room_nbytes
        assert kinds(root) == {"chunk": len(found), "lock": 2, "index": 1, "?": 0}
        assert recount(root) <= capacity_for(n_chunks)
    assert unfinished > 0, "no kill hit a write: the test shows less than it says"


async def test_two_live_processes_keep_the_capacity_together(tmp_path: Path, writers: list[Writer]) -> None:
    """Both write as fast as they can, one is killed and replaced: sampled by a third, the sum never exceeds.

    Each reads chunks of the other's. https://github.com/vllm-project/vllm/issues/54779
    """
    root, n_chunks = tmp_path / "root", 40
    writers += [Writer(root, n_chunks, first=0, step=2), Writer(root, n_chunks, first=1, step=2)]
    samples: list[int] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.is_set():
            samples.append(recount(root))
            time.sleep(0.002)

    watcher = threading.Thread(target=sample)
    watcher.start()
    try:
        assert all(writer.ready.wait(20) for writer in writers)
        _until(lambda: all(writer.probes.count("OK") >= 3 and writer.n_stored > 50 for writer in writers))
        writers[1].kill()
        before = writers[0].n_stored
        writers.append(Writer(root, n_chunks, first=1, step=2))
        assert writers[2].ready.wait(20)
        _until(lambda: writers[2].n_stored > 50 and writers[0].n_stored > before + 50)
    finally:
        stop.set()
        watcher.join(20)
    for writer in writers:
        if writer.process.poll() is None:
            writer.kill()
    assert len(samples) > 100 and max(samples) <= capacity_for(n_chunks)
    assert max(samples) > capacity_for(n_chunks) // 2
    assert not any("WRONG" in writer.probes or "CORRUPT" in writer.probes for writer in writers)
    async with opened(root, n_chunks=n_chunks) as tier:
        assert recount(root) <= capacity_for(n_chunks)
        everything = [i for writer in (writers[0], writers[2]) for i in writer.kept()]
        statuses = await fetch(tier, *(chunk_of(i) for i in everything))
        assert set(statuses) == {Status.OK}
        assert kinds(root)["?"] == 0


def _until(condition: object, timeout_s: float = 30.0) -> None:
    """Processes tell us of no event: look now and then."""
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.02)


def _number(key: bytes) -> int:
    match = re.match(rb"key (\d+)\0", key)
    assert match is not None
    return int(match[1])
