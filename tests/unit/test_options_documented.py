"""The reference page of options names every option that the parser knows, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from tierkv.vllm import options

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "options.md"


def _documented(section: str) -> set[str]:
    """Names in the first column of the table under a heading."""
    body = PAGE.read_text().split(section, 1)[1].split("\n#", 1)[0]
    cells = re.findall(r"^\| (`[^|]+`) \|", body, flags=re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_every_option_of_vllm_is_documented() -> None:
    """The table of ``kv_connector_extra_config`` has the parser's keys, no more and no fewer."""
    assert _documented("## vLLM: `kv_connector_extra_config`") == set(options._TOP_KEYS)


def test_every_option_of_a_tier_is_documented() -> None:
    """The table of a tier's object has the parser's keys, and ``module_path`` for tiers of others."""
    assert _documented("### An entry of `secondary_tiers`") == set(options._FS_KEYS) | {"module_path"}
