"""Processes to be killed, by the hundred: one parent imports everything once, and forks a child for each life.

``python -m tests.crash.nursery MODULE[:FUNCTION] ...`` is that parent. It imports the modules, calls the functions,
then does what each line on its standard input says: ``{"run": "MODULE:FUNCTION", "log": PATH, ...}`` forks a child that
runs the coroutine function with what else the line has, and answers its pid; ``{"wait": PID}`` answers how it ended.
What a child says, by the :class:`Diary` that it is handed, stands in its log in one write a line: what is read there
was said before the kill.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.faults import REPOSITORY, Faults
from tests.patience import PATIENCE_S


class Diary:
    """What a child says."""

    def __init__(self, log: str) -> None:
        self._fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def say(self, *words: object) -> None:
        os.write(self._fd, (" ".join(map(str, words)) + "\n").encode())


class Nursery:
    """That parent, seen from the test: started with the shim, whose table its children share.

    Args:
        folder: for the table of rules.
        modules: where the children's functions are; ``MODULE:FUNCTION`` calls one that does more of the importing.
    """

    def __init__(self, folder: Path, *modules: str, **environment: str) -> None:
        folder.mkdir(exist_ok=True)
        self.faults = Faults(folder / "faults")
        env = os.environ | self.faults.environment | {"PYTHONPATH": str(REPOSITORY)} | environment
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.nursery", *modules],
            cwd=REPOSITORY, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._alive: set[int] = set()

    def run(self, function: Any, log: Path, **settings: Any) -> int:
        """Start a life; returns its pid."""
        target = f"{function.__module__}:{function.__qualname__}"
        pid = int(self._ask({"run": target, "log": str(log), **settings}))
        self._alive.add(pid)
        return pid

    async def said(self, log: Path, word: str, timeout_s: float = PATIENCE_S) -> None:
        """Until a life has said this word. It tells of no event: look now and then."""
        deadline = time.monotonic() + timeout_s
        while not log.exists() or word not in log.read_text().split():
            assert time.monotonic() < deadline, log.read_text() if log.exists() else "it said nothing"
            await asyncio.sleep(0.002)

    def kill(self, pid: int) -> None:
        """SIGKILL, if it lives, and wait until it is gone: whatever it held, the kernel has let go of."""
        os.kill(pid, 9)  # not reaped yet, so the number is nobody else's
        self.wait(pid)

    def wait(self, pid: int) -> int:
        """To its end; 0 for a life that ended by itself, -9 for one that was killed."""
        self._alive.discard(pid)
        return int(self._ask({"wait": pid}))

    def _ask(self, order: dict[str, Any]) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the nursery has died"
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for pid in [*self._alive]:
            self.kill(pid)
        self._process.communicate()  # its standard input ends, and so does it
        self.faults.close()


def _live(target: str, log: str, settings: dict[str, Any]) -> None:
    """A child's whole life."""
    diary = Diary(log)
    module, _, name = target.partition(":")
    try:
        asyncio.run(getattr(sys.modules[module], name)(diary, **settings))
    except BaseException:
        diary.say("error", json.dumps(traceback.format_exc()))


def main(modules: Sequence[str]) -> None:
    for name in modules:
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if not pid:
            os.close(0)
            _live(order.pop("run"), order.pop("log"), order)
            os._exit(0)  # nothing of the parent's is to be cleaned up twice
        print(pid, flush=True)
    os._exit(0)  # taking a large library apart again takes seconds


if __name__ == "__main__":
    main(sys.argv[1:])
