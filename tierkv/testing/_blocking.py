"""Sees calls that would stop the event loop: file and network calls, sleeps, on the loop's own thread.

By audit hook, since that sees them however they were imported. A hook cannot be taken out again, so there is one, made
when it is first needed, which does nothing while nobody watches. Before Python 3.13 ``time.sleep`` is not audited, and
is replaced for the time being.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_BLOCKING: Final = frozenset(
    {
        "time.sleep", "open", "os.chmod", "os.fwalk", "os.link", "os.listdir", "os.mkdir", "os.remove", "os.rename",
        "os.rmdir", "os.scandir", "os.symlink", "os.truncate", "os.utime", "os.walk", "fcntl.flock", "fcntl.lockf",
        "shutil.copyfile", "shutil.move", "shutil.rmtree", "socket.connect", "socket.getaddrinfo",
        "socket.gethostbyname", "sqlite3.connect", "subprocess.Popen", "os.system", "urllib.Request",
    }
)  # fmt: skip

_watched: dict[int, list[str]] = {}
"""By thread: what it did while it was watched."""
_installed = False
_lock = threading.Lock()


@contextmanager
def blocking_calls() -> Iterator[list[str]]:
    """The blocking calls that this thread makes within the block, in a list that fills. Does not nest."""
    _install()
    me = threading.get_ident()
    seen: list[str] = []
    _watched[me] = seen
    sleep = time.sleep
    if sys.version_info < (3, 13):

        def audited(seconds: Any) -> None:
            _hook("time.sleep", (seconds,))
            sleep(seconds)

        time.sleep = audited
    try:
        yield seen
    finally:
        time.sleep = sleep
        del _watched[me]


def _install() -> None:
    global _installed  # noqa: PLW0603 - one hook a process; it cannot be taken out
    with _lock:
        if not _installed:
            sys.addaudithook(_hook)
            _installed = True


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched or event not in _BLOCKING:
        return
    seen = _watched.get(threading.get_ident())
    if seen is not None:
        seen.append(f"{event}({', '.join(map(repr, arguments[:1]))})")
