"""Slabs, or halves of one, that were given up and could not be removed: charged, and tried again."""

from __future__ import annotations

import threading

from tierkv.tiers._fs.books import Books
from tierkv.tiers._fs.slab_files import SlabFiles


class Remains:
    """What is left of slabs, by owner and slot bytes. See the module.

    Concurrency: any thread. Who makes a slab of a name anew keeps the others from removing what is left under it.
    """

    def __init__(self, files: SlabFiles, books: Books) -> None:
        self._files = files
        self._books = books
        self._lock = threading.Lock()
        self._nbytes: dict[tuple[str, int], int] = {}

    def __contains__(self, slab: tuple[str, int]) -> bool:
        return slab in self._nbytes

    def of(self, owner: str) -> dict[int, int]:
        """What is left of an owner's slabs in bytes, by their slot bytes."""
        with self._lock:
            return {slot_nbytes: n for (its_owner, slot_nbytes), n in self._nbytes.items() if its_owner == owner}

    def remove(self, owner: str, slot_nbytes: int) -> None:
        """Remove a slab's files. What stays counts for as long as it lies there, or until it is a slab again."""
        with self._lock:
            left_nbytes = self._files.remove(owner, slot_nbytes)
            self._books.add_fixed((left_nbytes or 0) - self._nbytes.pop((owner, slot_nbytes), 0))
            if left_nbytes is not None:
                self._nbytes[owner, slot_nbytes] = left_nbytes

    def forget(self, owner: str, slot_nbytes: int | None = None) -> None:
        """It is a slab again; or all of this owner's is counted elsewhere."""
        lengths = self.of(owner) if slot_nbytes is None else (slot_nbytes,)
        with self._lock:
            self._books.add_fixed(-sum(self._nbytes.pop((owner, length), 0) for length in lengths))

    def retry(self) -> None:
        """Try to remove all of it."""
        for which in list(self._nbytes):
            self.remove(*which)
