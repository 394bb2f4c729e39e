"""Numbers that come from configuration: counts and seconds, checked once, before anything is created.

Every refusal is a :class:`~tierkv.errors.ConfigError` with option, value, range and the nearest valid value.
"""

from __future__ import annotations

import math
import operator
from typing import SupportsIndex

from tierkv.errors import bad_setting

_LONGEST_S = 1e9
"""About 32 years: far below what clocks and locks of any platform can take."""


def parse_count(option: str, value: object, low: int, high: int) -> int:
    """A whole number from ``low`` to ``high``, both included.

    Booleans, floats (64.0 too) and strings are refused: a count that went through one of them was not meant as a count.

    Raises:
        ConfigError: anything else, with the nearest value in the range.
    """
    number = as_integer(value)
    if number is not None and low <= number <= high:
        return number
    guess = _nearest(value if number is None else number, low)
    raise bad_setting(option, value, f"a whole number from {low} to {high}", round(min(max(guess, low), high)))


def parse_seconds(option: str, value: object, low: float = 0.0, high: float = _LONGEST_S) -> float:
    """A finite time in seconds from ``low`` to ``high``, both included, as int or float.

    Raises:
        ConfigError: out of range, NaN, infinite, or not a number (booleans and strings are not).
    """
    number = float(value) if isinstance(value, float) else as_integer(value)
    if number is not None and low <= number <= high:
        return float(number)
    nearest = min(max(_nearest(value if number is None else number, low), low), high)
    raise bad_setting(option, value, f"a number of seconds from {low:g} to {high:g}", f"{nearest:g}")


def as_integer(value: object) -> int | None:
    """``value`` as an int if it is one, or another library's integer scalar; else None, also for a bool."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _nearest(value: object, fallback: float) -> float:
    """What the user probably meant, as a number; ``fallback`` if that cannot be told."""
    try:
        guess = float(value) if isinstance(value, (int, float, str)) else fallback
    except OverflowError:
        # An int too large for float still has a sign to go by.
        return math.inf if isinstance(value, int) and value > 0 else -math.inf
    except ValueError:
        return fallback
    return fallback if math.isnan(guess) else guess
