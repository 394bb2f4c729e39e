"""A heap of resident chunks by stamp, of which the lowest is next to leave. What the orders' iterations rest on.

Stamps only rise while a chunk is in the heap, and nothing is moved when one does: the stamp that a chunk had when it
entered is a lower bound, and what comes to the top with an old one is put back with the right one.

Deterministic: equal stamps leave in the order in which they entered.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, Protocol, TypeVar

from tierkv.types import ChunkKey

_SLACK = 64
"""Outdated entries that are never worth a clean-up."""

Entry = list[Any]
"""``[stamp, number, item or None]``: mutable, since it is corrected, and compared in C. The number ends every tie."""


class Stamped(Protocol):
    """What can be in the heap."""

    heaped: Entry | None

    @property
    def stamp(self) -> int: ...


class Item:
    """A resident chunk."""

    __slots__ = ("heaped", "held", "key", "stamp")

    def __init__(self, key: ChunkKey, stamp: int) -> None:
        self.key = key
        self.stamp = stamp
        self.held = False
        self.heaped: Entry | None = None


T = TypeVar("T", bound=Stamped)


class StampHeap(Generic[T]):
    """Items by stamp. An iteration takes them off; they are back when the next one begins, unless they left."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        # Most of what an iteration took is about to be removed, so putting it back waits.
        self._taken: list[Entry] = []
        self._n_items = 0
        self._n_entries = 0
        self.turn = 0
        """Number of the latest iteration."""

    def add(self, item: T) -> None:
        """Let an item in that is not in."""
        if len(self.entries) > 2 * self._n_items + _SLACK:
            self._tidy()
        self._n_items += 1
        self._n_entries += 1
        item.heaped = [item.stamp, self._n_entries, item]
        heappush(self.entries, item.heaped)

    def drop(self, item: T) -> None:
        """Let an item go, if it is in."""
        if item.heaped is not None:
            self._n_items -= 1
            item.heaped[2] = None
            item.heaped = None

    def begin(self) -> int:
        """Begin an iteration: put back what the one before took and nobody removed. Returns its number."""
        if self._taken:
            taken, self._taken = self._taken, []
            for entry in taken:
                if entry[2] is not None:
                    entry[0] = entry[2].stamp
                    heappush(self.entries, entry)
        self.turn += 1
        return self.turn

    def check(self, turn: int) -> None:
        """Raise RuntimeError if a later iteration than ``turn`` has begun."""
        if turn != self.turn:
            msg = "victims() was called again while this iteration was open"
            raise RuntimeError(msg)

    def take(self, below: float) -> T | None:
        """Take off the item with the lowest stamp, if that is less than ``below``."""
        entries = self.entries
        n_outdated = 0
        while entries:
            entry = entries[0]
            item: T | None = entry[2]
            if item is not None and entry[0] == item.stamp:
                if entry[0] >= below:
                    return None
                self._taken.append(heappop(entries))
                return item
            n_outdated += 1
            if n_outdated > _SLACK + len(entries) // 16:
                self._tidy()
            elif item is not None:
                entry[0] = item.stamp
                heapreplace(entries, entry)
            else:
                heappop(entries)
        return None

    def _tidy(self) -> None:
        """Bring every entry up to date at once: when many are not, that is linear where one by one is not."""
        live = [entry for entry in self.entries if entry[2] is not None]
        for entry in live:
            entry[0] = entry[2].stamp
        heapify(live)
        self.entries[:] = live
