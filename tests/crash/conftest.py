"""What the tests of kills share: one nursery for all of a module's lives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.nursery import Nursery


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("nursery"), "tests.crash.lives") as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """For roots and logs; short, since a rule has room for part of a path only."""
    return tmp_path
