"""A root as it is after each single change that the tiers of this process make to it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.fs_kit import recount
from tierkv.tiers._fs import holes as _holes
from tierkv.tiers._fs.page import OwnerPage

_CHANGING: Final = ("pwrite", "pwritev", "write", "writev", "ftruncate", "unlink", "rename")


class Instants:
    """Looks at a root after each call that changes a file, with all other such calls held back.

    So it sees every state that a kill could leave, or an outsider see, and none that never was: a sum of sizes that
    were read while others change them is no sum of one moment.

    Attributes:
        highest_nbytes: most bytes that there were at once.
        wrong: what was seen that must not be; the first of it says why.
    """

    def __init__(self, root: Path, capacity_nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.highest_nbytes = 0
        self.n_looks = 0
        self.wrong: list[str] = []
        self._root = root
        self._capacity_nbytes = capacity_nbytes
        self._lock = threading.RLock()
        for name in _CHANGING:
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))
        monkeypatch.setattr(_holes, "_fallocate", self._watched("fallocate", _holes._fallocate))

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **options: Any) -> Any:
            with self._lock:
                try:
                    return call(*args, **options)
                finally:
                    self._look(name)

        return change

    def _look(self, after: str) -> None:
        nbytes, reserved_nbytes = recount(self._root), reserved(self._root)
        self.n_looks += 1
        self.highest_nbytes = max(self.highest_nbytes, nbytes)
        if nbytes > self._capacity_nbytes:
            self.wrong.append(f"{nbytes} bytes after {after}, of {self._capacity_nbytes}")
        if nbytes > reserved_nbytes:
            self.wrong.append(f"{nbytes} bytes after {after}, and owners' pages say {reserved_nbytes}")


def reserved(root: Path) -> int:
    """What the pages of all owners, alive or dead, claim of a root."""
    pages = [OwnerPage.unpack(path.read_bytes()) for path in root.glob("owner-*.lock")]
    return sum(page.reserved_nbytes for page in pages if page is not None)
