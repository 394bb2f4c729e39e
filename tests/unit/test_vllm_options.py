"""The vLLM adapter's settings: what is accepted, and that each wrong one is a single helpful sentence."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tierkv.errors import ConfigError
from tierkv.vllm._secondary_options import parse_secondary
from tierkv.vllm.options import (
    Options,
    TierOptions,
    check_capacity,
    check_reserve,
    check_tier_capacity,
    parse_options,
)

CPU = {"cpu_bytes_to_use": 1 << 30}


def fs(**more: object) -> dict[str, object]:
    return {**CPU, "secondary_tiers": [{"type": "fs", "root_dir": "/nowhere/kv", **more}]}


def test_guide_json_is_accepted_word_for_word() -> None:
    """The multi-tier JSON of the vLLM Ascend guide needs no change and warns of nothing."""
    options = parse_options(
        {
            "cpu_bytes_to_use": 8 * (1 << 30),
            "blocks_per_chunk": 8,
            "spec_name": "TieringOffloadingSpec",
            "secondary_tiers": [{"type": "fs", "root_dir": "/tmp/vllm_kv_offload"}],
        }
    )
    assert options == Options(
        cpu_nbytes=8 << 30, blocks_per_chunk=8, tiers=(TierOptions(type="fs", root_dir="/tmp/vllm_kv_offload"),)
    )


def test_every_key_has_an_effect() -> None:
    """Each key that is said to be understood ends in the record."""
    options = parse_options({
        "cpu_bytes_to_use": "8GiB",
        "block_size": 256,
        "eviction_policy": "fifo",
        "store_threshold": 2,
        "max_tracker_size": 5,
        "offload_prompt_only": False,
        "canonical_layout": True,
        "self_describing_kv_events": True,
        "pool": "shared",
        "store_reserve": "25%",
        "lookup_deadline_s": 2,
        "transfer_deadline_s": 0.5,
        "secondary_tiers": [{
            "type": "fs", "root_dir": "/nowhere/kv", "n_read_threads": 4, "n_write_threads": 2, "locality": "remote",
            "enable_kv_events": True, "capacity": "500GiB", "min_free": 0, "eviction_policy": "fifo",
            "writes": "demote", "durability": "power", "layout": "slab", "queue_bytes": "64MiB",
            "breaker_cooldown_s": 1,
        }],
    })  # fmt: skip
    assert options == Options(
        cpu_nbytes=8 << 30, tokens_per_chunk=256, eviction_policy="fifo", store_threshold=2, max_tracker_size=5,
        offload_prompt_only=False, canonical_layout=True, self_describing_kv_events=True, pool="shared",
        store_reserve=0.25, lookup_deadline_s=2.0, transfer_deadline_s=0.5,
        tiers=(TierOptions(
            type="fs", root_dir="/nowhere/kv", n_read_threads=4, n_write_threads=2, locality="REMOTE",
            enable_kv_events=True, capacity_nbytes=500 << 30, min_free_nbytes=0, eviction_policy="fifo",
            writes="demote", durability="power", layout="slab", queue_nbytes=64 << 20, breaker_cooldown_s=1.0,
        ),),
    )  # fmt: skip


WRONG = [
    ({}, "cpu_bytes_to_use", "8GiB"),
    ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use", "nearest valid value: 1"),
    ({"cpu_bytes_to_use": -5}, "cpu_bytes_to_use", "-5"),
    ({"cpu_bytes_to_use": "8 GiBB"}, "cpu_bytes_to_use", "GiB"),
    ({"cpu_bytes_to_use": True}, "cpu_bytes_to_use", "True"),
    ({"cpu_bytes_to_use": 4096.5}, "cpu_bytes_to_use", "4096"),
    ({**CPU, "block_size": 64, "blocks_per_chunk": 4}, "blocks_per_chunk", "block_size"),
    ({**CPU, "block_size": 0}, "block_size", "nearest valid value: 1"),
    ({**CPU, "block_size": -1}, "block_size", "-1"),
    ({**CPU, "block_size": "64"}, "block_size", "'64'"),
    ({**CPU, "block_size": 64.0}, "block_size", "64.0"),
    ({**CPU, "blocks_per_chunk": True}, "blocks_per_chunk", "True"),
    ({**CPU, "blocks_per_chunk": 0}, "blocks_per_chunk", "nearest valid value: 1"),
    ({**CPU, "block_per_chunk": 4}, "block_per_chunk", "blocks_per_chunk"),
    ({**CPU, "secondary_tier": []}, "secondary_tier", "secondary_tiers"),
    ({**CPU, "cpu_byte_to_sue": 4}, "cpu_byte_to_sue", "cpu_bytes_to_use"),
    ({**CPU, "eviction_policy": "lur"}, "eviction_policy", "lru"),
    ({**CPU, "eviction_policy": "ttl(-1) > lru"}, "eviction_policy", "-1"),
    (fs(eviction_policy="lru > mq"), "secondary_tiers[0].eviction_policy", "lru"),
    ({**CPU, "offload_prompt_only": "false"}, "offload_prompt_only", "false"),
    ({**CPU, "store_threshold": -1}, "store_threshold", "nearest valid value: 0"),
    ({**CPU, "max_tracker_size": 0}, "max_tracker_size", "nearest valid value: 1"),
    ({**CPU, "lookup_deadline_s": -1}, "lookup_deadline_s", "-1"),
    ({**CPU, "lookup_deadline_s": math.nan}, "lookup_deadline_s", "nan"),
    ({**CPU, "lookup_deadline_s": 0}, "lookup_deadline_s", "0.001"),
    ({**CPU, "store_reserve": "120%"}, "store_reserve", "12.5%"),
    ({**CPU, "store_reserve": -4}, "store_reserve", "-4"),
    ({**CPU, "pool": "both"}, "pool", "auto"),
    ({**CPU, "backpressure": 3}, "backpressure", "{}"),
    ({**CPU, "ttl_s": 0}, "ttl_s", "0.001"),
    ({**CPU, "secondary_tiers": {"type": "fs"}}, "secondary_tiers", "list"),
    ({**CPU, "secondary_tiers": ["fs"]}, "secondary_tiers[0]", "object"),
    ({**CPU, "secondary_tiers": [{"root_dir": "/x"}]}, "secondary_tiers[0].type", "fs"),
    ({**CPU, "secondary_tiers": [{"type": "fss", "root_dir": "/x"}]}, "secondary_tiers[0].type", "fs"),
    ({**CPU, "secondary_tiers": [{"type": "fs"}]}, "secondary_tiers[0].root_dir", "directory"),
    ({**CPU, "secondary_tiers": [{"type": "fs", "root_dir": ""}]}, "secondary_tiers[0].root_dir", "directory"),
    (fs(root_dir="  "), "secondary_tiers[0].root_dir", "directory"),
    (fs(checksum_key_file=" "), "secondary_tiers[0].checksum_key_file", "the path of a file"),
    (fs(root_dir="a\0b"), "secondary_tiers[0].root_dir", "path"),
    (fs(n_read_threads=0), "secondary_tiers[0].n_read_threads", "nearest valid value: 1"),
    (fs(n_read_threads=10_000), "secondary_tiers[0].n_read_threads", "nearest valid value: 256"),
    (fs(n_write_threads=-1), "secondary_tiers[0].n_write_threads", "-1"),
    (fs(n_write_threads="8"), "secondary_tiers[0].n_write_threads", "'8'"),
    (fs(n_write_threads=2.5), "secondary_tiers[0].n_write_threads", "2.5"),
    (fs(n_write_threads=math.nan), "secondary_tiers[0].n_write_threads", "nan"),
    (fs(n_write_threads=True), "secondary_tiers[0].n_write_threads", "True"),
    (fs(capacity=0), "secondary_tiers[0].capacity", "nearest valid value: 1"),
    (fs(capacity="lots"), "secondary_tiers[0].capacity", "lots"),
    (fs(capcity="1GiB"), "capcity", "nearest valid option: capacity"),
    (fs(spelling_unlike_anything=1), "spelling_unlike_anything", "n_read_threads"),
    (fs(writes="back"), "secondary_tiers[0].writes", "cascade, demote"),
    (fs(durability="full"), "secondary_tiers[0].durability", "process, power"),
    (fs(locality="NEAR"), "secondary_tiers[0].locality", "LOCAL, REMOTE"),
    (fs(admission="secnd_touch"), "secondary_tiers[0].admission", "second_touch"),
    (
        {**CPU, "secondary_tiers": [{"type": "fs", "root_dir": "/x/y"}, {"type": "fs", "root_dir": "/x/./y/"}]},
        "secondary_tiers[1].root_dir", "secondary_tiers[0]",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "option", "says"), WRONG, ids=[f"{option}-{i}" for i, (_, option, _) in enumerate(WRONG)]
)
def test_wrong_setting_is_one_sentence(extra: dict[str, object], option: str, says: str) -> None:
    """The error is a ConfigError on one line that names the option and what would be valid."""
    with pytest.raises(ConfigError) as caught:
        parse_options(extra)
    text = str(caught.value)
    assert option in text and says in text
    assert "\n" not in text and len(text) < 500


def test_size_as_vllm_itself_writes_it() -> None:
    """VLLM's ``kv_offloading_size`` arrives as a whole float."""
    assert parse_options({"cpu_bytes_to_use": 16777216.0}).cpu_nbytes == 16 << 20


