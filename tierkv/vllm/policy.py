"""tierkv's eviction orders as vLLM's ``CachePolicy``: for those who stay on vLLM's own offloading spec.

::

    {"eviction_policy": "leaf_first > mq", "cache_policy_module_path": "tierkv.vllm", "cpu_bytes_to_use": ...}

vLLM looks for its own two names first: ``lru`` and ``arc`` stay vLLM's, ``LRU`` and ``ARC`` are ours.

vLLM's policy is an index and an order in one, and it hears of a request in pieces: what it misses, then each chunk on
its own, then, when it has ended, which chunks it used. Our orders hear of each request's chunks together and in prefix
order, so that they can prefer tails to heads. What lies between is here.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, ClassVar

from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

from tierkv.errors import bad_setting
from tierkv.policies import Quota
from tierkv.policies._queues import TwoQueues
from tierkv.policies._wrapper import Wrapper
from tierkv.policies.parse import parse_policy
from tierkv.protocols import EvictionPolicy, Expiring, PinAware, Refreshing
from tierkv.types import Chunk, ChunkKey
from tierkv.vllm import _compat
from tierkv.vllm._lineage import Lineage

_OWN_SPEC = "in TierKVOffloadingSpec it works"
_end_token = attrgetter("end_token")


class TierKVCachePolicy(CachePolicy):  # type: ignore[misc]
    """One of our orders behind vLLM's interface. ``policy_class`` makes a subclass for each text.

    - A store that finds no room changes nothing: neither order, ghosts nor targets.
    - What a transfer uses is skipped without a scan, however much of it there is.
    - A chunk goes before the chunks of its prefix that lie in front of it while its request still runs, and nothing of
      a prefix goes while something behind it is in use (LRU, and every order under ``leaf_first``).

    Args:
        cache_capacity: chunks that vLLM's primary tier holds.

    Raises:
        ConfigError: the text is no order, or one that vLLM's interface cannot serve.

    Concurrency: the scheduler's thread alone.
    """

    text: ClassVar[str] = "lru"
    """The order, as an operator wrote it."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._lineage = Lineage(_compat.sliding_group_ids())
        self._chunks: dict[ChunkKey, Any] = {}
        self.get = self._chunks.get  # type: ignore[assignment,method-assign]  # every lookup comes by
        self._begin()

    def _begin(self) -> None:
        self._order = order = make_order(self.text)
        self._pins = order if isinstance(order, PinAware) else None
        self._refresh = order.refresh if isinstance(order, Refreshing) else None
        self._has_ghosts = isinstance(_innermost(order), TwoQueues)
        self._fresh: list[Chunk] = []
        """Inserted, and not told to the order yet: it hears of the chunks of one store together."""
        self._missed: dict[ChunkKey, Chunk] = {}
        """What the latest request asked to store."""
        self._told = True
        """Whether an order with ghosts has heard of ``_missed``."""

    def get(self, key: ChunkKey) -> Any:
        """The chunk's status, or None."""
        return self._chunks.get(key)

    # -- in and out ---------------------------------------------------------------------------------------------

    def insert(self, key: ChunkKey, chunk: Any, req_context: Any = None) -> None:
        """A chunk that is about to be filled. From 0.33 on vLLM says for whom; before, ``on_store_miss`` has."""
        known = self._missed.get(key)
        if known is None:
            (known,) = self._lineage.chunks((key,), req_context)
        self._chunks[key] = chunk
        self._fresh.append(known)

    def remove(self, key: ChunkKey) -> None:
        """A store that failed: no ghost is kept."""
        self._settle()
        del self._chunks[key]
        self._order.on_remove(key, evicted=False)

    def evict(self, n: int, protected: set[ChunkKey]) -> list[tuple[ChunkKey, Any]] | None:
        """Exactly ``n`` chunks that nobody uses and that are not protected, or None, and then nothing has changed."""
        self._settle()
        if n == 0:
            return []
        spared = self._spare(protected)
        try:
            victims = self._name(n, spared)
            if victims is not None and not self._told:
                # Only now: an order must not learn from a store that will be refused.
                self._told = True
                self._order.on_access(list(self._missed.values()))
                victims = self._name(n, spared)
        finally:
            self._unspare(spared)
        if victims is None:
            return None
        gone = []
        for key in victims:
            self._order.on_remove(key, evicted=True)
            gone.append((key, self._chunks.pop(key)))
        return gone

    def clear(self) -> None:
        """Forget everything, what was learned too."""
        self._chunks.clear()
        self._begin()

    # -- uses ---------------------------------------------------------------------------------------------------

    def on_store_miss(self, keys: Iterable[ChunkKey], req_context: Any) -> None:
        """A request will store these. Nothing is learned from it until there is room for them."""
        self._settle()
        self._missed = {chunk.key: chunk for chunk in self._lineage.chunks(keys, req_context)}
        self._told = not self._has_ghosts

    def touch(self, keys: Iterable[ChunkKey], req_context: Any) -> None:
        """A use of what can be read; of what is still being filled it is none (0.30 tells of every store so)."""
        self._settle()
        chunks = self._lineage.chunks(keys, req_context)
        self._use(chunks, {chunk.key for chunk in chunks if self._is_ready(chunk.key)})
        missing = {chunk.key: chunk for chunk in chunks if chunk.key not in self._chunks}
        if missing:
            self._missed, self._told = missing, not self._has_ghosts

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[ChunkKey]],
        insertion_only_keys: set[ChunkKey],  # noqa: ARG002 (all that were not reused)
        reused_keys: set[ChunkKey],
        req_context: Any,
    ) -> None:
        """One use of what the request reused; what it only stored becomes recent again, which is no use."""
        self._settle()
        self._use(self._lineage.chunks((key for keys in key_groups for key in keys), req_context), reused_keys)

    def mark_evictable(self, key: ChunkKey) -> None:
        """No transfer uses it any more."""
        self._settle()
        if self._pins is not None:
            self._pins.release(key)

    def mark_non_evictable(self, key: ChunkKey) -> None:
        self._settle()
        if self._pins is not None:
            self._pins.hold(key)

    # -- inside -------------------------------------------------------------------------------------------------

    def _is_ready(self, key: ChunkKey) -> bool:
        chunk = self._chunks.get(key)
        return chunk is not None and chunk.ref_cnt >= 0

    def _settle(self) -> None:
        """Tell the order of what has been inserted since, all at once and in prefix order."""
        if not self._fresh:
            return
        fresh, self._fresh = self._fresh, []
        fresh.sort(key=_end_token)
        self._order.on_insert(fresh)
        if self._pins is not None:
            for chunk in fresh:
                if self._chunks[chunk.key].ref_cnt:
                    self._pins.hold(chunk.key)

    def _use(self, chunks: list[Chunk], used: Collection[ChunkKey]) -> None:
        """Tell the order of a request's resident chunks, tail first, uses and mere refreshing as they alternate."""
        here = [chunk for chunk in chunks if chunk.key in self._chunks]
        if all(chunk.end_token for chunk in here):
            here.sort(key=_end_token)
        for is_use, run in groupby(reversed(here), key=lambda chunk: chunk.key in used):
            tell = self._order.on_access if is_use else self._refresh
            if tell is not None:
                tell(list(run)[::-1])

    def _spare(self, protected: Iterable[ChunkKey]) -> list[ChunkKey]:
        """Hold what this store offers, and the heads that it will be attached to, for the time of one eviction."""
        parents = (chunk.parent for chunk in self._missed.values())
        keys = dict.fromkeys((*protected, *(key for key in parents if key is not None)))
        chunks = self._chunks
        spared = [key for key in keys if key in chunks and not chunks[key].ref_cnt]
        if self._pins is not None:
            for key in spared:
                self._pins.hold(key)
        return spared

    def _unspare(self, spared: Iterable[ChunkKey]) -> None:
        if self._pins is not None:
            for key in spared:
                self._pins.release(key)

    def _name(self, n: int, spared: Collection[ChunkKey]) -> list[ChunkKey] | None:
        victims: Iterator[ChunkKey] = self._order.victims()
        if self._pins is None:  # somebody's order that must be walked
            not_these = frozenset(spared)
            victims = (key for key in victims if not self._chunks[key].ref_cnt and key not in not_these)
        named = list(islice(victims, n))
        return named if len(named) == n else None


