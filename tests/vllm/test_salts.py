"""``cache_salt`` through vLLM's real scheduler: requests with different salts share no chunk, at any level."""

from __future__ import annotations

from unittest import mock

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tests.vllm.scheduler_rig import BLOCK, Rig, ShelfTier

PROMPT = [i % 7 for i in range(6 * BLOCK + 1)]
"""Six whole blocks, and a token that is computed in any case."""
SALTS = ("a", "b", None)


def n_loaded(rig: Rig, req_id: str, salt: str | None) -> int:
    """Prompt tokens that came from host memory or below: the device's own prefix cache is off in this module."""
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    request = Request(req_id, PROMPT, sampling, None, cache_salt=salt, block_hasher=rig._hasher)
    step, computed = rig.step, []
    with mock.patch.object(rig, "step", side_effect=lambda: computed.append(step())):
        rig.scheduler.add_request(request)
        rig.settle()
    return len(PROMPT) - sum(computed)


def test_salts_share_nothing_in_memory_or_below() -> None:
    """One prompt under two salts and none: each is found again under its own only, after a restart, too."""
    ShelfTier.shelves.clear()
    rig = Rig(n_slots=60, two_groups=False, device_caches=False)
    try:
        assert [n_loaded(rig, f"first {salt}", salt) for salt in SALTS] == [0, 0, 0]
        assert [len(rig.told[level]) for level in (0, 1)] == [3 * 6, 3 * 6]
        assert [n_loaded(rig, f"again {salt}", salt) for salt in SALTS] == [6 * BLOCK] * 3
    finally:
        rig.close()
    rig = Rig(n_slots=60, two_groups=False, device_caches=False)
    try:
        assert n_loaded(rig, "stranger", "c") == 0
        assert [n_loaded(rig, f"restarted {salt}", salt) for salt in SALTS] == [6 * BLOCK] * 3
    finally:
        rig.close()
