"""Least recently used, as an order of leaves."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.policies._leaf_order import LAST, USUAL, LeafOrder
from tierkv.protocols import Seat
from tierkv.types import Chunk, ChunkKey, Turn


class LRU(LeafOrder):
    """The leaf that was not used for the longest time leaves first; never a chunk with a resident child.

    A request's chunks count as used tail first, so its tail is older than its head. Where each request arrives whole,
    the order is that of a plain list touched tail first; where it arrives in pieces it stays that order, at the same
    cost. A chunk without a parent (a sliding-window group) is in plain order of recency.

    Chunks may arrive before their parents, and may learn of their parent in a later access: a scan finds names only.
    A chunk whose parent was deleted is a head until the parent is back.

    A chunk hinted to leave first is older than every use, in the order of the hints; one to leave last is newer than
    every use. A parent waits for its children whatever was said of it, and takes a use over from a child that leaves.

    Concurrency: one thread. Cost: amortised constant a chunk; a parent that becomes a leaf, or a chunk
    that was held, is O(log(n)) as a victim.
    """

    def __init__(self) -> None:
        super().__init__()
        self._n_first = 0

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        own, known = self._own, self._seats
        if own is not None and len(chunks) == 1 and chunks[0][0] not in known:
            new = own[chunks[0][0]] = Seat(chunks[0][0], chunks[0][1])
            self._seat_one(new)
            return
        seats: list[Seat] = []
        for chunk in chunks:
            key = chunk[0]
            seat = known.get(key)
            if seat is None:
                assert own is not None, "who lends seats has entered the chunk's"
                seat = own[key] = Seat(key)
            seats.append(seat)
        self._rank(seats, [chunk[1] for chunk in chunks])

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        known = self._seats
        if len(chunks) == 1:  # what a request in pieces of 1 pays each time
            chunk = chunks[0]
            seat = known.get(chunk[0])
            if seat is None:
                return
            if seat.heaped is None and 0 < seat.stamp < LAST and (seat.link is not None or chunk[1] is None):
                self._stamp = seat.stamp = stamp = self._stamp + 1
                self._line.append(seat)
                if stamp > self._tidy_at:
                    self._shorten()
                return
        seats: list[Seat] = []
        late: list[tuple[Seat, ChunkKey]] = []
        for chunk in chunks:
            # Key and parent by number, here and below: every access comes by, and names take twice as long.
            seat = known.get(chunk[0])
            if seat is None or not seat.stamp:
                continue
            seats.append(seat)
            parent_key = chunk[1]
            if parent_key is not None and seat.link is None:
                late.append((seat, parent_key))
        self.touch(seats)
        for seat, parent_key in reversed(late):
            if seat.link is None:
                seat.parent = parent_key
                self._link(seat)

    def refresh(self, chunks: Sequence[Chunk]) -> None:
        """Recency is all there is here: the same as a use."""
        self.on_access(chunks)

    def on_hint(self, key: ChunkKey, turn: Turn) -> None:
        """Held or not: a seat knows that by itself."""
        seat = self._find(key)
        if seat is None:
            return
        if turn is Turn.FIRST:
            self._n_first += 1
            self._move(seat, self._n_first)
        elif turn is Turn.USUAL:
            if seat.stamp >= LAST:
                self._move(seat, seat.stamp - LAST)
        elif seat.stamp < LAST:
            if seat.stamp < USUAL:
                # That a chunk was to be first has taken the place of its latest use; so this is its latest use.
                self._stamp = seat.stamp = self._stamp + 1
                self._line.append(seat)
            self._move(seat, LAST + seat.stamp)

    def seat(self, seats: Sequence[Seat]) -> None:
        """Rank new chunks, and such as are here already, as the newest, the first of them above all."""
        if len(seats) == 1 and not seats[0].stamp:
            self._seat_one(seats[0])
        else:
            self._rank(seats, [seat.parent for seat in seats])

    def _rank(self, seats: Sequence[Seat], parents: Sequence[ChunkKey | None]) -> None:
        base, absent = self._stamp, self._absent
        stamp = self._stamp = base + len(seats)
        self._line.extend(reversed(seats))
        self._n_resident += len(seats)
        before: Seat | None = None
        for seat, parent_key in zip(seats, parents, strict=True):
            if not seat.stamp:
                seat.stamp = stamp
                if absent:
                    seat.n_children = absent.pop(seat.key, 0)
            else:
                self._n_resident -= 1
                if seat.stamp <= base or seat.stamp >= LAST:
                    seat.stamp = stamp
                    if seat.heaped is not None:
                        self._heap.drop(seat)
            stamp -= 1
            if parent_key is not None and seat.link is None:
                seat.parent = parent_key
                if before is not None and before.key == parent_key and before is not seat and not seat.n_children:
                    # The usual case, a chain in order: without children it cannot be an ancestor of the one before.
                    seat.link = before
                    before.n_children += 1
                else:
                    self._link(seat)
            before = seat
        if self._stamp > self._tidy_at:
            self._shorten()

    def _seat_one(self, seat: Seat) -> None:
        """The same for one new chunk: what a request in pieces of 1 pays each time."""
        self._n_resident += 1
        self._stamp = seat.stamp = stamp = self._stamp + 1
        self._line.append(seat)
        if self._absent:
            seat.n_children = self._absent.pop(seat.key, 0)
        parent_key = seat.parent
        if parent_key is not None:
            parent = self._seats.get(parent_key)
            if parent is None or not parent.stamp or parent.heaped is not None or seat.n_children or parent is seat:
                self._link(seat)
            else:
                seat.link = parent
                parent.n_children += 1
        if stamp > self._tidy_at:
            self._shorten()

    def touch(self, seats: Sequence[Seat]) -> None:
        """Rank resident chunks as the newest, the first of them above all."""
        base = self._stamp
        self._stamp = base + len(seats)
        self._line.extend(reversed(seats))
        for stamp, seat in zip(range(self._stamp, base, -1), seats, strict=True):
            if seat.stamp <= base:
                seat.stamp = stamp
                if seat.heaped is not None:
                    self._heap.drop(seat)
            elif LAST <= seat.stamp <= LAST + base:
                seat.stamp = LAST + stamp
        if self._stamp > self._tidy_at:
            self._shorten()
