"""``tierkv bench device``: how fast chunks get from a device to host memory and back, beside its own large copies."""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tierkv.cli._bench import PAGE_NBYTES, parse_sizes
from tierkv.cli._bench_plan import CHUNK_PART
from tierkv.cli._bench_report import BenchReport, TierSpeed
from tierkv.cli._quick import add_options, given, parse_integer
from tierkv.errors import ConfigError, TierError, bad_setting
from tierkv.settings import parse_count
from tierkv.sizes import format_size, parse_size

if TYPE_CHECKING:
    from tierkv.device.measure import Lane, Plain, Speeds  # numpy, and torch for accelerators: loaded by the run

DESCRIPTION = """\
Copies chunks from the device's blocks to host memory and back, by the engine that serves, for each size of a chunk and
each kind of host memory that the device offers: pinned (of its own allocator), registered (ordinary memory, page-locked
afterwards), staged (ordinary memory by way of a little pinned memory), pageable (none of these). Beside it one plain
large copy. On a machine without an accelerator it measures host memory against memcpy. Stop whatever else uses the
device."""

N_KINDS = 4
"""Of host memory, at most."""

# Option: what it takes, its default, its default with --quick, what it is.
_OPTIONS = {
    "chunks": ("SIZES", "64KiB,256KiB,1MiB,8MiB", "64KiB,1MiB", "sizes of a chunk, multiples of 4 KiB"),
    "page": ("SIZE", "32KiB", "32KiB", "bytes of one KV block in one tensor (K and V of a layer may be two)"),
    "size": ("SIZE", "256MiB", "32MiB", "bytes of each measurement, on the device and in host memory"),
    "rounds": ("N", "5", "3", "measurements of each kind; medians are shown"),
}


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """One run of ``tierkv bench device``."""

    device: str
    kinds: Sequence[str]
    """Of host memory."""
    chunks_nbytes: Sequence[int]
    page_nbytes: int
    size_nbytes: int
    n_rounds: int
    block_nbytes: int | None


