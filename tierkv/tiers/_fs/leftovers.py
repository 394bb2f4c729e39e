"""Files of ours that should be gone and could not be removed: counted until they are, and tried again.

A write that fails half-way removes what it has made, and whoever finds a file of ours that is no chunk removes that.
Where the file system refuses it (it has turned read-only, it answers EIO), the file stays: it takes space, so it is
charged; nobody may find it, so no record names it.
"""

from __future__ import annotations

import os
import threading
from typing import Final, NamedTuple

from tierkv.tiers._fs.books import Books
from tierkv.tiers._fs.dirs import NotRegularError, open_directory, unlink
from tierkv.tiers._fs.file_io import Identity, identity_of

Names = tuple[str, ...]


class _Leftover(NamedTuple):
    leaf: str
    names: Names
    nbytes: int
    identity: Identity | None


class Leftovers:
    """What could not be removed from one namespace. See the module.

    Concurrency: any thread. ``settle`` and ``retry`` do I/O under a lock of their own, so that no file is removed that
    somebody has just written under the same name; whoever writes under other names never waits for it.
    """

    def __init__(self, namespace_fd: int, books: Books) -> None:
        self._namespace_fd: Final = namespace_fd
        self._books = books
        self._lock = threading.Lock()
        # By the final name of the chunk, then by where each may lie.
        self._left: dict[str, dict[Names, _Leftover]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def add(
        self, leaf: str, name: str, names: Names, nbytes: int, *, identity: Identity | None = None,
        is_charged: bool = False,
    ) -> None:  # fmt: skip
        """Charge a file that lies under the first of ``names`` that exists; ``name`` is the final name of its chunk.

        Added again it counts once. With ``identity`` it is that file only: one that has replaced it is left alone. With
        ``is_charged`` the caller has charged it, as fixed.
        """
        with self._books.lock:
            left = self._left.setdefault(name, {})
            before = left.get(names)
            left[names] = _Leftover(leaf, names, nbytes, identity)
            more_nbytes = (0 if is_charged else nbytes) - (0 if before is None else before.nbytes)
            self._books.fixed_nbytes += more_nbytes

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
        """Under the lock, which is held until the files have gone and their records with them."""
        for left in list(self._left.get(name, {}).values()):
            try:
                leaf_fd = open_directory(left.leaf, self._namespace_fd)
            except (FileNotFoundError, NotRegularError):
                pass
            else:
                try:
                    _unlink_first(left.names, leaf_fd, left.identity)
                finally:
                    os.close(leaf_fd)
            self._forget(name, left)

    def _forget(self, name: str, left: _Leftover) -> None:
        with self._books.lock:
            now = self._left.get(name, {})
            if now.get(left.names) is left:
                del now[left.names]
                self._books.fixed_nbytes -= left.nbytes
                if not now:
                    del self._left[name]


def _unlink_first(names: Names, dir_fd: int, identity: Identity | None) -> None:
    for name in names:
        try:
            if identity is None or identity == identity_of(os.stat(name, dir_fd=dir_fd, follow_symlinks=False)):
                unlink(name, dir_fd)
        except FileNotFoundError:
            continue
        return
