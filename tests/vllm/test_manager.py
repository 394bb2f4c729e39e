"""The manager driven by hand, call by call, with the real pool, control page, worker, Mover and fs tier."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
from vllm.v1.kv_offload.base import Medium, TierFilter, TierMatcher

from tests.distributions import install_shelves
from tests.fs_kit import n_rows
from tests.patience import PATIENCE_S
from tests.vllm.manager_kit import HIT, MISS, PAGE_NBYTES, PENDING, RETRY, Kit, keys_of
from tierkv.testing import ManualClock
from tierkv.types import Reason, Status
from tierkv.vllm import _compat, _metrics
from tierkv.vllm._control import Direction

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def kit():
    """Makes engines; closes them in the end."""
    made: list[Kit] = []

    def make(*args: Any, **kwargs: Any) -> Kit:
        made.append(Kit(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


class GateTier:
    """A lower tier in memory whose reads and writes wait for a gate; shared by all of a test's engines."""

    chunks: ClassVar[dict[bytes, tuple[Any, bytes]]] = {}
    gate: ClassVar[threading.Event] = threading.Event()
    n_reads: ClassVar[int] = 0
    name = "gate"
    writable = True

    async def open(self, ctx: Any) -> None:
        """Nothing to open."""

    async def _passed(self) -> None:
        while not GateTier.gate.is_set():  # noqa: ASYNC110 - it is set on another thread
            await asyncio.sleep(0.005)

    def settled(self, key: bytes) -> bool:
        return True

    async def scan(self):
        from tierkv.types import Found

        yield [Found(key, 4096, chunk=chunk) for key, (chunk, _) in self.chunks.items()]

    async def probe(self, keys: Any) -> list[None]:
        return [None] * len(keys)

    async def contains(self, keys: Any) -> list[bool]:
        return [key in self.chunks for key in keys]

    async def read(self, items: Any) -> list[Any]:
        from tierkv.types import Outcome

        await self._passed()
        outcomes = []
        for key, view in items:
            GateTier.n_reads += 1
            found = self.chunks.get(key)
            if found is not None:
                view[: len(found[1])] = found[1]
            outcomes.append(Outcome(key, Status.MISSING if found is None else Status.OK))
        return outcomes

    async def write(self, items: Any) -> list[Any]:
        from tierkv.types import Outcome

        await self._passed()
        for chunk, view in items:
            self.chunks[chunk.key] = (chunk, bytes(view[: chunk.nbytes]))
        return [Outcome(chunk.key, Status.OK) for chunk, _ in items]

    async def delete(self, keys: Any) -> None:
        for key in keys:
            self.chunks.pop(key, None)

    async def save_order(self, chunks: Any) -> None:
        """Nothing to remember."""

    async def aclose(self) -> None:
        """Nothing to close."""


@pytest.fixture
def gate():
    """An open gate over nothing."""
    GateTier.chunks.clear()
    GateTier.n_reads = 0
    GateTier.gate.set()
    yield {"type": "GateTier", "module_path": __name__, "capacity": "1MiB", "enable_kv_events": True}
    GateTier.gate.set()


def on_shelf(kit: Kit, keys: list[Any]) -> None:
    """Bring chunks to the level below and out of the primary."""
    kit.store(keys)
    kit.until(lambda: all(kit.hierarchy.find(key) >= 0 and key in GateTier.chunks for key in keys) and kit.at_rest())
    kit.hierarchy.reset((0,))
    assert all(kit.hierarchy.find(key) == 1 for key in keys)


# -- stores and loads -------------------------------------------------------------------------------------------------


def test_bytes_come_back(kit):
    """Stored through the real worker and pool, found in the next step, loaded into other blocks: the same bytes."""
    engine, keys = kit(), keys_of("a", 5)
    assert engine.store(keys) == keys
    context = engine.request(keys)
    assert engine.lookup(keys, context) == [HIT] * 5
    engine.load(keys, context)
    assert engine.at_rest()
    assert engine.statistics().n_pinned == 0


def test_pending_store_is_waited_for(kit):
    """A chunk that another request is storing is HIT_PENDING, and HIT once its stamps are there."""
    engine, keys = kit(), keys_of("a", 2)
    first, second = engine.request(keys), engine.request(keys)
    output = engine.offer(keys, first)
    assert engine.lookup(keys, second) == [PENDING, PENDING]
    engine.step()
    engine.copy_out(output)
    engine.manager.complete_store(set(keys), first)
    assert engine.lookup(keys, second) == [HIT, HIT]
    engine.load(keys, second)
    assert engine.at_rest()


