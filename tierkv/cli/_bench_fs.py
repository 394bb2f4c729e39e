"""``tierkv bench fs``: how fast a directory stores and loads chunks through the fs tier, beside its plain limits."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import secrets
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Final

from tierkv._ports import uncancelled
from tierkv._threads import Lane
from tierkv.cli._bench_plan import BenchError, Cell, FSPlan, Measured, Round, Speeds, peak_nbytes_of, summary
from tierkv.cli._output import OutputError
from tierkv.errors import ConfigError, bad_setting
from tierkv.protocols import TierContext
from tierkv.sizes import format_size
from tierkv.tiers._fs.file_io import direct_works
from tierkv.tiers._memory_limits import check_memory
from tierkv.tiers.fs import FSTier
from tierkv.types import Chunk, ChunkKey

_PREFIX: Final = "tierkv-bench-"
_MARK: Final = "tierkv-bench.lock"
"""In each of our directories, locked as long as its run lives: what a killed run left behind is told by it."""
_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_MOST_MIN_FREE_NBYTES: Final = 1 << 30
_OPEN_S: Final = 60.0
_SETTLE_S: Final = 10.0


def check_room(plan: FSPlan) -> None:
    """Refuse a directory or sizes that cannot work here. Raises ConfigError; nothing is created."""
    if not os.path.isdir(plan.root):
        raise bad_setting("DIR", plan.root, "a directory that is there")
    if not os.access(plan.root, os.W_OK | os.X_OK):
        raise bad_setting("DIR", plan.root, "a directory in which this user may write")
    spare_nbytes = max(0, _spare_nbytes(plan.root))
    if plan.peak_nbytes > spare_nbytes:
        allowed = (
            f"so small that the most there is at one time ({format_size(plan.peak_nbytes)}, with --chunks times "
            f"--threads at least) fits into the {format_size(spare_nbytes)} that are free in DIR beyond its reserve"
        )
        fits_nbytes = plan.largest_fitting_nbytes(spare_nbytes)
        raise bad_setting("--size", format_size(plan.size_nbytes), allowed, fits_nbytes and format_size(fits_nbytes))
    check_memory("--size", plan.payload_nbytes)


def measure(plan: FSPlan, told: Callable[[Cell], None], measured: Callable[[Measured], None]) -> list[Measured]:
    """Run the whole plan.

    Args:
        plan: checked by :func:`check_room`.
        told: called before each round of a cell.
        measured: called with each cell's result.

    Raises:
        BenchError: the tier refused or lost a chunk, or the disk became full or broke; what was written is removed.
    """
    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(_memory(plan.payload_nbytes))
        folder = stack.enter_context(bench_folder(plan.root))
        try:
            return _run(_measure(plan, folder, memory, told, measured))
        except TimeoutError:
            raise BenchError(f"{plan.root}: an empty tier was not writable after {_OPEN_S:.0f} s") from None
        except (BrokenPipeError, OutputError):
            raise  # of the report, not of the disk in question
        except OSError as error:
            raise BenchError(f"{plan.root}: {error.strerror or error}; what was written is removed") from None


def _run(measuring: Coroutine[Any, Any, list[Measured]]) -> list[Measured]:
    """``asyncio.run`` for which SIGTERM is what Ctrl-C is: a cancellation.

    Raised in place, KeyboardInterrupt would leave threads behind that go on making files in a directory being removed.
    """

    async def stoppable() -> list[Measured]:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await measuring

    before = signal.getsignal(signal.SIGTERM)
    try:
        return asyncio.run(stoppable())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGTERM, before)


async def _measure(
    plan: FSPlan,
    folder: str,
    memory: memoryview,
    told: Callable[[Cell], None],
    measured: Callable[[Measured], None],
) -> list[Measured]:
    direct = works_direct(folder)
    results = []
    for cell in plan.cells:
        n_chunks = cell.n_chunks(plan.size_nbytes)
        chunks = [memory[i * cell.chunk_nbytes : (i + 1) * cell.chunk_nbytes] for i in range(n_chunks)]
        rounds = []
        for number in range(plan.n_rounds):
            told(cell)
            if _spare_nbytes(folder) < plan.peak_nbytes:
                raise BenchError(f"{plan.root}: somebody else is filling the disk; what was written is removed")
            rounds.append(await _round(folder, cell, chunks, number, layout=plan.layout, direct=direct))
        results.append(summary(cell, rounds))
        measured(results[-1])
    return results


async def _round(
    folder: str, cell: Cell, chunks: Sequence[memoryview], number: int, *, layout: str, direct: bool
) -> Round:
    """Everybody once, in an order that changes from round to round."""

    def plain(*, direct: bool) -> Awaitable[Speeds]:
        return _plain(os.path.join(folder, "plain"), cell, chunks, direct=direct)

    runs: dict[str, Callable[[], Awaitable[Speeds]]] = {
        "tier": lambda: _tier(os.path.join(folder, "tier"), cell, chunks, layout=layout, direct=direct),
        "buffered": lambda: plain(direct=False),
    }
    if direct:
        runs["direct"] = lambda: plain(direct=True)
    names = list(runs)
    speeds: dict[str, Speeds] = {}
    for name in names[number % len(names) :] + names[: number % len(names)]:
        speeds[name] = await runs[name]()
    return Round(speeds["tier"], speeds.get("direct"), speeds["buffered"])


async def _tier(root: str, cell: Cell, chunks: Sequence[memoryview], *, layout: Any, direct: bool) -> Speeds:
    """Through the fs tier: all chunks in one batch, as many threads as the cell says."""
    nbytes = cell.chunk_nbytes
    tier = FSTier(root, n_read_threads=cell.n_threads, n_write_threads=cell.n_threads, min_free=0, layout=layout)
    # A slab grows by more than it needs, as far as this goes: no further than the room that was checked.
    capacity_nbytes = peak_nbytes_of(nbytes, len(chunks))
    try:
        await tier.open(TierContext(nbytes, nbytes, b"tierkv bench", capacity_nbytes))
        async with asyncio.timeout(_OPEN_S):
            while not tier.writable:  # noqa: ASYNC110 - its scan of an empty directory; it has no event
                await asyncio.sleep(0.001)
        items = [(Chunk(ChunkKey(secrets.token_bytes(16)), nbytes=nbytes), chunk) for chunk in chunks]
        began_s = time.perf_counter()
        outcomes = await tier.write(items)
        if not direct:
            _sync(root)  # else it is the page cache that is measured
        written_s = time.perf_counter() - began_s
        _all_ok("store", outcomes)
        if not direct:
            _forget(root)
        began_s = time.perf_counter()
        outcomes = await tier.read([(chunk.key, view) for chunk, view in items])
        read_s = time.perf_counter() - began_s
        _all_ok("load", outcomes)
    finally:
        try:
            # An interrupt now would leave the rest of the close to a thread, from under which we would remove it all.
            await uncancelled(asyncio.create_task(tier.aclose()))
        finally:
            _remove(root)
    total_nbytes = nbytes * len(chunks)
    return Speeds(total_nbytes / written_s, total_nbytes / read_s)


async def _plain(root: str, cell: Cell, chunks: Sequence[memoryview], *, direct: bool) -> Speeds:
    """As many files as threads, written and read in pieces of the same size: what the tier could reach at best."""
    os.mkdir(root, 0o700)
    lane = Lane("tierkv-bench-plain", cell.n_threads)
    shares = [chunks[i :: cell.n_threads] for i in range(cell.n_threads)]
    flags = _DIRECT if direct else 0
    try:
        began_s = time.perf_counter()
        await _all(lane, _write_share, root, shares, flags)
        written_s = time.perf_counter() - began_s
        if not direct:
            _forget(root)
        began_s = time.perf_counter()
        await _all(lane, _read_share, root, shares, flags)
        read_s = time.perf_counter() - began_s
    finally:
        await asyncio.to_thread(lane.wait_idle, _SETTLE_S)
        lane.close()
        _remove(root)
    total_nbytes = cell.chunk_nbytes * len(chunks)
    return Speeds(total_nbytes / written_s, total_nbytes / read_s)


async def _all(lane: Lane, share: Callable[..., None], root: str, shares: Sequence[Any], flags: int) -> None:
    ended = await asyncio.gather(
        *(lane.run(share, os.path.join(root, str(i)), views, flags) for i, views in enumerate(shares)),
        return_exceptions=True,  # the others must have ended before their files are removed
    )
    for error in ended:
        if isinstance(error, BaseException):
            raise error


def _write_share(path: str, views: Sequence[memoryview], flags: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o600)
    try:
        at = 0
        for view in views:
            if os.pwrite(fd, view, at) != len(view):
                raise BenchError(f"{path}: the disk took a part of a write only")
            at += len(view)
        if not flags:
            os.fdatasync(fd)
    finally:
        os.close(fd)


def _read_share(path: str, views: Sequence[memoryview], flags: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        at = 0
        for view in views:
            if os.preadv(fd, [view], at) != len(view):
                raise BenchError(f"{path}: what was written is not there")
            at += len(view)
    finally:
        os.close(fd)


def works_direct(folder: str) -> bool:
    """Whether this file system takes O_DIRECT, asked as the tier asks."""
    with open(os.path.join(folder, "probe"), "wb") as file:
        file.write(bytes(4096))
    dir_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return bool(_DIRECT) and direct_works("probe", dir_fd)
    finally:
        os.close(dir_fd)


@contextlib.contextmanager
def bench_folder(root: str) -> Iterator[str]:
    """A directory of our own under ``root``, removed at the end; those of killed runs are removed first."""
    _remove_leftovers(root)
    folder = os.path.join(root, _PREFIX + secrets.token_hex(8))
    try:
        try:
            os.mkdir(folder, 0o700)
        except OSError as error:
            must = "a directory in which this user may write"
            raise ConfigError(f"DIR is {root!r}, but must be {must}: {error}") from None
        new_path = os.path.join(folder, f"{_MARK}.new")
        with open(new_path, "wb") as mark:
            with contextlib.suppress(OSError):  # a file system without locks: then nobody takes us for a leftover
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(new_path, os.path.join(folder, _MARK))  # or another run could see it unlocked
            yield folder
    finally:
        _remove(folder)


def _remove_leftovers(root: str) -> None:
    """Directories of ours whose run was killed: those with a mark that nobody holds."""
    for name in os.listdir(root):
        path = os.path.join(root, name)
        if not name.startswith(_PREFIX) or os.path.islink(path):
            continue
        with contextlib.suppress(OSError), open(os.path.join(path, _MARK), "rb+") as mark:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)


def _remove(path: str) -> None:
    """Twice: a thread that was left alone may have made a file behind the first pass."""
    shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _memory(nbytes: int) -> Iterator[memoryview]:
    """Page-aligned and full of bytes that no file system can compress or find twice."""
    mapped = mmap.mmap(-1, nbytes)
    view = memoryview(mapped)
    step = 16 << 20
    for at in range(0, nbytes, step):
        piece = view[at : at + step]
        piece[:] = os.urandom(len(piece))
    yield view


def _spare_nbytes(path: str) -> int:
    """Free for this user, less what the fs tier would leave free, too."""
    found = os.statvfs(path)
    reserve_nbytes = min(_MOST_MIN_FREE_NBYTES, found.f_blocks * found.f_frsize // 20)
    return found.f_bavail * found.f_frsize - reserve_nbytes


def _files(root: str) -> Iterator[str]:
    for folder, _, names in os.walk(root):
        yield from (os.path.join(folder, name) for name in names)


def _sync(root: str) -> None:
    for path in _files(root):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)


def _forget(root: str) -> None:
    """Drop synced files from the page cache. Memory file systems have nothing else to read from, and stay fast."""
    for path in _files(root):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _all_ok(what: str, outcomes: Sequence[Any]) -> None:
    bad = [outcome for outcome in outcomes if not outcome.ok]
    if bad:
        why = bad[0].error or bad[0].reason or bad[0].status.value
        raise BenchError(f"{len(bad)} of {len(outcomes)} chunks did not {what}: {why}; what was written is removed")
