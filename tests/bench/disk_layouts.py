"""Slab, files, vLLM's fs tier and the plain disk, in turns in one process: stores and loads by chunk size.

By hand, in an environment with vLLM (without it that side is left out)::

    python -m tests.bench.disk_layouts DIRECTORY [--pairs 9] [--size 128MiB] [--chunks 64KiB,1MiB] [--json FILE]

Each round runs every side once, in an order that turns; a figure is the median over rounds of the ratio to a peer in
the same round, with its quartiles. All sides move the same bytes with as many threads, through O_DIRECT where the
directory has it, and ours with checksums on. Slots are written over, as in a cache that is full: before the first round
each side has stored everything once, and deletes it before it stores again; deleting is not timed on any side.

What would refute it: a directory on another file system or disk, more cores (vLLM's calls hold no GIL), another process
on the disk. The load of the machine is printed beside the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol

from tierkv.protocols import TierContext
from tierkv.sizes import format_size, parse_size
from tierkv.tiers.fs import FSTier
from tierkv.types import Chunk, ChunkKey

PAGE = 4096


class Side(Protocol):
    """One way to keep chunks on a disk."""

    name: str

    def store(self) -> None: ...

    def load(self) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


class Plan:
    """What every side moves: ``n`` chunks out of one mapping and into another."""

    def __init__(self, nbytes: int, size_nbytes: int, n_threads: int) -> None:
        self.nbytes = nbytes
        self.n = max(n_threads, size_nbytes // nbytes)
        self.n_threads = n_threads
        self.source = memoryview(mmap.mmap(-1, self.n * nbytes))
        self.source[:] = os.urandom(nbytes) * self.n
        for i in range(self.n):  # no two alike
            self.source[i * nbytes : i * nbytes + 8] = i.to_bytes(8, "little")
        self.target = memoryview(mmap.mmap(-1, self.n * nbytes))
        self.target[:] = bytes(self.n * nbytes)  # faulted in

    def slot(self, memory: memoryview, i: int) -> memoryview:
        return memory[i * self.nbytes : (i + 1) * self.nbytes]

    def check(self) -> None:
        assert self.target == self.source, "not what was stored"


class Ours:
    """FSTier in one of its layouts, through its own asyncio interface."""

    def __init__(self, root: Path, plan: Plan, layout: Literal["files", "slab"]) -> None:
        self.name: str = layout
        self._plan = plan
        self._loop = asyncio.new_event_loop()
        self._chunks = [Chunk(ChunkKey(b"%032d" % i), nbytes=plan.nbytes) for i in range(plan.n)]
        self._writes = [(chunk, plan.slot(plan.source, i)) for i, chunk in enumerate(self._chunks)]
        self._reads = [(chunk.key, plan.slot(plan.target, i)) for i, chunk in enumerate(self._chunks)]
        n = plan.n_threads
        self._tier = FSTier(root / layout, n_read_threads=n, n_write_threads=n, min_free=0, layout=layout)
        capacity_nbytes = 2 * plan.n * (plan.nbytes + PAGE) + (64 << 20)
        self._run(self._tier.open(TierContext(plan.nbytes, plan.nbytes, b"bench", capacity_nbytes)))
        while not self._tier.writable:
            time.sleep(0.01)

    def store(self) -> None:
        assert all(outcome.ok for outcome in self._run(self._tier.write(self._writes)))

    def load(self) -> None:
        assert all(outcome.ok for outcome in self._run(self._tier.read(self._reads)))

    def clear(self) -> None:
        self._run(self._tier.delete([chunk.key for chunk in self._chunks]))

    def close(self) -> None:
        self._run(self._tier.aclose())
        self._loop.close()

    def _run(self, call: Any) -> Any:
        return self._loop.run_until_complete(call)


class InThreads:
    """A batch cut into one part a thread: how vLLM's tier and the plain disk are driven."""

    def __init__(self, root: Path, plan: Plan) -> None:
        self._root = root
        self._plan = plan
        self._pool = ThreadPoolExecutor(plan.n_threads)

    def in_parts(self, work: Callable[[Sequence[int]], None]) -> None:
        n = self._plan.n_threads
        parts = [range(at, self._plan.n, n) for at in range(n)]
        for future in [self._pool.submit(work, part) for part in parts]:
            future.result()

    def close(self) -> None:
        self._pool.shutdown()


