"""``tierkv du``, ``ls`` and ``verify`` on roots that the tier made, with living owners and without, and hostile."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fs_kit import (
    CHARGE,
    LONGEST,
    NAMESPACE,
    PAGE,
    chunk_of,
    context,
    fetch,
    files_under,
    first_batches,
    flip,
    is_slab,
    kill,
    layout,  # noqa: F401
    only_files,
    only_slab,
    opened,
    recount,
    rows_under,
    scanned,
    store,
)
from tierkv.cli._main import main
from tierkv.cli._root import Pace, sampled, visible
from tierkv.cli._words import ago
from tierkv.tiers._fs.format import BadHeaderError, leaf_of, namespace_digest
from tierkv.tiers._fs.found import Kind
from tierkv.tiers._fs.inspection import Root
from tierkv.tiers._fs.page import OwnerPage
from tierkv.tiers.fs import FSTier
from tierkv.types import Status

Capture = pytest.CaptureFixture[str]
DIGEST = namespace_digest(NAMESPACE).hex()


def du(root: Path, capsys: Capture) -> dict[str, Any]:
    assert main(["du", str(root), "--json"]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


def verify(root: Path, capsys: Capture, *options: str) -> tuple[int, dict[str, str], dict[str, int]]:
    """(exit code, why by file name, counts)."""
    code = main(["verify", str(root), "--json", *options])
    *wrong, counts = map(json.loads, capsys.readouterr().out.splitlines())
    return code, {row["place"].rsplit("/")[-1]: row["why"] for row in wrong}, counts


def file_of(root: Path, i: int) -> Any:
    """The one file of a chunk, or its slot."""
    key = chunk_of(i).key
    found: list[Any] = list(root.rglob(f"{key.hex()}.*"))
    found += [slot for its_key, slot in rows_under(root) if its_key == key]
    (path,) = found
    return path


# -- du ---------------------------------------------------------------------------------------------------------


async def test_du_counts_what_a_living_owner_counts(root: Path, capsys: Capture) -> None:
    """The sum is what lies there to the byte; namespace, owner, pid and capacity are the living owner's own."""
    async with opened(root, 20) as tier:
        await store(tier, *map(chunk_of, range(5)))
        record = du(root, capsys)
        (owner,) = record["owners"].values()
        assert record["nbytes"] == recount(root)
        assert record["capacity_nbytes"] == tier.usage()["capacity_nbytes"]
        assert record["namespaces"][DIGEST]["n_chunks"] == 5
        assert (owner["state"], owner["pid"], owner["n_chunks"]) == ("alive", os.getpid(), 5)
        assert record["other"].keys() == ({"slab"} if is_slab() else set()), "idle slots and the catalogue"
        assert await fetch(tier, *map(chunk_of, range(5))) == [Status.OK] * 5


async def test_du_beside_owners_that_come_and_go(root: Path, capsys: Capture) -> None:
    """A closed owner counts as dead, with its index, one beside it as alive; two namespaces are told apart."""
    async with opened(root, 40) as first:
        await store(first, *map(chunk_of, range(3)))
        async with opened(root, 40, ctx=context(namespace=b"another")) as second:
            for tier in (first, second):
                assert tier._mount is not None
                tier._mount.beat()  # the first one gives way, the second one takes its part
            await store(second, *map(chunk_of, range(2)))
        record = du(root, capsys)
        assert sorted(owner["state"] for owner in record["owners"].values()) == ["alive", "dead"]
        assert sorted(part["n_chunks"] for part in record["namespaces"].values()) == [2, 3]
        assert record["nbytes"] == recount(root)


@only_files
async def test_du_says_what_else_lies_there(root: Path, capsys: Capture) -> None:
    """Unfinished, damaged, misplaced, irregular and foreign things are counted apart, and nothing is touched."""
    async with opened(root) as tier:
        await store(tier, *map(chunk_of, range(3)))
        chunks = [file_of(root, i) for i in range(3)]
    chunks[0].with_name(chunks[0].name + ".part0").write_bytes(b"x")
    os.truncate(chunks[0], 10)
    other = chunks[1].parents[1] / ("00" if leaf_of(chunk_of(1).key) != "00" else "01")
    other.mkdir(exist_ok=True)
    chunks[1].rename(other / chunks[1].name)
    chunks[2].unlink()
    os.mkfifo(chunks[2])
    (root / "notes.txt").write_text("mine")
    before = files_under(root)
    record = du(root, capsys)
    kinds = {what: sums["n"] for what, sums in record["other"].items()}
    assert kinds == {"unfinished": 1, "damaged": 1, "misplaced": 1, "not regular": 1, "foreign": 1}
    assert record["n_chunks"] == 0
    assert files_under(root) == before


