"""What a message names as the nearest valid value, or shows as an example, is accepted where the wrong value stood."""

from __future__ import annotations

import ast
import inspect
import json
import random
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tierkv._config_text
import tierkv.admission
import tierkv.policies.parse
import tierkv.settings
import tierkv.sizes
import tierkv.tiers.fs
import tierkv.tiers.parse
from tests.unit.test_config_text import text, thing
from tierkv.admission import parse_admission
from tierkv.errors import ConfigError
from tierkv.policies.parse import parse_policy
from tierkv.settings import parse_count, parse_seconds
from tierkv.sizes import parse_size
from tierkv.tiers.fs import FSTier
from tierkv.tiers.parse import parse_tier

Parse = Callable[[str, Any], object]
_HINT = re.compile(r"; (?:nearest valid (?:value|option)|for example): (?P<hint>.+)$", re.DOTALL)
_CLOCKS: dict[str, Any] = {"time.monotonic": time.monotonic, "monotonic": "monotonic"}
MODULES = (
    tierkv._config_text, tierkv.admission, tierkv.policies.parse, tierkv.settings, tierkv.sizes, tierkv.tiers.fs,
    tierkv.tiers.parse,
)  # fmt: skip


def as_json(parse: Parse) -> Parse:
    """For what is written as JSON; what is none is text."""

    def parse_it(option: str, written: str) -> object:
        try:
            value = json.loads(written)
        except ValueError:
            value = written
        return parse(option, value)

    return parse_it


def as_python(_option: str, written: str) -> object:
    """For what only a program can get wrong."""
    return eval(written, {"Path": Path, "FSTier": FSTier, **vars(tierkv.admission)})


ROWS: list[tuple[Parse, str, str]] = [
    (parse_policy, "{}", "ttl(1e400)"),
    (parse_policy, "{}", "ttl"),
    (parse_policy, "{}", "TTL(5)"),
    (parse_policy, "{}", "quota"),
    (parse_policy, "{}", "quota(a=1GiB)"),
    (parse_policy, "{}", "leaf_first"),
    (parse_policy, "{}", "lru > ttl(5)"),
    (parse_policy, "{}", "lru > quota(a=1)"),
    (parse_policy, "{}", "mq > leaf_first > lru"),
    (parse_policy, "{}", "arc(5) > lru"),
    (parse_policy, "{}", "lru > nobody"),
    (parse_policy, "{}", "quota(5) > lru"),
    (parse_policy, "{}", "quota() > lru"),
    (parse_policy, "{}", "lru(" * 2_000),
    (parse_policy, "{}", "ttl('5) > lru"),
    (parse_policy, "{}", ""),
    (parse_policy, "{}", "os:getcwd"),
    (parse_policy, "{}", "math:pi"),
    (parse_policy, "{} > lru", "leaf_frst"),
    (parse_policy, "tierkv.policies:{}", "LRUU"),
    (parse_policy, "ttl({}) > lru", "1e400"),
    (parse_policy, "ttl({}) > lru", "-1"),
    (parse_policy, "ttl({}=5) > lru", "ttl"),
    (parse_policy, "arc({})", "0"),
    (parse_policy, "mq({})", "9" * 20),
    (parse_policy, "quota(a={}) > lru", "-5GiB"),
    (parse_policy, "quota(a={}) > lru", "5Gigs"),
    (as_json(parse_policy), "{}", "7"),
    (as_json(parse_policy), "{}", '{"type": 7}'),
    (as_json(parse_policy), "{}", '{"typ": "lru"}'),
    (as_json(parse_policy), "{}", '{"type": "leaf_first", "order": ' * 40 + '"lru"' + "}" * 40),
    (as_json(parse_policy), '{{"type": "ttl", "ttl_s": {}, "order": "lru"}}', "1e400"),
    (lambda option, written: parse_policy(option, written or {5: 6}), "{}", ""),
    (parse_admission, "{}", "second_touch > max_size(5)"),
    (parse_admission, "{}", "max_size(5) > max_size(5)"),
    (parse_admission, "{}", "write_budget(1GB/day) > second_touch"),
    (parse_admission, "{}", "any(second_touch) > second_touch"),
    (parse_admission, "{}", "all()"),
    (parse_admission, "{}", "ANY(rules=5)"),
    (parse_admission, "{}", "all(5)"),
    (parse_admission, "{}", "os:getcwd"),
    (parse_admission, "write_budget({})", "300GB"),
    (parse_admission, "write_budget({}/day)", "0GB"),
    (parse_admission, "write_budget(1GB/day, burst={})", "0.1B"),
    (parse_admission, "max_size({})", "99999Exabytes"),
    (parse_admission, "all({})", "secnd_touch"),
    (parse_admission, "tinylfu({})", "256"),
    (parse_tier, "{}", "math:pi"),
    (parse_tier, "{}", "fs(/x) > memory"),
    (parse_tier, "{}", "fs(/x"),
    (parse_tier, "{}(/x)", "sf"),
    (parse_tier, "fs({})", "''"),
    (parse_tier, "fs({}=/x)", "root_dir"),
    (parse_tier, "fs(/x, capacity={})", "-1"),
    (parse_tier, "fs(/x, min_free={})", "-1"),
    (parse_tier, "fs(/x, n_read_threads={})", "1000"),
    (parse_tier, "fs(/x, durability={})", "proces"),
    (parse_tier, "fs(/x, layout={})", "slabs"),
    (parse_tier, "fs(/x, name={})", "''"),
    (parse_tier, "fs(/x, checksum_key_file={})", "''"),
    (parse_tier, "fs(/x, checksum_key_env={})", "'a b'"),
    (parse_tier, "memory(n_slots={})", "0"),
    (as_python, "{}", "All()"),
    (as_python, "FSTier({})", "Path('')"),
    (lambda _, written: FSTier("/x", clock=_CLOCKS[written]), "{}", "monotonic"),
    (parse_size, "{}", "0"),
    (parse_size, "{}", "99999999 EiBytes"),
    (parse_size, "{}", "0.1 byte"),
    (partial(parse_size, low=4096), "{}", "1 KiBytes"),
    (as_json(partial(parse_count, low=1, high=5)), "{}", "9"),
    (as_json(partial(parse_seconds, low=0.001, high=86_400)), "{}", "1e9"),
]


