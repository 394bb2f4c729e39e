"""Records requests as ``tierkv tune`` reads them: hashes of blocks, never a token. See :mod:`tierkv.traces`."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final

from tierkv.traces import Header, request_line

DEFAULT_LIMIT_NBYTES: Final = 256 << 20
"""Of what a recorder keeps: a million prompts of ten blocks, roughly."""
LEAST_LIMIT_NBYTES: Final = 1 << 20
_MOST_WAITING: Final = 1 << 18
"""Blocks that wait to be written: about 20 MB of keys."""
_GATHER_S: Final = 0.5
_CLOSING_S: Final = 2.0
_TAIL_NBYTES: Final = 1 << 20

_log = logging.getLogger(__name__)


class TraceRecorder:
    """Writes a line for each request to a file, on a thread of its own, within a limit.

    When the file has half of the limit it becomes ``path.1``, in place of an earlier one; ``tierkv tune path.1 path``
    reads both. A file of an earlier run with the same header is continued. Of a key a hash of 48 bits is written, so
    that equal blocks are equal in all files. The file has mode 0600 and one writer.

    Whatever goes wrong with the file, a full disk for example, ends the recording with one warning; nothing is raised.

    Args:
        path: the file; its directory must exist.
        header: what a block is.
        limit_nbytes: of both files together.
        clock: seconds since the epoch.

    Concurrency: :meth:`record` and :meth:`close` belong to one thread, and never wait for the file but for
    :meth:`close`, and that for two seconds.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: Header,
        *,
        limit_nbytes: int = DEFAULT_LIMIT_NBYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = os.path.expanduser(os.fspath(path))
        self.n_recorded = 0
        """Requests that were written."""
        self._clock = clock
        self._file = _TraceFile(self.path, header, limit_nbytes // 2)
        self._waiting: deque[tuple[float, int, Sequence[bytes]]] = deque()
        # Each is changed by one thread only.
        self._n_queued = self._n_refused = 0
        self._n_handled = self._n_lost = 0
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._failed = False
        self._thread: threading.Thread | None = None

    @property
    def n_dropped(self) -> int:
        """Requests that were not: too many waited, a line longer than a file may be, or the file failed."""
        return self._n_refused + self._n_lost

    def record(self, n_tokens: int, keys: Sequence[bytes]) -> bool:
        """Remember a request that has arrived now; False if it is dropped. Costs microseconds."""
        n_waiting = self._n_queued - self._n_handled
        if self._failed or self._closing.is_set() or n_waiting + len(keys) > _MOST_WAITING:
            self._n_refused += 1
            return False
        self._n_queued += len(keys)
        self._waiting.append((self._clock(), n_tokens, keys))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tierkv-trace", daemon=True)
            self._thread.start()
        self._wake.set()
        return True

    def close(self) -> None:
        """Write what waits, for two seconds at the most. Idempotent."""
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_CLOSING_S)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._wake.wait()
                self._wake.clear()
                self._write()
                # Gathers what comes meanwhile: seldom, since each time takes the interpreter from the scheduler.
                self._closing.wait(_GATHER_S)
            self._write()
        except Exception as error:  # noqa: BLE001 - a record is no reason to harm an engine
            self._failed = True
            self._n_lost += len(self._waiting) + 1
            self._waiting.clear()
            _log.warning("recording requests to %s has ended: %s", self.path, error)
        finally:
            self._file.close()

    def _write(self) -> None:
        while self._waiting:
            time_s, n_tokens, keys = self._waiting.popleft()
            if not self._closing.is_set():
                time.sleep(0)  # lets the scheduler have the interpreter between two requests
            written = self._file.append(time_s, n_tokens, [_hash(key) for key in keys])
            self._n_handled += len(keys)
            self.n_recorded += written
            self._n_lost += not written


def _hash(key: bytes) -> int:
    """48 bits, which every JSON reader keeps exactly."""
    return int.from_bytes(blake2b(key, digest_size=6).digest(), "big")


class _TraceFile:
    """The file of a recorder: whole lines, in the order of time, up to a size. Raises OSError."""

    def __init__(self, path: str, header: Header, limit_nbytes: int) -> None:
        self._path = path
        self._header = header.to_line()
        self._limit_nbytes = limit_nbytes
        self._fd = -1
        self._size = 0
        self._latest = 0

    def append(self, time_s: float, n_tokens: int, ids: Sequence[int]) -> bool:
        """False if the line alone is longer than a file may be."""
        if self._fd < 0:
            self._open()
        self._latest = max(self._latest, int(time_s * 1000))
        line = request_line(self._latest, n_tokens, ids)
        if len(self._header) + len(line) > self._limit_nbytes:
            return False
        if self._size + len(line) > self._limit_nbytes:
            self._rotate()
        self._put(line)
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        # Not blocking on a FIFO, not following a link that somebody has put there.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._fd = os.open(self._path, flags, 0o600)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(errno.EBUSY, "another process writes it") from None
        except OSError:
            pass  # a file system without locks
        os.fchmod(self._fd, 0o600)
        self._size = os.fstat(self._fd).st_size
        if self._size and not self._continue():
            self._rotate()
        elif not self._size:
            self._put(self._header)

    def _continue(self) -> bool:
        """Whether the lines that are there are of our kind; half a line, of a writer that was killed, is cut off."""
        if os.pread(self._fd, len(self._header), 0) != self._header:
            return False
        start = max(0, self._size - _TAIL_NBYTES)
        tail = os.pread(self._fd, _TAIL_NBYTES, start)
        end = tail.rfind(b"\n") + 1
        if not end:
            return False
        os.ftruncate(self._fd, start + end)
        self._size = start + end
        found = re.match(rb'{"timestamp": (\d{1,16}),', tail[tail.rfind(b"\n", 0, end - 1) + 1 : end])
        self._latest = int(found[1]) if found else 0
        return True

    def _rotate(self) -> None:
        os.replace(self._path, f"{self._path}.1")
        self.close()
        self._size = 0
        self._open()

    def _put(self, data: bytes) -> None:
        n_written = 0
        try:
            while n_written < len(data):
                n_written += os.write(self._fd, data[n_written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)  # no half a line
            raise
        self._size += len(data)
