"""vLLM's real scheduler offers chunks of a sliding window whose first blocks it does not have."""

from __future__ import annotations

import pytest

from tests.vllm.scheduler_rig import Rig, ShelfTier
from tests.vllm.test_recording import chats
from tierkv.types import Reason


@pytest.mark.parametrize("n_per_chunk", [2, 4])
def test_a_chunk_with_a_hole_is_not_served_to_those_who_need_it(n_per_chunk: int) -> None:
    """Stored while prefixes were found on the device, asked for where none is: every byte that is loaded is right.

    The rig compares them. Chunks were dropped on the way, or there was nothing to show; others were served.
    """
    ShelfTier.shelves.clear()
    prompts = chats(3, 4)
    n_dropped = n_served = 0
    for device_caches in (True, False):
        rig = Rig(
            blocks_per_chunk=n_per_chunk, n_slots=60, n_blocks=80, two_groups=True, device_caches=device_caches
        )  # fmt: skip
        try:
            for number, prompt in enumerate(prompts):
                rig.add(f"r{number}", prompt, 3)
                rig.settle()
            level = rig.manager.hierarchy.statistics()[0]
            n_dropped += level.refused.get(Reason.DEVICE_ERROR, 0) + level.dropped.get(Reason.DEVICE_ERROR, 0)
            n_served += level.n_hits
        finally:
            rig.close()
    assert n_dropped > 0
    assert n_served > 0
