"""A few daemon threads for blocking calls, with asyncio futures on the other end.

``ThreadPoolExecutor`` joins its threads when the interpreter exits, so one read that hangs on a dead disk would hang
the exit of the whole engine. These threads are daemons and are never joined: a hung call costs its thread and no more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_Tell = Callable[[], None]
_Job = Callable[[], _Tell]
"""Does the work and returns how to tell its waiter, for when the thread counts as free again."""

_log = logging.getLogger(__name__)


class Lane:
    """Runs blocking calls on up to ``n_threads`` own daemon threads, first come first served.

    Threads start when there is work for them, so a lane that is never used costs nothing.

    Concurrency: every method may be called from any thread; those that return a future need a running event loop.
    Cancelling a future only stops the waiting: the call behind it goes on.
    """

    def __init__(self, name: str, n_threads: int) -> None:
        self.name = name
        self.n_threads = n_threads
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._n_started = 0
        self._n_unfinished = 0
        self._closed = False

    def run(self, fn: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Call ``fn(*args)`` on a thread of this lane; the future takes its result or exception."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> _Tell:
            try:
                result = fn(*args)
            except BaseException as error:  # noqa: BLE001 - the waiter raises it
                return partial(_tell, loop, future, None, error)
            return partial(_tell, loop, future, result, None)

        self._submit(job)
        return future

    def spread(
        self, worker: Callable[[Iterator[T]], None], plan: Callable[[], Iterable[T]], n_workers: int
    ) -> asyncio.Future[None]:
        """Let ``n_workers`` threads share what ``plan`` returns; one hop a worker, not one an item.

        The first of the threads calls ``plan``, so that the loop's does not wait for it. Each worker is called once
        with the same iterator and takes items from it until none is left, so a slow item delays only its own worker.
        The future is done once every worker has returned; it takes the first exception.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        share = _Share(plan)
        n_workers = max(1, min(n_workers, self.n_threads))
        ended = itertools.count(1)
        errors: list[BaseException] = []

        def job() -> _Tell:
            try:
                worker(share.items())
            except BaseException as error:  # noqa: BLE001 - the waiter raises it
                errors.append(error)
            if next(ended) < n_workers:
                return _nobody
            return partial(_tell, loop, future, None, errors[0] if errors else None)

        for _ in range(n_workers):
            self._submit(job)
        return future

    def post(self, fn: Callable[..., object], *args: Any) -> None:
        """Call ``fn(*args)`` on a thread of this lane; nobody waits, and an exception is logged."""

        def job() -> _Tell:
            try:
                fn(*args)
            except Exception:  # noqa: BLE001 - nobody waits for it
                _log.exception("%s: background call failed", self.name)
            return _nobody

        self._submit(job)

    def executor(self) -> Executor:
        """These threads for libraries that ask for an executor, such as aiofiles."""
        return _LaneExecutor(self)

    def close(self) -> None:
        """Let the threads end once they have done what is queued. Idempotent; waits for nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in range(self._n_started):
                self._jobs.put(None)

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Block until nothing is queued or running; False if that took longer than ``timeout_s``."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._n_unfinished, timeout_s)

    def _submit(self, job: _Job) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError(f"lane {self.name} is closed")
            self._n_unfinished += 1
            start = self._n_started < min(self.n_threads, self._n_unfinished)
            self._n_started += start
            self._jobs.put(job)
            if start:
                name = f"{self.name}-{self._n_started - 1}"
                threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            tell = job()
            with self._lock:
                self._n_unfinished -= 1
                if not self._n_unfinished:
                    self._idle.notify_all()
            tell()
            del job, tell  # else an idle thread would keep the last batch's buffers alive


class _Share(Generic[T]):
    """What the threads of one :meth:`Lane.spread` have to do together."""

    def __init__(self, plan: Callable[[], Iterable[T]]) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._items: Iterator[T] | None = None

    def items(self) -> Iterator[T]:
        """The same iterator for all. Raises what the plan raises, once: then there is nothing to do."""
        with self._lock:
            if self._items is None:
                self._items = iter(())
                # `next` on the iterator of a list is one C call under the GIL: no two workers see the same item.
                self._items = iter([*self._plan()])
            return self._items


class _LaneExecutor(Executor):
    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - the waiter raises it
                future.set_exception(error)

        self._lane.post(call)
        return future


def _nobody() -> None:
    pass


def _tell(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], result: T | None, error: BaseException | None
) -> None:
    try:
        loop.call_soon_threadsafe(_settle, future, result, error)
    except RuntimeError:
        # The loop was closed while the call ran: nobody is left to tell.
        _log.debug("event loop closed before a background call ended")


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
