"""The reference pages name every option that is read, and no other."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierkv.cli._main import _parser
from tierkv.cli._parser import Parser
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


PAGES = {
    "bench fs": ("bench.md", "## `tierkv bench fs"),
    "bench device": ("bench.md", "## `tierkv bench device"),
    "tune": ("tune.md", "## Options"),
    "demo": ("demo.md", "## Options"),
} | {name: ("root-commands.md", f"## `tierkv {name} ROOT") for name in ("du", "ls", "verify", "doctor", "gc", "wipe")}


def _commands(parser: Parser, *before: str) -> Iterator[tuple[str, Parser]]:
    """Every command that has no further ones, by what is typed."""
    _, further = parser.commands()
    for name, each in further.items():
        yield from _commands(each, *before, name)
    if not further:
        yield " ".join(before), parser


@pytest.mark.parametrize(("command", "parser"), [pytest.param(*each, id=each[0]) for each in _commands(_parser())])
def test_every_option_of_every_command_is_documented(command: str, parser: Parser) -> None:
    """The table of the command has the options that it takes, no more and no fewer; a new command has a page."""
    page, section = PAGES[command]
    told = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    offered = {option for action in told for option in action.option_strings} - {"-h", "--help"}
    assert _documented(section, REFERENCE / page) == offered


def test_the_tables_are_of_commands_that_there_are() -> None:
    """A command that went takes its table along."""
    assert PAGES.keys() == {command for command, _ in _commands(_parser())}
