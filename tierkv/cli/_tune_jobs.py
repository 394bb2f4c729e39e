"""Replays of one trace, spread over processes: each gets the trace once, then one job a line on its standard input.

A worker ends when its input does, so that it cannot outlive the command.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from tierkv.cli._tune_replay import Job, Result, replay
from tierkv.errors import ConfigError, TierKVError
from tierkv.traces import Header, Trace

_ARRAYS = ("blocks", "ends", "n_tokens", "times_s")
Progress = Callable[[int], object]


class WorkerError(TierKVError):
    """A worker process ended in the middle of a replay."""


def run_jobs(trace: Trace, jobs: Sequence[Job], n_processes: int, progress: Progress) -> list[Result]:
    """All results, in the order of the jobs; in this process if there is one to use.

    Args:
        trace: the requests.
        jobs: what to replay.
        n_processes: how many replays may run at a time.
        progress: is told how many more requests have been served.

    Raises:
        ConfigError: an order cannot be made.
        WorkerError: a process died.
    """
    n_processes = min(n_processes, len(jobs))
    if n_processes <= 1:
        return [replay(trace, job, progress) for job in jobs]
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="tierkv-tune-"))
        save(trace, file)
        workers = [stack.enter_context(_worker(file.name)) for _ in range(n_processes)]
        return _Pool(workers, jobs, progress).run()


class _Pool:
    """Hands out jobs and collects what comes back."""

    def __init__(self, workers: Sequence[_Worker], jobs: Sequence[Job], progress: Progress) -> None:
        self._workers = workers
        self._todo = list(enumerate(jobs))[::-1]
        self._progress = progress
        self._results: dict[int, Result] = {}
        self._n_jobs = len(jobs)

    def run(self) -> list[Result]:
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.output, selectors.EVENT_READ, worker)
                self._next(worker)
            while len(self._results) < self._n_jobs:
                for key, _ in selector.select():
                    for message in key.data.messages():
                        self._take(key.data, message)
        return [self._results[index] for index in range(self._n_jobs)]

    def _take(self, worker: _Worker, message: Any) -> None:
        if isinstance(message, int):
            self._progress(message)
        elif isinstance(message, str):
            raise ConfigError(message)
        else:
            assert worker.job is not None
            self._results[worker.job] = Result(*message)
            self._next(worker)

    def _next(self, worker: _Worker) -> None:
        worker.job = None
        if self._todo:
            worker.job, job = self._todo.pop()
            worker.send(job)


class _Worker:
    """One process and the lines that it writes."""

    def __init__(self, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        assert process.stdout is not None
        self._process = process
        self._errors = errors
        self.output = process.stdout
        self.job: int | None = None
        self._rest = b""

    def send(self, job: Job) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its output ends, too, which says more
            self._process.stdin.write(json.dumps(job).encode() + b"\n")

    def messages(self) -> Iterator[Any]:
        """What has come since; to be called when there is something to read."""
        data = os.read(self.output.fileno(), 1 << 16)
        if not data:
            code = self._process.wait()
            self._errors.seek(0)
            sys.stderr.write(self._errors.read().decode(errors="replace"))  # a bug: its traceback is what helps
            raise WorkerError(f"a worker process ended with exit code {code}")
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line)


@contextlib.contextmanager
def _worker(path: str) -> Iterator[_Worker]:
    command = [sys.executable, "-m", "tierkv.cli._tune_jobs", path]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(  # noqa: S603 - this very interpreter and module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0
        ) as process,
    ):
        try:
            yield _Worker(process, errors)
        finally:
            process.kill()


def save(trace: Trace, file: IO[bytes]) -> None:
    """Write a trace as its arrays are in memory, for :func:`load` on the same machine."""
    arrays = [getattr(trace, name) for name in _ARRAYS]
    sizes = [len(each) for each in arrays]
    file.write(json.dumps([trace.header, trace.n_unique, sizes]).encode() + b"\n")
    for each in arrays:
        file.write(each.tobytes())
    file.flush()


def load(path: str) -> Trace:
    """What :func:`save` wrote."""
    with open(path, "rb") as file:
        header, n_unique, sizes = json.loads(file.readline())
        trace = Trace(Header(*header), n_unique=n_unique)
        for name, size in zip(_ARRAYS, sizes, strict=True):
            values: array[Any] = getattr(trace, name)
            values.fromfile(file, size)
    return trace


def main() -> int:
    """A worker's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends its workers itself

    def send(message: object) -> None:
        os.write(1, json.dumps(message).encode() + b"\n")

    try:
        trace = load(sys.argv[1])
        for line in sys.stdin:
            send(list(replay(trace, Job(*json.loads(line)), send)))
    except ConfigError as error:
        send(str(error))
    except BrokenPipeError:
        return 1  # the command is gone
    return 0


if __name__ == "__main__":
    sys.exit(main())
