"""Entries for chunks that come in: in the places of a slotted level, or as many as fit into free bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tierkv._entry import PENDING, Entry
from tierkv.types import Chunk


class Slots:
    """Fixed places of one size. A slot's generation is a number that rises with every call that gives slots out.

    Args:
        n_slots: how many there are.
        slot_nbytes: bytes charged for each.
    """

    __slots__ = ("free", "generation", "n_slots", "slot_nbytes")

    def __init__(self, n_slots: int, slot_nbytes: int) -> None:
        self.slot_nbytes = slot_nbytes
        self.free = list(range(n_slots - 1, -1, -1))
        """The last is given out next. The list stays the same object."""
        self.n_slots = n_slots
        self.generation = 0
        """Of the slots that were given out last."""

    def fill(self, chunks: Sequence[Chunk]) -> list[Entry]:
        """``Entry(chunk, slot_nbytes, PENDING)`` in a slot for each leading chunk that finds one.

        One loop with everything in it: every chunk that vLLM offers comes by, and a constructor costs as much again.
        """
        make, pop, nbytes = Entry.__new__, self.free.pop, self.slot_nbytes
        self.generation = generation = self.generation + 1
        entries: list[Entry] = []
        for chunk in chunks if len(chunks) <= len(self.free) else chunks[: len(self.free)]:
            entry = make(Entry)
            entry.key = chunk[0]
            entry.link = entry.heaped = None
            entry.stamp = entry.n_children = entry.holds = 0
            entry.held = entry.owned = entry.writing = True
            entry.stored = entry.promoted = entry.demote_refused = False
            entry.chunk = chunk
            entry.charge_nbytes = nbytes
            entry.state = PENDING
            entry.slot = pop()
            entry.generation = generation
            entries.append(entry)
        return entries

    def fill_one(self, chunk: Chunk) -> Entry:
        """:meth:`fill` for one chunk while a slot is free: what a request in pieces of 1 pays each time."""
        entry = Entry.__new__(Entry)
        entry.key = chunk[0]
        entry.link = entry.heaped = None
        entry.stamp = entry.n_children = entry.holds = 0
        entry.held = entry.owned = entry.writing = True
        entry.stored = entry.promoted = entry.demote_refused = False
        entry.chunk = chunk
        entry.charge_nbytes = self.slot_nbytes
        entry.state = PENDING
        entry.slot = self.free.pop()
        self.generation = entry.generation = self.generation + 1
        return entry

    def give_back(self, entries: Iterable[Entry]) -> None:
        """Nothing touches these any more."""
        self.free += [entry.slot for entry in entries]

    def check(self, entries: Sequence[Entry]) -> None:
        """``entries`` are all that are in slots, and each slot is in one place. For tests; O(n)."""
        used = [entry.slot for entry in entries]
        assert sorted(used + self.free) == list(range(self.n_slots)), "each slot is in one place"
        assert all(0 < entry.generation <= self.generation for entry in entries)


def fitting(chunks: Iterable[Chunk], free_nbytes: int, charge: Callable[[Chunk], int]) -> list[Entry]:
    """PENDING entries for the leading chunks that fit into the free bytes of a level without slots."""
    taken: list[Entry] = []
    nbytes, charge_nbytes = -1, 0
    for chunk in chunks:
        if chunk.nbytes != nbytes:  # mostly all are as long as the first, and to ask the tier is several calls
            nbytes, charge_nbytes = chunk.nbytes, charge(chunk)
        free_nbytes -= charge_nbytes
        if free_nbytes < 0:
            break
        taken.append(Entry(chunk, charge_nbytes, PENDING))
    return taken
