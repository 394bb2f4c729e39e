"""One request trace through the real hierarchy: real ledgers, real orders, and copies that end at once.

A request's hit is its longest prefix that some level holds when it arrives. Then all its blocks are used or stored,
tail first, one at a time, as the papers on eviction orders have it and as other simulators do. In two levels what is
found below is promoted first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tierkv._hierarchy import Hierarchy
from tierkv._level import LevelPlan, Writes
from tierkv.policies.parse import parse_policy
from tierkv.traces import Trace
from tierkv.types import Chunk, ChunkKey, Outcome, Status

_UNBOUNDED = 1 << 60
_LEARNS_LATE = re.compile(r"(?:^|[>\s])(s-?_?3-?_?fifo)\s*$", re.IGNORECASE)
_PRIMARY_FREE = 0.01
"""Part of the primary that is kept free where leaving takes a copy, so that stores find room at once. It costs no hits:
what was copied down early is still below."""
_REPORT_EVERY = 256


class Job(NamedTuple):
    """One replay. Capacities in chunks."""

    policy: str
    n_chunks: int
    n_below: int = 0
    """Chunks of the level below; 0 for none."""
    writes: str = "cascade"
    blocks_per_chunk: int = 1
    """Blocks of the trace in one chunk."""
    whole: bool = False
    """Store whole chunks only, as vLLM does; else also a last one that is filled in part."""


class Result(NamedTuple):
    """What one replay counted."""

    n_hit_tokens: int
    """Prompt tokens in the longest prefix on arrival."""
    n_hit_blocks: int
    """Blocks that were there when it was their turn, wherever in the prompt; of the trace's blocks. One level only."""
    n_below_tokens: int = 0
    """Those of ``n_hit_tokens`` that had to be read from the level below."""
    n_written: int = 0
    """Chunks written to the level below."""
    n_read: int = 0


def told(policy: str, n_chunks: int) -> str:
    """The order, told the level's size if it behaves differently until it has learnt it: S3-FIFO alone."""
    return f"{policy.rstrip()}({n_chunks})" if _LEARNS_LATE.search(policy) else policy


def replay(trace: Trace, job: Job, progress: Callable[[int], object] = lambda _: None) -> Result:
    """Run one job. ``progress`` is told now and then how many more requests have been served.

    Raises:
        ConfigError: the order cannot be made from its text.
    """
    clock = Clock(trace.times_s)
    hierarchy = Hierarchy(_plans(job, clock), evicts_ahead=False)
    step = _Step(hierarchy, trace.header.tokens_per_block * job.blocks_per_chunk)
    for index, (n_tokens, chunks) in enumerate(_requests(trace, job)):
        clock.index = index
        step.serve(n_tokens, chunks)
        if not (index + 1) % _REPORT_EVERY:
            progress(_REPORT_EVERY)
    progress(len(trace) % _REPORT_EVERY)
    if not job.n_below:
        return Result(step.n_hit_tokens, step.n_hit_chunks * job.blocks_per_chunk)
    below = hierarchy.levels[1].counts
    return Result(step.n_hit_tokens, 0, step.n_below_tokens, below.written, below.read)


class Clock:
    """The trace's own time, for orders in which chunks expire."""

    def __init__(self, times_s: Sequence[float]) -> None:
        self._times_s = times_s
        self.index = 0

    def __call__(self) -> float:
        return self._times_s[self.index]


def _plans(job: Job, clock: Clock) -> list[LevelPlan]:
    """Levels of chunks of one byte, that hold what their capacity says: no level keeps a part of it free."""

    def order(n_chunks: int) -> Any:
        return parse_policy("--policies", told(job.policy, n_chunks), clock=clock)

    demotes = job.n_below and job.writes == "demote"
    free = _PRIMARY_FREE if demotes else 0.0
    plans = [
        LevelPlan(
            "memory", job.n_chunks, order(job.n_chunks), n_slots=job.n_chunks, slot_nbytes=1,
            high_water=free, low_water=free,
        )
    ]  # fmt: skip
    if job.n_below:
        plans.append(
            LevelPlan(
                "disk", job.n_below, order(job.n_below), writes=Writes.DEMOTE if demotes else Writes.CASCADE,
                queue_nbytes=_UNBOUNDED, high_water=0.0, low_water=0.0,
            )
        )  # fmt: skip
    return plans


def _requests(trace: Trace, job: Job) -> Iterator[tuple[int, list[Chunk]]]:
    """Each request's tokens and its chunks, whose key is that of their last block, as in vLLM."""
    n, tokens = job.blocks_per_chunk, trace.header.tokens_per_block
    known: dict[int, Chunk] = {}
    for n_tokens, blocks in trace.requests():
        end = n_tokens // tokens if job.whole else len(blocks)
        chunks: list[Chunk] = []
        parent: ChunkKey | None = None
        for at in range(n - 1, end, n):
            block = blocks[at]
            chunk = known.get(block)
            if chunk is None or chunk.parent != parent:
                key = chunk.key if chunk is not None else ChunkKey(block.to_bytes(6, "big"))
                chunk = known[block] = Chunk(key, parent, 0, (at + 1) * tokens, 1)
            chunks.append(chunk)
            parent = chunk.key
        yield n_tokens, chunks


class _Step:
    """Serves one request after another."""

    def __init__(self, hierarchy: Hierarchy, tokens_per_chunk: int) -> None:
        self._hierarchy = hierarchy
        self._tokens = tokens_per_chunk
        self._tiered = len(hierarchy.levels) > 1
        self.n_hit_tokens = self.n_hit_chunks = self.n_below_tokens = 0

    def serve(self, n_tokens: int, chunks: list[Chunk]) -> None:
        hierarchy, get, expired = self._hierarchy, self._hierarchy.primary.get, self._hierarchy.primary.expired
        hit = hierarchy.lookup(chunks)
        n_hit = min(len(hit.chunks) * self._tokens, n_tokens)
        self.n_hit_tokens += n_hit
        if self._tiered:
            self.n_below_tokens += min(sum(map(bool, hit.levels)) * self._tokens, n_hit)
            hierarchy.promote(hit.chunks)
            self._copy()
        present: list[Chunk] = []
        for chunk in reversed(chunks):
            entry = get(chunk.key)
            if entry is not None and not expired(entry):
                present.append(chunk)
                continue
            self._use(present)
            self._store(chunk)
        self._use(present)
        hierarchy.refresh()

    def _use(self, present: list[Chunk]) -> None:
        """Chunks that stand side by side, met tail first: an order takes them in prefix order and does the same."""
        if present:
            self.n_hit_chunks += len(present)
            present.reverse()
            self._hierarchy.access(present)
            present.clear()

    def _store(self, chunk: Chunk) -> None:
        hierarchy = self._hierarchy
        while True:
            offer = hierarchy.offer((chunk,), tentative=True)
            hierarchy.commit_store(offer.reserved)
            self._copy()
            if not offer.retry:
                return

    def _copy(self) -> None:
        """Every copy that the hierarchy asks for ends at once and well, until it asks for none."""
        while transfers := self._hierarchy.take_transfers():
            for transfer in transfers:
                self._hierarchy.finish(transfer.id, Outcome(transfer.chunk.key, Status.OK))
