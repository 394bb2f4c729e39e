"""Many askers, one read; a prefix larger than the pool; one bad chunk of eight: through vLLM's manager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cases.here import HAS_VLLM
from tests.cases.kit import file_of
from tests.cases.shelf import Shelf
from tierkv.types import Status

if HAS_VLLM:
    from tests.vllm.manager_kit import HIT, MISS, PENDING, Kit, keys_of


@pytest.fixture
def engine_of() -> Iterator[Callable[..., Any]]:
    """Makes engines with a level below that is open."""
    made: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        made.append(Kit(*args, **kwargs))
        made[-1].until(lambda: made[-1].hierarchy.levels[1].serves)
        return made[-1]

    yield make
    Shelf.gate.set()
    for engine in made:
        engine.until(engine.at_rest)
        engine.close()


def _put_below(engine: Any, keys: list[Any], step: int) -> None:
    """Bring chunks to the level below and out of the primary."""
    context = engine.request(keys)
    for i in range(0, len(keys), step):
        assert engine.store(keys[i : i + step], context) == keys[i : i + step]
        engine.until(engine.at_rest)
        missing = [key for key in keys[i : i + step] if engine.hierarchy.levels[1].ledger.get(key) is None]
        assert not missing, engine.statistics(1)
        engine.hierarchy.reset((0,))
    engine.manager.on_request_finished(context)


def test_fifty_askers_of_a_hundred_chunks(engine_of: Callable[..., Any]) -> None:
    """One read a chunk and as many calls as for one asker; all fifty are answered in one and the same step.

    If the shared read fails, all fifty see a miss in the same step. https://github.com/vllm-project/vllm/issues/44294
    """
    engine = engine_of(128, [Shelf.settings()])
    keys = keys_of("a", 100)
    _put_below(engine, keys, step=50)
    Shelf.latency_s = 0.05
    calls = []
    for n_askers, failing in ((1, {}), (50, {}), (50, dict.fromkeys(keys, Status.FAILED))):
        Shelf.n_reads.clear()
        Shelf.n_calls = 0
        Shelf.fails.update(failing)
        askers = [engine.request(keys) for _ in range(n_askers)]
        for asker in askers:
            assert engine.lookup(keys, asker) == [PENDING] * 100
        engine.step()
        answers = [[PENDING]] * n_askers
        while PENDING in answers[0]:
            answers = [engine.lookup(keys, asker) for asker in askers]
            engine.step()
        expected = [MISS] if failing else [HIT] * 100
        assert answers == [expected] * n_askers, "nobody waits longer than the first"
        assert set(Shelf.n_reads.values()) == {1} and len(Shelf.n_reads) == 100
        calls.append(Shelf.n_calls)
        for asker in askers:
            engine.manager.on_request_finished(asker)
        engine.until(engine.at_rest)
        assert engine.statistics().n_pinned == 0
        engine.hierarchy.reset((0,))
    assert calls[0] == calls[1] == calls[2]


def test_eight_chunks_below_a_pool_of_six(engine_of: Callable[..., Any], tmp_path: Path) -> None:
    """From a real disk, within a few polls: five leading hits at least, no chunk read twice, eight reads at most.

    https://github.com/vllm-project/vllm/issues/49902
    """
    disk = {"type": "fs", "root_dir": str(tmp_path / "root"), "capacity": "1MiB"}
    engine = engine_of(6, [disk])
    keys = keys_of("a", 8)
    _put_below(engine, keys, step=4)
    context = engine.request(keys)
    n_polls = 0
    while PENDING in (answers := engine.lookup(keys, context)) or n_polls == 0:
        n_polls += 1
        engine.step()
        engine.until(lambda: engine.statistics().n_pending == 0)
        assert n_polls <= 5, "a few polls"
    assert answers[:5] == [HIT] * 5
    assert engine.statistics(1).n_read <= 8
    engine.load(keys[:5], context)
    engine.manager.on_request_finished(context)


@pytest.mark.parametrize("stage", ["reserve", "read", "verify", "commit"])
def test_one_of_eight_fails(engine_of: Callable[..., Any], tmp_path: Path, stage: str) -> None:
    """At each stage of a promotion: the three before it are hits at once, the four behind once it is stored again.

    None of the seven is read a second time. https://github.com/vllm-project/vllm/pull/50321
    """
    disk = {"type": "fs", "root_dir": str(tmp_path / "root"), "capacity": "1MiB"}
    tier = disk if stage == "verify" else Shelf.settings()
    engine = engine_of(16, [tier])
    keys = keys_of("a", 8)
    _put_below(engine, keys, step=4)
    bad = keys[3]
    context = engine.request(keys)
    if stage == "read":
        Shelf.fails[bad] = Status.FAILED
    elif stage == "verify":
        path = file_of(tmp_path / "root", bad)
        data = bytearray(path.read_bytes())
        data[-4000] ^= 1
        path.write_bytes(data)
    elif stage == "reserve":
        del Shelf.chunks[bad]
        engine.hierarchy.delete([bad])  # gone before anybody asks: it is not reserved
    expected = [PENDING] * 3 + [MISS] if stage == "reserve" else [PENDING] * 8
    Shelf.gate.clear()
    assert engine.lookup(keys, context) == expected
    engine.step()
    if stage == "commit":
        engine.hierarchy.delete([bad])  # forgotten while it is read
    Shelf.gate.set()
    engine.until(lambda: engine.statistics().n_pending == 0)
    assert engine.lookup(keys, context)[:4] == [HIT] * 3 + ([MISS] if stage != "read" else [PENDING])
    Shelf.fails.clear()
    engine.step()
    engine.until(lambda: engine.statistics().n_pending == 0)
    n_reads = sum(Shelf.n_reads.values())
    engine.store(keys[3:4], context)
    engine.step()
    again = engine.request(keys)
    engine.until(lambda: engine.lookup(keys, again) == [HIT] * 8)
    assert stage == "reserve" or sum(Shelf.n_reads.values()) == n_reads
    engine.load(keys, again)
    for each in (context, again):
        engine.manager.on_request_finished(each)
