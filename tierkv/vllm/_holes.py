"""Chunks that vLLM offers although their first blocks are gone.

In a group with a sliding window vLLM looks at a chunk's last block alone. The first ones may have left the window, or
may never have been computed for this request because a prefix was found on the device; its list of blocks then begins
in the middle of the chunk. Its key says nothing of that, and another request, which ends at this very chunk, needs
those blocks. So it is not stored. Of a recurrent state only the last block means anything, and that one is there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


class Offered(NamedTuple):
    """A store as vLLM describes it: blocks by group, and the index in the request of each group's first one."""

    blocks: Sequence[int]
    group_sizes: Sequence[int]
    first_blocks: Sequence[int]


def without_holes(
    offered: Offered, blocks_per_chunk: int, recurrent: Collection[int] = ()
) -> tuple[Offered, Sequence[int]]:
    """What may be stored, and the positions among the job's slots of the chunks that may not.

    Args:
        offered: the job.
        blocks_per_chunk: blocks of a chunk, in every group.
        recurrent: positions of the groups whose last block is all.
    """
    leads = [first % blocks_per_chunk for first in offered.first_blocks]
    if not any(leads):
        return offered, ()
    blocks: list[int] = []
    sizes: list[int] = []
    firsts: list[int] = []
    dropped: list[int] = []
    at_block = at_slot = 0
    for group, (size, first, lead) in enumerate(zip(offered.group_sizes, offered.first_blocks, leads, strict=True)):
        n_gone = min(size, blocks_per_chunk - lead) if lead and group not in recurrent else 0
        if n_gone:
            dropped.append(at_slot)
        blocks += offered.blocks[at_block + n_gone : at_block + size]
        sizes.append(size - n_gone)
        firsts.append(first + n_gone)
        at_block += size
        at_slot += -(-(lead + size) // blocks_per_chunk) if size else 0
    return Offered(blocks, sizes, firsts), dropped
