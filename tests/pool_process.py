"""A process that makes, joins and uses pools and control pages on request, to be killed by a test.

Run as a script it answers one JSON object a line; :class:`PoolProcess` starts it and talks to it. The processes are
spawned anew, not forked, so they share nothing with the test but what they join.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import tierkv
from tests.patience import PATIENCE_S
from tierkv.tiers._pool import PrivatePool, SharedPool
from tierkv.tiers._rendezvous import Role
from tierkv.vllm._control import ControlPage, Direction


class PoolProcess:
    """Starts the process; on leaving the scope it is killed with SIGKILL and reaped, if it still lives."""

    def __init__(self, *prefix: str) -> None:
        """``prefix`` is a command that runs the process, such as ``unshare -n``."""
        package_root = Path(tierkv.__file__).parents[1]
        tests_root = Path(__file__).parents[1]
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.pool_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tests_root,
            env=os.environ | {"PYTHONPATH": f"{package_root}{os.pathsep}{tests_root}"},
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """Of the process itself where no prefix forks."""
        return self._process.pid

    def ask(self, command: str, **arguments: Any) -> Any:
        """Run one command there. Raises RuntimeError with "Kind: message" of the exception that it raised."""
        self.start(command, **arguments)
        return self.wait()

    def start(self, command: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, arguments]).encode() + b"\n")
        self._process.stdin.flush()

    def wait(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process ended before it answered"
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["ok"]

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class _Commands:
    """What the process can be asked to do."""

    def __init__(self) -> None:
        self.pool: Any = None
        self.page: Any = None

    def create(self, *, shared_id: str, n_slots: int, stride_nbytes: int, populate: bool = False) -> int:
        self.pool = SharedPool.create(shared_id, n_slots, stride_nbytes, populate=populate)
        return int(self.pool.generation)

    def create_private(self, *, n_slots: int, stride_nbytes: int) -> None:
        self.pool = PrivatePool(n_slots, stride_nbytes)

    def join(self, *, role: str, rank: int, **arguments: Any) -> int:
        self.pool = SharedPool.join(role=Role[role], rank=rank, **arguments)
        return int(self.pool.generation)

    def populated(self) -> int:
        assert self.pool.wait_populated(PATIENCE_S)
        return int(self.pool.populated_nbytes)

    def fill(self, *, slot: int, byte: int) -> None:
        self.pool.view(slot)[:] = bytes([byte]) * self.pool.stride_nbytes

    def peek(self, *, slot: int) -> list[int]:
        """The distinct bytes in a slot."""
        return sorted(set(self.pool.view(slot).tobytes()))

    def shm_nbytes(self) -> int:
        """Size of the /dev/shm that this process sees."""
        found = os.statvfs("/dev/shm")
        return found.f_blocks * found.f_frsize

    def creator_alive(self) -> bool:
        return bool(self.pool.creator_alive())

    def close(self) -> None:
        self.pool.close()

    def fork_sleeper(self) -> int:
        """A child that does nothing until it is killed."""
        pid = os.fork()
        if pid == 0:
            for fd in (0, 1):
                os.close(fd)
            time.sleep(3600)
            os._exit(0)
        return pid

    def create_page(self, *, shared_id: str, n_ranks: int, n_slots: int) -> None:
        self.page = ControlPage.create(shared_id, n_ranks=n_ranks, n_slots=n_slots)

    def join_page(self, *, role: str, rank: int, **arguments: Any) -> None:
        self.page = ControlPage.join(role=Role[role], rank=rank, **arguments)

    def stamp(self, *, rank: int, direction: int, slots: list[int], tickets: list[int], ok: bool) -> None:
        self.page.stamp_many(rank, Direction(direction), slots, tickets, ok=ok)

    def publish(self, *, rank: int, model: str, layout: str) -> None:
        self.page.publish_identity(rank, bytes.fromhex(model), bytes.fromhex(layout))

    def hammer(self) -> int:
        """Write words whose eight bytes are alike as fast as it goes, the way stamps are written, until asked again."""
        words, place = self.page._words, self.page._start(0, Direction.STORE)
        alike = [int.from_bytes(bytes([byte]) * 8, "little") for byte in range(256)]
        n_rounds = 0
        while not select.select([0], [], [], 0)[0]:
            n_rounds += 1
            for word in alike:
                words[place] = word
        return n_rounds

    def creator_alive_of_page(self) -> bool:
        return bool(self.page.creator_alive())


def _serve() -> None:
    commands = _Commands()
    for line in sys.stdin:
        command, arguments = json.loads(line)
        act: Callable[..., Any] = getattr(commands, command)
        try:
            answer = {"ok": act(**arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
