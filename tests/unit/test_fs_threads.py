"""Lanes: own daemon threads behind asyncio futures."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fs_kit import chunk_of, fetch, opened, store
from tests.patience import PATIENCE_S
from tierkv._threads import Lane, _Share
from tierkv.tiers._fs.batch import Batches


@pytest.fixture
def lane() -> Iterator[Lane]:
    made = Lane("tierkv-test", 3)
    yield made
    made.close()


async def test_run_returns_results_and_raises_what_the_call_raised(lane: Lane) -> None:
    """A future takes the result or the exception of its call."""
    assert await lane.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await lane.run(divmod, 7, 0)


async def test_threads_start_only_as_work_needs_them(lane: Lane) -> None:
    """A lane costs nothing until it is used, and never more threads than it was given."""
    assert lane._n_started == 0
    await lane.run(int)
    await lane.run(int)
    assert lane._n_started == 1
    gate = threading.Event()
    futures = [lane.run(gate.wait) for _ in range(10)]
    assert lane._n_started == 3
    gate.set()
    assert all(await asyncio.gather(*futures))


async def test_spread_gives_each_index_to_one_worker(lane: Lane) -> None:
    """Every index is taken once, whatever the number of workers; one hop a worker."""
    taken: list[int] = []
    hops: list[int] = []
    barrier = threading.Barrier(3)

    def worker(indices: Iterator[int]) -> None:
        barrier.wait(PATIENCE_S)
        hops.append(1)
        taken.extend(indices)

    await lane.spread(worker, lambda: range(1_000), 8)
    assert sorted(taken) == list(range(1_000))
    assert len(hops) == 3


async def test_spread_waits_for_all_workers_before_it_raises(lane: Lane) -> None:
    """A failed worker does not end the call while another still touches the caller's buffers."""
    release, ended = threading.Event(), threading.Event()

    def worker(indices: Iterator[int]) -> None:
        if next(indices) == 0:
            raise OSError("boom")
        release.wait(PATIENCE_S)
        ended.set()

    future = lane.spread(worker, lambda: range(2), 2)
    assert not future.done()
    release.set()
    with pytest.raises(OSError, match="boom"):
        await future
    assert ended.is_set()


async def test_a_cancelled_wait_leaves_the_call_running(lane: Lane) -> None:
    """Cancelling stops the waiting only; the thread goes on and its result is dropped."""
    started, release, ended = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        started.set()
        release.wait(PATIENCE_S)
        ended.set()

    future = lane.run(call)
    await asyncio.to_thread(started.wait, PATIENCE_S)
    future.cancel()
    release.set()
    assert await asyncio.to_thread(ended.wait, PATIENCE_S)
    assert await lane.run(int) == 0


async def test_wait_idle_and_close(lane: Lane) -> None:
    """``wait_idle`` blocks until the last call has returned; a closed lane takes no more work."""
    gate = threading.Event()
    future = lane.run(gate.wait)
    assert not lane.wait_idle(0.01)
    gate.set()
    assert await asyncio.to_thread(lane.wait_idle, PATIENCE_S)
    await future
    lane.close()
    with pytest.raises(RuntimeError, match="closed"):
        lane.run(int)


