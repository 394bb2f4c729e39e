"""SIEVE with holds against its definition: chunks by stamp, sorted anew each time, and whoever is held left out."""

from __future__ import annotations

import random
from itertools import islice

from tierkv.policies import SIEVE
from tierkv.policies._laps import LAP
from tierkv.types import Chunk, ChunkKey

KEYS = [ChunkKey(bytes([letter])) for letter in b"abcdef"]
N_RUNS, N_STEPS = 4_000, 40


def chunks(keys: list[ChunkKey]) -> list[Chunk]:
    return [Chunk(key, None, 0, 1, 1) for key in keys]


class ByStamp:
    """The same stamps in a plain dictionary."""

    def __init__(self) -> None:
        self.stamps: dict[ChunkKey, int] = {}
        self.held: set[ChunkKey] = set()
        self.hand = self.place = 0

    def on_insert(self, keys: list[ChunkKey]) -> None:
        if self.hand % LAP >= self.place:
            self.hand += LAP - self.place
        for key in reversed(keys):
            if key not in self.stamps:
                self.place += 1
                self.stamps[key] = self.hand // LAP * LAP + self.place

    def on_access(self, keys: list[ChunkKey]) -> None:
        lap, place_of_hand = self.hand // LAP * LAP, self.hand % LAP
        for key in keys:
            if key in self.stamps:
                place = self.stamps[key] % LAP
                self.stamps[key] = lap + place + (LAP if place > place_of_hand else 2 * LAP)

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        stamp = self.stamps.pop(key, 0)
        self.held.discard(key)
        if evicted:
            self.hand = max(self.hand, stamp)

    def victims(self) -> list[ChunkKey]:
        return sorted(self.stamps.keys() - self.held, key=self.stamps.__getitem__)


def step(rng: random.Random, order: SIEVE, model: ByStamp) -> None:
    """One call, or one eviction, on both."""
    keys = rng.sample(KEYS, rng.choice([1, 1, 2]))
    match rng.choice(["insert", "access", "hold", "release", "evict", "take", "pick", "delete", "ask"]):
        case "insert":
            order.on_insert(chunks(keys))
            model.on_insert(keys)
        case "access":
            order.on_access(chunks(keys))
            model.on_access(keys)
        case "hold":
            order.hold(keys[0])
            model.held.update(keys[:1] if keys[0] in model.stamps else [])
        case "release":
            order.release(keys[0])
            model.held.discard(keys[0])
        case "pick" | "delete" as how:
            # Whoever picks out of turn is an order around this one: it spares some.
            evicted = how == "pick" and keys[0] in model.victims()
            order.on_remove(keys[0], evicted=evicted)
            model.on_remove(keys[0], evicted=evicted)
        case how:
            ask(how, order, model)


def ask(how: str, order: SIEVE, model: ByStamp) -> None:
    """For all that may leave; or for some that then do, in either way."""
    leaving = model.victims()[: {"ask": None, "evict": 2, "take": 1}[how]]
    if how == "evict":
        assert order.evict(2) == leaving
    else:
        assert list(islice(order.victims(), None if how == "ask" else len(leaving))) == leaving
    for key in leaving if how != "ask" else ():
        order.on_remove(key, evicted=True)
        model.on_remove(key, evicted=True)


def test_victims_are_those_of_the_stamps() -> None:
    """Whoever is held and let go, and whenever victims are asked for, the order is that of the stamps."""
    for seed in range(N_RUNS):
        rng = random.Random(seed)
        order, model = SIEVE(), ByStamp()
        for _ in range(N_STEPS):
            step(rng, order, model)


def test_a_hold_that_ends_between_two_questions() -> None:
    """A chunk that was passed over behind a held one does not overtake it when that one is let go."""
    order = SIEVE()
    a, b, c = KEYS[:3]
    order.on_insert(chunks([b, a]))
    order.on_insert(chunks([c]))
    order.on_access(chunks([a, b, c]))
    order.hold(b)
    assert list(order.victims()) == [a, c]
    order.release(b)
    assert order.evict(3) == [a, b, c]
