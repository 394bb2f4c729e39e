"""Lives that end by SIGKILL, and what must be true of the root that they leave behind."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from tests.crash.lives import DEPTH, chunk_at, chunk_of_key, content_of, restless
from tests.crash.nursery import Nursery
from tests.fs_kit import _mount, capacity_for, files_under, first_batches, kill, opened, read, recount, slots
from tierkv.protocols import TierContext
from tierkv.tiers._fs.catalogue import SLOTS, Row, SlabName, parse_slab_name, rows_of
from tierkv.tiers._fs.format import (
    HEADER_NBYTES,
    PAGE_NBYTES,
    ROOT_LOCK,
    FileName,
    parse_file_name,
    parse_owner_file,
    unpack_header,
)
from tierkv.tiers.fs import FSTier
from tierkv.types import Chunk, ChunkKey, Status

CHANGING: Final = ("open", "write", "rename", "unlink", "mkdir", "sync", "mode", "size")
"""Kinds of system calls after which the disk may be another than before; a lock ends with its process."""


@dataclass
class Said:
    """What lives have said in their logs.

    Attributes:
        kept: acknowledged by a stored event, and nobody had begun to remove it.
        opens: for each open that came to its end: system calls, directories of the root.
        context: what the tier was opened for, if a life said so.
    """

    kept: set[ChunkKey]
    opens: list[tuple[int, int]]
    context: TierContext | None

    @classmethod
    def read(cls, *logs: Path) -> Said:
        """Raises AssertionError for a life that met wrong bytes or an exception."""
        texts = [(log, log.read_text()) for log in logs if log.exists()]
        # A line that goes over the end of a page may be there in part, for a moment or, after a kill, for good.
        lines = [(log, line.split()) for log, text in texts for line in text[: text.rfind("\n") + 1].splitlines()]
        others = [words for _, words in lines if words[0] not in ("+", "-", "open", "ready", "context", "done")]
        assert not others, " ".join(others[0]).replace("\\n", "\n")
        kept: dict[ChunkKey, Path] = {}
        # By time, since one life may adopt what another left and remove it.
        for _, log, words in sorted(
            (int(words[1]), log, words) for log, words in lines if words[0] in ("+", "-", "open")
        ):
            if words[0] == "open":
                # Among several its share may have become smaller: then it trims, and says anew what it has.
                kept = {key: owner for key, owner in kept.items() if owner != log or len(logs) == 1}
            elif words[0] == "+":
                kept[ChunkKey(bytes.fromhex(words[2]))] = log
            else:
                kept.pop(ChunkKey(bytes.fromhex(words[2])), None)
        opens = [(int(words[1]), int(words[2])) for _, words in lines if words[0] == "ready"]
        contexts = [
            TierContext(int(words[1]), int(words[2]), bytes.fromhex(words[3]), 0)
            for _, words in lines
            if words[0] == "context"
        ]
        return cls({*kept}, opens, contexts[0] if contexts else None)


def judge_conversation(chunk: Chunk) -> bytes:
    assert chunk == chunk_of_key(chunk.key)
    return content_of(chunk)


@dataclass
class Tally:
    """What all rounds together have shown. Every count is of things that were found right: what is not, raises.

    Args:
        judge: the bytes that a file must hold which says this of itself; raises AssertionError if it may not say so.
    """

    judge: Callable[[Chunk], bytes] = judge_conversation
    n_rounds: int = 0
    n_acknowledged: int = 0
    n_verified: int = 0
    n_unfinished: int = 0
    most_owners: int = 0
    """That had left files at one time: two that die again and again within a minute may leave more than two ids."""
    n_index: int = 0
    """Kills that left an index, whole or not: in a close, or before the next open had read it."""
    opens: list[tuple[int, int]] = field(default_factory=list)
    """The first of each life: system calls, directories of the root."""
    reopen_s: list[float] = field(default_factory=list)
    control_s: list[float] = field(default_factory=list)
    """Beside each of ``reopen_s``: how long a root takes that is as large and always as it was."""
    how: Counter[str] = field(default_factory=Counter)
    _contents: dict[ChunkKey, bytes] = field(default_factory=dict)

    def see_as_left(self, root: Path, capacity: int, said: Said, began_nbytes: int = 0) -> None:
        """At the instant of the kill: under the capacity, and whatever has a chunk's name is that chunk, whole.

        A root that held more than its capacity, ``began_nbytes``, when the life began may have been trimmed or not yet.
        """
        self.n_rounds += 1
        self.n_acknowledged += len(said.kept)
        self.opens += said.opens[:1]
        # Before the trim, for a moment, an open of a slab tries out the file system, and makes room for another
        # catalogue if its capacity is another than before: some pages that were not there.
        more_nbytes = sum(path.stat().st_size for path in root.rglob("*.s*.part")) if not said.opens else 0
        allowed_nbytes = (capacity if said.opens else max(capacity, began_nbytes)) + more_nbytes
        sizes = [(path.name[-24:], path.stat().st_size, path.stat().st_blocks * 512) for path in files_under(root)]
        assert recount(root) <= allowed_nbytes, (allowed_nbytes, said.opens, sizes)
        for path in files_under(root):
            self.n_index += ".index" in path.name
            parsed, slab = parse_file_name(path.name), parse_slab_name(path.name)
            if parsed is not None and not parsed.is_part:
                self._check(path.read_bytes(), parsed.key, path)
            elif slab is not None and _is_catalogue(path, slab):
                with path.with_suffix(".slab").open("rb") as file:
                    for row in _rows(path, slab):
                        self._check(
                            os.pread(file.fileno(), slab.slot_nbytes, row.slot * slab.slot_nbytes), row.key, path
                        )

    def _check(self, data: bytes, key: ChunkKey, path: Path) -> None:
        """These bytes have this chunk's name, or row."""
        chunk = unpack_header(memoryview(data)[:HEADER_NBYTES]).chunk
        assert chunk.key == key
        content = self.judge(chunk)
        padded = content + bytes(-len(content) % PAGE_NBYTES)
        assert data[HEADER_NBYTES:].startswith(padded), f"{path}: wrong bytes"
        self._contents[key] = content

    async def reopen(
        self, root: Path, capacity: int, kept: set[ChunkKey], *, clean: bool = True, n_owners: int = 1,
        fits: bool = True, **settings: Any,
    ) -> None:  # fmt: skip
        """What was acknowledged is there; all that is there is whole and right; nothing else is left, and it fits.

        ``clean`` closes at the end, else it ends as if killed. ``n_owners`` processes may have left files of theirs, of
        which the tier adopts one's at once. ``fits`` says that the root is known to have been trimmed before.
        """
        began_s = time.perf_counter()
        async with opened(root, capacity=capacity, **settings) as tier:
            ours = {item.key for item in await first_batches(tier)}
            self.reopen_s.append(time.perf_counter() - began_s)
            others = [key for key in kept if key not in ours]
            probed = await tier.probe(others) if n_owners > 1 else [None] * len(others)
            lost = [key for key, item in zip(others, probed, strict=True) if item is None]
            assert not lost, f"acknowledged and gone: {lost}; {tier.usage()}, {tier.counters()}"
            keys = [*ours, *others]
            statuses, views = await read(tier, *keys) if keys else ([], [])
            for key, status, view in zip(keys, statuses, views, strict=True):
                content = self._contents[key]
                assert status is Status.OK, (key, status)
                assert view == content + bytes(len(view) - len(content)), f"{key!r}: wrong bytes"
            counters, counts = tier.counters(), litter(root)
            assert counters["corrupt"] == counters["failed_scans"] == 0, counters
            assert not (fits and counters["trimmed"]), counters
            assert counts["?"] == 0, counts
            assert counts["index"] <= counts["lock"] - 2, counts  # ours has been read, so it is gone
            idle = _idle_owners(root) - {_mount(tier)._ownership.id}
            assert not idle, "lock files of dead owners who have nothing left"
            if n_owners == 1:
                assert counts["lock"] == 2, counts
                here = root / _mount(tier)._digest.hex()
                assert litter(here)["chunk"] == len(ours), "a chunk that nobody counts"
                # In a namespace that nobody reads half a slab counts, and goes with the rest.
                assert {p.stem for p in here.glob("*.slab")} == {p.stem for p in here.glob("*.slots")}
            assert recount(root) <= capacity
            if not clean:
                kill(tier)
        assert recount(root) <= capacity
        self.n_verified += len(keys)
        self.most_owners = max(self.most_owners, counts["lock"] - 1)
        self.n_unfinished += counters["unfinished"]

    def growth(self) -> tuple[float, float]:
        """How much dearer the last quarter's openings were than the first's, in system calls and in time.

        Time is told in that of the control: the machine's own pace takes no part.
        """
        most = max((n_directories for _, n_directories in self.opens), default=0)
        # A root that is still filling has fewer directories to list, and how many rounds that takes is chance.
        calls = [n_calls for n_calls, n_directories in self.opens if n_directories >= 0.8 * most]
        seconds = [aged / control for aged, control in zip(self.reopen_s, self.control_s, strict=False)]
        return _growth(calls), _growth(seconds)

    def __str__(self) -> str:
        calls, seconds = self.growth()
        how = " ".join(f"{n} {what}" for what, n in sorted(self.how.items()))
        return (
            f"{self.n_rounds} kills {how and f'({how})'}: 0 of {self.n_acknowledged} acknowledged chunks lost, 0 of "
            f"{self.n_verified} read wrong; {self.n_unfinished} unfinished files swept, {self.n_index} indexes of "
            f"interrupted closes, files of at most {self.most_owners} owners; opening costs x {calls:.2f} in calls and "
            f"x {seconds:.2f} in time by the end"
        )


