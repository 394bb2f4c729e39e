"""``durability="power"``: what is synced, in which order, and that nothing is acknowledged before.

No power is cut here. What the kernel was asked for is written down call by call, by the preloaded library, and judged
by what POSIX promises: a file's bytes are safe after its own sync, a name after the sync of the directory it stands in.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.harness import Said, run
from tests.crash.lives import storing
from tests.crash.nursery import Nursery
from tests.fs_kit import capacity_for, first_batches, opened, using
from tierkv.tiers._fs import scan as _fs_scan
from tierkv.tiers._fs.format import PART, parse_file_name, parse_owner_file

pytestmark = pytest.mark.crash


@pytest.fixture
def nursery(tmp_path: Path) -> Nursery:
    """One of its own for each test, so that its log is."""
    return Nursery(tmp_path / "nursery", "tests.crash.lives")


def traced(
    nursery: Nursery, folder: Path, *, kill_at_sync: int = 0, durability: str = "power", layout: str = "files"
) -> tuple[list[tuple[str, str]], Said]:
    """What a life asked the kernel for that bears on power, with paths relative to the folder of its root."""
    root = folder / "deep" / "a-root"
    add, path = nursery.faults.add, str(folder)
    rules = [add("sync", path=path, kill=True, log=True, first=kill_at_sync, count=1)] if kill_at_sync else []
    rules.append(add("write", "rename", "mkdir", "sync", path=path, log=True))
    n_before = len(nursery.faults.log())
    with using(layout):
        capacity = capacity_for(6)
    _, said = run(nursery, storing, root, folder / "log", capacity=capacity, durability=durability, layout=layout)
    for rule in rules:
        rule.remove()
    calls = nursery.faults.log()[n_before:]
    return [(kind, path.removeprefix(str(folder)).lstrip("/")) for kind, path in calls], said


def safe_names(calls: list[tuple[str, str]]) -> dict[str, str]:
    """Chunk files that a loss of power could not take any more, by name: path."""
    made: set[str] = set()
    synced_bytes: set[str] = set()
    waiting: dict[str, set[str]] = {}
    safe: set[str] = set()
    for kind, path in calls:
        folder = path.rpartition("/")[0]
        if kind == "write" and PART in path:
            synced_bytes.discard(path.partition(PART)[0])
        elif kind == "mkdir":
            made.add(path)
            waiting.setdefault(folder, set()).add(path)
        elif kind == "rename":
            waiting.setdefault(folder, set()).add(path)
        elif kind == "sync" and PART in path:
            synced_bytes.add(path.partition(PART)[0])
        elif kind == "sync":
            safe |= waiting.pop(path, set())
    return {
        path.rpartition("/")[2]: path
        for path in safe & synced_bytes
        if all(above in safe for above in made if path.startswith(f"{above}/"))
    }


def test_data_then_name_then_every_directory_above(nursery: Nursery, tmp_path: Path) -> None:
    """Each chunk: written, synced, named, its directory synced; and each new directory's name in the one above it."""
    folder = tmp_path / "f"
    folder.mkdir()
    with nursery:
        calls, said = traced(nursery, folder)
    of_chunks = [(kind, path) for kind, path in calls if kind != "mkdir" and "/" in path.removeprefix("deep/a-root/")]
    named = [path for kind, path in of_chunks if kind == "rename"]
    assert len(named) > 8
    for path in named:
        at = of_chunks.index(("rename", path))
        assert of_chunks[at - 2][0] == "write" and of_chunks[at - 2][1].startswith(path + PART)
        assert of_chunks[at - 1] == ("sync", of_chunks[at - 2][1])
        assert of_chunks[at + 1] == ("sync", path.rpartition("/")[0])
    assert {*safe_names(calls)} == {path.rpartition("/")[2] for path in named}
    assert ("mkdir", "deep/a-root") in calls, "the root was made meanwhile"
    assert said.kept


