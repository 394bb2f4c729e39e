"""FSTier against a dict, with everything that may happen to a disk in between: random steps, every byte checked."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.fs_kit import (
    CHARGE,
    LONGEST,
    NAMESPACE,
    PAGE,
    capacity_for,
    chunk_of,
    context,
    first_batches,
    kill,
    payload_of,
    recount,
    scanned,
    slot_of,
    slots,
    using,
)
from tests.patience import PATIENCE_S
from tierkv.tiers._fs.format import charge_nbytes, file_name, leaf_of, namespace_digest
from tierkv.tiers.fs import FSTier
from tierkv.types import Chunk, Reason, Status

N_CHUNKS = 6
numbers = st.integers(0, 7)
lengths = st.sampled_from([1, 100, PAGE, PAGE + 1, LONGEST])


class FSMachine(RuleBasedStateMachine):
    """The model: what each key must give back. A key whose file was tampered with must miss, or be right by luck."""

    layout: Literal["files", "slab"] = "files"

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.root = Path(tempfile.mkdtemp(prefix="tierkv-machine-"))
        self.model: dict[int, Chunk] = {}
        self.damaged: dict[int, Chunk] = {}
        self.foreign: set[Path] = set()
        self.n_foreign = 0
        self.tier: FSTier | None = None
        self.ids: set[str] = set()
        self.order: list[Chunk] | None = None

    def run(self, call: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(call, PATIENCE_S))

    @initialize()
    def start(self) -> None:
        self.open()

    @precondition(lambda self: self.tier is None)
    @rule()
    def open(self) -> None:
        with using(self.layout):
            capacity = capacity_for(N_CHUNKS)
        # A rewrite takes a spare slot: with two threads it would be chance which of a batch is refused in a full slab.
        n_writers = 1 if self.layout == "slab" else 2
        tier = FSTier(
            self.root, capacity=capacity, min_free=0, n_read_threads=2, n_write_threads=n_writers, layout=self.layout
        )
        self.run(tier.open(context()))
        self.run(scanned(tier))
        assert tier.writable
        announced = self.run(first_batches(tier))
        found = {f.key: f for f in announced}
        if self.order is not None:
            assert [f.chunk for f in announced] == self.order
            self.order = None
        self.tier = tier
        self.ids.add(self.ownership.id)
        for number, chunk in self.model.items():
            assert found.pop(chunk.key).charge_nbytes == self.charge(chunk), number
        # What else was found may only be a file that was tampered with and still looks whole.
        assert set(found) <= {chunk.key for chunk in self.damaged.values()}

    @precondition(lambda self: self.tier is not None)
    @rule(orders=st.permutations(range(8)))
    def close(self, orders: list[int]) -> None:
        assert self.tier is not None
        order = [self.model[i] for i in orders if i in self.model]
        self.run(self.tier.save_order(order))
        self.run(self.tier.aclose())
        self.tier = None
        if not self.damaged:
            self.order = order
            self.open()

    @precondition(lambda self: self.tier is not None)
    @rule()
    def kill(self) -> None:
        assert self.tier is not None
        kill(self.tier)
        self.tier = None

    @precondition(lambda self: self.tier is not None)
    @rule(batch=st.lists(st.tuples(numbers, lengths), min_size=1, max_size=4, unique_by=lambda item: item[0]))
    def write(self, batch: list[tuple[int, int]]) -> None:
        assert self.tier is not None
        items = []
        for (number, nbytes), view in zip(batch, slots(len(batch)), strict=True):
            chunk = chunk_of(number, nbytes, end_token=number)
            view[:nbytes] = payload_of(chunk.key, nbytes)
            items.append((chunk, view))
        for (number, _), (chunk, _), outcome in zip(batch, items, self.run(self.tier.write(items)), strict=True):
            if outcome.ok:
                self.model[number] = chunk
                self.damaged.pop(number, None)
            else:
                assert outcome.reason is Reason.FULL or number in self.damaged

    @precondition(lambda self: self.tier is not None)
    @rule(batch=st.lists(numbers, min_size=1, max_size=8, unique=True))
    def read(self, batch: list[int]) -> None:
        assert self.tier is not None
        views = slots(len(batch))
        keys = [chunk_of(number).key for number in batch]
        outcomes = self.run(self.tier.read(list(zip(keys, views, strict=True))))
        for number, key, view, outcome in zip(batch, keys, views, outcomes, strict=True):
            assert outcome.key == key
            chunk = self.model.get(number) or self.damaged.get(number)
            if number in self.model:
                assert outcome.ok, outcome
            if outcome.ok:
                assert chunk is not None
                assert view == payload_of(key, chunk.nbytes) + bytes(len(view) - chunk.nbytes)
            else:
                assert outcome.status in (Status.MISSING, Status.CORRUPT)
                self.damaged.pop(number, None)

    @precondition(lambda self: self.tier is not None)
    @rule(batch=st.lists(numbers, min_size=1, max_size=4))
    def delete(self, batch: list[int]) -> None:
        assert self.tier is not None
        self.run(self.tier.delete([chunk_of(number).key for number in batch]))
        for number in batch:
            self.model.pop(number, None)
            self.damaged.pop(number, None)

    @precondition(lambda self: self.tier is not None)
    @rule(batch=st.lists(numbers, min_size=1, max_size=8))
    def probe(self, batch: list[int]) -> None:
        assert self.tier is not None
        keys = [chunk_of(number).key for number in batch]
        for number, key, found in zip(batch, keys, self.run(self.tier.probe(keys)), strict=True):
            if number in self.model:
                assert found is not None and found.key == key and found.owned
                assert found.charge_nbytes == self.charge(self.model[number])
            elif number not in self.damaged:
                assert found is None
        settled = [self.tier.settled(chunk_of(number).key) for number in range(8)]
        assert not any(settled[number] for number in self.model)
        assert all(settled[number] for number in range(8) if number not in self.model and number not in self.damaged)

    @precondition(lambda self: self.model)
    @rule(pick=st.integers(0, 100), at=st.integers(0, 10**9), bit=st.integers(0, 7))
    def flip_a_bit(self, pick: int, at: int, bit: int) -> None:
        path = self.tampered(pick)
        data = bytearray(path.read_bytes())
        data[at % len(data)] ^= 1 << bit
        path.write_bytes(data)

    @precondition(lambda self: self.model and self.layout == "files")
    @rule(pick=st.integers(0, 100), at=st.integers(0, 10**9))
    def cut(self, pick: int, at: int) -> None:
        path = self.tampered(pick)
        os.truncate(path, at % path.stat().st_size)

    @precondition(lambda self: self.model and self.layout == "files")
    @rule(pick=st.integers(0, 100), what=st.sampled_from(["nothing", "fifo", "link", "directory"]))
    def replace(self, pick: int, what: str) -> None:
        path = self.tampered(pick)
        path.unlink()
        if what == "fifo":
            os.mkfifo(path)
        elif what == "link":
            path.symlink_to(self.root / "tierkv.lock")
        elif what == "directory":
            path.mkdir()

    @precondition(lambda self: len(self.model) >= 2 and self.layout == "files")
    @rule(pick=st.integers(0, 100))
    def swap(self, pick: int) -> None:
        # Of one length: what somebody else makes longer is not counted before it is read or listed again.
        by_length = sorted(self.model, key=lambda i: (charge_nbytes(self.model[i].nbytes), i))
        pairs = [
            (a, b) for a, b in pairwise(by_length)
            if charge_nbytes(self.model[a].nbytes) == charge_nbytes(self.model[b].nbytes)
        ]  # fmt: skip
        if not pairs:
            return
        one, two = (self.tamper_with(number) for number in pairs[pick % len(pairs)])
        one.rename(self.root / "swap")
        two.rename(one)
        (self.root / "swap").rename(two)

    @rule()
    def drop_a_foreign_file(self) -> None:
        folder = self.root / namespace_digest(NAMESPACE).hex() / leaf_of(chunk_of(0).key)
        if folder.is_dir():
            path = folder / f"foreign-{self.n_foreign}"
            path.write_bytes(b"f" * PAGE)
            self.foreign.add(path)
            self.n_foreign += 1

    @invariant()
    def nothing_is_uncounted_and_nothing_foreign_is_touched(self) -> None:
        assert all(path.read_bytes() == b"f" * PAGE for path in self.foreign)
        ours = recount(self.root) - PAGE * len(self.foreign)
        with using(self.layout):
            capacity = capacity_for(N_CHUNKS)
        assert ours <= capacity
        if self.tier is None:
            return
        mount = self.mount_of()
        mount.books.check()
        assert ours <= mount.books.used_nbytes <= capacity
        expected = sum(self.charge(chunk) for chunk in self.model.values())
        # A damaged file counts until somebody looks at it.
        extra = self.tier.usage()["chunks_nbytes"] - expected
        assert extra == 0 if not self.damaged else 0 <= extra <= sum(self.charge(c) for c in self.damaged.values())
        if not self.damaged:
            assert self.on_disk_nbytes(ours) == expected

    def charge(self, chunk: Chunk) -> int:
        return CHARGE if self.layout == "slab" else charge_nbytes(chunk.nbytes)

    def on_disk_nbytes(self, ours: int) -> int:
        """What chunks occupy by the outsider's count."""
        return ours - PAGE * len(list(self.root.glob("owner-*.lock")))

    def teardown(self) -> None:
        try:
            if self.tier is not None:
                self.run(self.tier.aclose())
        finally:
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()
            shutil.rmtree(self.root)

    @property
    def ownership(self) -> Any:
        return self.mount_of()._ownership

    def mount_of(self) -> Any:
        assert self.tier is not None and self.tier._mount is not None
        return self.tier._mount

    def path(self, number: int) -> Path | None:
        key = chunk_of(number).key
        folder = self.root / namespace_digest(NAMESPACE).hex() / leaf_of(key)
        for owner in self.ids:
            if os.path.lexists(folder / file_name(key, owner)):
                return folder / file_name(key, owner)
        return None

    def tampered(self, pick: int) -> Path:
        return self.tamper_with(sorted(self.model)[pick % len(self.model)])

    def tamper_with(self, number: int) -> Path:
        """A chunk of the model that may miss from now on."""
        self.damaged[number] = self.model.pop(number)
        path = self.path(number)
        assert path is not None
        return path


class SlabMachine(FSMachine):
    """The same in slots: what may be damaged there are bits of a slot."""

    layout = "slab"

    def path(self, number: int) -> Any:
        return slot_of(self.root, chunk_of(number).key)

    def on_disk_nbytes(self, ours: int) -> int:
        catalogues = sum(path.stat().st_size for path in self.root.rglob("*.slots"))
        return super().on_disk_nbytes(ours) - catalogues - int(self.mount_of().books.idle_nbytes)


TestSlabMachine = SlabMachine.TestCase
TestSlabMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestFSMachine = FSMachine.TestCase
TestFSMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
