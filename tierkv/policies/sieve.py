"""SIEVE: a queue that is never reordered, and a hand that passes over it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from math import inf

from tierkv.policies._stamp_heap import Item, StampHeap
from tierkv.types import Chunk, ChunkKey

_LAP = 1 << 48
"""A stamp is a lap of the hand and a place in the queue, in one number."""


class SIEVE:
    """A hand passes over the queue from old to new; what was not used since the hand last came by leaves.

    A chunk's stamp is the lap and the place at which the hand will find it unused. A use puts that off to the lap after
    the one in which the hand comes by next. The order is that of the stamps, whatever is held on the way.

    What is new often leaves before what is used: good for web traces, bad for conversations. Parents play no part;
    wrap it in :class:`~tierkv.policies.LeafFirst`.

    Concurrency: one thread. Cost: amortised constant a chunk.

    Source: Zhang and others, "SIEVE is Simpler than LRU", NSDI 2024.
    """

    def __init__(self) -> None:
        # A resident chunk is to be met in this lap, by place; or was passed over in it, by place; or is aside: it
        # was held when it was met. What is aside and held no more waits in the heap.
        self._now: OrderedDict[ChunkKey, Item] = OrderedDict()
        self._later: OrderedDict[ChunkKey, Item] = OrderedDict()
        self._aside: dict[ChunkKey, Item] = {}
        self._heap: StampHeap[Item] = StampHeap()
        # What the latest victims() passed over, and what it met held. It is moved when the next one begins.
        self._passed: list[Item] = []
        self._met: list[Item] = []
        self._lap = 0
        self._hand = 0  # the stamp of the latest chunk that it took
        self._place = 0

    def __len__(self) -> int:
        return len(self._now) + len(self._later) + len(self._aside)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)} resident>"

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        place_of_hand = self._hand % _LAP
        newest = (line[next(reversed(line))].stamp % _LAP for line in (self._now, self._later) if line)
        if max(newest, default=0) <= place_of_hand:
            # The hand has passed the newest chunk: it goes on at the oldest, and to what is new after that.
            self._hand += _LAP - place_of_hand
        self._catch_up()
        now, later, aside = self._now, self._later, self._aside
        for chunk in reversed(chunks):
            key = chunk.key
            if key not in now and key not in later and key not in aside:
                self._place += 1
                now[key] = Item(key, self._lap + self._place)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        now, later, aside = self._now, self._later, self._aside
        place_of_hand = self._hand % _LAP
        lap = self._hand - place_of_hand
        for chunk in chunks:
            key = chunk[0]  # by number: every access comes by, and a name takes twice as long
            item = now.get(key) or later.get(key) or aside.get(key)
            if item is not None:
                place = item.stamp % _LAP
                item.stamp = lap + place + (_LAP if place > place_of_hand else 2 * _LAP)

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        item = self._now.pop(key, None) or self._later.pop(key, None) or self._aside.pop(key, None)
        if item is None:
            return
        self._heap.drop(item)
        if evicted and item.stamp > self._hand:
            self._hand = item.stamp

    def hold(self, key: ChunkKey) -> None:
        item = self._find(key)
        if item is not None:
            item.held = True
            self._heap.drop(item)

    def release(self, key: ChunkKey) -> None:
        item = self._find(key)
        if item is not None:
            item.held = False
            if item.entry is None and key in self._aside:
                self._heap.add(item)

    def victims(self) -> Iterator[ChunkKey]:
        """Every resident key in the order in which the hand would take them, less what is held. Lazy."""
        turn = self._heap.begin()
        self._move()
        aside, prefix = self._heap.entries, self._passed
        end = self._lap
        for lines in ((self._now,), (self._later, self._now), (self._later, self._now)):
            begin, end = end, end + _LAP
            for line in lines:
                for item in line.values():
                    if item.held:
                        self._met.append(item)
                    elif begin <= item.stamp < end:
                        prefix = []  # beyond somebody who stays for now, nobody has been passed
                        while aside and (early := self._heap.take(item.stamp)) is not None:
                            yield early.key
                        yield item.key
                        self._heap.check(turn)
                    elif line is self._now:
                        prefix.append(item)
        while (early := self._heap.take(inf)) is not None:
            yield early.key

    def _find(self, key: ChunkKey) -> Item | None:
        return self._now.get(key) or self._later.get(key) or self._aside.get(key)

    def _move(self) -> None:
        """Make true what the latest iteration found."""
        passed, self._passed = self._passed, []
        for item in passed:
            if item.stamp >= self._lap + _LAP and self._now.get(item.key) is item:
                self._later[item.key] = self._now.pop(item.key)
        met, self._met = self._met, []
        for item in met:
            if item.held:
                self._set_aside(item)
        self._catch_up()

    def _catch_up(self) -> None:
        """Begin the hand's lap: who was passed is to be met again; who should have been taken comes before them."""
        while self._hand >= self._lap + _LAP:
            self._lap += _LAP
            self._passed = []  # passed in the lap that has ended
            for item in list(self._now.values()):
                if item.stamp < self._lap:
                    self._set_aside(item)
                else:
                    self._later[item.key] = item
            self._now, self._later = self._later, OrderedDict()

    def _set_aside(self, item: Item) -> None:
        line = self._now if item.key in self._now else self._later
        if line.get(item.key) is item:  # and not another one, stored since
            self._aside[item.key] = line.pop(item.key)
            if not item.held:
                self.release(item.key)
