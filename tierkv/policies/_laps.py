"""A queue that is passed over lap by lap: where the chunks of SIEVE stand."""

from __future__ import annotations

from collections import deque

from tierkv.policies._stamp_heap import Entry, StampHeap
from tierkv.types import ChunkKey

LAP = 1 << 48
"""Places in a lap, more than there will ever be: a stamp is a lap of the hand and a place, here in one number."""
_SLACK = 64
"""Items that have left a line and are still in it, of which so many are never worth a clean-up."""


class Place:
    """A resident chunk and its place in the queue."""

    __slots__ = ("heaped", "held", "key", "lap", "number", "stands")

    def __init__(self, key: ChunkKey, lap: int, number: int) -> None:
        self.key = key
        self.number = number
        self.lap = lap
        """In which the hand takes it when it comes to its number. One small number for many: a use makes no new one."""
        self.held = False
        self.heaped: Entry | None = None
        self.stands = True
        """It is in one of the lines. Not so once it has left, or was held when the hand came by."""

    @property
    def stamp(self) -> int:
        return self.lap * LAP + self.number


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
        self._lap = 0  # of the lines; the hand's may be ahead until they catch up
        # The stamp of the latest chunk that the hand took.
        self._hand_lap = 0
        self._hand_number = 0
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

    def _meet(self, n_chunks: int) -> list[Place]:
        """Go on in the lap of the lines until so many have been met whom the hand may take; they are out of line."""
        now, later, lap = self._now, self._later, self._lap
        met: list[Place] = []
        while now and len(met) < n_chunks:
            item = now.popleft()
            if not item.stands:
                continue
            if item.held:
                item.stands = False
            elif item.lap > lap:
                later.append(item)
            else:
                met.append(item)
        return met

    def _catch_up(self) -> None:
        """Begin the hand's lap: who was passed is to be met again; who should have been taken comes before them."""
        while self._lap < self._hand_lap:
            self._lap += 1
            for item in self._now:
                if not item.stands:
                    continue
                if item.lap >= self._lap:
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
