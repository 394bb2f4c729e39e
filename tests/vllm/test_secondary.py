"""A tier of ours below vLLM's own primary: under vLLM's real tiering manager, with real bytes and a real root."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from vllm.v1.kv_offload.base import TierFilter, TierMatcher
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tests.cases.kit import chunk_files, file_of
from tests.fs_kit import recount
from tests.leaks import Snapshot
from tests.patience import PATIENCE_S
from tests.vllm.manager_kit import keys_of, offloading_config
from tests.vllm.own_spec_kit import GATE, HIT, MISS, PENDING, RETRY, ROW, GateTier, OwnSpec, fs, own_spec
from tierkv.errors import ConfigError, TierError
from tierkv.vllm import _identity, secondary

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def fresh_gate():
    GateTier.fresh()
    yield
    GateTier.fresh()


# -- with real files --------------------------------------------------------------------------------------------------


def test_bytes_come_back_from_disk(tmp_path):
    """Stored, pushed out of vLLM's primary, found, promoted, loaded: the same bytes."""
    keys = keys_of("a", 5)
    with own_spec(fs(tmp_path)) as engine:
        engine.ready()
        assert engine.serve(keys) == 0
        assert sorted(engine.held()) == sorted(keys)
        engine.empty_primary()
        assert engine.serve(keys) == 5
        assert engine.statistics().n_read == 5


def test_a_restart_finds_what_was_stored(tmp_path):
    """The same root and model again: all of it is there. Another model: nothing."""
    keys = keys_of("a", 5)
    with own_spec(fs(tmp_path)) as engine:
        engine.ready().serve(keys)
    with own_spec(fs(tmp_path), model="another") as engine:
        assert engine.ready().serve(keys) == 0
    with own_spec(fs(tmp_path)) as engine:
        assert engine.ready(5).serve(keys) == 5


def test_no_weights_no_tier(tmp_path):
    """Where nothing vouches for the weights the tier stays closed: all misses, nothing written, vLLM goes on."""
    with own_spec(fs(tmp_path / "root"), model=None) as engine:
        for _ in range(2):
            assert engine.serve(keys_of("a", 3)) == 0
            engine.empty_primary()
        assert engine.tier.hierarchy.levels[1].counts.refused == {"tier_broken": 6}
    assert list(tmp_path.iterdir()) == []


def test_another_layout_is_another_namespace(tmp_path):
    """Blocks of another size under the same model: a miss, and the first one's files stay (A25, vLLM issue 55904)."""
    keys = keys_of("a", 3)
    with own_spec(fs(tmp_path)) as engine:
        engine.ready().serve(keys)
    with own_spec(fs(tmp_path), page_nbytes=2 * ROW, n_slots=16) as engine:
        first = engine.tier._identity.identities()
        assert engine.ready().held() == []
    with own_spec(fs(tmp_path)) as engine:
        assert engine.tier._identity.identities() != first
        assert engine.ready(3).serve(keys) == 3


