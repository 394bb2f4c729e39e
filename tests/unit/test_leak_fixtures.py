"""The leak fixtures themselves: each kind of leak is seen, and ordinary use raises no alarm."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.leaks import Snapshot, wait_for_none
from tests.patience import PATIENCE_S


@contextmanager
def _descriptor() -> Iterator[None]:
    fd = os.open("/dev/zero", os.O_RDONLY)
    yield
    os.close(fd)


@contextmanager
def _thread() -> Iterator[None]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    yield
    end.set()
    thread.join()


@contextmanager
def _our_daemon_thread() -> Iterator[None]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="tierkv-test", daemon=True)
    thread.start()
    yield
    end.set()
    thread.join()


@contextmanager
def _child() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield
        child.communicate(b"\n")


@contextmanager
def _mapping() -> Iterator[None]:
    fd = os.memfd_create("tierkv-test")
    os.ftruncate(fd, 4096)
    mapped = mmap.mmap(fd, 4096)
    os.close(fd)
    yield
    mapped.close()


@contextmanager
def _shm() -> Iterator[None]:
    path = Path(f"/dev/shm/tierkv-leak-test-{os.getpid()}")
    path.touch()
    yield
    path.unlink()


LEAKS = [
    ("descriptor", _descriptor),
    ("thread", _thread),
    ("thread", _our_daemon_thread),
    ("child process", _child),
    ("mapping", _mapping),
    ("/dev/shm/", _shm),
]


@pytest.mark.parametrize(("word", "leak"), LEAKS)
def test_each_kind_of_leak_is_seen(word: str, leak: Callable[[], AbstractContextManager[None]]) -> None:
    """A resource taken and not given back is named; given back, it is forgotten."""
    before = Snapshot.take()
    with leak():
        assert any(line.startswith(word) for line in before.leaked(Snapshot.take()))
    assert wait_for_none(before) == []


def test_a_task_left_running_fails_its_test(tmp_path: Path) -> None:
    """An async test that leaves a task behind fails, and one that does not passes, under the real conftest."""
    root = Path(__file__).parents[2]
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_it.py").write_text(
        "import asyncio\n"
        "async def test_leaks():\n"
        "    test_leaks.task = asyncio.create_task(asyncio.sleep(30))\n"
        "async def test_does_not():\n"
        "    await asyncio.create_task(asyncio.to_thread(int))\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", root / "pyproject.toml", "-p", "no:cacheprovider", "-q", tmp_path],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert "2 passed, 1 error" in run.stdout, run.stdout
    assert "tasks still running" in run.stdout
