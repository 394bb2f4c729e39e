"""What this owner holds on the root, in bytes and by key, and how much more it may write. In memory only."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from tierkv.tiers._fs.format import PAGE_NBYTES
from tierkv.types import ChunkKey

_NUMBER_BITS: Final = 12
MAX_IDS: Final = 1 << _NUMBER_BITS
"""Owner ids that one process can hold: its own and those of dead owners."""
_NUMBER_MASK: Final = MAX_IDS - 1
_PAGES_BITS: Final = 32
_PAGES_MASK: Final = (1 << _PAGES_BITS) - 1
_SERIAL_BIT: Final = _NUMBER_BITS + _PAGES_BITS
_SERIAL_BITS: Final = 16
_SERIAL_MASK: Final = (1 << _SERIAL_BITS) - 1
_AT_BIT: Final = _SERIAL_BIT + _SERIAL_BITS
_KIND_MASK: Final = (1 << _SERIAL_BIT) - 1
_PLACE_BITS: Final = 34
"""A slot is told by 32 bits, and no place follows that of the last one."""


class Held(NamedTuple):
    """One chunk of ours: which of our owner ids it carries, what it occupies, and where."""

    number: int
    """Of the owner id; see ``Ownership.ids``."""
    nbytes: int
    at: int | None = None
    """Slot of the owner's slab whose slots have ``nbytes``; None for a file of its own."""
    serial: int = 0
    """Of the record: a chunk that was removed and written anew is another one, also in the same place."""


class Leaver(NamedTuple):
    """A file of ours that nobody alive can read (another namespace or format): the first to go for room.

    They sort by age.
    """

    mtime_ns: int
    namespace: str
    leaf: str
    """Empty for a slab's files, which lie beside the leaves."""
    name: str
    owner: str
    nbytes: int


