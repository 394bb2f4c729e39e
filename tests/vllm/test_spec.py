"""The specs and the plugin: whose names they take, what they refuse, and that a refusal has created nothing."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec as TheirCPUSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

import tierkv.vllm
from tests.leaks import Snapshot
from tests.patience import PATIENCE_S
from tests.vllm.manager_kit import PAGE_NBYTES, offloading_config
from tests.vllm.scheduler_rig import cache_config, engine_config
from tierkv.errors import ConfigError
from tierkv.vllm import plugin
from tierkv.vllm.spec import CPUOffloadingSpec, TieringOffloadingSpec, TierKVOffloadingSpec

pytestmark = pytest.mark.timeout(600)

CPU = {"cpu_bytes_to_use": 64 * 4096}


@pytest.fixture
def factory(monkeypatch):
    """VLLM's factory as vLLM makes it, whatever plugins ran in this process before; put back as it was."""
    registry = {
        name: loader for name, loader in OffloadingSpecFactory._registry.items() if not hasattr(loader, "tierkv_name")
    }
    asked = OffloadingSpecFactory.get_spec_cls.__func__
    monkeypatch.setattr(OffloadingSpecFactory, "_registry", registry)
    monkeypatch.setattr(OffloadingSpecFactory, "get_spec_cls", classmethod(getattr(asked, "tierkv_original", asked)))
    for name, room in (("CPUOffloadingSpec", "cpu"), ("TieringOffloadingSpec", "tiering")):
        if name not in registry:
            OffloadingSpecFactory.register_spec(name, f"vllm.v1.kv_offload.{room}.spec", name)
    monkeypatch.delenv("TIERKV_VLLM", raising=False)
    return OffloadingSpecFactory


# -- the plugin -------------------------------------------------------------------------------------------------------


def test_names_are_taken_over_on_this_platform(factory):
    """On a CPU platform vLLM's own names, the default included, become tierkv's; registering twice changes nothing."""
    plugin.register()
    plugin.register()
    assert factory.get_spec_cls({}) is CPUOffloadingSpec
    assert factory.get_spec_cls({"spec_name": "TieringOffloadingSpec"}) is TieringOffloadingSpec
    assert factory.get_spec_cls({"spec_name": "TierKVOffloadingSpec"}) is TierKVOffloadingSpec


def test_one_line_says_what_was_taken_over(factory, caplog_vllm):
    """The log names the specs once, however often vLLM calls the plugin."""
    plugin.register()
    plugin.register()
    assert [record for record in caplog_vllm if "CPUOffloadingSpec, TieringOffloadingSpec" in record] == caplog_vllm
    assert len(caplog_vllm) == 1


def test_a_plugin_that_runs_later_does_not_take_them_back(factory):
    """However another plugin registers its specs, and after whom: ours are asked for."""
    plugin.register()
    factory._registry.pop("CPUOffloadingSpec")
    factory.register_spec("CPUOffloadingSpec", "vllm.v1.kv_offload.cpu.spec", "CPUOffloadingSpec")
    factory._registry["TieringOffloadingSpec"] = lambda: TheirCPUSpec
    assert factory.get_spec_cls({}) is CPUOffloadingSpec
    assert factory.get_spec_cls({"spec_name": "TieringOffloadingSpec"}) is TieringOffloadingSpec


def test_names_of_others_are_left_alone(factory):
    """A spec that somebody else registered under a name of its own is still theirs."""
    plugin.register()
    factory.register_spec("Somebody", "vllm.v1.kv_offload.cpu.spec", "CPUOffloadingSpec")
    assert factory.get_spec_cls({"spec_name": "Somebody"}) is TheirCPUSpec


def test_environment_decides(factory, monkeypatch):
    """``TIERKV_VLLM=0`` leaves vLLM alone but for our own name; anything but 0 and 1 is refused."""
    monkeypatch.setenv("TIERKV_VLLM", "0")
    plugin.register()
    assert factory.get_spec_cls({}) is TheirCPUSpec
    assert factory.get_spec_cls({"spec_name": "TierKVOffloadingSpec"}) is TierKVOffloadingSpec
    monkeypatch.setenv("TIERKV_VLLM", "yes")
    with pytest.raises(ConfigError, match=r"TIERKV_VLLM is 'yes'.*0 or 1.*nearest valid value: 1"):
        plugin.register()


