"""What ``tierkv tune`` is to replay: its options, checked against the trace."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from tierkv.cli._bench_report import BenchReport
from tierkv.cli._quick import parse_integer
from tierkv.cli._tune_replay import told
from tierkv.errors import ConfigError, bad_setting
from tierkv.policies.parse import parse_policy
from tierkv.settings import parse_count
from tierkv.sizes import format_size, parse_size
from tierkv.traces import Header, Trace, check_tokens_per_block, read_traces

ORDERS = "lru, mq, arc, 2q, s3fifo, fifo, lfu, sieve"
CAPACITIES = "1%, 2%, 5%, 10%, 20%, 50%"
ENGINE_TOKENS = 16
"""Of a block, where neither the trace nor the user says."""
_MOST = 64
_MOST_PROCESSES = 256
PLOTS = (".html", ".svg", ".png")


class Capacity(NamedTuple):
    """A size as it was asked for, and what it is in blocks of the trace."""

    text: str
    n_blocks: int


class Speeds(NamedTuple):
    """What was measured elsewhere; None where it was not."""

    prefill_tokens_per_s: float | None = None
    read_nbytes_per_s: float | None = None
    write_nbytes_per_s: float | None = None


class TunePlan(NamedTuple):
    """One run of ``tierkv tune``."""

    trace: Trace
    names: Sequence[str]
    policies: Sequence[str]
    capacities: Sequence[Capacity]
    memory: Capacity
    disk: Capacity | None
    """None: to be chosen among ``capacities``."""
    block_nbytes: int | None
    """Bytes of one block of the trace; None if nobody said."""
    engine_tokens: int
    """Tokens of one of the engine's own blocks."""
    speeds: Speeds
    bench: BenchReport | None
    n_processes: int
    plot: str | None

    @property
    def tokens(self) -> int:
        """Of a block of the trace."""
        return self.trace.header.tokens_per_block

    @property
    def engine_blocks(self) -> int | None:
        """Blocks of the engine in one block of the trace; None if they do not fit."""
        if self.trace.header.blocks_per_chunk is not None:
            return self.trace.header.blocks_per_chunk
        n_blocks, rest = divmod(self.tokens, self.engine_tokens)
        return n_blocks if not rest else None


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    """The options; :func:`plan_from` checks their values."""
    add = parser.add_argument
    add(
        "trace",
        metavar="TRACE",
        nargs="+",
        help="JSON lines, one request each; several files follow each other, - is standard input",
    )
    add(
        "--policies", metavar="ORDERS", default=ORDERS, help=f"as in eviction_policy, commas between (default {ORDERS})"
    )
    add("--capacities", metavar="SIZES", default=CAPACITIES,
        help="percent of the trace's different blocks, or sizes (default %(default)s)")  # fmt: skip
    add("--memory", metavar="SIZE", default="5%", help="host memory, for two tiers and the advice (default 5%%)")
    add("--disk", metavar="SIZE", help="the disk below it (default: what reaches nine tenths of an endless cache)")
    add("--token-size", metavar="SIZE", help="bytes of KV cache a token, over all workers (default: the trace's)")
    add("--tokens-per-block", metavar="N", help="tokens of a block of the trace (default: what it says, or 512)")
    add("--engine-block", metavar="N", help="tokens of a block of the engine (default: the trace's, or 16)")
    add("--prefill", metavar="N", help="prompt tokens that the engine computes in a second")
    add("--read", metavar="SIZE", help="bytes that the disk reads in a second")
    add("--write", metavar="SIZE", help="bytes that the disk writes in a second")
    add("--bench", metavar="FILE", help="what tierkv bench fs --json wrote, instead of --read and --write")
    add("--jobs", metavar="N", help="processes (default: one a core)")
    add("--json", action="store_true", help="print the results as JSON and nothing else")
    add("--plot", metavar="FILE", help="draw miss-ratio curves: .html or .svg, or .png with the extra plot")


def plan_from(arguments: argparse.Namespace) -> TunePlan:
    """Check the options and read the trace. Raises ConfigError."""
    policies = _policies(arguments.policies)
    n_processes = len(os.sched_getaffinity(0))
    if arguments.jobs is not None:
        n_processes = parse_count("--jobs", parse_integer(arguments.jobs), 1, _MOST_PROCESSES)
    tokens = arguments.tokens_per_block
    if tokens is not None:
        tokens = check_tokens_per_block("--tokens-per-block", parse_integer(tokens))
    token_nbytes = None if arguments.token_size is None else parse_size("--token-size", arguments.token_size)
    bench = None if arguments.bench is None else _bench(arguments.bench)
    speeds = Speeds(
        _rate("--prefill", arguments.prefill), _speed("--read", arguments.read), _speed("--write", arguments.write)
    )
    if arguments.plot is not None:
        _check_plot(arguments.plot)
    trace = read_traces("TRACE", [sys.stdin.buffer if name == "-" else name for name in arguments.trace], tokens)
    block_nbytes = trace.header.block_nbytes if token_nbytes is None else token_nbytes * trace.header.tokens_per_block

    def capacity(option: str, text: str) -> Capacity:
        return _capacity(option, text.strip(), trace, block_nbytes)

    memory = capacity("--memory", arguments.memory)
    disk = None if arguments.disk is None else capacity("--disk", arguments.disk)
    asked = [capacity("--capacities", text) for text in _split("--capacities", arguments.capacities)]
    engine_tokens = _engine_tokens(arguments.engine_block, trace.header)
    return TunePlan(
        trace, arguments.trace, policies, sorted({each.n_blocks: each for each in asked}.values(), key=lambda c: c[1]),
        memory, disk, block_nbytes, engine_tokens, speeds, bench, n_processes, arguments.plot,
    )  # fmt: skip


