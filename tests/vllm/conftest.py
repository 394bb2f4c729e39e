"""Tests that need torch and vLLM: they run in the nox session ``vllm`` and are passed over where there is none."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.leaks import Snapshot, wait_for_none

HERE = Path(__file__).parent
ENGINES = ("test_engine", "test_serve")
"""Modules that start real engines: slow, and their leaks are not all ours."""

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.vllm.ready import import_vllm

    import_vllm()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE and item.path.name.startswith(ENGINES):
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # vLLM's and torch's
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """The same promise as everywhere; of a real engine only what is ours: threads, /dev/shm, our shared mappings.

    vLLM and torch keep threads, descriptors and mappings of their own in this process after an engine has gone.
    """
    before = Snapshot.take()
    yield
    has_engine = request.path.name.startswith(ENGINES)
    leaked = wait_for_none(before, lambda what: not has_engine or "tierkv" in what or what.startswith("/dev/shm/"))
    assert not leaked, "left behind: " + "; ".join(leaked)


class Models:
    """Model folders, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, name: str = "qwen3") -> str:
        from tests.vllm.model import HYBRID, QWEN3, make_model

        path = self._folder / name
        return str(path) if path.exists() else make_model(path, {"qwen3": QWEN3, "hybrid": HYBRID}[name])


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))
