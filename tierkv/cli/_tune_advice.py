"""What the numbers of ``tierkv tune`` say to set: the order, the sizes, the chunk, and whether disk pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tierkv.cli._bench_report import BenchReport, TierSpeed
from tierkv.cli._tune_plan import Capacity, Speeds, TunePlan
from tierkv.cli._tune_replay import told

DEFAULT_ORDER = "lru"
_NEVER_ADVISED = {"lfu", "sieve"}
"""On sessions of agents they hit 2 to 22 % of tokens where LRU hit 57 to 96: good luck on one trace is no reason."""
WORTH_POINTS = 0.5
"""Percent of prompt tokens below which a difference is no reason to leave a default."""
ENOUGH = 0.9
"""Part of what an endless cache hits, from which on more disk is not advised."""
_FILE_NBYTES = 4096
"""Header of a chunk's file, and what files are rounded up to."""
_DISK_FILLED = 0.95
"""Part of its capacity that the fs tier fills at the least before it trims."""
_DAY_S = 86_400.0


def choose_order(hits: Mapping[str, float]) -> str:
    """The order with the most hits, LRU unless another is clearly better, and then under LeafFirst.

    Args:
        hits: percent of prompt tokens by order, in the order of preference.
    """
    candidates = {name: value for name, value in hits.items() if name not in _NEVER_ADVISED} or dict(hits)
    best = max(candidates, key=lambda name: candidates[name])
    if DEFAULT_ORDER in hits and candidates[best] < hits[DEFAULT_ORDER] + WORTH_POINTS:
        best = DEFAULT_ORDER
    bare = best != DEFAULT_ORDER and ":" not in best and "leaf" not in best.lower() and ">" not in best
    return f"leaf_first > {best}" if bare else best


def choose_disk(plan: TunePlan, percents: Sequence[float], endless: float) -> Capacity:
    """The disk that was given, or the smallest capacity tried that reaches ``ENOUGH``, and more than the memory."""
    if plan.disk is not None:
        return plan.disk
    larger = [each for each in zip(plan.capacities, percents, strict=True) if each[0].n_blocks > plan.memory.n_blocks]
    if not larger:
        n_blocks = min(4 * plan.memory.n_blocks, max(plan.trace.n_unique, plan.memory.n_blocks))
        return Capacity("4 x memory", n_blocks)
    return next((capacity for capacity, percent in larger if percent >= ENOUGH * endless), larger[-1][0])


def choose_chunk(percents: Mapping[int, float]) -> int:
    """The most blocks of the trace a chunk that cost less than ``WORTH_POINTS``."""
    return max(n for n, percent in percents.items() if percents[1] - percent < WORTH_POINTS)


def choose_writes(cascade: Mapping[str, Any], demote: Mapping[str, Any]) -> str:
    """CASCADE, which a restart survives whole, unless demoting is clearly better and writes no more."""
    gain = demote["token_hit_percent"] - cascade["token_hit_percent"]
    return "demote" if gain >= WORTH_POINTS and demote["n_written"] <= cascade["n_written"] else "cascade"


class Disk(NamedTuple):
    """What the level below costs and brings, in seconds of the whole trace; None where a speed is not known."""

    gained_tokens: int
    """Prompt tokens that only hit because of the disk."""
    read_tokens: int
    """Prompt tokens that were read from it."""
    read_nbytes: int | None
    written_nbytes: int | None
    written_nbytes_per_day: float | None
    prefill_s: float | None
    """What computing ``gained_tokens`` would have taken."""
    read_s: float | None
    write_s: float | None
    least_read_nbytes_per_s: float | None
    """Read speed from which on reading is faster than computing."""
    pays: bool | None


