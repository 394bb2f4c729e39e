"""What the scheduler's half costs a chunk against vLLM's own managers: orders, pool sizes, and with a disk below.

``python -m tests.bench.scheduler DIRECTORY [SLOTS...]`` prints the table. The calls and the two sides are those of
:mod:`tests.bench.test_scheduler_cost`; here every round is a pair. Processor time of the calling thread, which is the
scheduler's: what other threads do meanwhile shows in the engines' bench.
"""

from __future__ import annotations

import gc
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.bench.pairs import N_PAIRS, Row, table
from tests.bench.test_scheduler_cost import SLOT_NBYTES, STEP, TOKENS, Ours, Theirs, again, load, request, store
from tests.vllm.manager_kit import Kit, offloading_config
from tierkv._level import LevelPlan
from tierkv.policies import ARC
from tierkv.vllm._books import EpochHierarchy
from tierkv.vllm._control import ControlPage
from tierkv.vllm._requests import Group
from tierkv.vllm.manager import TierKVManager

SIZES = (10_000, 100_000, 1_000_000)
GATED_SIZE = 100_000
TIERED_SIZE = 10_000
"""Each of its chunks is a file on each side."""
SETTLE_S = 300.0
SHAPES = ((64, 64), (2048, 2048), (2048, 16))
"""(chunks of a request, chunks of a call)."""
FIGURES = {"lookup": ("lookup",), "store": ("offer", "stored"), "load": ("load", "loaded")}
MUST = {"lookup": 1.0, "store": 5.0, "load": 5.0}
GROWTH = 1.5


class OursARC(Ours):
    def __init__(self, n_slots: int) -> None:
        plan = LevelPlan("primary", n_slots * SLOT_NBYTES, ARC(), n_slots=n_slots, slot_nbytes=SLOT_NBYTES)
        self.page = ControlPage.private(n_ranks=1, n_slots=n_slots)
        groups = [Group(0, TOKENS, sliding=False, nbytes=SLOT_NBYTES)]
        self.manager = TierKVManager(EpochHierarchy([plan]), groups, lambda: self.page)


class TheirsARC(Theirs):
    def __init__(self, n_slots: int) -> None:
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self.manager = CPUOffloadingManager(num_chunks=n_slots, cache_policy="arc")


class OursTiered(Ours):
    """With an fs tier that takes every chunk."""

    def __init__(self, n_slots: int, root: Path) -> None:
        tier = {"type": "fs", "root_dir": str(root), "capacity": "4GiB", "min_free": 0}
        self.kit = Kit(n_slots, [tier], page_nbytes=SLOT_NBYTES)
        self.kit.until(lambda: self.kit.hierarchy.levels[1].serves)
        self.manager, self.page = self.kit.manager, self.kit.manager._page()

    def settle(self) -> None:
        """Let the disk take what it was given: chunks on their way down cannot be evicted."""
        self.kit.until(self.kit.at_rest, SETTLE_S)

    def close(self) -> None:
        self.kit.close()


class TheirsTiered(Theirs):
    """vLLM's TieringOffloadingManager with its fs tier."""

    def __init__(self, n_slots: int, root: Path) -> None:
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        extra = {"cpu_bytes_to_use": n_slots * SLOT_NBYTES, "secondary_tiers": [{"type": "fs", "root_dir": str(root)}]}
        self.manager = TieringOffloadingSpec(offloading_config(extra, page_nbytes=SLOT_NBYTES)).get_manager()

    def settle(self) -> None:
        deadline = time.monotonic() + SETTLE_S
        while self.manager._transfer_jobs:
            assert time.monotonic() < deadline, "vLLM's jobs do not end"
            for tier in self.manager.secondary_tiers:
                tier.drain_jobs()
            self.manager.on_schedule_end(STEP)

    def close(self) -> None:
        self.manager.shutdown()


