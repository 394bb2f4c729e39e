"""``tierkv gc`` and ``wipe``: what leaves a root, what stays, and what a living engine notices of it."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.fs_kit import (
    CHARGE,
    NAMESPACE,
    chunk_of,
    context,
    fetch,
    files_under,
    in_files,  # noqa: F401
    kill,
    opened,
    read,
    recount,
    scanned,
    store,
    write,
)
from tests.patience import PATIENCE_S
from tests.toys import STRIDE, ToyChunker, buffers, payload, prompt
from tierkv import CPUTier, Level, TieredCache
from tierkv.cli import _root_clean
from tierkv.cli._amounts import parse_age, parse_capacity, parse_rate
from tierkv.cli._main import _parser, main
from tierkv.errors import ConfigError
from tierkv.policies import LRU
from tierkv.tiers._fs import inspection as _fs_inspect
from tierkv.tiers._fs import owners as _fs_owners
from tierkv.tiers._fs import sweep as _fs_sweep
from tierkv.tiers._fs.format import leaf_of, namespace_digest
from tierkv.tiers._fs.garbage import Garbage, Wish
from tierkv.tiers._fs.inspection import Root
from tierkv.tiers._fs.page import OwnerPage
from tierkv.tiers._fs.sweep import Fate
from tierkv.tiers.fs import FSTier
from tierkv.types import Status

Capture = pytest.CaptureFixture[str]
DIGEST = namespace_digest(NAMESPACE).hex()
OLD = b"an old model"
OLD_DIGEST = namespace_digest(OLD).hex()
DAY_S = 86_400.0


def gc(root: Path, capsys: Capture, *options: str, code: int = 0) -> tuple[dict[str, str], dict[str, Any]]:
    """(why by file name, counts)."""
    capsys.readouterr()
    assert main(["gc", str(root), "--json", *options]) == code
    *rows, counts = map(json.loads, capsys.readouterr().out.splitlines())
    return {row["place"].rsplit("/")[-1]: row["why"] for row in rows}, counts


def wipe(root: Path, capsys: Capture, *options: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["wipe", str(root), "--json", *options]) == code
    counts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return counts


def occupied(root: Path, capsys: Capture) -> int:
    """What counts against the capacity; of a slab, what its holes leave."""
    capsys.readouterr()
    assert main(["du", str(root), "--json"]) == 0
    return int(json.loads(capsys.readouterr().out)["nbytes"])


def file_of(root: Path, i: int) -> Path:
    """The one file of a chunk."""
    (path,) = root.rglob(f"{chunk_of(i).key.hex()}.*")
    return path


async def alive(root: Path, n_chunks: int = 20, **options: Any) -> FSTier:
    """A tier that the test kills or closes itself."""
    tier = FSTier(root, capacity=options.pop("capacity", n_chunks * CHARGE + 40_960), min_free=0)
    await tier.open(context(**options))
    return await scanned(tier)


async def dead(
    root: Path, *numbers: int, age_s: float = 0.0, namespace: bytes = NAMESPACE, beside: FSTier | None = None
) -> str:
    """Leave these chunks behind as a killed process does, all so old; returns the owner id.

    It takes over what dead owners before it have left, unless somebody lives ``beside`` it who reads that.
    """
    tier = await alive(root, namespace=namespace)
    if beside is not None:
        assert beside._mount is not None and tier._mount is not None
        beside._mount.beat()  # gives way
        tier._mount.beat()
    await store(tier, *map(chunk_of, numbers))
    assert tier._mount is not None
    owner = str(tier._mount._ownership.id)
    kill(tier)
    for i in numbers:
        path = root / namespace_digest(namespace).hex() / leaf_of(chunk_of(i).key) / f"{chunk_of(i).key.hex()}.{owner}"
        os.utime(path, (time.time() - age_s,) * 2)
    return owner


def plant_garbage(root: Path) -> dict[str, str]:
    """One of each kind beside the dead owner's chunks 0 to 3; returns why by file name."""
    chunks = [file_of(root, i) for i in range(4)]
    part = chunks[0].with_name(chunks[0].name + ".part0")
    part.write_bytes(b"x")
    os.truncate(chunks[1], 10)
    other = chunks[2].parents[1] / ("00" if leaf_of(chunk_of(2).key) != "00" else "01")
    other.mkdir(exist_ok=True)
    chunks[2] = chunks[2].rename(other / chunks[2].name)
    chunks[3].unlink()
    os.mkfifo(chunks[3])
    whys = ("unfinished", "damaged", "misplaced", "not regular")
    return {path.name: why for path, why in zip((part, *chunks[1:]), whys, strict=True)}


