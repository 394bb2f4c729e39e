"""What an order can do beside the four methods reaches it through whatever is around it, or the table says why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from tierkv._hinted import HintedOrder, Lifetimes
from tierkv._turns import Turns
from tierkv.policies import ARC, FIFO, LRU, S3FIFO, TTL, LeafFirst, Quota
from tierkv.protocols import (
    BatchEvicting,
    CommitAware,
    EvictionPolicy,
    Expiring,
    HintAware,
    PinAware,
    Refreshing,
    Seating,
    UsedByKey,
)
from tierkv.testing import ManualClock
from tierkv.types import Chunk, ChunkKey, Turn

METHODS: dict[type, tuple[str, ...]] = {
    PinAware: ("hold", "release"),
    UsedByKey: ("on_use",),
    CommitAware: ("on_commit",),
    Refreshing: ("refresh",),
    BatchEvicting: ("evict",),
    Seating: ("share", "seat", "touch", "readmit", "unseat", "evict_seats"),
    Expiring: ("expired",),
    HintAware: ("on_hint",),
}


class Plain:
    """An order with the four methods; it notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.keys: dict[ChunkKey, None] = {}

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        self.keys |= dict.fromkeys(chunk.key for chunk in chunks)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        self.told.append("on_access")

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        self.keys.pop(key, None)

    def victims(self) -> Iterator[ChunkKey]:
        return iter(list(self.keys))


def plain_with(*capabilities: type) -> Any:
    """One that can do these things as well."""

    def method(name: str) -> Callable[..., Any]:
        return lambda self, *_: self.told.append(name)

    names = [name for capability in capabilities for name in METHODS[capability]]
    return type("Able", (Plain,), {name: method(name) for name in names})()


class Around(NamedTuple):
    """A wrapper, what it can do whatever is in it, and what it never can."""

    wrap: Callable[[EvictionPolicy], EvictionPolicy]
    always: dict[type, str]
    never: dict[type, str]


_HOLDS = "passes over what is held by itself"
_FIRST = "the inner order would let go of what others leave before, and would not tell"
_PARENTS = "learns from uses who continues whom"
TABLE: dict[str, Around] = {
    "TTL": Around(
        lambda order: TTL(order, 5.0, ManualClock()),
        {PinAware: _HOLDS, HintAware: "with the first", CommitAware: "ages count from it", Expiring: "what it is for"},
        {BatchEvicting: _FIRST, Seating: _FIRST},
    ),
    "LeafFirst": Around(
        LeafFirst,
        {PinAware: _HOLDS, HintAware: "with the first"},
        {BatchEvicting: _FIRST, Seating: _FIRST, UsedByKey: _PARENTS},
    ),
    "Quota": Around(
        lambda order: Quota({"red": 100}, order),
        {PinAware: _HOLDS, HintAware: "with the first"},
        {BatchEvicting: _FIRST, Seating: _FIRST, UsedByKey: _PARENTS},
    ),
    "Turns": Around(
        Turns,
        {PinAware: "of what was hinted it must know", HintAware: "what it is for"},
        {BatchEvicting: _FIRST, Seating: _FIRST},
    ),
}


@pytest.mark.parametrize("capability", METHODS, ids=lambda capability: capability.__name__)
@pytest.mark.parametrize("name", TABLE)
def test_a_wrapper_can_do_what_the_inner_order_can(name: str, capability: type) -> None:
    """No less, or a level pays for what it need not; and no more, or it tells what nobody hears."""
    around = TABLE[name]
    for inner in (plain_with(), plain_with(capability)):
        expected = capability in around.always or (capability not in around.never and isinstance(inner, capability))
        assert isinstance(around.wrap(inner), capability) == expected, type(inner).__name__


@pytest.mark.parametrize("capability", METHODS, ids=lambda capability: capability.__name__)
def test_a_hinted_order_can_do_what_the_inner_order_can(capability: type) -> None:
    """It says by methods of its own who leaves first, and so takes no hints; all else is the inner order's."""
    for extra in ((), (capability,)):
        inner = plain_with(HintAware, *(each for each in extra if each is not HintAware))
        hinted = HintedOrder(inner, Lifetimes(), ManualClock())
        assert isinstance(hinted, capability) == (capability is not HintAware and isinstance(inner, capability))


@pytest.mark.parametrize("name", TABLE)
def test_what_is_passed_on_arrives_also_after_a_hint(name: str) -> None:
    """With the first hint another order comes between; that changes nothing."""
    inner = plain_with(UsedByKey, CommitAware, Refreshing)
    order: Any = TABLE[name].wrap(inner)
    by_key = hasattr(order, "on_use")
    chunk = Chunk(ChunkKey(b"k"), nbytes=1)
    order.on_insert([chunk])
    for hint in (None, Turn.LAST):
        if hint is not None:
            order.on_hint(chunk.key, hint)
        inner.told.clear()
        order.on_commit(chunk.key)
        order.refresh([chunk])
        if by_key:
            order.on_use([chunk.key])
        else:
            order.on_access([chunk])
        assert inner.told == ["on_commit", "refresh", "on_use" if by_key else "on_access"]


def test_a_use_by_key_is_a_use_within_a_ttl() -> None:
    """What is used is named as late as where its chunk is told, whatever way the level tells it."""
    orders = [TTL(S3FIFO(), 5.0, ManualClock()) for _ in range(2)]
    chunks = [Chunk(ChunkKey(b"%d" % i), nbytes=1) for i in range(8)]
    for order in orders:
        for chunk in chunks:
            order.on_insert([chunk])
    assert isinstance(orders[0], UsedByKey)
    for _ in range(2):
        orders[0].on_use([chunk.key for chunk in chunks[:3]])
        orders[1].on_access(chunks[:3])
    assert list(orders[0].victims()) == list(orders[1].victims())


@pytest.mark.parametrize("order", [LRU, ARC])
def test_a_refreshed_head_is_as_late_under_its_tail_as_beside_it(order: type[Any]) -> None:
    """A head that was passed over for its tail, and then made recent, does not leave with it."""
    head, tail = Chunk(ChunkKey(b"head")), Chunk(ChunkKey(b"tail"), parent=ChunkKey(b"head"))
    other = Chunk(ChunkKey(b"other"))
    wrapped = LeafFirst(order())
    for chunk in (head, tail, other):
        wrapped.on_insert([chunk])
    assert list(wrapped.victims()) == [tail.key, head.key, other.key], "the head is passed over from now on"
    wrapped.refresh([head])
    assert list(wrapped.victims()) == [tail.key, other.key, head.key]


def test_a_quotas_own_orders_are_refreshed_too() -> None:
    """Of a tenant over its quota what was made recent leaves last."""
    order = Quota({"red": 1}, LRU())
    chunks = [Chunk(ChunkKey(b"%d" % i), nbytes=1, tenant="red") for i in range(3)]
    for chunk in chunks:
        order.on_insert([chunk])
    order.refresh([chunks[0]])
    assert list(order.victims())[:2] == [chunks[1].key, chunks[2].key]


def test_a_wrapper_without_a_listener_costs_a_level_nothing_at_a_commit() -> None:
    """FIFO does not care when a chunk can be read."""
    assert not isinstance(LeafFirst(FIFO()), CommitAware)
    assert isinstance(LeafFirst(TTL(FIFO(), 5.0)), CommitAware)