def test_full_pool_is_an_empty_list_each_time(kit):
    """With every slot pinned 1,000 offers are refused, counted and cost nothing; then the pool is free again."""
    engine, keys = kit(4), keys_of("a", 4)
    engine.store(keys)
    loader = engine.request(keys)
    engine.lookup(keys, loader)
    spec = engine.manager.prepare_load(keys, loader)
    for i in range(1000):
        more = keys_of(f"b{i}", 1)
        assert engine.offer(more, engine.request(more)).keys_to_store == []
        engine.step()
    assert engine.statistics().refused == {"full": 1000}
    engine.hierarchy.check()
    engine.manager._page().stamp_many(0, Direction.LOAD, spec.slots, spec.tickets, ok=True)
    engine.manager.complete_load(set(keys), loader)
    engine.step()
    more = keys_of("c", 2)
    assert engine.store(more) == more


def test_leading_part_is_taken_by_end_token_across_groups(kit):
    """Of an offer that is too large the heads of both groups are taken, in vLLM's order; nothing of the tails."""
    engine = kit(4, n_groups=2)
    full, other = keys_of("a", 3, 0), keys_of("a", 3, 1)
    context = engine.request(full, other)
    output = engine.offer(full + other, context)
    assert output.keys_to_store == full[:2] + other[:2]
    assert output.store_spec.groups == (0, 0, 1, 1)
    engine.copy_out(output)
    engine.manager.complete_store(set(output.keys_to_store), context)
    assert engine.lookup(full, engine.request(full)) == [HIT, HIT, MISS]


def test_behind_a_hole_nothing_is_stored_until_it_is_filled(kit):
    """What vLLM will never offer again hides what follows; once somebody else has stored it, the rest is taken."""
    engine, keys = kit(2), keys_of("a", 6)
    busy = keys_of("busy", 2)
    engine.store(busy)
    loader = engine.request(busy)
    engine.lookup(busy, loader)
    spec = engine.manager.prepare_load(busy, loader)
    context = engine.request(keys)
    assert engine.offer(keys[:1], context).keys_to_store == []
    engine.manager._page().stamp_many(0, Direction.LOAD, spec.slots, spec.tickets, ok=True)
    engine.manager.complete_load(set(busy), loader)
    engine.step()
    assert engine.store(keys[1:2], context) == []
    assert engine.statistics().refused == {"full": 1, "behind_hole": 1}
    assert engine.store(keys[:1]) == keys[:1]
    assert engine.store(keys[1:2], context) == keys[1:2]


def test_sliding_groups_have_no_holes_and_no_parents(kit):
    """A refusal in a sliding-window group hides only its own windows."""
    engine = kit(3, n_groups=2, sliding=frozenset({1}))
    full, other = keys_of("a", 3, 0), keys_of("a", 3, 1)
    context = engine.request(full, other)
    output = engine.offer([*full[:2], *other[:2]], context)
    assert output.keys_to_store == [full[0], full[1], other[0]], "token 8 of the second group did not fit"
    engine.copy_out(output)
    engine.manager.complete_store(set(output.keys_to_store), context)
    assert engine.hierarchy.primary.get(full[1]).chunk.parent == full[0]
    assert engine.hierarchy.primary.get(other[0]).chunk.parent is None
    assert engine.store([full[2]], context) == [full[2]]


def test_failed_device_copy_is_dropped(kit):
    """The engine hears of a success, the stamp says otherwise: no chunk, no event, a hole, and the slot is free."""
    engine, keys = kit(), keys_of("a", 3)
    context = engine.request(keys)
    output = engine.offer(keys[:2], context)
    page, spec = engine.manager._page(), output.store_spec
    page.stamp_many(0, Direction.STORE, spec.slots[:1], spec.tickets[:1], ok=True)
    page.stamp_many(0, Direction.STORE, spec.slots[1:], spec.tickets[1:], ok=False)
    engine.manager.complete_store(set(keys[:2]), context)
    assert engine.lookup(keys, engine.request(keys)) == [HIT, MISS]
    assert engine.statistics().refused == {"device_error": 1}
    assert engine.store(keys[2:], context) == [], "it lies behind the hole"
    assert [event.keys for event in engine.manager.take_events()] == [keys[:1]]
    assert engine.at_rest()


