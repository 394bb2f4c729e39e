"""Hints for orders that know none: what was hinted is named apart, before and after the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from tierkv.protocols import CommitAware, EvictionPolicy, Expiring, HintAware, PinAware
from tierkv.types import Chunk, ChunkKey, Turn


def hint_aware(order: EvictionPolicy) -> EvictionPolicy:
    """The order itself if it knows hints, else one around it that does."""
    return order if isinstance(order, HintAware) else Turns(order)


class Turns:
    """An order around one that knows no hints: those hinted first, then the inner order, then those to be kept.

    The inner order goes on knowing of everybody, with their uses, so a hint that was wrong leaves no trace. What is to
    be kept is held in it where it knows holds, so that nobody walks over it. Parents play no part; put it inside
    :class:`~tierkv.policies.LeafFirst`.

    Holds are passed on only if the inner order knows them; else whoever asks for victims skips what is held.

    Concurrency: one thread. Cost: constant a hint; nothing for what is not hinted, but for one call more.
    """

    expired: Callable[[Chunk], bool]

    def __init__(self, order: EvictionPolicy) -> None:
        self._order = order
        self._pins = order if isinstance(order, PinAware) else None
        self._commits = order if isinstance(order, CommitAware) else None
        if isinstance(order, Expiring):
            self.expired = order.expired
        # Of those hinted, each is in one of four; the held ones apart, so that nobody walks over them.
        self._first: dict[ChunkKey, None] = {}
        self._last: dict[ChunkKey, None] = {}
        self._first_held: dict[ChunkKey, None] = {}
        self._last_held: dict[ChunkKey, None] = {}

    def __repr__(self) -> str:
        return f"<Turns of {self._order!r}>"

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        self._order.on_insert(chunks)

    def on_commit(self, key: ChunkKey) -> None:
        if self._commits is not None:
            self._commits.on_commit(key)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        if self._first or self._first_held:
            for chunk in chunks:
                self._first.pop(chunk.key, None)
                self._first_held.pop(chunk.key, None)
        if self._last:
            for chunk in reversed(chunks):
                if chunk.key in self._last:
                    self._last[chunk.key] = self._last.pop(chunk.key)
        self._order.on_access(chunks)

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        for keys in (self._first, self._last, self._first_held, self._last_held):
            keys.pop(key, None)
        self._order.on_remove(key, evicted=evicted)

    def on_hint(self, key: ChunkKey, turn: Turn) -> None:
        was_last = key in self._last
        if turn is Turn.USUAL and not was_last:
            return
        self._first.pop(key, None)
        self._last.pop(key, None)
        if turn is Turn.FIRST:
            self._first[key] = None
        elif turn is Turn.LAST:
            self._last[key] = None
        if self._pins is not None and was_last is not (turn is Turn.LAST):
            (self._pins.release if was_last else self._pins.hold)(key)

    def hold(self, key: ChunkKey) -> None:
        for free, held in ((self._first, self._first_held), (self._last, self._last_held)):
            if key in free:
                del free[key]
                held[key] = None
        if self._pins is not None and key not in self._last_held:
            self._pins.hold(key)

    def release(self, key: ChunkKey) -> None:
        for free, held in ((self._first, self._first_held), (self._last, self._last_held)):
            if key in held:
                del held[key]
                free[key] = None
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
