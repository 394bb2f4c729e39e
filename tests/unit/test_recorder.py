"""The recorder: what it writes is what tune reads, it is bounded, and its troubles are nobody else's."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.request_traces import TOKENS, write_chat
from tierkv import recorder as module
from tierkv.cli._tune_replay import Job, replay
from tierkv.recorder import TraceRecorder
from tierkv.testing import ManualClock
from tierkv.traces import Header, Trace, read_traces

HEADER = Header(tokens_per_block=TOKENS, block_nbytes=4096, blocks_per_chunk=4)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return read_traces("TRACE", [write_chat(tmp_path_factory.mktemp("chat") / "chat.jsonl")], TOKENS)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TraceRecorder]]:
    """Starts recorders on one path; they are closed at the end, and write all that waits, however slow the disk is."""
    monkeypatch.setattr(module, "_CLOSING_S", PATIENCE_S)
    started: list[TraceRecorder] = []

    def start(**settings: object) -> TraceRecorder:
        started.append(TraceRecorder(tmp_path / "trace.jsonl", HEADER, **settings))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for each in started:
        each.close()


def keys_of(name: str, n: int) -> list[bytes]:
    return [f"{name} {i}".encode() for i in range(n)]


def test_what_it_writes_is_what_tune_reads(start: Callable[..., TraceRecorder], chat: Trace, tmp_path: Path) -> None:
    """A recorded trace has the same requests, times, reuse and hits as the requests themselves, and says its sizes."""
    clock = ManualClock()
    recorder = start(clock=clock)
    began_s = clock()
    for (n_tokens, blocks), time_s in zip(chat.requests(), chat.times_s, strict=True):
        clock.advance(began_s + time_s - clock())
        assert recorder.record(n_tokens, [block.to_bytes(32, "big") for block in blocks])
    recorder.close()
    assert (recorder.n_recorded, recorder.n_dropped) == (len(chat), 0)
    read = read_traces("TRACE", [tmp_path / "trace.jsonl"])
    assert read.header == HEADER
    assert (read.blocks, read.ends, read.n_tokens) == (chat.blocks, chat.ends, chat.n_tokens)
    assert read.duration_s == pytest.approx(chat.duration_s, abs=0.002)
    job = Job("arc", 100)
    assert replay(read, job) == replay(chat, job)


def test_nobody_else_may_read_it_and_keys_are_hashed(start: Callable[..., TraceRecorder], tmp_path: Path) -> None:
    """Mode 0600 whatever the umask or an older file says, and no key stands in it."""
    path = tmp_path / "trace.jsonl"
    path.touch(mode=0o644)
    before = os.umask(0)
    try:
        recorder = start()
        recorder.record(TOKENS, [b"a secret key"])
        recorder.close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    ids = json.loads(path.read_text().splitlines()[1])["hash_ids"]
    assert all(isinstance(each, int) and 0 <= each < 2**48 for each in ids)
    assert "secret" not in path.read_text()


def test_it_is_bounded_and_keeps_the_latest(start: Callable[..., TraceRecorder], tmp_path: Path) -> None:
    """Two files take turns, together within the limit; both are readable, one after the other, without a gap."""
    limit_nbytes = 20_000
    recorder = start(limit_nbytes=limit_nbytes)
    for i in range(400):
        assert recorder.record(TOKENS * 10, keys_of(f"r{i}", 10))
    recorder.close()
    paths = [tmp_path / "trace.jsonl.1", tmp_path / "trace.jsonl"]
    assert sum(path.stat().st_size for path in paths) <= limit_nbytes
    assert recorder.n_recorded == 400
    trace = read_traces("TRACE", paths)
    last = module._hash(b"r399 9")
    assert str(last) in paths[1].read_text().splitlines()[-1]
    assert 50 < len(trace) < 200
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.jsonl", "trace.jsonl.1"]


def test_a_request_longer_than_a_file_is_dropped(start: Callable[..., TraceRecorder], tmp_path: Path) -> None:
    """It is counted, and what follows is recorded."""
    recorder = start(limit_nbytes=2_000)
    recorder.record(TOKENS * 200, keys_of("long", 200))
    recorder.record(TOKENS, keys_of("short", 1))
    recorder.close()
    assert (recorder.n_recorded, recorder.n_dropped) == (1, 1)
    assert len(read_traces("TRACE", [tmp_path / "trace.jsonl"])) == 1


def test_a_restart_goes_on_where_the_file_ends(start: Callable[..., TraceRecorder], tmp_path: Path) -> None:
    """Half a line of a writer that was killed is cut off, and time does not go back even if the clock did."""
    path = tmp_path / "trace.jsonl"
    clock = ManualClock()
    clock.advance(1000)
    first = start(clock=clock)
    first.record(TOKENS, keys_of("a", 1))
    first.close()
    with path.open("ab") as file:
        file.write(b'{"timestamp": 99999999, "inp')
    second = start(clock=ManualClock())
    second.record(TOKENS, keys_of("a", 1))
    second.close()
    trace = read_traces("TRACE", [path])
    assert (len(trace), trace.n_unique) == (2, 1)
    assert trace.times_s[0] == trace.times_s[1] > 900


@pytest.mark.parametrize("old", ["something else\n", Header(16).to_line().decode(), "no newline"])
def test_a_file_of_another_kind_is_moved_away(old: str, start: Callable[..., TraceRecorder], tmp_path: Path) -> None:
    """Blocks of another size, or anything else, become the older file; nothing is mixed and nothing lost."""
    path = tmp_path / "trace.jsonl"
    path.write_text(old)
    recorder = start()
    recorder.record(TOKENS, keys_of("a", 1))
    recorder.close()
    assert (tmp_path / "trace.jsonl.1").read_text() == old
    assert len(read_traces("TRACE", [path])) == 1


def test_a_full_disk_ends_it_with_one_warning(
    start: Callable[..., TraceRecorder],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No exception reaches who records; what was written is whole lines; every later request counts as dropped."""
    write = os.write
    n_calls = 0

    def full(fd: int, data: bytes) -> int:
        nonlocal n_calls
        if fd != recorder._file._fd:
            return write(fd, data)
        n_calls += 1
        if n_calls <= 2:
            return write(fd, data)
        if n_calls == 3:
            return write(fd, data[:7])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    recorder = start()
    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.WARNING):
        for i in range(5):
            recorder.record(TOKENS, keys_of(str(i), 1))
        assert recorder._thread is not None
        recorder._thread.join(PATIENCE_S)
    assert not recorder._thread.is_alive()
    assert not recorder.record(TOKENS, keys_of("late", 1))
    assert (recorder.n_recorded, recorder.n_dropped) == (1, 5)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left on device" in caplog.text
    assert (tmp_path / "trace.jsonl").read_bytes().endswith(b"}\n")
    assert len(read_traces("TRACE", [tmp_path / "trace.jsonl"])) == 1


