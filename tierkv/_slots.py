"""The places of a slotted level: which are free, and how often each has been given out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tierkv._entry import PENDING, Entry
from tierkv.types import Chunk


class Slots:
    """Fixed places of one size. A slot's generation is the number of times that it has been given back.

    Args:
        n_slots: how many there are.
        slot_nbytes: bytes charged for each.
    """

    __slots__ = ("free", "generations", "slot_nbytes")

    def __init__(self, n_slots: int, slot_nbytes: int) -> None:
        self.slot_nbytes = slot_nbytes
        self.free = list(range(n_slots - 1, -1, -1))
        """The last is given out next."""
        self.generations = [0] * n_slots

    def fill(self, chunks: Sequence[Chunk]) -> list[Entry]:
        """``Entry(chunk, slot_nbytes, PENDING)`` in a slot for each leading chunk that finds one.

        One loop with everything in it: every chunk that vLLM offers comes by, and a constructor costs as much again.
        """
        make, pop, generations, nbytes = Entry.__new__, self.free.pop, self.generations, self.slot_nbytes
        entries: list[Entry] = []
        for chunk in chunks if len(chunks) <= len(self.free) else chunks[: len(self.free)]:
            entry = make(Entry)
            entry.key = chunk[0]
            entry.link = entry.heaped = None
            entry.stamp = entry.n_children = entry.holds = 0
            entry.held = entry.owned = entry.writing = True
            entry.queued = entry.stored = entry.promoted = entry.demote_refused = False
            entry.chunk = chunk
            entry.charge_nbytes = nbytes
            entry.state = PENDING
            entry.slot = slot = pop()
            entry.generation = generations[slot]
            entries.append(entry)
        return entries

    def give_back(self, entries: Iterable[Entry]) -> None:
        """Nothing touches these any more."""
        generations, append = self.generations, self.free.append
        for entry in entries:
            slot = entry.slot
            generations[slot] += 1
            append(slot)

    def check(self, entries: Sequence[Entry]) -> None:
        """``entries`` are all that are in slots, and each slot is in one place. For tests; O(n)."""
        used = [entry.slot for entry in entries]
        assert sorted(used + self.free) == list(range(len(self.generations))), "each slot is in one place"
        assert all(self.generations[entry.slot] == entry.generation for entry in entries)
