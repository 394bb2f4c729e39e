"""An order by stamp in which only leaves stand in line: the one with the oldest stamp leaves first, tails before heads.

Only a *leaf*, a chunk without a resident child, can leave. When its last child has gone, a parent takes the later of
its own stamp and the newest among its descendants'. So a chain in use keeps its head, and the cost of a use does not
depend on the pieces in which a request arrives: a chunk with children is only stamped, and moved when it is a leaf.

The leaves stand in a line by stamp; a use takes one to its end, which is where its new stamp belongs. Whoever stands at
the front and is held is taken out when met there, so that nobody meets it twice. Once it may leave, its old stamp
belongs in front of the line or in the middle, so it waits in a heap, and so does a parent whose last child has left.
The order is both, merged. A chain that leaves as a whole is climbed from its leaf and takes no heap.

What is known of a chunk is in its seat. By default the seats are records of this order's own; a ledger may lend those
that it has (:class:`~tierkv.protocols.Seating`). Links are keys, so that a seat can come and go under them.

Standard library only; single-threaded; deterministic: no set, no identity and no clock takes part in the order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from math import inf

from tierkv.policies._stamp_heap import StampHeap
from tierkv.protocols import Seat
from tierkv.types import ChunkKey

USUAL = 1 << 48
"""Stamps of uses are above; below are those of chunks that are to leave first."""
LAST = 1 << 60
"""What a chunk has on top of its stamp that is to leave last."""


class _Walk:
    """One iteration over the victims."""

    __slots__ = ("freed", "n_left", "stamp", "turn")

    def __init__(self, turn: int) -> None:
        self.turn = turn
        self.stamp: float = 0
        """That of the last in the line who was met and may leave."""
        self.n_left: dict[ChunkKey, int] = {}
        """Children that have not been named, of those of whose children some have been."""
        self.freed: list[tuple[int, Seat]] = []
        """Parents whose children have all been named."""


class LeafOrder:
    """What an order of leaves needs beside inserting and stamping.

    Keys that are not resident are ignored by every method. A hold is a flag, not a count.
    """

    def __init__(self) -> None:
        self._own: dict[ChunkKey, Seat] | None = {}
        self._seats: Mapping[ChunkKey, Seat] = self._own
        # Leaves by stamp, which only rises from front to end. No two chunks have the same.
        self._line: OrderedDict[int, Seat] = OrderedDict()
        # Children of chunks that are not resident, to be handed over when those arrive.
        self._absent: dict[ChunkKey, int] = {}
        # Leaves that are not in the line. Those that are held are taken out when they come to its top.
        self._heap: StampHeap[Seat] = StampHeap()
        # Whom the latest victims() met in the line held. They leave it when the next one begins.
        self._met: list[Seat] = []
        self._stamp = USUAL
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
            seat.held = True

    def release(self, key: ChunkKey) -> None:
        seat = self._find(key)
        if seat is not None and seat.held:
            seat.held = False
            self.readmit(seat)

    def victims(self) -> Iterator[ChunkKey]:
        """Every resident key in leaving order, less what is held and the ancestors of what is held.

        Lazy; a key costs O(1), or O(log(n)) where it is in the heap. One iteration at a time: a later one ends the
        earlier.

        Raises:
            RuntimeError: advanced after another iteration has begun, or after the order has changed.
        """
        walk = _Walk(self._heap.begin())
        self._put_aside()
        met = self._met
        for seat in self._line.values():
            if seat.held:
                met.append(seat)
                continue
            walk.stamp = seat.stamp
            while (early := self._before(walk)) is not None:
                yield early.key
                self._named(early, walk)
            yield seat.key
            self._named(seat, walk)
        walk.stamp = inf
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

    def readmit(self, seat: Seat) -> None:
        """A seat that is held no more waits in the heap, if it may leave and is not in the line still."""
        if not (seat.queued or seat.n_children or seat.heaped is not None) and seat.stamp:
            self._heap.add(seat)

    def unseat(self, seat: Seat) -> None:
        """Forget a resident chunk, whatever its place."""
        stamp, link = seat.stamp, seat.link
        self._leave_place(seat)
        seat.stamp, seat.link = 0, None
        self._n_resident -= 1
        if seat.n_children:
            self._absent[seat.key] = seat.n_children
            seat.n_children = 0
        if link is not None:
            parent = self._child_left(link, stamp)
            if parent is not None:
                self._heap.add(parent)

    def evict_seats(self, n_chunks: int) -> list[Seat]:
        """Forget the ``n_chunks`` that :meth:`victims` would name first, or all it would name; in order."""
        self._heap.begin()
        self._put_aside()
        gone: list[Seat] = []
        get, append = self._seats.get, gone.append
        while len(gone) < n_chunks:
            seat = self._first()
            if seat is None:
                break
            bound: float | None = None
            while True:  # up its chain; every chunk that leaves comes by, so what _child_left() does is written out
                append(seat)
                stamp, link = seat.stamp, seat.link
                seat.stamp = 0
                if link is None:
                    break
                parent = get(link)
                if parent is None or not parent.stamp:
                    self._child_left(link, stamp)
                    break
                parent.n_children -= 1
                if stamp > parent.stamp:
                    _inherit(parent, stamp)
                if parent.n_children or parent.held:
                    break
                if bound is None:
                    bound = self._bound()
                if parent.stamp > bound or len(gone) >= n_chunks:
                    self._heap.add(parent)
                    break
                seat = parent
        self._n_resident -= len(gone)
        return gone

    # -- for subclasses -----------------------------------------------------------------------------------------

    def _find(self, key: ChunkKey) -> Seat | None:
        seat = self._seats.get(key)
        return seat if seat is not None and seat.stamp else None

    def _leave_place(self, seat: Seat) -> None:
        """Take a chunk out of the line or the heap."""
        if seat.queued:
            del self._line[seat.stamp]
            seat.queued = False
        elif seat.heaped is not None:
            self._heap.drop(seat)

    def _move(self, seat: Seat, stamp: int) -> None:
        """Give a chunk any stamp at all."""
        self._leave_place(seat)
        seat.stamp = stamp
        if not seat.held:
            self.readmit(seat)

    def _queue(self, leaves: Sequence[Seat]) -> None:
        """Let those of ``leaves``, newest first, that are leaves still take the end of the line."""
        line = self._line
        for seat in reversed(leaves):
            if not seat.n_children:
                line[seat.stamp] = seat
                seat.queued = True

    def _link(self, seat: Seat, parent_key: ChunkKey) -> None:
        """Make ``seat``, which has no parent, a child of ``parent_key``, which may be absent."""
        parent = self._find(parent_key)
        if seat.n_children or parent is seat or seat.key == parent_key:
            # Only a chunk with children can be its own ancestor. Keys that say so are nonsense, not a reason to loop.
            ancestor: ChunkKey | None = parent_key
            while ancestor is not None:
                if ancestor == seat.key:
                    return
                above = self._find(ancestor)
                ancestor = above.link if above is not None else None
        seat.link = parent_key
        if parent is None:
            self._absent[parent_key] = self._absent.get(parent_key, 0) + 1
            return
        parent.n_children += 1
        self._leave_place(parent)

    # -- inside -------------------------------------------------------------------------------------------------

    def _first(self) -> Seat | None:
        """Take out who leaves first. Those who are held are taken out on the way."""
        line = self._line
        while line and not self._heap.entries:
            front = line.popitem(last=False)[1]
            front.queued = False
            if not front.held:
                return front
        oldest: Seat | None = None
        while line:
            oldest = next(iter(line.values()))
            if not oldest.held:
                break
            del line[oldest.stamp]
            oldest.queued, oldest = False, None
        early = self._take(oldest.stamp if oldest is not None else inf)
        if early is not None:
            self._heap.drop(early)
        elif oldest is not None:
            del line[oldest.stamp]
            oldest.queued = False
        return early or oldest

    def _bound(self) -> float:
        """A stamp below which nobody else who may leave can have."""
        line, heap = self._line, self._heap.entries
        bound = next(iter(line)) if line else inf
        return min(bound, heap[0][0]) if heap else bound

    def _take(self, below: float) -> Seat | None:
        """Take the first off the heap that is not held, if its stamp is less than ``below``."""
        heap = self._heap
        while heap.entries and (seat := heap.take(below)) is not None:
            if not seat.held:
                return seat
            heap.drop(seat)
        return None

    def _before(self, walk: _Walk) -> Seat | None:
        """Whoever behind the walk is to be named before whom it has met."""
        freed = walk.freed
        if freed and freed[0][0] < walk.stamp:
            return self._take(freed[0][0]) or heappop(freed)[1]
        return self._take(walk.stamp)

    def _named(self, seat: Seat, walk: _Walk) -> None:
        """Its parent is a leaf as soon as all its children have been named, as if they had left."""
        self._heap.check(walk.turn)
        link = seat.link
        if link is None or (parent := self._find(link)) is None:
            return
        n_left = walk.n_left[link] = walk.n_left.get(link, parent.n_children) - 1
        if not n_left and not parent.held:
            # Its descendants' stamps play no part here: they have all been the oldest, so they delay nothing.
            heappush(walk.freed, (parent.stamp, parent))

    def _child_left(self, key: ChunkKey, stamp: int) -> Seat | None:
        """Tell a parent that a child with this stamp has left. Returns it if it may leave now."""
        parent = self._seats.get(key)
        if parent is None or not parent.stamp:
            n_left = self._absent[key] = self._absent[key] - 1
            if not n_left:
                del self._absent[key]
            return None
        parent.n_children -= 1
        if stamp > parent.stamp:
            _inherit(parent, stamp)
        return None if parent.n_children or parent.held else parent

    def _put_aside(self) -> None:
        if not self._met:
            return
        met, self._met = self._met, []
        for seat in met:
            if seat.held and seat.queued:
                del self._line[seat.stamp]
                seat.queued = False


def _inherit(parent: Seat, stamp: int) -> None:
    """Take the stamp of a newer child that has left, but not that it was to leave last."""
    parent.stamp = stamp if stamp < LAST else max(stamp - LAST, parent.stamp)
