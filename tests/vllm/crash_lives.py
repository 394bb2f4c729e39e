"""Engines to be killed: our manager and worker over a few tensors, a small pool and a small root, driven hard."""

from __future__ import annotations

import hashlib
import random
import time
from typing import Any

from tests.crash.nursery import Diary
from tests.faults import Faults, Rule
from tests.patience import PATIENCE_S
from tests.vllm.manager_kit import HIT, PAGE_NBYTES, PENDING, RETRY, Kit, keys_of
from tierkv.types import Chunk, EventKind

N_PROMPTS = 12
DEPTH = 4


def content_of(chunk: Chunk) -> bytes:
    """The bytes that the kit's device holds for a key."""
    return hashlib.shake_256(repr(chunk.key).encode()).digest(PAGE_NBYTES)


class _Engine:
    def __init__(self, diary: Diary, root: str, capacity: int, counter: int, settings: dict[str, Any]) -> None:
        self._diary = diary
        calls = Rule(Faults.attach(), counter)
        n_before = calls.n_seen
        diary.say("open", time.monotonic_ns())
        tier = {"type": "fs", "root_dir": root, "capacity": capacity, "min_free": 0, "enable_kv_events": True}
        self.kit = Kit(8, [tier | settings])
        self._n_told = 0
        hierarchy = self.kit.hierarchy
        for name in ("take_transfers", "take_events"):
            setattr(hierarchy, name, self._telling(getattr(hierarchy, name), forget=name == "take_events"))
        self.kit.until(lambda: self._below.answers is not None and self._below.answers.writable(), timeout_s=PATIENCE_S)
        ctx = self._below.tier._mount._ctx
        diary.say("context", ctx.chunk_nbytes, ctx.stride_nbytes, ctx.namespace.hex())
        diary.say("ready", calls.n_seen - n_before, self._below.tier.usage()["n_chunks"])

    @property
    def _below(self) -> Any:
        return self.kit.manager._below.levels[0]

    def _telling(self, take: Any, *, forget: bool) -> Any:
        """Say each event before vLLM could take it, and before the transfers of the same decision are handed over."""

        def wrapped() -> Any:
            events = self.kit.hierarchy._events
            for event in events[self._n_told :]:
                if event.level == 1:
                    self._diary.say(
                        "+" if event.kind is EventKind.STORED else "-", time.monotonic_ns(), event.key.hex()
                    )
            self._n_told = 0 if forget else len(events)
            return take()

        return wrapped

    def store(self, keys: list[Any]) -> None:
        context = self.kit.request(keys)
        self.kit.store(keys, context)
        self.kit.manager.on_request_finished(context)

    def load(self, keys: list[Any]) -> None:
        """As vLLM asks: again in each step until the answer is not "later", then load what leads."""
        context = self.kit.request(keys)
        answers = self.kit.lookup(keys, context)
        while answers[-1] in {PENDING, RETRY}:
            self.kit.step()
            time.sleep(0.001)  # the Mover's thread needs real time
            answers = self.kit.lookup(keys, context)
        n_hits = answers.index(next((a for a in answers if a is not HIT), None)) if set(answers) != {HIT} else len(keys)
        if n_hits:
            self.kit.load(keys[:n_hits], context)
        self.kit.manager.on_request_finished(context)
        self.kit.step()


async def engine(
    diary: Diary, *, root: str, seed: int, capacity: int, counter: int, part: int, n_parts: int, **settings: Any
) -> None:
    """Prompts are stored and loaded at random; now and then the engine ends, with or without telling us. Never ends."""
    assert (part, n_parts) == (0, 1), "one engine has the root to itself"
    rng = random.Random(seed)
    while True:
        running = _Engine(diary, root, capacity, counter, settings)
        for _ in range(rng.randrange(20, 100)):
            keys = keys_of(f"prompt {rng.randrange(N_PROMPTS)}", rng.randint(1, DEPTH))
            if rng.random() < 0.6:
                running.store(keys)
            else:
                running.load(keys)
            running.kit.step()
            list(running.kit.manager.take_events())
        running.kit.close()
