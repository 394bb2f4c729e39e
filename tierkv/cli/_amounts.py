"""Ages, sizes and rates as people type them, where a unit that was forgotten would do harm: it has to be there."""

from __future__ import annotations

import re
from typing import Final

from tierkv.errors import bad_setting
from tierkv.sizes import parse_size

_AGE: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(s|min|h|d|w)")
_LIKE_AN_AGE: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(s|min|m$|h|d|w|$)")
_UNITS: Final = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
LEAST_BARE_NBYTES: Final = 1 << 20


def parse_age(option: str, text: str) -> float:
    """Seconds, from text such as 7d, 12h or 30min. Raises ConfigError, also for a number without a unit but 0."""
    written = text.strip().lower()
    if written == "0":
        return 0.0
    match = _AGE.fullmatch(written)
    if match is None:
        like = _LIKE_AN_AGE.match(written)
        near = None if like is None else like[1] + {"m": "min", "": "d"}.get(like[2], like[2])
        raise bad_setting(option, text, "0, or a number and one of s, min, h, d and w", near, example="7d")
    return float(match[1]) * _UNITS[match[2]]


def parse_capacity(option: str, text: str) -> int:
    """Bytes. Raises ConfigError, also for a small number without a unit: it was meant as GiB, and would take all."""
    allowed = f"0 or more: a size with a unit, or a whole number of bytes from {LEAST_BARE_NBYTES}"
    if text.strip().startswith("-"):
        raise bad_setting(option, text, allowed, example="200GiB")  # not the nearest: 0 is all there is
    nbytes = parse_size(option, text, low=0)
    if _number(text).strip("0.") and _is_bare(text, nbytes):
        raise bad_setting(option, text, allowed, f"{_number(text)}GiB")
    return nbytes


def parse_rate(option: str, text: str) -> int:
    """Bytes a second, from text such as 100MiB or 100MiB/s. Raises ConfigError, also for a small number without a unit.

    Nobody who types 100 waits for a byte every ten milliseconds.
    """
    size = re.sub(r"/(s|sec|second)\s*$", "", text, flags=re.IGNORECASE)
    nbytes = parse_size(option, size)
    if _is_bare(size, nbytes):
        allowed = f"a size with a unit, or a whole number of bytes from {LEAST_BARE_NBYTES}, to be read in a second"
        raise bad_setting(option, text, allowed, f"{_number(size)}MiB")
    return nbytes


def _is_bare(text: str, nbytes: int) -> bool:
    return nbytes < LEAST_BARE_NBYTES and not text.strip()[-1].isalpha()


def _number(text: str) -> str:
    return text.strip().removeprefix("+")
