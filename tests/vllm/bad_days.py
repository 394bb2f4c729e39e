"""One engine on a disk that has bad days, in a process under the preloaded library of :mod:`tests.faults`.

``python -m tests.vllm.bad_days MODEL MOUNT DEVICE`` is what ``test_engine_bad_days`` runs; it says what it has seen as
it goes, and ends with an AssertionError if something is not as it should be.
"""

from __future__ import annotations

import errno
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import Faults
from tests.faults.disks import Ext4Disk
from tests.vllm.engine import Engine, engine, engine_environment, offloading, prompts

N_TOKENS = 4
KNOWN = prompts(6)
FRESH = {name: prompts(3, 500, 0, seed=seed) for seed, name in enumerate(("full", "read-only", "failing", "hanging"))}
DEADLINE_S = 3.0
"""``lookup_deadline_s``: what one request may wait in all."""
MOST_ROUNDS = 20
DISK_HITS = "prompt_tokens_cached_by_source{disk}"


def _config(root: Path) -> dict[str, Any]:
    """A primary that holds two prompts and a half: the others must come from the disk."""
    tier = {"type": "fs", "root_dir": str(root), "capacity": "12MiB", "min_free": 0, "breaker_cooldown_s": 0.5}
    return offloading(
        cpu_bytes_to_use=40 << 15, lookup_deadline_s=DEADLINE_S, transfer_deadline_s=6.0, secondary_tiers=[tier]
    )


@dataclass
class Watch:
    """What the manager did: trials of its breakers, and how long requests were told to wait."""

    trials: Counter[str] = field(default_factory=Counter)
    hierarchy: Any = None
    longest_s: float = 0.0

    def install(self) -> None:
        from tierkv._breaker import Traffic
        from tierkv.vllm._books import EpochHierarchy
        from tierkv.vllm._lookups import Lookups

        set_traffic, defer = EpochHierarchy.set_traffic, Lookups._defer

        def watched(hierarchy: Any, index: int, *, reads: Any, writes: Any) -> None:
            self.hierarchy = hierarchy
            level = hierarchy.levels[index]
            for name, door, traffic in (("reads", level.reads, reads), ("writes", level.writes, writes)):
                self.trials[name] += door.traffic is not traffic is Traffic.TRIAL
            set_traffic(hierarchy, index, reads=reads, writes=writes)

        def deferred(lookups: Any, request: Any, now: float, answer: Any) -> Any:
            answered = defer(lookups, request, now, answer)
            self.longest_s = max(self.longest_s, now - (request.deadline - DEADLINE_S))
            return answered

        EpochHierarchy.set_traffic = watched
        Lookups._defer = deferred

    @property
    def flows(self) -> bool:
        from tierkv._breaker import Traffic

        level = self.hierarchy.levels[1]
        return level.reads.traffic is level.writes.traffic is Traffic.FLOWS


class Days:
    """The engine, what it must answer, and the disk below it."""

    def __init__(self, running: Engine, expected: dict[str, list[list[int]]], watch: Watch) -> None:
        self.running = running
        self.expected = expected
        self.watch = watch
        self.healthy: list[int] = []
        self.n_requests = 0

    def ask(self, name: str) -> list[int]:
        """Each prompt of a set is answered, with the right tokens; how many of its tokens were found."""
        batch = FRESH.get(name, KNOWN)
        got = self.running.generate(batch, n_tokens=N_TOKENS)
        assert got.tokens == self.expected[name], f"{name}: other tokens"
        assert self.watch.longest_s <= DEADLINE_S, "nobody waits past the deadline"
        self.n_requests += len(batch)
        return got.cached

    def from_disk(self) -> float:
        return self.running.metrics().get(DISK_HITS, 0)

    def warm(self) -> None:
        """Until all that is known is found: most of it on the disk."""
        for _ in range(MOST_ROUNDS):
            before = self.from_disk()
            self.healthy = self.ask("known")
            if self.healthy == [480] * len(KNOWN) and self.from_disk() - before > 1000:
                return
        raise AssertionError(f"never served from disk: {self.healthy}")

    def day(self, name: str, begin: Callable[[], None], end: Callable[[], None], *, breaks: bool = True) -> None:
        """A fault until it has been tried once whether it still lasts, and the way back."""
        self.watch.trials.clear()
        begin()
        during = self.until(name, lambda *_: not breaks or self.watch.trials.total() > 0)
        assert breaks or not self.watch.trials.total()
        end()
        trials = dict(self.watch.trials)
        self.watch.trials.clear()
        after = self.until(name, lambda fresh, known: self.watch.flows and fresh == [480] * 3 and known == self.healthy)
        print(f"{name}: found {during} meanwhile, trials {trials}; then {after}, trials {dict(self.watch.trials)}")
        assert max(self.watch.trials.values(), default=0) <= 2, "back by the second trial"

    def until(self, name: str, condition: Callable[[list[int], list[int]], bool]) -> list[int]:
        """Ask for both sets until it is so; what was found of the known one, a number a round."""
        found: list[int] = []
        for _ in range(MOST_ROUNDS):
            fresh, known = self.ask(name), self.ask("known")
            found.append(sum(known))
            if condition(fresh, known):
                return found
        raise AssertionError(f"{name}: found {found} of {sum(self.healthy)}, flows: {self.watch.flows}")


def _under(faults: Faults, calls: tuple[str, ...], **how: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """How to begin and to end what these rules say."""

    def begin() -> None:
        faults.add(*calls, **how)

    return begin, faults.clear


def main(model: str, mount: str, device: str) -> None:
    os.environ.update(engine_environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    faults, disk, root = Faults.attach(), Ext4Disk(Path(mount), device), Path(mount, "root")
    with engine(model) as plain:
        asked = {"known": KNOWN} | FRESH
        expected = {name: plain.generate(batch, n_tokens=N_TOKENS).tokens for name, batch in asked.items()}
    watch = Watch()
    watch.install()
    path = f"{root}/"
    with engine(model, _config(root)) as running:
        days = Days(running, expected, watch)
        days.warm()
        days.day("full", disk.fill, disk.empty, breaks=False)
        changes = ("write", "rename", "mkdir", "unlink", "sync")
        days.day("read-only", *_under(faults, changes, path=path, error=errno.EROFS))
        days.day("failing", *_under(faults, ("read", "write"), path=path, error=errno.EIO))
        days.day("hanging", *_under(faults, ("read", "write"), path=path, hang=True))
        disk.turn_read_only()
        before = days.from_disk()
        for _ in range(2):
            days.ask("known")
        assert days.from_disk() - before > 1000, "what lies on a read-only disk is served"
        print(f"{days.n_requests} requests, the longest wait {watch.longest_s:.2f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
