"""What a process holds: resident memory, descriptors, threads, tasks, live objects."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import threading
import time
from typing import NamedTuple


class Holds(NamedTuple):
    """At one instant, with nothing under way."""

    n_operations: int
    resident_nbytes: int
    n_objects: int
    n_descriptors: int
    n_threads: int
    n_tasks: int

    @classmethod
    def take(cls, n_operations: int) -> Holds:
        gc.collect()
        with open("/proc/self/statm") as file:
            resident_nbytes = int(file.read().split()[1]) * resource.getpagesize()
        return cls(
            n_operations,
            resident_nbytes,
            len(gc.get_objects()),
            min(_n_descriptors() for _ in range(20)),
            threading.active_count(),
            len(asyncio.all_tasks()),
        )

    def line(self) -> str:
        return (
            f"{self.n_operations:>12,} operations: {self.resident_nbytes / 2**20:8.2f} MiB resident, "
            f"{self.n_objects:,} objects, {self.n_descriptors} descriptors, {self.n_threads} threads, "
            f"{self.n_tasks} tasks"
        )


def growth(taken: list[Holds]) -> tuple[float, int, int, int]:
    """From half-way to the end: resident memory as a fraction; descriptors, threads, tasks as numbers.

    Resident memory goes up and down by what the allocator keeps, so a mean of a few on either side is compared; of the
    others the least, since more may be there for an instant.
    """
    half = len(taken) // 2
    n_mean = max(1, half // 5)
    before, after = taken[half : half + n_mean], taken[-n_mean:]
    mean = [sum(each.resident_nbytes for each in some) / len(some) for some in (before, after)]

    def more(what: str) -> int:
        least = [min(getattr(each, what) for each in some) for some in (before, after)]
        return least[1] - least[0]

    return mean[1] / mean[0] - 1, more("n_descriptors"), more("n_threads"), more("n_tasks")


def _n_descriptors() -> int:
    time.sleep(0.001)  # a heartbeat of the fs tier may have a file open at this instant
    return len(os.listdir("/proc/self/fd")) - 1
