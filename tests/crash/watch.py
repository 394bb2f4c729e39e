"""A root that several processes change, seen at one instant at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.fs_kit import recount
from tests.patience import PATIENCE_S

_LEAST_PAUSE_S: Final = 0.004


class Watch:
    """Bytes on a root, again and again, with all processes that change it stopped for each look.

    Sizes that are read one after another are no sum of one moment, and neither is the least of two looks at each: a
    slab gives back blocks that another one gets, and has others the next time, so what was read may add up to more
    than there ever was, or to less. Only what is the same before and after a look is known to have been there in it.

    Attributes:
        samples: bytes at each instant.
    """

    def __init__(self, root: Path) -> None:
        self.samples: list[int] = []
        self._root = root
        self._processes: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """A process that changes the root."""
        with self._lock:  # none may begin while the others stand still
            process = subprocess.Popen(command, text=True, **options)
            self._processes.append(process)
            return process

    def look(self) -> None:
        """Take a sample."""
        with self._lock:
            self._processes = [process for process in self._processes if process.returncode is None]
            for process in self._processes:
                process.send_signal(signal.SIGSTOP)
            try:
                for process in self._processes:
                    _wait_until_stopped(process.pid)
                self.samples.append(recount(self._root))
            finally:
                for process in self._processes:
                    process.send_signal(signal.SIGCONT)

    def run(self) -> None:
        """Look until ``end``; they stand still for a third of the time at most, however slow the machine is."""
        pause_s = _LEAST_PAUSE_S
        while not self._ended.wait(pause_s):
            began_s = time.monotonic()
            self.look()
            pause_s = max(_LEAST_PAUSE_S, 2 * (time.monotonic() - began_s))

    def end(self) -> None:
        self._ended.set()


@contextmanager
def watched(root: Path) -> Iterator[Watch]:
    """Looks at the root until the block ends."""
    watch = Watch(root)
    thread = threading.Thread(target=watch.run)
    thread.start()
    try:
        yield watch
    finally:
        watch.end()
        thread.join()


def _wait_until_stopped(pid: int) -> None:
    """No thread of the process runs any more, nor is in the middle of a system call."""
    deadline, before = time.monotonic() + PATIENCE_S, None
    while True:
        threads = _threads(pid)
        # Twice the same: one that was seen to run may have begun another before it stopped.
        if threads == before and set(threads.values()) <= set("TZX"):
            return
        before = threads
        assert time.monotonic() < deadline, f"process {pid} does not stop: {threads}"
        time.sleep(0.0002)


def _threads(pid: int) -> dict[str, str]:
    """State of each thread, as ps(1) shows it; empty if the process is gone."""
    states = {}
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            states[thread] = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the thread ended, or all of them: look again
        return {} if not os.path.exists(f"/proc/{pid}") else {"?": "?"}
    return states