class Measured(NamedTuple):
    """Medians of one size of a chunk and one kind of host memory; parts of the plain copy are taken round by round."""

    chunk_nbytes: int
    kind: str
    path: str
    chunks: Speeds
    plain: Speeds
    store_part: float
    load_part: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options; :func:`plan_from` checks their values."""
    parser.add_argument("--device", metavar="NAME", default="auto", help="cpu, cuda:0, npu:0 (default: what is there)")
    add_options(parser, _OPTIONS)
    parser.add_argument(
        "--block", metavar="SIZE", help="bytes of one KV block in all layers, to end in blocks_per_chunk"
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds: tells orders of magnitude apart, no more")
    parser.add_argument("--json", action="store_true", help="the report as JSON")


def plan_from(arguments: argparse.Namespace) -> DevicePlan:
    """Check the options. Raises ConfigError."""
    from tierkv.device.measure import best_device, kinds_of  # noqa: PLC0415 - numpy, and torch for accelerators
    from tierkv.tiers._memory_limits import check_memory  # noqa: PLC0415 - reads /proc

    typed = given(arguments, _OPTIONS)
    device = best_device() if arguments.device == "auto" else arguments.device
    try:
        kinds = kinds_of(device)
    except TierError as error:
        raise ConfigError(f"--device is {device!r}, but must be a device that is there: {error}") from None
    plan = DevicePlan(
        device=device,
        kinds=kinds,
        chunks_nbytes=parse_sizes("--chunks", typed["chunks"]),
        page_nbytes=parse_size("--page", typed["page"]),
        size_nbytes=parse_size("--size", typed["size"], low=PAGE_NBYTES),
        n_rounds=parse_count("--rounds", parse_integer(typed["rounds"]), 1, 1_000),
        block_nbytes=None if arguments.block is None else parse_size("--block", arguments.block),
    )
    largest_nbytes = max(plan.chunks_nbytes)
    if plan.size_nbytes < largest_nbytes:
        raise bad_setting("--size", typed["size"], "at least the largest of --chunks", format_size(largest_nbytes))
    for chunk_nbytes in plan.chunks_nbytes:
        if chunk_nbytes % min(plan.page_nbytes, chunk_nbytes):
            allowed = f"a divisor of each of --chunks, such as of {format_size(chunk_nbytes)}"
            raise bad_setting("--page", typed["page"], allowed, format_size(PAGE_NBYTES))
    # Host memory, and the plain copy's; on a machine without an accelerator what stands for the device, too.
    check_memory("--size", plan.size_nbytes * (4 if plan.device == "cpu" else 2))
    return plan


def run(arguments: argparse.Namespace) -> int:
    """The whole command; returns the exit code."""
    from tierkv.cli._bench_view import DeviceView  # noqa: PLC0415 - rich is an extra

    plan = plan_from(arguments)
    with DeviceView(plan, quiet=arguments.json) as view:
        measured = measure(plan, view.begin, view.measured)
    report = report_of(plan, measured)
    if arguments.json:
        print(report.to_json(), end="")
    else:
        view.advice(measured, choose(measured), report.settings)
    return 0


def measure(plan: DevicePlan, told: Any, measured: Any) -> list[Measured]:
    """Run the whole plan; ``told`` hears what begins, ``measured`` each result. Raises TierError."""
    from tierkv.device.measure import Plain  # noqa: PLC0415 - numpy, and torch for accelerators

    plain = Plain(plan.device, plan.size_nbytes)
    results = []
    for chunk_nbytes in plan.chunks_nbytes:
        for kind in plan.kinds:
            told(f"chunks of {format_size(chunk_nbytes)}, {kind}")
            with _lane(plan, chunk_nbytes, kind) as lane:
                if lane is not None:
                    results.append(_measure_lane(plan, chunk_nbytes, kind, lane, plain))
                    measured(results[-1])
    return results


@contextlib.contextmanager
def _lane(plan: DevicePlan, chunk_nbytes: int, kind: Any) -> Iterator[Lane | None]:
    from tierkv.device.measure import open_lane  # noqa: PLC0415

    lane = open_lane(
        plan.device,
        kind,
        chunk_nbytes=chunk_nbytes,
        page_nbytes=min(plan.page_nbytes, chunk_nbytes),
        n_chunks=plan.size_nbytes // chunk_nbytes,
    )
    try:
        if lane is not None:
            lane.check()
        yield lane
    finally:
        if lane is not None:
            lane.close()


def _measure_lane(plan: DevicePlan, chunk_nbytes: int, kind: Any, lane: Lane, plain: Plain) -> Measured:
    """Both in turn, so that what slows the machine down for a while slows down both."""
    rounds = []
    for number in range(plan.n_rounds):
        if number % 2:
            copied = plain.run()
            rounds.append((lane.run(), copied))
        else:
            rounds.append((lane.run(), plain.run()))
    return Measured(
        chunk_nbytes,
        str(kind),
        lane.path,
        _median([chunks for chunks, _ in rounds]),
        _median([copied for _, copied in rounds]),
        statistics.median(chunks.store / copied.store for chunks, copied in rounds),
        statistics.median(chunks.load / copied.load for chunks, copied in rounds),
    )


def _median(speeds: Sequence[Speeds]) -> Speeds:
    from tierkv.device.measure import Speeds  # noqa: PLC0415

    return Speeds(statistics.median(s.store for s in speeds), statistics.median(s.load for s in speeds))


def choose(measured: Sequence[Measured]) -> Measured:
    """The smallest chunk with nearly the best speed both ways, in the first kind of host memory that is offered.

    That is what a pool of one worker uses: the device's own if there is such memory, else registered, else staged.
    """
    mine = [one for one in measured if one.kind == measured[0].kind]
    best = [max(one.chunks[way] for one in mine) for way in range(2)]
    fast = [one for one in mine if all(one.chunks[way] >= CHUNK_PART * best[way] for way in range(2))]
    return min(fast or mine[-1:], key=lambda one: one.chunk_nbytes)


def report_of(plan: DevicePlan, measured: Sequence[Measured]) -> BenchReport:
    """What ``--json`` prints."""
    choice = choose(measured)
    settings = {} if plan.block_nbytes is None else {"blocks_per_chunk": -(-choice.chunk_nbytes // plan.block_nbytes)}
    return BenchReport(
        what="device",
        where=f"{plan.device}, {choice.kind} host memory, {choice.path}",
        tiers=[
            TierSpeed("device", one.chunk_nbytes, one.chunks.load, one.chunks.store)
            for one in measured
            if one.kind == choice.kind
        ],
        settings=settings,
        details={
            "device": plan.device,
            "page_nbytes": plan.page_nbytes,
            "size_nbytes": plan.size_nbytes,
            "n_rounds": plan.n_rounds,
            "runs": [
                {
                    "chunk_nbytes": one.chunk_nbytes,
                    "host_memory": one.kind,
                    "path": one.path,
                    "nbytes_per_s": one.chunks._asdict(),
                    "plain_nbytes_per_s": one.plain._asdict(),
                    "part_of_plain": {"store": one.store_part, "load": one.load_part},
                }
                for one in measured
            ],
        },
    )
