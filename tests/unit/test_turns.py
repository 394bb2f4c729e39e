"""Orders that know no hints, and are told of them by the one around them."""

from __future__ import annotations

import random

import pytest

from tests.property.test_policies import ORDERS
from tierkv._turns import Line, hint_aware
from tierkv.protocols import HintAware, PinAware
from tierkv.types import Chunk, ChunkKey, Turn

KEYS = [ChunkKey(bytes([letter])) for letter in b"abcdef"]


@pytest.mark.parametrize("name", sorted(set(ORDERS) - {"lru"}))
@pytest.mark.parametrize("turn", [Turn.FIRST, Turn.LAST])
def test_a_hold_moves_nobody(name: str, turn: Turn) -> None:
    """Hinted chunks keep their order whoever was held: a demoted one is dropped before the next is copied."""
    order = hint_aware(ORDERS[name]())
    assert isinstance(order, HintAware)
    assert isinstance(order, PinAware)
    order.on_insert([Chunk(key, None, 0, 1, 1) for key in KEYS])
    for key in KEYS[:4]:
        order.on_hint(key, turn)
    before = list(order.victims())
    for key in (KEYS[0], KEYS[2], KEYS[0], KEYS[1]):
        order.hold(key)
        assert key not in list(order.victims())
        order.release(key)
        assert list(order.victims()) == before


def test_a_line_is_what_it_was_put() -> None:
    """Against a plain list, with holds, over 2,000 random runs."""
    for seed in range(2_000):
        rng = random.Random(seed)
        line, plain, held = Line(), list[ChunkKey](), set[ChunkKey]()
        for _ in range(30):
            key = rng.choice(KEYS)
            match rng.choice(["put", "discard", "hold", "release"]):
                case "put":
                    line.put(key)
                    plain = [*(other for other in plain if other != key), key]
                    held.discard(key)
                case "discard":
                    line.discard(key)
                    plain = [other for other in plain if other != key]
                    held.discard(key)
                case "hold":
                    line.hold(key)
                    held |= {key} & set(plain)
                case "release":
                    line.release(key)
                    held.discard(key)
            assert list(line) == [other for other in plain if other not in held]
            assert bool(line) == bool(plain)
            assert all(line.has_held(other) == (other in held) for other in KEYS)
