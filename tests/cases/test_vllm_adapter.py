"""A27, A28: what vLLM's scheduler does to its offloading manager; ours, driven call by call, over the real worker."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cases.here import HAS_VLLM
from tests.cases.shelf import Shelf

if HAS_VLLM:
    from vllm.v1.kv_offload.base import ScheduleEndContext

    from tests.vllm.manager_kit import HIT, MISS, PENDING, RETRY, Kit, keys_of


@pytest.fixture
def engine_of() -> Iterator[Callable[..., Any]]:
    """Makes engines; in the end they must be at rest with nothing left of any request."""
    made: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        made.append(Kit(*args, **kwargs))
        if len(made[-1].hierarchy.levels) > 1:
            made[-1].until(lambda: made[-1].hierarchy.levels[1].serves)
        return made[-1]

    yield make
    Shelf.gate.set()
    for engine in made:
        engine.until(engine.at_rest)
        engine.close()


def _nothing_left(engine: Any) -> None:
    jobs = engine.manager._jobs
    assert not jobs._stores and not jobs._loads and not jobs.abandoned
    assert not engine.manager._leases.holders
    assert engine.statistics().n_pinned == 0


def _preempt(engine: Any, context: Any) -> None:
    engine.manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=(context.req_id,)))


def test_a27_preempted_while_its_transfers_run(engine_of: Callable[..., Any]) -> None:
    """A preempted request came back while its transfers were running, and met an assertion that none may be.

    https://github.com/vllm-project/vllm/issues/46014

    Of the kind: preempted with a store open, with a load open, with a promotion under way, and all at once, again and
    again; a second bearer of the id of one that still drains, finished and unfinished. "Ask later" until the transfer
    has ended, then as always; no exception; nothing kept of a request that has finished.
    """
    engine = engine_of(8, [Shelf.settings()])
    keys = keys_of("a", 3)
    context = engine.request(keys, req_id="r")
    output = engine.offer(keys, context)
    for _ in range(3):
        _preempt(engine, context)
        assert engine.lookup(keys, context) == [PENDING] * 3
    engine.copy_out(output)
    engine.manager.complete_store(set(keys), context)
    assert engine.lookup(keys, context) == [HIT] * 3
    spec = engine.manager.prepare_load(keys, context)
    _preempt(engine, context)
    assert engine.lookup(keys, context) == [HIT] * 3, "it is preempted again while it loads"
    again = engine.manager.prepare_load(keys, context)
    engine.manager.on_request_finished(context)

    second = engine.request(keys_of("b", 2), req_id="r")
    late = engine.offer(keys_of("b", 2), second)
    engine.manager.on_request_finished(second)
    third = engine.request(keys_of("c", 2), req_id="r")
    engine.copy_out(late)
    engine.manager.complete_store(set(keys_of("b", 2)), third)
    _stamp(engine, spec)
    engine.manager.complete_load(set(keys), third)
    _stamp(engine, again)
    engine.manager.complete_load(set(keys), third)
    assert engine.store(keys_of("c", 2), third) == keys_of("c", 2)
    assert engine.lookup(keys_of("b", 2), third) == [HIT] * 2
    engine.manager.on_request_finished(third)
    engine.until(engine.at_rest)
    _nothing_left(engine)

    engine.hierarchy.reset((0,))
    Shelf.gate.clear()
    waiting = engine.request(keys, req_id="r")
    assert engine.lookup(keys, waiting) == [PENDING] * 3
    _preempt(engine, waiting)
    assert engine.lookup(keys, waiting) == [PENDING] * 3
    Shelf.gate.set()
    engine.until(lambda: engine.statistics().n_pending == 0)
    assert engine.lookup(keys, waiting) == [HIT] * 3
    engine.manager.on_request_finished(waiting)
    _nothing_left(engine)
    _many_that_come_back(engine, random.Random(27))
    _nothing_left(engine)


def _stamp(engine: Any, spec: Any) -> None:
    from tierkv.vllm._control import Direction

    engine.manager._page().stamp_many(0, Direction.LOAD, spec.slots, spec.tickets, ok=True)


def _many_that_come_back(engine: Any, rng: random.Random) -> None:  # noqa: C901 - what may happen, in a list
    """Three ids, each finished or not when its next bearer comes, with stores that end whenever."""
    open_stores: list[tuple[Any, Any]] = []
    bearers: dict[str, Any] = {}
    unfinished: list[Any] = []
    for i in range(300):
        req_id = rng.choice("xyz")
        keys = keys_of(f"p{rng.randrange(6)}", 2)
        if req_id not in bearers or rng.random() < 0.4:
            if req_id in bearers and rng.random() < 0.5:
                engine.manager.on_request_finished(bearers[req_id])
            elif req_id in bearers:
                unfinished.append(bearers[req_id])
            bearers[req_id] = engine.request(keys, req_id=req_id)
        context = bearers[req_id]
        answers = engine.lookup(keys, context)
        assert set(answers) <= {HIT, PENDING, MISS, RETRY}
        if rng.random() < 0.5:
            _preempt(engine, context)
        elif answers == [HIT, HIT]:
            engine.load(keys, context)
        elif (output := engine.offer(keys, context)).keys_to_store:
            open_stores.append((output, context))
        if open_stores and (rng.random() < 0.5 or i > 290):
            output, context = open_stores.pop(rng.randrange(len(open_stores)))
            engine.copy_out(output)
            engine.manager.complete_store(set(output.keys_to_store), context)
        engine.step()
    for output, context in open_stores:
        engine.copy_out(output)
        engine.manager.complete_store(set(output.keys_to_store), context)
    for context in [*unfinished, *bearers.values()]:
        engine.manager.on_request_finished(context)
    engine.until(engine.at_rest)


def test_a28_a_store_without_room_is_not_tried_each_step(
    engine_of: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A store that cannot be admitted was retried and warned about in every step, and slowed generation down.

    https://github.com/vllm-project/vllm/pull/50069

    A pool whose slots are all pinned, a thousand decode steps without a new chunk boundary: the answer is an empty list
    and never None, which is what makes vLLM offer again; it costs no event, no transfer and no log line. What lies
    behind the hole is refused until the hole is filled; of a request larger than the pool the leading part is stored.
    """
    engine = engine_of(4)
    pinned = keys_of("pinned", 4)
    engine.store(pinned)
    loader = engine.request(pinned)
    engine.lookup(pinned, loader)
    load = engine.manager.prepare_load(pinned, loader)
    keys = keys_of("a", 6)
    context = engine.request(keys)
    list(engine.manager.take_events())
    with caplog.at_level(logging.DEBUG):
        assert engine.offer(keys[:2], context).keys_to_store == []
        for _ in range(1000):  # no new chunk: vLLM offers nothing, since it was not told to come again
            engine.step(context.req_id)
        assert engine.offer(keys[2:3], context).keys_to_store == []
    assert not caplog.records
    assert list(engine.manager.take_events()) == []
    refused = engine.statistics().refused
    assert (refused["full"], refused["behind_hole"]) == (2, 1), "one attempt for each chunk that was completed"
    _stamp(engine, load)
    engine.manager.complete_load(set(pinned), loader)
    assert engine.offer(keys[3:4], context).keys_to_store == [], "no lookup would reach it"
    other = engine.request(keys)
    assert engine.store(keys[:2], other) == keys[:2], "whoever comes next fills the hole"
    assert engine.store(keys[2:4], context) == keys[2:4], "and later chunks are stored again"
    assert engine.lookup(keys[:4], other) == [HIT] * 4
    engine.step()
    engine.manager.on_request_finished(context)
    engine.manager.on_request_finished(other)

    long = keys_of("long", 9)
    reader = engine.request(long)
    assert engine.store(long, reader) == long[:4], "of what is larger than the pool the leading part"
    assert engine.lookup(long, reader)[:4] == [HIT] * 4
    engine.manager.on_request_finished(reader)
    _nothing_left(engine)
