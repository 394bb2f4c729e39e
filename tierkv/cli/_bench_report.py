"""What ``tierkv bench`` writes with ``--json`` and ``tierkv tune --bench`` reads: measured speeds of tiers, in JSON.

One object::

    {
      "tierkv_bench": 1,                      version of this schema
      "what": "fs",                           "fs" or "device"
      "where": "/nvme/kv",                    the directory, or the device with the chosen path
      "tiers": [                              one entry a tier and chunk size, smallest chunk first
        {"name": "fs", "chunk_nbytes": 1048576,
         "read_nbytes_per_s": 2.1e9,          towards the primary, or from it to the device: what a hit waits for
         "write_nbytes_per_s": 1.4e9}         away from the device
      ],
      "settings": {"blocks_per_chunk": 8},    what to set in vLLM's JSON
      "details": {}                           every measurement; differs by command and is nobody's input
    }

Readers ignore keys that they do not know; a change that would break them gets another version number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple, Self

from tierkv.errors import ConfigError

VERSION: Final = 1
_KEY: Final = "tierkv_bench"


class TierSpeed(NamedTuple):
    """How fast one tier moves chunks of one size with the settings that the report names."""

    name: str
    chunk_nbytes: int
    read_nbytes_per_s: float
    write_nbytes_per_s: float


@dataclass(frozen=True, slots=True)
class BenchReport:
    """One run of ``tierkv bench``."""

    what: str
    where: str
    tiers: Sequence[TierSpeed]
    settings: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Readable, with a newline at the end."""
        values = asdict(self) | {"tiers": [speed._asdict() for speed in self.tiers]}
        return json.dumps({_KEY: VERSION} | values, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ConfigError, in one sentence, for what is not such a report."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"no report of tierkv bench: not JSON ({error})") from None
        if not isinstance(data, dict) or _KEY not in data:
            raise ConfigError(f"no report of tierkv bench: there is no key {_KEY!r}")
        if data[_KEY] != VERSION:
            raise ConfigError(f"a report of tierkv bench of version {data[_KEY]!r}, but this tierkv reads {VERSION}")
        tiers = data.get("tiers")
        if not isinstance(tiers, list):
            raise ConfigError("no report of tierkv bench: 'tiers' is not a list")
        return cls(
            what=str(data.get("what", "")),
            where=str(data.get("where", "")),
            tiers=[_speed(index, entry) for index, entry in enumerate(tiers)],
            settings=dict(data.get("settings") or {}),
            details=dict(data.get("details") or {}),
        )

    @classmethod
    def load(cls, option: str, path: str | os.PathLike[str]) -> Self:
        """Read a file. Raises ConfigError, in one sentence that names the option and the file."""
        try:
            with open(path, encoding="utf-8") as file:
                return cls.from_json(file.read())
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(f"{option} is {os.fspath(path)!r}, but must be what --json wrote: {why}") from None


def _speed(index: int, entry: object) -> TierSpeed:
    if not isinstance(entry, dict):
        raise ConfigError(f"no report of tierkv bench: tiers[{index}] is not an object")
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"no report of tierkv bench: tiers[{index}].name is {name!r}, not text")
    numbers = [_number(f"tiers[{index}].{key}", entry.get(key)) for key in TierSpeed._fields[1:]]
    return TierSpeed(name, int(numbers[0]), numbers[1], numbers[2])


def _number(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ConfigError(f"no report of tierkv bench: {where} is {value!r}, not a number over 0")
    return value