def test_orders_and_rules_are_kept_as_written() -> None:
    """What parses is handed on as it was written, text or objects, for the primary and for each tier."""
    order = {"type": "ttl", "ttl_s": 60, "order": "arc"}
    options = parse_options({**fs(eviction_policy=order, ttl_s=5, admission="second_touch"), "eviction_policy": "arc"})
    assert (options.eviction_policy, options.ttl_s, options.admission) == ("arc", None, None)
    (tier,) = options.tiers
    assert (tier.eviction_policy, tier.ttl_s, tier.admission) == (order, 5.0, "second_touch")


@pytest.mark.parametrize("name", ["n_read_threads", "cpu_bytes_to_use", "secondary_tiers", "eviction_policy"])
def test_slip_of_two_letters_is_caught(name: str) -> None:
    """Two swapped letters, one missing or one doubled are within reach of the known key."""
    where = "secondary_tiers" if name == "n_read_threads" else None
    for slip in (name[1] + name[0] + name[2:], name[:-1], name[:3] + name[2:]):
        extra = fs(**{slip: 1}) if where else {**CPU, slip: 1}
        with pytest.raises(ConfigError, match=name):
            parse_options(extra)


def test_unknown_key_is_one_warning() -> None:
    """Keys that vLLM may add tomorrow do not stop the engine; all of them share one sentence."""
    options = parse_options({**CPU, "brand_new_thing": 1, "another_new_thing": 2, "sync_load_budget_bytes": 3})
    assert len(options.warnings) == 1
    assert "another_new_thing, brand_new_thing" in options.warnings[0]