# -- gc ---------------------------------------------------------------------------------------------------------


async def test_gc_takes_what_nobody_can_serve_and_no_chunk(root: Path, capsys: Capture) -> None:
    """Four kinds of garbage leave; chunks, foreign files and the dead owner's lock stay; an engine goes on there."""
    await dead(root, *range(6))
    expected = plant_garbage(root)
    (root / "notes.txt").write_text("mine")
    before = files_under(root)
    wished, counts = gc(root, capsys, "--dry-run")
    assert (wished, counts["n_removed"], counts["dry_run"]) == (expected, 4, True)
    assert files_under(root) == before
    done, counts = gc(root, capsys)
    assert (done, counts["n_removed"], counts["dry_run"]) == (expected, 4, False)
    assert {path.name for path in set(before) - set(files_under(root))} == set(expected)
    assert gc(root, capsys)[0] == {}
    async with opened(root) as tier:
        assert await fetch(tier, chunk_of(0), chunk_of(4), chunk_of(5)) == [Status.OK] * 3


async def test_gc_leaves_a_living_owner_alone(root: Path, capsys: Capture) -> None:
    """Whatever a living owner has, unfinished, damaged or coldest of all, stays; a dead one's leaves beside it."""
    gone, lives = await alive(root), await alive(root)
    for tier in (gone, lives):
        assert tier._mount is not None
        tier._mount.beat()
    await store(gone, chunk_of(1))
    await store(lives, chunk_of(2), chunk_of(3))
    kill(gone)
    for i in (1, 2):
        path = file_of(root, i)
        path.with_name(path.name + ".part1").write_bytes(b"half")
    os.truncate(file_of(root, 3), 10)
    os.utime(file_of(root, 3), (0, 0))
    done, counts = gc(root, capsys, "--capacity", "0", "--unread-for", "0s")
    assert set(done.values()) == {"unfinished", "over capacity"} and len(done) == 2
    assert all(name.startswith(chunk_of(1).key.hex()) for name in done)
    assert counts["left_over_nbytes"] > 0 and counts["n_owners"] == 1
    assert await fetch(lives, chunk_of(2)) == [Status.OK]
    await lives.aclose()


async def test_gc_of_unread_namespaces(root: Path, capsys: Capture) -> None:
    """A namespace leaves if no living engine reads it and its *latest* use is old enough; else all of it stays."""
    tier = await alive(root)
    await dead(root, 3, 4, age_s=8 * DAY_S, beside=tier)
    await dead(root, 1, 2, age_s=8 * DAY_S, namespace=OLD, beside=tier)
    assert gc(root, capsys, "--unread-for", "9d", "--dry-run")[0] == {}
    done, counts = gc(root, capsys, "--unread-for", "7d")
    assert set(done.values()) == {"unread"} and counts["by_reason"]["unread"]["nbytes"] == 2 * CHARGE
    await tier.aclose()
    await dead(root, 5, 6, age_s=8 * DAY_S, namespace=OLD)
    await dead(root, 7, age_s=DAY_S, namespace=OLD)
    done = gc(root, capsys, "--unread-for", "7d")[0]
    names = {name.partition(".")[0] for name in done}
    assert names == {chunk_of(i).key.hex() for i in (3, 4)}, "nobody lives who would read them now"


async def test_gc_trims_to_a_capacity_from_the_coldest(root: Path, capsys: Capture) -> None:
    """Just so many of the coldest leave that the rest fits, index and lock included; a dry run names the same ones."""
    for i in range(6):
        await dead(root, i, age_s=DAY_S * (6 - i))
    keep_nbytes = recount(root) - 2 * CHARGE + 1
    wished = gc(root, capsys, "--capacity", f"{keep_nbytes}B", "--dry-run")[0]
    done, counts = gc(root, capsys, "--capacity", f"{keep_nbytes}B")
    assert done == wished
    assert [name.partition(".")[0] for name in done] == [chunk_of(i).key.hex() for i in (0, 1)]
    assert recount(root) == keep_nbytes - 1 and counts["left_over_nbytes"] == 0


