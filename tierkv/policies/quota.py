"""Tenants that have had more than their share leave first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from tierkv._turns import hint_aware
from tierkv.errors import bad_setting
from tierkv.policies._leaves import Leaves, Tree
from tierkv.policies._wrapper import Wrapper, copy_of
from tierkv.protocols import CommitAware, EvictionPolicy, HintAware, Refreshing
from tierkv.sizes import parse_size
from tierkv.types import Chunk, ChunkKey, Turn


class Quota(Wrapper):
    """While a tenant's chunks are more than its quota, they are first to leave, until they are no more than it.

    The quota is soft: a tenant may use what nobody else needs. A chunk counts for who stored it, whoever uses it.
    Tenants that are not named have no quota. Where several are over, they give way in the order of ``quotas``.

    A tenant's chunks leave in the order of a copy of the inner order, but leaves first: nobody's quota takes a head
    from under another tenant's tail.

    Args:
        quotas: tenant to bytes, as a number or as a size such as "10GiB".
        order: the order of everything; it must be new, since it is copied.

    Raises:
        ConfigError: a size is not one, or ``order`` is not a new order that can be copied.

    Concurrency: one thread. Cost: that of the inner order, twice for tenants with a quota.
    """

    _learns_from_uses = True

    def __init__(self, quotas: Mapping[str, int | str], order: EvictionPolicy) -> None:
        super().__init__(order)
        if not (quotas and isinstance(quotas, Mapping)):
            raise bad_setting("quotas", quotas, "a mapping of tenant to bytes", example='{"tenant": "10GiB"}')
        self._quotas = {tenant: parse_size(f"quota of {tenant!r}", size, low=0) for tenant, size in quotas.items()}
        self._used_nbytes = dict.fromkeys(self._quotas, 0)
        self._chunks: dict[ChunkKey, Chunk] = {}
        self._tree = Tree()
        self._orders: dict[str | None, EvictionPolicy] = {tenant: copy_of(order) for tenant in self._quotas}
        self._copies = {tenant: own for tenant, own in self._orders.items() if isinstance(own, Refreshing)}
        self._leaves = {tenant: Leaves(own, self._tree) for tenant, own in self._orders.items()}

    def __contains__(self, key: object) -> bool:
        return key in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if self._tree.add(chunk):
                self._chunks[chunk.key] = chunk
                if chunk.tenant in self._quotas:
                    self._used_nbytes[chunk.tenant] += chunk.nbytes
            self._unpark(chunk.parent)
        for tenant, own in self._by_tenant(chunks):
            self._orders[tenant].on_insert(own)
        super().on_insert(chunks)

    def _on_commit(self, key: ChunkKey) -> None:
        own = self._orders.get(self._tenant(key))
        if isinstance(own, CommitAware):
            own.on_commit(key)
        super()._on_commit(key)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        self._moved(chunks)
        for tenant, own in self._by_tenant(chunks):
            self._orders[tenant].on_access(own)
        super().on_access(chunks)

    def _refresh(self, chunks: Sequence[Chunk]) -> None:
        self._moved(chunks)
        for tenant, own in self._by_tenant(chunks):
            self._copies[tenant].refresh(own)
        super()._refresh(chunks)

    def _moved(self, chunks: Sequence[Chunk]) -> None:
        """These have another place in their orders, and may say more of their parents than before."""
        for chunk in reversed(chunks):
            if chunk.key in self._chunks:
                self._tree.add(chunk)
                self._unpark(chunk.key, chunk.parent)

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        tenant = self._tenant(key)
        chunk = self._chunks.pop(key, None)
        freed = self._tree.remove(key)
        if chunk is not None and chunk.tenant in self._quotas:
            self._used_nbytes[chunk.tenant] -= chunk.nbytes
            self._leaves[tenant].forget(key)
            self._orders[tenant].on_remove(key, evicted=evicted)
        self._unpark(freed)
        super().on_remove(key, evicted=evicted)

    def on_hint(self, key: ChunkKey, turn: Turn) -> None:
        """Of a tenant's chunks those to be last leave last; yet all that is over its quota leaves before others'."""
        if (leaves := self._leaves.get(self._tenant(key))) is not None:
            tenant = self._chunks[key].tenant
            own = self._orders[tenant] = hint_aware(self._orders[tenant])
            leaves.follow(own)
            leaves.hint(key, turn)
            assert isinstance(own, HintAware)
            own.on_hint(key, turn)
        super().on_hint(key, turn)

    def hold(self, key: ChunkKey) -> None:
        if (leaves := self._leaves.get(self._tenant(key))) is not None:
            leaves.hold(key)
        super().hold(key)

    def release(self, key: ChunkKey) -> None:
        if (leaves := self._leaves.get(self._tenant(key))) is not None:
            leaves.release(key)
        super().release(key)

    def victims(self) -> Iterator[ChunkKey]:
        """What has expired, where the inner order knows of that; what is over its quota; the rest."""
        rest = self._rest()
        named: set[ChunkKey] = set()
        expired = getattr(self, "expired", None)
        if expired is not None:
            for key in rest:
                if not expired(self._chunks[key]):
                    rest = chain((key,), rest)
                    break
                named.add(key)
                yield key
        for tenant in self._quotas:
            yield from self._over_quota(tenant, named)
        for key in rest:
            if key not in named:
                yield key

    def _over_quota(self, tenant: str, named: set[ChunkKey]) -> Iterator[ChunkKey]:
        """A tenant's chunks, until no more than its quota is left beside what is named already; adds to that."""
        chunks = self._chunks
        over_nbytes = self._used_nbytes[tenant] - self._quotas[tenant]
        over_nbytes -= sum(chunks[key].nbytes for key in named if chunks[key].tenant == tenant)
        if over_nbytes <= 0:
            return
        for key in self._leaves[tenant].victims():
            if key not in named:
                named.add(key)
                yield key
                over_nbytes -= chunks[key].nbytes
                if over_nbytes <= 0:
                    return

    def _unpark(self, *keys: ChunkKey | None) -> None:
        for key in keys:
            if key is not None and (leaves := self._leaves.get(self._tenant(key))) is not None:
                leaves.unpark(key)

    def _tenant(self, key: ChunkKey) -> str | None:
        chunk = self._chunks.get(key)
        return None if chunk is None else chunk.tenant

    def _by_tenant(self, chunks: Sequence[Chunk]) -> Iterator[tuple[str, list[Chunk]]]:
        """The resident chunks of each tenant with a quota, in order; by the tenant that stored them."""
        parts: dict[str, list[Chunk]] = {}
        for chunk in chunks:
            tenant = self._tenant(chunk.key)
            if tenant is not None and tenant in self._quotas:
                parts.setdefault(tenant, []).append(chunk)
        yield from parts.items()
