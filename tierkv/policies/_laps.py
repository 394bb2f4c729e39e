"""A queue that is passed over lap by lap: where the chunks of SIEVE stand."""

from __future__ import annotations

from collections import deque

from tierkv.policies._stamp_heap import Entry, StampHeap
from tierkv.types import ChunkKey

LAP = 1 << 48
"""A stamp is a lap of the hand and a place in the queue, in one number."""
_SLACK = 64
"""Items that have left a line and are still in it, of which so many are never worth a clean-up."""


class Place:
    """A resident chunk and its place in the queue."""

    __slots__ = ("heaped", "held", "key", "number", "stamp", "stands")

    def __init__(self, key: ChunkKey, lap: int, number: int) -> None:
        self.key = key
        self.number = number
        self.stamp = lap + number
        self.held = False
        self.heaped: Entry | None = None
        self.stands = True
        """It is in one of the lines. Not so once it has left, or was held when the hand came by."""


class Laps:
    """Chunks by stamp, each in one of two lines by place: to be met in this lap, or passed over in it; or aside.

    Keys that are not resident are ignored by every method. A hold is a flag, not a count.
    """

    def __init__(self) -> None:
        self._items: dict[ChunkKey, Place] = {}
        # Who leaves a line in its middle is passed over later: see Place.stands.
        self._now: deque[Place] = deque()
        self._later: deque[Place] = deque()
        # Who is aside and not held. They wait there until they are used or leave.
        self._heap: StampHeap[Place] = StampHeap()
        self._lap = 0
        self._hand = 0  # the stamp of the latest chunk that it took
        self._place = 0  # of the newest chunk that ever came

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)} resident>"

    def hold(self, key: ChunkKey) -> None:
        item = self._items.get(key)
        if item is not None:
            item.held = True
            self._heap.drop(item)

    def release(self, key: ChunkKey) -> None:
        item = self._items.get(key)
        if item is not None:
            item.held = False
            if item.heaped is None and not item.stands:
                self._heap.add(item)

    def _pass(self) -> bool:
        """Let the hand go on in its lap, to the first in line whom it may take; tells whether there is one."""
        now, end = self._now, self._lap + LAP
        while now:
            item = now[0]
            if item.stands:
                if item.held:
                    item.stands = False
                elif item.stamp < end:
                    return True
                else:
                    self._later.append(item)
            now.popleft()
        return False

    def _catch_up(self) -> None:
        """Begin the hand's lap: who was passed is to be met again; who should have been taken comes before them."""
        while self._hand >= self._lap + LAP:
            self._lap += LAP
            for item in self._now:
                if not item.stands:
                    continue
                if item.stamp >= self._lap:
                    self._later.append(item)
                    continue
                item.stands = False
                if not item.held:
                    self._heap.add(item)
            self._now, self._later = self._later, deque()

    def _tidy(self) -> None:
        """Forget those who have left and are in the lines still, where those are most of them."""
        if len(self._now) + len(self._later) > 2 * len(self._items) + _SLACK:
            self._now = deque(item for item in self._now if item.stands)
            self._later = deque(item for item in self._later if item.stands)