def test_other_platforms_are_left_alone_unless_asked(factory, monkeypatch):
    """On CUDA vLLM's names stay vLLM's, until ``TIERKV_VLLM=1``."""
    import vllm.platforms

    class Cuda:
        device_type = "cuda"

    monkeypatch.setattr(vllm.platforms, "_current_platform", Cuda())
    plugin.register()
    assert factory.get_spec_cls({}) is TheirCPUSpec
    monkeypatch.setenv("TIERKV_VLLM", "1")
    plugin.register()
    assert factory.get_spec_cls({}) is CPUOffloadingSpec


def test_module_path_works_without_the_plugin(factory):
    """``spec_module_path: tierkv.vllm`` finds all three names."""
    for name in (name for name in tierkv.vllm.__all__ if name.endswith("Spec")):
        extra = {"spec_name": name + "X", "spec_module_path": "tierkv.vllm"}
        with pytest.raises(AttributeError):
            factory.get_spec_cls(extra)
        assert issubclass(getattr(tierkv.vllm, name), OffloadingSpec)
    extra = {"spec_name": "TierKVOffloadingSpec", "spec_module_path": "tierkv.vllm"}
    assert factory.get_spec_cls(extra) is TierKVOffloadingSpec


def test_importing_the_plugin_is_cheap():
    """VLLM imports every plugin in every process: ours brings neither torch nor vLLM along."""
    code = "import sys, tierkv.vllm.plugin; print([m for m in ('torch', 'vllm', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert done.stdout.strip() == "[]"


# -- the specs --------------------------------------------------------------------------------------------------------


def test_sizes_are_the_total_of_all_workers():
    """Slots are counted in whole pages and over all ranks, as integers or text."""
    spec = CPUOffloadingSpec(offloading_config({"cpu_bytes_to_use": "256KiB"}))
    assert (spec.n_slots, spec.store_reserve, spec.shared) == (64, 8, False)
    assert spec.geometry.chunk_nbytes == PAGE_NBYTES
    assert TierKVOffloadingSpec(offloading_config({**CPU, "pool": "shared"})).shared


