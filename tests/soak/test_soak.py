"""A short soak in every run of the tests; ``nox -s soak`` is the long one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.faults import REPOSITORY
from tests.soak.measure import Holds, growth


@pytest.mark.timeout(1200)
def test_a_short_soak() -> None:
    """Verbs at random over three levels in bad weather: books exact, events equal to the index, nothing grows."""
    command = [sys.executable, "-m", "tests.soak", "--operations", "100000", "--seed", "5"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    assert ended.stdout.rstrip().endswith("flat")


def _holds(*resident_mib: int, descriptors: int = 9, last_descriptors: int = 9) -> list[Holds]:
    taken = [Holds(i, nbytes << 20, 0, descriptors, 4, 3) for i, nbytes in enumerate(resident_mib)]
    return [*taken[:-1], taken[-1]._replace(n_descriptors=last_descriptors)]


def test_what_counts_as_growth() -> None:
    """Only the second half counts; memory as a fraction of what it was half-way, the others one by one."""
    assert growth(_holds(10, 60, 100, 100, 100)) == (0, 0, 0, 0)
    assert growth(_holds(10, 60, 100, 100, 110))[0] > 0.04
    assert growth(_holds(100, 100, 100, 100, last_descriptors=10)) == (0, 1, 0, 0)
