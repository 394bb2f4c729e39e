"""``tierkv demo``: a chat workload through host memory and disk, a SIGKILL in the middle, and every byte checked."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Protocol

from tierkv.cli._demo_plan import Failed, Message, Opened, Plan, Stored, Tally, Turn, from_line
from tierkv.cli._quick import add_options, given, parse_integer
from tierkv.cli._workload import Workload
from tierkv.errors import ConfigError, TierKVError, bad_setting
from tierkv.settings import parse_count
from tierkv.sizes import format_size, parse_size

DESCRIPTION = """\
Several chat sessions share a system prompt; their histories grow turn by turn. A worker process keeps the KV cache of
all of them in host memory and on disk, with bytes that are a function of their key. In mid-run the worker is killed
with SIGKILL; a second one goes on from the disk. Every byte that comes back is compared. About a minute."""

PATIENCE_S = 60.0
"""Silence of a worker after which it counts as hung."""
KILL_AFTER = 0.6
"""Part of all turns after which the first worker is killed, once the system prompt is on disk to find again."""


# Option: what it takes, its default, its default with --quick, what it is.
_OPTIONS = {
    "sessions": ("N", "20", "10", "chat sessions"),
    "turns": ("N", "14", "5", "questions in each session"),
    "seed": ("N", "1", "1", "of the generated workload"),
    "memory": ("SIZE", "160MiB", "5MiB", "host memory"),
    "disk": ("SIZE", "1GiB", "64MiB", "limit of what lies on disk"),
    "chunk": ("SIZE", "512KiB", "32KiB", "bytes of one chunk, which is 128 tokens"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the demo; :func:`plan_from` checks their values."""
    add_options(parser, _OPTIONS)
    parser.add_argument("--root", metavar="DIR", help="directory on disk, kept (default: a temporary one)")
    parser.add_argument("--quick", action="store_true", help="a small workload that takes a few seconds")
    parser.add_argument("--damage", action="store_true", help=argparse.SUPPRESS)


def plan_from(arguments: argparse.Namespace) -> Plan:
    """Check the options. Raises ConfigError; nothing is created here."""
    typed = given(arguments, _OPTIONS)
    workload = Workload(
        n_sessions=parse_count("--sessions", parse_integer(typed["sessions"]), 1, 1_000),
        n_turns=parse_count("--turns", parse_integer(typed["turns"]), 2, 1_000),
        n_system_tokens=1_024,
        n_user_tokens=192,
        n_reply_tokens=256,
        seed=parse_count("--seed", parse_integer(typed["seed"]), 0, 2**63 - 1),
    )
    plan = Plan(
        workload=workload,
        root_dir=arguments.root or tempfile.gettempdir(),
        memory_nbytes=parse_size("--memory", typed["memory"]),
        disk_nbytes=parse_size("--disk", typed["disk"]),
        chunk_nbytes=parse_size("--chunk", typed["chunk"]),
        damage=arguments.damage,
    )
    _check_room(plan)
    return plan