def pairs(n_chunks: int, size: int, n_rounds: int, sides: Sequence[Any]) -> dict[str, tuple[list[float], list[float]]]:
    """Microseconds a chunk of both sides, round by round, by figure."""
    found: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for round_ in range(n_rounds + 1):
        for which in (0, 1) if round_ % 2 else (1, 0):
            rng = random.Random(f"{n_chunks} {size} {round_}")
            settle(sides[which])
            context, keys = request(rng, n_chunks, f"pair-{n_chunks}-{size}-{round_}-{which}")
            spent = store(sides[which], context, keys, size) | load(sides[which], again(keys, "load"), keys)
            if round_:  # the first is a warm-up
                for figure, parts in FIGURES.items():
                    found[figure][which].append(sum(spent[part] for part in parts) / n_chunks * 1e6)
    return found


def settle(side: Any) -> None:
    if hasattr(side, "settle"):
        side.settle()


def filled(n_slots: int, make: Callable[[int], Any]) -> Any:
    """A side whose pool is full, a disk having taken each request before the next one."""
    side, rng = make(n_slots), random.Random(1)
    for i in range(n_slots // 500 + 2):
        settle(side)
        store(side, *request(rng, 500, f"fill-{i}"), 500)
    return side


def compare(
    names: tuple[str, str], n_slots: int, make: tuple[Callable[[int], Any], Callable[[int], Any]],
    n_pairs: int = N_PAIRS, *, gated: bool = False,
) -> Iterator[Row]:  # fmt: skip
    """Both sides full, so that every store evicts."""
    sides = [filled(n_slots, side) for side in make]
    gc.collect()
    try:
        for n_chunks, size in SHAPES:
            for figure, (ours, theirs) in pairs(n_chunks, size, n_pairs, sides).items():
                what = f"{figure}, {names[0]}, pool {n_slots:,}, request {n_chunks}, calls of {size}"
                must = MUST[figure] if gated else None
                yield Row("scheduler", what, "us a chunk", ours, theirs, names[1], higher_is_better=False, must=must)
    finally:
        for side in sides:
            if hasattr(side, "close"):
                side.close()


def growth(small: int, large: int, n_pairs: int = N_PAIRS) -> Iterator[Row]:
    """What a chunk costs in a large pool by what it costs in a small one, both full, by turns."""
    sides = [filled(n_slots, Ours) for n_slots in (small, large)]
    gc.collect()
    for n_chunks, size in SHAPES[:2]:
        for figure, (before, after) in pairs(n_chunks, size, n_pairs, sides).items():
            what = f"{figure}, LRU, request {n_chunks}: cost in a pool of {large:,} by that in one of {small:,}"
            times = [cost / least for least, cost in zip(before, after, strict=True)]
            must = None if figure == "lookup" else GROWTH
            yield Row("scheduler", what, "times", times, higher_is_better=False, must=must)


def run(folder: Path, sizes: Sequence[int] = SIZES, n_pairs: int = N_PAIRS) -> Iterator[Row]:
    for n_slots in sizes:
        yield from compare(("LRU", "vLLM's lru"), n_slots, (Ours, Theirs), n_pairs, gated=n_slots == GATED_SIZE)
    if len(sizes) > 1:
        yield from growth(min(sizes), max(sizes), n_pairs)
    if GATED_SIZE in sizes:
        yield from compare(("ARC", "vLLM's arc"), GATED_SIZE, (OursARC, TheirsARC), n_pairs)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        ours, theirs = Path(made) / "ours", Path(made) / "theirs"
        make = (lambda n: OursTiered(n, ours), lambda n: TheirsTiered(n, theirs))
        yield from compare(("LRU over fs", "vLLM's tiered"), TIERED_SIZE, make, n_pairs)


if __name__ == "__main__":
    for row in run(Path(sys.argv[1]), [int(n) for n in sys.argv[2:]] or SIZES):
        print(table([row]), flush=True)
