"""``tierkv demo``, as a user runs it, and the verdict that it must not give lightly."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults import Faults
from tests.patience import PATIENCE_S
from tierkv.cli._demo import Demo
from tierkv.cli._demo_plan import Plan, Stored, Turn, from_line, to_line
from tierkv.cli._workload import Workload, content

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)


def _environment(folder: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}


def _demo(folder: Path, *arguments: str, faults: Faults | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "tierkv.cli", "demo", *arguments]
    environment = _environment(folder) | ({} if faults is None else faults.environment)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_the_demo_ends_right_and_leaves_nothing(tmp_path: Path) -> None:
    """Killed in the middle, it goes on from disk, compares every byte, and removes its directory."""
    run = _demo(tmp_path, "--quick")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1].startswith("RIGHT: "), run.stdout
    assert "was killed with SIGKILL" in run.stdout
    assert " 0 chunks from disk" not in run.stdout
    assert not run.stderr
    assert not list(tmp_path.iterdir())


def test_the_demo_sees_a_flipped_bit(tmp_path: Path) -> None:
    """One bit flipped in host memory behind the cache's back: the verdict says so and the exit code is 1."""
    run = _demo(tmp_path, "--quick", "--damage")
    assert run.returncode == 1, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1].startswith("WRONG: 1 of "), run.stdout


def test_a_directory_of_ones_own_is_kept_and_used_again(tmp_path: Path) -> None:
    """With --root a second run starts with what the first one left, and ends right as well."""
    root = tmp_path / "kept"
    for _ in range(2):
        run = _demo(tmp_path, "--quick", "--root", str(root))
        assert run.returncode == 0, run.stdout + run.stderr
    assert any(root.iterdir())


def test_a_disk_too_small_for_it_all_is_never_exceeded(tmp_path: Path) -> None:
    """With half the room that it wants, it evicts, ends right, and what lies there at the end is within the limit."""
    root = tmp_path / "small"
    run = _demo(tmp_path, "--quick", "--disk", "3MiB", "--root", str(root))
    assert run.returncode == 0, run.stdout + run.stderr
    disk = next(line for line in run.stdout.splitlines() if line.startswith("  disk"))
    assert int(disk.split()[-1]) > 0, disk
    assert 0 < sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file()) <= 3 << 20


def test_on_a_slow_disk_the_system_prompt_is_there_before_the_kill(tmp_path: Path) -> None:
    """Several threads write, so the first chunks on disk need not be the first that were asked for."""
    faults = Faults(tmp_path / "rules")
    faults.add("write", path="/slow/", delay_s=0.05)
    run = _demo(tmp_path, "--quick", "--disk", "3MiB", "--root", str(tmp_path / "slow"), faults=faults)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--turns", "0"], "--turns is 0, but must be a whole number from 2 to 1000; nearest valid value: 2"),
        (["--sessions", "many"], "--sessions is 'many', but must be a whole number from 1 to 1000"),
        (["--memory", "1KiB"], "--memory is '1 KiB', but must be room for 5 whole conversations"),
        (["--memory", "8 parsecs"], "--memory is '8 parsecs', but must be"),
        (["--memory", "8PiB"], "--memory is "),
        (["--sessions", ""], "--sessions is ''"),
        (["--disk", "8EiB"], "but must be"),
        (["--disk", "500KiB"], "--disk is '500 KiB', but must be room for twice the system prompt"),
        (["--disk", "1"], "--disk is '1 B', but must be room for twice the system prompt"),
        (["--chunk", "-1"], "--chunk"),
        (["--frobnicate"], "there is no option '--frobnicate'"),
        (["--root", "/dev/null/x"], "--root is '/dev/null/x', but must be a directory that can be made"),
    ],
)
def test_a_wrong_option_is_one_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    """Exit code 2, one line on the error output, nothing on the other and nothing created."""
    run = _demo(tmp_path, "--quick", *arguments)
    assert run.returncode == 2
    assert sentence in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert not run.stdout
    assert not list(tmp_path.iterdir())


def test_a_root_that_the_machine_refuses_is_one_sentence(tmp_path: Path) -> None:
    """A read-only disk, a full one, a directory where the lock belongs: the system's words, and no traceback."""
    (tmp_path / "root" / "tierkv.lock").mkdir(parents=True)
    run = _demo(tmp_path, "--quick", "--root", str(tmp_path / "root"))
    assert run.returncode == 1
    assert len(run.stderr.splitlines()) == 1, run.stderr
    assert "Is a directory" in run.stderr
    assert str(tmp_path / "root") in run.stderr


