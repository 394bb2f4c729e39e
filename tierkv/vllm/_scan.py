"""The lookups of one scheduler step: what was answered, what was reserved for it, and what a broken window gives back.

vLLM asks key by key, one request at a time, and again every step. Nothing of an answer may be taken back before the
step has ended, so every entry that was answered as present is shielded from eviction until then. What a request was
told to wait for becomes its lease at the end of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from tierkv._ledger import Entry
from tierkv.types import ChunkKey, Transfer
from tierkv.vllm._requests import Group, Request


class Answered(Collection[ChunkKey]):
    """Keys of the entries answered as present in this step; a set that is only built if somebody evicts."""

    __slots__ = ("_keys", "_n_keys", "entries")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._keys: set[ChunkKey] = set()
        self._n_keys = 0

    def __contains__(self, key: object) -> bool:
        if self._n_keys < len(self.entries):
            self._keys.update(entry.key for entry in self.entries[self._n_keys :])
            self._n_keys = len(self.entries)
        return key in self._keys

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter({entry.key for entry in self.entries})

    def __len__(self) -> int:
        return len(self.entries)

    def clear(self) -> None:
        self.entries.clear()
        self._keys.clear()
        self._n_keys = 0


class Reserved(NamedTuple):
    """A slot reserved by a lookup of this step, its read not yet handed over."""

    place: int
    """Where the entry lies in :attr:`Answered.entries`."""
    entry: Entry
    transfer: Transfer


class Scan:
    """The lookups of one request in one step, kept once one of them was deferred."""

    __slots__ = ("_void", "end", "request", "reserved", "start")

    def __init__(self, request: Request, start: int) -> None:
        self.request = request
        self.start = start
        self.end = start
        self.reserved: list[Reserved] = []
        self._void: list[tuple[int, int, int]] = []

    def break_window(self, group: Group, start: int, end: int) -> list[Reserved]:
        """A miss in a sliding-window group: what was answered since the last miss serves nothing.

        Returns:
            The reservations to give back: a window is reserved whole or not at all.
        """
        self._void.append((start, end, group.group_id))
        kept: list[Reserved] = []
        broken: list[Reserved] = []
        for reserved in self.reserved:
            (broken if self._is_void(reserved.place, reserved.entry) else kept).append(reserved)
        self.reserved = kept
        return broken

    def kept(self, answered: list[Entry]) -> list[Entry]:
        """The entries that the request waits for or will load: its lease."""
        if not self._void:
            return answered[self.start : self.end]
        places = range(self.start, self.end)
        return [answered[place] for place in places if not self._is_void(place, answered[place])]

    def _is_void(self, place: int, entry: Entry) -> bool:
        return any(start <= place < end and entry.group == group for start, end, group in self._void)
