"""Reading one JSON object of settings: each value typed, each error one sentence that names the option."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tierkv.admission import parse_admission
from tierkv.errors import bad_setting, closest
from tierkv.policies.parse import parse_policy
from tierkv.settings import parse_count, parse_seconds
from tierkv.sizes import parse_size

TOP = "kv_connector_extra_config"
_FLAGS = {"1": "true", "yes": "true", "on": "true", "true": "true"}
_FLAGS |= {"0": "false", "no": "false", "off": "false", "false": "false"}
MAX_SECONDS = 86_400.0


class Reader:
    """Typed access to one object of the configuration; each method names the option in its error."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def name(self, key: str) -> str:
        return key if self.where == TOP else f"{self.where}.{key}"

    def size(self, key: str, *, required: bool = False, zero: bool = False, low: int = 1) -> Any:
        value = self.raw.get(key)
        if isinstance(value, float) and (value.is_integer() or (key == "cpu_bytes_to_use" and 2**20 < value < 2**63)):
            value = int(value)  # vLLM's own kv_offloading_size arrives as GiB times 2**30, whole or not
        if value is None:
            if required:
                raise bad_setting(self.name(key), None, 'given, as a number of bytes or a size like "8GiB"')
            return None
        return parse_size(self.name(key), value, low=0 if zero else low)

    def count(self, key: str, *, at_least: int, at_most: int = 2**31 - 1) -> int | None:
        value = self.raw.get(key)
        if value is None:
            return None
        return parse_count(self.name(key), value, at_least, at_most)

    def seconds(self, key: str) -> float | None:
        value = self.raw.get(key)
        if value is None:
            return None
        return parse_seconds(self.name(key), value, 0.001, MAX_SECONDS)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            near = _FLAGS.get(str(value).lower())
            raise bad_setting(self.name(key), value, "true or false", near)
        return value

    def choice(self, key: str, allowed: Sequence[str], *, default: Any, upper: bool = False) -> Any:
        value = self.raw.get(key)
        if value is None:
            return default
        name = value.upper() if upper and isinstance(value, str) else value
        if name not in allowed:
            raise bad_setting(self.name(key), value, f"one of {', '.join(allowed)}", closest(str(name), allowed))
        return name

    def text(self, key: str) -> str | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or not value:
            raise bad_setting(self.name(key), value, "a name")
        return value

    def mapping(self, key: str) -> None:
        value = self.raw.get(key)
        if not isinstance(value, Mapping):
            raise bad_setting(self.name(key), value, "an object", example="{}")

    def directory(self, key: str) -> str:
        value = self.raw.get(key)
        if value is None or (isinstance(value, str) and not value.strip()):
            raise bad_setting(
                self.name(key), value, "given: the directory that holds the chunks", example="/var/lib/tierkv"
            )
        if not isinstance(value, str) or "\0" in value:
            raise bad_setting(self.name(key), value, "a directory's path", example="/var/lib/tierkv")
        # Once: a relative path means a directory below where the engine was started, whatever changes that later.
        return os.path.abspath(os.path.expanduser(value))

    def file(self, key: str) -> str | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or not value.strip() or "\0" in value or os.path.isdir(os.path.expanduser(value)):
            raise bad_setting(self.name(key), value, "the path of a file", example="/var/log/tierkv-requests.jsonl")
        return os.path.expanduser(value)

    def variable(self, key: str) -> str | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
            # Not its value: whoever writes the secret itself there should not find it in a log.
            allowed = "the name of a variable: letters, digits and underscores"
            raise bad_setting(self.name(key), "not a name", allowed, example="TIERKV_CHECKSUM_KEY")
        return value

    def reserve(self, key: str) -> int | float | None:
        """A size, or a percentage of the primary ("12.5%") as a fraction."""
        value = self.raw.get(key)
        if isinstance(value, str) and value.strip().endswith("%"):
            try:
                fraction = float(value.strip()[:-1]) / 100
            except ValueError:
                fraction = -1.0
            if not 0 <= fraction < 1:
                raise bad_setting(
                    self.name(key), value, "a size, or a percentage from 0% to below 100%", example="12.5%"
                )
            return fraction
        return None if value is None else int(self.size(key, zero=True))

    def order(self, key: str, *, module_path: str | None = None) -> Any:
        """An eviction order as written, once it has been seen to parse; the default is LRU."""
        value = self.raw.get(key)
        if value is None:
            return "lru"
        parse_policy(self.name(key), value, module_path=module_path)
        return value

    def rule(self, key: str) -> Any:
        """An admission rule as written, once it has been seen to parse; None admits all."""
        value = self.raw.get(key)
        if value is not None:
            parse_admission(self.name(key), value)
        return value


def nearest_name(name: str, known: Sequence[str] | frozenset[str]) -> str | None:
    """The known name within edit distance 2 of ``name``, or None. Short names must be nearer than half their length."""
    best = min(((_distance(name.lower(), other), other) for other in sorted(known)), default=(3, ""))
    return best[1] if best[0] <= 2 and best[0] * 2 < len(best[1]) else None


def _distance(a: str, b: str) -> int:
    """Edit distance with transpositions counted once; 3 stands for anything above 2."""
    if abs(len(a) - len(b)) > 2:
        return 3
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, last, row = row, before, [i]
        for j, y in enumerate(b, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return min(row[-1], 3)