def test_store_without_a_stamp_waits_in_quarantine(kit):
    """A completion that comes before the stamp commits nothing, and the slot is not reused before the copy ended."""
    engine, keys = kit(1), keys_of("a", 1)
    context = engine.request(keys)
    output = engine.offer(keys, context)
    engine.manager.complete_store(set(keys), context)
    assert engine.lookup(keys, context) == [MISS]
    assert engine.manager.has_pending_work()
    assert engine.store(keys_of("b", 1)) == []
    engine.copy_out(output)
    engine.step()
    assert not engine.manager.has_pending_work()
    assert engine.store(keys_of("b", 1)) == keys_of("b", 1)


def test_no_page_no_stores(kit):
    """Before the workers serve a control page everything is refused and nothing waits."""
    engine, keys = kit(), keys_of("a", 2)
    engine.manager._page, page = (lambda: None), engine.manager._page
    assert engine.offer(keys, engine.request(keys)).keys_to_store == []
    assert engine.statistics().refused == {"closed": 2}
    engine.manager._page = page
    assert engine.store(keys) == keys


def test_store_threshold_counts_offers(kit):
    """``store_threshold`` 2: the first offer of a chunk is skipped and counted, the second one is taken."""
    engine, keys = kit(store_threshold=2), keys_of("a", 3)
    assert engine.store(keys) == []
    assert engine.store(keys) == keys
    assert engine.statistics().refused == {"not_admitted": 3}


def test_expired_chunk_is_a_miss(kit):
    """Past ``ttl_s`` a chunk answers MISS at once, leaves at the next step, and can be stored again."""
    clock = ManualClock(1000.0)
    engine, keys = kit(clock=clock, ttl_s=60, eviction_policy="arc"), keys_of("a", 2)
    engine.store(keys)
    clock.now_s += 59
    assert engine.lookup(keys, engine.request(keys)) == [HIT, HIT]
    clock.now_s += 2
    assert engine.lookup(keys, engine.request(keys)) == [MISS]
    assert engine.store(keys) == keys
    assert engine.statistics().dropped == {"expired": 2}
    assert engine.lookup(keys, engine.request(keys)) == [HIT, HIT]


def test_admission_rule_leaves_no_hole(kit):
    """What a rule did not admit is offered again by the next request, and the rule counts what lies behind it too."""
    engine, keys = kit(admission="second_touch"), keys_of("a", 4)
    first, second = engine.request(keys), engine.request(keys)
    assert engine.store(keys[:2], first) == engine.store(keys[2:], first) == []
    assert engine.store(keys[:2], second) + engine.store(keys[2:], second) == keys


# -- requests ---------------------------------------------------------------------------------------------------------


def test_thousand_requests_leave_no_pin(kit, gate):
    """Looked up, then aborted, never scheduled, or finished without a load: nothing stays pinned (A4).

    https://github.com/LMCache/LMCache/issues/2017
    """
    engine, rng = kit(8, [gate]), random.Random(4)
    engine.until(lambda: engine.hierarchy.levels[1].serves)
    keys = keys_of("a", 3)
    on_shelf(engine, keys)
    for _ in range(1000):
        context = engine.request(keys)
        for _ in range(rng.randrange(3)):
            engine.lookup(keys, context)
            engine.step(*([context.req_id] if rng.random() < 0.3 else []))
        engine.manager.on_request_finished(context)
        if rng.random() < 0.1:
            engine.hierarchy.reset((0,)) if engine.at_rest() else None
    engine.until(engine.at_rest)
    assert engine.statistics().n_pinned == 0
    for i in range(4):
        assert len(engine.store(keys_of(f"new{i}", 2))) == 2, "the whole pool can be replaced"


def test_id_that_comes_back_while_its_copies_run(kit):
    """A second bearer of a request id, registered while the first one's store runs, disturbs neither (A27).

    https://github.com/vllm-project/vllm/issues/46014
    """
    engine, keys, other = kit(), keys_of("a", 2), keys_of("b", 2)
    first = engine.request(keys, req_id="same")
    output = engine.offer(keys, first)
    engine.manager.on_request_finished(first)
    second = engine.request(other, req_id="same")
    engine.copy_out(output)
    engine.manager.complete_store(set(keys), second)  # vLLM hands over whatever context the id has now
    assert engine.store(other, second) == other
    assert engine.lookup(keys, engine.request(keys)) == [HIT, HIT]
    assert engine.at_rest()


