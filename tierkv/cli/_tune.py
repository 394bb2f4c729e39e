"""``tierkv tune``: a recorded trace of requests through the real orders and levels, ending in what to set."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tierkv.cli._tune_advice import (
    DEFAULT_ORDER,
    WORTH_POINTS,
    Disk,
    choose_chunk,
    choose_disk,
    choose_order,
    choose_writes,
    settings,
    weigh_disk,
)
from tierkv.cli._tune_bound import belady_hit_tokens, endless_hit_tokens
from tierkv.cli._tune_jobs import run_jobs
from tierkv.cli._tune_plan import Capacity, TunePlan, plan_from
from tierkv.cli._tune_replay import Job, Result
from tierkv.errors import ConfigError
from tierkv.sizes import format_size

DESCRIPTION = """\
Replays a trace of requests - Mooncake's JSON lines, or what vLLM wrote with record_trace - through the real eviction
orders and levels: how much each order hits at each capacity beside the best that is possible, what a disk below adds
and how much is written to it, what larger chunks cost, and whether disk pays. Ends in what to set in vLLM's JSON."""

CHUNK_BLOCKS = (1, 2, 4, 8, 16, 32)
_N_MORE = 5
"""Jobs that follow from the first results: the chosen order alone, and two kinds of writes for two orders."""


def run(arguments: argparse.Namespace) -> int:
    """The whole command; returns the exit code."""
    from tierkv.cli._tune_view import View  # noqa: PLC0415 - rich is an extra, and only commands that show need it

    plan = plan_from(arguments)
    with View(quiet=arguments.json) as view:
        report = tune(plan, view.start, view.advance)
    if arguments.json:
        json.dump(report, sys.stdout, indent=2)
        print()
    else:
        view.show(report)
    if plan.plot is not None:
        from tierkv.cli._tune_plot import draw  # noqa: PLC0415 - only for who wants one

        try:
            draw(report, plan.plot)
        except OSError as error:
            raise ConfigError(
                f"--plot is {plan.plot!r}, but must be a file that can be written: {error.strerror}"
            ) from None
    return 0


def tune(
    plan: TunePlan, start: Callable[[int], object] = lambda _: None, advance: Callable[[int], object] = lambda _: None
) -> dict[str, Any]:
    """Everything that ``--json`` prints."""
    return _Run(plan, start, advance).report()


