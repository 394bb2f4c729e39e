"""How long the manager's part of a scheduler step takes: alone, beside a busy fs tier, beside a busy process.

``python -m tests.bench.step_time DIRECTORY`` prints p50, p99 and the longest step of three runs of the same steps: with
host memory only; with an fs tier that every store keeps saturated; and with host memory only while another process does
what the second run does. The directory should lie on a disk.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import LookupResult

from tests.bench.pairs import Row, alternate
from tests.vllm.manager_kit import STEP, Kit, keys_of
from tierkv.vllm._control import Direction

CHUNK_NBYTES = 256 << 10
N_SLOTS = 768
N_STORED = 16
"""Chunks that one step stores: 4 MiB, some 600 MiB a second at the usual 6 ms a step."""
N_LOADED = 512
"""Chunks that one step looks up and loads, the same ones in every step: they stay in host memory."""
STEP_S = 0.006


def one_step(kit: Kit, n: int, resident: list[Any]) -> float:
    """Seconds that the manager took; the worker's copies are stamped, not made."""
    manager, keys = kit.manager, keys_of(f"step {n}", N_STORED)
    asker, storer = kit.request(resident), kit.request(keys)
    start = time.perf_counter()
    answers = [manager.lookup(key, asker) for key in resident]
    manager.prepare_load(resident, asker)
    manager.on_schedule_end(STEP)
    output = manager.prepare_store(keys, storer)
    spent = time.perf_counter() - start
    assert set(answers) == {LookupResult.HIT}, "the step does the same on both sides: it loads what is resident"
    page, spec = manager._page(), output.store_spec
    page.stamp_many(0, Direction.STORE, spec.slots, spec.tickets, ok=True)
    done = set(output.keys_to_store)
    start = time.perf_counter()
    manager.complete_load(resident, asker)
    manager.complete_store(done, storer)
    manager.on_request_finished(storer)
    manager.on_request_finished(asker)
    return spent + time.perf_counter() - start


def run(tiers: list[dict[str, Any]], n_steps: int, ready: Path | None = None) -> list[float]:
    kit = Kit(N_SLOTS, tiers, page_nbytes=CHUNK_NBYTES)
    try:
        if tiers:
            kit.until(lambda: kit.hierarchy.levels[1].serves)
        resident = keys_of("resident", N_LOADED)
        for i in range(0, N_LOADED, N_STORED):
            keys = resident[i : i + N_STORED]
            context = kit.request(resident)
            output = kit.offer(keys, context)
            spec = output.store_spec
            kit.manager._page().stamp_many(0, Direction.STORE, spec.slots, spec.tickets, ok=True)
            kit.manager.complete_store(set(output.keys_to_store), context)
        if ready is not None:
            ready.touch()
        spent = []
        for n in range(n_steps):
            began = time.perf_counter()
            spent.append(one_step(kit, n, resident))
            time.sleep(max(0.0, began + STEP_S - time.perf_counter()))
        return sorted(spent)
    finally:
        kit.close()


def p99_ms(spent: list[float]) -> float:
    return spent[int(len(spent) * 0.99)] * 1e3


def rows(folder: Path, n_pairs: int, n_steps: int = 300) -> Iterator[Row]:
    """The 99th percentile beside our own saturated fs tier, and beside the same load in another process, by turns."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        tier = fs_tier(made)
        with neighbour(made) as process:
            process.send_signal(signal.SIGSTOP)

            def own() -> float:
                return p99_ms(run([tier], n_steps))

            def other() -> float:
                process.send_signal(signal.SIGCONT)
                try:
                    return p99_ms(run([], n_steps))
                finally:
                    process.send_signal(signal.SIGSTOP)

            ours, theirs = alternate(own, other, n_pairs)
    what = "step p99, beside our own saturated fs tier"
    # Ours may be twice as long, so as "times as good" half.
    yield Row("steps", what, "ms", ours, theirs, "beside another process", higher_is_better=False, must=0.5)


def fs_tier(folder: str) -> dict[str, Any]:
    return {"type": "fs", "root_dir": f"{folder}/root", "capacity": "1GiB"}


@contextlib.contextmanager
def neighbour(folder: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that does to the disk what our own fs tier would."""
    ready = Path(folder) / "ready"
    ready.unlink(missing_ok=True)
    environment = os.environ | {"TIERKV_BENCH_NEIGHBOUR": str(ready)}
    command = [sys.executable, "-m", "tests.bench.step_time", folder]
    with subprocess.Popen(command, env=environment) as process:
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise RuntimeError("the neighbour ended")
                time.sleep(0.1)
            yield process
        finally:
            process.kill()


def main() -> None:
    where = Path(sys.argv[1])
    n_steps = int(sys.argv[2]) if len(sys.argv) > 2 else 1500
    with tempfile.TemporaryDirectory(dir=where, ignore_cleanup_errors=True) as folder:
        if os.environ.get("TIERKV_BENCH_NEIGHBOUR"):
            run([fs_tier(folder)], 10**9, Path(os.environ["TIERKV_BENCH_NEIGHBOUR"]))
        print(f"{n_steps} steps of {N_LOADED} chunks loaded and {N_STORED} stored, each of {CHUNK_NBYTES >> 10} KiB")
        report("host memory alone", run([], n_steps))
        report("beside its own fs tier", run([fs_tier(folder)], n_steps))
        with neighbour(folder):
            report("beside another process", run([], n_steps))


def report(what: str, spent: list[float]) -> None:
    p50, p99, longest = (spent[int(len(spent) * q)] * 1e3 for q in (0.5, 0.99, 0.9999))
    print(f"{what:>24}: p50 {p50:6.2f} ms   p99 {p99:6.2f} ms   longest {longest:6.2f} ms")


if __name__ == "__main__":
    main()
