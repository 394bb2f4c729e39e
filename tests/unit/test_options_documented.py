"""The reference page of options names every option that the parser knows, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tierkv.cli._main import _parser
from tierkv.vllm import options

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PAGE = REFERENCE / "options.md"


def _documented(section: str, page: Path = PAGE) -> set[str]:
    """Names in the first column of the table under a heading."""
    body = page.read_text().split(section, 1)[1].split("\n#", 1)[0]
    cells = re.findall(r"^\| (`[^|]+`) \|", body, flags=re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_every_option_of_vllm_is_documented() -> None:
    """The table of ``kv_connector_extra_config`` has the parser's keys, no more and no fewer."""
    assert _documented("## vLLM: `kv_connector_extra_config`") == set(options._TOP_KEYS)


def test_every_option_of_a_tier_is_documented() -> None:
    """The table of a tier's object has the parser's keys, and ``module_path`` for tiers of others."""
    assert _documented("### An entry of `secondary_tiers`") == set(options.FS_KEYS) | {"module_path"}


def _offered(*command: str) -> set[str]:
    """Long options of a command."""
    parser = _parser()
    for name in command:
        (choices,) = (action.choices for action in parser._actions if isinstance(action.choices, dict))
        parser = choices[name]
    return {option for action in parser._actions for option in action.option_strings} - {"-h", "--help"}


@pytest.mark.parametrize("kind", ["fs", "device"])
def test_every_option_of_bench_is_documented(kind: str) -> None:
    """The table of the command has the options that it takes, no more and no fewer."""
    assert _documented(f"## `tierkv bench {kind}", REFERENCE / "bench.md") == _offered("bench", kind)


def test_every_option_of_tune_is_documented() -> None:
    """The table of the command has the options that it takes, no more and no fewer."""
    assert _documented("## Options", REFERENCE / "tune.md") == _offered("tune")


@pytest.mark.parametrize("command", ["du", "ls", "verify", "doctor"])
def test_every_option_of_the_commands_on_a_root_is_documented(command: str) -> None:
    """The table of the command has the options that it takes, no more and no fewer."""
    assert _documented(f"## `tierkv {command} ROOT", REFERENCE / "root-commands.md") == _offered(command)
