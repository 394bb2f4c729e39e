"""SIGKILL before and after each system call that changes the disk, in turn, in all that a tier does to a root.

Storing, evicting, deleting, closing (the index is written), opening (the index is read, a fuller root is trimmed), and
taking over what dead owners have left. Why a preloaded library and not ``strace -e inject=...:signal=KILL:when=N``:
strace kills in front of a call, not behind it; its N counts each thread by itself, and the loading of Python, too; it
can be told a file, but not a tree.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests.crash.harness import CHANGING, Said, Sweep, Tally, counted, litter, report, run, store_in
from tests.crash.lives import (
    LONG,
    adopting,
    chunk_at,
    chunk_of_key,
    content_of,
    long_chunk_of_key,
    returning,
    staying,
    storing,
    writing_long,
)
from tests.crash.nursery import Nursery
from tests.fs_kit import _mount, capacity_for, files_under, first_batches, opened, read, recount, scanned, slots
from tierkv.tiers._fs import mount as _fs_mount
from tierkv.tiers._fs.format import charge_nbytes, parse_file_name, part_name
from tierkv.types import ChunkKey, Status

pytestmark = pytest.mark.crash


@dataclass(frozen=True)
class Scene:
    """A script, and what lies on the root when it begins.

    Args:
        script: what is killed.
        before: conversations of the processes that had the root before; all of them live at the same time.
        killed: how they ended; else one of them has closed.
        n_chunks: capacity of the root, in the longest chunks.
        leavers: conversations under another namespace, of a process before those.
    """

    script: Callable[..., Any]
    before: Sequence[Sequence[int]] = ()
    killed: bool = True
    n_chunks: int = 24
    leavers: Sequence[int] = ()
    n_owners: int = 1


SCENES: Final = {
    "a new root, evictions, a deletion and a close": Scene(storing, n_chunks=6),
    "opening after a close: the index is read": Scene(returning, [(0, 1)], killed=False),
    "opening after a kill": Scene(returning, [(0, 1)]),
    "opening a root that is too full: it is trimmed": Scene(returning, [(0, 1, 2, 3)], n_chunks=9),
    "opening a root that another model has filled": Scene(returning, [(0, 1)], n_chunks=10, leavers=(4, 5, 6)),
    "adopting what dead owners have left": Scene(adopting, [(0, 1), (2, 3), (4,)], n_owners=3),
}


async def template_of(nursery: Nursery, scene: Scene, folder: Path, layout: str) -> Path:
    """A root as the scene's script is to find it; for a kill, with an unfinished file of each process's."""
    root, log = folder / "a-template", folder / "template-log"
    settings: dict[str, Any] = {"capacity": capacity_for(40), "layout": layout}
    if scene.leavers:
        await _left(nursery, root, log, [scene.leavers], namespace="another", **settings)
    if scene.killed:
        await _left(nursery, root, log, scene.before, **settings)
        for path in files_under(root) if root.exists() else ():
            parsed = parse_file_name(path.name)
            if parsed is not None and parsed.key.startswith(b"c0."):
                shutil.copyfile(path, path.with_name(part_name(path.name, 7)))
    elif scene.before:
        async with opened(root, **settings) as tier:
            for conversation in scene.before[0]:
                await store_in(tier, conversation)
    return root


async def _left(nursery: Nursery, root: Path, log: Path, before: Sequence[Sequence[int]], **settings: Any) -> None:
    """Processes that were alive together are killed."""
    with counted(nursery, root) as where:
        logs = [log.with_name(f"{log.name}-{i}") for i in range(len(before))]
        lives = []
        for own_log, conversations in zip(logs, before, strict=True):
            lives.append(nursery.run(staying, own_log, conversations=conversations, **where, **settings))
            await nursery.said(own_log, "done")
        for life in lives:
            nursery.kill(life)
    for own_log in logs:
        own_log.unlink()


async def sweep_of(nursery: Nursery, scene: Scene, folder: Path, layout: str) -> Sweep:
    template = await template_of(nursery, scene, folder, layout)
    return Sweep(
        nursery, scene.script, folder, template, capacity_for(scene.n_chunks), scene.n_owners, {"layout": layout}
    )  # fmt: skip


@pytest.mark.parametrize("scene", SCENES)
async def test_a_kill_at_any_call(nursery: Nursery, tmp_path: Path, scene: str, layout: str) -> None:
    """Each script is killed at calls spread over all of it: whatever was acknowledged is served, nothing else is left.

    All of them, in front of the call and behind it, in ``test_a_kill_at_each_call``. At its end the script itself runs
    unharmed, so that the kills are known to lie within it.
    """
    sweep = await sweep_of(nursery, SCENES[scene], tmp_path, layout)
    step = 5 if layout == "files" else 10
    await sweep.all(itertools.count(1, 2 * step))
    await sweep.all(itertools.count(1 + step, 2 * step), after=True)
    assert sweep.tally.n_rounds > 3
    assert sweep.tally.n_verified > 0


async def test_a_kill_beside_a_living_owner(
    nursery: Nursery, tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer is killed at calls all over its life, and the neighbour loses nothing by it.

    A minute later it owns what the dead one had stored, and has swept what was unfinished.
    """
    monkeypatch.setattr(_fs_mount, "HEARTBEAT_S", 3600.0)  # the neighbour looks around when it is told to
    n_kept = 0
    for call in itertools.count(1, 6):
        kept = await _beside_a_neighbour(nursery, tmp_path / f"{call}", call, {"layout": layout})
        if kept is None:
            break
        n_kept += len(kept)
    assert n_kept > 0, "no newcomer had stored anything"