def test_same_chunks_loaded_by_two_requests(kit):
    """Pins are counted: the first end does not free what the second load still reads."""
    engine, keys = kit(2), keys_of("a", 2)
    engine.store(keys)
    contexts = [engine.request(keys) for _ in range(2)]
    specs = []
    for context in contexts:
        engine.lookup(keys, context)
        specs.append(engine.manager.prepare_load(keys, context))
    engine.step()
    page = engine.manager._page()
    for spec, context in zip(specs, contexts, strict=True):
        assert engine.offer(keys_of("b", 1), engine.request()).keys_to_store == []
        page.stamp_many(0, Direction.LOAD, spec.slots, spec.tickets, ok=True)
        engine.manager.complete_load(set(keys), context)
    assert len(engine.store(keys_of("b", 1))) == 1


def test_hit_is_no_victim_until_its_step_has_ended(kit):
    """In the same step vLLM loads what was answered as a hit; an offer in between must not take it."""
    engine, keys = kit(2), keys_of("a", 2)
    engine.store(keys)
    context = engine.request(keys)
    assert engine.lookup(keys, context) == [HIT, HIT]
    assert engine.offer(keys_of("b", 2), engine.request()).keys_to_store == []
    engine.load(keys, context)
    engine.step()
    assert len(engine.store(keys_of("b", 2))) == 2


# -- levels below -----------------------------------------------------------------------------------------------------


def test_promotion_is_leased_until_it_is_loaded(kit, gate):
    """A waiting request's chunks survive whatever is stored meanwhile, and count as hits of the level below."""
    engine, keys = kit(6, [gate]), keys_of("a", 4)
    engine.until(lambda: engine.hierarchy.levels[1].serves)
    on_shelf(engine, keys)
    context = engine.request(keys)
    assert engine.lookup(keys, context) == [PENDING] * 4
    engine.step()
    engine.until(lambda: engine.statistics().n_pending == 0)
    for i in range(10):
        engine.store(keys_of(f"b{i}", 2))
    assert engine.lookup(keys, context) == [HIT] * 4
    engine.load(keys, context)
    again = engine.request(keys)
    if _compat.CacheHitSource is not None:  # before 0.32 nobody asks
        assert {engine.manager.get_load_source(key, context).value for key in keys} == {"disk"}
    assert engine.lookup(keys, again) == [HIT] * 4
    if _compat.CacheHitSource is not None:
        assert engine.manager.get_load_source(keys[0], again).value == "host"
    assert GateTier.n_reads == 4


def test_queued_requests_do_not_starve_stores_or_one_another(kit, gate):
    """Ten waiting requests of four chunks each over eight slots: stores go on and nothing is read twice (A11 a).

    https://github.com/vllm-project/vllm/issues/49902
    """
    engine = kit(8, [gate], store_reserve=2 * 4096)
    engine.until(lambda: engine.hierarchy.levels[1].serves)
    prompts = [keys_of(f"p{i}", 4) for i in range(10)]
    for keys in prompts:
        on_shelf(engine, keys)
    waiting = [(keys, engine.request(keys)) for keys in prompts]
    for i in range(30):
        for keys, context in waiting:
            engine.lookup(keys, context)
        engine.step()
        fresh = keys_of(f"running{i}", 2)
        assert engine.store(fresh) == fresh, "a share of the primary is kept for stores"
        engine.until(lambda: not engine.hierarchy.primary_busy)
    for keys, context in waiting:
        answers = engine.lookup(keys, context)
        if PENDING not in answers and HIT in answers:
            engine.load(keys[: answers.count(HIT)], context)
        engine.manager.on_request_finished(context)
    used = engine.statistics(1).n_hits
    assert 4 <= GateTier.n_reads <= used + 8, "at most what is still there was read for nobody"


def test_request_larger_than_the_primary_gets_its_head(kit, gate):
    """Eight chunks below, six slots: within a few polls the leading five are hits, each read once (A11 b)."""
    engine, keys = kit(6, [gate]), keys_of("a", 8)
    engine.until(lambda: engine.hierarchy.levels[1].serves)
    on_shelf(engine, keys[:4])
    on_shelf(engine, keys[4:])
    context = engine.request(keys)
    assert engine.lookup(keys, context) == [PENDING] * 5 + [MISS]
    engine.step()
    engine.until(lambda: engine.statistics().n_pending == 0)
    assert engine.lookup(keys, context) == [HIT] * 5 + [MISS]
    engine.load(keys[:5], context)
    assert GateTier.n_reads == 5


