"""A tier against a dict, in any sequence of calls; see :func:`tier_machine`."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, ClassVar, Final

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tierkv.protocols import ScanTier
from tierkv.testing._keys import AWKWARD
from tierkv.testing._leaks import no_leaks
from tierkv.testing._rules import require
from tierkv.testing._tier_bench import Bench, DoorFactory, Settings, TierFactory, check_bytes, writable
from tierkv.types import Chunk, ChunkKey, Status

_KEYS: Final = AWKWARD[:8]
_batches = st.lists(st.sampled_from(_KEYS), min_size=1, max_size=4, unique=True)


class TierMachine(RuleBasedStateMachine):
    """The base of what :func:`tier_machine` makes. It owns an event loop, on which each rule runs to its end."""

    settings: ClassVar[Settings]

    @initialize()
    def begin(self) -> None:
        self.leaks = no_leaks("a tier, over a whole run")
        self.directory = tempfile.TemporaryDirectory(prefix="tierkv-machine-")
        self.leaks.__enter__()
        self.runner = asyncio.Runner()
        self.bench = Bench(self.settings, Path(self.directory.name))
        self.held: dict[ChunkKey, tuple[Chunk, int]] = {}
        """What was acknowledged, and which edition of its bytes."""
        self.unsure: set[ChunkKey] = set()
        """What was damaged, taken away or refused: its bytes or a miss."""
        self.n_writes = 0
        self.run(self.open())

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(coroutine)

    async def open(self) -> None:
        self.tier: Any = self.settings.factory(self.bench.directory)
        await self.tier.open(self.bench.context())
        await writable(self.tier)

    @property
    def scans(self) -> bool:
        return isinstance(self.tier, ScanTier)

    @rule(keys=_batches, lengths=st.lists(st.floats(0, 1), min_size=4, max_size=4))
    def write(self, keys: list[ChunkKey], lengths: list[float]) -> None:
        self.n_writes += 1
        longest = self.settings.chunk_nbytes
        chunks = [Chunk(key, nbytes=max(1, int(part * longest))) for key, part in zip(keys, lengths, strict=False)]
        outcomes = self.run(self.bench.offer(self.tier, *chunks, edition=self.n_writes))
        for chunk, outcome in zip(chunks, outcomes, strict=True):
            require(outcome.status in (Status.OK, Status.REFUSED), "a write is taken or refused", outcome)
            if outcome.ok:
                self.held[chunk.key] = chunk, self.n_writes
                self.unsure.discard(chunk.key)
            elif chunk.key in self.held:
                self.unsure.add(chunk.key)

    @rule(keys=st.lists(st.sampled_from(_KEYS), min_size=1, max_size=5))
    def read(self, keys: list[ChunkKey]) -> None:
        answers = self.run(self.bench.read(self.tier, *((key, self.bench.stride_nbytes) for key in keys)))
        for key, (status, data) in zip(keys, answers, strict=True):
            held = self.held.get(key)
            if status is Status.OK:
                require(held is not None, "only what was written is read", key)
                assert held is not None
                check_bytes(held[0], data, held[1])
            else:
                require(held is None or key in self.unsure, "what was acknowledged is read", key, status)
                require(status in (Status.MISSING, Status.CORRUPT), "what cannot be read is a miss", key, status)
                require(held is not None or status is Status.MISSING, "an absent key reads as MISSING", key, status)
                self.held.pop(key, None)
                self.unsure.discard(key)

    @rule(keys=_batches)
    def contains(self, keys: list[ChunkKey]) -> None:
        there = list(self.run(self.tier.contains(keys)))
        for key, answer in zip(keys, there, strict=True):
            require(answer == (key in self.held) or key in self.unsure, "contains says what is there", key, answer)

    @rule(keys=_batches)
    def delete(self, keys: list[ChunkKey]) -> None:
        self.run(self.tier.delete(keys))
        for key in keys:
            self.held.pop(key, None)
            self.unsure.discard(key)

    @precondition(lambda self: self.scans)
    @rule(save=st.booleans())
    def reopen(self, *, save: bool) -> None:
        async def again() -> None:
            if save:
                await self.tier.save_order([chunk for chunk, _ in self.held.values()])
            await self.tier.aclose()
            await self.open()

        self.run(again())

    @precondition(lambda self: self.settings.raw is not None and self.held.keys() - self.unsure)
    @rule(data=st.data())
    def vanish(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.held.keys() - self.unsure)), label="key")
        self.bench.raw(self.tier).remove(key)
        self.unsure.add(key)

    @precondition(lambda self: self.settings.verifies and self.settings.raw and self.held.keys() - self.unsure)
    @rule(data=st.data(), place=st.floats(0, 1), cut=st.booleans())
    def damage(self, data: st.DataObject, place: float, *, cut: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.held.keys() - self.unsure)), label="key")

        def change(record: bytes) -> bytes:
            at = int(place * (len(record) - 1))
            return record[:at] if cut else record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]

        self.bench.raw(self.tier).corrupt(key, change)
        self.unsure.add(key)

    def teardown(self) -> None:
        if not hasattr(self, "runner"):
            return
        try:
            if self.held:
                self.read(sorted(self.held))
        finally:
            self.run(self.tier.aclose())
            self.runner.close()
            try:
                self.leaks.__exit__(None, None, None)
            finally:
                self.directory.cleanup()


def tier_machine(
    factory: TierFactory,
    *,
    raw: DoorFactory | None = None,
    verifies: bool = False,
    chunk_nbytes: int = 5000,
    capacity_nbytes: int = 1 << 22,
) -> type[TierMachine]:
    """A Hypothesis state machine for a tier; :func:`check_tier` has the arguments.

    ``TestMyTier = tier_machine(MyTier).TestCase`` is a test for pytest and unittest.
    """
    settings = Settings(factory, raw, chunk_nbytes, capacity_nbytes, verifies)
    return type("TierMachine", (TierMachine,), {"settings": settings})