@functools.cache
def policy_class(text: str) -> type[TierKVCachePolicy]:
    """The policy class for an order's text.

    Raises:
        ConfigError: as :func:`make_order`.
    """
    make_order(text)
    return type("TierKVCachePolicy", (TierKVCachePolicy,), {"text": text, "__module__": __name__})


def make_order(text: str) -> EvictionPolicy:
    """The order that a text describes, if it can be kept behind vLLM's interface.

    Raises:
        ConfigError: it is no order, lets chunks expire (vLLM never asks), or counts bytes (vLLM does not tell them).
    """
    order = parse_policy("eviction_policy", text)
    if isinstance(order, Expiring):
        why = "an order without expiry, which vLLM's own spec never asks for"
        raise bad_setting("eviction_policy", text, f"{why} ({_OWN_SPEC})")
    if any(isinstance(each, Quota) for each in _layers(order)):
        why = "an order without quotas in bytes, which vLLM's own spec does not tell its policy"
        raise bad_setting("eviction_policy", text, f"{why} ({_OWN_SPEC})")
    return order


def _layers(order: EvictionPolicy) -> Iterator[EvictionPolicy]:
    yield order
    while isinstance(order, Wrapper):
        order = order._order  # noqa: SLF001 (a wrapper says nothing of what it wraps, and need not)
        yield order


def _innermost(order: EvictionPolicy) -> EvictionPolicy:
    return list(_layers(order))[-1]