def test_window_is_reserved_whole_or_not_at_all(kit, gate):
    """Scanned from its tail, a window with a gap gives its slots back; the next, complete one keeps them."""
    engine = kit(8, [gate], n_groups=2, sliding=frozenset({1}))
    engine.until(lambda: engine.hierarchy.levels[1].serves)
    keys = keys_of("a", 6, 1)
    on_shelf(engine, [keys[0], keys[1], keys[2], keys[4], keys[5]])
    context = engine.request((), keys)
    for key in (keys[5], keys[4]):
        assert engine.manager.lookup(key, context) is PENDING
    assert engine.statistics().n_pending == 2
    assert engine.manager.lookup(keys[3], context) is MISS
    assert engine.statistics().n_pending == 0, "two of a window of three serve nobody"
    for key in (keys[2], keys[1], keys[0]):
        assert engine.manager.lookup(key, context) is PENDING
    engine.step()
    engine.until(lambda: engine.statistics().n_pending == 0)
    assert GateTier.n_reads == 3
    assert engine.statistics().n_pinned == 3


def test_deadline_ends_the_wait_and_nothing_is_deferred_again(kit, gate):
    """A hung disk costs a request ``lookup_deadline_s`` once; the slots come back when the disk lets go (A12).

    https://github.com/vllm-project/vllm/issues/50031
    """
    clock = ManualClock(1000.0)
    engine, keys = kit(8, [gate], clock=clock, lookup_deadline_s=2.0), keys_of("a", 3)
    engine.until(lambda: engine.hierarchy.levels[1].serves)
    on_shelf(engine, keys)
    GateTier.gate.clear()
    context = engine.request(keys)
    for _ in range(3):
        assert engine.lookup(keys, context) == [PENDING] * 3
        engine.step()
    clock.now_s += 1.9
    assert engine.lookup(keys, context) == [PENDING] * 3
    clock.now_s += 0.2
    assert engine.lookup(keys, context) == [MISS]
    engine.step()
    other = engine.request(keys)
    assert engine.lookup(keys, other) == [PENDING] * 3, "another request has a clock of its own"
    GateTier.gate.set()
    engine.until(lambda: engine.statistics().n_pending == 0)
    assert engine.lookup(keys, context) == [HIT] * 3, "what is ready it may have"
    engine.manager.on_request_finished(other)
    assert engine.statistics().n_pinned == 0


def test_deadline_passes_between_lookups(kit, gate):
    """A leased request that vLLM no longer asks for loses its lease at its deadline."""
    clock = ManualClock(1000.0)
    engine, keys = kit(8, [gate], clock=clock, lookup_deadline_s=2.0), keys_of("a", 3)
    engine.until(lambda: engine.hierarchy.levels[1].serves)
    on_shelf(engine, keys)
    engine.lookup(keys, engine.request(keys))
    engine.step()
    engine.until(lambda: engine.statistics().n_pending == 0)
    assert engine.statistics().n_pinned == 3
    clock.now_s += 2.1
    engine.step()
    assert engine.statistics().n_pinned == 0


def test_failed_read_is_a_miss(kit, gate):
    """What has vanished below is a miss from then on, its slot is free, and the others of the prefix stay."""
    engine, keys = kit(8, [gate]), keys_of("a", 3)
    engine.until(lambda: engine.hierarchy.levels[1].serves)
    on_shelf(engine, keys)
    del GateTier.chunks[keys[1]]
    context = engine.request(keys)
    engine.lookup(keys, context)
    engine.step()
    engine.until(lambda: engine.statistics().n_pending == 0)
    assert engine.lookup(keys, context) == [HIT, MISS]
    engine.load(keys[:1], context)
    assert engine.statistics(1).dropped == {"vanished": 1}


def test_tier_filter_is_honoured(kit, gate):
    """A request that forbids storage never waits for it; host memory serves it as always."""
    engine, keys = kit(8, [gate]), keys_of("a", 2)
    engine.until(lambda: engine.hierarchy.levels[1].serves)
    on_shelf(engine, keys)
    host_only = TierFilter((TierMatcher(medium=Medium.CPU),))
    assert engine.lookup(keys, engine.request(keys, load_tier_filter=host_only)) == [MISS]
    waiting = engine.request(keys)
    engine.lookup(keys, waiting)
    engine.step()
    engine.until(lambda: engine.statistics().n_pending == 0)
    assert engine.lookup(keys, engine.request(keys, load_tier_filter=host_only)) == [HIT, HIT]
    engine.manager.on_request_finished(waiting)


