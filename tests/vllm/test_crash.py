"""SIGKILL at any instant of an engine's two halves, our manager and worker, and what the root holds afterwards."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.harness import Storm, Tally, report
from tests.crash.nursery import Nursery
from tests.vllm.crash_lives import content_of, engine
from tests.vllm.engine import engine_environment

pytestmark = pytest.mark.crash
CAPACITY = 5 * 4096 + 20 * 2 * 4096
"""Twenty chunks, less than half of what all prompts have, and a slab's catalogue."""
BY_HAND = int(os.environ.get("TIERKV_CRASH_ROUNDS", "1000"))


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    folder = tmp_path_factory.mktemp("nursery")
    with Nursery(folder, "tests.vllm.ready:import_vllm", "tests.vllm.crash_lives", **engine_environment()) as made:
        yield made


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["slab", "files"])
async def test_kills_of_an_engine_lose_and_leave_nothing(nursery: Nursery, tmp_path: Path, layout: str) -> None:
    """What vLLM had been told is stored is there after the kill, right to the byte, and nothing else.

    The capacity holds at the instant of each kill. An engine that opens the root next loads from it in mid-storm.
    """
    settings = {"layout": layout}
    storm = Storm(nursery, tmp_path, CAPACITY, seed=3, life=engine, tally=Tally(judge=content_of), settings=settings)
    for _ in range(15 if layout == "slab" else 5):
        await storm.round()
    assert storm.tally.n_acknowledged > (30 if layout == "slab" else 10)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("layout", ["slab", "files"])
async def test_a_thousand_kills_of_an_engine(nursery: Nursery, tmp_path: Path, layout: str) -> None:
    """The same at length: ``TIERKV_CRASH_ROUNDS`` rounds, a thousand by default."""
    settings, tally = {"layout": layout}, Tally(judge=content_of)
    storm = Storm(nursery, tmp_path, CAPACITY, seed=time.time_ns(), life=engine, tally=tally, settings=settings)
    for _ in range(BY_HAND):
        await storm.round()
    report(f"an engine's manager and worker, {layout}", storm.tally)
    calls, _ = storm.tally.growth()
    assert calls < 1.5
