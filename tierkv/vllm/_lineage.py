"""Chunks from vLLM's bare keys: group, end token, and the chunk before it in the request's own prefix."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from tierkv.types import Chunk, ChunkKey
from tierkv.vllm import _compat

_SUFFIX = slice(-4, None)


class Lineage:
    """Makes chunks for one policy or tier. A chunk's parent is the one before it among *all* keys of its request.

    Args:
        sliding: groups that are no prefix groups: their chunks have no parents.
        nbytes: payload of a chunk; 0 where nobody says.

    Concurrency: one thread.
    """

    def __init__(self, sliding: frozenset[int] = frozenset(), nbytes: int = 0) -> None:
        self._sliding = frozenset(group.to_bytes(4, "big") for group in sliding)
        self._nbytes = nbytes

    def chunks(self, keys: Iterable[ChunkKey], context: Any) -> list[Chunk]:
        """One chunk a key, in their order. Without positions (vLLM 0.30) a chunk is only a key and a group."""
        positions = _compat.key_positions(context)
        parents: dict[ChunkKey, ChunkKey] = {}
        if positions:
            family = _compat.request_state(context, _Family, _Family)
            family.learn(positions)
            parents = family.parents
        made = []
        for key in keys:
            suffix = key[_SUFFIX]
            parent = None if suffix in self._sliding else parents.get(key)
            made.append(Chunk(key, parent, int.from_bytes(suffix, "big"), positions.get(key, 0), self._nbytes))
        return made


class _Family:
    """Who comes before whom in one request. Learned once a key, however often it is asked for."""

    __slots__ = ("_ends", "_n_seen", "parents")

    def __init__(self, _context: object) -> None:
        self.parents: dict[ChunkKey, ChunkKey] = {}
        self._ends: dict[bytes, tuple[int, ChunkKey]] = {}
        self._n_seen = 0

    def learn(self, positions: Any) -> None:
        if len(positions) == self._n_seen:
            return
        for key, end in islice(positions.items(), self._n_seen, None):
            suffix = key[_SUFFIX]
            before = self._ends.get(suffix)
            if before is not None and before[0] < end:
                self.parents[key] = before[1]
            if before is None or before[0] < end:
                self._ends[suffix] = (end, key)
        self._n_seen = len(positions)