def _growth(numbers: Sequence[float]) -> float:
    """By medians: what happens now and then, such as a second scan for what was adopted, is no growth."""
    n = max(1, len(numbers) // 4)
    return median(numbers[-n:]) / median(numbers[:n]) if numbers else 1.0


def _idle_owners(root: Path) -> set[str]:
    """Ids that have a lock file and nothing behind it."""
    names = [path.name for path in files_under(root)]
    having = {found.owner for name in names if (found := parse_file_name(name) or parse_slab_name(name)) is not None}
    locks = {owner[0] for name in names if (owner := parse_owner_file(name)) is not None and owner[1] == "lock"}
    return locks - having


def report(what: str, tally: Tally) -> None:
    """For who runs it by hand, as each part ends: a line in the file that ``TIERKV_CRASH_REPORT`` names."""
    name = os.environ.get("TIERKV_CRASH_REPORT")
    if name:
        with open(name, "a", encoding="utf-8") as file:
            file.write(f"{what}: {tally}\n")


def _is_catalogue(path: Path, slab: SlabName) -> bool:
    """Of a slab that is there, too: it goes first."""
    return slab.kind == SLOTS and not slab.is_part and path.with_suffix(".slab").exists()


def _rows(catalogue: Path, slab: SlabName) -> list[Row]:
    dir_fd = os.open(catalogue.parent, os.O_RDONLY)
    try:
        return list(rows_of(slab, dir_fd, bytes.fromhex(catalogue.parent.name)))
    finally:
        os.close(dir_fd)


def litter(root: Path) -> dict[str, int]:
    """What lies on the root, by kind; "?" counts what should not be there once it is open."""
    counts = {"chunk": 0, "lock": 0, "index": 0, "?": 0}
    for path in files_under(root):
        parsed, slab, owner = (parse(path.name) for parse in (parse_file_name, parse_slab_name, parse_owner_file))
        if isinstance(parsed, FileName):
            counts["?" if parsed.is_part else "chunk"] += 1
        elif isinstance(slab, SlabName):
            counts["?"] += slab.is_part
            counts["chunk"] += len(_rows(path, slab)) if _is_catalogue(path, slab) else 0
        elif path.name == ROOT_LOCK or (owner is not None and owner[1] == "lock"):
            counts["lock"] += 1
        else:
            counts["index" if owner is not None and owner[1] == "index" else "?"] += 1
    return counts


async def store_in(tier: FSTier, conversation: int) -> None:
    """A whole conversation, by this process."""
    for place in range(DEPTH):
        chunk = chunk_at(conversation, place)
        (slot,) = slots(1)
        slot[: chunk.nbytes] = content_of(chunk)
        (outcome,) = await tier.write([(chunk, slot)])
        assert outcome.ok, outcome


@contextmanager
def counted(nursery: Nursery, root: Path) -> Iterator[dict[str, Any]]:
    """Settings of a life that say where it is, and where its system calls are counted."""
    rule = nursery.faults.add(path=f"/{root.name}", claimed=True)
    try:
        yield {"root": str(root), "counter": rule.at}
    finally:
        rule.remove()


def run(nursery: Nursery, life: Callable[..., Any], root: Path, log: Path, **settings: Any) -> tuple[int, Said]:
    """A life to its own end, or to where a rule kills it: how it ended, and what it said."""
    with counted(nursery, root) as where:
        code = nursery.wait(nursery.run(life, log, **where, **settings))
    return code, Said.read(log)


@dataclass
class Sweep:
    """A script, killed at its first system call, then at its second, and so on, each time from the same root.

    Args:
        script: of :mod:`tests.crash.lives`.
        folder: for roots and logs.
        template: the root that it begins with; need not exist.
        capacity: of the root, in bytes.
        n_owners: processes whose files may be left at the end.
        settings: of the tier.
    """

    nursery: Nursery
    script: Callable[..., Any]
    folder: Path
    template: Path
    capacity: int
    n_owners: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)

    async def kill_at(self, call: int, **how: Any) -> bool:
        """One round; False if the script has ended without coming to so many calls."""
        root, log = self.folder / "a-root", self.folder / "log"
        if self.template.exists():
            shutil.copytree(self.template, root)
        began_nbytes = recount(root)
        rule = self.nursery.faults.add(*CHANGING, path=f"/{root.name}", kill=True, first=call, count=1, **how)
        code, said = run(self.nursery, self.script, root, log, capacity=self.capacity, **self.settings)
        struck = rule.n_struck
        rule.remove()
        assert code == (-9 if struck else 0)
        if struck:
            self.tally.see_as_left(root, self.capacity, said, began_nbytes)
            await self.tally.reopen(
                root, self.capacity, said.kept, clean=bool(call % 2), n_owners=self.n_owners,
                fits=bool(said.opens) or began_nbytes <= self.capacity, **self.settings,
            )  # fmt: skip
        shutil.rmtree(root, ignore_errors=True)
        log.unlink(missing_ok=True)
        return bool(struck)

    async def all(self, calls: Iterable[int], **how: Any) -> None:
        """Kill at each of these calls, as far as the script comes."""
        for call in calls:
            if not await self.kill_at(call, **how):
                return


