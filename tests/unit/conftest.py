"""What several modules of unit tests ask for by name."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A path for an fs tier, which makes the directory."""
    return tmp_path / "root"