def test_posted_errors_are_logged(lane: Lane, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for a posted call, so its exception goes to the log."""
    lane.post(divmod, 1, 0)
    assert lane.wait_idle(PATIENCE_S)
    assert "ZeroDivisionError" in caplog.text


def test_a_hung_call_does_not_hold_up_the_exit_of_the_process() -> None:
    """The reason why these are not concurrent.futures threads: those are joined at exit."""
    code = (
        "import asyncio, threading\n"
        "from tierkv._threads import Lane\n"
        "async def main():\n"
        "    Lane('tierkv-hung', 1).run(threading.Event().wait)\n"
        "asyncio.run(main())\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S, check=False).returncode == 0


async def test_a_spread_is_planned_on_a_thread_and_once(lane: Lane) -> None:
    """The event loop's thread does not wait for the plan; a worker that comes meanwhile does, and shares it."""
    planned: list[int] = []
    taken: list[int] = []

    def plan() -> range:
        planned.append(threading.get_ident())
        return range(100)

    await lane.spread(taken.extend, plan, 3)
    assert len(planned) == 1
    assert planned[0] != threading.get_ident()
    assert sorted(taken) == list(range(100))


def test_who_comes_while_somebody_plans_waits_for_it() -> None:
    """And takes from the same items: nobody is left without work because another was not done with the plan."""
    planning, release = threading.Event(), threading.Event()

    def plan() -> range:
        planning.set()
        release.wait(PATIENCE_S)
        return range(10)

    share = _Share(plan)
    got: list[Iterator[int]] = []
    first, second = (threading.Thread(target=lambda: got.append(share.items())) for _ in range(2))
    first.start()
    assert planning.wait(PATIENCE_S)
    second.start()
    second.join(0.05)  # it ends that soon only if it does not wait
    release.set()
    first.join(PATIENCE_S)
    second.join(PATIENCE_S)
    assert got[0] is got[1]
    assert list(got[0]) == list(range(10))


def test_a_plan_is_made_whole_before_anybody_works() -> None:
    """Two threads cannot run one generator at a time."""
    made: list[int] = []

    def plan() -> Iterator[int]:
        for i in range(3):
            made.append(i)
            yield i

    assert next(_Share(plan).items()) == 0
    assert made == [0, 1, 2]


@pytest.mark.parametrize("what", ["plan_reads", "plan_writes"])
async def test_the_tier_plans_a_batch_on_a_thread_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The event loop's has other things to do."""
    planned: list[int] = []
    real = getattr(Batches, what)

    def plan(*asked: Any, **more: Any) -> Any:
        planned.append(threading.get_ident())
        return real(*asked, **more)

    monkeypatch.setattr(Batches, what, plan)
    chunks = [chunk_of(i) for i in range(4)]
    async with opened(tmp_path / "root") as tier:
        await store(tier, *chunks)
        await fetch(tier, *chunks)
    assert len(planned) == 1
    assert planned[0] != threading.get_ident()


async def test_a_worker_that_hangs_keeps_no_other_batch_from_its_plan(lane: Lane) -> None:
    """Nor does one that hangs in a plan, which none of ours can: threads that are left do whatever comes next."""
    release = threading.Event()

    def worker(_: Iterator[int]) -> None:
        release.wait(PATIENCE_S)

    def plan() -> range:
        release.wait(PATIENCE_S)
        return range(0)

    hung = [lane.spread(worker, lambda: range(1), 1), lane.spread(worker, plan, 1)]
    taken: list[int] = []
    await lane.spread(taken.extend, lambda: range(5), 3)
    assert taken == list(range(5))
    assert not any(future.done() for future in hung)
    release.set()
    await asyncio.gather(*hung)


async def test_a_batch_is_planned_though_nobody_waits_any_more(lane: Lane) -> None:
    """A call that is cancelled while it is queued is done all the same, and once: its buffers are the caller's then."""
    release, ended = threading.Event(), threading.Event()
    blocked = [lane.run(release.wait, PATIENCE_S) for _ in range(3)]
    taken: list[int] = []
    future = lane.spread(taken.extend, lambda: range(5), 3)
    future.cancel()
    release.set()
    await asyncio.gather(*blocked)
    lane.post(ended.set)
    assert await asyncio.to_thread(lane.wait_idle, PATIENCE_S)
    assert ended.is_set()
    assert taken == list(range(5))


async def test_a_plan_that_fails_fails_the_call(lane: Lane) -> None:
    """Once, whichever worker asked first; the others have nothing to do."""
    taken: list[int] = []
    asked: list[int] = []

    def plan() -> range:
        asked.append(1)
        raise OSError("no plan")

    with pytest.raises(OSError, match="no plan"):
        await lane.spread(taken.extend, plan, 3)
    assert taken == []
    assert asked == [1]
    assert await lane.run(int) == 0
