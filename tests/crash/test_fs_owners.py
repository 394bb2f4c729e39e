"""Processes that start on one root at the same moment, or come and die as they please, watched from outside."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cases.kit import CHARGE, litter
from tests.crash.watch import Watch, watched
from tests.fs_kit import OVERHEAD
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.crash
REPOSITORY = Path(__file__).parents[2]
N_CHUNKS = 24
CAPACITY_NBYTES = N_CHUNKS * CHARGE + OVERHEAD


class Owner:
    """A process of ``tests.crash.owner``, and what it said."""

    def __init__(self, watch: Watch, root: Path, number: int, *what: str) -> None:
        command = [sys.executable, "-m", "tests.crash.owner", str(root), str(N_CHUNKS), str(number), *what]
        self.process = watch.start(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.said: list[str] = []
        self.seen: dict[str, int] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, *rest = line.split()
            self.said.append(word)
            if rest:
                self.seen = {name: int(n) for name, n in (item.split("=") for item in rest)}

    def tell(self) -> None:
        assert self.process.stdin is not None and self.process.stderr is not None
        assert self.process.poll() is None, self.process.stderr.read()
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Let it leave by itself, and see that nothing went wrong there."""
        assert self.process.stdin is not None and self.process.stderr is not None
        self.process.stdin.close()
        said = self.process.stderr.read()
        assert self.process.wait(PATIENCE_S) == 0, said
        self._reader.join(PATIENCE_S)
        assert self.said[-1] == "ended"
        self._close()

    def kill(self) -> None:
        """SIGKILL; it must have been alive until then."""
        died = self.process.poll()
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        assert self.process.stderr is not None
        said = self.process.stderr.read()
        self._close()
        assert died is None, said

    def _close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def _until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Processes tell us of no event: look now and then."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.0005)


def _verify(root: Path) -> None:
    """``tierkv verify``: every file there is whole, and what it says it is."""
    command = [sys.executable, "-m", "tierkv.cli", "verify", str(root)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_hundred_starts_at_the_same_moment(tmp_path: Path) -> None:
    """Two processes enter one root a hundred times at once, store, read each other's chunks and leave.

    No call of theirs fails, no file is torn, and the limit is kept at every instant that a third process sees.
    """
    root, n_starts = tmp_path / "root", 100
    owners: list[Owner] = []
    try:
        with watched(root) as watch:
            owners += [Owner(watch, root, number, "starts", str(n_starts)) for number in range(2)]
            for n in range(1, n_starts + 1):
                _until(lambda n=n: all(o.said.count("waiting") == n or o.process.poll() for o in owners))  # type: ignore[misc]
                for owner in owners:
                    owner.tell()
            for owner in owners:
                owner.end()
    finally:
        for owner in owners:
            if owner.process.poll() is None:
                owner.kill()
    assert CAPACITY_NBYTES // 2 < max(watch.samples) <= CAPACITY_NBYTES
    for owner in owners:
        assert owner.seen["stored"] > n_starts // 5 and owner.seen["shared"] > 0, owner.seen
        assert owner.seen["failed"] == 0, "nobody takes away what somebody is writing"
    assert not litter(root)
    _verify(root)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_owners_come_and_die_at_random(tmp_path: Path) -> None:
    """Three at a time, at least thirty, killed or let go at random: their files are taken over, shared and evicted.

    Those who live are told of what was removed behind their backs, no call of theirs fails, and the limit is kept.
    """
    root, draw = tmp_path / "root", random.Random(7)
    living: list[Owner] = []
    seen: dict[str, int] = {"shared": 0, "vanished": 0, "adopted": 0, "taken_over": 0}
    try:
        with watched(root) as watch:
            living += [Owner(watch, root, number, "roam") for number in range(3)]
            # What must come to pass depends on who looks when: if it has not by then, some more live and die.
            for number in range(3, 120):
                if number >= 30 and all(seen.values()):
                    break
                _until(lambda: all("seen" in owner.said or owner.process.poll() for owner in living))
                time.sleep(draw.random())
                owner = living.pop(draw.randrange(3))
                (owner.kill if draw.random() < 0.7 else owner.end)()
                for what, n in owner.seen.items():
                    seen[what] = seen.get(what, 0) + n
                living.append(Owner(watch, root, number, "roam"))
            for owner in living:
                owner.end()
    finally:
        for owner in living:
            if owner.process.poll() is None:
                owner.kill()
    assert CAPACITY_NBYTES // 2 < max(watch.samples) <= CAPACITY_NBYTES
    assert all(seen.values()), seen
    _verify(root)
