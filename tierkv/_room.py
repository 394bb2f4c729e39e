"""How the primary gets room for what is offered or promoted: who may leave for it, and who leaves.

A part of :class:`~tierkv._hierarchy.Hierarchy`, which is the one to import.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from tierkv._entry import Columns, Entry
from tierkv._flow import NOTHING, PATIENCE, SLICE, Flow
from tierkv._level import LevelPlan
from tierkv.types import Chunk, ChunkKey, Reason

_NBYTES: Final = 4
"""Field of a chunk by number, which costs half of what a name does; ``test_fields_by_number`` holds it right."""
_MOST_AHEAD, _AHEAD_SHIFT = 64, 10
"""An eviction frees up to 64 slots ahead of need, but no more than a thousandth (2**-10) of the pool."""


class Room(Flow):
    """The part of :class:`~tierkv._hierarchy.Hierarchy` that finds slots."""

    def __init__(self, plans: Sequence[LevelPlan], *, evicts_ahead: bool = True, **options: bool) -> None:
        super().__init__(plans, **options)
        plan = plans[0]
        self._slot_nbytes = plan.slot_nbytes
        self._undemanding = plan.admission is None and not self.levels[0].demotes
        """The primary takes whoever comes, and who leaves it leaves no copy: a free slot is all that an offer needs."""
        self._get = self.primary.get
        self._free_slots, self._spare = self.primary.free_slots
        self._counts = self.levels[0].counts
        self._n_ahead = min(_MOST_AHEAD, (plan.n_slots or 0) >> _AHEAD_SHIFT) if evicts_ahead else 0

    def offer_new(self, chunks: Sequence[Chunk], shielded: Collection[ChunkKey] = NOTHING) -> list[Entry] | None:
        """:meth:`~tierkv._hierarchy.Hierarchy.offer` where all chunks are new and go in: the usual case, cheaply.

        ``chunks`` are in the order of their end tokens. None: it is another case. Nothing is reserved or counted as
        offered then, but some may have been evicted to make room.
        """
        if not (chunks and self._undemanding):
            return None
        n_chunks, primary = len(chunks), self.primary
        if n_chunks == 1:
            entry = self.offer_one(chunks[0], shielded)
            return None if entry is None else [entry]
        longest_nbytes = max([chunk[_NBYTES] for chunk in chunks])
        if not primary.lacks({chunk[0] for chunk in chunks}, n_chunks):
            return None
        n_short = n_chunks - len(self._free_slots) - len(self._spare)
        if longest_nbytes > self._slot_nbytes or (
            n_short > 0 and not self._make_way(n_short, shielded, self._spared(chunks, chunks))
        ):
            return None
        self._counts.offered += n_chunks
        return primary.reserve(chunks)

    def offer_columns(self, columns: Columns, shielded: Collection[ChunkKey]) -> list[Entry] | None:
        """:meth:`offer_new` for chunks by column, all of them different."""
        keys, get = columns.keys, self._get
        n_chunks = len(keys)
        if not self._undemanding or columns.kind.nbytes > self._slot_nbytes or any(map(get, keys)):
            return None
        n_short = n_chunks - len(self._free_slots) - len(self._spare)
        if n_short > 0:
            before = get(columns.parent) if columns.parent is not None else None
            if not self._make_way(n_short, shielded, () if before is None else (before,)):
                return None
        self._counts.offered += n_chunks
        return self.primary.reserve_columns(columns)

    def offer_one(self, chunk: Chunk, shielded: Collection[ChunkKey]) -> Entry | None:
        """:meth:`offer_new` for one chunk: what a request in pieces of 1 pays each time."""
        if not self._undemanding or self._get(chunk[0]) is not None or chunk[_NBYTES] > self._slot_nbytes:
            return None
        if not (self._spare or self._free_slots or self._make_way(1, shielded, self._spared((chunk,), (chunk,)))):
            return None
        self._counts.offered += 1
        return self.primary.reserve_one(chunk)

    def _make_way(self, n_short: int, shielded: Collection[ChunkKey], spared: Iterable[Entry]) -> bool:
        """Evict those in the way of new chunks, and a few ahead of need. False: not enough may leave at once."""
        if shielded or self.guarded:
            return False
        gone = self.primary.evict(max(n_short, self._n_ahead), spared)
        if gone is None:
            return False
        self._evicted(self.levels[0], gone)
        return len(gone) >= n_short

    def _sift(self, chunks: Sequence[Chunk]) -> tuple[list[Entry], list[tuple[Chunk, Reason]], list[Chunk]]:
        """Which of the chunks are here, which may not enter, and which want room, each of those once."""
        level, get, admits = self.levels[0], self.primary.get, self.primary.admits
        slot_nbytes, everybody = self._slot_nbytes, level.plan.admission is None
        present: list[Entry] = []
        refused: list[tuple[Chunk, Reason]] = []
        fresh: dict[ChunkKey, Chunk] = {}
        for chunk in chunks:
            key = chunk[0]  # by number: every chunk that vLLM offers comes by
            entry = get(key)
            if entry is not None and self.primary.expired(entry) and not entry.holds:
                self._leave(level, entry, Reason.EXPIRED)
                entry = None
            if entry is not None:
                present.append(entry)
            elif key in fresh:
                continue
            elif chunk[_NBYTES] > slot_nbytes:
                refused.append((chunk, Reason.TOO_LARGE))
            elif not (everybody or admits(chunk)):
                refused.append((chunk, Reason.NOT_ADMITTED))
            else:
                fresh[key] = chunk
        return present, refused, list(fresh.values())

    def _take_primary(
        self, wanted: Sequence[Chunk], request: Sequence[Chunk], shielded: Collection[ChunkKey]
    ) -> list[Entry]:
        """Reserve slots for the leading part, evicting what may leave at once, but nothing of ``request`` itself."""
        level = self.levels[0]
        slot_nbytes = level.plan.slot_nbytes
        short = len(wanted) * slot_nbytes - self.primary.free_nbytes
        if short <= 0:
            return self.primary.reserve(wanted)
        droppable = self._droppable(level)
        everybody = droppable is None and not shielded and not self.guarded
        protect: set[ChunkKey | None] = set()
        gone = None
        if everybody:
            n_slots = max(-(-short // slot_nbytes), self._n_ahead)
            gone = self.primary.evict(n_slots, self._spared(wanted, request))
        if gone is not None:
            self._evicted(level, gone)
        else:
            protect = {chunk.key for chunk in request}
            protect.update([chunk.parent for chunk in wanted])
            accept = None if everybody else self._may_leave(droppable, shielded)
            self._evict(level, self.primary.victims(accept, protect, short))
        reserved = self.primary.reserve(wanted)
        if level.demotes and len(reserved) < len(wanted):
            # Leaving takes a copy here: start it for those who will ask again.
            short = (len(wanted) - len(reserved)) * slot_nbytes - level.demoting_nbytes
            self._make_room(level, short, protect.union(shielded), at_most=SLICE)
            # Where the level below takes nothing, whoever was to be copied has left instead.
            reserved += self.primary.reserve(wanted[len(reserved) :])
        return reserved

    def _may_leave(
        self, droppable: Callable[[Entry], bool] | None, shielded: Collection[ChunkKey]
    ) -> Callable[[Entry], bool | None]:
        """Who may leave the primary at once; None once enough of those who must be copied first have been met."""
        guarded, patience = self.guarded, PATIENCE

        def may_leave(entry: Entry) -> bool | None:
            nonlocal patience
            if entry.key in shielded or entry.key in guarded:
                return False
            if droppable is None or droppable(entry):
                return True
            patience -= 1
            return False if patience else None

        return may_leave

    def _spared(self, wanted: Sequence[Chunk], request: Sequence[Chunk]) -> list[Entry]:
        """Entries that must stay: those of ``request``, and the parents of ``wanted``, which are its absent chunks."""
        keys: list[ChunkKey | None] = [] if len(wanted) == len(request) else [chunk.key for chunk in request]
        before: ChunkKey | None = None
        for chunk in wanted:
            if chunk[1] is not before:  # which is absent as well
                keys.append(chunk[1])
            before = chunk[0]
        get = self.primary.get
        return [entry for key in dict.fromkeys(keys) if key is not None and (entry := get(key)) is not None]