class _Run:
    """One run: first every order at every capacity, then what follows from that."""

    def __init__(self, plan: TunePlan, start: Callable[[int], object], advance: Callable[[int], object]) -> None:
        self._plan = plan
        self._advance = advance
        self._n_tokens = sum(plan.trace.n_tokens)
        self._sizes = [*plan.capacities]
        if plan.memory.n_blocks not in [each.n_blocks for each in self._sizes]:
            self._sizes.append(plan.memory)
        self._chunks = [n for n in CHUNK_BLOCKS if plan.memory.n_blocks // n]
        n_jobs = len(plan.policies) * len(self._sizes) + len(self._chunks) + _N_MORE
        start(n_jobs * len(plan.trace))

    def report(self) -> dict[str, Any]:
        plan = self._plan
        endless = self._percent(endless_hit_tokens(plan.trace))
        bound = [self._percent(belady_hit_tokens(plan.trace, each.n_blocks)) for each in plan.capacities]
        jobs = [Job(policy, each.n_blocks) for policy in plan.policies for each in self._sizes]
        found = dict(zip(jobs, self._run(jobs), strict=True))
        percents = {job: self._percent(result.n_hit_tokens) for job, result in found.items()}
        order = choose_order({policy: percents[Job(policy, plan.memory.n_blocks)] for policy in plan.policies})
        base = order.removeprefix("leaf_first > ") if order not in plan.policies else order
        disk = choose_disk(plan, [percents[Job(base, each.n_blocks)] for each in plan.capacities], endless)
        alone, two, by_chunk = self._second(order, disk)
        return {
            "trace": self._trace(endless),
            "capacities": [each._asdict() for each in plan.capacities],
            "min": bound,
            "policies": [
                {
                    "policy": policy,
                    "token_hit_percent": [percents[Job(policy, each.n_blocks)] for each in plan.capacities],
                    "block_hit_percent": [
                        self._part(found[Job(policy, each.n_blocks)].n_hit_blocks, len(plan.trace.blocks))
                        for each in plan.capacities
                    ],
                }
                for policy in plan.policies
            ],
            "two_levels": two,
            "chunks": [{"blocks_per_chunk": n, "token_hit_percent": percent} for n, percent in by_chunk.items()],
            **self._advise(order, disk, alone, two, by_chunk),
        }

    def _second(self, order: str, disk: Capacity) -> tuple[Result, list[dict[str, Any]], dict[int, float]]:
        """The chosen order alone, two levels for it and for the first that was asked for, and chunks of all sizes."""
        plan, memory = self._plan, self._plan.memory.n_blocks
        orders = list(dict.fromkeys([plan.policies[0], order]))
        alone = Job(order, memory)
        pairs = [Job(each, memory, disk.n_blocks, writes) for each in orders for writes in ("cascade", "demote")]
        chunks = [Job(order, memory // n, blocks_per_chunk=n, whole=True) for n in self._chunks]
        found = dict(zip([alone, *pairs, *chunks], self._run([alone, *pairs, *chunks]), strict=True))
        two = [
            {
                "policy": job.policy, "writes": job.writes, "memory": plan.memory.text, "disk": disk.text,
                "token_hit_percent": self._percent(found[job].n_hit_tokens),
                "below_token_percent": self._percent(found[job].n_below_tokens),
                "n_hit_tokens": found[job].n_hit_tokens, "n_below_tokens": found[job].n_below_tokens,
                "n_written": found[job].n_written, "n_read": found[job].n_read,
                "written_nbytes": None if plan.block_nbytes is None else found[job].n_written * plan.block_nbytes,
                "written_per_1000_blocks": round(1000 * found[job].n_written / max(1, len(plan.trace.blocks)), 1),
            }
            for job in pairs
        ]  # fmt: skip
        by_chunk = {job.blocks_per_chunk: self._percent(found[job].n_hit_tokens) for job in chunks}
        return found[alone], two, by_chunk

    def _advise(
        self, order: str, disk: Capacity, alone: Result, two: Sequence[Mapping[str, Any]], by_chunk: Mapping[int, float]
    ) -> dict[str, Any]:
        plan = self._plan
        cascade, demote = (each for each in two if each["policy"] == order)
        writes = choose_writes(cascade, demote)
        both = demote if writes == "demote" else cascade
        n_blocks = choose_chunk(by_chunk)
        weight = weigh_disk(plan, alone.n_hit_tokens, both, n_blocks)
        advised = settings(plan, order, disk, writes, n_blocks)
        if weight.pays is False:
            del advised["secondary_tiers"]
        alone_percent = self._percent(alone.n_hit_tokens)
        disk_percent = both["token_hit_percent"]
        why = [
            f"eviction_policy: {order} hits {alone_percent:.2f} % of prompt tokens with {plan.memory.text} in memory"
            + (f"; another is taken only for {WORTH_POINTS} points more" if order == DEFAULT_ORDER else ""),
            f"capacity: {disk.text} on a disk below makes that {disk_percent:.2f} %",
            "writes: " + "; ".join(f"{one['writes']} {_written(one)}" for one in (cascade, demote)),
            f"blocks_per_chunk: chunks of {n_blocks * plan.tokens:,} tokens cost less than {WORTH_POINTS} points"
            + _why_no_blocks(plan),
            _disk_words(weight, plan),
        ]
        return {"disk": weight._asdict(), "settings": advised, "why": why}

    def _trace(self, endless: float) -> dict[str, Any]:
        plan = self._plan
        return {
            "files": list(plan.names),
            "n_requests": len(plan.trace),
            "n_tokens": self._n_tokens,
            "n_blocks": len(plan.trace.blocks),
            "n_unique_blocks": plan.trace.n_unique,
            "tokens_per_block": plan.tokens,
            "block_nbytes": plan.block_nbytes,
            "duration_s": plan.trace.duration_s,
            "endless_token_hit_percent": endless,
        }

    def _run(self, jobs: Sequence[Job]) -> list[Result]:
        return run_jobs(self._plan.trace, jobs, self._plan.n_processes, self._advance)

    def _percent(self, n_tokens: int) -> float:
        return self._part(n_tokens, self._n_tokens)

    @staticmethod
    def _part(part: int, whole: int) -> float:
        return round(100 * part / whole, 4) if whole else 0.0


def _written(result: Mapping[str, Any]) -> str:
    return f"hits {result['token_hit_percent']:.2f} % with {result['n_written']:,} chunks written"


def _why_no_blocks(plan: TunePlan) -> str:
    if plan.engine_blocks is not None:
        return ""
    which = f"the trace's blocks of {plan.tokens:,} tokens are no multiple of {plan.engine_tokens}"
    return f"; how many blocks of the engine those are, --engine-block can tell: {which}"


def _disk_words(disk: Disk, plan: TunePlan) -> str:
    """Whether disk pays, in one sentence."""
    if disk.gained_tokens <= 0:
        return "disk: it adds no hits, so it does not pay"
    if disk.pays is not None and disk.prefill_s is not None and disk.read_s is not None:
        writes = "" if disk.write_s is None else f", and writing to it {disk.write_s:,.0f} s"
        verdict = "pays" if disk.pays else "does not pay"
        return (
            f"disk: it {verdict}: it saves {disk.prefill_s:,.0f} s of prefill over the trace, "
            f"reading from it takes {disk.read_s:,.0f} s{writes}"
        )
    if disk.least_read_nbytes_per_s is not None:
        return f"disk: it pays if it reads more than {format_size(int(disk.least_read_nbytes_per_s))} a second"
    unsaid = {
        "--prefill": disk.prefill_s is None,
        "--token-size": plan.block_nbytes is None,
        "--bench (or --read)": plan.bench is None and plan.speeds.read_nbytes_per_s is None,
    }
    return (
        f"disk: it saves {disk.gained_tokens:,} tokens of prefill for {disk.read_tokens:,} read; "
        f"whether that pays can be told with {' and '.join(name for name, missing in unsaid.items() if missing)}"
    )