def test_slow_tier_holds_no_more_than_its_queue(kit, gate):
    """Slots pinned for writes that hang stay within the queue's bytes; the rest is dropped and counted."""
    engine = kit(8, [gate | {"queue_bytes": 3 * PAGE_NBYTES}])
    engine.until(lambda: engine.hierarchy.levels[1].serves)
    GateTier.gate.clear()
    for i in range(20):
        assert len(engine.store(keys_of(f"k{i}", 2))) == 2
        engine.step()
        assert engine.statistics().n_pinned <= 3
    GateTier.gate.set()
    engine.until(engine.at_rest)
    below = engine.statistics(1)
    assert below.n_offered == below.n_stored + sum(below.refused.values())


def test_demoted_on_eviction_and_found_again(kit, gate):
    """With ``writes: demote`` a chunk goes down when it must leave; while the tier keeps up no store is refused."""
    engine = kit(8, [gate | {"writes": "demote"}], store_reserve=2 * 4096)
    engine.until(lambda: engine.hierarchy.levels[1].serves)
    prompts = [keys_of(f"p{i}", 2) for i in range(12)]
    for keys in prompts[:3]:
        engine.store(keys)
        engine.step()
    assert not GateTier.chunks, "nothing goes down before it must"
    for keys in prompts[3:]:
        assert engine.store(keys) == keys
        engine.until(engine.at_rest)
    assert all(engine.hierarchy.find(key) >= 0 for keys in prompts for key in keys), "a chunk is never nowhere"
    context = engine.request(prompts[0])
    engine.until(lambda: engine.lookup(prompts[0], context) == [HIT, HIT])
    engine.load(prompts[0], context)
    assert engine.statistics().refused == {}


def test_levels_stay_closed_without_an_identity(kit, gate):
    """No weights that vouch for the bytes: nothing is written below, nothing is found there."""
    engine, keys = kit(8, [gate], model=None), keys_of("a", 3)
    engine.store(keys)
    for _ in range(20):
        engine.step()
    assert not GateTier.chunks
    assert engine.statistics(1).broken
    assert engine.lookup(keys_of("b", 1), engine.request()) == [MISS]


def fs(tmp_path: Path) -> dict[str, Any]:
    return {"type": "fs", "root_dir": str(tmp_path / "root"), "capacity": "1MiB", "enable_kv_events": True}


def test_restart_finds_its_files_and_other_weights_do_not(kit, tmp_path):
    """The same model under another engine hits on disk; another checkpoint of the same shape misses (A34).

    https://github.com/sgl-project/sglang/issues/26792
    """
    keys = keys_of("a", 4)
    first = kit(8, [fs(tmp_path)])
    first.until(lambda: first.hierarchy.levels[1].serves)
    first.store(keys)
    first.until(lambda: first.statistics(1).n_stored == 4)
    first.close()
    first.close = lambda: None
    other = kit(8, [fs(tmp_path)], model="another checkpoint")
    other.until(lambda: other.hierarchy.levels[1].serves)
    assert other.lookup(keys, other.request(keys))[-1] in {MISS, RETRY}
    other.close()
    other.close = lambda: None
    again = kit(8, [fs(tmp_path)])
    context = again.request(keys)
    again.until(lambda: again.lookup(keys, context) == [HIT] * 4)
    again.load(keys, context)
    assert again.statistics(1).n_read == 4


def test_reset_begins_an_epoch_that_nothing_finds_again(kit, tmp_path):
    """After a reset all levels miss and take new chunks; a restart, at the first epoch again, finds the old files."""
    keys = keys_of("a", 3)
    engine = kit(8, [fs(tmp_path)])
    engine.until(lambda: engine.hierarchy.levels[1].serves)
    engine.store(keys)
    engine.until(lambda: engine.statistics(1).n_stored == 3)
    engine.manager.reset_cache()
    assert engine.lookup(keys, engine.request(keys)) == [MISS], "there is nothing to wait for"
    engine.step()
    assert HIT not in engine.lookup(keys, engine.request(keys))
    engine.until(lambda: engine.hierarchy.levels[1].serves)
    engine.until(lambda: engine.lookup(keys, engine.request(keys)) == [MISS])
    engine.store(keys_of("new", 2))
    engine.until(lambda: engine.statistics(1).n_stored == 5 and engine.at_rest())
    engine.close()
    engine.close = lambda: None
    again = kit(8, [fs(tmp_path)])
    context = again.request(keys)
    again.until(lambda: again.lookup(keys, context) == [HIT] * 3)
    assert HIT not in again.lookup(keys_of("new", 2), again.request())


# -- reset ------------------------------------------------------------------------------------------------------------