@pytest.mark.parametrize("kind", ["folder", "fifo", "link", "missing", "locked"])
def test_a_path_that_cannot_be_written_is_a_warning(
    kind: str, start: Callable[..., TraceRecorder], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory, a FIFO nobody reads, a link, no such folder, another writer: one warning, and no file is harmed."""
    path, aim, stack = tmp_path / "trace.jsonl", tmp_path / "aim", contextlib.ExitStack()
    aim.write_text("untouched")
    recorder = start()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(aim)
    elif kind == "missing":
        recorder._file._path = str(tmp_path / "none" / "trace.jsonl")
    else:
        other = stack.enter_context(path.open("w"))
        fcntl.flock(other, fcntl.LOCK_EX)
    with caplog.at_level(logging.WARNING):
        recorder.record(TOKENS, keys_of("a", 1))
        recorder.close()
    stack.close()
    assert (recorder.n_recorded, recorder.n_dropped, len(caplog.records)) == (0, 1, 1)
    assert aim.read_text() == "untouched"


def test_who_records_never_waits(start: Callable[..., TraceRecorder], monkeypatch: pytest.MonkeyPatch) -> None:
    """While the file hangs, requests are remembered up to a bound and then dropped, until it goes on."""
    hanging, entered, drained = (threading.Event() for _ in range(3))
    n_written = 0

    def hang(*_: object) -> bool:
        nonlocal n_written
        entered.set()
        hanging.wait(PATIENCE_S)
        n_written += 1
        if n_written == 10:
            recorder._waiting.append((0.0, 0, ()))  # the next one is met only when this one has been counted
        elif n_written == 11:
            drained.set()
        return True

    recorder = start()
    monkeypatch.setattr(recorder._file, "append", hang)
    monkeypatch.setattr(module, "_MOST_WAITING", 100)
    assert recorder.record(TOKENS, keys_of("first", 10))
    assert entered.wait(PATIENCE_S)
    taken = [recorder.record(TOKENS, keys_of(str(i), 10)) for i in range(20)]
    assert taken == [True] * 9 + [False] * 11
    assert recorder.n_dropped == 11
    hanging.set()
    assert drained.wait(PATIENCE_S)
    assert recorder.record(TOKENS, keys_of("again", 100))
    assert recorder.n_dropped == 11


def test_closing_does_not_wait_for_ever(start: Callable[..., TraceRecorder], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that hangs delays the end by the bound and no longer, whatever waits."""
    hanging = threading.Event()
    recorder = start()
    monkeypatch.setattr(recorder._file, "append", lambda *_: hanging.wait(PATIENCE_S))
    monkeypatch.setattr(module, "_CLOSING_S", 0.05)
    recorder.record(TOKENS, keys_of("a", 1))
    recorder.close()
    assert recorder._thread is not None and recorder._thread.is_alive()
    assert not recorder.record(TOKENS, keys_of("late", 1))
    hanging.set()
    recorder._thread.join(PATIENCE_S)
