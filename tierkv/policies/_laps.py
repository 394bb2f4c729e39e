"""A queue that is passed over lap by lap: where the chunks of SIEVE stand."""

from __future__ import annotations

from collections import OrderedDict
from math import inf

from tierkv.policies._stamp_heap import Item, StampHeap
from tierkv.types import ChunkKey

LAP = 1 << 48
"""A stamp is a lap of the hand and a place in the queue, in one number."""


class Laps:
    """Chunks by stamp, each in one of three: to be met in this lap, or passed over in it, both by place; or aside.

    Keys that are not resident are ignored by every method. A hold is a flag, not a count.
    """

    def __init__(self) -> None:
        # Aside is what was held when it was met. What is held no more waits in the heap until it is used or leaves.
        self._now: OrderedDict[ChunkKey, Item] = OrderedDict()
        self._later: OrderedDict[ChunkKey, Item] = OrderedDict()
        self._aside: dict[ChunkKey, Item] = {}
        self._heap: StampHeap[Item] = StampHeap()
        # What the latest victims() passed over, and what it met held. It is moved when the next one begins.
        self._passed: list[Item] = []
        self._met: list[Item] = []
        self._lap = 0
        self._hand = 0  # the stamp of the latest chunk that it took
        self._place = 0  # of the newest chunk that ever came

    def __len__(self) -> int:
        return len(self._now) + len(self._later) + len(self._aside)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)} resident>"

    def hold(self, key: ChunkKey) -> None:
        item = self._find(key)
        if item is not None:
            item.held = True
            self._heap.drop(item)

    def release(self, key: ChunkKey) -> None:
        item = self._find(key)
        if item is not None:
            item.held = False
            if item.heaped is None and key in self._aside:
                self._heap.add(item)

    def _find(self, key: ChunkKey) -> Item | None:
        return self._now.get(key) or self._later.get(key) or self._aside.get(key)

    def _move(self) -> None:
        """Make true what the latest iteration found."""
        if self._passed or self._met:
            passed, self._passed, met, self._met = self._passed, [], self._met, []
            # One that was held when it was met, and is no more, is met again, and all that come after it.
            again = inf
            for item in met:
                if item.held:
                    self._set_aside(item)
                elif self._now.get(item.key) is item:
                    again = min(again, item.stamp % LAP)
            for item in passed:
                if item.stamp >= self._lap + LAP and item.stamp % LAP < again and self._now.get(item.key) is item:
                    self._later[item.key] = self._now.pop(item.key)
        self._catch_up()

    def _catch_up(self) -> None:
        """Begin the hand's lap: who was passed is to be met again; who should have been taken comes before them."""
        while self._hand >= self._lap + LAP:
            self._lap += LAP
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