def _check_room(plan: Plan) -> None:
    """Refuse sizes that cannot work on this machine."""
    from tierkv.tiers._fs.format import charge_nbytes  # noqa: PLC0415 - needs the extra fs, as does the run
    from tierkv.tiers._fs.wishes import least_capacity_nbytes  # noqa: PLC0415
    from tierkv.tiers._memory_limits import check_memory  # noqa: PLC0415

    work = plan.workload
    longest = max(len(work.answered(work.n_turns - 1, session)) for session in range(work.n_sessions))
    # What is promoted must be able to stay until it was used, for all that ask at once.
    needed_nbytes = (plan.n_at_once + 1) * (longest // plan.tokens_per_chunk + 1) * plan.chunk_nbytes
    if plan.memory_nbytes < needed_nbytes:
        allowed = f"room for {plan.n_at_once + 1} whole conversations"
        raise bad_setting("--memory", format_size(plan.memory_nbytes), allowed, format_size(needed_nbytes))
    check_memory("--memory", plan.memory_nbytes)
    # With less, what is asked for again after the kill may just have been evicted, and there is nothing to be seen.
    least_nbytes = least_capacity_nbytes(plan.chunk_nbytes)
    least_nbytes += 2 * len(plan.system_keys()) * charge_nbytes(plan.chunk_nbytes)
    if plan.disk_nbytes < least_nbytes:
        allowed = "room for twice the system prompt, a lock file and an index"
        raise bad_setting("--disk", format_size(plan.disk_nbytes), allowed, format_size(least_nbytes))
    there = os.path.abspath(plan.root_dir)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    free_nbytes = shutil.disk_usage(there).free
    if plan.disk_nbytes > free_nbytes:
        allowed = f"at most what is free in {there}"
        near = format_size(free_nbytes) if free_nbytes >= least_nbytes else None
        raise bad_setting("--disk", format_size(plan.disk_nbytes), allowed, near)


def run(arguments: argparse.Namespace) -> int:
    """The whole demo; returns the exit code."""
    from tierkv.cli._demo_view import View  # noqa: PLC0415 - rich is an extra, and only this command needs it

    plan = plan_from(arguments)
    with contextlib.ExitStack() as stack:
        if arguments.root is None:
            root_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="tierkv-demo-"))
        else:
            root_dir = _made_directory(arguments.root)
        demo = Demo(replace(plan, root_dir=root_dir))
        view = stack.enter_context(View(demo.plan))
        demo.first_worker(view)
        demo.second_worker(view)
        verdict = demo.verdict()
    view.verdict(verdict.text, right=verdict.right)
    return 0 if verdict.right else 1