def hint_in(parse: Parse, value: Any) -> str | None:
    """What the message about this value names or shows; None if it is accepted, or nothing is like it."""
    try:
        parse("option", value)
    except ConfigError as error:
        found = _HINT.search(str(error))
        return None if found is None else found["hint"]
    return None


@pytest.mark.parametrize(("parse", "form", "wrong"), ROWS)
def test_a_hint_is_accepted(parse: Parse, form: str, wrong: str) -> None:
    """Where the wrong value was, or as the whole."""
    hint = hint_in(parse, form.format(wrong))
    assert hint is not None
    quoted = repr(hint) if form.startswith("FSTier") else hint
    assert parse("option", form.format(quoted)) is not None


def test_every_message_with_a_hint_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one needs a row above."""
    told: set[tuple[str, int]] = set()
    for module in MODULES:
        for name in ("bad_setting", "unknown_setting"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, _noted(getattr(module, name), told))
    for parse, form, wrong in ROWS:
        hint_in(parse, form.format(wrong))
    for module in MODULES:
        for call in _calls_with_a_hint(module):
            lines = range(call.lineno, (call.end_lineno or call.lineno) + 1)
            assert any((module.__name__, line) in told for line in lines), f"{module.__name__}, line {call.lineno}"


def _noted(real: Callable[..., ConfigError], told: set[tuple[str, int]]) -> Callable[..., ConfigError]:
    def noted(*arguments: Any, **more: Any) -> ConfigError:
        caller, error = sys._getframe(1), real(*arguments, **more)
        if _HINT.search(str(error)):
            told.add((caller.f_globals["__name__"], caller.f_lineno))
        return error

    return noted


def _calls_with_a_hint(module: ModuleType) -> list[ast.Call]:
    def has_hint(call: ast.Call) -> bool:
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        return name == "unknown_setting" or (name == "bad_setting" and (len(call.args) > 3 or bool(call.keywords)))

    tree = ast.parse(inspect.getsource(module))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and has_hint(node)]


@pytest.mark.parametrize("parse", [parse_policy, parse_admission, parse_tier])
def test_examples_among_nonsense_are_accepted(parse: Parse) -> None:
    """Whatever was written: what a message about all of it shows is taken as it stands."""
    rng = random.Random(20_261_201)
    for line in range(1_000):
        value = text(rng) if line % 2 else thing(rng)
        try:
            parse("option", value)
        except ConfigError as error:
            whole, found = re.match(r"option is ", str(error)), _HINT.search(str(error))
            if whole and found and "for example" in found[0]:
                assert parse("option", found["hint"]) is not None


def test_one_argument_is_not_called_arguments() -> None:
    """And two are."""
    with pytest.raises(ConfigError, match=r"with 2 arguments is .*, but must be at most 1 argument \(ttl_s\)$"):
        parse_policy("option", "ttl(5, 6) > lru")
    with pytest.raises(ConfigError, match=r"with 1 argument is \[5\], but must be no arguments$"):
        parse_policy("option", "lru(5)")
