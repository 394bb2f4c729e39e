"""What every test gets: a Hypothesis profile by name, and the promise that it leaks nothing."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Verbosity, settings

from tests.leaks import Snapshot, wait_for_none
from tests.patience import be_patient

# No profile has a deadline, nor minds how long drawing takes: on a shared machine that measures the neighbours.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", PATIENT, max_examples=100)
settings.register_profile(
    "ci",
    PATIENT,
    max_examples=200,
    derandomize=True,
    print_blob=True,
)
settings.register_profile(
    "nightly",
    PATIENT,
    max_examples=2_000,
    stateful_step_count=100,
    print_blob=True,
)
settings.register_profile("debug", PATIENT, max_examples=10, verbosity=Verbosity.verbose)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
be_patient()


LONG_FOLDERS = {"property", "crash"}
LONG_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give state machines and kills more time, and watch every async test for tasks it leaves behind.

    That watch is set up just after the outer one and so torn down before it.
    """
    for item in items:
        if item.path.parent.name in LONG_FOLDERS and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONG_S))
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.function):
            names = item.fixturenames
            names.insert(names.index("no_leaks") + 1 if "no_leaks" in names else 0, "no_leaked_tasks")


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves descriptors, threads, children, mappings or /dev/shm entries behind.

    A folder whose tests drive somebody else's engine may override this fixture by its name, and says why.
    """
    before = Snapshot.take()
    yield
    leaked = wait_for_none(before)
    assert not leaked, "left behind: " + "; ".join(leaked)


@pytest.fixture
async def no_leaked_tasks() -> AsyncIterator[None]:
    """Fail an async test that ends while a task that it started still runs; the loop would cancel it silently."""
    yield
    await asyncio.get_running_loop().shutdown_default_executor()  # its idle threads are the loop's, not the test's
    for _ in range(5):  # a task that has been told to end needs a turn of the loop or two
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, "tasks still running: " + "; ".join(repr(task) for task in left)


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    """Folder of recorded request traces, named by TIERKV_TRACES; skips where there is none."""
    folder = os.environ.get("TIERKV_TRACES")
    if not folder or not Path(folder).is_dir():
        pytest.skip("TIERKV_TRACES names no folder of traces")
    return Path(folder)
