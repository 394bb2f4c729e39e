"""A gate on ratios that a neighbour cannot close: what does not hold is measured again, a few times."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import pytest

K = TypeVar("K", bound=Hashable)

NOISE = 1.6
"""What a test allows over a bound that the report asks for: a gate must hold on any machine, beside any neighbour.

Both sides run in the same minute, not in the same cache. Neighbours move a ratio by a third, another machine by more.
"""
TRIES = 5
"""A neighbour that takes the caches for a second spoils a ratio of that second; what became slower spoils them all."""


def hold(measure: Callable[[], Mapping[K, float]], limits: Mapping[K, float]) -> None:
    """Fail unless every ratio that ``measure`` finds has been within its limit once: the smaller, the better."""
    found: list[Mapping[K, float]] = []
    for _ in range(TRIES):
        found.append(measure())
        assert found[-1].keys() == limits.keys()
        if all(min(ratios[what] for ratios in found) <= limit for what, limit in limits.items()):
            return
    pytest.fail(f"above {dict(limits)} in each of {TRIES} tries: {[dict(ratios) for ratios in found]}")
