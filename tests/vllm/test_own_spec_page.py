"""The page about vLLM's own spec: every configuration on it makes vLLM's real manager, which then serves a request."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import tierkv.vllm
from tests.vllm.manager_kit import keys_of, offloading_config
from tests.vllm.own_spec_kit import ROW, own_spec
from tierkv.vllm._secondary_options import KEYS, OWN_KEYS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "how-to" / "own-spec.md").read_text()


def configurations() -> list[dict[str, Any]]:
    """Every ``kv_connector_extra_config`` of the page."""
    blocks = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"--kv-transfer-config '(.*?)'", PAGE, re.DOTALL)
    return [json.loads(text) for text in blocks] + [json.loads(text)["kv_connector_extra_config"] for text in commands]


@pytest.mark.parametrize("extra", configurations(), ids=["order", "tier", "both"])
def test_a_configuration_of_the_page_works(extra, tmp_path):
    """Only the root directory and the sizes are other ones: stored, evicted where there is a tier, and served again."""
    name = extra.pop("spec_name")
    extra["cpu_bytes_to_use"] = 8 * ROW
    keys = keys_of("a", 3)
    if name == "CPUOffloadingSpec":
        manager = CPUOffloadingSpec(offloading_config(extra, page_nbytes=ROW)).get_manager()
        assert isinstance(manager._policy, tierkv.vllm.TierKVCachePolicy)
        assert manager._policy.text == extra["eviction_policy"]
        return
    assert TieringOffloadingSpec.build_metric_definitions(extra)
    tiers = extra.pop("secondary_tiers")
    for tier in tiers:
        tier["root_dir"], tier["capacity"] = str(tmp_path / tier["root_dir"].lstrip("/")), "1MiB"
    with own_spec(*tiers, **extra) as engine:
        engine.ready().serve(keys)
        for i in range(4):
            engine.serve(keys_of(f"other{i}", 3))
        assert engine.serve(keys) == 3
        assert engine.statistics().n_read == 3


def test_every_option_of_the_tier_is_documented():
    """The reference table names the keys that only this door has, and the page's words about the others are true."""
    text = (DOCS / "reference" / "options.md").read_text()
    section = text.split("## vLLM's own spec: `TierKVSecondaryTier`", 1)[1].split("\n## ", 1)[0]
    rows = {
        name
        for cell in re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", cell)
    }
    assert rows == OWN_KEYS | {"type", "module_path"}
    assert {"min_free", "ttl_s", "admission", "durability", "queue_bytes"} <= KEYS
