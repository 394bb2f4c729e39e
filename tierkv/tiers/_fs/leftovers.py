"""Files of ours that should be gone and could not be removed: counted until they are, and tried again.

A write that fails half-way removes what it has made. Where the file system refuses that as well (it has turned
read-only, it answers EIO), the file stays: it takes space, so it is charged; nobody may find it, so no record names it.
"""

from __future__ import annotations

import os
import threading
from typing import Final, NamedTuple

from tierkv.tiers._fs.books import Books
from tierkv.tiers._fs.dirs import NotRegularError, open_directory, unlink

Names = tuple[str, ...]


class _Leftover(NamedTuple):
    leaf: str
    names: Names
    nbytes: int


class Leftovers:
    """What could not be removed from one namespace. See the module.

    Concurrency: any thread. ``settle`` and ``retry`` do I/O under a lock of their own, so that no file is removed that
    somebody has just written under the same name; whoever writes under other names never waits for it.
    """

    def __init__(self, namespace_fd: int, books: Books) -> None:
        self._namespace_fd: Final = namespace_fd
        self._books = books
        self._lock = threading.Lock()
        self._left: dict[str, _Leftover] = {}

    def __len__(self) -> int:
        return len(self._left)

    def add(self, leaf: str, name: str, names: Names, nbytes: int) -> None:
        """Charge a file that lies under the first of ``names`` that exists; ``name`` is the final name of its chunk."""
        with self._books.lock:
            self._books.fixed_nbytes += nbytes
        self._left[name] = _Leftover(leaf, names, nbytes)

    def settle(self, name: str) -> None:
        """Before a file of this final name is made: what was left under it must be gone. Raises OSError."""
        if name in self._left:
            with self._lock:
                self._remove(name)

    def retry(self) -> None:
        """Try to remove all of them; the first that still cannot be ends it, without an error."""
        while self._left:
            with self._lock:
                name = next(iter(self._left), None)
                if name is None:
                    return
                try:
                    self._remove(name)
                except OSError:
                    return

    def _remove(self, name: str) -> None:
        """Under the lock, which is held until the file has gone and its record with it."""
        left = self._left.get(name)
        if left is None:
            return
        try:
            leaf_fd = open_directory(left.leaf, self._namespace_fd)
        except (FileNotFoundError, NotRegularError):
            pass
        else:
            try:
                _unlink_first(left.names, leaf_fd)
            finally:
                os.close(leaf_fd)
        del self._left[name]
        with self._books.lock:
            self._books.fixed_nbytes -= left.nbytes


def _unlink_first(names: Names, dir_fd: int) -> None:
    for name in names:
        try:
            unlink(name, dir_fd)
        except FileNotFoundError:
            continue
        return
