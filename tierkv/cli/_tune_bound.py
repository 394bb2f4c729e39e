"""What the best order could do that knows the future: Belady's MIN, for requests whose hit is a prefix."""

from __future__ import annotations

from array import array
from heapq import heappop, heappush

from tierkv.traces import Trace

_NEVER = 1 << 62


def belady_hit_tokens(trace: Trace, n_blocks: int) -> int:
    """Prompt tokens in the longest resident prefix on arrival, under an order that knows all requests to come.

    Whoever is used again last leaves first, a new block too, which then never enters; of those that are used again by
    the same request, the deeper leaves first. What is never used again leaves at once.
    """
    tokens = trace.header.tokens_per_block
    following = _next_uses(trace)
    resident: dict[int, int] = {}
    """For each block that is there, the request that uses it next."""
    heap: list[tuple[int, int, int]] = []
    n_hit_tokens = at = 0
    for n_tokens, blocks in trace.requests():
        n_hit = next((depth for depth, block in enumerate(blocks) if block not in resident), len(blocks))
        n_hit_tokens += min(n_hit * tokens, n_tokens)
        for depth, block in enumerate(blocks):
            use = following[at + depth]
            if use == _NEVER:
                resident.pop(block, None)
                continue
            resident[block] = use
            heappush(heap, (-use, -depth, block))
        at += len(blocks)
        while len(resident) > n_blocks:
            use, _, block = heappop(heap)
            if resident.get(block) == -use:  # else it has been used, or has left, since
                del resident[block]
        if len(heap) > 4 * len(resident) + 1024:
            heap = [item for item in heap if resident.get(item[2]) == -item[0]]
            heap.sort()
    return n_hit_tokens


def endless_hit_tokens(trace: Trace) -> int:
    """The same for a cache in which nothing ever leaves."""
    return belady_hit_tokens(trace, trace.n_unique)


def _next_uses(trace: Trace) -> array[int]:
    """For each place in ``trace.blocks`` the next request that has the same block."""
    following = array("Q", bytes(8 * len(trace.blocks)))
    latest: dict[int, int] = {}
    at = len(trace.blocks)
    starts = [0, *trace.ends[:-1]]
    for request in range(len(trace) - 1, -1, -1):
        start = starts[request]
        for place in range(start, at):
            following[place] = latest.get(trace.blocks[place], _NEVER)
        for place in range(start, at):
            latest[trace.blocks[place]] = request
        at = start
    return following
