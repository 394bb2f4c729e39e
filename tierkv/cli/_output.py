"""Standard output, whose faults are its own: a full disk behind it must not be taken for the disk of a root."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class OutputError(OSError):
    """Nothing more can be written to standard output, and somebody reads it still."""

    def __str__(self) -> str:
        return f"standard output cannot be written: {self.strerror}"


class _Output:
    """A stream that tells its own faults from all others. A reader that has gone is none: BrokenPipeError stays."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _told():
            return self._stream.write(text)

    def flush(self) -> None:
        with _told():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def output() -> Iterator[None]:
    """Raises OutputError where standard output cannot be written, at the latest at the end of the block."""
    stream = sys.stdout
    if stream is None:  # closed: commands do their work all the same
        yield
        return
    told = _Output(stream)
    with contextlib.redirect_stdout(cast("TextIO", told)):
        try:
            yield
        finally:
            told.flush()  # a full disk behind it, or a reader that has gone, shows here and not after us


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(*error.args) from None