def test_nothing_is_acknowledged_before_it_is_safe(nursery: Nursery, tmp_path: Path) -> None:
    """Killed in front of its first sync, its second, and so on: what had been acknowledged by then was safe."""
    n_kept = 0
    with nursery:
        for n in range(1, 40, 2):
            folder = tmp_path / f"f{n}"
            folder.mkdir()
            calls, said = traced(nursery, folder, kill_at_sync=n)
            if not calls or calls[-1][0] != "sync":
                break
            safe = {parsed.key for name in safe_names(calls[:-1]) if (parsed := parse_file_name(name)) is not None}
            assert said.kept <= safe
            n_kept += len(said.kept)
    assert n_kept > 20


def test_directories_that_others_made_and_did_not_sync(nursery: Nursery, tmp_path: Path) -> None:
    """A process that syncs nothing made the root and all that is in it: who writes there with power syncs it, too."""
    folder = tmp_path / "f"
    folder.mkdir()
    with nursery:
        before, _ = traced(nursery, folder, durability="process")
        calls, _ = traced(nursery, folder)
    named = {path.rpartition("/")[2] for kind, path in calls if kind == "rename" and "owner-" not in path}
    assert ("mkdir", "deep/a-root") in before
    assert {*safe_names([*before, *calls])} == named


def test_without_it_nothing_is_synced(nursery: Nursery, tmp_path: Path) -> None:
    """The control: with the default the same life syncs nothing, so the trace can tell the two apart."""
    folder = tmp_path / "f"
    folder.mkdir()
    with nursery:
        calls, said = traced(nursery, folder, durability="process")
    assert said.kept
    assert "rename" in {kind for kind, _ in calls}
    assert "sync" not in {kind for kind, _ in calls}
    assert safe_names(calls) == {}


async def test_what_is_not_synced_is_not_needed(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lock files and the index are never synced: with all of them lost, each chunk is found and belongs to us."""
    monkeypatch.setattr(_fs_scan, "_TWO_HEARTBEATS_S", 0.0)  # so long a living owner would have to make its file anew
    folder = tmp_path / "f"
    folder.mkdir()
    with nursery:
        _, said = traced(nursery, folder)
    root = folder / "deep" / "a-root"
    for path in root.iterdir():
        if path.name == "tierkv.lock" or parse_owner_file(path.name) is not None:
            path.unlink()
    async with opened(root, capacity=capacity_for(6), durability="power") as tier:
        assert {item.key for item in await first_batches(tier)} == said.kept
        assert tier.counters()["orphans"] == len(said.kept)


def test_slot_then_row_and_nothing_before_it_is_safe(nursery: Nursery, tmp_path: Path) -> None:
    """The slab: a row is written once its slot is synced, and acknowledged once all rows and all names are."""
    n_kept = 0
    with nursery:
        for n in range(1, 30, 2):
            folder = tmp_path / f"f{n}"
            folder.mkdir()
            calls, said = traced(nursery, folder, kill_at_sync=n, layout="slab")
            if not calls or calls[-1][0] != "sync":
                break
            assert len(said.kept) <= n_safe_rows(calls[:-1])
            n_kept += len(said.kept)
    assert n_kept > 10


def n_safe_rows(calls: list[tuple[str, str]]) -> int:
    """How many rows a loss of power could not take any more; none while a name above them could be lost."""
    is_slab_synced, n_rows, n_safe, unsafe_names = True, 0, 0, set()
    for kind, path in calls:
        if kind == "mkdir" or (kind == "rename" and path.endswith(".slots")):
            unsafe_names.add(path.rpartition("/")[0])
        elif path.endswith(".slab"):
            is_slab_synced = kind == "sync"
        elif kind == "write" and path.endswith(".slots"):
            assert is_slab_synced, "a row stands before its slot is safe"
            n_rows += 1
        elif kind == "sync" and path.endswith(".slots"):
            n_safe = n_rows
        elif kind == "sync":
            unsafe_names.discard(path)
    return 0 if unsafe_names else n_safe
