"""What a test may leave behind: nothing. A snapshot of this process's resources, and the difference of two.

Things that libraries make once and keep (multiprocessing's resource tracker) are not counted, and what a test's own
shutdown is still tearing down gets a grace, which only a leak waits out, so that an alarm means a leak.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

SHM = Path("/dev/shm")
GRACE_S = 30.0
NEIGHBOURS = ("psm_", "sem.", "vllm_dist_", "vllm_offload_")
"""In SHM: multiprocessing's and vLLM's own, which engines beside a test make, and leave there when they are killed."""


@dataclass(frozen=True)
class Snapshot:
    """Descriptors, threads, children, shared mappings and /dev/shm entries at one instant."""

    fds: frozenset[str]
    threads: frozenset[threading.Thread]
    children: frozenset[int]
    mappings: frozenset[str]
    shm: frozenset[str]

    @classmethod
    def take(cls) -> Snapshot:
        return cls(_fds(), _threads(), _children(), _mappings(), _shm())

    def leaked(self, now: Snapshot) -> list[str]:
        """What ``now`` has and this snapshot had not, in words."""
        new_shm = now.shm - self.shm
        return [
            *(f"descriptor {entry}" for entry in sorted(now.fds - self.fds)),
            *(f"thread {thread!r}" for thread in now.threads - self.threads),
            *(f"child process {pid}: {_command(pid)}" for pid in sorted(now.children - self.children)),
            *(f"mapping {entry}" for entry in sorted(now.mappings - self.mappings)),
            *(f"/dev/shm/{name}" for name in sorted(new_shm) if not _used_by_others(name)),
        ]


def wait_for_none(before: Snapshot, counts: Callable[[str], bool] = lambda _: True) -> list[str]:
    """What is still leaked after a grace, of what ``counts``; returns at once when there is nothing."""
    deadline = time.monotonic() + GRACE_S
    leaked = list(filter(counts, before.leaked(Snapshot.take())))
    while leaked and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
        leaked = list(filter(counts, before.leaked(Snapshot.take())))
    return leaked


def _fds() -> frozenset[str]:
    kept = {getattr(resource_tracker._resource_tracker, "_fd", None)}
    entries = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own descriptor
            continue
        if int(name) not in kept and not target.startswith(("/proc/", "/dev/urandom", "/dev/null")):
            entries.add(f"{name} -> {target}")
    return frozenset(entries)


def _threads() -> frozenset[threading.Thread]:
    """Threads that would hold up the exit, and ours: those we promise to end when a cache is closed."""
    return frozenset(t for t in threading.enumerate() if not t.daemon or t.name.startswith("tierkv"))


def _children() -> frozenset[int]:
    kept = getattr(resource_tracker._resource_tracker, "_pid", None)
    pids: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            pids.update(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
        except OSError:  # the thread ended, or the kernel was built without this file
            continue
    return frozenset(pids - {kept})


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return "gone"
    return words.decode(errors="replace").strip() or "zombie"


def _mappings() -> frozenset[str]:
    """Mappings that outlive a closed descriptor: anonymous files of ours and files in /dev/shm."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(("/memfd:", "/dev/shm/")) and "sem.mp-" not in fields[5]:
            found.add(f"{fields[0]} {fields[5]}")
    return frozenset(found)


def _shm() -> frozenset[str]:
    try:
        return frozenset(name for name in os.listdir(SHM) if not name.startswith(NEIGHBOURS))
    except OSError:
        return frozenset()


def _used_by_others(name: str) -> bool:
    """True if a process that is neither us nor a child of ours maps it, or has it or a file in it open."""
    ours = {os.getpid(), *_children()}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) in ours:
            continue
        try:
            if f"{SHM}/{name}" in Path(f"/proc/{pid}/maps").read_text():
                return True
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{fd}").startswith(f"{SHM}/{name}"):
                    return True
        except OSError:  # it has ended, or is not ours to look at
            continue
    return False