class VLLM(InThreads):
    """The calls of vLLM's fs tier: its C batch functions, a file a chunk, no checksum."""

    name = "vllm"

    def __init__(self, root: Path, plan: Plan) -> None:
        super().__init__(root / "vllm", plan)
        from vllm.v1.kv_offload.tiering.fs import io

        assert io._HAS_FSIO_C, "vLLM without its C functions is not what it ships"
        self._io = io
        self._root.mkdir()
        self._direct = io.probe_o_direct(str(self._root))
        self._paths = []
        for i in range(plan.n):  # three and two hex digits, as vLLM's file mapper has them
            folder = self._root / f"{i * 2654435761 % 4096:03x}" / f"{i * 40503 % 256:02x}"
            folder.mkdir(parents=True, exist_ok=True)
            self._paths.append(str(folder / f"{i:064x}.bin"))

    def store(self) -> None:
        self.in_parts(lambda part: self._call(self._io.batch_store_block, part, self._plan.source))

    def load(self) -> None:
        self.in_parts(lambda part: self._call(self._io.batch_load_block, part, self._plan.target))

    def clear(self) -> None:
        for path in self._paths:
            os.unlink(path)

    def _call(self, function: Any, part: Sequence[int], memory: memoryview) -> None:
        nbytes = self._plan.nbytes
        function([self._paths[i] for i in part], memory, [i * nbytes for i in part], nbytes, self._direct)


class Plain(InThreads):
    """One preallocated file, a call a chunk, nothing else: what the disk gives."""

    name = "plain"

    def __init__(self, root: Path, plan: Plan) -> None:
        super().__init__(root, plan)
        flags = os.O_RDWR | os.O_CREAT
        try:
            self._fd = os.open(root / "plain", flags | os.O_DIRECT, 0o600)
        except OSError:
            self._fd = os.open(root / "plain", flags, 0o600)
        os.posix_fallocate(self._fd, 0, plan.n * plan.nbytes)

    def store(self) -> None:
        self.in_parts(lambda part: self._each(os.pwritev, part, self._plan.source))

    def load(self) -> None:
        self.in_parts(lambda part: self._each(os.preadv, part, self._plan.target))

    def clear(self) -> None:
        pass

    def close(self) -> None:
        super().close()
        os.close(self._fd)

    def _each(self, call: Any, part: Sequence[int], memory: memoryview) -> None:
        for i in part:
            assert call(self._fd, [self._plan.slot(memory, i)], i * self._plan.nbytes) == self._plan.nbytes


def timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(root: Path, plan: Plan, n_pairs: int, *, with_vllm: bool) -> dict[str, dict[str, list[float]]]:
    """Seconds by direction, side and round."""
    sides: list[Side] = [Ours(root, plan, "slab"), Ours(root, plan, "files"), Plain(root, plan)]
    if with_vllm:
        sides.append(VLLM(root, plan))
    seconds: dict[str, dict[str, list[float]]] = {way: {side.name: [] for side in sides} for way in ("store", "load")}
    try:
        for side in sides:
            side.store()
        for round_ in range(n_pairs):
            turn = round_ % len(sides)
            order = sides[turn:] + sides[:turn]
            for side in order:
                side.clear()
                seconds["store"][side.name].append(timed(side.store))
            for side in order:
                plan.target[:8] = bytes(8)
                seconds["load"][side.name].append(timed(side.load))
                plan.check()
    finally:
        for side in sides:
            side.close()
    return seconds


def ratios(seconds: dict[str, list[float]], one: str, other: str) -> list[float]:
    """How much faster ``one`` is, round by round."""
    return [theirs / ours for ours, theirs in zip(seconds[one], seconds[other], strict=True)]


def line(way: str, plan: Plan, seconds: dict[str, list[float]]) -> dict[str, Any]:
    record: dict[str, Any] = {"way": way, "chunk_nbytes": plan.nbytes, "n_threads": plan.n_threads}
    total = plan.n * plan.nbytes
    record["gb_per_s"] = {name: total / statistics.median(times) / 1e9 for name, times in seconds.items()}
    for one, other in (("slab", "vllm"), ("files", "vllm"), ("slab", "plain"), ("slab", "files")):
        if one in seconds and other in seconds:
            low, middle, high = statistics.quantiles(ratios(seconds, one, other), n=4)
            record[f"{one}:{other}"] = [round(x, 2) for x in (low, middle, high)]
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--size", default="128MiB")
    parser.add_argument("--chunks", default="64KiB,256KiB,1MiB,8MiB")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        import vllm  # noqa: F401 - is it here?
    except ImportError:
        with_vllm = False
    else:
        with_vllm = True
    records = []
    for chunk in options.chunks.split(","):
        plan = Plan(parse_size("--chunks", chunk), parse_size("--size", options.size), options.threads)
        root = Path(tempfile.mkdtemp(prefix="tierkv-layouts-", dir=options.directory))
        try:
            seconds = measure(root, plan, options.pairs, with_vllm=with_vllm)
        finally:
            shutil.rmtree(root)
        for way in ("store", "load"):
            record = line(way, plan, seconds[way])
            record["load_average"] = os.getloadavg()[0]
            records.append(record)
            speeds = "  ".join(f"{name} {speed:.2f}" for name, speed in record["gb_per_s"].items())
            pairs = "  ".join(f"{name} {value}" for name, value in record.items() if ":" in name)
            sys.stdout.write(
                f"{way:5} {format_size(plan.nbytes):>8}  {speeds} GB/s  {pairs}  load {os.getloadavg()[0]:.1f}\n"
            )
            sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