def test_every_metric_is_documented():
    """The reference page names the metrics that the spec defines, with their labels, and no others."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "vllm-metrics.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `vllm:")]
    documented = {row[1].strip(" `"): tuple(re.findall(r"`(\w+)`", row[2])) for row in rows}
    defined = TieringOffloadingSpec.build_metric_definitions({**CPU, "store_threshold": 2})
    assert documented == {name: metric.labelnames for name, metric in defined.items()}


def wrong_settings(root: Path) -> list[tuple[dict[str, Any], str]]:
    fs = {"type": "fs", "root_dir": str(root)}
    return [
        ({}, "cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": 4095}, "4096"),
        ({"cpu_bytes_to_use": -1}, "cpu_bytes_to_use"),
        ({**CPU, "store_reserve": "90000KiB"}, "store_reserve"),
        ({**CPU, "secondary_tiers": [{"type": "fs"}]}, "root_dir"),
        ({**CPU, "secondary_tiers": [fs | {"capacity": 4096}]}, "capacity"),
        ({**CPU, "secondary_tiers": [fs | {"n_read_threads": 10_000}]}, "n_read_threads"),
        ({**CPU, "secondary_tiers": [fs | {"capcity": 1}]}, "capacity"),
        ({**CPU, "secondary_tiers": [fs, {"type": "obj"}]}, "secondary_tiers[1].type"),
        ({**CPU, "secondary_tiers": [fs], "pool": "private"}, "pool"),
        ({**CPU, "secondary_tiers": [fs, {"type": "Nobody", "module_path": "tierkv.tiers.memory"}]}, "Nobody"),
        (
            {**CPU, "secondary_tiers": [fs], "cache_policy_module_path": "tierkv.policies", "eviction_policy": "No"},
            "No",
        ),
        ({**CPU, "cache_policy_module_path": "collections", "eviction_policy": "OrderedDict"}, "on_insert"),
        (
            {**CPU, "secondary_tiers": [fs | {"checksum_key_file": str(root / "none")}]},
            "secondary_tiers[0].checksum_key_file",
        ),
        (
            {**CPU, "secondary_tiers": [fs | {"checksum_key_env": "TIERKV_UNSET"}]},
            "secondary_tiers[0].checksum_key_env",
        ),
    ]


@pytest.mark.parametrize("case", range(15))
def test_wrong_setting_creates_nothing(case, tmp_path):
    """One sentence at start-up; no directory, no thread, no shared memory is left."""
    extra, says = wrong_settings(tmp_path / "root")[case]
    before = Snapshot.take()
    with pytest.raises(ConfigError) as caught:
        TieringOffloadingSpec(offloading_config(extra)).get_manager()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert before.leaked(Snapshot.take()) == []
    assert list(tmp_path.iterdir()) == []


def test_wrong_setting_stops_the_front_end_too():
    """The API server asks for metric names before any engine starts: it hears the same sentence."""
    with pytest.raises(ConfigError, match="block_per_chunk"):
        TieringOffloadingSpec.build_metric_definitions({**CPU, "block_per_chunk": 1})


@pytest.mark.parametrize(
    "chunk", [{"blocks_per_chunk": 2, "block_size": 8}, {"block_size": 5}, {"blocks_per_chunk": 0}]
)
def test_where_vllm_checks_first_nothing_was_created(chunk, tmp_path):
    """Chunk sizes are vLLM's to check; when it refuses them, no spec of ours was made yet."""
    tiers = [{"type": "fs", "root_dir": str(tmp_path / "root")}]
    extra = {
        **CPU, **chunk, "secondary_tiers": tiers,
        "spec_name": "TierKVOffloadingSpec", "spec_module_path": "tierkv.vllm",
    }  # fmt: skip
    config, caches = engine_config(extra, 16, "refused"), cache_config(16, two_groups=False)
    threads = set(threading.enumerate())
    with pytest.raises((ValueError, ConfigError)):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, caches)
    assert set(threading.enumerate()) == threads
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "case", [("xxhash", None, True), ("xxhash_cbor", None, True), ("xxhash", "random", False), ("sha256", None, False)]
)
def test_keys_that_end_with_the_process_are_worth_a_warning(case, tmp_path, monkeypatch, caplog_vllm):
    """A disk under keys from a random seed: one sentence at start that says what to set; none if a seed is set."""
    algorithm, seed, warns = case
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    tier = {"type": "fs", "root_dir": str(tmp_path / "root"), "capacity": "1MiB"}
    extra = {
        **CPU, "secondary_tiers": [tier], "spec_name": "TierKVOffloadingSpec", "spec_module_path": "tierkv.vllm",
    }  # fmt: skip
    config, caches = engine_config(extra, 16, "keys"), cache_config(16, two_groups=False)
    config.cache_config.prefix_caching_hash_algo = algorithm
    connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, caches)
    try:
        said = [record for record in caplog_vllm if "PYTHONHASHSEED" in record]
        assert len(said) == warns
        assert all(f"prefix_caching_hash_algo is {algorithm}" in sentence for sentence in said)
        assert any(str(tmp_path / "root") in record for record in caplog_vllm), "where the chunks lie, in full"
    finally:
        connector.shutdown()


@pytest.fixture
def caplog_vllm(caplog):
    """What tierkv logs: vLLM's loggers do not propagate."""
    import logging

    records: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    handler, target = Handler(), logging.getLogger("vllm.tierkv")
    level = target.level
    target.addHandler(handler)
    target.setLevel(logging.INFO)
    yield records
    target.removeHandler(handler)
    target.setLevel(level)
