"""What an order that takes hints must do: of the chunks hinted, who is surely to come first, who last, who neither."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierkv.testing._policy_twins import ancestors
from tierkv.testing._rules import require
from tierkv.types import Chunk, ChunkKey, Turn


class Turned:
    """The turn of each resident chunk that has one. Of some it is not certain; those prove nothing."""

    def __init__(self) -> None:
        self._turns: dict[ChunkKey, Turn] = {}
        self._doubtful: set[ChunkKey] = set()

    def hinted(self, key: ChunkKey, turn: Turn) -> None:
        if turn is Turn.USUAL and self._turns.get(key) is not Turn.LAST:
            return  # it ends a LAST, and nothing else
        self._doubtful.discard(key)
        self._turns[key] = turn

    def entered(self, chunk: Chunk) -> None:
        self._turns.pop(chunk.key, None)
        self._doubtful.discard(chunk.key)

    def used(self, chunk: Chunk) -> None:
        if self._turns.get(chunk.key) is not Turn.LAST:
            self.entered(chunk)

    def left(self, chunk: Chunk) -> None:
        """A parent that was first may take a use over from a child that was not: in an order of leaves it does."""
        child_was_first = self._turns.get(chunk.key) is Turn.FIRST and chunk.key not in self._doubtful
        self.entered(chunk)
        if chunk.parent is not None and self._turns.get(chunk.parent) is Turn.FIRST and not child_was_first:
            self._doubtful.add(chunk.parent)

    def check(self, order: Sequence[ChunkKey], resident: Mapping[ChunkKey, Chunk]) -> None:
        """``order`` is what the order names, without what has expired."""
        waits_for: dict[ChunkKey, set[Turn]] = {}
        for key in resident:
            for ancestor in ancestors(key, resident):
                waits_for.setdefault(ancestor, set()).add(self._turns.get(key, Turn.USUAL))
        sure = [key for key in order if key not in self._doubtful]
        turn_of = {key: self._turns.get(key, Turn.USUAL) for key in sure}
        # Whoever has children that have another turn may have to wait for them, and is then in a place of its own.
        certain = [key for key in sure if waits_for.get(key, set()) <= {turn_of[key]}]
        named = [turn_of[key] for key in certain]
        wanted = sorted(named, key=(Turn.FIRST, Turn.USUAL, Turn.LAST).index)
        require(named == wanted, "what is hinted comes first, and what is to be kept last", order)
