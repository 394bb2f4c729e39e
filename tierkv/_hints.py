"""What callers know of the future of chunks, and how it is told to the levels that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar, NamedTuple

from tierkv._hinted import HintedOrder, Lifetimes
from tierkv._ledger import Entry, Ledger
from tierkv.errors import bad_setting
from tierkv.protocols import Clock, HintAware, Seating
from tierkv.settings import parse_seconds
from tierkv.types import ChunkKey

_KEPT_PART = 2
"""Of a level's capacity at most one part in so many is kept, so that the rest of the world goes on."""


@dataclass(frozen=True)
class Hint:
    """What a caller knows of the future of chunks: ``Hint.DEAD``, ``Hint.KEEP`` or ``Hint.TTL(seconds)``.

    A hint never deletes and never pins, since it may be wrong.
    """

    name: str
    """One of dead, keep and ttl."""
    ttl_s: float | None = None
    """Seconds of a lifetime, else None."""

    DEAD: ClassVar[Hint]
    """Nobody expects to use the chunks again: they are first to leave the fastest level that holds them, in the
    ordinary way (to the level below, where that is how they leave), until they are used."""
    KEEP: ClassVar[Hint]
    """They are last to leave every level that holds them, for an hour, and for an hour more with each such hint."""

    @staticmethod
    def TTL(ttl_s: float) -> Hint:  # noqa: N802 - one of three, and the wrapper's name
        """They expire so many seconds from now, at every level, also where they are copied to meanwhile.

        Raises:
            ConfigError: it is not a time.
        """
        return Hint("ttl", parse_seconds("ttl_s", ttl_s, 0.001))


Hint.DEAD = Hint("dead")
Hint.KEEP = Hint("keep")


class Hinted(NamedTuple):
    """What became of a hint."""

    n_chunks: int
    """Keys that some level holds."""
    n_unknown: int
    """Keys that none does: ignored."""


class Hints:
    """Tells levels of hints. Made with the first one; until then no level knows that there are any.

    Args:
        ledgers: of all levels, fastest first.
        clock: seconds, monotonic.

    Concurrency: the thread of the hierarchy.
    """

    def __init__(self, ledgers: Sequence[Ledger], clock: Clock) -> None:
        self._ledgers = ledgers
        self._clock = clock
        self._lifetimes = Lifetimes()
        self._orders: list[HintedOrder | None] = [None] * len(ledgers)
        self._mortal = False
        # An order that ranks the ledger's entries cannot be wrapped; one that knows no hints by itself is left alone.
        self._deaf = {
            index
            for index, ledger in enumerate(ledgers)
            if isinstance(ledger.policy, Seating) and not isinstance(ledger.policy, HintAware)
        }

    def give(self, keys: Iterable[ChunkKey], hint: Hint) -> Hinted:
        """Tell the levels that hold these keys, which are in prefix order. Keys that no level holds are ignored.

        Raises:
            ConfigError: ``hint`` is none.
        """
        _check(hint)
        n_chunks = n_unknown = 0
        for key in reversed(list(dict.fromkeys(keys))):
            holders = self._holders(key)
            if not holders:
                n_unknown += 1
                continue
            n_chunks += 1
            if hint.ttl_s is not None:
                self._limit(key, holders, hint.ttl_s)
            elif hint == Hint.KEEP:
                for index, entry in holders:
                    most_nbytes = self._ledgers[index].capacity_nbytes // _KEPT_PART
                    self._order(index).keep(key, entry.charge_nbytes, most_nbytes, held=_held(entry))
            else:
                index, entry = holders[0]
                if not self._order(index).is_kept(key):
                    self._order(index).let_go(key, held=_held(entry))
        return Hinted(n_chunks, n_unknown)

    def _entry(self, index: int, key: ChunkKey) -> Entry | None:
        """What a level has under the key, if it is ours to evict."""
        ledger = self._ledgers[index]
        entry = ledger.get(key) if index not in self._deaf else None
        return entry if entry is not None and entry.owned and not ledger.expired(entry) else None

    def _holders(self, key: ChunkKey) -> list[tuple[int, Entry]]:
        """The levels that have the key, fastest first; none if its lifetime is over."""
        if self._lifetimes.until_s.get(key, inf) <= self._clock():
            return []
        return [(index, entry) for index in range(len(self._ledgers)) if (entry := self._entry(index, key))]

    def _limit(self, key: ChunkKey, holders: Sequence[tuple[int, Entry]], ttl_s: float) -> None:
        if not self._mortal:
            self._mortal = True
            for index, ledger in enumerate(self._ledgers):
                if index in self._deaf:
                    continue
                order = self._order(index)
                order.begin_lifetimes()
                ledger.follow(order)
        until_s = self._lifetimes.until_s[key] = self._clock() + ttl_s
        for index, entry in holders:
            self._order(index).limit(key, until_s, held=_held(entry))

    def _order(self, index: int) -> HintedOrder:
        """The level's order, which takes hints from now on."""
        order = self._orders[index]
        if order is None:
            ledger = self._ledgers[index]
            order = self._orders[index] = HintedOrder(ledger.policy, self._lifetimes, self._clock)
            ledger.follow(order)
        return order


def _check(hint: object) -> None:
    if not isinstance(hint, Hint) or (hint.ttl_s is None and hint not in (Hint.DEAD, Hint.KEEP)):
        raise bad_setting("hint", hint, "Hint.DEAD, Hint.KEEP or Hint.TTL(seconds)")


def _held(entry: Entry) -> bool:
    return entry.holds > 0
