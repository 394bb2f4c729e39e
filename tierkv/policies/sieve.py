"""SIEVE: a queue that is never reordered, and a hand that passes over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf

from tierkv.policies._laps import LAP, Laps
from tierkv.policies._stamp_heap import Item
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
        self._catch_up()
        now, later, aside = self._now, self._later, self._aside
        for chunk in reversed(chunks):
            key = chunk.key
            if key not in now and key not in later and key not in aside:
                self._place += 1
                now[key] = Item(key, self._lap + self._place)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        now, later, aside = self._now, self._later, self._aside
        place_of_hand = self._hand % LAP
        lap = self._hand - place_of_hand
        for chunk in chunks:
            key = chunk[0]  # by number: every access comes by, and a name takes twice as long
            item = now.get(key) or later.get(key) or aside.get(key)
            if item is not None:
                place = item.stamp % LAP
                item.stamp = lap + place + (LAP if place > place_of_hand else 2 * LAP)

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        item = self._now.pop(key, None) or self._later.pop(key, None) or self._aside.pop(key, None)
        if item is None:
            return
        self._heap.drop(item)
        if evicted and item.stamp > self._hand:
            self._hand = item.stamp

    def victims(self) -> Iterator[ChunkKey]:
        """Every resident key in the order in which the hand would take them, less what is held. Lazy."""
        turn = self._heap.begin()
        self._move()
        aside, prefix = self._heap.entries, self._passed
        end = self._lap
        for lines in ((self._now,), (self._later, self._now), (self._later, self._now)):
            begin, end = end, end + LAP
            for line in lines:
                for item in line.values():
                    if item.held:
                        self._met.append(item)
                    elif begin <= item.stamp < end:
                        prefix = []  # beyond somebody who stays for now, nobody has been passed
                        while aside and (early := self._heap.take(item.stamp)) is not None:
                            yield early.key
                            self._heap.check(turn)
                        yield item.key
                        self._heap.check(turn)
                    elif line is self._now:
                        prefix.append(item)
        while (early := self._heap.take(inf)) is not None:
            yield early.key
            self._heap.check(turn)

    def evict(self, n_chunks: int) -> list[ChunkKey]:
        """Forget the ``n_chunks`` that :meth:`victims` would name first; their keys, in order."""
        gone: list[ChunkKey] = []
        self._heap.begin()
        self._move()
        now, end = self._now, self._lap + LAP
        while now and len(gone) < n_chunks and not self._heap.entries:
            key, item = now.popitem(last=False)
            if item.held:
                self._aside[key] = item
            elif item.stamp >= end:
                self._later[key] = item
            else:
                self._hand = item.stamp
                gone.append(key)
        if len(gone) < n_chunks:
            for key in list(islice(self.victims(), n_chunks - len(gone))):
                self.on_remove(key, evicted=True)
                gone.append(key)
        return gone
