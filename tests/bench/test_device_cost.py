"""The cpu engine beside memcpy in one run, by processor time."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy")

from tests.bench.device import MIB, MUST, compare
from tests.gate import NOISE, hold
from tierkv.device import Direction

PAGE_NBYTES = 16 << 10


@pytest.mark.bench
@pytest.mark.parametrize("direction", Direction)
def test_scattered_pages_copy_nearly_as_fast_as_one_piece(direction: Direction) -> None:
    """Chunks of 1 MiB in pages of 16 KiB, anywhere: at most twice the time of one memcpy a chunk.

    That rows are not copied one call each is counted, not timed: ``tests/device/test_rows.py``.
    """

    def time_by_memcpys() -> dict[str, float]:
        ratio = compare(MIB, PAGE_NBYTES, direction, 7).ratio
        assert ratio is not None
        return {"time": 1 / ratio}

    hold(time_by_memcpys, {"time": NOISE / MUST})
