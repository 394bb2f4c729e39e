"""Hints for orders that know none: what was hinted is named apart, before and after the rest."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from itertools import chain

from tierkv.protocols import CommitAware, EvictionPolicy, Expiring, HintAware, PinAware, Refreshing, UsedByKey
from tierkv.types import Chunk, ChunkKey, Turn


def hint_aware(order: EvictionPolicy) -> EvictionPolicy:
    """The order itself if it knows hints, else one around it that does."""
    return order if isinstance(order, HintAware) else Turns(order)


class Line:
    """Keys in the order in which they were put there, whoever is held meanwhile; those held are not named.

    Cost: constant, but logarithmic for a key that comes back from a hold; nobody walks over what is held.
    """

    def __init__(self) -> None:
        self._n_put = 0
        # By number, which rises. Those that were held since are in a list of their own, sorted when one comes back.
        self._straight: dict[ChunkKey, int] = {}
        self._returned: dict[ChunkKey, int] = {}
        self._sorted: list[tuple[int, ChunkKey]] = []
        self._held: dict[ChunkKey, int] = {}

    def __bool__(self) -> bool:
        return bool(self._straight or self._returned or self._held)

    def __contains__(self, key: object) -> bool:
        """Whether it is here and not held."""
        return key in self._straight or key in self._returned

    def __iter__(self) -> Iterator[ChunkKey]:
        straight = ((number, key) for key, number in self._straight.items())
        return (key for _, key in merge(straight, self._sorted))

    def has_held(self, key: ChunkKey) -> bool:
        return key in self._held

    def put(self, key: ChunkKey) -> None:
        """At the end, wherever it was."""
        self.discard(key)
        self._n_put += 1
        self._straight[key] = self._n_put

    def discard(self, key: ChunkKey) -> int | None:
        """Its number, if it was here."""
        number = self._straight.pop(key, None) or self._held.pop(key, None)
        if number is None and (number := self._returned.pop(key, None)) is not None:
            del self._sorted[bisect_left(self._sorted, (number, key))]
        return number

    def hold(self, key: ChunkKey) -> None:
        number = self.discard(key)
        if number is not None:
            self._held[key] = number

    def release(self, key: ChunkKey) -> None:
        number = self._held.pop(key, None)
        if number is not None:
            self._returned[key] = number
            insort(self._sorted, (number, key))


class Turns:
    """An order around one that knows no hints: those hinted first, then the inner order, then those to be kept.

    The inner order goes on knowing of everybody, with their uses, so a hint that was wrong leaves no trace. What is to
    be kept is held in it where it knows holds, so that nobody walks over it. Parents play no part; put it inside
    :class:`~tierkv.policies.LeafFirst`.

    Holds are passed on only if the inner order knows them; else whoever asks for victims skips what is held.

    Concurrency: one thread. Cost: constant a hint; nothing for what is not hinted, but for one call more.
    """

    expired: Callable[[Chunk], bool]
    on_commit: Callable[[ChunkKey], None]
    on_use: Callable[[Sequence[ChunkKey]], None]
    refresh: Callable[[Sequence[Chunk]], None]

    def __init__(self, order: EvictionPolicy) -> None:
        self._order = order
        self._pins = order if isinstance(order, PinAware) else None
        if isinstance(order, CommitAware):
            self.on_commit = order.on_commit
        if isinstance(order, Refreshing):
            self.refresh = order.refresh
        if isinstance(order, Expiring):
            self.expired = order.expired
        if isinstance(order, UsedByKey):
            self._uses = order
            self.on_use = self._on_use
        # Of those hinted, each is in one.
        self._first = Line()
        self._last = Line()

    def __repr__(self) -> str:
        return f"<Turns of {self._order!r}>"

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        self._order.on_insert(chunks)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        self._used([chunk.key for chunk in chunks])
        self._order.on_access(chunks)

    def _on_use(self, keys: Sequence[ChunkKey]) -> None:
        self._used(keys)
        self._uses.on_use(keys)

    def _used(self, keys: Sequence[ChunkKey]) -> None:
        if self._first:
            for key in keys:
                self._first.discard(key)
        if self._last:
            for key in reversed(keys):
                if key in self._last:
                    self._last.put(key)

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        self._first.discard(key)
        self._last.discard(key)
        self._order.on_remove(key, evicted=evicted)

    def on_hint(self, key: ChunkKey, turn: Turn) -> None:
        was_last = key in self._last
        if turn is Turn.USUAL and not was_last:
            return
        self._first.discard(key)
        self._last.discard(key)
        if turn is Turn.FIRST:
            self._first.put(key)
        elif turn is Turn.LAST:
            self._last.put(key)
        if self._pins is not None and was_last is not (turn is Turn.LAST):
            (self._pins.release if was_last else self._pins.hold)(key)

    def hold(self, key: ChunkKey) -> None:
        was_last = key in self._last or self._last.has_held(key)
        self._first.hold(key)
        self._last.hold(key)
        if self._pins is not None and not was_last:
            self._pins.hold(key)

    def release(self, key: ChunkKey) -> None:
        self._first.release(key)
        self._last.release(key)
        if self._pins is not None and key not in self._last:
            self._pins.release(key)

    def victims(self) -> Iterator[ChunkKey]:
        """What has expired, where the inner order knows of that; the first; the inner order's; the last."""
        first, last = self._first, self._last
        rest = iter(self._order.victims())
        expired = getattr(self, "expired", None)
        early: set[ChunkKey] = set()
        if expired is not None:
            for key in rest:
                if not expired(Chunk(key)):
                    rest = chain((key,), rest)
                    break
                early.add(key)
                yield key
        yield from (key for key in first if key not in early)
        yield from (key for key in rest if key not in first and key not in last)
        yield from (key for key in last if key not in early)