def test_whatever_decides_a_layout_is_in_the_identity():
    """One thing of vLLM's configuration changed, each time another: no two of them share a namespace."""
    config = offloading_config({}, page_nbytes=ROW)
    parallel, group = config.parallel, config.groups[0]
    changed = [
        config,
        replace(config, canonical_layout=True),
        replace(config, replicated_layout=True),
        replace(config, kv_cache_layout="NHD"),
        replace(config, worker_kv_bytes_per_block=ROW // 2),
        replace(config, cache=replace(config.cache, blocks_per_chunk=2)),
        replace(config, model=replace(config.model, dtype="bfloat16")),
        replace(config, parallel=replace(parallel, tp_size=2, world_size=2)),
        replace(config, parallel=replace(parallel, pp_size=2, world_size=2)),
        replace(config, groups=(replace(group, layer_names=("other",)),)),
        replace(config, groups=(replace(group, tokens_per_block=32),)),
    ]
    with mock.patch.object(_identity, "identity_digest", return_value=bytes(32)):
        digests = {_identity.SchedulerIdentity(each, ROW).identities() for each in changed}
        assert len(digests) == len(changed)
        renamed = replace(config, engine_id="other", extra_config={"cpu_bytes_to_use": 1})
        assert _identity.SchedulerIdentity(renamed, ROW).identities() in digests


def test_a_damaged_file_is_one_miss(tmp_path):
    """One of four files has a flipped bit: three arrive, one is a miss at once and for good (A6, A14, A19)."""
    keys = keys_of("a", 4)
    with own_spec(fs(tmp_path)) as engine:
        engine.ready().serve(keys)
    bad = file_of(tmp_path, keys[2])
    data = bytearray(bad.read_bytes())
    data[-1] ^= 1
    bad.write_bytes(data)
    with own_spec(fs(tmp_path)) as engine:
        assert engine.ready(4).serve(keys) == 2
        assert engine.statistics().dropped == {"corrupt": 1}
        assert engine.primary._policy.get(keys[3]) is not None, "what arrived behind it is kept"
        engine.empty_primary()
        assert engine.serve(keys) == 4, "it was stored again"


def test_capacity_is_kept(tmp_path):
    """40 chunks into room for about ten: the root never holds more than its capacity, and goes on serving."""
    capacity = 128 << 10
    with own_spec(fs(tmp_path, capacity=capacity)) as engine:
        engine.ready()
        for i in range(10):
            engine.serve(keys_of(f"p{i}", 4))
            assert recount(tmp_path) <= capacity
        engine.until(lambda: engine.statistics().n_evicted > 0)
        engine.empty_primary()
        assert engine.serve(keys_of("p9", 4)) == 4
    assert recount(tmp_path) <= capacity
    assert len(chunk_files(tmp_path)) >= 8


def test_hot_prefixes_stay_on_disk(tmp_path):
    """A request served from vLLM's primary is a use of its chunks on disk, of which vLLM tells us nothing else."""
    hot = keys_of("hot", 3)
    with own_spec(fs(tmp_path, capacity=128 << 10)) as engine:
        engine.ready().serve(hot)
        for i in range(8):
            engine.serve(keys_of(f"cold{i}", 3))
            engine.serve(hot)
        engine.until(lambda: engine.statistics().n_evicted > 0)
        assert set(hot) <= set(engine.held())


def test_an_order_of_the_operators_choice(tmp_path):
    """``eviction_policy``, ``ttl_s`` and ``admission`` of a tier's object work here as under our own spec."""
    keys = keys_of("a", 3)
    with own_spec(fs(tmp_path, eviction_policy="leaf_first > s3fifo", admission="second_touch", ttl_s=3600)) as engine:
        told = watch_jobs(engine.ready())
        engine.serve(keys)
        assert engine.held() == []
        assert engine.statistics().refused == {"not_admitted": 3}
        assert [result.success for result in told] == [True], "what a rule did not want is no failed job"
        engine.empty_primary()
        engine.serve(keys)
        assert sorted(engine.held()) == sorted(keys)


def watch_jobs(engine: OwnSpec) -> list[Any]:
    """Every result that vLLM is told of from now on."""
    told: list[Any] = []
    finished = engine.tier.get_finished_jobs

    def watched() -> list[Any]:
        results = list(finished())
        told.extend(results)
        return results

    engine.tier.get_finished_jobs = watched
    return told


# -- vLLM's manager ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_slots", "n_chunks"), [(4, 8), (6, 8), (6, 30), (1, 3)])
def test_a_prefix_larger_than_the_primary_is_answered(tmp_path, n_slots, n_chunks):
    """A11, https://github.com/vllm-project/vllm/issues/49902: what fits is promoted once, and then the request runs.

    With its own tiers vLLM promotes round and round here: no answer in 1,500 steps and 5,514 reads.
    """
    keys = keys_of("long", n_chunks)
    with own_spec(fs(tmp_path, queue_bytes="1MiB"), n_slots=n_slots) as engine:
        engine.ready()
        for i in range(0, n_chunks, n_slots):  # stored by requests that run one after the other
            context = engine.request(keys)
            engine.store(keys[i : i + n_slots], context)
            engine.settle()
            engine.manager.on_request_finished(context)
        assert sorted(engine.held()) == sorted(keys)
        engine.empty_primary()
        n = engine.serve(keys)
        assert n >= max(1, n_slots - max(1, n_slots // 8))
        assert engine.statistics().n_read <= n_slots


def test_ten_waiting_requests_and_one_that_stores(tmp_path):
    """A11, https://github.com/vllm-project/vllm/issues/49902: the one stores, and nothing is read twice for nobody."""
    waiting = [keys_of(f"w{i}", 4) for i in range(10)]
    with own_spec(fs(tmp_path, store_reserve="25%")) as engine:
        engine.ready()
        for keys in waiting:
            engine.serve(keys)
        engine.empty_primary()
        contexts = [engine.request(keys) for keys in waiting]
        before = engine.statistics().n_read
        n_stored = 0
        for i in range(20):
            for keys, context in zip(waiting, contexts, strict=True):
                engine.lookup(keys, context)
            n_stored += len(engine.store(keys_of(f"running{i}", 2)))
            engine.settle()
        assert n_stored == 40
        assert engine.statistics().n_read - before <= 6


def test_what_was_promised_in_a_step_is_not_evicted_in_it(tmp_path):
    """A key told as a hit is still there when vLLM asks for it at the step's end, whatever was stored in between."""
    keys = keys_of("a", 4)
    with own_spec(fs(tmp_path, capacity=64 << 10)) as engine:
        engine.ready().serve(keys)
        engine.empty_primary()
        context = engine.request(keys)
        assert engine.lookup(keys, context) == [PENDING] * 4
        for i in range(4):  # more than the rest of the capacity holds, in the same step
            engine.store(keys_of(f"other{i}", 1))
        engine.until(lambda: PENDING not in engine.lookup(keys, context))
        assert engine.lookup(keys, context) == [HIT] * 4
        engine.settle()
        assert not engine.tier.hierarchy.guarded


def test_a_request_that_runs_may_ask_again(tmp_path):
    """Once a request has been scheduled, and is preempted later, what it used may be brought up for it again."""
    keys = keys_of("a", 3)
    with own_spec(fs(tmp_path)) as engine:
        engine.ready().serve(keys)
        engine.empty_primary()
        context = engine.request(keys)
        for i in range(3):
            engine.until(lambda: engine.lookup(keys, context) == [HIT] * 3)
            engine.load(keys, context)
            engine.step(new=[] if i else [context.req_id])  # vLLM calls it new once
            engine.step(preempted=[context.req_id])
            engine.empty_primary()
        assert engine.statistics().n_read == 9


def test_an_id_that_comes_again_owes_nothing(tmp_path):
    """A27, https://github.com/vllm-project/vllm/issues/46014: a request under an old id starts without promises."""
    keys = keys_of("a", 3)
    with own_spec(fs(tmp_path)) as engine:
        engine.ready().serve(keys)
        for _ in range(2):
            engine.empty_primary()
            context = engine.request(keys, "again")
            engine.until(lambda context=context: engine.lookup(keys, context) == [HIT] * 3)
            engine.manager.on_request_finished(context)
        assert engine.tier._promises._n_promised == 0


def test_retry_is_not_for_ever(tmp_path, monkeypatch):
    """I3: a key that the scan has not told of yet is probed for, 100 ms at most, and then it is a miss."""
    keys = keys_of("a", 3)
    monkeypatch.setattr(secondary, "_PROBE_S", 0.1)
    with own_spec(fs(tmp_path)) as engine:
        level = engine.ready().tier._level
        clock = [0.0]
        engine.tier._clock = lambda: clock[0]
        level.answers.settled = lambda _: False  # it never makes up its mind
        context = engine.request(keys)
        assert engine.lookup(keys, context) == [RETRY] * 3
        engine.step()
        clock[0] = 0.099
        assert engine.lookup(keys, context) == [RETRY] * 3
        clock[0] = 0.1
        assert engine.lookup(keys, context) == [MISS]


def test_opening_makes_requests_wait_once(tmp_path):
    """While the tier opens the first requests wait, for one deadline in the engine's life, however many they are."""
    with own_spec(fs(tmp_path, lookup_deadline_s=5)) as engine:
        clock = [0.0]
        engine.tier._clock = lambda: clock[0]
        keys = keys_of("a", 1)
        opening = type(engine.tier._below).opening
        try:
            type(engine.tier._below).opening = property(lambda _: True)  # type: ignore[method-assign]
            assert engine.tier.lookup(keys[0], engine.request(keys)) is RETRY
            clock[0] = 5.0
            assert engine.tier.lookup(keys[0], engine.request(keys)) is MISS
            assert engine.tier.lookup(keys[0], engine.request(keys)) is MISS
        finally:
            type(engine.tier._below).opening = opening  # type: ignore[method-assign]
        engine.ready()


def test_a_filter_keeps_a_request_from_disk(tmp_path):
    """A request that may load from host memory only is not served from us, by vLLM's own rule and our medium."""
    from vllm.v1.kv_offload.base import Medium

    keys = keys_of("a", 2)
    with own_spec(fs(tmp_path)) as engine:
        engine.ready().serve(keys)
        engine.empty_primary()
        context = engine.request(keys)
        context.load_tier_filter = TierFilter((TierMatcher(medium=Medium.CPU),))
        assert engine.lookup(keys, context) == [MISS]
        assert engine.lookup(keys, engine.request(keys))[0] is PENDING


def test_two_tiers_of_ours_in_one_engine(tmp_path):
    """Each has its own root, settings, promises and label; what one holds is not asked of the other."""
    keys = keys_of("a", 3)
    with own_spec(fs(tmp_path / "0"), fs(tmp_path / "1", eviction_policy="mq")) as engine:
        first, second = engine.manager.secondary_tiers
        engine.until(lambda: all(tier.hierarchy.levels[1].plan.writable() for tier in (first, second)))
        engine.until(lambda: all(tier.hierarchy.levels[1].serves for tier in (first, second)))
        engine.serve(keys)
        assert [len(tier.hierarchy.levels[1].ledger) for tier in (first, second)] == [3, 3]
        assert (first._label, second._label) == ("1:TierKVSecondaryTier", "2:TierKVSecondaryTier")
        engine.empty_primary()
        context = engine.request(keys)
        assert engine.lookup(keys, context) == [PENDING] * 3
        assert (first._promises._n_promised, second._promises._n_promised) == (3, 0)
        engine.until(lambda: engine.lookup(keys, context) == [HIT] * 3)
        engine.load(keys, context)
    assert len(chunk_files(tmp_path / "0")) == len(chunk_files(tmp_path / "1")) == 3


# -- tiers that hang and fail -----------------------------------------------------------------------------------------


def test_a_row_is_not_given_back_while_a_copy_runs():
    """A10, https://github.com/python/cpython/issues/107505: a missed deadline is no end, vLLM hears of the real one."""
    keys = keys_of("a", 2)
    with own_spec(GATE | {"transfer_deadline_s": 1.5}) as engine:
        engine.ready().serve(keys)
        engine.empty_primary()
        GateTier.gate.clear()
        context = engine.request(keys)
        engine.lookup(keys, context)
        engine.step()
        engine.until(lambda: engine.statistics().broken)  # the deadline has passed and opened the breaker
        for _ in range(20):
            engine.step()
        assert engine.manager._jobs, "vLLM was told that the row is free while a read may still fill it"
        GateTier.gate.set()
        engine.settle()
        assert engine.lookup(keys, context) == [MISS]


def test_a_hung_tier_pins_no_more_than_its_queue():
    """A12, https://github.com/vllm-project/vllm/issues/50031: the rest is dropped and counted, vLLM stores on."""
    with own_spec(GATE | {"queue_bytes": 2 * ROW}, n_slots=8) as engine:
        engine.ready()
        GateTier.gate.clear()
        for i in range(12):
            assert engine.store(keys_of(f"p{i}", 1)), "vLLM's primary has room: only two chunks wait for the tier"
            engine.step()
        assert engine.statistics().refused == {"queue_full": 10}
        GateTier.gate.set()
        engine.settle()
        assert len(engine.held()) == 2


def test_a_failing_tier_is_left_alone():
    """I4: its errors are failed jobs and misses; the breaker opens, and nothing stays pinned in vLLM's primary."""
    with own_spec(GATE) as engine:
        told = watch_jobs(engine.ready())
        GateTier.failing = True
        for i in range(8):
            engine.serve(keys_of(f"p{i}", 2))
        engine.until(lambda: engine.statistics().broken)
        assert not any(result.success for result in told)
        assert engine.primary._num_evictable_cache_chunks == 8
        assert engine.held() == []


def test_jobs_end_in_their_own_order():
    """A store that waits does not hold up a later load: vLLM hears of each as it ends."""
    keys = keys_of("a", 2)
    with own_spec(GATE) as engine:
        engine.ready().serve(keys)
        engine.empty_primary()
        context = engine.request(keys)
        engine.lookup(keys, context)
        engine.step()
        GateTier.gate.clear()
        engine.store(keys_of("b", 1))
        GateTier.gate.set()
        engine.until(lambda: engine.lookup(keys, context) == [HIT] * 2)
        engine.settle()


def test_a_reset_waits_for_copies_and_begins_a_new_epoch(tmp_path):
    """A33, A34: vLLM's reset returns once no copy touches its rows; old chunks are found by nobody, until a restart."""
    keys = keys_of("a", 3)
    with own_spec(fs(tmp_path)) as engine:
        engine.ready().serve(keys)
        context = engine.request(keys_of("b", 2))
        engine.store(keys_of("b", 2), context)
        engine.reset()
        assert not engine.manager._jobs
        assert engine.ready().serve(keys) == 0
        engine.empty_primary()
        assert engine.serve(keys) == 3
    with own_spec(fs(tmp_path)) as engine:
        assert engine.ready(3).serve(keys) == 3


def test_a_reset_does_not_return_over_a_running_copy():
    """A33: while a read may still fill a row, ``reset_cache`` does not come back, and then it does."""
    keys = keys_of("a", 1)
    with own_spec(GATE) as engine:
        engine.ready().serve(keys)
        engine.empty_primary()
        GateTier.gate.clear()
        n_before = GateTier.n_begun
        engine.lookup(keys, engine.request(keys))
        engine.step()
        engine.until(lambda: GateTier.n_begun > n_before)
        returned = threading.Event()
        resetting = threading.Thread(target=lambda: (engine.manager.reset_cache(), returned.set()))
        resetting.start()
        assert not returned.wait(0.1)
        GateTier.gate.set()
        resetting.join(PATIENCE_S)
        assert returned.is_set()
        assert not engine.manager._jobs


def test_a_hung_copy_keeps_vllms_memory(monkeypatch):
    """A shutdown that cannot end a copy says so, and vLLM then keeps the mapping that the copy may still write to."""
    monkeypatch.setattr("tierkv.vllm._loop._CLOSE_S", 0.3)
    keys = keys_of("a", 1)
    engine = OwnSpec(GATE)
    engine.ready().serve(keys)
    engine.empty_primary()
    GateTier.gate.clear()
    n_before = GateTier.n_begun
    engine.lookup(keys, engine.request(keys))
    engine.step()
    engine.until(lambda: GateTier.n_begun > n_before)
    with pytest.raises(TierError, match="did not end"):
        engine.manager.shutdown()
    assert engine.primary._mmap_region.mmap_obj is not None
    GateTier.gate.set()
    engine.rows.release()
    engine.primary.shutdown()


# -- settings, metrics, events ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tier": "sf"}, r"secondary_tiers\[0\].tier is 'sf'.*nearest valid value: fs"),
        ({"capcity": 1}, r"secondary_tiers\[0\] has no option 'capcity'.*nearest valid option: capacity"),
        ({"capacity": 4096}, r"secondary_tiers\[0\].capacity is 4096, but must be at least 8192"),
        ({"root_dir": None}, r"secondary_tiers\[0\].root_dir is None"),
        ({"eviction_policy": "leaf_frist > mq"}, r"secondary_tiers\[0\].eviction_policy.*leaf_first"),
        ({"writes": "demote"}, r"secondary_tiers\[0\].writes is 'demote'.*vLLM's manager"),
        ({"store_reserve": "1MiB"}, r"secondary_tiers\[0\].store_reserve is 1048576.*28672"),
        ({"n_read_threads": 0}, r"secondary_tiers\[0\].n_read_threads is 0"),
        ({"transfer_dedline_s": 1}, r"nearest valid option: transfer_deadline_s"),
        ({"tier": "no.such:Tier"}, r"secondary_tiers\[0\].tier names 'Tier'.*cannot be loaded"),
    ],
)
def test_a_wrong_setting_is_one_sentence_and_creates_nothing(tmp_path, settings, says):
    """The engine's start ends in our sentence; no directory, no thread and no shared memory is left."""
    entry = {key: value for key, value in (fs(tmp_path / "root") | settings).items() if value is not None}
    config = offloading_config({"cpu_bytes_to_use": 8 * ROW, "secondary_tiers": [entry]}, page_nbytes=ROW)
    before = Snapshot.take()
    with pytest.raises(ConfigError, match=says) as caught:
        TieringOffloadingSpec(config).get_manager()
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert before.leaked(Snapshot.take()) == []


def test_the_front_end_hears_it_too(tmp_path):
    """Metric names are asked for before any engine starts: a wrong setting ends there in the same sentence."""
    with pytest.raises(ConfigError, match="capcity"):
        TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": [fs(tmp_path, capcity=1)]})


def test_every_metric_that_it_reports_is_defined(tmp_path):
    """The front end asserts that it knows each name; what a tier of ours tells are our names, all of them defined."""
    entry = fs(tmp_path)
    defined = TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": [entry], "cpu_bytes_to_use": 1})
    with own_spec(entry) as engine:
        engine.ready().serve(keys_of("a", 2))
        told = engine.tier.get_stats().data
    names = {str(name) for kind in told.values() for name in kind or ()}
    assert names
    assert {name.split("{")[0] for name in names} <= set(defined)
    assert all("tierkv" in name for name in names)


def test_events_of_the_tier(tmp_path):
    """``enable_kv_events``: stored and removed alternate for each key, in the medium STORAGE, under the tier's name."""
    told: dict[Any, bool] = {}
    with own_spec(fs(tmp_path, enable_kv_events=True, capacity=128 << 10)) as engine:
        engine.ready()
        take = engine.tier.take_events

        def watched() -> list[Any]:
            events = list(take())
            for event in events:
                assert event.medium.value == "STORAGE"
                for key in event.keys:
                    assert event.removed is not told.get(key, True), "stored and removed alternate"
                    told[key] = event.removed
            return events

        engine.tier.take_events = watched
        for i in range(8):
            engine.serve(keys_of(f"p{i}", 4))
        engine.until(lambda: engine.statistics().n_evicted > 0)
        engine.settle()
        engine.step()
        resident = {key for key, removed in told.items() if not removed}
        assert resident == set(engine.held())
    assert any(told.values())
