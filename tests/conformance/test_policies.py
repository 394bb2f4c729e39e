"""Every order of ``tierkv.policies`` passes the kit: alone, under LeafFirst, and in wrappers. New ones are found."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

import tierkv.policies
from tierkv._turns import hint_aware
from tierkv.policies import ARC, FIFO, LRU, SIEVE, TTL, LeafFirst, Quota
from tierkv.policies.parse import parse_policy
from tierkv.protocols import EvictionPolicy
from tierkv.testing import ManualClock, check_policy
from tierkv.types import Chunk, ChunkKey

pytestmark = pytest.mark.timeout(600)
FEW = settings(max_examples=40)

WRAPPERS: set[Any] = {TTL, LeafFirst, Quota}
ORDERS = sorted(
    (
        value
        for name in tierkv.policies.__all__
        if inspect.isclass(value := getattr(tierkv.policies, name)) and value not in WRAPPERS
    ),
    key=lambda order: order.__name__,
)
QUOTAS = {"red": 200, "blue": 60}
NAMED = ["2q", "arc", "fifo", "lfu", "lru", "mq", "s3fifo", "sieve", "two_q"]


def test_all_orders_are_found() -> None:
    """What is collected is what the literature of the package says, at least."""
    assert {"ARC", "FIFO", "LFU", "LRU", "MQ", "S3FIFO", "SIEVE", "TwoQ"} <= {order.__name__ for order in ORDERS}


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_an_order_conforms(order: type[EvictionPolicy]) -> None:
    """Each resident key once, holds respected, the same for the same calls, deletes forgotten, memory bounded."""
    report = check_policy(order, leaves=order is LRU, settings=FEW)
    assert {"PinAware", "forgets deletes", "asking changes nothing"} <= set(report.passed)


@pytest.mark.parametrize("order", [FIFO, SIEVE, ARC], ids=lambda order: order.__name__)
def test_an_order_that_was_hinted_conforms(order: type[EvictionPolicy]) -> None:
    """What a level makes of it with the first hint: hinted chunks first and last, all the rest as it was."""
    report = check_policy(lambda: hint_aware(order()), settings=FEW)
    assert {"PinAware", "HintAware", "asking changes nothing"} <= set(report.passed)


def test_asking_sieve_changes_nothing() -> None:
    """A used chunk that was met while held leaves after one that was never used, whether somebody asked or not."""
    held, other, late = (Chunk(ChunkKey(name)) for name in (b"held", b"other", b"late"))
    orders = []
    for asks in (False, True):
        policy = SIEVE()
        for step in (
            lambda policy: (policy.on_insert([held]), policy.hold(held.key)),
            lambda policy: (policy.on_insert([other]), policy.hold(other.key)),
            lambda policy: policy.release(held.key),
            lambda policy: policy.on_access([held]),
            lambda policy: policy.on_insert([late]),
        ):
            step(policy)
            if asks:
                list(policy.victims())
        orders.append(list(policy.victims()))
    assert orders[0] == orders[1] == [late.key, held.key]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_no_head_leaves_before_its_tail_under_leaf_first(order: type[EvictionPolicy]) -> None:
    """Also where a request arrives in pieces of one chunk, and where a chunk learns late who its parent is."""
    check_policy(lambda: LeafFirst(order()), leaves=True, pure=False, settings=FEW)


@pytest.mark.parametrize("name", NAMED)
def test_an_order_by_name_conforms(name: str) -> None:
    """What a user writes gives an order that conforms, with expiry around it and tails first."""
    clock = ManualClock()
    text = f"ttl(5) > leaf_first > {name}"
    report = check_policy(
        lambda: parse_policy("eviction_policy", text, clock=clock),
        clock=clock, ttl_s=5.0, pure=False, settings=FEW,
    )  # fmt: skip
    assert "Expiring" in report.passed


WRAPPED: dict[str, tuple[Callable[[ManualClock], EvictionPolicy], dict[str, Any]]] = {
    "ttl of lru": (lambda clock: TTL(LRU(), 5, clock), {}),
    "leaf_first of ttl of fifo": (lambda clock: LeafFirst(TTL(FIFO(), 5, clock)), {"pure": False, "leaves": True}),
    "quota of lru": (lambda _: Quota(QUOTAS, LRU()), {"pure": False, "leaves": True, "ttl_s": None, "turns": False}),
    "quota of ttl": (lambda clock: Quota(QUOTAS, TTL(LRU(), 5, clock)), {"pure": False, "turns": False}),
    "ttl of quota": (lambda clock: TTL(Quota(QUOTAS, LRU()), 5, clock), {"pure": False, "turns": False}),
    "ttl of ttl": (lambda clock: TTL(TTL(LRU(), 7, clock), 5, clock), {}),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_nest(name: str) -> None:
    """Wrapped orders conform as orders do, and expire at their age."""
    clock = ManualClock()
    make, options = WRAPPED[name]
    check_policy(lambda: make(clock), clock=clock, settings=FEW, **({"ttl_s": 5.0} | options))


def test_a_quota_takes_no_more_than_what_is_over() -> None:
    """What is exactly at its quota is not over it; a chunk that has left counts no more."""
    policy = Quota({"red": 100}, FIFO())
    chunks = [Chunk(ChunkKey(b"%d" % i), nbytes=50, tenant="blue" if i < 2 else "red") for i in range(6)]
    policy.on_insert(chunks[:2])
    for chunk in chunks[2:]:
        policy.on_insert([chunk])
    blue = {chunk.key for chunk in chunks[:2]}
    assert next(iter(policy.victims())) == chunks[2].key, "200 of 100 bytes: the oldest of the tenant first"
    order = list(policy.victims())
    assert set(order[:2]) == {chunks[2].key, chunks[3].key}, "the two that are over"
    assert set(order[2:4]) == blue, "then everybody in the inner order's order"
    for chunk in chunks[2:4]:
        policy.on_remove(chunk.key, evicted=True)
    assert set(list(policy.victims())[:2]) == blue, "100 of 100 bytes: nobody is over"