def weigh_disk(plan: TunePlan, alone_tokens: int, both: Mapping[str, Any], chunk_blocks: int) -> Disk:
    """Whether what the disk saves is more than what reading and writing it takes.

    Args:
        plan: for the sizes and speeds.
        alone_tokens: prompt tokens that host memory alone hits.
        both: the result of two levels.
        chunk_blocks: blocks of the trace in the chunk that is advised.
    """
    gained, read = both["n_hit_tokens"] - alone_tokens, both["n_below_tokens"]
    speeds = _speeds(plan, chunk_blocks)
    prefill_s = None if speeds.prefill_tokens_per_s is None else gained / speeds.prefill_tokens_per_s
    if plan.block_nbytes is None:
        return Disk(gained, read, None, None, None, prefill_s, None, None, None, False if gained <= 0 else None)
    read_nbytes = read * plan.block_nbytes // plan.tokens
    written_nbytes = both["n_written"] * plan.block_nbytes
    duration_s = plan.trace.duration_s
    read_s = None if speeds.read_nbytes_per_s is None else read_nbytes / speeds.read_nbytes_per_s
    write_s = None if speeds.write_nbytes_per_s is None else written_nbytes / speeds.write_nbytes_per_s
    pays = None
    if prefill_s is not None and read_s is not None:
        # A disk that cannot keep up with the writes drops some of them: then the hits are not what was counted.
        pays = read_s < prefill_s and (write_s is None or not duration_s or write_s < duration_s)
    return Disk(
        gained, read, read_nbytes, written_nbytes, written_nbytes * _DAY_S / duration_s if duration_s else None,
        prefill_s, read_s, write_s, read_nbytes / prefill_s if prefill_s else None, False if gained <= 0 else pays,
    )  # fmt: skip


def _speeds(plan: TunePlan, chunk_blocks: int) -> Speeds:
    """What was given; where it was not, what ``tierkv bench`` measured with the chunks nearest in size."""
    given = plan.speeds
    measured = None if plan.bench is None else nearest_speed(plan.bench, (plan.block_nbytes or 0) * chunk_blocks)
    if measured is None:
        return given
    return given._replace(
        read_nbytes_per_s=given.read_nbytes_per_s or measured.read_nbytes_per_s,
        write_nbytes_per_s=given.write_nbytes_per_s or measured.write_nbytes_per_s,
    )


def nearest_speed(bench: BenchReport, chunk_nbytes: int) -> TierSpeed | None:
    """The measurement whose chunks are nearest in size; None if there is none."""
    return min(bench.tiers, key=lambda speed: abs(speed.chunk_nbytes - chunk_nbytes), default=None)


def settings(plan: TunePlan, order: str, disk: Capacity, writes: str, chunk_blocks: int) -> dict[str, Any]:
    """What to set in ``kv_connector_extra_config``. Sizes that depend on an unknown model are said in tokens."""
    per_chunk_nbytes = None if plan.block_nbytes is None else plan.block_nbytes * chunk_blocks
    found: dict[str, Any] = {
        "cpu_bytes_to_use": _nbytes(plan, plan.memory, per_chunk_nbytes, chunk_blocks, on_disk=False),
        "eviction_policy": told(order, -(-plan.memory.n_blocks // chunk_blocks)),
    }
    if plan.engine_blocks is not None:
        found["blocks_per_chunk"] = plan.engine_blocks * chunk_blocks
    found["secondary_tiers"] = [
        {
            "type": "fs",
            "root_dir": "/var/lib/tierkv" if plan.bench is None else plan.bench.where,
            "capacity": _nbytes(plan, disk, per_chunk_nbytes, chunk_blocks, on_disk=True),
            "eviction_policy": told(order, -(-disk.n_blocks // chunk_blocks)),
            "writes": writes,
        }
    ]
    return found


def _nbytes(
    plan: TunePlan, capacity: Capacity, per_chunk_nbytes: int | None, chunk_blocks: int, *, on_disk: bool
) -> int | str:
    """Bytes that hold the blocks. On disk: with headers, and with what the tier keeps free."""
    if per_chunk_nbytes is None:
        return f"bytes of {capacity.n_blocks * plan.tokens:,} tokens"
    n_chunks = -(-capacity.n_blocks // chunk_blocks)
    each_nbytes = -(-per_chunk_nbytes // _FILE_NBYTES) * _FILE_NBYTES  # slots and files are whole pages
    if not on_disk:
        return n_chunks * each_nbytes
    return int(n_chunks * (each_nbytes + _FILE_NBYTES) / _DISK_FILLED) + 1
