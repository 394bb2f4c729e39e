"""Numbers that come from configuration: counts and seconds, checked once, before anything is created.

Every refusal is a :class:`~tierkv.errors.ConfigError` with option, value, range and, if the value has one, the nearest
valid value.
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
        ConfigError: anything else; for what is some number, with the nearest one in the range.
    """
    number = as_integer(value)
    if number is not None and low <= number <= high:
        return number
    guess = meant_number(value if number is None else number)
    nearest = None if guess is None else round(min(max(guess, low), high))
    raise bad_setting(option, value, f"a whole number from {low} to {high}", nearest)


def parse_seconds(option: str, value: object, low: float = 0.0, high: float = _LONGEST_S) -> float:
    """A finite time in seconds from ``low`` to ``high``, both included, as int or float.

    Raises:
        ConfigError: out of range, NaN, infinite, or not a number (booleans and strings are not).
    """
    number = float(value) if isinstance(value, float) else as_integer(value)
    if number is not None and low <= number <= high:
        return float(number)
    guess = meant_number(value if number is None else number)
    nearest = None if guess is None else f"{min(max(guess, low), high):g}"
    raise bad_setting(option, value, f"a number of seconds from {low:g} to {high:g}", nearest)


def as_integer(value: object) -> int | None:
    """``value`` as an int if it is one, or another library's integer scalar; else None, also for a bool."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def meant_number(value: object) -> float | None:
    """What the user probably meant, as a number; None if that cannot be told."""
    if not isinstance(value, (int, float, str)):
        return None
    try:
        guess = float(value)
    except OverflowError:
        # An int too large for float still has a sign to go by.
        return math.inf if isinstance(value, int) and value > 0 else -math.inf
    except ValueError:
        return None
    return None if math.isnan(guess) else guess