async def test_nothing_is_left_over_where_nothing_is_left(root: Path, capsys: Capture) -> None:
    """The lock files of the dead go as well: none of it is over a capacity of 0, and a dry run says as much."""
    await dead(root, 1, 2)
    for options, verb in (["--dry-run"], "would remove"), ([], "removed"):
        assert list(root.glob("owner-*"))
        assert main(["gc", str(root), "--capacity", "0", *options]) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith(verb) and last.endswith(", and the lock files of 1 owner that left nothing")
    assert not list(root.glob("owner-*"))
    assert gc(root, capsys, "--capacity", "0")[1]["left_over_nbytes"] == 0


async def test_what_is_left_over_is_not_laid_at_the_door_of_nobody(
    root: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that cannot be removed is over the capacity with nobody alive; a living engine's own beside it is its."""
    await dead(root, 1)
    with monkeypatch.context() as patch:
        patch.setattr(_fs_sweep, "unlink", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EACCES, "no")))
        assert main(["gc", str(root), "--capacity", "0"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith(" over --capacity: not all of it could be removed")
    tier = await alive(root)
    await store(tier, chunk_of(2))
    assert main(["gc", str(root), "--capacity", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(" over --capacity: living engines own the rest")
    await tier.aclose()


async def test_a_trim_begins_with_what_no_living_engine_reads(root: Path, capsys: Capture) -> None:
    """Newer than the rest, and yet first to leave; with nobody alive it would be the last."""
    tier = await alive(root)
    await store(tier, chunk_of(9))  # one that has written nothing would take the dead one's id at once
    await dead(root, 1, 2, age_s=8 * DAY_S, beside=tier)
    await dead(root, 7, namespace=OLD, beside=tier)
    done, _ = gc(root, capsys, "--capacity", f"{recount(root) - 1}B")
    assert [name.partition(".")[0] for name in done] == [chunk_of(7).key.hex()]
    await tier.aclose()


async def test_gc_gives_the_living_what_the_dead_had_reserved(root: Path, capsys: Capture) -> None:
    """After a trim a dead owner's page says what is left, so that a living engine's share grows at its next look."""
    gone, lives = await alive(root, 20), await alive(root, 20)
    for tier in (gone, lives, gone, lives):
        assert tier._mount is not None
        tier._mount.beat()
    await store(lives, chunk_of(9))  # one that has written nothing would take the dead one's id at once
    await store(gone, *map(chunk_of, range(5)))
    owner = gone._mount._ownership.id  # type: ignore[union-attr]
    kill(gone)
    assert lives._mount is not None
    lives._mount.beat()
    before = lives.share_nbytes()
    gc(root, capsys, "--capacity", f"{recount(root) - 3 * CHARGE}B")
    page = OwnerPage.unpack((root / f"owner-{owner}.lock").read_bytes())
    assert page is not None and page.reserved_nbytes == 2 * CHARGE + 4096
    lives._mount.beat()
    assert lives.share_nbytes() > before
    await lives.aclose()


async def test_an_owner_that_left_nothing_ends(root: Path, capsys: Capture) -> None:
    """Lock file and index of a dead owner without files go, and an index without lock file; a living one's stay."""
    tier = await alive(root)
    await store(tier, chunk_of(5))
    owner = await dead(root, 1, beside=tier)
    file_of(root, 1).unlink()
    (root / f"owner-{owner}.index").write_bytes(b"advice")
    (root / f"owner-{7:016x}.index").write_bytes(b"advice for nobody")
    assert gc(root, capsys)[1]["n_owners"] == 1
    assert [path.name for path in root.glob("owner-*")] == [f"owner-{tier._mount._ownership.id}.lock"]  # type: ignore[union-attr]
    await tier.aclose()


async def test_files_without_an_owner_wait_for_him_to_speak(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A living engine whose lock file somebody removed makes it anew while gc waits: its files are no orphans."""
    tier = await alive(root)
    await store(tier, chunk_of(1))
    assert tier._mount is not None
    lock = root / f"owner-{tier._mount._ownership.id}.lock"
    mount = tier._mount
    lock.unlink()
    root_ = Root("ROOT", str(root))
    spoken = Garbage(root_, Wish(capacity_nbytes=0), sleep=lambda _: mount.beat())
    assert [swept.fate for swept in spoken.collect(dry_run=False)] == []
    assert lock.exists()
    kill(tier)
    lock.unlink()
    silent = Garbage(root_, Wish(capacity_nbytes=0), sleep=lambda _: None)
    assert [swept.fate for swept in silent.collect(dry_run=False)] == [Fate.REMOVED]
    root_.close()


@pytest.mark.parametrize("wish", [Wish(unread_for_s=0.0), Wish(capacity_nbytes=0)])
async def test_what_changes_hands_meanwhile_is_spared(root: Path, wish: Wish) -> None:
    """An engine that adopts the files between the look and the removal keeps them all."""
    await dead(root, 1, 2, 3)
    root_ = Root("ROOT", str(root))
    garbage = Garbage(root_, wish)
    async with opened(root) as tier:
        fates = [swept.fate for swept in garbage.collect(dry_run=False)]
        assert fates == [Fate.SPARED] * 3
        assert await fetch(tier, *map(chunk_of, (1, 2, 3))) == [Status.OK] * 3
    root_.close()


async def test_what_is_another_file_by_now_is_spared(root: Path) -> None:
    """Between the look and the removal a damaged file's place got a whole one: gc leaves it, a wipe does not."""
    await dead(root, 1)
    path = file_of(root, 1)
    data = path.read_bytes()
    os.truncate(path, 10)
    root_ = Root("ROOT", str(root))
    garbage = Garbage(root_, Wish())
    sweep = garbage.collect(dry_run=False)
    found = next(iter(root_.files()))
    path.write_bytes(data)
    broom = _fs_sweep.Broom(root_, lambda *_: True)
    assert [swept.fate for swept in broom.sweep([(found, "damaged")])] == [Fate.SPARED]
    assert list(sweep) == []
    assert path.read_bytes() == data
    broom = _fs_sweep.Broom(root_, lambda *_: True, changed_too=True)
    assert [swept.fate for swept in broom.sweep([(found, "wiped")])] == [Fate.REMOVED]
    root_.close()


async def test_without_flock_a_heartbeat_says_who_lives(
    root: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where flock does not work, gc and wipe keep off a root whose owner was heard lately."""

    def no_flock(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no flock")

    monkeypatch.setattr(fcntl, "flock", no_flock)
    for module in (_fs_owners, _fs_inspect):
        monkeypatch.setattr(module, "FRESH_S", PATIENCE_S)
    owner = await dead(root, 1)
    assert gc(root, capsys, "--capacity", "0")[0] == {}
    assert main(["wipe", str(root), "--yes"]) == 1
    lock = root / f"owner-{owner}.lock"
    page = OwnerPage.unpack(lock.read_bytes())
    assert page is not None
    lock.write_bytes(OwnerPage(**{**page.__dict__, "heartbeat_s": time.time() - PATIENCE_S - 1}).pack())
    assert set(gc(root, capsys, "--capacity", "0")[0].values()) == {"over capacity"}


async def test_what_cannot_be_removed_is_named(root: Path, capsys: Capture) -> None:
    """A directory with something in it, in a chunk's place, stays: one line says which, and the exit code is 1."""
    await dead(root, 1)
    path = file_of(root, 1)
    path.unlink()
    path.mkdir()
    (path / "inside").touch()
    capsys.readouterr()
    assert main(["gc", str(root)]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"{path.relative_to(root)} stays: {os.strerror(errno.ENOTEMPTY)}\n"
    assert captured.out.endswith("removed 0 files, 0 B; 1 could not be removed\n")
    assert (path / "inside").exists()


async def test_gc_for_people(root: Path, capsys: Capture) -> None:
    """One line a reason with what it means, then the sum; a dry run says "would"."""
    await dead(root, *range(4))
    plant_garbage(root)
    assert main(["gc", str(root), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "unfinished: 1, 4 KiB: their writers are dead"
    assert lines[-1].startswith("would remove 4 files, ")
    assert main(["gc", str(root)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("removed 4 files, ")


async def test_a_slab_leaves_as_a_whole_or_not_at_all(root: Path, capsys: Capture) -> None:
    """Slab and catalogue stay beside plain garbage, and leave together when there is too much or nobody reads them."""
    for options in (["--capacity", "0"], ["--unread-for", "0"]):
        async with opened(root, layout="slab") as tier:
            await store(tier, chunk_of(1), chunk_of(2))
        slab = {path.name for path in (root / DIGEST).glob("*.sl*")}
        assert len(slab) == 2
        assert gc(root, capsys)[0] == {}
        assert set(gc(root, capsys, "--dry-run", "--capacity", f"{recount(root) - 1}B")[0]) == slab
        assert set(gc(root, capsys, *options)[0]) == slab
        assert not list(root.glob("owner-*"))


async def test_a_trim_that_spares_the_slab_spares_its_catalogue(root: Path, capsys: Capture) -> None:
    """A chunk file is the coldest and enough: the slab's two files and the owner's lock stay, and serve."""
    await dead(root, 1, age_s=DAY_S)
    async with opened(root, layout="slab") as tier:
        await store(tier, chunk_of(2))
    name = file_of(root, 1).name
    assert list(gc(root, capsys, "--capacity", f"{occupied(root, capsys) - 1}B")[0]) == [name]
    (lock,) = root.glob("owner-*.lock")
    page = OwnerPage.unpack(lock.read_bytes())
    assert page is not None and page.reserved_nbytes >= occupied(root, capsys), "the living must not take that room"
    async with opened(root, layout="slab") as tier:
        assert await fetch(tier, chunk_of(2)) == [Status.OK]


async def test_a_slab_is_as_warm_as_its_latest_row(root: Path, capsys: Capture) -> None:
    """The one that was only read lately stays, with its catalogue; the one that was written after it leaves."""
    places = []
    for namespace in (NAMESPACE, OLD):
        async with opened(root, 40, layout="slab", ctx=context(namespace=namespace)) as tier:
            await store(tier, chunk_of(1))
        (slab,) = (root / namespace_digest(namespace).hex()).glob("*.slab")
        places.append(slab)
    for slab, written_s, read_s in zip(places, (9.0, 8.0), (1.0, 8.0), strict=True):
        for path, ago_s in ((slab, written_s), (slab.with_suffix(".slots"), read_s)):
            os.utime(path, (time.time() - ago_s * DAY_S,) * 2)
    kept, gone = places
    done, _ = gc(root, capsys, "--capacity", f"{occupied(root, capsys) - 1}B")
    assert set(done) == {gone.name, gone.with_suffix(".slots").name}
    assert kept.exists() and kept.with_suffix(".slots").exists()


# -- wipe -------------------------------------------------------------------------------------------------------


async def test_wipe_takes_all_that_is_ours(root: Path, capsys: Capture) -> None:
    """Chunks, garbage, locks, index, our directories; foreign things and the directory with its mode stay."""
    root.mkdir(mode=0o750)
    async with opened(root, ctx=context(namespace=OLD)) as tier:
        await store(tier, chunk_of(9))
    await dead(root, *range(4))
    plant_garbage(root)
    (root / "notes.txt").write_text("mine")
    (root / DIGEST / "more.txt").write_text("mine, too")
    before = files_under(root)
    counts = wipe(root, capsys, "--dry-run")
    assert (counts["n_removed"], files_under(root)) == (6, before)
    counts = wipe(root, capsys, "--yes")
    assert (counts["n_removed"], counts["n_foreign"], counts["n_stay"]) == (6, 2, 0)
    assert [path.name for path in files_under(root)] == ["more.txt", "notes.txt"]
    assert [path.name for path in root.iterdir() if path.is_dir()] == [DIGEST]
    assert root.stat().st_mode & 0o777 == 0o750
    async with opened(root) as tier:
        assert (await read(tier, chunk_of(1).key))[0] == [Status.MISSING]
        await store(tier, chunk_of(1))


async def test_wipe_refuses_a_root_in_use(root: Path, capsys: Capture) -> None:
    """One sentence with process, host and heartbeat, exit code 1, and nothing changed."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1))
        before = files_under(root)
        assert main(["wipe", str(root), "--yes"]) == 1
        captured = capsys.readouterr()
        assert f"in use by pid {os.getpid()} on {os.uname().nodename} (owner " in captured.err
        assert "heard 0 s ago" in captured.err and "--in-use" in captured.err
        assert captured.err.count("\n") == 1 and not captured.out
        assert files_under(root) == before


async def test_wipe_of_one_namespace(root: Path, capsys: Capture) -> None:
    """The other one stays, and its living engine, which must not be asked; first digits must mean one namespace."""
    await dead(root, 1, 2, namespace=OLD)
    tier = await alive(root)
    await store(tier, chunk_of(3))
    assert main(["wipe", str(root), "--yes", "--namespace", DIGEST[:6]]) == 1
    assert f"namespace {DIGEST[:8]}: in use" in capsys.readouterr().err
    assert wipe(root, capsys, "--yes", "--namespace", OLD_DIGEST[:6])["n_removed"] == 2
    assert not (root / OLD_DIGEST).exists()
    assert await fetch(tier, chunk_of(3)) == [Status.OK]
    await store(tier, chunk_of(4))
    await tier.aclose()
    for i in range(16):
        (root / f"{i:x}{0:031x}").mkdir(exist_ok=True)
        (root / f"{i:x}{1:031x}").mkdir(exist_ok=True)
    assert main(["wipe", str(root), "--yes", "--namespace", "a"]) == 2
    assert "not of several" in capsys.readouterr().err
    assert main(["wipe", str(root), "--yes", "--namespace", "ab"]) == 2
    assert "not of none that is there" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--namespace", "", "--yes"], ["--yes", "--namespace="], ["--namespace=", "--dry-run"]]
)
async def test_an_empty_namespace_is_not_the_whole_root(root: Path, capsys: Capture, options: list[str]) -> None:
    """A script's variable that nobody has set: refused in a sentence, and nothing leaves."""
    await dead(root, 1, 2)
    before = files_under(root)
    assert main(["wipe", str(root), *options]) == 2
    captured = capsys.readouterr()
    assert captured.err == "tierkv wipe: --namespace is '', but must be 1 to 32 hexadecimal digits\n"
    assert not captured.out and files_under(root) == before


async def test_an_engine_that_starts_ends_a_wipe(root: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was free when the question was asked: what has not been removed until somebody came is his."""
    await dead(root, 1, 2)
    came: list[FSTier] = []
    asked = _root_clean._refuse_in_use

    def somebody_comes(*args: Any) -> None:
        asked(*args)
        if not came:
            came.append(FSTier(root, capacity="1MiB", min_free=0))

    monkeypatch.setattr(_root_clean, "_refuse_in_use", somebody_comes)
    monkeypatch.setattr(_root_clean, "_agreed", lambda *_: pytest.fail("was not to ask"))
    loop_ = asyncio.get_running_loop()
    arguments = _parser().parse_args(["wipe", str(root), "--yes"])

    def run() -> int:
        held = Root.held

        def after_it_opened(self: Root, **options: bool) -> Any:
            if came and came[0]._mount is None:
                asyncio.run_coroutine_threadsafe(came[0].open(context()), loop_).result(30)
            return held(self, **options)

        monkeypatch.setattr(Root, "held", after_it_opened)
        return int(arguments.run(arguments))

    with pytest.raises(Exception, match="in use by pid"):
        await asyncio.to_thread(run)
    assert await fetch(await scanned(came[0]), chunk_of(1), chunk_of(2)) == [Status.OK] * 2
    await came[0].aclose()


@pytest.mark.parametrize("layout", ["files", "slab"])
async def test_wipe_under_a_running_cache_is_misses_and_nothing_worse(
    root: Path, capsys: Capture, layout: Literal["files", "slab"]
) -> None:
    """Three sessions store and load while the root is wiped: never a wrong byte or an error, and it stores again."""
    tier = FSTier(root, min_free=0, layout=layout)
    levels = [Level(CPUTier(), LRU(), capacity=8 * STRIDE), Level(tier, LRU(), capacity="4MiB")]
    branches = range(2, 12)
    async with TieredCache(chunker=ToyChunker(), namespace=b"toy", levels=levels) as cache:

        async def use(branch: int) -> int:
            hit = await cache.lookup(prompt(branch))
            async with cache.lease(hit) as lease:
                for chunk in lease.chunks:
                    assert lease.view(chunk) == payload(chunk)
                n_chunks = len(lease.chunks)
            outcomes = await cache.store(prompt(branch), buffers(cache.chunks(prompt(branch))))
            assert not any(outcome.error for outcome in outcomes)
            return n_chunks

        for branch in branches:
            await use(branch)
            await cache.wait_idle()
        assert sum([await use(branch) for branch in branches]) > 20
        arguments = _parser().parse_args(["wipe", str(root), "--in-use", "--yes"])
        wiping = asyncio.create_task(asyncio.to_thread(arguments.run, arguments))
        while not wiping.done():
            await asyncio.gather(*(use(branch) for branch in (2, 5, 8)))
        assert await wiping == 0
        assert "removed" in capsys.readouterr().out
        assert tier._mount is not None
        await asyncio.to_thread(tier._mount.beat)  # a second at most until a slab's absence is noticed
        for branch in branches:
            await use(branch)
            await cache.wait_idle()
        assert sum([await use(branch) for branch in branches]) > 20, "it serves from disk again"
        fs = cache.statistics()["fs"]
        assert not fs.broken and fs.dropped.get("corrupt", 0) == 0 and fs.dropped.get("tier_error", 0) == 0
        assert tier.counters()["failed_writes"] == 0


async def test_wipe_in_use_leaves_what_is_being_written(root: Path, capsys: Capture) -> None:
    """A living owner's unfinished file is not taken from under it, its lock and directories stay, a dead one's go."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1))
        part = file_of(root, 1)
        part = part.with_name(part.name + ".part1")
        part.write_bytes(b"half")
        counts = wipe(root, capsys, "--in-use", "--yes")
        assert (counts["n_removed"], counts["n_spared"]) == (1, 1)
        assert part.exists()
        assert (await read(tier, chunk_of(1).key))[0] == [Status.MISSING]
        part.unlink()
        assert wipe(root, capsys, "--in-use", "--yes")["n_removed"] == 0
        assert (await write(tier, chunk_of(2)))[0].ok
        assert await fetch(tier, chunk_of(2)) == [Status.OK]


async def test_wipe_asks_on_a_terminal_and_not_elsewhere(
    root: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question names number, size and place; only "y" or "yes" goes on; without a terminal --yes is asked for."""
    await dead(root, 1)
    before = files_under(root)
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes"))
    assert main(["wipe", str(root)]) == 2
    assert "--yes is missing, but must be given where there is no terminal to ask on" in capsys.readouterr().err
    keyboard, terminal = os.openpty()
    with os.fdopen(keyboard, "w") as typed, os.fdopen(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        for answer, code in (("", 1), ("no", 1), ("why", 1), ("Yes", 0)):
            typed.write(answer + "\n")
            typed.flush()
            assert main(["wipe", str(root)]) == code
            captured = capsys.readouterr()
            assert "Remove 1 file, " in captured.err and "Remove" not in captured.out
            assert (files_under(root) == before) is bool(code)


@pytest.mark.parametrize("command", ["gc", "wipe"])
async def test_links_are_not_followed_out_of_the_root(
    root: Path, tmp_path: Path, capsys: Capture, command: str
) -> None:
    """Namespace, leaf and file replaced by links to somebody's files: those stay, whatever is asked for."""
    await dead(root, 1)
    path = file_of(root, 1)
    outside = tmp_path / "outside"
    (outside / path.parent.name).mkdir(parents=True)
    (outside / path.parent.name / path.name).write_bytes(b"")
    (outside / path.name).write_bytes(b"")
    (root / f"{1:032x}").symlink_to(outside)
    (root / DIGEST / ("00" if path.parent.name != "00" else "01")).symlink_to(outside)
    path.unlink()
    path.symlink_to(outside / path.name)
    options = ["--yes"] if command == "wipe" else ["--capacity", "0", "--unread-for", "0"]
    assert main([command, str(root), *options]) == 0
    assert len(files_under(outside)) == 2
    assert not os.path.lexists(path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gc", "missing"], "ROOT is 'missing', but must be a directory that can be read"),
        (["gc", ".", "--unread-for", "soon"], "0, or a number and one of s, min, h, d and w; for example: 7d"),
        (["gc", ".", "--unread-for", "12 hours"], "--unread-for is '12 hours', but must be "),
        (["gc", ".", "--unread-for", "12 hours"], "; nearest valid value: 12h"),
        (["gc", ".", "--unread-for", "7"], "; nearest valid value: 7d"),
        (["gc", ".", "--unread-for", "10m"], "; nearest valid value: 10min"),
        (["gc", ".", "--unread-for", "1month"], "; for example: 7d"),
        (["gc", ".", "--unread-for", "-1d"], "--unread-for is '-1d', but must be 0, or a number and one of"),
        (["gc", ".", "--unread-for", "-1d"], "; for example: 7d"),
        (["gc", ".", "--unread-for=-.5h"], "--unread-for is '-.5h', but must be 0, or a number"),
        (["gc", ".", "--capacity", "-1"], "--capacity is '-1', but must be 0 or more: a size with a unit, or"),
        (["gc", ".", "--capacity", "-1GiB"], "; for example: 200GiB"),
        (["gc", ".", "--capacity", "10"], "bytes from 1048576; nearest valid value: 10GiB"),
        (["gc", ".", "--capacity", " +0.5"], "; nearest valid value: 0.5GiB"),
        (["gc", ".", "--capacity", "1048575"], "; nearest valid value: 1048575GiB"),
        (["wipe", ".", "--namespace", "xyz"], "--namespace is 'xyz', but must be 1 to 32 hexadecimal digits"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, arguments: list[str], sentence: str
) -> None:
    """Exit code 2, the option, its value and what is allowed; nothing on the output."""
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1
    assert not captured.out


async def test_without_the_roots_lock_nothing_is_removed(root: Path, capsys: Capture) -> None:
    """Something that is no file lies where the lock belongs: nobody could be kept out, so nothing is touched."""
    await dead(root, 1)
    (root / "tierkv.lock").unlink()
    os.mkfifo(root / "tierkv.lock")
    before = files_under(root)
    for command in (["gc", str(root), "--capacity", "0"], ["wipe", str(root), "--yes"]):
        assert main(command) == 1
        assert "is no file: 'tierkv.lock'" in capsys.readouterr().err
    assert files_under(root) == before


async def test_many_that_stay_are_counted(root: Path, capsys: Capture) -> None:
    """Twenty are named, all are counted: a terminal has an end."""
    async with opened(root, 40) as tier:
        await store(tier, *map(chunk_of, range(25)))
    for i in range(25):
        path = file_of(root, i)
        path.unlink()
        path.mkdir()
        (path / "inside").touch()
    assert main(["gc", str(root)]) == 1
    captured = capsys.readouterr()
    assert captured.err.count(" stays: ") == 20
    assert "25 could not be removed" in captured.out


@pytest.mark.parametrize("size", ["10", "0.5", "500", "-0"])
async def test_a_number_without_a_unit_does_not_empty_a_root(root: Path, capsys: Capture, size: str) -> None:
    """Somebody meant GiB: nothing leaves, and nothing would."""
    await dead(root, 1, 2)
    before = files_under(root)
    for options in ([], ["--dry-run"]):
        assert main(["gc", str(root), "--capacity", size, *options]) == 2
        captured = capsys.readouterr()
        assert f"--capacity is '{size}'" in captured.err and not captured.out
    assert files_under(root) == before


def test_sizes_for_a_trim() -> None:
    """With a unit any size, without one what can only be bytes, and 0 in any form."""
    sizes = {"0": 0, "0.0": 0, "0GiB": 0, "10B": 10, "1 kib": 1024, "1048576": 1 << 20, " 5000000 ": 5_000_000}
    assert {text: parse_capacity("x", text) for text in sizes} == sizes


def gc_into_a_full_disk(root: Path) -> tuple[int, str]:
    """(exit code, what it said) of a process."""
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "tierkv.cli", "gc", str(root), "--json"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    return ended.returncode, ended.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
async def test_gc_makes_room_though_its_output_is_full(
    root: Path, unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log on the full disk must not keep it full: all leaves, the owner's lock too, and the output is to blame."""
    await dead(root, *range(8))
    for i in range(8):
        os.truncate(file_of(root, i), 10)
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    said = "tierkv gc: standard output cannot be written: No space left on device\n"
    assert await asyncio.to_thread(gc_into_a_full_disk, root) == (1, said)
    assert [path.name for path in files_under(root)] == ["tierkv.lock"]


def test_ages() -> None:
    """Seconds, minutes, hours, days, weeks, and fractions of them; a bare 7 meant seconds and emptied a root."""
    ages = [("0", 0.0), ("5s", 5.0), ("2min", 120.0), ("12h", 43_200.0), ("7D", 7 * DAY_S), ("1.5w", 10.5 * DAY_S)]
    assert [parse_age("x", text) for text, _ in ages] == [seconds for _, seconds in ages]
    for text in ("", "-1d", "1y", "nan", "1e9", "1 d", "7", "90", "1month"):
        with pytest.raises(ConfigError):
            parse_age("x", text)


def test_a_directory_that_is_no_root(tmp_path: Path, capsys: Capture) -> None:
    """Nothing is ours there, nothing leaves, and no lock is left behind."""
    (tmp_path / "file").touch()
    assert main(["gc", str(tmp_path)]) == 0
    assert main(["wipe", str(tmp_path), "--yes"]) == 0
    assert [path.name for path in files_under(tmp_path)] == ["file"]


def test_rates() -> None:
    """A second may be said; a hundred bytes in one were taken at their word, and the read took days."""
    assert [parse_rate("x", text) for text in ("100MiB", "100 mib/s", "1GB/sec", "1048576")] == [
        100 << 20, 100 << 20, 10**9, 1 << 20,
    ]  # fmt: skip
    for text, near in (("100", "100MiB"), ("1048575", "1048575MiB"), ("100MiBs", "100MiB"), ("0", "1")):
        with pytest.raises(ConfigError, match=f"nearest valid value: {near}"):
            parse_rate("x", text)