def _made_directory(path: str) -> str:
    try:
        os.makedirs(os.path.realpath(path) if path else path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--root is {path!r}, but must be a directory that can be made: {error.strerror}") from None
    return path


@dataclass(frozen=True, slots=True)
class Verdict:
    """The last line."""

    text: str
    right: bool


@dataclass
class Demo:
    """Runs the two workers and keeps what they report."""

    plan: Plan
    total: Tally = field(default_factory=Tally)
    restart: Tally = field(default_factory=Tally)
    on_disk: set[str] = field(default_factory=set)
    """Keys whose storing was acknowledged, and not taken back, by the worker that was killed."""
    n_lost: int = 0

    def __post_init__(self) -> None:
        self.last_turns = [-1] * self.plan.workload.n_sessions

    def first_worker(self, view: ViewProtocol) -> None:
        """Serve until the kill."""
        n_all = self.plan.workload.n_sessions * self.plan.workload.n_turns
        n_before_kill = max(1, int(n_all * KILL_AFTER))
        view.phase("serving from host memory and disk")
        n_turns, killed, awaited = 0, False, self.plan.system_keys()
        with _worker(self.plan, self.last_turns) as worker:
            for message in worker.messages():
                match message:
                    case Turn():
                        n_turns += 1
                        self.total.add(message)
                        view.turn(message, self.total)
                        # Reported before its reply was stored: the turn that counts as answered is the one before.
                        self.last_turns[message.session] = message.turn - 1
                    case Stored():
                        (self.on_disk.discard if message.removed else self.on_disk.add)(message.key)
                    case Opened() | Failed():
                        worker.check(message)
                # On a slow disk the turns run ahead of the writes; the worker ends only when all are written.
                if n_turns >= n_before_kill and awaited <= self.on_disk and not killed:
                    # What it had written before this instant is still in the pipe, and read to the end.
                    worker.process.send_signal(signal.SIGKILL)
                    killed = True
            worker.ended(killed=True)
        view.killed(worker.process.pid, len(self.on_disk))

    def second_worker(self, view: ViewProtocol) -> None:
        """Ask again for everything that was answered, then go on to the end."""
        view.phase("asking again after SIGKILL")
        n_again = sum(turn >= 0 for turn in self.last_turns)
        with _worker(self.plan, self.last_turns) as worker:
            for message in worker.messages():
                match message:
                    case Turn():
                        self.total.add(message)
                        if n_again > 0:
                            n_again -= 1
                            self._after_restart(message)
                            if n_again == 0:
                                view.restarted(self.restart)
                                view.phase("going on where it was killed")
                        view.turn(message, self.total)
                    case Opened():
                        view.opened(message.duration_s)
                    case Failed():
                        worker.check(message)
                    case Stored():
                        pass
            worker.ended(killed=False)

    def _after_restart(self, turn: Turn) -> None:
        self.restart.add(turn)
        n_expected = 0
        for key in turn.keys:
            if key not in self.on_disk:
                break
            n_expected += 1
        self.n_lost += max(0, n_expected - turn.n_chunks)

    def verdict(self) -> Verdict:
        """One line: wrong bytes first, then losses."""
        n, size = self.total.n_chunks, format_size(self.total.nbytes)
        if self.total.n_wrong:
            return Verdict(
                f"WRONG: {self.total.n_wrong:,} of {n:,} chunks came back with other bytes than stored.", False
            )
        if self.n_lost:
            return Verdict(
                f"LOST: {self.n_lost:,} chunks were on disk before SIGKILL and were not served after it.", False
            )
        if not self.restart.by_level[1]:
            return Verdict("NOTHING: after SIGKILL not one chunk was served from disk.", False)
        part = 100 * self.restart.n_served // max(1, self.restart.n_tokens)
        return Verdict(
            f"RIGHT: {n:,} chunks ({size}) came back and every byte was compared; after SIGKILL {part} % of "
            f"{self.restart.n_tokens:,} tokens were served and nothing acknowledged was lost.",
            True,
        )


class ViewProtocol(Protocol):
    """What the demo tells whoever shows it."""

    def phase(self, text: str) -> None: ...
    def turn(self, turn: Turn, tally: Tally) -> None: ...
    def killed(self, pid: int, n_on_disk: int) -> None: ...
    def opened(self, duration_s: float) -> None: ...
    def restarted(self, tally: Tally) -> None: ...


class WorkerError(TierKVError):
    """The worker did not do what it was started for."""


@dataclass
class WorkerProcess:
    """A running worker."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    def messages(self) -> Iterator[Message]:
        """Until the worker's output ends, however it ends. Raises WorkerError if it falls silent."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            rest = b""
            while True:
                if not selector.select(PATIENCE_S):
                    raise WorkerError(f"the worker said nothing for {PATIENCE_S:.0f} s")
                data = os.read(descriptor, 1 << 16)
                if not data:
                    return  # a last line that SIGKILL cut is nobody's message
                *lines, rest = (rest + data).split(b"\n")
                yield from map(from_line, lines)

    def check(self, message: Message) -> None:
        if isinstance(message, Failed):
            raise (ConfigError if message.usage else WorkerError)(message.message)

    def ended(self, *, killed: bool) -> None:
        """Raise WorkerError unless it ended as it should have."""
        try:
            code = self.process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise WorkerError(f"the worker closed its output and did not end in {PATIENCE_S:.0f} s") from None
        if code != (-signal.SIGKILL if killed else 0):
            self.errors.seek(0)
            sys.stderr.write(self.errors.read().decode(errors="replace"))  # a bug: its traceback is what helps
            raise WorkerError(f"the worker ended with exit code {code}")


@contextlib.contextmanager
def _worker(plan: Plan, last_turns: Sequence[int]) -> Iterator[WorkerProcess]:
    """A worker on the plan; killed if it still runs at the end."""
    command = [sys.executable, "-m", "tierkv.cli._demo_worker"]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(  # noqa: S603 - this very interpreter and module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0
        ) as process,
    ):
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it could not start: its exit code says so
                process.stdin.write(f"{plan.to_json()}\n{json.dumps(list(last_turns))}\n".encode())
            yield WorkerProcess(process, errors)
        finally:
            process.kill()
