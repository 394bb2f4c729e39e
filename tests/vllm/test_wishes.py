"""What requests say in ``kv_transfer_params["tierkv"]``, through vLLM's real scheduler and connector."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm.manager_kit import HIT, MISS, Kit, keys_of
from tests.vllm.scheduler_rig import BLOCK, Rig, ShelfTier
from tierkv.testing import ManualClock
from tierkv.vllm import _metrics

pytestmark = pytest.mark.timeout(600)


def prompt(seed: int, n_chunks: int) -> list[int]:
    return [(seed + i * i) % 7 for i in range(n_chunks * BLOCK + 1)]


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    ShelfTier.shelves.clear()
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.check()
        rig.close()


def rig_of(rigs: list[Rig], **shape: Any) -> Rig:
    shape = {"two_groups": False, "tiered": False, "n_slots": 8, "device_caches": False} | shape
    rigs.append(Rig(**shape))
    return rigs[-1]


def run(rig: Rig, req_id: str, tokens: list[int], **wishes: Any) -> None:
    rig.add(req_id, tokens, 1, **({"tierkv": wishes} if wishes else {}))
    rig.settle()
    rig.step()  # vLLM tells of the last request's end in the step after


def held(rig: Rig, level: int = 0) -> list[str]:
    """The tenants of what a level holds, in leaving order."""
    ledger = rig.manager.hierarchy.levels[level].ledger
    return [ledger.get(key).chunk.tenant for key in ledger.policy.victims()]


def test_a_dead_request_makes_room_first(rigs: list[Rig]) -> None:
    """It was used last, and leaves first; its chunks go down in the ordinary way and are found there."""
    rig = rig_of(rigs, tiered=True, writes="demote")
    run(rig, "old", prompt(1, 3), tenant="old")
    run(rig, "dead", prompt(2, 3), tenant="dead", hint="dead")
    run(rig, "new", prompt(3, 3), tenant="new")
    assert held(rig).count("old") == 3 and held(rig).count("dead") < 3
    assert rig.manager._metrics.hinted == {"dead": 3}
    n_read = rig.manager.hierarchy.levels[1].counts.read
    run(rig, "again", prompt(2, 3))
    assert rig.manager.hierarchy.levels[1].counts.read > n_read, "a hint that was wrong costs a read"


def test_the_whole_prefix_is_meant(rigs: list[Rig]) -> None:
    """Also what vLLM finds on the device and so never offers or loads: a session's last turn speaks for all of it."""
    rig = rig_of(rigs, n_slots=16, device_caches=True)
    run(rig, "turn 1", prompt(1, 3))
    run(rig, "other", prompt(4, 2), tenant="other")
    run(rig, "turn 2", prompt(1, 5), hint="dead")
    assert rig.manager._metrics.hinted == {"dead": 5}
    assert held(rig)[-2:] == ["other", "other"]


def test_a_hint_reaches_what_is_still_being_copied(rigs: list[Rig]) -> None:
    """A request's end is told while its last stores run: they are hinted with the rest."""
    rig = rig_of(rigs)
    run(rig, "old", prompt(1, 2), tenant="old")
    rig.add("dead", prompt(2, 2), 1, tierkv={"tenant": "dead", "hint": "dead"})
    while not rig.manager._metrics.hinted:
        rig.step()
    assert rig.manager.hierarchy.primary.n_pending, "the copies have not even begun"
    rig.settle()
    assert held(rig)[:2] == ["dead", "dead"]


def test_keep_and_tenant(rigs: list[Rig]) -> None:
    """A kept prompt outlasts others, but not its tenant's quota."""
    rig = rig_of(rigs, n_slots=8, eviction_policy="quota(red=128) > lru")
    run(rig, "kept", prompt(1, 2), tenant="blue", hint="keep")
    for seed in (2, 3, 4):
        run(rig, f"red {seed}", prompt(seed, 3), tenant="red", hint="keep")
    order = held(rig)
    assert order.count("blue") == 2
    assert order[: len(order) - 4] == ["red"] * (len(order) - 4), (
        "who keeps all it has is over its two chunks all the same"
    )


def test_a_lifetime_ends_in_a_miss() -> None:
    """By the manager's clock; and no look-up of an engine without lifetimes asks for one."""
    clock = ManualClock()
    kit = Kit(8, clock=clock)
    try:
        plain = kit.manager.lookup
        keys, others = keys_of("mortal", 3), keys_of("other", 2)
        for prompt_keys in (keys, others):
            context = kit.request(prompt_keys)
            kit.store(prompt_keys, context)
            kit.manager.on_request_finished(context)
        assert kit.manager.lookup == plain
        mortal = kit.request(keys, kv_transfer_params={"tierkv": {"hint": {"ttl_s": 10}}})
        kit.manager.on_request_finished(mortal)
        clock.advance(9.5)
        assert kit.lookup(keys, kit.request(keys)) == [HIT] * 3
        kit.step()
        clock.advance(0.5)
        assert kit.lookup(keys, kit.request(keys)) == [MISS]
        assert kit.lookup(others, kit.request(others)) == [HIT] * 2
        kit.step()
        assert kit.statistics().n_chunks == 2, "the step's end freed the bytes"
    finally:
        kit.close()


DEEP: Any = []
for _ in range(3_000):
    DEEP = [DEEP]
WRONG: list[Any] = [
    None, 7, "dead", [], ["dead"], {"hint": "DEAD"}, {"hint": ""}, {"hint": True}, {"hint": []}, {"hint": {}},
    {"hint": {"ttl_s": 0}}, {"hint": {"ttl_s": -1}}, {"hint": {"ttl_s": "10"}}, {"hint": {"ttl_s": True}},
    {"hint": {"ttl_s": float("nan")}}, {"hint": {"ttl_s": float("inf")}}, {"hint": {"ttl_s": 10**5_000}},
    {"hint": {"ttl_s": 10, "more": 1}}, {"hint": DEEP}, {"hint": {"ttl_s": DEEP}}, {"tenant": 7}, {"tenant": ["a"]},
    {"tenant": "a" * 129}, {"tenant": "\u00e4" * 65}, {"tenant": "a\nb"}, {"tenant": "\ud800"}, {"tenant": "\x00"},
    {"tenant": DEEP}, {"hints": "dead"}, {"": 1}, {7: 1},
]  # fmt: skip


def test_nothing_that_a_request_says_fails_it(rigs: list[Rig], caplog: pytest.LogCaptureFixture) -> None:
    """Each wrong part is ignored and counted, one is warned of, in one line; the right part beside it counts."""
    rig = rig_of(rigs, n_slots=40, n_blocks=64)
    manager = rig.manager
    log = logging.getLogger("vllm.tierkv.manager")
    log.addHandler(caplog.handler)
    try:
        for i, wrong in enumerate(WRONG):
            rig.add(f"r{i}", prompt(i, 1), 1, tierkv=wrong)
            rig.settle()
            rig.step()
    finally:
        log.removeHandler(caplog.handler)
    assert not rig.scheduler.requests
    assert manager._wishes.n_ignored == len(WRONG)
    assert not manager._metrics.hinted and set(held(rig)) == {""}
    run(rig, "half", prompt(3, 2), tenant="red", hint="ded")
    assert "red" in held(rig)
    (warning,) = {record.getMessage() for record in caplog.records if "kv_transfer_params" in record.getMessage()}
    assert warning.startswith("Request r0: kv_transfer_params['tierkv'] is ignored in part: a NoneType is no object")
    stats = manager.get_stats()
    assert stats is not None and _metrics.WISHES_IGNORED in _metrics.definitions()
