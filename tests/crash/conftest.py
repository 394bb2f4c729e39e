"""What the tests of kills share: one nursery for all of a module's lives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.nursery import Nursery
from tests.fs_kit import LAYOUTS, using


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("nursery"), "tests.crash.lives") as made:
        yield made


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Iterator[str]:
    """How the root is laid out: ``settings={"layout": layout}`` for those who live on it."""
    with using(request.param):
        yield request.param
