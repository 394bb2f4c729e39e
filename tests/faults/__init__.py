"""Faults as real as they come: system calls that fail, hang, are cut short or lie; disks that are full or read-only.

Mocks of ``os`` functions show what a test's author believed the kernel does. Here the library runs as it is, and what
lies beneath it misbehaves:

- :class:`Faults`, with ``shim.c``: rules for the calls of libc that touch files (EIO, ESTALE, EROFS, short reads,
  hangs, delays, flipped bits, a wall clock that jumps), in a process that was started with it preloaded. The rules lie
  in shared memory, so that a test changes them while that process runs, from within or from outside.
- :func:`in_child` runs an async function of a test module in such a process.
- :mod:`tests.faults.disks`: a small tmpfs to fill, a real ext4 whose kernel turns it read-only, an unprivileged user.

Why no packaged tool: libfiu's preload knows neither ``openat``, ``renameat`` nor ``preadv``, by which the fs tier does
all its work; ``strace -e inject`` fails and delays calls, but cannot cut a read short, and its rules are fixed when it
starts, so that nothing ever recovers. libeatmydata and libfaketime do one thing each that is three lines here.

A program other than a test function is started with :attr:`Faults.environment`, an engine with its workers, say.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import importlib
import json
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

import pytest

from tests.patience import PATIENCE_S, be_patient

HERE: Final = Path(__file__).parent
REPOSITORY: Final = HERE.parents[1]

KINDS: Final = (
    "open", "read", "write", "close", "rename", "unlink", "mkdir", "sync", "stat", "list", "lock", "time", "space",
    "mode", "size",
)  # fmt: skip
"""What a rule can be about, in the order of their bits. ``sync`` is fsync and fdatasync, ``list`` readdir, ``lock``
flock, ``time`` utimensat, ``space`` fstatvfs, ``mode`` chmod, ``size`` ftruncate and fallocate."""

_MAGIC: Final = 0x746C7561662D6B76
_HEAD: Final = struct.Struct("=QQq40x")
_RULE: Final = struct.Struct("=IIiiIIQIIQQQQQIIQQ160s")
_N_RULES: Final = 32
_PATH_NBYTES: Final = 160
_NBYTES: Final = _HEAD.size + _N_RULES * _RULE.size
_SHIFT_AT: Final = 16
_HANG_AT: Final = 32
_COUNTS_AT: Final = 56
_NOBODY: Final = 0xFFFFFFFF
_PID_AT: Final = 84
"""Places in the table and, but for the first, in a rule."""


def need(met: bool, what: str) -> None:
    """Skip a test whose faults need what this machine does not give, with one reason; in CI, which has it all, fail."""
    if not met:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs {what}")


@functools.cache
def shim() -> Path:
    """The shared object, compiled once a process."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    need(compiler is not None, "a C compiler")
    assert compiler is not None
    folder = tempfile.mkdtemp(prefix="tierkv-shim-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = Path(folder, "shim.so")
    command = [compiler, "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(made), str(HERE / "shim.c"), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return made


class Faults:
    """A table of rules, in a file that processes with the shim map.

    Args:
        path: the table; made anew unless ``attach``.
    """

    def __init__(self, path: str | os.PathLike[str], *, attach: bool = False) -> None:
        self.path = Path(path)
        if not attach:
            self.path.write_bytes(_HEAD.pack(_MAGIC, 0, 0).ljust(_NBYTES, b"\0"))
        with self.path.open("r+b") as file:
            self._table = mmap.mmap(file.fileno(), _NBYTES)
        assert int.from_bytes(self._table[:8], "little") == _MAGIC, "a table of rules"

    @classmethod
    def attach(cls, path: str | os.PathLike[str] | None = None) -> Faults:
        """The table of a process that runs, by default of this one."""
        return cls(path or os.environ["TIERKV_FAULTS"], attach=True)

    @property
    def environment(self) -> dict[str, str]:
        """What a process is to be started with."""
        before = os.environ.get("LD_PRELOAD")
        return {"LD_PRELOAD": f"{shim()}:{before}" if before else str(shim()), "TIERKV_FAULTS": str(self.path)}

    def add(
        self,
        *calls: str,
        path: str = "",
        error: int = 0,
        at_most: int | None = None,
        after: bool = False,
        flip: bool = False,
        delay_s: float = 0.0,
        hang: bool = False,
        kill: bool = False,
        log: bool = False,
        first: int = 1,
        count: int = 0,
        within: tuple[int, int] = (0, 0),
        claimed: bool = False,
    ) -> Rule:
        """From now on these calls (all kinds, if none is named) on paths with this part in them go wrong.

        Args:
            calls: of :data:`KINDS`.
            path: part of the absolute path; empty is every file.
            error: errno to fail with.
            at_most: bytes that a read or write moves: a short one.
            after: make the call, and fail it all the same.
            flip: reads give one wrong bit.
            delay_s: before the call.
            hang: until :meth:`Rule.let_go`, before the call.
            kill: the process ends by SIGKILL, in front of the call; behind it with ``after``, and, with both ``after``
                and ``at_most``, once that part was moved.
            log: write the call down before it is made, for :meth:`log`.
            first: the first call that matches and is struck, counted from 1.
            count: how many are struck from then on; 0 is all.
            within: first byte of the file, and the first behind: only reads and writes that touch one of these.
            claimed: nobody's calls match until a process says :meth:`Rule.only_here`.
        """
        if len(os.fsencode(path)) >= _PATH_NBYTES:
            raise ValueError(f"at most {_PATH_NBYTES - 1} bytes of path")
        bits = sum(1 << KINDS.index(call) for call in calls or KINDS)
        packed = _RULE.pack(
            0, bits, error, -1 if at_most is None else at_most, after, flip, int(delay_s * 1e6), hang, kill, first,
            count, 0, 0, 0, log, _NOBODY if claimed else 0, *within, path.encode(),
        )  # fmt: skip
        for i in range(_N_RULES):
            at = _HEAD.size + i * _RULE.size
            if not self._table[at]:
                self._table[at : at + _RULE.size] = packed
                self._table[at] = 1  # only now: whoever looks at the rule before finds none
                self._count()
                return Rule(self, at)
        raise ValueError(f"at most {_N_RULES} rules")

    def clear(self) -> None:
        """All is well again; what hangs goes on."""
        for i in range(_N_RULES):
            self._table[_HEAD.size + i * _RULE.size] = 0
        self._count()

    def log(self) -> list[tuple[str, str]]:
        """Calls that rules with ``log`` have struck, in order: kind and path."""
        try:
            lines = Path(f"{self.path}.log").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(KINDS[int(kind)], path) for kind, path in (line.split(" ", 1) for line in lines)]

    def shift_clock(self, by_s: float) -> None:
        """The wall clock is off by so many seconds; monotonic ones go on as they were."""
        struct.pack_into("=q", self._table, _SHIFT_AT, int(by_s * 1e9))

    def _count(self) -> None:
        n_active = sum(self._table[_HEAD.size + i * _RULE.size] for i in range(_N_RULES))
        struct.pack_into("=Q", self._table, 8, n_active)

    def close(self) -> None:
        self._table.close()


class Rule:
    """One rule that was added, and what has come of it."""

    def __init__(self, faults: Faults, at: int) -> None:
        self._faults = faults
        self.at = at
        """Its place in the table: another process that has attached that may follow it, too."""

    @property
    def n_seen(self) -> int:
        """Calls that matched."""
        return self._counts()[0]

    @property
    def n_struck(self) -> int:
        return self._counts()[1]

    @property
    def n_waiting(self) -> int:
        """Calls that hang now."""
        return self._counts()[2]

    def let_go(self) -> None:
        """What hangs goes on, and nothing hangs any more."""
        struct.pack_into("=I", self._faults._table, self.at + _HANG_AT, 0)

    def only_here(self) -> None:
        """From now on no other process's calls match."""
        struct.pack_into("=I", self._faults._table, self.at + _PID_AT, os.getpid())

    def remove(self) -> None:
        self._faults._table[self.at] = 0
        self._faults._count()

    async def met(
        self,
        n: int = 1,
        *,
        waiting: bool = False,
        timeout_s: float = PATIENCE_S,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Wait until the rule has struck ``n`` calls, or ``n`` hang. A thread in a system call tells of no event.

        ``meanwhile`` is called now and then, and raises if there is nothing to wait for any more.
        """
        deadline = time.monotonic() + timeout_s
        while (self.n_waiting if waiting else self.n_struck) < n:
            assert time.monotonic() < deadline, f"struck {self.n_struck} times, {self.n_waiting} wait, not {n}"
            meanwhile()
            await asyncio.sleep(0.002)

    def _counts(self) -> tuple[int, int, int]:
        seen, struck, waiting = struct.unpack_from("=QQQ", self._faults._table, self.at + _COUNTS_AT)
        return seen, struck, waiting


class Child:
    """A process of its own that runs an async function of a test module under the shim: ``with Child(...) as child``.

    Args:
        function: a module-level coroutine function.
        *args: what it is called with, as text, behind a :class:`Faults`.
        folder: for the table of rules; one for each child.
        **environment: more of it.
    """

    def __init__(self, function: Any, *args: str | int | Path, folder: Path, **environment: str) -> None:
        folder.mkdir(exist_ok=True)
        self.faults = Faults(folder / "faults")
        target = f"{function.__module__}:{function.__qualname__}"
        env = os.environ | self.faults.environment | {"PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "error"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults", target, json.dumps([str(arg) for arg in args])],
            cwd=REPOSITORY, env=env | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def wait(self, timeout_s: float = PATIENCE_S) -> None:
        """To its end; fails with what it said if it failed."""
        said, _ = self.process.communicate(timeout=timeout_s)
        assert self.process.returncode == 0, f"in the child:\n{said}"

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. What it wrote to its files stays as it is."""
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self.process.poll() is None:
            self.kill()
        self.faults.close()


def in_child(
    function: Any, *args: str | int | Path, folder: Path, timeout_s: float = PATIENCE_S, **environment: str
) -> None:
    """Run a :class:`Child` to its end."""
    with Child(function, *args, folder=folder, **environment) as child:
        child.wait(timeout_s)


def run_here(target: str, args: str) -> None:
    """The child's side of :func:`in_child`: also there nothing may be left behind."""
    from tests.leaks import Snapshot, wait_for_none

    be_patient()
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    faults = Faults.attach()
    before = Snapshot.take()
    try:
        asyncio.run(function(faults, *json.loads(args)))
    finally:
        faults.clear()
    leaked = wait_for_none(before)
    assert not leaked, "left behind: " + "; ".join(leaked)
