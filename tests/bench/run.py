"""All benches with one command, each in a process of its own with a deadline, into one JSON file.

``python -m tests.bench.run OUT.json [--dir DIR] [--tmpfs DIR] [--only PART...] [--quick]``: at most 25 minutes. A part
that fails or runs out of time keeps the rows it had and says so. :mod:`tests.bench.report` makes a page of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.pairs import Row, as_json, load, machine, table


class Part(NamedTuple):
    """One bench: how long it may take, and its rows."""

    most_s: float
    rows: Callable[[argparse.Namespace], Iterator[Row]]


def _device(options: argparse.Namespace) -> Iterator[Row]:
    from tests.bench import device

    return device.run(3 if options.quick else 7)


def _scheduler(options: argparse.Namespace) -> Iterator[Row]:
    from tests.bench import scheduler

    return scheduler.run(options.dir, (10_000,) if options.quick else scheduler.SIZES, 3 if options.quick else 7)


def _steps(options: argparse.Namespace) -> Iterator[Row]:
    from tests.bench import step_time

    return step_time.rows(options.dir, 3 if options.quick else 7)


def _disk(options: argparse.Namespace) -> Iterator[Row]:
    from tests.bench import disk

    folders = [options.dir, *([options.tmpfs] if options.tmpfs else [])]
    return disk.run(folders, 3 if options.quick else 7, (16 if options.quick else 64) * disk.MIB)


def _engine(options: argparse.Namespace) -> Iterator[Row]:
    from tests.bench import engines

    return engines.run(options.dir, engines.QUICK if options.quick else engines.Plan())


def _index(options: argparse.Namespace) -> Iterator[Row]:
    from tests.bench import index

    return index.run(options.dir, (10_000,) if options.quick else index.SIZES)


SHM = Path("/dev/shm")
POOLS = "vllm_offload_*.mmap"
PARTS = {
    "device": Part(90, _device),
    "scheduler": Part(250, _scheduler),
    "steps": Part(130, _steps),
    "disk": Part(250, _disk),
    "engine": Part(520, _engine),
    "index": Part(420, _index),
}


def main() -> None:
    options = _options()
    if options.inside:
        for row in PARTS[options.inside].rows(options):
            print("@@" + json.dumps(as_json(row)), flush=True)
        return
    report: dict[str, Any] = {"machine": machine(), "quick": options.quick, "parts": {}}
    for name in options.only or PARTS:
        report["parts"][name] = _run(name, options)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwritten to {options.out}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Paired comparisons; see CONTRIBUTING.md.")
    parser.add_argument("out", type=Path, help="where the JSON goes")
    parser.add_argument(
        "--dir", type=Path, default=Path.cwd(), help="a directory on a disk; everything is removed again"
    )
    parser.add_argument(
        "--tmpfs", type=Path, default=SHM if SHM.is_dir() else None, help="a directory on a tmpfs, for the disk bench"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts only")
    parser.add_argument("--quick", action="store_true", help="small sizes and three pairs: to see that it runs")
    parser.add_argument("--inside", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.dir = options.dir.resolve()
    return options


def _run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One part, its rows printed as they come."""
    before, began = load(), time.monotonic()
    print(f"\n{name} (load {before}, at most {PARTS[name].most_s:.0f} s)", flush=True)
    rows: list[dict[str, Any]] = []
    pools = set(SHM.glob(POOLS))
    log = options.out.with_suffix(f".{name}.log")
    with log.open("wb") as errors, contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "tests.bench.run", *sys.argv[1:], "--inside", name]
        for option, folder in (("--dir", options.dir), ("--tmpfs", options.tmpfs)):
            if folder is not None:  # a directory of ours in it: a part that is killed leaves nothing behind
                made = tempfile.TemporaryDirectory(prefix="tierkv-bench-", dir=folder, ignore_cleanup_errors=True)
                command += [option, stack.enter_context(made)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
        watch = threading.Timer(PARTS[name].most_s, _end, [process])
        watch.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("@@"):
                rows.append(json.loads(line[2:]))
                print(table([Row(**rows[-1])]), flush=True)
        code = process.wait()
        watch.cancel()
        _sweep(pools)
        process.stdout.close()
    took_s = round(time.monotonic() - began, 1)
    ended = "whole" if code == 0 else f"ended early ({'out of time' if code == -signal.SIGKILL else f'exit {code}'})"
    if code == 0:
        log.unlink()
    else:
        print(f"{name} {ended}: see {log}", flush=True)
    return {"load_before": before, "load_after": load(), "took_s": took_s, "ended": ended, "rows": rows}


def _sweep(before: set[Path]) -> None:
    """Pools of vLLM outlive a kill: those that have come since and that nobody has mapped go."""
    for pool in set(SHM.glob(POOLS)) - before:
        mapped = any(pool.name in _read(maps) for maps in Path("/proc").glob("[0-9]*/maps"))
        if not mapped:
            pool.unlink(missing_ok=True)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended, or is another user's
        return ""


def _end(process: subprocess.Popen[str]) -> None:
    """The part and the engines that it started."""
    os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