async def test_du_on_a_terminal_names_everything(root: Path, capsys: Capture) -> None:
    """The tables say the digest, the owner, its state and the capacity; a root without owners says so."""
    async with opened(root, 20) as tier:
        await store(tier, chunk_of(1))
        assert main(["du", str(root)]) == 0
        text = capsys.readouterr().out
        (owner,) = du(root, capsys)["owners"]
    assert DIGEST in text and owner in text and "alive" in text and "capacity" in text
    assert main(["du", str(root)]) == 0
    assert "no living engine names a capacity; 1 chunk, " in capsys.readouterr().out


async def test_du_says_what_it_lists(root: Path, capsys: Capture) -> None:
    """Each line says what the things are and why they are there, one thing or many, and the sizes add up."""
    async with opened(root, 20) as tier:
        await store(tier, chunk_of(1))
    (root / "mine.txt").write_text("12345678")
    (root / "yours.txt").write_text("")
    assert main(["du", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "foreign: 2 things, 8 B: not tierkv's: never counted, never removed" in lines
    assert any(line.startswith("lock files and indexes: ") for line in lines)
    assert is_slab() == any(line.startswith("slab: 2 files, ") and "catalogues" in line for line in lines)
    assert verify(root, capsys)[2]["foreign"] == 2
    record = du(root, capsys)
    ours = [*record["namespaces"].values(), *(sums for what, sums in record["other"].items() if what != "foreign")]
    assert record["nbytes"] == record["lock_and_index_nbytes"] + sum(part["nbytes"] for part in ours)


AGES = [(0, "0 s ago"), (119, "119 s ago"), (7_199, "119 min ago"), (1e6, "11 d ago")]


@pytest.mark.parametrize(("seconds", "text"), AGES)
def test_ages_as_people_say_them(seconds: float, text: str) -> None:
    """In the largest unit of which there are two."""
    assert ago(seconds) == text


@only_files
async def test_du_reads_any_lock_file(root: Path, capsys: Capture) -> None:
    """Empty, torn, with a heartbeat that is no time, or a FIFO: an owner without facts, or none."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1))
    (lock,) = root.glob("owner-*.lock")
    page = OwnerPage.unpack(lock.read_bytes())
    assert page is not None
    for i, data in enumerate((b"", b"{}", replace(page, heartbeat_s=math.nan).pack())):
        (root / f"owner-{i:016x}.lock").write_bytes(data)
    os.mkfifo(root / f"owner-{9:016x}.lock")
    owners = du(root, capsys)["owners"]
    assert len(owners) == 4
    assert owners[f"{2:016x}"]["heartbeat_age_s"] is None
    assert main(["du", str(root)]) == 0
    capsys.readouterr()
    lock.unlink()
    (row,) = [row for row in du(root, capsys)["owners"].values() if row["n_chunks"]]
    assert row["state"] == "without lock file"


# -- ls ---------------------------------------------------------------------------------------------------------


async def test_ls_prints_what_the_headers_say(root: Path, capsys: Capture) -> None:
    """Key, parent, group, end, tenant and length of each chunk; filters take first digits; text and JSON agree."""
    chunks = [
        chunk_of(1, group=3, end_token=64, tenant="red"),
        chunk_of(2, 100, parent=chunk_of(1).key, end_token=128, tenant="\x1b[2J"),
    ]
    async with opened(root) as tier:
        await store(tier, *chunks)
    assert main(["ls", str(root), "--json"]) == 0
    rows = {row["key"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    for chunk in chunks:
        row = rows[chunk.key.hex()]
        assert (row["group"], row["end_token"], row["nbytes"]) == (chunk.group, chunk.end_token, chunk.nbytes)
        assert (row["tenant"], row["namespace"]) == (chunk.tenant, DIGEST)
        assert row["parent"] == (None if chunk.parent is None else chunk.parent.hex())
    assert main(["ls", str(root)]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and "\\x1b[2J" in text
    assert len(text.splitlines()) == 3
    for options, n_rows in (
        (["--namespace", DIGEST[:5]], 2),
        (["--owner", rows[chunks[0].key.hex()]["owner"][:4].upper()], 2),
    ):
        assert main(["ls", str(root), "--json", *options]) == 0
        assert len(capsys.readouterr().out.splitlines()) == n_rows, options


async def test_ls_counts_what_it_cannot_read(root: Path, capsys: Capture) -> None:
    """A chunk whose header is damaged is no row; the exit code and one line say that there are some."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1), chunk_of(2))
    flip(file_of(root, 1), 40)
    assert main(["ls", str(root), "--json"]) == 1
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1
    assert captured.err == "1 chunk could not be read; tierkv verify says why\n"


# -- verify -----------------------------------------------------------------------------------------------------


def be_a_socket(path: Path) -> None:
    path.unlink()
    os.chdir(path.parent)  # the name of a socket must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


def be_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def be_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def be_a_link(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to("elsewhere")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of the payload": (lambda path: flip(path, PAGE + 5), "payload checksum"),
    "a bit of the header": (lambda path: flip(path, 30), "header checksum"),
    "cut to a page": (lambda path: os.truncate(path, PAGE), "length differs from the header's"),
    "cut inside a page": (lambda path: os.truncate(path, PAGE + 1), f"{PAGE + 1} bytes are no whole chunk"),
    "empty": (lambda path: os.truncate(path, 0), "0 bytes are no whole chunk"),
    "longer": (lambda path: os.truncate(path, 10 * PAGE), "length differs from the header's"),
    "other bytes": (lambda path: path.write_bytes(b"#!" + bytes(2 * PAGE - 2)), "no chunk file"),
    "a link": (be_a_link, "not a regular file"),
    "a socket": (be_a_socket, "not a regular file"),
    "a FIFO": (be_a_fifo, "not a regular file"),
    "a directory": (be_a_directory, "not a regular file"),
}


SLOT_DAMAGES = ("a bit of the payload", "a bit of the header", "other bytes")


@pytest.mark.parametrize("damage", DAMAGES)
async def test_verify_names_what_an_engine_would_not_serve(
    root: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """Exactly the damaged one of three is named with its reason, and exactly that one is a miss for the tier."""
    if is_slab() and damage not in SLOT_DAMAGES:
        pytest.skip("a slot has no length and no name of its own")
    monkeypatch.chdir(root.parent)  # comes back from where a damage went
    async with opened(root) as tier:
        await store(tier, *map(chunk_of, range(3)))
    assert verify(root, capsys)[0] == 0
    path = file_of(root, 1)
    break_it, why = DAMAGES[damage]
    break_it(path)
    code, wrong, counts = verify(root, capsys)
    assert (code, list(wrong.values())) == (1, [why])
    assert (counts["verified"], counts["wrong"]) == (2, 1)
    assert path.exists() if is_slab() else (path.name in wrong and os.path.lexists(path))
    async with opened(root) as tier:
        statuses = await fetch(tier, *map(chunk_of, range(3)))
    assert [status is Status.OK for status in statuses] == [True, False, True]


async def test_verify_sees_two_swapped_files(root: Path, capsys: Capture) -> None:
    """Whole files under each other's names are both wrong."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1), chunk_of(2))
    one, two = (file_of(root, i) for i in (1, 2))
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)
    code, wrong, _ = verify(root, capsys)
    assert (code, list(wrong.values())) == (1, ["another chunk's file"] * 2)
    assert is_slab() or wrong.keys() == {one.name, two.name}


@only_files
async def test_verify_beside_a_living_owner_and_after_a_kill(root: Path, capsys: Capture) -> None:
    """What is being written is no fault; nothing changes for the owner; after a kill the same holds."""
    tier = FSTier(root, capacity="1MiB", min_free=0)
    await tier.open(context())
    await store(await scanned(tier), *map(chunk_of, range(4)))
    part = file_of(root, 0)
    part.with_name(part.name + ".part1").write_bytes(b"half")
    before = files_under(root)
    assert verify(root, capsys)[0] == 0
    kill(tier)
    code, wrong, counts = verify(root, capsys)
    assert (code, wrong, counts["verified"], counts["unfinished"]) == (0, {}, 4, 1)
    assert files_under(root) == before


async def test_what_is_evicted_between_a_look_and_a_read_is_no_damage(root: Path, capsys: Capture) -> None:
    """The slot or file has another chunk by then, or none: it is passed over, and what is really damaged is not."""
    async with opened(root, 4, n_read_threads=1) as tier:
        await store(tier, *map(chunk_of, range(3)))
        flip(file_of(root, 2), PAGE + 5)
        with closing(Root("ROOT", str(root))) as looker:
            seen = [found for found in looker.files(slots=True) if found.kind is Kind.CHUNK]
            await tier.delete([chunk_of(0).key])
            await store(tier, chunk_of(9), chunk_of(10))
            answers: dict[bytes, type[Exception] | None] = {}
            for found in seen:
                assert found.name is not None
                try:
                    looker.verify(found)
                    answers[found.name.key] = None
                except (FileNotFoundError, BadHeaderError) as error:
                    answers[found.name.key] = type(error)
        assert answers == {
            chunk_of(0).key: FileNotFoundError, chunk_of(1).key: None, chunk_of(2).key: BadHeaderError
        }  # fmt: skip
        code, wrong, counts = verify(root, capsys)
        assert (code, len(wrong), counts["verified"]) == (1, 1, 3)


@only_slab
async def test_a_slot_that_had_another_chunk_for_a_moment_is_looked_at_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row tells time in tenths of a second: one that was written a moment ago may be the second of its kind."""
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)
    async with opened(root) as tier:
        await store(tier, chunk_of(0))
        real, n_wrong = os.pread, 1

        def pread(fd: int, n: int, at: int) -> bytes:
            nonlocal n_wrong
            data = real(fd, n, at)
            if n == LONGEST and n_wrong:
                n_wrong -= 1
                return bytes(len(data))
            return data

        monkeypatch.setattr(os, "pread", pread)
        monkeypatch.setattr(time, "sleep", lambda _: None)
        with closing(Root("ROOT", str(root))) as looker:
            (found,) = [found for found in looker.files(slots=True) if found.kind is Kind.CHUNK]
            looker.verify(found)
            assert not n_wrong
            n_wrong = 2
            with pytest.raises(BadHeaderError):
                looker.verify(found)
            n_wrong, now_s = 1, now_s + 10
            with pytest.raises(BadHeaderError):
                looker.verify(found)


def remove(catalogue: Path) -> None:
    catalogue.unlink()


def cut(catalogue: Path) -> None:
    os.truncate(catalogue, PAGE + 1)


@only_slab
@pytest.mark.parametrize("harm", [remove, cut])
async def test_a_slab_without_its_catalogue_is_not_called_empty_and_right(
    root: Path, capsys: Capture, harm: Callable[[Path], None]
) -> None:
    """All commands that look say what is wrong, how many slots may hold chunks and what mends it; then one does."""
    async with opened(root) as tier:
        await store(tier, *map(chunk_of, range(3)))
    (catalogue,) = root.rglob("*.slots")
    harm(catalogue)
    n_slots = catalogue.with_suffix(".slab").stat().st_size // CHARGE
    code, wrong, counts = verify(root, capsys)
    ((name, why),) = wrong.items()
    assert (code, counts["verified"], counts["wrong"], counts["unlisted"]) == (1, 0, 0, 1)
    assert name == catalogue.with_suffix(".slab").name
    assert f"{n_slots:,} slots may hold chunks" in why and "opens the root" in why
    assert main(["du", str(root)]) == 0
    assert "catalogues, and slots that are free or of which no catalogue tells\n" in capsys.readouterr().out
    (slab,) = du(root, capsys)["unlisted"]
    assert (slab["n_slots"], slab["why"]) == (n_slots, why)
    for command, its_code in (("verify", 1), ("du", 0), ("ls", 1), ("doctor", 0)):
        assert main([command, str(root)]) == its_code
        captured = capsys.readouterr()
        assert f"{name}: {why}" in captured.out + captured.err, command
    assert verify(root, capsys, "--namespace", DIGEST[:4])[2]["unlisted"] == 1
    async with opened(root) as tier:
        assert await fetch(tier, *map(chunk_of, range(3))) == [Status.OK] * 3
    code, wrong, counts = verify(root, capsys)
    assert (code, wrong, counts["verified"], counts["unlisted"]) == (0, {}, 3, 0)


@only_slab
@pytest.mark.parametrize("harm", [remove, cut])
async def test_a_mended_slab_is_as_old_as_its_last_write(
    root: Path, capsys: Capture, harm: Callable[[Path], None]
) -> None:
    """Its slots tell no time: ``ls`` showed three years, and a restart without an index let them leave first."""
    async with opened(root) as tier:
        await store(tier, chunk_of(1), chunk_of(2))
    (catalogue,) = root.rglob("*.slots")
    written_s = time.time() - 5_000
    os.utime(catalogue.with_suffix(".slab"), (written_s, written_s))
    harm(catalogue)
    for index in root.glob("owner-*.index"):
        index.unlink()
    tier = FSTier(root, capacity="1MiB", min_free=0, layout="files")
    await tier.open(context())
    await store(await scanned(tier), chunk_of(3))
    old_s = written_s - 5_000
    os.utime(file_of(root, 3), (old_s, old_s))
    kill(tier)
    assert main(["ls", str(root), "--json"]) == 0
    ages = {row["key"]: row["age_s"] for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert [round(ages[chunk_of(i).key.hex()], -3) for i in (1, 2, 3)] == [5_000, 5_000, 10_000]
    async with opened(root, layout="files") as tier:
        coldest, *_ = await first_batches(tier)
        assert coldest.key == chunk_of(3).key


@only_slab
async def test_a_slab_without_slots_lacks_no_catalogue(root: Path, capsys: Capture) -> None:
    """Its owner has just made it, and makes the catalogue next: nothing can be in it."""
    async with opened(root) as tier:
        await store(tier, chunk_of(0))
    (catalogue,) = root.rglob("*.slots")
    catalogue.unlink()
    os.truncate(catalogue.with_suffix(".slab"), 0)
    assert verify(root, capsys) == (0, {}, dict.fromkeys(verify(root, capsys)[2], 0))


async def test_a_sample_is_the_same_each_time_and_about_as_large(root: Path, capsys: Capture) -> None:
    """Of 10,000 keys one tenth within a tenth; on a root, what is not in the sample is counted as passed over."""
    keys = [b"key %d" % i for i in range(10_000)]
    assert 900 < sum(sampled(key, 0.1) for key in keys) < 1_100
    assert all(sampled(key, 1.0) for key in keys)
    async with opened(root, 40) as tier:
        await store(tier, *map(chunk_of, range(30)))
    runs = [verify(root, capsys, "--sample", "0.5")[2] for _ in range(2)]
    assert runs[0] == runs[1]
    assert 0 < runs[0]["passed_over"] < 30
    assert runs[0]["verified"] + runs[0]["passed_over"] == 30


def test_the_rate_of_reading_is_bounded() -> None:
    """At 100 bytes a second 50 bytes take half a second; a pause is not made up for."""
    now_s, slept = 0.0, []

    def sleep(by_s: float) -> None:
        nonlocal now_s
        slept.append(by_s)
        now_s += by_s

    pace = Pace(100, lambda: now_s, sleep)
    pace(50)
    pace(50)
    now_s += 60.0
    pace(100)
    assert slept == [0.5, 0.5, 1.0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["du", "missing"], "ROOT is 'missing', but must be a directory that can be read"),
        (["ls", "file"], "ROOT is 'file', but must be a directory that can be read"),
        (["ls", ".", "--namespace", "xyz"], "--namespace is 'xyz', but must be 1 to 32 hexadecimal digits"),
        (["ls", ".", "--namespace", "99"], "--namespace is '99', but must be the first digits of one that is there"),
        (["verify", ".", "--namespace", "99"], "--namespace is '99', but must be the first digits of"),
        (["ls", ".", "--owner", "0" * 17], "but must be 1 to 16 hexadecimal digits"),
        (["ls", ".", "--owner", "99"], "--owner is '99', but must be the first digits of one that is there"),
        (["ls", ".", "--namespace", ""], "--namespace is '', but must be 1 to 32 hexadecimal digits"),
        (["verify", ".", "--namespace", ""], "--namespace is '', but must be 1 to 32 hexadecimal digits"),
        (["ls", ".", "--owner="], "--owner is '', but must be 1 to 16 hexadecimal digits"),
        (["verify", ".", "--sample", "2"], "--sample is '2', but must be a number over 0, and 1 at most; nearest"),
        (["verify", ".", "--sample", "-1"], "must be a number over 0, and 1 at most; for example: 0.01"),
        (["verify", ".", "--sample", "nan"], "--sample is 'nan'"),
        (["verify", ".", "--rate", "0"], "--rate is '0', but must be"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, arguments: list[str], sentence: str
) -> None:
    """Exit code 2, the option, its value and what is allowed; nothing on the output."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1
    assert not captured.out


def test_text_of_others_moves_no_cursor() -> None:
    """Control characters and lone surrogates are spelled; other scripts stay as they are."""
    assert visible("rot \x1b[31m\r\n") == "rot \\x1b[31m\\r\\n"
    assert visible("日本 ü") == "日本 ü"
    assert visible("a\udc80") == "a\\udc80"
