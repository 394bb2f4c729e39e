"""``tierkv bench``: its options, and the run of a plan to its report."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

from tierkv.cli._bench_plan import Choice, FSPlan, Measured, choose, speeds_with
from tierkv.cli._bench_report import BenchReport
from tierkv.cli._quick import add_options, given, parse_integer
from tierkv.errors import bad_setting, closest
from tierkv.settings import parse_count
from tierkv.sizes import format_size, parse_size

FS_DESCRIPTION = """\
Stores and loads chunks through the fs tier in a directory of its own under DIR, for each size of a chunk and number of
threads, and beside it plain files in pieces of the same size: with O_DIRECT and through the page cache. Ends in the
values to set in vLLM's JSON. Stop whatever else uses the disk. What it writes is removed, also after Ctrl-C; what a
killed run left behind is removed by the next."""

PAGE_NBYTES = 4096
_MOST_SIZES = 16

# Option: what it takes, its default, its default with --quick, what it is.
_FS_OPTIONS = {
    "chunks": ("SIZES", "64KiB,256KiB,1MiB,8MiB", "64KiB,1MiB", "sizes of a chunk, multiples of 4 KiB"),
    "threads": ("COUNTS", "1,4,16", "1,4", "values of n_read_threads and n_write_threads"),
    "size": ("SIZE", "128MiB", "16MiB", "bytes of each measurement: the most that lies in DIR at a time"),
    "layout": ("LAYOUT", "auto", "auto", "how the tier lays chunks on the disk: auto, slab or files"),
    "rounds": ("N", "3", "1", "measurements of each kind; medians are shown"),
}


def add_fs_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bench fs``; :func:`fs_plan_from` checks their values."""
    parser.add_argument("dir", metavar="DIR", help="a directory on the disk in question, such as the tier's root_dir")
    add_options(parser, _FS_OPTIONS)
    parser.add_argument(
        "--block", metavar="SIZE", help="bytes of one KV block in all layers, to end in blocks_per_chunk"
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds: tells orders of magnitude apart, no more")
    parser.add_argument("--json", action="store_true", help="the report as JSON, which tierkv tune --bench reads")


def fs_plan_from(arguments: argparse.Namespace) -> FSPlan:
    """Check the options. Raises ConfigError; nothing is created here."""
    from tierkv.cli._bench_fs import check_room  # noqa: PLC0415 - needs the extra fs, as does the run

    typed = given(arguments, _FS_OPTIONS)
    plan = FSPlan(
        root=arguments.dir,
        chunks_nbytes=parse_sizes("--chunks", typed["chunks"]),
        threads=_counts("--threads", typed["threads"]),
        size_nbytes=parse_size("--size", typed["size"], low=PAGE_NBYTES),
        layout=_layout(typed["layout"]),
        n_rounds=parse_count("--rounds", parse_integer(typed["rounds"]), 1, 1_000),
        block_nbytes=None if arguments.block is None else parse_size("--block", arguments.block),
    )
    largest_nbytes = max(plan.chunks_nbytes)
    if plan.size_nbytes < largest_nbytes:
        raise bad_setting("--size", typed["size"], "at least the largest of --chunks", format_size(largest_nbytes))
    check_room(plan)
    return plan


def run_fs(arguments: argparse.Namespace) -> int:
    """The whole of ``bench fs``; returns the exit code."""
    from tierkv.cli._bench_fs import measure  # noqa: PLC0415 - needs the extra fs
    from tierkv.cli._bench_view import FSView  # noqa: PLC0415 - rich is an extra

    plan = fs_plan_from(arguments)
    with FSView(plan, quiet=arguments.json) as view:
        measured = measure(plan, view.step, view.measured)
    report = fs_report(plan, measured)
    if arguments.json:
        print(report.to_json(), end="")
    else:
        view.advice(measured, choose(measured), json.dumps(report.settings, indent=4))
    return 0


def fs_report(plan: FSPlan, measured: Sequence[Measured]) -> BenchReport:
    """What ``--json`` prints."""
    choice = choose(measured)
    return BenchReport(
        what="fs",
        where=os.path.abspath(plan.root),
        tiers=speeds_with(measured, choice),
        settings=settings_of(plan, choice),
        details={
            "size_nbytes": plan.size_nbytes,
            "layout": plan.layout,
            "n_rounds": plan.n_rounds,
            "direct": measured[0].direct is not None,
            "runs": [
                {
                    "chunk_nbytes": one.cell.chunk_nbytes,
                    "n_threads": one.cell.n_threads,
                    "tier_nbytes_per_s": one.tier._asdict(),
                    "direct_nbytes_per_s": None if one.direct is None else one.direct._asdict(),
                    "buffered_nbytes_per_s": one.buffered._asdict(),
                    "part_of_plain": {"write": one.write_part, "read": one.read_part},
                }
                for one in measured
            ],
        },
    )


def settings_of(plan: FSPlan, choice: Choice) -> dict[str, object]:
    """What to set in vLLM's ``kv_connector_extra_config``."""
    tier: dict[str, object] = {
        "type": "fs",
        "root_dir": os.path.abspath(plan.root),  # an engine starts somewhere else
        "n_read_threads": choice.n_read_threads,
        "n_write_threads": choice.n_write_threads,
    }
    if plan.layout != "auto":
        tier["layout"] = plan.layout
    if plan.block_nbytes is None:
        return {"secondary_tiers": [tier]}
    return {"blocks_per_chunk": -(-choice.chunk_nbytes // plan.block_nbytes), "secondary_tiers": [tier]}


def parse_sizes(option: str, text: str) -> tuple[int, ...]:
    """Sizes with commas between them, smallest first, each once. Raises ConfigError."""
    sizes = sorted({parse_size(option, part, low=PAGE_NBYTES) for part in _parts(option, text)})
    for size in sizes:
        if size % PAGE_NBYTES:
            nearest = format_size(round(size / PAGE_NBYTES) * PAGE_NBYTES)
            raise bad_setting(option, format_size(size), "multiples of 4 KiB, as direct I/O needs", nearest)
    return tuple(sizes)


def _counts(option: str, text: str) -> tuple[int, ...]:
    return tuple(sorted({parse_count(option, parse_integer(part), 1, 256) for part in _parts(option, text)}))


def _layout(text: str) -> str:
    from tierkv.tiers._fs.wishes import LAYOUTS  # noqa: PLC0415 - needs the extra fs

    if text not in LAYOUTS:
        raise bad_setting("--layout", text, f"one of {', '.join(LAYOUTS)}", closest(text, LAYOUTS))
    return text


def _parts(option: str, text: str) -> list[str]:
    parts = text.split(",")
    if len(parts) > _MOST_SIZES:
        raise bad_setting(option, text, f"at most {_MOST_SIZES} values", ",".join(parts[:_MOST_SIZES]))
    return parts