def test_reset_with_copies_in_both_directions(kit):
    """Slots of running copies wait for their stamps; late ends are ignored once; then everything is free (A33).

    https://github.com/vllm-project/vllm/pull/48102
    """
    engine = kit(4)
    loaded, stored = keys_of("a", 2), keys_of("b", 2)
    engine.store(loaded)
    loader, storer = engine.request(loaded), engine.request(stored)
    engine.lookup(loaded, loader)
    load = engine.manager.prepare_load(loaded, loader)
    output = engine.offer(stored, storer)
    engine.manager.reset_cache()
    assert engine.lookup(loaded, loader) == [MISS]
    assert engine.manager.has_pending_work()
    assert engine.statistics().n_quarantined == 4
    assert engine.offer(loaded, loader).keys_to_store == [], "no slot is free before its copy has ended"
    engine.copy_out(output)
    engine.step()
    assert engine.statistics().n_quarantined == 2
    engine.manager._page().stamp_many(0, Direction.LOAD, load.slots, load.tickets, ok=True)
    assert not engine.manager.has_pending_work()
    engine.manager.complete_store(set(stored), storer)
    engine.manager.complete_load(set(loaded), loader)
    assert (engine.statistics().n_quarantined, engine.statistics().n_chunks) == (0, 0)
    assert engine.store(stored, storer) == stored, "its earlier hole and offers are forgotten"


def test_reset_between_lookup_and_read(kit, gate):
    """Reservations whose reads were not handed over are given back by a reset; no read runs for the old epoch."""
    engine, keys = kit(8, [gate]), keys_of("a", 3)
    engine.until(lambda: engine.hierarchy.levels[1].serves)
    on_shelf(engine, keys)
    engine.lookup(keys, engine.request(keys))
    engine.manager.reset_cache()
    assert engine.statistics().n_pending == 0
    engine.until(engine.at_rest)
    assert GateTier.n_reads == 0


# -- what is told -----------------------------------------------------------------------------------------------------


def test_events_of_both_levels_rebuild_the_index(kit, gate):
    """Per medium a set made of the events alone equals the index at rest, removals included (A31).

    https://github.com/llm-d/llm-d-kv-cache/pull/680
    """
    engine, rng = kit(6, [gate | {"capacity": 9 * 4096}]), random.Random(2)
    engine.until(lambda: engine.hierarchy.levels[1].serves)
    known: dict[Medium, set[bytes]] = {Medium.CPU: set(), Medium.STORAGE: set()}

    def listen() -> None:
        for event in engine.manager.take_events():
            for key in event.keys:
                if event.removed:
                    known[event.medium].remove(key)
                else:
                    assert key not in known[event.medium], "announced twice"
                    known[event.medium].add(key)

    for i in range(300):
        keys = keys_of(f"p{rng.randrange(12)}", rng.randrange(1, 4))
        context = engine.request(keys)
        engine.lookup(keys, context)
        engine.step()
        engine.store(keys, context)
        engine.manager.on_request_finished(context)
        if i % 100 == 99:
            engine.manager.reset_cache()
        listen()
    engine.until(lambda: engine.at_rest() and engine.hierarchy.levels[1].serves)
    listen()
    for level, medium in enumerate((Medium.CPU, Medium.STORAGE)):
        assert known[medium] == {entry.chunk.key for entry in engine.hierarchy.levels[level].ledger}


def test_metrics_use_defined_names_only(kit, gate):
    """The front end asserts that it knows every name and label; counters are told once."""
    engine, keys = kit(4, [gate], store_threshold=2), keys_of("a", 3)
    engine.until(lambda: engine.hierarchy.levels[1].serves)
    engine.store(keys)
    engine.store(keys)
    engine.until(engine.at_rest)
    context = engine.request(keys)
    engine.lookup(keys, context)
    engine.load(keys, context)
    defined = engine.spec.build_metric_definitions(dict(engine.spec.extra_config))
    stats = engine.manager.get_stats()
    for name, by_labels in stats.data["data"].items():
        assert all(len(labels) == len(defined[name].labelnames) for labels in by_labels), name
    told = stats.data["data"]
    assert told[_metrics.STORED] == {("0:primary",): 3, ("1:gate",): 3}
    assert told[_metrics.CHUNK_HITS] == {("0:primary",): 3}
    assert told[_metrics.STORES_SKIPPED] == {(): 3}
    assert told[_metrics.REFUSED] == {("0:primary", Reason.NOT_ADMITTED.value): 3}
    again = engine.manager.get_stats().data["data"]
    assert _metrics.STORED not in again
    assert _metrics.LEVEL_BYTES in again


