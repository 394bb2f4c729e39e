"""How a ledger tells its policy of chunks: in batches of entries, whatever the policy can do.

A :class:`KeyedOrder` tells any policy by key, through its protocol and its optional capabilities. A
:class:`SeatedOrder` lends the entries themselves to a policy that can rank those: a hold is a flag then, and what
leaves comes back as entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from tierkv._entry import READY, Entry, chunks_of
from tierkv.protocols import BatchEvicting, CommitAware, EvictionPolicy, PinAware, Seating, UsedByKey
from tierkv.types import Chunk, ChunkKey


class KeyedOrder:
    """By key.

    Args:
        policy: any order.
        index: the ledger's entries. Entries that enter are in it before the order hears of them.
    """

    def __init__(self, policy: EvictionPolicy, index: Mapping[ChunkKey, Entry]) -> None:
        self._policy = policy
        self._index = index
        self._pins = policy if isinstance(policy, PinAware) else None
        self._commits = policy if isinstance(policy, CommitAware) else None
        self._batches = policy if isinstance(policy, BatchEvicting) else None
        self._uses = policy if isinstance(policy, UsedByKey) else None

    def seat(self, entries: Sequence[Entry]) -> None:
        """Entries of ours that are new, PENDING or READY, in prefix order."""
        self.insert(entries, chunks_of(entries))

    def insert(self, entries: Sequence[Entry], chunks: Sequence[Chunk]) -> None:
        """:meth:`seat` where their chunks are at hand."""
        self._policy.on_insert(chunks)
        if self._pins is not None:
            hold = self._pins.hold
            for entry in entries:
                if entry.holds:
                    hold(entry.key)

    def commit(self, entries: Sequence[Entry]) -> None:
        """Entries that have become READY."""
        if self._commits is not None:
            for entry in entries:
                self._commits.on_commit(entry.key)
        if self._pins is not None:
            for entry in entries:
                if not entry.holds:
                    self._pins.release(entry.key)

    def access(self, entries: Sequence[Entry], *, learned: bool) -> None:  # noqa: ARG002 - all policies are told alike
        """One request used these entries of ours; ``learned``: some chunk says more of its parent than before."""
        if self._uses is not None:
            self._uses.on_use([entry.key for entry in entries])
        else:
            self._policy.on_access(chunks_of(entries))

    def hold(self, entries: Iterable[Entry]) -> None:
        """Entries that were not held and now are. A PENDING one has been from the start."""
        if self._pins is not None:
            for entry in entries:
                if entry.state is READY and entry.owned:
                    self._pins.hold(entry.key)

    def release(self, entries: Iterable[Entry]) -> None:
        """Entries that are held no more."""
        if self._pins is not None:
            for entry in entries:
                if entry.state is READY and entry.owned:
                    self._pins.release(entry.key)

    def remove(self, entry: Entry, *, evicted: bool) -> None:
        self._policy.on_remove(entry.key, evicted=evicted)

    def evict(self, n_chunks: int, spared: Iterable[Entry]) -> list[Entry] | None:
        """Forget the first ``n_chunks`` that may leave and are not ``spared``. None: the policy cannot."""
        if self._batches is None or self._pins is None:
            return None
        spared = [entry for entry in spared if not entry.holds]
        for entry in spared:
            self._pins.hold(entry.key)
        gone = [self._index[key] for key in self._batches.evict(n_chunks)]
        for entry in spared:
            self._pins.release(entry.key)
        return gone

    def check(self) -> None:
        """The policy names every entry that may leave, once; of the others it may skip the busy and their ancestors."""
        order = list(self._policy.victims())
        assert len(order) == len(set(order)), "the policy names a key once"
        owned = {key: entry for key, entry in self._index.items() if entry.owned}
        busy: set[ChunkKey] = set()
        for entry in owned.values():
            up: Entry | None = entry if entry.holds else None
            while up is not None and up.key not in busy:
                busy.add(up.key)
                up = owned.get(up.parent) if up.parent is not None else None
        assert owned.keys() - busy <= set(order) <= owned.keys(), "the policy orders what is resident, all of it"


class SeatedOrder(KeyedOrder):
    """By entry, each of which is the policy's seat. The ledger counts in the entry itself who holds it.

    Args:
        policy: an order that has no chunks yet.
        index: lent to it.
    """

    def __init__(self, policy: Seating, index: Mapping[ChunkKey, Entry]) -> None:
        super().__init__(cast("EvictionPolicy", policy), index)
        policy.share(index)
        self._seating = policy
        # What costs every chunk a call goes straight to the policy.
        direct: Any = policy
        self.seat = direct.seat  # type: ignore[method-assign]
        self.release = direct.readmit  # type: ignore[method-assign]
        if self._commits is None:
            self.commit = direct.readmit  # type: ignore[method-assign]

    def insert(self, entries: Sequence[Entry], chunks: Sequence[Chunk]) -> None:  # noqa: ARG002 - entries say it all
        self.seat(entries)

    def commit(self, entries: Sequence[Entry]) -> None:
        if self._commits is not None:
            for entry in entries:
                self._commits.on_commit(entry.key)
        self._seating.readmit(entries)

    def access(self, entries: Sequence[Entry], *, learned: bool) -> None:
        if learned:
            super().access(entries, learned=learned)
        else:
            self._seating.touch(entries)

    def hold(self, entries: Iterable[Entry]) -> None:
        """Nothing: who is held says so."""

    def remove(self, entry: Entry, *, evicted: bool) -> None:  # noqa: ARG002 - it keeps no ghosts
        self._seating.unseat(entry)

    def evict(self, n_chunks: int, spared: Iterable[Entry]) -> list[Entry] | None:
        spared = list(spared)
        for entry in spared:
            entry.holds += 1
        gone = cast("list[Entry]", self._seating.evict_seats(n_chunks))  # they are ours: nobody else lends it any
        for entry in spared:
            entry.holds -= 1
        self._seating.readmit(spared)
        return gone

    def check(self) -> None:
        super().check()
        victims = set(self._policy.victims())
        for entry in self._index.values():
            assert bool(entry.stamp) == entry.owned, "the policy ranks what is ours, and nothing else"
            assert not (entry.owned and entry.holds and entry.key in victims), "what is held is no victim"
