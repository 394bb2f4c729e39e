"""vLLM's own cache policy and ours, called alike: the same stores, transfers and ends of requests, at random."""

from __future__ import annotations

import random
from typing import Any

from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus


def key_of(number: int) -> Any:
    return make_offload_key(number.to_bytes(32, "big"), 0)


class Asker:
    """One request: what it has stored and used so far."""

    def __init__(self, number: int) -> None:
        self.context = ReqContext(req_id=f"r{number}")
        self.seen: dict[Any, None] = {}
        self.inserted: set[Any] = set()
        self.reused: set[Any] = set()


class Twins:
    """Calls both policies as vLLM's manager does, and asserts that they answer alike.

    Chunks stand alone: a store is of one chunk and no key has a position, so that heads and tails play no part.

    Args:
        theirs, ours: two policies for as many chunks.
        capacity: chunks that they hold.
        n_keys: keys drawn from, so that what was evicted comes back; 0 makes each key a new one.
    """

    def __init__(self, theirs: CachePolicy, ours: CachePolicy, capacity: int, *, n_keys: int, seed: int) -> None:
        self.both = (theirs, ours)
        self.capacity = capacity
        self.n_keys = n_keys
        self.random = random.Random(seed)
        self.resident: dict[Any, tuple[ChunkStatus, ChunkStatus]] = {}
        self.askers: list[Asker] = []
        self.n_calls = self.n_evicted = self.n_refused = self.n_returned = 0
        self._n_made = 0
        self._evicted: set[Any] = set()

    def call(self, method: str, *arguments: Any) -> Any:
        """The same call of both; what ours answered."""
        self.n_calls += 1
        theirs, ours = (getattr(policy, method)(*arguments) for policy in self.both)
        if method == "evict":
            named = [None if answer is None else [key for key, _ in answer] for answer in (theirs, ours)]
            assert named[0] == named[1], f"call {self.n_calls}: evict({arguments[0]})"
        return ours

    def run(self, n_calls: int) -> None:
        steps = [self.store] * 6 + [self.end_store] * 6 + [self.load] * 4 + [self.end_load] * 4 + [self.finish] * 2
        steps += [self.touch, self.look]
        while self.n_calls < n_calls:
            self.random.choice(steps)()
            if self.random.random() < 0.0005:
                self.clear()

    # -- steps --------------------------------------------------------------------------------------------------

    def asker(self) -> Asker:
        if len(self.askers) < 4:
            self._n_made += 1
            self.askers.append(Asker(self._n_made))
        return self.random.choice(self.askers)

    def some(self, *, ready: bool) -> list[Any]:
        """Up to three resident keys: ready ones, or ones that are being stored."""
        found = [key for key, (chunk, _) in self.resident.items() if chunk.is_ready == ready]
        return self.random.sample(found, min(len(found), self.random.randint(1, 3)))

    def store(self) -> None:
        asker = self.asker()
        self._n_made += 1
        key = key_of(self.random.randrange(self.n_keys) if self.n_keys else self._n_made)
        if key in self.resident:
            return
        self.call("on_store_miss", [key], asker.context)
        self.n_returned += key in self._evicted
        asker.seen[key] = None
        if len(self.resident) == self.capacity:
            answer = self.call("evict", 1, {key, *self.some(ready=True)})
            if answer is None:
                self.n_refused += 1
                asker.seen.pop(key)
                return
            self.n_evicted += 1
            del self.resident[answer[0][0]]
            self._evicted.add(answer[0][0])
        asker.inserted.add(key)
        chunks = (ChunkStatus(0), ChunkStatus(0))
        self.n_calls += 1
        for policy, chunk in zip(self.both, chunks, strict=True):
            policy.insert(key, chunk)
        self.resident[key] = chunks

    def end_store(self) -> None:
        for key in self.some(ready=False):
            if self.random.random() < 0.05:
                self.call("remove", key)
                del self.resident[key]
                continue
            for chunk in self.resident[key]:
                chunk.ref_cnt = 0
            self.call("mark_evictable", key)

    def load(self) -> None:
        asker = self.asker()
        for key in self.some(ready=True):
            asker.seen[key] = None
            asker.reused |= {key} - asker.inserted
            if self.resident[key][0].ref_cnt == 0:
                self.call("mark_non_evictable", key)
            for chunk in self.resident[key]:
                chunk.ref_cnt += 1

    def end_load(self) -> None:
        for key in self.some(ready=True):
            if self.resident[key][0].ref_cnt == 0:
                continue
            for chunk in self.resident[key]:
                chunk.ref_cnt -= 1
            if self.resident[key][0].ref_cnt == 0:
                self.call("mark_evictable", key)

    def finish(self) -> None:
        if self.askers:
            asker = self.askers.pop(self.random.randrange(len(self.askers)))
            keys = (tuple(asker.seen),)
            self.call("on_request_finished", keys, asker.inserted - asker.reused, asker.reused, asker.context)

    def touch(self) -> None:
        self.call("touch", self.some(ready=self.random.random() < 0.7), self.asker().context)

    def look(self) -> None:
        key = self.random.choice([*self.resident, key_of(self._n_made + 1)])
        found = [policy.get(key) for policy in self.both]
        self.n_calls += 1
        assert tuple(found) == self.resident.get(key, (None, None))

    def clear(self) -> None:
        self.call("clear")
        self.resident.clear()
        self.askers.clear()
        self._evicted.clear()
