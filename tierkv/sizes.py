"""Sizes in bytes: read from configuration ("8GiB"), written for people ("8 GiB")."""

from __future__ import annotations

import math
import re

from tierkv.errors import ConfigError, bad_setting
from tierkv.settings import as_integer

_PREFIXES = "KMGTPE"
_UNITS: dict[str, int] = {
    "B": 1,
    **{f"{p}B": 1000 ** (i + 1) for i, p in enumerate(_PREFIXES)},
    **{f"{p}iB": 1024 ** (i + 1) for i, p in enumerate(_PREFIXES)},
}
_BY_UPPER = {name.upper(): name for name in _UNITS}
_LARGEST_NBYTES = 2**63 - 1
"""What a file offset can hold."""
_NUMBER_AND_UNIT = re.compile(r"\s*([+-]?[0-9]{1,40}(?:\.[0-9]{1,40})?)\s*([A-Za-z]*)\s*")
_LIKE_A_UNIT = re.compile(r"([KMGTPE])(I|B|$|ILO|EG|ERA|ETA|XA)")
_ALLOWED = 'a whole number of bytes, or a number with a unit (B, KB .. EB, KiB .. EiB) such as "8GiB"'


def parse_size(option: str, value: object, *, low: int = 1) -> int:
    """A size in bytes, from an integer or from text such as "8GiB", "500 GB", "64kib" or "4096".

    KB, MB, GB... are powers of 1,000; KiB, MiB, GiB... of 1,024. Upper and lower case are the same, since nobody
    configures bits. A fraction of a unit is exact ("1.5GiB"); a fraction of a byte that is left over is cut off.

    Args:
        option: name of the setting, for the message.
        value: what the user wrote.
        low: smallest valid size in bytes; 0 where zero has a meaning of its own.

    Raises:
        ConfigError: not a size (booleans and floats are not), or outside ``low`` .. 2**63 - 1.
    """
    n = _parse_text(option, value, low) if isinstance(value, str) else as_integer(value)
    if n is not None and low <= n <= _LARGEST_NBYTES:
        return n
    meant = _meant(value) if n is None else n
    raise _refusal(option, value, low, None if meant is None else _within(meant, low))


def format_size(nbytes: int) -> str:
    """``nbytes`` in the largest binary unit it fills: exact where that is a whole number, else with one decimal."""
    unit, name = 1, "B"
    for prefix in _PREFIXES:
        # 1023.96 KiB would be written as 1024.0 KiB: it belongs to the next unit.
        if abs(nbytes) < unit * (1024 if unit == 1 else 1023.95):
            break
        unit, name = unit * 1024, f"{prefix}iB"
    whole, rest = divmod(nbytes, unit)
    return f"{whole} {name}" if not rest else f"{nbytes / unit:.1f} {name}"


def _parse_text(option: str, text: str, low: int) -> int:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        raise _refusal(option, text, low, None)
    number, unit = match.groups()
    name = _BY_UPPER.get(unit.upper() or "B")
    if name is None:
        near = _unit_meant(unit.upper())
        is_positive = number.strip("+0.") and not number.startswith("-")
        if near is None and is_positive:
            raise _refusal(option, text, low, None)
        meant = _nbytes(number, near or "B")
        nearest = f"{number}{near}" if low <= meant <= _LARGEST_NBYTES and is_positive else _within(meant, low)
        raise _refusal(option, text, low, nearest)
    return _nbytes(number, name)


def _nbytes(number: str, unit: str) -> int:
    digits, _, decimals = number.partition(".")
    # Integers throughout: 0.1 MB is 100,000 bytes, which a float product need not be.
    return int(digits + decimals) * _UNITS[unit] // int("1" + "0" * len(decimals))


def _within(n: int, low: int) -> int:
    return min(max(n, low), _LARGEST_NBYTES)


def _unit_meant(unit: str) -> str | None:
    """A unit that is written like one of ours, or as a word."""
    if unit.startswith("BYTE"):
        return "B"
    match = _LIKE_A_UNIT.match(unit)
    return None if match is None else f"{match[1]}{'iB' if match[2].startswith('I') else 'B'}"


def _meant(value: object) -> int | None:
    """The bytes that a number of the wrong kind says; None for what is no number."""
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, float) or math.isnan(value):
        return None
    return round(value) if math.isfinite(value) else (_LARGEST_NBYTES if value > 0 else -1)


def _refusal(option: str, value: object, low: int, nearest: object) -> ConfigError:
    return bad_setting(option, value, f"{_ALLOWED}, from {low} B to 8 EiB", nearest)
