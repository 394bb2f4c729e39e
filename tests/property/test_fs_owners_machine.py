"""Owners that come, store, close and are killed on one root as they please: a root within its pages, at each change."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.fs_kit import LONGEST, PAGE, _mount, capacity_for, chunk_of, context, key_of, kill, scanned, using, write
from tests.instants import Instants
from tests.patience import PATIENCE_S
from tierkv.tiers._fs import mount as _fs_mount
from tierkv.tiers._fs import owners as _fs_owners
from tierkv.tiers.fs import FSTier

N_CHUNKS = 24
MOST_OWNERS = 4
layouts = st.sampled_from(["slab", "files"])
namespaces = st.sampled_from([b"a namespace", b"a namespace", b"another"])
picks = st.integers(0, MOST_OWNERS - 1)
numbers = st.lists(st.integers(0, 39), min_size=1, max_size=16, unique=True)


class OwnersMachine(RuleBasedStateMachine):
    """What the machine shows is in the looks of ``Instants``: none may see more than the pages say, or the capacity."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="tierkv-machine-"))
        with using("slab"):
            self.capacity_nbytes = capacity_for(N_CHUNKS)
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(_fs_mount, "HEARTBEAT_S", 3600.0)
        self.instants = Instants(self.folder / "root", self.capacity_nbytes, self.patch)
        self.now_s = 0.0
        self.living: list[FSTier] = []
        self.scanning: list[tuple[FSTier, threading.Event]] = []
        """Those whose first scan has not begun to list yet."""

    def run(self, call: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(call, PATIENCE_S))

    @property
    def has_place(self) -> bool:
        return len(self.living) + len(self.scanning) < MOST_OWNERS

    @precondition(lambda self: self.has_place)
    @rule(layout=layouts, namespace=namespaces)
    def enter(self, layout: Literal["slab", "files"], namespace: bytes) -> None:
        self.begin(layout, namespace)
        self.go_on(-1)

    @precondition(lambda self: self.has_place)
    @rule(layout=layouts, namespace=namespaces)
    def begin(self, layout: Literal["slab", "files"], namespace: bytes) -> None:
        let_go = threading.Event()
        tier = FSTier(
            self.folder / "root", capacity=self.capacity_nbytes, min_free=0, layout=layout, n_read_threads=1,
            n_write_threads=1, clock=lambda: self.now_s, _scan_gate=lambda _done, _all: let_go.wait(PATIENCE_S),
        )  # fmt: skip
        self.scanning.append((tier, let_go))
        self.run(tier.open(context(namespace=namespace)))

    @precondition(lambda self: self.scanning)
    @rule(pick=picks)
    def go_on(self, pick: int) -> None:
        tier, let_go = self.scanning.pop(pick % len(self.scanning))
        let_go.set()
        self.run(scanned(tier))
        self.living.append(tier)

    @precondition(lambda self: self.scanning)
    @rule(pick=picks)
    def die_in_the_scan(self, pick: int) -> None:
        tier, let_go = self.scanning.pop(pick % len(self.scanning))
        _mount(tier).stop()
        let_go.set()
        kill(tier)

    @precondition(lambda self: self.living)
    @rule(pick=picks)
    def die(self, pick: int) -> None:
        kill(self.living.pop(pick % len(self.living)))

    @precondition(lambda self: self.living)
    @rule(pick=picks)
    def leave(self, pick: int) -> None:
        self.run(self.living.pop(pick % len(self.living)).aclose())

    @precondition(lambda self: self.living)
    @rule(pick=picks)
    def beat(self, pick: int) -> None:
        tier = self.living[pick % len(self.living)]
        _mount(tier).beat()
        self.run(scanned(tier))

    @precondition(lambda self: self.living)
    @rule()
    def a_minute_passes(self) -> None:
        """All look around before and after it: who is dead is adopted."""
        for late_s in (2 * _fs_owners.ADOPT_AFTER_S, 0.0):
            for pick in range(len(self.living)):
                self.beat(pick)
            self.now_s += late_s

    @precondition(lambda self: self.living)
    @rule(pick=picks, chunks=numbers, nbytes=st.sampled_from([100, PAGE, LONGEST]))
    def store(self, pick: int, chunks: list[int], nbytes: int) -> None:
        for number in chunks:
            self.run(write(self.living[pick % len(self.living)], chunk_of(number, nbytes)))

    @precondition(lambda self: self.living)
    @rule(pick=picks, chunks=numbers)
    def delete(self, pick: int, chunks: list[int]) -> None:
        self.run(self.living[pick % len(self.living)].delete([key_of(number) for number in chunks]))

    @invariant()
    def no_look_saw_what_must_not_be(self) -> None:
        assert self.instants.wrong == []
        for tier in self.living:
            _mount(tier).books.check()

    def teardown(self) -> None:
        try:
            while self.scanning:
                self.go_on(0)
            while self.living:
                self.leave(0)
            self.no_look_saw_what_must_not_be()
        finally:
            self.patch.undo()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()
            shutil.rmtree(self.folder)


TestOwnersMachine = OwnersMachine.TestCase
TestOwnersMachine.settings = settings(
    max_examples=max(5, settings().max_examples // 20), stateful_step_count=40, deadline=None
)
