"""Marks the cases, and passes over those that need vLLM where there is none."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases.here import HAS_VLLM
from tests.fs_kit import LAYOUTS, using

HERE = Path(__file__).parent
WITH_VLLM = "test_vllm_"
LONG = frozenset({
    "test_a10_a_slot_is_its_threads_until_the_thread_has_ended",
    "test_a23_an_adapter_is_part_of_the_key",
    "test_a34_new_weights_find_nothing_of_the_old",
    "test_a37_cache_files_do_not_execute",
    "test_a38_secrets_are_nowhere",
    "test_a39_odd_model_names",
    "test_everything_in_turn_and_back_again",
    "test_one_of_eight_fails_on_its_way_up",
    "test_one_of_eight_fails_on_its_way_down",
    "test_the_clock_jumps",
})  # fmt: skip
"""Cases that take seconds, and show of one layout what they show of the other: over files they run at night."""

if HAS_VLLM:
    importlib.import_module("tests.vllm.ready").import_vllm()


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Iterator[str]:
    """What a module that asks for it shows of a disk it shows of both layouts."""
    with using(request.param):
        yield request.param


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases that need vLLM are listed everywhere; the nox session ``vllm`` runs them."""
    for item in items:
        if item.path.parent != HERE:
            continue
        if item.name.startswith("test_a"):
            item.add_marker(pytest.mark.cases)
        if item.name.removesuffix("[files]") in LONG and item.name.endswith("[files]"):
            item.add_marker(pytest.mark.nightly)
        if item.path.name.startswith(WITH_VLLM) and not HAS_VLLM:
            item.add_marker(pytest.mark.skip(reason="no vLLM here: the nox session vllm runs these"))