@dataclass
class Storm:
    """A root on which one life after another stores, loads and deletes at random, and is killed.

    Args:
        seed: of everything but the instants.
        n_parts: lives at a time; all of a round are killed, one after another.
        life: what a process does until then.
    """

    nursery: Nursery
    folder: Path
    capacity: int
    seed: int
    n_parts: int = 1
    life: Callable[..., Any] = restless
    settings: dict[str, Any] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._longest_s = 0.3
        self._context: TierContext | None = None

    async def round(self) -> None:
        rng, root = self._rng, self.folder / "a-root"
        n = self.tally.n_rounds
        logs = [self.folder / f"log-{n}-{part}" for part in range(self.n_parts)]
        how = rng.choice(("instant", "instant", "call", "torn"))
        self.tally.how[how] += 1
        rule = self._rule(how, root)  # before the one that counts: of two rules for a call, the first counts
        with ExitStack() as stack:
            lives = [
                self.nursery.run(
                    self.life, log, seed=rng.randrange(1 << 30), part=part, n_parts=self.n_parts,
                    capacity=self.capacity, **stack.enter_context(counted(self.nursery, root)), **self.settings,
                )
                for part, log in enumerate(logs)
            ]  # fmt: skip
            if rule is None:
                # The kill is to hit anywhere, so there is nothing to wait for.
                await asyncio.sleep(rng.uniform(0.0, self._longest_s))
            else:
                await rule.met(meanwhile=lambda: Said.read(*logs))  # a life that has failed comes to no call any more
                rule.remove()
            for life in rng.sample(lives, len(lives)):
                self.nursery.kill(life)
        said = Said.read(*logs)
        self.tally.see_as_left(root, self.capacity, said)
        self._context = said.context or self._context
        await self.tally.reopen(
            root, self.capacity, said.kept, clean=rng.random() < 0.5, n_owners=self.n_parts, ctx=self._context,
            **self.settings,
        )  # fmt: skip
        await self._control()

    async def _control(self) -> None:
        root, capacity = self.folder / "control", capacity_for(20)
        if not root.exists():
            async with opened(root, capacity=capacity, **self.settings) as tier:
                for conversation in range(4):
                    await store_in(tier, conversation)
        began_s = time.perf_counter()
        async with opened(root, capacity=capacity, **self.settings) as tier:
            await first_batches(tier)
            self.tally.control_s.append(time.perf_counter() - began_s)
            kill(tier)

    def _rule(self, how: str, root: Path) -> Any:
        """What kills the first life that comes to it; None for a kill from outside."""
        rng, add = self._rng, self.nursery.faults.add
        if how == "call":
            first, after = rng.randrange(1, 600), rng.random() < 0.5
            return add(path=f"/{root.name}", kill=True, after=after, first=first, count=1)
        if how == "torn":
            at_most = rng.randrange(4 * PAGE_NBYTES)
            path, first = (".slab" if self.settings.get("layout") == "slab" else ".part"), rng.randrange(1, 60)
            return add("write", path=path, kill=True, after=True, at_most=at_most, first=first, count=1)
        return None
