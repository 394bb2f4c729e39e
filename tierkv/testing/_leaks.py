"""What a piece of code leaves behind: descriptors, threads, tasks."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, NamedTuple

from tierkv.testing._rules import require

_GRACE_S: Final = 5.0
"""What was told to end may need a moment; a leak does not end at all."""
_DESCRIPTORS: Final = "/proc/self/fd"
_SHARED: Final = ("/proc/", "/dev/urandom", "/dev/null")
"""Opened once by the interpreter or a library and kept."""


class _Held(NamedTuple):
    descriptors: frozenset[tuple[int, str]]
    threads: frozenset[threading.Thread]

    @classmethod
    def now(cls) -> _Held:
        return cls(_descriptors(), frozenset(threading.enumerate()))

    def more_than(self, before: _Held) -> list[str]:
        return [
            *(f"descriptor {number} -> {target}" for number, target in sorted(self.descriptors - before.descriptors)),
            *(f"thread {thread.name!r}" for thread in self.threads - before.threads),
        ]


@contextmanager
def no_leaks(what: str = "the code", *, grace_s: float = _GRACE_S) -> Iterator[None]:
    """Fail if the block leaves descriptors or threads behind that it did not find, after ``grace_s`` seconds.

    Put it around the whole life of an event loop, whose own threads and sockets end with it. Descriptors are seen on
    systems with ``/proc``. Raises ConformanceError; an exception of the block goes first.
    """
    before = _Held.now()
    yield
    deadline_s = time.monotonic() + grace_s
    left = _Held.now().more_than(before)
    while left and time.monotonic() < deadline_s:
        gc.collect()
        time.sleep(0.01)
        left = _Held.now().more_than(before)
    require(not left, f"{what} leaves nothing behind", *left)


@asynccontextmanager
async def no_leaked_tasks(what: str = "the code", *, n_turns: int = 10) -> AsyncIterator[None]:
    """Fail if tasks that the block started still run ``n_turns`` turns of the loop after it."""
    before = asyncio.all_tasks()
    yield
    for _ in range(n_turns):
        if not asyncio.all_tasks() - before:
            return
        await asyncio.sleep(0)
    left = sorted(task.get_name() for task in asyncio.all_tasks() - before)
    require(not left, f"{what} leaves no task running", *left)


def _descriptors() -> frozenset[tuple[int, str]]:
    found: set[tuple[int, str]] = set()
    if not os.path.isdir(_DESCRIPTORS):
        return frozenset()
    for name in os.listdir(_DESCRIPTORS):
        try:
            target = os.readlink(f"{_DESCRIPTORS}/{name}")
        except OSError:  # the listing's own
            continue
        if not target.startswith(_SHARED):
            found.add((int(name), target))
    return frozenset(found)
