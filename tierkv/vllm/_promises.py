"""Who waits for what in vLLM's tiering manager, as one of its tiers can tell: so that nobody waits for ever.

vLLM's manager looks up all of a waiting request's keys again in each step and promotes what a tier says it has, at the
cost of whatever lies idle in its primary, also of what it has promoted before and nobody has read yet. A request whose
prefix is larger than the primary is promoted round and round and never answered. A tier can end that: it brings a chunk
up once for each request, and no more for all that wait than the primary can hold beside the stores of those that run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tierkv.types import ChunkKey
from tierkv.vllm import _compat


class Asker:
    """One request, from its first lookup on."""

    __slots__ = ("deadline_s", "probe_deadline_s", "promised")

    def __init__(self, _context: object = None) -> None:
        self.promised: set[ChunkKey] = set()
        """Answered as hits while it waits."""
        self.deadline_s: float | None = None
        """When it is told to wait no longer; None until it was told to wait."""
        self.probe_deadline_s: float | None = None


class Promises:
    """The answers that requests are waiting on.

    Args:
        n_most: chunks of vLLM's primary that may be promised to requests that wait; the rest is left to stores.
    """

    def __init__(self, n_most: int) -> None:
        self._kind = type("Asker", (Asker,), {"__slots__": ()})  # a request keeps one for each tier
        self._n_most = max(1, n_most)
        self._n_promised = 0
        self._waiting: dict[str, Asker] = {}

    def asker(self, context: Any) -> Asker:
        return _compat.request_state(context, self._kind, self._kind)

    def may_promise(self, asker: Asker, key: ChunkKey) -> bool:
        """Whether a key that the tier holds may be answered as a hit."""
        return key not in asker.promised and self._n_promised < self._n_most

    def promise(self, context: Any, asker: Asker, key: ChunkKey) -> None:
        asker.promised.add(key)
        self._n_promised += 1
        self._waiting[context.req_id] = asker

    def settle(self, req_ids: Iterable[str]) -> None:
        """These requests run now, have ended, or begin again: what they waited for is used, or of no use."""
        for req_id in req_ids:
            asker = self._waiting.pop(req_id, None)
            if asker is not None:
                self._n_promised -= len(asker.promised)
                asker.promised.clear()
                asker.deadline_s = asker.probe_deadline_s = None

    def clear(self) -> None:
        self.settle(list(self._waiting))