async def _beside_a_neighbour(
    nursery: Nursery, folder: Path, call: int, settings: dict[str, Any]
) -> set[ChunkKey] | None:
    """What the newcomer had acknowledged when it was killed; None if it came to its end before."""
    folder.mkdir()
    root, late_s = folder / "a-root", 0.0
    settings = settings | {"capacity": capacity_for(20)}
    async with opened(root, clock=lambda: time.monotonic() + late_s, **settings) as neighbour:
        async with opened(root, **settings):
            _mount(neighbour).beat()  # leaves half of the root to others
        for conversation in (5, 6):
            await store_in(neighbour, conversation)
        rule = nursery.faults.add(*CHANGING, path=f"/{root.name}", kill=True, first=call, count=1)
        code, said = run(nursery, returning, root, folder / "log", **settings)
        rule.remove()
        if code == 0:
            return None
        Tally().see_as_left(root, settings["capacity"], said)
        mount = _mount(neighbour)
        mount.beat()
        late_s = 61.0
        mount.beat()
        await scanned(neighbour)
        own = {chunk_at(conversation, place).key for conversation in (5, 6) for place in range(4)}
        held = {*mount.books.keys()}
        assert own | said.kept <= held
        statuses, views = await read(neighbour, *held)
        for key, status, view in zip(held, statuses, views, strict=True):
            assert status is Status.OK
            assert view[: chunk_of_key(key).nbytes] == content_of(chunk_of_key(key))
        counts = litter(root)
        assert counts["?"] == counts["index"] == 0
        assert counts["chunk"] == len(held)
        assert recount(root) <= settings["capacity"]
    return said.kept


_TORN: Final = {"after": True, "at_most": 200_001}


async def _all_long(nursery: Nursery, folder: Path, rule: dict[str, Any], *calls: str, **settings: Any) -> int:
    """Kills at each of these calls; how many chunks had been acknowledged, and were there afterwards, whole."""
    n_kept = 0
    root, log = folder / "a-root", folder / "log"
    settings["capacity"] = capacity_for(2, charge_nbytes(LONG.chunk_nbytes))
    for call in itertools.count(1):
        kills = nursery.faults.add(*calls, kill=True, first=call, count=1, **rule)
        code, said = run(nursery, writing_long, root, log, **settings)
        kills.remove()
        if code:
            n_kept += len(said.kept)
            await _as_left_by_long(root, said, settings)
        shutil.rmtree(root, ignore_errors=True)
        log.unlink(missing_ok=True)
        if not code:
            return n_kept
    raise AssertionError("it never ends")


async def _as_left_by_long(root: Path, said: Said, settings: dict[str, Any]) -> None:
    """What was acknowledged is there, what is there is whole, nothing else is left, and it fits."""
    assert not root.exists() or recount(root) <= settings["capacity"]
    async with opened(root, ctx=LONG, **settings) as tier:
        found = [item.key for item in await first_batches(tier)]
        assert said.kept <= {*found}
        (view,) = slots(1, LONG.stride_nbytes)
        for key in found:
            (outcome,) = await tier.read([(key, view)])
            assert outcome.ok, outcome
            content = content_of(long_chunk_of_key(key))
            assert view == content + bytes(len(view) - len(content))
        counters = tier.counters()
        assert counters["corrupt"] == counters["failed_scans"] == counters["trimmed"] == 0
        assert litter(root)["?"] == 0
        assert recount(root) <= settings["capacity"]


async def test_a_kill_within_a_long_chunk(nursery: Nursery, tmp_path: Path, layout: str) -> None:
    """Each of its pieces is cut in two: no row, no name, before all of them are there."""
    rule = _TORN | {"path": ".slab" if layout == "slab" else ".part"}
    assert await _all_long(nursery, tmp_path, rule, "write", layout=layout) > 0


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", [{}, {"after": True}, _TORN])
@pytest.mark.parametrize("durability", ["process", "power"])
async def test_a_kill_at_each_call_of_long_chunks(
    nursery: Nursery, tmp_path: Path, layout: str, durability: str, how: dict[str, Any]
) -> None:
    """The same at every call that changes the disk, in front of it, behind it and within."""
    rule = how | {"path": "/a-root"}
    assert await _all_long(nursery, tmp_path, rule, *CHANGING, layout=layout, durability=durability) > 0


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("scene", SCENES)
async def test_a_kill_at_each_call(nursery: Nursery, tmp_path: Path, scene: str, layout: str, durability: str) -> None:
    """Before and after every single call."""
    sweep = await sweep_of(nursery, SCENES[scene], tmp_path, layout)
    sweep.settings = sweep.settings | {"durability": durability}
    for after in (False, True):
        await sweep.all(itertools.count(1), after=after)
    report(f"{scene}; {durability}; {layout}", sweep.tally)
    assert sweep.tally.n_acknowledged > 0
