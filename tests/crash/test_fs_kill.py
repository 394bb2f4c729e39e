"""Two live processes on one root, one of them killed, watched from outside all the time."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.harness import litter
from tests.crash.watch import Watch, watched
from tests.fs_kit import capacity_for, chunk_of, fetch, is_slab, layout, opened, recount  # noqa: F401
from tests.patience import PATIENCE_S
from tierkv.types import Status

pytestmark = pytest.mark.crash
REPOSITORY = Path(__file__).parents[2]


class Writer:
    """The child, and what it said."""

    def __init__(self, watch: Watch, root: Path, n_chunks: int, first: int = 0, step: int = 1) -> None:
        self.process = watch.start(
            [sys.executable, "-m", "tests.crash.fs_writer", str(root), str(n_chunks), str(first), str(step),
             "slab" if is_slab() else "files"],
            cwd=REPOSITORY, stdout=subprocess.PIPE,
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
        self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def writers() -> Iterator[list[Writer]]:
    made: list[Writer] = []
    yield made
    for writer in made:
        if writer.process.poll() is None:
            writer.kill()


async def test_two_live_processes_keep_the_capacity_together(tmp_path: Path, writers: list[Writer]) -> None:
    """Both write as fast as they can, one is killed and replaced: the sum exceeds at no instant that a third one sees.

    Each reads chunks of the other's. https://github.com/vllm-project/vllm/issues/54779
    """
    root, n_chunks = tmp_path / "root", 40
    with watched(root) as watch:
        writers += [Writer(watch, root, n_chunks, first=i, step=2) for i in range(2)]
        assert all(writer.ready.wait(PATIENCE_S) for writer in writers)
        _until(lambda: all(writer.probes.count("OK") >= 3 and writer.n_stored > 50 for writer in writers))
        writers[1].kill()
        before = writers[0].n_stored
        writers.append(Writer(watch, root, n_chunks, first=1, step=2))
        assert writers[2].ready.wait(PATIENCE_S)
        _until(lambda: writers[2].n_stored > 50 and writers[0].n_stored > before + 50)
        _until(lambda: len(watch.samples) > 100 and max(watch.samples) > capacity_for(n_chunks) // 2)
    for writer in writers:
        if writer.process.poll() is None:
            writer.kill()
    assert max(watch.samples) <= capacity_for(n_chunks)
    assert not any("WRONG" in writer.probes or "CORRUPT" in writer.probes for writer in writers)
    async with opened(root, n_chunks=n_chunks) as tier:
        assert recount(root) <= capacity_for(n_chunks)
        everything = [i for writer in (writers[0], writers[2]) for i in writer.kept()]
        statuses = await fetch(tier, *(chunk_of(i) for i in everything))
        assert set(statuses) == {Status.OK}
        assert litter(root)["?"] == 0


def _until(condition: object, timeout_s: float = PATIENCE_S) -> None:
    """Processes tell us of no event: look now and then."""
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.02)