def test_backpressure_and_cpu_only_tiers_are_said_to_do_nothing() -> None:
    """What is accepted without an effect is said, not silently dropped."""
    options = parse_options({**fs(backpressure={}), "backpressure": {"backpressure_cls": "X"}}, tiered=False)
    assert options.tiers == ()
    assert [w.split()[0] for w in options.warnings] == [
        "secondary_tiers[0].backpressure",
        "secondary_tiers",
        "backpressure",
    ]


def test_foreign_tier_keeps_its_own_settings() -> None:
    """A tier loaded from a module gets the keys that only it knows, and its common keys are still checked."""
    raw = {"type": "MyTier", "module_path": "my.module", "capacity": "1MiB", "bucket": "b"}
    (tier,) = parse_options({**CPU, "secondary_tiers": [raw]}).tiers
    assert (tier.type, tier.module_path, tier.capacity_nbytes, tier.extra) == (
        "MyTier",
        "my.module",
        1 << 20,
        {"bucket": "b"},
    )
    with pytest.raises(ConfigError, match="capacity"):
        parse_options({**CPU, "secondary_tiers": [{**raw, "capacity": -1}]})


def test_capacity_is_the_total_of_all_workers() -> None:
    """One chunk exactly fits, one byte less is refused with both numbers; private pools divide the total."""
    assert check_capacity(8192, 8192, n_ranks=2, shared=True) == 1
    assert check_capacity(16384, 8192, n_ranks=2, shared=False) == 1
    assert check_capacity(10 * 8192 + 1, 4096, n_ranks=2, shared=False) == 10
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use is 8191.*8192"):
        check_capacity(8191, 8192, n_ranks=1, shared=True)
    with pytest.raises(ConfigError, match="0 bytes a block"):
        check_capacity(8191, 0, n_ranks=1, shared=True)


def test_tier_capacity_under_one_chunk() -> None:
    """A tier that could never hold a chunk is refused at start, with the bytes that one takes there."""
    tier = TierOptions(type="fs", root_dir="/x", capacity_nbytes=12287)
    with pytest.raises(ConfigError, match=r"secondary_tiers\[1\].capacity is 12287.*12288"):
        check_tier_capacity(1, tier, 12288)
    check_tier_capacity(1, TierOptions(type="fs", root_dir="/x", capacity_nbytes=12288), 12288)


@pytest.mark.parametrize(
    ("reserve", "n_slots", "expected"),
    [(None, 100, 12), (None, 4, 1), (None, 1, 0), (0, 100, 0), (0.5, 100, 50), (8193, 100, 3)],
)
def test_store_reserve(reserve: float | None, n_slots: int, expected: int) -> None:
    """Default: the larger of one chunk and 12.5 %; bytes are rounded up to whole slots; a pool of one slot has none."""
    assert check_reserve(Options(cpu_nbytes=1, store_reserve=reserve), n_slots, 4096) == expected


def test_store_reserve_of_everything() -> None:
    """A reserve that leaves no slot for promotions is refused with the largest that does."""
    with pytest.raises(ConfigError, match=r"store_reserve.*nearest valid value: 36864"):
        check_reserve(Options(cpu_nbytes=1, store_reserve=40960), 10, 4096)


def test_module_needs_no_vllm() -> None:
    """Checking settings is possible where neither vLLM nor torch is installed."""
    code = "import sys, tierkv.vllm.options; print([m for m in ('vllm', 'torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert done.stdout.strip() == "[]"


def test_a_relative_root_dir_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory below where the engine was started."""
    monkeypatch.chdir(tmp_path)
    options = parse_options({"cpu_bytes_to_use": "1MiB", "secondary_tiers": [{"type": "fs", "root_dir": "./kv/../kv"}]})
    assert options.tiers[0].root_dir == str(tmp_path / "kv")


@pytest.mark.parametrize("writes", [[], {}, ["cascade"], 5, "demote"], ids=repr)
def test_a_tier_below_vllms_own_manager_takes_no_other_writes(writes: object) -> None:
    """Whatever was written there: a list was a TypeError without the option's name."""
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.writes is .* nearest valid value: cascade"):
        parse_secondary("tiers[0]", {"root_dir": "/nowhere/kv", "writes": writes})