def test_last_store_of_a_busy_time_reaches_the_disk(kit, tmp_path):
    """After the last completion vLLM may not step again: the cascade is under way without another hook."""
    engine, keys = kit(8, [fs(tmp_path)]), keys_of("a", 3)
    engine.until(lambda: engine.hierarchy.levels[1].serves)
    engine.step()
    engine.store(keys)
    deadline = time.monotonic() + PATIENCE_S
    while n_rows(tmp_path / "root") != 3:
        assert time.monotonic() < deadline, "without another step of the engine it is not written"
        time.sleep(0.01)


@pytest.mark.timeout(600)
def test_same_victims_under_any_hash_seed():
    """The same operations evict the same chunks in the same order, whatever order vLLM's sets have (invariant 11)."""
    told = []
    for seed in ("0", "1", "31337"):
        command = [sys.executable, "-W", "ignore", "-m", "tests.vllm.victims"]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
        told.append(done.stdout.strip().splitlines()[-1])
    assert told[0].count("-") > 100
    assert told[0] == told[1] == told[2]


# -- other versions of vLLM -------------------------------------------------------------------------------------------


class ContextOf030:
    """A request context as vLLM 0.30 makes it: without scratch space, positions and tier filters."""

    def __init__(self, req_id: str) -> None:
        self.req_id = req_id


def test_requests_without_positions_go_by_call_order(kit):
    """What vLLM 0.30 does not say is counted up: parents and ends come out as if it had said them."""
    engine, keys = kit(3), keys_of("a", 4)
    context = ContextOf030("r")
    engine.manager.on_new_request(context)
    assert engine.manager.lookup(keys[0], context) is MISS
    assert engine.store(keys[:2], context) == keys[:2]
    assert engine.store(keys[2:3], context) == keys[2:3]
    chunks = [engine.hierarchy.primary.get(key).chunk for key in keys[:3]]
    assert [chunk.end_token for chunk in chunks] == [4, 8, 12]
    assert [chunk.parent for chunk in chunks] == [None, keys[0], keys[1]]
    assert engine.lookup(keys, context) == [HIT] * 3 + [MISS]
    engine.load(keys[:3], context)
    engine.manager.on_request_finished(context)


def test_windows_are_told_by_033():
    """From 0.33 on the configuration says which groups slide; nothing is looked for elsewhere."""

    class Group:
        def __init__(self, group_id: int, window: int | None) -> None:
            self.group_id = group_id
            self.sliding_window_size_in_chunks = window

    class Config:
        groups = (Group(0, None), Group(1, 4))

    assert _compat.sliding_groups(Config()) == frozenset({1})


class GroupBefore033:
    def __init__(self, group_id: int) -> None:
        self.group_id = group_id


class ConfigBefore033:
    groups = (GroupBefore033(0), GroupBefore033(1))


def test_windows_are_found_at_the_caller_before():
    """Until then whoever makes the manager holds the KV-cache configuration, and it is read there."""
    from tests.vllm.scheduler_rig import cache_config

    kv_cache_config = cache_config(8, two_groups=True)
    assert _compat.sliding_groups(ConfigBefore033()) == frozenset({1})
    del kv_cache_config


def test_windows_of_an_unknown_caller_count_as_prefix_groups():
    """If nobody tells, nothing wrong is served: every group is taken for a prefix group."""
    assert _compat.sliding_groups(ConfigBefore033()) == frozenset()


# -- tiers of others --------------------------------------------------------------------------------------------------


def test_a_distributions_tier_serves_vllm(kit, tmp_path, monkeypatch):
    """A tier that came with ``pip install`` is a type of secondary tier: stored, reset out of memory, read back."""
    monkeypatch.syspath_prepend(str(install_shelves(tmp_path)))
    engine, keys = kit(tiers=[{"type": "shelf", "color": "blue", "capacity": "1MiB"}]), keys_of("a", 3)
    assert engine.hierarchy.levels[1].name == "blue shelf"
    engine.until(lambda: engine.hierarchy.levels[1].serves)
    engine.store(keys)
    engine.until(lambda: engine.at_rest() and engine.statistics(1).n_chunks == 3)
    engine.hierarchy.reset((0,))
    context = engine.request(keys)
    engine.until(lambda: engine.lookup(keys, context) == [HIT] * 3)
    engine.load(keys, context)
    sys.modules.pop("shelves")
