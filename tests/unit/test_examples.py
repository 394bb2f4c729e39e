"""The examples do what they say: each is run as a user would run it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

from tests.patience import PATIENCE_S
from tierkv.testing import check_policy, check_tier
from tierkv.vllm.options import parse_options

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NEEDS_MORE = {"vllm_offline.py", "vllm_events.py", "torch_server.py"}
"""Run where their libraries are: tests/vllm and tests/device."""
EXTRAS = {"prometheus_metrics.py": "prometheus_client"}
FEW = settings(max_examples=20, stateful_step_count=30)


PATIENTLY = """
import runpy, sys
from tests.patience import be_patient
be_patient()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _run(name: str, *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PATIENTLY, EXAMPLES / name, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert not run.stderr
    return run.stdout


@pytest.mark.parametrize("name", sorted({path.name for path in EXAMPLES.glob("*.py")} - NEEDS_MORE))
def test_an_example_runs(name: str) -> None:
    """It ends well, says something, and warns of nothing."""
    if name in EXTRAS:
        pytest.importorskip(EXTRAS[name], reason="its extra is not installed")
    assert _run(name).strip()


def test_two_tiers_finds_on_disk_what_an_earlier_run_stored(tmp_path: Path) -> None:
    """The second part of the example is served from level 1, all of it that fills a chunk."""
    assert "found 896 tokens on levels [1]; then: " in _run("two_tiers.py", str(tmp_path))


def test_the_vllm_examples_have_a_configuration_that_we_accept(tmp_path: Path) -> None:
    """The adapter's parser takes all three without a warning; tests/vllm starts engines with them."""
    config = _module("vllm_offline").transfer_config
    script = (EXAMPLES / "vllm_serve.sh").read_text()
    served = re.search(r"--kv-transfer-config '(.*?)' \"\$@\"", script, re.DOTALL)
    assert served is not None
    text = served[1].replace("'\"$root_dir\"'", str(tmp_path))
    text = re.sub(r"'\"\$\{\w+:-(\w+)\}\"'", r"\1", text)
    for found in (config(root_dir=str(tmp_path)), json.loads(text)):
        options = parse_options(found["kv_connector_extra_config"])
        assert (options.tiers[0].root_dir, options.cpu_nbytes) == (str(tmp_path), 8 << 30)
        assert not options.warnings
    assert not parse_options(config()["kv_connector_extra_config"], tiered=False).warnings


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(600)
def test_the_tier_of_the_example_keeps_its_promises() -> None:
    """The conformance kit that we offer to authors of tiers finds nothing wrong with the tier that we show them."""
    sqlite_tier = _module("custom_tier").SQLiteTier
    check_tier(lambda directory: sqlite_tier(directory / "chunks.sqlite"), settings=FEW)


def test_the_policy_of_the_example_keeps_its_promises() -> None:
    """The same for the order of eviction."""
    check_policy(_module("custom_policy").LFU, settings=FEW)
