"""The order of a level that has been given hints: it ends keeps, and lets chunks expire that were given a lifetime."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush

from tierkv._turns import hint_aware
from tierkv.protocols import (
    BatchEvicting,
    Clock,
    CommitAware,
    EvictionPolicy,
    Expiring,
    HintAware,
    PinAware,
    Refreshing,
    Seat,
    Seating,
    UsedByKey,
)
from tierkv.types import Chunk, ChunkKey, Turn

KEEP_S = 3600.0
"""How long a keep lasts unless it is renewed."""
_REMEMBERED = 4_096
"""Lifetimes of chunks that have left every level; one of them may be on its way into one."""


class Lifetimes:
    """Until when chunks live, by key: a lifetime goes with the chunk to whatever level it is copied to."""

    def __init__(self) -> None:
        self.until_s: dict[ChunkKey, float] = {}
        self._n_levels: dict[ChunkKey, int] = {}
        self._gone: OrderedDict[ChunkKey, None] = OrderedDict()

    def of_copy(self, key: ChunkKey, now_s: float) -> float | None:
        """Until when a chunk lives that comes to a level; None: no end. What is over and in no level is forgotten."""
        until_s = self.until_s.get(key)
        if until_s is not None and until_s <= now_s and key not in self._n_levels:
            del self.until_s[key], self._gone[key]
            return None
        return until_s

    def came(self, key: ChunkKey) -> None:
        """One more level has a chunk that has a lifetime."""
        self._n_levels[key] = self._n_levels.get(key, 0) + 1
        self._gone.pop(key, None)

    def left(self, key: ChunkKey) -> None:
        """One level has it no more. The oldest that no level has are forgotten."""
        self._n_levels[key] -= 1
        if self._n_levels[key]:
            return
        del self._n_levels[key]
        self._gone[key] = None
        if len(self._gone) > _REMEMBERED:
            del self.until_s[self._gone.popitem(last=False)[0]]


class HintedOrder:
    """Around a level's order from its first hint on. It can do what that one can, and hints.

    Whoever hints says whether the chunk is held, since the order knows that of hinted chunks only; an order that uses
    the ledger's seats sees it there.

    Args:
        order: the level's order so far.
        lifetimes: shared by all levels.
        clock: seconds, monotonic.

    Concurrency: one thread. Cost for what is not hinted: a call more for each call, until the first lifetime; from then
    on a dictionary look-up for each chunk that comes or leaves.
    """

    expired: Callable[[Chunk], bool]
    on_commit: Callable[[ChunkKey], None]
    on_use: Callable[[Sequence[ChunkKey]], None]
    refresh: Callable[[Sequence[Chunk]], None]
    hold: Callable[[ChunkKey], None]
    release: Callable[[ChunkKey], None]
    evict: Callable[[int], list[ChunkKey]]
    touch: Callable[[Sequence[Seat]], None]
    readmit: Callable[[Iterable[Seat]], None]
    seat: Callable[[Sequence[Seat]], None]
    unseat: Callable[[Seat], None]
    evict_seats: Callable[[int], Sequence[Seat]]
    share: Callable[[Mapping[ChunkKey, Seat]], None]

    def __init__(self, order: EvictionPolicy, lifetimes: Lifetimes, clock: Clock) -> None:
        self._order = hint_aware(order)
        assert isinstance(self._order, HintAware)
        self._hints: HintAware = self._order
        self._lifetimes = lifetimes
        self._clock = clock
        if isinstance(self._order, CommitAware):
            self.on_commit = self._order.on_commit
        if isinstance(self._order, Refreshing):
            self.refresh = self._order.refresh
        self._expires = self._order if isinstance(self._order, Expiring) else None
        self._pins = self._order if isinstance(order, PinAware) and isinstance(self._order, PinAware) else None
        if self._pins is not None:
            self.hold, self.release = self._hold, self._release
        if self._expires is not None:
            self.expired = self._expires.expired
        elif isinstance(self._order, BatchEvicting):
            self._batches = self._order
            self.evict = self._evict
        if isinstance(self._order, UsedByKey):
            self.on_use = self._order.on_use
        self._seats: Mapping[ChunkKey, Seat] | None = None
        if isinstance(self._order, Seating):
            self._be_seated(self._order)
        self._held: set[ChunkKey] = set()
        # Until when each is kept and what it is charged, the oldest hint first.
        self._kept: OrderedDict[ChunkKey, tuple[float, int]] = OrderedDict()
        self._kept_nbytes = 0
        # Until when each lives that has a lifetime; a heap of that, in part outdated; and those whose time has come.
        self._mortal: dict[ChunkKey, float] = {}
        self._times: list[tuple[float, int, ChunkKey]] = []
        self._n_times = 0
        self._due: dict[ChunkKey, None] = {}

    def __repr__(self) -> str:
        return f"<HintedOrder of {self._order!r}>"

    # -- hints --------------------------------------------------------------------------------------------------

    def is_kept(self, key: ChunkKey) -> bool:
        self._end_keeps()
        return key in self._kept

    def let_go(self, key: ChunkKey, *, held: bool) -> None:
        """Nobody expects to use the chunk: it leaves first."""
        self._note(key, held=held)
        self._turn(key, Turn.FIRST)

    def keep(self, key: ChunkKey, charge_nbytes: int, most_nbytes: int, *, held: bool) -> None:
        """The chunk leaves last, for :data:`KEEP_S`. The oldest keeps end where they are more than ``most_nbytes``."""
        self._note(key, held=held)
        self._kept_nbytes -= self._kept.pop(key, (0.0, 0))[1]
        self._kept[key] = (self._clock() + KEEP_S, charge_nbytes)
        self._kept_nbytes += charge_nbytes
        self._turn(key, Turn.LAST)
        while self._kept_nbytes > most_nbytes:
            self._end_keep(next(iter(self._kept)))

    def begin_lifetimes(self) -> None:
        """From now on chunks may expire; the level has to look again at what its order can do."""
        self.expired = self._is_expired

    def limit(self, key: ChunkKey, until_s: float, *, held: bool) -> None:
        """The chunk was given a lifetime, or another one."""
        if key not in self._mortal:
            self._lifetimes.came(key)
        self._mortal[key] = until_s
        self._due.pop(key, None)
        self._note(key, held=held)
        self._n_times += 1
        heappush(self._times, (until_s, self._n_times, key))

    def _note(self, key: ChunkKey, *, held: bool) -> None:
        if held and self._pins is not None:
            self._held.add(key)

    def _turn(self, key: ChunkKey, turn: Turn) -> None:
        """Tell the order of a hint. It may be told only while the chunk is not held."""
        pins = self._pins if key in self._held and self._seats is None else None
        if pins is not None:
            pins.release(key)
        self._hints.on_hint(key, turn)
        if pins is not None:
            pins.hold(key)

    def _end_keep(self, key: ChunkKey) -> None:
        self._kept_nbytes -= self._kept.pop(key)[1]
        self._turn(key, Turn.USUAL)

    def _end_keeps(self) -> None:
        if self._kept:
            now_s = self._clock()
            while self._kept and next(iter(self._kept.values()))[0] <= now_s:
                self._end_keep(next(iter(self._kept)))

    # -- what a level calls -------------------------------------------------------------------------------------

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        self._order.on_insert(chunks)
        if self._lifetimes.until_s:
            self._came([chunk.key for chunk in chunks])

    def _came(self, keys: Iterable[ChunkKey]) -> None:
        now_s = self._clock()
        for key in keys:
            until_s = self._lifetimes.of_copy(key, now_s)
            if until_s is not None:
                self.limit(key, until_s, held=False)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        self._order.on_access(chunks)

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        self._forget(key)
        self._order.on_remove(key, evicted=evicted)

    def _forget(self, key: ChunkKey) -> None:
        self._held.discard(key)
        if key in self._kept:
            self._kept_nbytes -= self._kept.pop(key)[1]
        if key in self._mortal:
            del self._mortal[key]
            self._due.pop(key, None)
            self._lifetimes.left(key)

    def _hold(self, key: ChunkKey) -> None:
        if self._pins is not None:
            self._held.add(key)
            self._pins.hold(key)

    def _release(self, key: ChunkKey) -> None:
        if self._pins is not None:
            self._held.discard(key)
            self._pins.release(key)

    def _is_expired(self, chunk: Chunk) -> bool:
        until_s = self._mortal.get(chunk.key)
        if until_s is not None and self._clock() >= until_s:
            return True
        return self._expires is not None and self._expires.expired(chunk)

    def victims(self) -> Iterator[ChunkKey]:
        """What has expired by its own lifetime, then the inner order's."""
        self._end_keeps()
        self._age()
        due = self._due
        if not due:
            yield from self._order.victims()
            return
        yield from (key for key in due if not self._is_held(key))
        yield from (key for key in self._order.victims() if key not in due)

    def _is_held(self, key: ChunkKey) -> bool:
        return key in self._held if self._seats is None else self._seats[key].holds > 0

    def _age(self) -> None:
        """Put aside those whose time has come, so that nobody looks at them twice."""
        if not self._times:
            return
        times, now_s = self._times, self._clock()
        while times and times[0][0] <= now_s:
            until_s, _, key = heappop(times)
            if self._mortal.get(key) == until_s:
                self._due[key] = None

    def _evict(self, n_chunks: int) -> list[ChunkKey]:
        self._end_keeps()
        gone = self._batches.evict(n_chunks)
        if self._kept:
            for key in gone:
                self._forget(key)
        return gone

    # -- in the seats of a ledger -------------------------------------------------------------------------------

    def _be_seated(self, order: Seating) -> None:
        """The ledger has lent its seats to the order and goes on to call it by them."""
        self.touch, self.readmit = order.touch, order.readmit

        def share(seats: Mapping[ChunkKey, Seat]) -> None:
            self._seats = seats

        def seat(seats: Sequence[Seat]) -> None:
            order.seat(seats)
            if self._lifetimes.until_s:
                self._came([seat.key for seat in seats])

        def unseat(seat: Seat) -> None:
            self._forget(seat.key)
            order.unseat(seat)

        def evict_seats(n_chunks: int) -> Sequence[Seat]:
            self._end_keeps()
            gone = order.evict_seats(n_chunks)
            if self._kept:
                for seat in gone:
                    self._forget(seat.key)
            return gone

        self.share, self.seat, self.unseat, self.evict_seats = share, seat, unseat, evict_seats