def _policies(text: str) -> list[str]:
    policies = list(dict.fromkeys(_split("--policies", text)))
    for policy in policies:
        parse_policy("--policies", told(policy, 1), clock=lambda: 0.0)
    return policies


def _split(option: str, text: str) -> list[str]:
    """Parts between commas that stand in no brackets and no quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if character in {'"', "'"} and quote in {"", character}:
            quote = "" if quote else character
        depth += 0 if quote else (character == "(") - (character == ")")
        if character == "," and not quote and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    if len(parts) > _MOST:
        raise bad_setting(option, text[:40] + "...", f"at most {_MOST} values")
    return [part.strip() for part in parts]


def _capacity(option: str, text: str, trace: Trace, block_nbytes: int | None) -> Capacity:
    """A part of the trace's different blocks, rounded down, or a size in bytes; at most what they all take."""
    n_unique = trace.n_unique
    if text.endswith("%"):
        try:
            percent = Fraction(text[:-1].strip()) if len(text) < 32 and "e" not in text.lower() else Fraction(0)
        except (ValueError, ZeroDivisionError):
            percent = Fraction(0)
        if not 0 < percent <= 100:
            near = "100%" if percent > 100 else None
            raise bad_setting(option, text, "a size, or a percentage above 0% and up to 100%", near, example="5%")
        n_blocks = int(n_unique * percent / 100)
    else:
        nbytes = parse_size(option, text)
        if block_nbytes is None:
            allowed = "a percentage of the trace's blocks, as long as --token-size does not say what a token takes"
            raise bad_setting(option, text, allowed, example="5%")
        n_blocks = nbytes // block_nbytes
    if n_blocks < 1:
        least = f"{Fraction(100, n_unique).__ceil__()}%" if block_nbytes is None else format_size(block_nbytes)
        raise bad_setting(option, text, f"room for one of the trace's {n_unique:,} blocks", least)
    return Capacity(text, min(n_blocks, n_unique))  # more would stay empty


def _check_plot(path: str) -> None:
    if not path.endswith(PLOTS):
        raise bad_setting(
            "--plot", path, f"a file that ends in one of {', '.join(PLOTS)}", f"{os.path.splitext(path)[0]}.html"
        )
    if path.endswith(".png") and importlib.util.find_spec("matplotlib") is None:
        allowed = "a file that ends in .html or .svg, as long as matplotlib is not installed (the extra plot brings it)"
        raise bad_setting("--plot", path, allowed, f"{path[:-4]}.html")

    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.access(folder, os.W_OK):
        raise ConfigError(f"--plot is {path!r}, but must be a file in a directory that can be written to")


def _bench(path: str) -> BenchReport:
    bench = BenchReport.load("--bench", path)
    if bench.what != "fs":
        raise bad_setting("--bench", path, f"what tierkv bench fs --json wrote, not bench {bench.what}")
    return bench


def _rate(option: str, text: str | None) -> float | None:
    """Tokens a second."""
    if text is None:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise bad_setting(option, text, "a number of prompt tokens a second, over 0", example="12000")
    return rate


def _speed(option: str, text: str | None) -> float | None:
    """Bytes a second."""
    if text is None:
        return None
    try:
        return float(parse_size(option, text.removesuffix("/s")))
    except ConfigError:
        raise bad_setting(option, text, "what the disk moves in a second, over 0", example="2GiB") from None


def _engine_tokens(text: str | None, header: Header) -> int:
    """Tokens of a block of the engine: what was typed, if the trace's blocks are whole ones of it; else what it says.

    Where neither says anything the trace's blocks may be no multiple of it; then no advice hangs on it.
    """
    tokens, n_blocks = header.tokens_per_block, header.blocks_per_chunk
    known = None if not n_blocks or tokens % n_blocks else tokens // n_blocks
    if text is None:
        return known or ENGINE_TOKENS
    given = parse_count("--engine-block", parse_integer(text), 1, 1 << 20)
    if known not in (None, given):
        raise bad_setting("--engine-block", given, f"left out, or {known}: the trace says so itself", known)
    if tokens % given:
        nearest = min((n for n in range(1, tokens + 1) if not tokens % n), key=lambda n: abs(n - given))
        raise bad_setting("--engine-block", given, f"a divisor of the trace's {tokens:,} tokens a block", nearest)
    return given
