"""Many rows in few calls: every byte arrives and no other changes, whichever way the rows are copied."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.device import CopyBatch, Direction, _rows

KIB = 1 << 10
MEMORY_NBYTES = 2560 * KIB
SLOTS_AT = 1024 * KIB


RANDOM = np.random.default_rng(3).integers(0, 256, MEMORY_NBYTES + 4096, np.uint8)


def fresh_memory() -> np.ndarray:
    """Random bytes, the first on a page's boundary."""
    whole = RANDOM.copy()
    return whole[-whole.__array_interface__["data"][0] % 4096 :][:MEMORY_NBYTES]


def both_ways(rows: list[tuple[int, int, int]]) -> None:
    """Copy (device, host, length) of one memory in both directions, against one assignment a row."""
    for direction in Direction:
        memory = fresh_memory()
        want = memory.copy()
        for device, host, nbytes in rows:
            to, of = (host, device) if direction is Direction.STORE else (device, host)
            want[to : to + nbytes] = memory[of : of + nbytes]
        columns = np.array(rows, np.int64).reshape(-1, 3).T
        base = memory.__array_interface__["data"][0]
        _rows.copy_rows(CopyBatch(direction, columns[0] + base, columns[1] + base, columns[2].copy(), ()))
        np.testing.assert_array_equal(memory, want)


@pytest.fixture
def never_singly(monkeypatch):
    monkeypatch.setattr(_rows, "_copy_singly", lambda *_: pytest.fail("rows were copied singly"))


@pytest.fixture
def never_in_one_call(monkeypatch):
    monkeypatch.setattr(_rows, "_memory", lambda *_: pytest.fail("rows were copied in one call"))


@pytest.mark.parametrize("n_below", [0, 8, 16], ids=["above", "both", "below"])
@pytest.mark.parametrize("unit", [256, 512, 1024, 2048, 4096, 3 * 4096])
def test_rows_of_many_lengths_make_one_stretch(never_singly, unit, n_below):
    """A slot with rows of one to three units in any order, from memory below and above the slots."""
    rng = random.Random(unit + n_below)
    places = rng.sample(range(0, SLOTS_AT, 64 * KIB), n_below)
    places += rng.sample(range(SLOTS_AT + 640 * KIB, MEMORY_NBYTES - 36 * KIB, 36 * KIB), 16 - n_below)
    rows, at = [], SLOTS_AT
    for place in places:
        nbytes = unit * rng.randint(1, 3)
        rows.append((place, at, nbytes))
        at += nbytes
    rng.shuffle(rows)
    both_ways(rows)


def test_slots_that_are_no_neighbours(never_singly):
    """What lies between two slots, and between two pages, keeps its bytes."""
    hosts = [*range(SLOTS_AT, SLOTS_AT + 16 * KIB, 4096), *range(SLOTS_AT + 64 * KIB, SLOTS_AT + 80 * KIB, 4096)]
    both_ways([(i * 8 * KIB, host, 4096) for i, host in zip([5, 0, 7, 1, 12, 3, 9, 4], hosts, strict=True)])


@pytest.mark.parametrize(
    ("shift", "gap", "n"),
    [(1, 0, 16), (128, 0, 16), (0, 1, 16), (0, 4096, 16), (0, 0, 3)],
    ids=["odd addresses", "a small unit", "odd gaps", "gaps", "few rows"],
)
@pytest.mark.parametrize("nbytes", [4096, 8192])
def test_rows_that_make_no_stretch(never_in_one_call, shift, gap, n, nbytes):
    """Addresses that share no unit, slots with gaps, batches of few rows: every byte all the same."""
    both_ways([(shift * (i % 2) + (n - i) * 12 * KIB, SLOTS_AT + i * (nbytes + gap), nbytes) for i in range(n)])


def test_no_rows():
    """A batch without rows copies nothing."""
    both_ways([])


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 1 << 30))
def test_any_rows(seed):
    """Drawn lengths, gaps, orders and offsets."""
    rng = random.Random(seed)
    unit, n, longest = rng.choice([1, 64, 256, 512, 3 * 512, 4096]), rng.randint(1, 40), rng.randint(1, 3)
    n_below, host = rng.choice([0, n // 2, n]), SLOTS_AT
    below, above = SLOTS_AT, SLOTS_AT + 768 * KIB + rng.choice([0, 1, unit])
    rows = []
    for i in range(n):
        nbytes = unit * rng.randint(1, longest)
        host += unit * (rng.random() < 0.1)
        if i < n_below:
            below -= nbytes + unit * rng.randrange(2)
        rows.append((below if i < n_below else above, host, nbytes))
        if i >= n_below:
            above += nbytes
        host += nbytes
    rng.shuffle(rows)
    both_ways(rows)
