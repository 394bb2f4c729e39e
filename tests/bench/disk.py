"""Our fs tier against vLLM's, which hands batches to C: the same bytes and as many threads, by turns.

``python -m tests.bench.disk DIRECTORY...`` prints a table for each directory. Ours writes a header and a checksum and
verifies it on load; vLLM's does neither. Both use O_DIRECT where the directory takes it, so there nothing is read from
the page cache; where it does not, what was just written is read back warm. Each round writes new keys into a root that
is already there and removes them again: a cache at work, not an empty disk. Wall time: threads wait for the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import mmap
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tests.bench.pairs import N_PAIRS, Row, table
from tierkv import Chunk, ChunkKey
from tierkv.cli._bench_fs import works_direct
from tierkv.protocols import TierContext
from tierkv.tiers.fs import FSTier

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, 256 * KIB, MIB, 8 * MIB)
TOTAL_NBYTES = 64 * MIB
N_THREADS = 4
N_JOBS = 8
"""The bytes of a round come in as many calls at once, as from as many requests."""

MUST_STORE = {  # (layout, on tmpfs) -> by size
    ("slab", False): (3.0, 2.0, 1.5, 1.5),
    ("slab", True): (1.5, 1.2, 1.0, 1.0),
    ("files", False): (0.9, 0.9, 0.9, 0.9),
}
MUST_LOAD = {
    ("slab", False): (1.0, 1.0, 1.0, 1.0),
    ("slab", True): (0.95, 0.95, 0.87, 0.80),
    ("files", False): (None, None, 1.0, 1.0),
}
MUST_DIRECT = 0.9


class Side(Protocol):
    """One tier on a root of its own; each call moves all of the memory."""

    def store(self) -> None: ...

    def load(self) -> None: ...

    def forget(self) -> None:
        """Remove what was stored, untimed."""
        ...

    def close(self) -> None: ...


class Ours:
    def __init__(self, root: Path, memory: memoryview, chunk_nbytes: int, layout: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._nbytes = chunk_nbytes
        self._views = [memory[at : at + chunk_nbytes] for at in range(0, len(memory), chunk_nbytes)]
        chosen: dict[str, Any] = {"layout": layout} if layout in layouts() else {}
        self._tier = FSTier(root, n_read_threads=N_THREADS, n_write_threads=N_THREADS, min_free=0, **chosen)
        capacity_nbytes = 2 * len(self._views) * self._tier.charge_nbytes(chunk_nbytes) + 64 * MIB
        self._run(self._tier.open(TierContext(chunk_nbytes, chunk_nbytes, b"bench", capacity_nbytes)))
        self._run(self._until_writable())
        self._items: list[tuple[Chunk, memoryview]] = []

    async def _until_writable(self) -> None:
        async with asyncio.timeout(60):
            while not self._tier.writable:  # noqa: ASYNC110 - the scan of an empty directory has no event
                await asyncio.sleep(0.001)

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    def store(self) -> None:
        self._items = [(Chunk(ChunkKey(secrets.token_bytes(32)), nbytes=self._nbytes), view) for view in self._views]
        self._run(self._all(self._tier.write, self._items))

    def load(self) -> None:
        self._run(self._all(self._tier.read, [(chunk.key, view) for chunk, view in self._items]))

    @staticmethod
    async def _all(call: Callable[[Any], Any], items: Sequence[Any]) -> None:
        for outcomes in await asyncio.gather(*map(call, _jobs(items))):
            assert all(outcome.ok for outcome in outcomes), outcomes

    def forget(self) -> None:
        self._run(self._tier.delete([chunk.key for chunk, _ in self._items]))

    def close(self) -> None:
        self._run(self._tier.aclose())
        self._loop.close()


class Theirs:
    """vLLM's FileSystemTierManager. All its threads take stores and loads alike, so it gets as many in all."""

    def __init__(self, root: Path, memory: memoryview, chunk_nbytes: int) -> None:
        from tests.vllm.ready import import_vllm

        import_vllm()
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        from tests.vllm.manager_kit import offloading_config

        n_chunks = len(memory) // chunk_nbytes
        config = offloading_config({"cpu_bytes_to_use": len(memory)}, page_nbytes=chunk_nbytes)
        rows: Any = np.frombuffer(memory, np.int8).reshape(n_chunks, chunk_nbytes)
        half = max(1, N_THREADS // 2)
        self._tier = FileSystemTierManager(
            TieringOffloadingSpec(config), memoryview(rows), "fs", str(root), n_read_threads=half, n_write_threads=half
        )
        self._root = root
        self._ids = list(range(n_chunks))
        self._keys: list[Any] = []
        self._n_jobs = 0

    def store(self) -> None:
        from vllm.v1.kv_offload.base import make_offload_key

        self._keys = [make_offload_key(secrets.token_bytes(32), 0) for _ in self._ids]
        self._all(self._tier.submit_store, promotes=False)

    def load(self) -> None:
        self._all(self._tier.submit_load, promotes=True)

    def _all(self, submit: Callable[[Any], None], *, promotes: bool) -> None:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        for pairs in _jobs(list(zip(self._keys, self._ids, strict=True))):
            keys, ids = zip(*pairs, strict=True)
            self._n_jobs += 1
            submit(TransferJob(self._n_jobs, keys, np.array(ids), promotes, ReqContext(req_id="bench")))
        self._tier.drain_jobs()
        assert all(result.success for result in self._tier.get_finished_jobs())

    def forget(self) -> None:
        for path in self._root.rglob("*.bin"):
            path.unlink()

    def close(self) -> None:
        self._tier.shutdown()


class Plain:
    """As many threads on files of one chunk each, no header, no checksum: what the disk gives at this queue depth.

    Args:
        flags: O_DIRECT, or 0 for the page cache; then a store ends with the data on the disk, a load may be warm.
    """

    def __init__(self, root: Path, memory: memoryview, chunk_nbytes: int, flags: int) -> None:
        root.mkdir()
        self._flags = flags
        views = [memory[at : at + chunk_nbytes] for at in range(0, len(memory), chunk_nbytes)]
        self._work = [(root / str(i), view) for i, view in enumerate(views)]
        self._pool = ThreadPoolExecutor(N_THREADS)

    def store(self) -> None:
        list(self._pool.map(partial(_plain, self._flags | os.O_WRONLY | os.O_CREAT, os.pwritev), self._work))

    def load(self) -> None:
        list(self._pool.map(partial(_plain, self._flags | os.O_RDONLY, os.preadv), self._work))

    def forget(self) -> None:
        for path, _ in self._work:
            path.unlink()

    def close(self) -> None:
        self._pool.shutdown()


def _plain(flags: int, call: Callable[[int, list[memoryview], int], int], work: tuple[Path, memoryview]) -> None:
    path, view = work
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        assert call(fd, [view], 0) == len(view)
        if flags & os.O_WRONLY and not flags & os.O_DIRECT:
            os.fdatasync(fd)
    finally:
        os.close(fd)


def _jobs(items: Sequence[Any]) -> list[Sequence[Any]]:
    size = -(-len(items) // N_JOBS)
    return [items[at : at + size] for at in range(0, len(items), size)]


def layouts() -> list[str]:
    """What this version of the tier can do; before there was a choice it was files."""
    if "layout" not in inspect.signature(FSTier).parameters:
        return []
    return ["files", "slab"]


@contextlib.contextmanager
def _memory(n_nbytes: int) -> Iterator[memoryview]:
    """Random bytes, page by page ours; views of them may outlive the bench in a thread of vLLM's."""
    mapped = mmap.mmap(-1, n_nbytes)
    view = memoryview(mapped)
    view[:] = np.random.default_rng(1).bytes(n_nbytes)
    yield view


def compare(
    folder: Path, chunk_nbytes: int, layout: str, n_pairs: int = N_PAIRS, total_nbytes: int = TOTAL_NBYTES
) -> list[Row]:
    """Store and load of one size: against vLLM's tier, and a load against plain reads where O_DIRECT works."""
    on_tmpfs = _is_tmpfs(folder)
    with tempfile.TemporaryDirectory(dir=folder) as made, _memory(total_nbytes) as memory:
        roots = Path(made)
        direct = works_direct(made)
        sides: dict[str, Side] = {
            "ours": Ours(roots / "ours", memory, chunk_nbytes, layout),
            "theirs": Theirs(roots / "theirs", memory, chunk_nbytes),
        }
        if direct and not on_tmpfs:
            sides["plain O_DIRECT"] = Plain(roots / "direct", memory, chunk_nbytes, os.O_DIRECT)
        if chunk_nbytes == MIB and not on_tmpfs:
            sides["plain, buffered"] = Plain(roots / "buffered", memory, chunk_nbytes, 0)
        try:
            speeds = _rounds(sides, memory, n_pairs)
        finally:
            for side in sides.values():
                side.close()
    where = f"{'tmpfs' if on_tmpfs else 'disk'}, {layout}, {chunk_nbytes // KIB} KiB"
    cache = "O_DIRECT" if direct else "page cache warm"
    place = SIZES.index(chunk_nbytes) if chunk_nbytes in SIZES else None
    rows = []
    for verb, musts in (("store", MUST_STORE), ("load", MUST_LOAD)):
        known = musts.get((layout, on_tmpfs))
        must = None if known is None or place is None else known[place]
        ours, theirs = speeds["ours", verb], speeds["theirs", verb]
        rows.append(Row("disk", f"{verb}, {where}", "GB/s", ours, theirs, "vLLM's fs tier", must=must, note=cache))
    for name in [name for name in sides if name.startswith("plain")]:
        for verb in ("store", "load"):
            gated = name == "plain O_DIRECT" and verb == "load" and chunk_nbytes >= MIB
            ours, plain = speeds["ours", verb], speeds[name, verb]
            must = MUST_DIRECT if gated else None
            rows.append(Row("disk", f"{verb}, {where}", "GB/s", ours, plain, name, must=must, note=cache))
    return rows


def _rounds(sides: dict[str, Side], memory: memoryview, n_pairs: int) -> dict[tuple[str, str], list[float]]:
    """GB/s by side and verb; the first round, which makes directories, is not counted."""
    speeds: dict[tuple[str, str], list[float]] = {(name, verb): [] for name in sides for verb in ("store", "load")}
    sample = bytes(memory[::4096])
    for number in range(n_pairs + 1):
        names = list(sides)[:: 1 if number % 2 else -1]
        for name in names:
            for verb in ("store", "load"):
                began_s = time.perf_counter()
                getattr(sides[name], verb)()
                spent_s = time.perf_counter() - began_s
                if number:
                    speeds[name, verb].append(len(memory) / spent_s / 1e9)
            assert bytes(memory[::4096]) == sample, "other bytes came back than were stored"
            sides[name].forget()
    return speeds


def _is_tmpfs(folder: Path) -> bool:
    """By the mount table: the longest mount point above the folder."""
    at = str(folder.resolve())
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = [(point, kind) for point, kind in mounts if at == point or at.startswith(point.rstrip("/") + "/")]
    return max(above, key=lambda mount: len(mount[0]))[1] in {"tmpfs", "ramfs"}


def run(folders: Sequence[Path], n_pairs: int = N_PAIRS, total_nbytes: int = TOTAL_NBYTES) -> Iterator[Row]:
    for folder in folders:
        for layout in layouts() or ["files"]:
            for size in SIZES:
                yield from compare(folder, size, layout, n_pairs, total_nbytes)


if __name__ == "__main__":
    for row in run([Path(path) for path in sys.argv[1:]]):
        print(table([row]), flush=True)
