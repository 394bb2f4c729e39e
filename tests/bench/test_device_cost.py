"""The cpu engine beside memcpy in one run, by processor time."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy")

from tests.bench.device import MIB, MUST, compare
from tests.bench.pairs import NOISE
from tierkv.device import Direction

PAGE_NBYTES = 16 << 10
PART = MUST / NOISE
"""Half. That rows are not copied one call each is counted, not timed: ``tests/device/test_rows.py``."""
TRIES = 3
"""A neighbour that takes the caches for a second can spoil a median of seven; three times in a row it does not."""


@pytest.mark.bench
@pytest.mark.parametrize("direction", Direction)
def test_scattered_pages_copy_nearly_as_fast_as_one_piece(direction: Direction) -> None:
    """Chunks of 1 MiB in pages of 16 KiB, anywhere: never far below the speed of one memcpy a chunk."""
    rows = []
    for _ in range(TRIES):
        rows.append(compare(MIB, PAGE_NBYTES, direction, 7))
        if (rows[-1].ratio or 0.0) >= PART:
            return
    pytest.fail(f"{[row.ratio for row in rows]}: medians of seven pairs, all under {PART:.2f}")
