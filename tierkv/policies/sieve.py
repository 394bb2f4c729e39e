"""SIEVE: a queue that is never reordered, and a hand that passes over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf

from tierkv.policies._laps import LAP, Laps, Place
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
        if self._hand % LAP >= self._place:
            # The hand has taken the newest chunk: it goes on at the oldest, and to what is new after that.
            self._hand += LAP - self._place
        if self._hand >= self._lap + LAP:
            self._catch_up()
        items, now = self._items, self._now
        for chunk in reversed(chunks):
            key = chunk[0]  # by number, here and below: every access comes by, and a name takes twice as long
            if key not in items:
                self._place += 1
                items[key] = item = Place(key, self._lap, self._place)
                now.append(item)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        get = self._items.get
        number_of_hand = self._hand % LAP
        next_lap = self._hand - number_of_hand + LAP
        for chunk in chunks:
            item = get(chunk[0])
            if item is not None:
                number = item.number
                item.stamp = next_lap + number if number > number_of_hand else next_lap + LAP + number

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        item = self._items.pop(key, None)
        if item is None:
            return
        item.stands = False
        self._heap.drop(item)
        if evicted and item.stamp > self._hand:
            self._hand = item.stamp
        self._tidy()

    def victims(self) -> Iterator[ChunkKey]:
        """Every resident key in the order in which the hand would take them, less what is held. Lazy."""
        turn = self._heap.begin()
        self._catch_up()
        self._pass()
        aside, end = self._heap.entries, self._lap
        for lines in ((self._now,), (self._later, self._now), (self._later, self._now)):
            begin, end = end, end + LAP
            for line in lines:
                for item in line:
                    if item.stands and not item.held and begin <= item.stamp < end:
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
        if self._hand >= self._lap + LAP:
            self._catch_up()
        now, waiting = self._now, self._heap.entries
        while len(gone) < n_chunks and not waiting and self._pass():
            item = now.popleft()
            self._hand = item.stamp
            del self._items[item.key]
            gone.append(item.key)
        if len(gone) < n_chunks:
            for key in list(islice(self.victims(), n_chunks - len(gone))):
                self.on_remove(key, evicted=True)
                gone.append(key)
        return gone
