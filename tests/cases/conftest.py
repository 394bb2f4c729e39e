"""Marks the cases, and passes over those that need vLLM where there is none."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.cases.here import HAS_VLLM

HERE = Path(__file__).parent
WITH_VLLM = "test_vllm_"

if HAS_VLLM:
    importlib.import_module("tests.vllm.ready").import_vllm()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases that need vLLM are listed everywhere; the nox session ``vllm`` runs them."""
    for item in items:
        if item.path.parent != HERE:
            continue
        if item.name.startswith("test_a"):
            item.add_marker(pytest.mark.cases)
        if item.path.name.startswith(WITH_VLLM) and not HAS_VLLM:
            item.add_marker(pytest.mark.skip(reason="no vLLM here: the nox session vllm runs these"))
