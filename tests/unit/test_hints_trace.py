"""What hints gain on a recorded trace of conversations, and what wrong ones cost, through the real hierarchy.

All figures of the eviction guide: ``TIERKV_TRACES=... python -m tests.unit.test_hints_trace``.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.unit.test_policy_trace import TOKENS, Request, read
from tierkv._hierarchy import Hierarchy
from tierkv._hints import Hint, Hints
from tierkv._level import LevelPlan, Writes
from tierkv.policies import LRU
from tierkv.types import Chunk, ChunkKey, Outcome, Status

NBYTES = 1


class Oracle:
    """Says dead of what no later request uses: of a request in ``recall`` of all cases, and wrongly in ``wrong``."""

    def __init__(self, requests: list[Request], recall: float, wrong: float, seed: int) -> None:
        last = {block.key: i for i, request in enumerate(requests) for block in request.blocks}
        self._n_alive = [
            next((n for n in range(len(r.blocks), 0, -1) if last[r.blocks[n - 1].key] > i), 0)
            for i, r in enumerate(requests)
        ]
        self._recall, self._wrong = recall, wrong
        self._right_draws, self._wrong_draws = random.Random(seed), random.Random(f"wrong {seed}")

    def dead(self, i: int, blocks: list[Chunk]) -> list[Chunk]:
        """A request's tail that is never used again, or nothing; a wrong hint is about all of its blocks."""
        right = self._right_draws.random() < self._recall
        wrong = self._wrong_draws.random() < self._wrong
        return blocks if wrong else blocks[self._n_alive[i] :] if right else []


class Replay:
    """Requests in order: the longest prefix that some level holds is the hit; then all blocks are used or stored."""

    def __init__(self, n_slots: int, n_below: int = 0) -> None:
        plans = [LevelPlan("memory", 0, LRU(), n_slots=n_slots, slot_nbytes=NBYTES)]
        if n_below:
            below = LevelPlan("disk", n_below * NBYTES, LRU(), writes=Writes.DEMOTE, high_water=0.0, low_water=0.0)
            plans.append(below)
        self.h = Hierarchy(plans)
        self.hints = Hints([level.ledger for level in self.h.levels], lambda: 0.0)
        self.n_tokens = self.n_hit_tokens = self.n_memory_tokens = 0

    def run_transfers(self) -> None:
        while transfers := self.h.take_transfers():
            for transfer in transfers:
                self.h.finish(transfer.id, Outcome(transfer.chunk.key, Status.OK))

    def serve(self, request: Request, dead: Iterable[Chunk]) -> None:
        h, blocks = self.h, request.blocks
        hit, hit_levels = h.lookup(blocks)[:2]
        self.n_hit_tokens += min(len(hit) * TOKENS, request.n_tokens)
        self.n_memory_tokens += min(hit_levels.count(0) * TOKENS, request.n_tokens)
        self.n_tokens += request.n_tokens
        if len(h.levels) > 1:
            h.promote(hit)
            self.run_transfers()
        h.access(blocks)
        while True:
            offer = h.offer(blocks, tentative=True)
            h.commit_store(offer.reserved)
            self.run_transfers()
            if not offer.retry:
                break
        keys = [ChunkKey(block.key) for block in dead]
        if keys:
            self.hints.give(keys, Hint.DEAD)


class Result(NamedTuple):
    percent: float
    """Of prompt tokens that some level held."""
    memory_percent: float
    """That the first level held."""
    n_written: int
    """Chunks written to the level below."""


def hits(requests: list[Request], n_slots: int, n_below: int, oracle: Oracle) -> Result:
    """What a whole trace finds."""
    replay = Replay(n_slots, n_below)
    for i, request in enumerate(requests):
        replay.serve(request, oracle.dead(i, request.blocks))
    replay.h.check()
    part = 100 / replay.n_tokens
    n_written = replay.h.levels[-1].counts.written
    return Result(part * replay.n_hit_tokens, part * replay.n_memory_tokens, n_written)


@pytest.fixture(scope="module")
def requests(traces_dir: Path) -> list[Request]:
    found = read(traces_dir / "mooncake_conversation.jsonl")
    return [Request(r.n_tokens, [block._replace(nbytes=NBYTES) for block in r.blocks]) for r in found]


@pytest.mark.timeout(600)
def test_dead_hints_on_a_recorded_trace(requests: list[Request]) -> None:
    """At 5 % of the blocks LRU hits 19.96 % of tokens, with dead hints of half of the requests 25.8 % (median of 5)."""
    n_slots = 182_790 * 5 // 100
    assert hits(requests, n_slots, 0, Oracle(requests, 0.0, 0.0, 0)).percent == pytest.approx(19.96, abs=0.005)
    found = [hits(requests, n_slots, 0, Oracle(requests, 0.5, 0.0, seed)).percent for seed in range(5)]
    assert statistics.median(found) == pytest.approx(25.8, abs=0.3)


def main() -> None:
    trace = Path(os.environ["TIERKV_TRACES"]) / "mooncake_conversation.jsonl"
    requests = [Request(r.n_tokens, [block._replace(nbytes=NBYTES) for block in r.blocks]) for r in read(trace)]
    n_unique = len({block.key for request in requests for block in request.blocks})
    for percent, below in ((5, 0), (20, 0), (5, 20)):
        for recall, wrong in ((0.0, 0.0), (0.5, 0.0), (0.5, 0.1), (1.0, 0.0), (1.0, 0.1), (0.0, 0.1)):
            oracles = [Oracle(requests, recall, wrong, seed) for seed in range(5 if wrong or recall == 0.5 else 1)]
            n_slots, n_below = n_unique * percent // 100, n_unique * below // 100
            found = Result(
                *map(statistics.median, zip(*(hits(requests, n_slots, n_below, o) for o in oracles), strict=True))
            )
            levels = f"{percent} %" + f" + {below} %" * bool(below)
            said = f"{levels:>10}  right {recall:4.0%}  wrong {wrong:4.0%}"
            print(
                f"{said}: {found.percent:.2f} %, of memory {found.memory_percent:.2f} %, {found.n_written} written",
                flush=True,
            )


if __name__ == "__main__":
    main()