@contextmanager
def _running(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A demo whose first worker serves, and that worker's process id."""
    command = [sys.executable, "-m", "tierkv.cli", "demo", "--quick", "--turns", "60", "--memory", "64MiB"]
    # A shell that started us in the background has SIGINT ignored, and children inherit that.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        command, env=_environment(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        try:
            assert demo.stdout is not None
            for line in demo.stdout:
                if "serving" in line:
                    break
            children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children")
            deadline = time.monotonic() + PATIENCE_S
            while not (pids := children.read_text().split()) and time.monotonic() < deadline:
                time.sleep(0.01)
            yield demo, int(pids[0])
        finally:
            signal.signal(signal.SIGINT, ignored)
            demo.kill()


def _ends(pid: int) -> bool:
    """Whether a process that is not our child ends within 30 seconds."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], PATIENCE_S)[0])
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_cleans_up(tmp_path: Path, sent: signal.Signals) -> None:
    """Interrupted by either signal it says so, without a traceback, and takes its worker and directory along."""
    with _running(tmp_path) as (demo, worker):
        demo.send_signal(sent)
        _, errors = demo.communicate(timeout=PATIENCE_S)
        assert demo.returncode == 130
        assert errors == "tierkv demo: interrupted\n"
        assert _ends(worker)
    assert not list(tmp_path.iterdir())


def test_a_worker_does_not_outlive_its_demo(tmp_path: Path) -> None:
    """When the demo itself is killed with SIGKILL, the worker notices and ends."""
    with _running(tmp_path) as (demo, worker):
        demo.kill()
        assert _ends(worker)


# -- the parts ----------------------------------------------------------------------------------------------------

WORKLOAD = Workload(n_sessions=3, n_turns=4, n_system_tokens=64, n_user_tokens=20, n_reply_tokens=10, seed=5)


def _turn(**changed: object) -> Turn:
    fields: dict[str, object] = {
        "turn": 0, "session": 0, "n_tokens": 100, "n_served": 50, "n_chunks": 2, "nbytes": 10, "by_level": [1, 1],
        "n_wrong": 0, "keys": ["aa", "bb", "cc"], "levels": [],
    }  # fmt: skip
    return Turn(**fields | changed)  # type: ignore[arg-type]


def _demo_after(turn: Turn, on_disk: set[str]) -> Demo:
    demo = Demo(Plan(WORKLOAD, "", 0, 0, 0), on_disk=on_disk)
    demo.total.add(turn)
    demo._after_restart(turn)
    return demo


@pytest.mark.parametrize(
    ("turn", "on_disk", "word"),
    [
        (_turn(), {"aa", "bb"}, "RIGHT"),
        (_turn(), {"aa", "bb", "cc"}, "LOST"),
        (_turn(), {"bb", "cc"}, "RIGHT"),
        (_turn(n_wrong=1), {"aa", "bb", "cc"}, "WRONG"),
        (_turn(by_level=[2, 0]), {"aa"}, "NOTHING"),
    ],
)
def test_the_verdict(turn: Turn, on_disk: set[str], word: str) -> None:
    """Wrong bytes weigh most; a leading chunk that was acknowledged and is not served is a loss; disk must serve."""
    verdict = _demo_after(turn, on_disk).verdict()
    assert verdict.text.startswith(f"{word}:")
    assert verdict.right is (word == "RIGHT")


def test_histories_grow_and_share_the_system_prompt() -> None:
    """Each turn's prompt extends the last one's answer; sessions share the system prompt and nothing else."""
    for session in range(3):
        for turn in range(1, 4):
            before = WORKLOAD.answered(turn - 1, session)
            assert WORKLOAD.prompt(turn, session)[: len(before)] == before
            assert WORKLOAD.answered(turn, session)[:-10] == WORKLOAD.prompt(turn, session)
    first, second = WORKLOAD.prompt(0, 0), WORKLOAD.prompt(0, 1)
    assert first[:64] == second[:64]
    assert first[64:] != second[64:]
    assert sorted(WORKLOAD.order()) == [(turn, session) for turn in range(4) for session in range(3)]


def test_a_workload_is_the_same_in_every_process() -> None:
    """Two processes with different hash seeds generate the same tokens and the same bytes."""
    code = (
        "import zlib; from tierkv.cli._workload import Workload, content\n"
        "w = Workload(3, 4, 64, 20, 10, 5)\n"
        "print(zlib.crc32(repr([list(w.order()), w.answered(3, 2), content(b'k', 99)]).encode()))"
    )
    results = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(results) == 1
    assert content(b"k", 99) != content(b"l", 99)


def test_messages_survive_the_pipe() -> None:
    """What the worker writes is what the demo reads."""
    for message in (_turn(), Stored("aa", removed=True)):
        assert from_line(to_line(message)) == message
