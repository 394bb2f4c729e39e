"""SIEVE: a queue that is never reordered, and a hand that passes over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf

from tierkv.policies._laps import Laps, Place
from tierkv.types import Chunk, ChunkKey


class SIEVE(Laps):
    """A hand passes over the queue from old to new; what was not used since the hand last came by leaves.

    A chunk's stamp is the lap and the place at which the hand will find it unused. A use puts that off to the lap after
    the one in which the hand comes by next. The order is that of the stamps, whatever is held on the way.

    What is new often leaves before what is used: good for web traces, bad for conversations. Parents play no part;
    wrap it in :class:`~tierkv.policies.LeafFirst`.

    Concurrency: one thread. Cost: amortised constant a chunk.

    Source: Zhang and others, "SIEVE is Simpler than LRU", NSDI 2024.
    """

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        if self._hand_number >= self._place:
            # The hand has taken the newest chunk: it goes on at the oldest, and to what is new after that.
            self._hand_lap, self._hand_number = self._hand_lap + 1, 0
        if self._lap < self._hand_lap:
            self._catch_up()
        items, now = self._items, self._now
        for chunk in reversed(chunks):
            key = chunk[0]  # by number, here and below: every access comes by, and a name takes twice as long
            if key not in items:
                self._place += 1
                items[key] = item = Place(key, self._lap, self._place)
                now.append(item)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        self.on_use([chunk[0] for chunk in chunks])

    def on_use(self, keys: Sequence[ChunkKey]) -> None:
        """All that a use says here."""
        get, number_of_hand, next_lap = self._items.get, self._hand_number, self._hand_lap + 1
        for key in keys:
            item = get(key)
            if item is not None:
                item.lap = next_lap if item.number > number_of_hand else next_lap + 1

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        item = self._items.pop(key, None)
        if item is None:
            return
        item.stands = False
        self._heap.drop(item)
        if evicted:
            self._move_hand(item)
        self._tidy()

    def victims(self) -> Iterator[ChunkKey]:
        """Every resident key in the order in which the hand would take them, less what is held. Lazy."""
        turn = self._heap.begin()
        self._catch_up()
        self._now.extendleft(self._meet(1))
        aside = self._heap.entries
        for lap, lines in enumerate(((self._now,), (self._later, self._now), (self._later, self._now)), self._lap):
            for line in lines:
                for item in line:
                    if item.stands and not item.held and item.lap == lap:
                        while aside and (early := self._heap.take(item.stamp)) is not None:
                            yield early.key
                            self._heap.check(turn)
                        yield item.key
                        self._heap.check(turn)
        while (early := self._heap.take(inf)) is not None:
            yield early.key
            self._heap.check(turn)

    def evict(self, n_chunks: int) -> list[ChunkKey]:
        """Forget the ``n_chunks`` that :meth:`victims` would name first; their keys, in order."""
        gone: list[ChunkKey] = []
        self._heap.begin()
        if self._lap < self._hand_lap:
            self._catch_up()
        if not self._heap.entries and (met := self._meet(n_chunks)):
            self._move_hand(met[-1])
            for item in met:
                del self._items[item.key]
                gone.append(item.key)
        if len(gone) < n_chunks:
            for key in list(islice(self.victims(), n_chunks - len(gone))):
                self.on_remove(key, evicted=True)
                gone.append(key)
        return gone

    def _move_hand(self, item: Place) -> None:
        """It has taken this one. It may be further on already, where somebody behind was taken out of turn."""
        if item.lap > self._hand_lap or (item.lap == self._hand_lap and item.number > self._hand_number):
            self._hand_lap, self._hand_number = item.lap, item.number
