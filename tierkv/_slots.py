"""Entries for chunks that come in: in the places of a slotted level, or as many as fit into free bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tierkv._entry import OWNED, PENDING, WRITER, Columns, Entry, Kinds
from tierkv.types import Chunk


class Slots:
    """Fixed places of one size. A slot's generation is a number that rises with every call that gives slots out.

    Args:
        n_slots: how many there are.
        slot_nbytes: bytes charged for each.
    """

    __slots__ = ("free", "generation", "n_slots", "slot_nbytes", "spare")

    def __init__(self, n_slots: int, slot_nbytes: int) -> None:
        self.slot_nbytes = slot_nbytes
        self.free = list(range(n_slots - 1, -1, -1))
        """The last is given out next. The list stays the same object."""
        self.spare: list[Entry] = []
        """Evicted entries that are used again, slot and all: given out before ``free``, the last of them first. The
        list stays the same object."""
        self.n_slots = n_slots
        self.generation = 0
        """Of the slots that were given out last."""

    @property
    def lists(self) -> tuple[Sequence[int], Sequence[Entry]]:
        return self.free, self.spare

    @property
    def n_free(self) -> int:
        return len(self.free) + len(self.spare)

    def fill(self, columns: Columns) -> list[Entry]:
        """A PENDING entry in a slot for each leading chunk that finds one.

        One loop with everything in it: every chunk that vLLM offers comes by, and a constructor costs as much again.
        """
        keys, kind, n_chunks = columns.keys, columns.kind, len(columns.keys)
        self.generation = generation = self.generation + 1
        entries = self._take(n_chunks)
        pending, owned, writer = PENDING, OWNED, WRITER
        for entry, key, parent, end_token in zip(entries, keys, columns.parents(), columns.end_tokens, strict=False):
            entry.key = key
            entry.parent = parent
            entry.link = None
            entry.end_token = end_token
            entry.kind = kind
            entry.state = pending
            entry.flags = owned
            entry.holds = writer
            entry.generation = generation
        return entries

    def fill_each(self, chunks: Sequence[Chunk], kinds: Kinds) -> list[Entry]:
        """:meth:`fill` for chunks of any groups and kinds."""
        entries = [self.fill_one(chunk, kinds) for chunk in chunks[: self.n_free]]
        for entry in entries:
            entry.generation = self.generation  # one number for all of them
        return entries

    def fill_one(self, chunk: Chunk, kinds: Kinds) -> Entry:
        """:meth:`fill` for one chunk while a slot is free: what a request in pieces of 1 pays each time.

        The fields are written out again: a call that both made would cost many chunks half as much again.
        """
        key, parent, group, end_token, nbytes, tenant, partial = chunk
        entry = self.spare.pop() if self.spare else self._fresh()
        entry.key = key
        entry.parent = parent
        entry.link = None
        entry.end_token = end_token
        entry.kind = kinds.of((group, nbytes, tenant, partial))
        entry.state = PENDING
        entry.flags = OWNED
        entry.holds = WRITER
        self.generation = entry.generation = self.generation + 1
        return entry

    def _take(self, n_chunks: int) -> list[Entry]:
        """Entries without a chunk, in free slots: as many as wanted or as there are."""
        spare = self.spare
        entries = spare[: -n_chunks - 1 : -1]
        del spare[-n_chunks:]
        n_more = min(n_chunks - len(entries), len(self.free))
        if n_more:
            entries += [self._fresh() for _ in range(n_more)]
        return entries

    def _fresh(self) -> Entry:
        entry = Entry.__new__(Entry)
        entry.charge_nbytes = self.slot_nbytes
        entry.slot = self.free.pop()
        entry.stamp = entry.n_children = 0
        entry.heaped = None
        return entry

    def give_back(self, entries: Iterable[Entry]) -> None:
        """Free the slots of entries that nothing touches any more."""
        self.free += [entry.slot for entry in entries]

    def check(self, entries: Sequence[Entry]) -> None:
        """``entries`` are all that are in slots, and each slot is in one place. For tests; O(n)."""
        used = [entry.slot for entry in (*entries, *self.spare)]
        assert sorted(used + self.free) == list(range(self.n_slots)), "each slot is in one place"
        assert all(0 < entry.generation <= self.generation for entry in entries)
        for entry in self.spare:
            assert not (entry.stamp or entry.n_children or entry.holds) and entry.heaped is None, "nobody ranks it"
            assert entry.charge_nbytes == self.slot_nbytes


def fitting(chunks: Iterable[Chunk], free_nbytes: int, charge: Callable[[Chunk], int], kinds: Kinds) -> list[Entry]:
    """PENDING entries for the leading chunks that fit into the free bytes of a level without slots."""
    taken: list[Entry] = []
    nbytes, charge_nbytes = -1, 0
    for chunk in chunks:
        if chunk.nbytes != nbytes:  # mostly all are as long as the first, and to ask the tier is several calls
            nbytes, charge_nbytes = chunk.nbytes, charge(chunk)
        free_nbytes -= charge_nbytes
        if free_nbytes < 0:
            break
        taken.append(Entry(chunk, kinds.of_chunk(chunk), charge_nbytes, PENDING))
    return taken