class Books:
    """Every byte of this owner, counted before it is written and until after it is removed.

    So the sum is never below what lies on disk, at any instant. One integer a chunk: 10^6 of them take about 100 MB.

    Concurrency: any thread; ``lock`` is held for a few operations at a time, never during I/O.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.limit_nbytes = 0
        """Granted to this owner by the root; see owners.py."""
        self.fixed_nbytes = 0
        """Lock files of ours, and room for the index of a clean close."""
        self.adopting_nbytes = 0
        """Reserved by owners whose ids we took and whose files we have not counted yet."""
        self.idle_nbytes = 0
        """Slots of our slabs that have blocks and no chunk; never below that, at moments above."""
        self.leavers: deque[Leaver] = deque()
        self._records: dict[ChunkKey, int] = {}
        self._files_nbytes = 0
        self._leavers_nbytes = 0
        self._writing_nbytes = 0
        self._n_scans = 0
        self._gone: set[tuple[ChunkKey, str]] = set()
        self._moved: set[ChunkKey] = set()
        """Keys that got or lost a record, or their file, while a scan was under way, by others than the scan."""
        self._n_added = 0
        self.n_forgotten = 0
        """How often the removals during scans were forgotten: what was seen on the disk before that may be gone."""

    def __len__(self) -> int:
        return len(self._records)

    @property
    def used_nbytes(self) -> int:
        """Everything of ours, unfinished files included; never less than what lies on disk."""
        return self.counted_nbytes + self.adopting_nbytes

    @property
    def counted_nbytes(self) -> int:
        """As ``used_nbytes``, without the estimate for files that a scan has yet to count."""
        return self._occupied_nbytes + self.idle_nbytes

    @property
    def _occupied_nbytes(self) -> int:
        return self.fixed_nbytes + self._files_nbytes + self._leavers_nbytes + self._writing_nbytes

    @property
    def chunks_nbytes(self) -> int:
        """Whole chunks of our namespace."""
        return self._files_nbytes

    def get(self, key: ChunkKey) -> Held | None:
        packed = self._records.get(key)
        if packed is None:
            return None
        at = (packed >> _AT_BIT) - 1
        serial = packed >> _SERIAL_BIT & _SERIAL_MASK
        return Held(packed & _NUMBER_MASK, _pages(packed) * PAGE_NBYTES, None if at < 0 else at, serial)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._records

    def place(self, key: ChunkKey) -> int:
        """A number for where a chunk lies in our slabs, whose neighbour has the next; 0 if it does not. See ``at``."""
        packed = self._records.get(key, 0)
        at = packed >> _AT_BIT
        return (packed & _KIND_MASK) << _PLACE_BITS | at if at else 0

    @staticmethod
    def at(place: int) -> Held:
        """What ``place`` means, without the serial."""
        kind = place >> _PLACE_BITS
        return Held(kind & _NUMBER_MASK, _pages(kind) * PAGE_NBYTES, (place & (1 << _PLACE_BITS) - 1) - 1)

    def keys(self) -> list[ChunkKey]:
        """A copy, oldest entry first."""
        with self.lock:
            return list(self._records)

    def numbers(self) -> set[int]:
        """Of the owner ids that some chunk carries."""
        with self.lock:
            return {packed & _NUMBER_MASK for packed in self._records.values()}

    def start_write(self, nbytes: int) -> bool:
        """Charge a file before it is created; False (and nothing charged) if it does not fit."""
        with self.lock:
            if self.used_nbytes + nbytes > self.limit_nbytes:
                return False
            self._writing_nbytes += nbytes
            return True

    def fits(self, nbytes: int) -> bool:
        """Whether chunks may take so much more, idle slots among it."""
        with self.lock:
            return self._occupied_nbytes + self.adopting_nbytes + nbytes <= self.limit_nbytes

    def start_growth(self, n_slots: int, slot_nbytes: int) -> int:
        """Charge up to so many slots, as idle ones, before they get blocks. Returns how many fit."""
        with self.lock:
            n_slots = max(0, min(n_slots, (self.limit_nbytes - self.used_nbytes) // slot_nbytes))
            self.idle_nbytes += n_slots * slot_nbytes
            return n_slots

    def add_idle(self, nbytes: int) -> None:
        """Slots have become idle, or (negative) have lost their blocks."""
        with self.lock:
            self.idle_nbytes += nbytes

    def add_fixed(self, nbytes: int) -> None:
        """Bytes that are no chunk's, or (negative) are no longer there."""
        with self.lock:
            self.fixed_nbytes += nbytes

    def start_slots(self, nbytes: int) -> None:
        """Idle slots are being written."""
        with self.lock:
            self.idle_nbytes -= nbytes
            self._writing_nbytes += nbytes

    def grow_by_at_most(self, nbytes: int) -> None:
        """The file system gives us no more than this beyond what we hold, until the limit is decided anew."""
        with self.lock:
            self.limit_nbytes = min(self.limit_nbytes, self.used_nbytes + nbytes)

    def abort_write(self, nbytes: int) -> None:
        """The unfinished file is gone, or its slot idle again; or an earlier copy that ``end_write`` returned."""
        with self.lock:
            self._writing_nbytes -= nbytes

    def end_write(self, key: ChunkKey, number: int, owner: str, nbytes: int, at: int | None = None) -> Held | None:
        """The chunk is whole. Returns the key's earlier copy, charged on until ``abort_write`` of its bytes."""
        with self.lock:
            self._note(key)
            replaced = self._drop(key)
            self._writing_nbytes += (0 if replaced is None else replaced.nbytes) - nbytes
            self._add(key, number, nbytes, at)
            self._gone.discard((key, owner))
            return replaced

    def end_writes(
        self, keys: Sequence[ChunkKey], number: int, owner: str, nbytes: int, at: Iterable[int]
    ) -> list[Held | None]:
        """As ``end_write`` for each key, in slots of ``nbytes``."""
        with self.lock:
            replaced = [self._drop(key) for key in keys]
            for key, its_at in zip(keys, at, strict=True):
                self._note(key)
                self._add(key, number, nbytes, its_at)
                self._gone.discard((key, owner))
            self._writing_nbytes += sum(old.nbytes for old in replaced if old is not None) - len(keys) * nbytes
            return replaced

    def add(
        self, key: ChunkKey, number: int, owner: str, nbytes: int, at: int | None = None, *, seen: int
    ) -> Held | None:
        """Count a file that was found. Returns what the key is held as now: an earlier file stays in charge.

        None if that file was removed since the scan that is under way began: it may have been listed before. Or if
        nobody knows, as ``n_forgotten`` is no longer what it was before the file was ``seen``.
        """
        with self.lock:
            if seen != self.n_forgotten and key not in self._records:
                return None
            self._note(key)
            return self._found(key, number, owner, nbytes, at)

    def add_all(self, files: Iterable[tuple[ChunkKey, int, str, int, int | None]]) -> list[bool]:
        """As ``add`` for many (key, number, owner, nbytes, at): whether each is counted now."""
        with self.lock:
            return [self._found(*file) is not None for file in files]

    def add_fresh(
        self, keys: Sequence[ChunkKey], numbers: Sequence[int], pages: Sequence[int], ats: Sequence[int | None]
    ) -> bool:
        """Count chunks that were found, all at once; False, and none counted, if there is anything to say about one."""
        with self.lock:
            new = set(keys)
            if len(new) != len(keys) or not new.isdisjoint(self._moved) or not self._records.keys().isdisjoint(new):
                return False
            self._n_added += 1  # one serial for all: it tells a record from an earlier one of the same key
            places = list(zip(numbers, pages, strict=True))
            packed = {place: self._packed(place[0], place[1] * PAGE_NBYTES, None) for place in set(places)}
            values: Iterable[int] = map(packed.__getitem__, places)  # the same integer for all that lie in files
            if ats.count(None) < len(ats):
                values = (v if at is None else at + 1 << _AT_BIT | v for v, at in zip(values, ats, strict=True))
            self._records.update(zip(keys, values, strict=True))
            self._files_nbytes += sum(pages) * PAGE_NBYTES
            return True

    def drop(self, key: ChunkKey, owner: str, only: Held | None = None) -> Held | None:
        """The key's chunk is gone. Returns what it was, None if unknown, or if it is not ``only`` but a newer one."""
        with self.lock:
            held = self._drop(key) if only is None or self.get(key) == only else None
            if held is not None:
                self._note(key, gone_from=owner)
            return held

    def set_aside(self, key: ChunkKey, owner: str, only: Held, nbytes: int) -> bool:
        """As ``drop``, of what is no chunk and stays where it is: it counts as fixed, with what it occupies."""
        with self.lock:
            if self.get(key) != only:
                return False
            self._drop(key)
            self._note(key, gone_from=owner)
            self.fixed_nbytes += nbytes
            return True

    def claim(self, key: ChunkKey, owner: str) -> bool:
        """Before a file that no record knows is removed: False if somebody found and counted it meanwhile."""
        with self.lock:
            if key in self._records:
                return False
            self._note(key, gone_from=owner)
            return True

    def disclaim(self, key: ChunkKey, owner: str) -> None:
        """What was claimed stays after all."""
        with self.lock:
            self._gone.discard((key, owner))

    def weigh(self) -> tuple[int, set[ChunkKey]]:
        """``counted_nbytes``, and what got or lost a record since the scans under way began, as of one instant."""
        with self.lock:
            return self.counted_nbytes, set(self._moved)

    def is_gone(self, key: ChunkKey, owner: str) -> bool:
        """Whether an owner's chunk was removed while a scan was under way."""
        return (key, owner) in self._gone

    @property
    def is_scanning(self) -> bool:
        """True while there may be files of ours that have no record yet."""
        return self._n_scans > 0

    def begin_scan(self) -> None:
        with self.lock:
            self._n_scans += 1

    def end_scan(self, adopted_nbytes: int) -> None:
        """The files behind ``adopted_nbytes`` of ``adopting_nbytes`` have all been counted."""
        with self.lock:
            self._n_scans -= 1
            self.adopting_nbytes -= adopted_nbytes
            if not self._n_scans:
                self._gone.clear()
                self._moved.clear()
                self.n_forgotten += 1

    def add_leaver(self, leaver: Leaver, *, first: bool = False) -> None:
        with self.lock:
            if first:
                self.leavers.appendleft(leaver)
            else:
                self.leavers.append(leaver)
            self._leavers_nbytes += leaver.nbytes

    def drop_leaver(self, leaver: Leaver) -> None:
        """Its file is gone; the caller took it from ``leavers``."""
        with self.lock:
            self._leavers_nbytes -= leaver.nbytes

    def check(self) -> None:
        """Recount. Asserts what the other methods keep true."""
        with self.lock:
            pages = sum(map(_pages, self._records.values()))
            assert pages * PAGE_NBYTES == self._files_nbytes
            assert sum(leaver.nbytes for leaver in self.leavers) == self._leavers_nbytes
            assert self._writing_nbytes >= 0 and self.idle_nbytes >= 0

    def _note(self, key: ChunkKey, *, gone_from: str | None = None) -> None:
        """For the scans that are under way: what they have listed of this key is no longer news."""
        if self._n_scans:
            self._moved.add(key)
            if gone_from is not None:
                self._gone.add((key, gone_from))

    def _found(self, key: ChunkKey, number: int, owner: str, nbytes: int, at: int | None) -> Held | None:
        if self._gone and (key, owner) in self._gone:
            return None
        if key not in self._records:
            self._add(key, number, nbytes, at)
        return self.get(key)

    def _add(self, key: ChunkKey, number: int, nbytes: int, at: int | None) -> None:
        self._n_added += 1
        self._records[key] = self._packed(number, nbytes, at)
        self._files_nbytes += nbytes

    def _packed(self, number: int, nbytes: int, at: int | None) -> int:
        place = 0 if at is None else at + 1
        serial = self._n_added & _SERIAL_MASK
        return place << _AT_BIT | serial << _SERIAL_BIT | nbytes // PAGE_NBYTES << _NUMBER_BITS | number

    def _drop(self, key: ChunkKey) -> Held | None:
        held = self.get(key)
        if held is not None:
            del self._records[key]
            self._files_nbytes -= held.nbytes
        return held


def _pages(packed: int) -> int:
    return packed >> _NUMBER_BITS & _PAGES_MASK
