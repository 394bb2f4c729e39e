"""An order by stamp in which only leaves can leave: the one with the oldest stamp first, tails before heads.

Only a *leaf*, a chunk without a resident child, can leave. When its last child has gone, a parent takes the later of
its own stamp and the newest among its descendants'. So a chain in use keeps its head, and the cost of a use does not
depend on the pieces in which a request arrives.

Stamps are the numbers of places in a line. A use takes the place at its end, and what a chunk leaves behind there stays
until the front of the line comes by: a place is somebody's only if its number is that one's stamp. So a use is an
append and moves nobody, and who leaves is found by going on from the front. Whoever cannot leave when the front comes
by, because of a hold or a child, has lost the place; once that one may leave, the old stamp belongs in front of the
line, so it waits in a heap. The order is both, merged.

What is known of a chunk is in its seat. By default the seats are records of this order's own; a ledger may lend those
that it has (:class:`~tierkv.protocols.Seating`). A seat is linked to its parent's, since to look one up by key is what
costs most in a large pool; once that seat has left, whoever comes to have its key is meant.

Standard library only; single-threaded; deterministic: no set, no identity and no clock takes part in the order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from heapq import heappop, heappush
from math import inf

from tierkv.policies._stamp_heap import StampHeap
from tierkv.protocols import Seat
from tierkv.types import ChunkKey

USUAL = 1 << 48
"""Stamps of uses are above; below are those of chunks that are to leave first."""
LAST = 1 << 60
"""What a chunk has on top of its stamp that is to leave last."""


_PLACES_PER_CHUNK = 2
_SLACK = 64
"""The line has no more than two places a chunk and some, beyond which its front goes on."""
_LATE = 4096
"""Uses after which it is looked at again at the latest: so many places may be passed in one go."""
_PLACES_AT_ONCE = 64
"""Of the line that an eviction takes together: it puts back those behind one at which it cannot simply go on."""
_ABSENT = Seat(ChunkKey(b""))
"""What is linked to it waits for a parent that has yet to come."""


class _Walk:
    """One iteration over the victims."""

    __slots__ = ("freed", "n_left", "number", "turn")

    def __init__(self, turn: int) -> None:
        self.turn = turn
        self.number: float = 0
        """Of the place in the line that it has come to."""
        self.n_left: dict[ChunkKey, int] = {}
        """Children that have not been named, of those of whose children some have been."""
        self.freed: list[tuple[int, Seat]] = []
        """Parents whose children have all been named, and whose places are not ahead."""


class LeafOrder:
    """What an order of leaves needs beside inserting and stamping.

    Keys that are not resident are ignored by every method. A hold is a flag, not a count.
    """

    def __init__(self) -> None:
        self._own: dict[ChunkKey, Seat] | None = {}
        self._seats: Mapping[ChunkKey, Seat] = self._own
        # Who took each place. The last one's number is the latest stamp; no two chunks have the same stamp. A seat
        # whose stamp is one of the line's numbers stands at that place.
        self._line: deque[Seat] = deque()
        self._stamp = USUAL
        # Up to which number the latest victims() went, and when the line is looked at for its length again.
        self._walked = 0
        self._tidy_at = USUAL + _SLACK
        # Children of chunks that are not resident, to be handed over when those arrive.
        self._absent: dict[ChunkKey, int] = {}
        # Leaves that have no place. Those that are held are taken out when they come to its top.
        self._heap: StampHeap[Seat] = StampHeap()
        self._n_resident = 0

    def __len__(self) -> int:
        return self._n_resident

    def __contains__(self, key: object) -> bool:
        return self._find(key) is not None  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)} resident>"

    # -- by key -------------------------------------------------------------------------------------------------

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:  # noqa: ARG002 - no ghosts are kept either way
        seat = self._find(key)
        if seat is not None:
            self.unseat(seat)
            if self._own is not None:
                del self._own[key]

    def hold(self, key: ChunkKey) -> None:
        seat = self._find(key)
        if seat is not None:
            seat.holds = 1

    def release(self, key: ChunkKey) -> None:
        seat = self._find(key)
        if seat is not None and seat.holds:
            seat.holds = 0
            self.readmit((seat,))

    def victims(self) -> Iterator[ChunkKey]:
        """Every resident key in leaving order, less what is held and the ancestors of what is held.

        Lazy; a key costs O(1), or O(log(n)) where it is in the heap, and nobody who is held is met twice. One iteration
        at a time: a later one ends the earlier.

        Raises:
            RuntimeError: advanced after another iteration has begun, or after a chunk has come or was used.
        """
        self._begin()
        walk = _Walk(self._heap.turn)
        n_left = walk.n_left
        for number, seat in enumerate(self._line, self._front):
            if seat.stamp != number or seat.holds or (seat.n_children and n_left.get(seat.key, 1)):
                continue
            walk.number = number
            while (early := self._before(walk)) is not None:
                yield early.key
                self._named(early, walk)
            self._walked = number
            yield seat.key
            self._named(seat, walk)
        walk.number = inf
        while (early := self._before(walk)) is not None:
            yield early.key
            self._named(early, walk)

    def evict(self, n_chunks: int) -> list[ChunkKey]:
        """Forget the ``n_chunks`` that :meth:`victims` would name first, or all it would name; their keys, in order."""
        gone = [seat.key for seat in self.evict_seats(n_chunks)]
        if self._own is not None:
            for key in gone:
                del self._own[key]
        return gone

    # -- by seat ------------------------------------------------------------------------------------------------

    def share(self, seats: Mapping[ChunkKey, Seat]) -> None:
        """Use the seats of a ledger instead of own ones; see :class:`~tierkv.protocols.Seating`."""
        assert not self._n_resident, "seats are shared before the first chunk"
        self._own, self._seats = None, seats

    def readmit(self, seats: Iterable[Seat]) -> None:
        """Those that may leave now and have lost their place wait in the heap."""
        front = self._stamp + 1 - len(self._line)
        for seat in seats:
            if seat.n_children or seat.holds or front <= seat.stamp < LAST or seat.heaped is not None or not seat.stamp:
                continue
            self._heap.add(seat)

    def unseat(self, seat: Seat) -> None:
        """Forget a resident chunk, whatever its place."""
        stamp = seat.stamp
        seat.stamp = 0
        if seat.heaped is not None:
            self._heap.drop(seat)
        if seat.n_children:
            self._absent[seat.key] = seat.n_children
            seat.n_children = 0
        if seat.link is not None:
            self._child_left(seat, stamp)
            seat.link = None
        self._n_resident -= 1
        if not self._n_resident:
            self._line.clear()

    def evict_seats(self, n_chunks: int) -> list[Seat]:
        """Forget the ``n_chunks`` that :meth:`victims` would name first, or all it would name; in order."""
        self._begin()
        line, waiting = self._line, self._heap.entries
        gone: list[Seat] = []
        while len(gone) < n_chunks and (waiting or line):
            if not waiting:
                self._evict_places(gone, n_chunks)
            elif (first := self._first()) is not None:
                self._evict_up(first, self._front - 1, gone, n_chunks)
            else:
                break
        self._n_resident -= len(gone)
        return gone

    def _evict_places(self, gone: list[Seat], n_chunks: int) -> None:
        """Go on from the front of the line, while nobody waits in the heap. Every chunk that leaves comes by."""
        line = self._line
        places = [line.popleft() for _ in range(min(n_chunks - len(gone), len(line), _PLACES_AT_ONCE))]
        for number, seat in enumerate(places, self._front - len(places)):
            if seat.stamp != number or seat.holds or seat.n_children:
                continue
            parent = seat.link
            if parent is not None:
                if not number < parent.stamp < LAST:
                    n_left = self._front - 1 - number
                    line.extendleft(reversed(places[len(places) - n_left :]))
                    self._evict_up(seat, number, gone, n_chunks)
                    return
                parent.n_children -= 1  # its own place is ahead
            seat.stamp = 0
            gone.append(seat)

    def _evict_up(self, seat: Seat, number: int, gone: list[Seat], n_chunks: int) -> None:
        """Forget a leaf, and up its chain who leaves with it: those whose stamps are no higher."""
        while True:
            gone.append(seat)
            stamp, parent = seat.stamp, seat.link
            seat.stamp = 0
            if parent is None:
                return
            if not parent.stamp:
                self._child_left(seat, stamp)
                return
            parent.n_children -= 1
            if stamp > parent.stamp:
                self._inherit(parent, stamp)
            if parent.n_children or parent.holds or number < parent.stamp < LAST:
                return
            if parent.stamp != stamp or len(gone) >= n_chunks:
                self._heap.add(parent)
                return
            seat = parent  # with the stamp that was the lowest of all

    # -- for subclasses -----------------------------------------------------------------------------------------

    def _find(self, key: ChunkKey) -> Seat | None:
        seat = self._seats.get(key)
        return seat if seat is not None and seat.stamp else None

    def _move(self, seat: Seat, stamp: int) -> None:
        """Give a chunk any stamp but a new one."""
        if seat.heaped is not None:
            self._heap.drop(seat)
        seat.stamp = stamp
        self.readmit((seat,))

    def _parent(self, seat: Seat) -> Seat | None:
        """Whom it is counted under, if that one is resident."""
        parent = seat.link
        if parent is None or parent.stamp:
            return parent
        assert seat.parent is not None, "what is linked has a parent"
        return self._find(seat.parent)

    def _link(self, seat: Seat) -> None:
        """Make ``seat``, which is not linked, a child of its parent, which may be absent."""
        parent_key = seat.parent
        assert parent_key is not None
        parent = self._find(parent_key)
        if seat.n_children or parent is seat or seat.key == parent_key:
            # Only a chunk with children can be its own ancestor. Keys that say so are nonsense, not a reason to loop.
            ancestor: ChunkKey | None = parent_key
            while ancestor is not None:
                if ancestor == seat.key:
                    return
                above = self._find(ancestor)
                ancestor = above.parent if above is not None and above.link is not None else None
        if parent is None:
            seat.link = _ABSENT
            self._absent[parent_key] = self._absent.get(parent_key, 0) + 1
            return
        seat.link = parent
        parent.n_children += 1
        if parent.heaped is not None:
            self._heap.drop(parent)

    def _shorten(self) -> None:
        """Let the front of a line that has become long go on, and say when to look again."""
        n_over = len(self._line) - _PLACES_PER_CHUNK * self._n_resident - _SLACK
        self._pass(self._front + n_over - 1)
        self._tidy_at = self._stamp + min(self._n_resident // 8 + _SLACK, _LATE)

    # -- inside -------------------------------------------------------------------------------------------------

    @property
    def _front(self) -> int:
        """Number of the first place in the line."""
        return self._stamp + 1 - len(self._line)

    def _begin(self) -> int:
        """Begin an iteration or an eviction; returns the front. What the latest iteration met is not met again."""
        self._heap.begin()
        front = self._stamp + 1 - len(self._line)
        if self._walked < front:
            return front
        self._pass(self._walked)
        return self._front

    def _pass(self, number: int) -> None:
        """Let the front of the line go by the places up to this number: who stands there may lose it now."""
        line = self._line
        for passed in range(self._front, number + 1):
            seat = line.popleft()
            if seat.stamp == passed:
                self.readmit((seat,))

    def _first(self) -> Seat | None:
        """Take out who leaves first."""
        line = self._line
        number: float = self._front
        while line and ((seat := line[0]).stamp != number or seat.holds or seat.n_children):
            line.popleft()
            number += 1
        early = self._take(number if line else inf)
        if early is None:
            return line.popleft() if line else None
        self._heap.drop(early)
        return early

    def _take(self, below: float) -> Seat | None:
        """Take the first off the heap that is not held, if its stamp is less than ``below``."""
        heap = self._heap
        while heap.entries and (seat := heap.take(below)) is not None:
            if not seat.holds:
                return seat
            heap.drop(seat)
        return None

    def _before(self, walk: _Walk) -> Seat | None:
        """Whoever behind the walk is to be named before whom it has met."""
        freed = walk.freed
        if freed and freed[0][0] < walk.number:
            return self._take(freed[0][0]) or heappop(freed)[1]
        return self._take(walk.number)

    def _named(self, seat: Seat, walk: _Walk) -> None:
        """Its parent is a leaf as soon as all its children have been named, as if they had left."""
        self._heap.check(walk.turn)
        parent = self._parent(seat)
        if parent is None:
            return
        n_left = walk.n_left[parent.key] = walk.n_left.get(parent.key, parent.n_children) - 1
        if not n_left and not parent.holds and not walk.number < parent.stamp < LAST:
            # Its descendants' stamps play no part here: they have all been the oldest, so they delay nothing.
            heappush(walk.freed, (parent.stamp, parent))

    def _child_left(self, seat: Seat, stamp: int) -> None:
        """Tell the parent that ``seat`` is linked to that this child, which had that stamp, has left."""
        parent = self._parent(seat)
        if parent is None:
            key = seat.parent
            assert key is not None, "what is linked has a parent"
            n_left = self._absent[key] = self._absent[key] - 1
            if not n_left:
                del self._absent[key]
            return
        parent.n_children -= 1
        if stamp > parent.stamp:
            self._inherit(parent, stamp)
        self.readmit((parent,))

    def _inherit(self, parent: Seat, stamp: int) -> None:
        """Take the stamp of a newer child that has left, and with it its place, but not that it was to leave last."""
        parent.stamp = stamp if stamp < LAST else max(stamp - LAST, parent.stamp)
        place = parent.stamp - self._front
        if 0 <= place < len(self._line):
            self._line[place] = parent
