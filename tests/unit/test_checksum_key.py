"""A keyed checksum: who has no key writes nothing that is served, and the secret is nowhere but where it was put."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fs_kit import (
    LONGEST,
    NAMESPACE,
    PAGE,
    SlotPath,
    chunk_of,
    context,
    fetch,
    files_under,
    key_of,
    layout,  # noqa: F401
    only_files,
    opened,
    payload_of,
    read,
    recount,
    rows_under,
    store,
)
from tests.patience import PATIENCE_S
from tests.toys import STRIDE, ToyChunker, buffers, prompt
from tierkv import CPUTier, Event, Level, Scope, TieredCache
from tierkv.cli._main import main
from tierkv.errors import ConfigError
from tierkv.policies import LRU
from tierkv.tiers._fs import format as fmt
from tierkv.tiers.fs import FSTier
from tierkv.tiers.parse import parse_tier
from tierkv.types import Status

SECRET = b"correct horse battery staple"
SUMS = fmt.Sums(SECRET)
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return secret_file(tmp_path / "key", SECRET + b"\n")


def secret_file(path: Path, secret: bytes) -> Path:
    path.touch(mode=0o600)
    path.write_bytes(secret)
    return path


def folder_of(root: Path, sums: fmt.Sums) -> Path:
    return root / fmt.namespace_digest(NAMESPACE, sums).hex()


def one_file(root: Path, i: int) -> Any:
    """The one file of a chunk, or its slot."""
    found: list[Any] = list(root.rglob(f"{key_of(i).hex()}.*"))
    found += [slot for key, slot in rows_under(root) if key == key_of(i)]
    (path,) = found
    return path


async def test_the_secret_counts_and_not_where_it_lies(
    root: Path, key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored with a file's secret, found again with the same one from a file without line end, and from a variable."""
    async with opened(root, checksum_key_file=key_file) as tier:
        await store(tier, chunk_of(1), chunk_of(2, 100))
        assert await fetch(tier, chunk_of(1), chunk_of(2, 100)) == [Status.OK] * 2
    monkeypatch.setenv("TIERKV_TEST_KEY", SECRET.decode())
    bare = secret_file(tmp_path / "bare", SECRET)
    ways: list[dict[str, Any]] = [{"checksum_key_file": bare}, {"checksum_key_env": "TIERKV_TEST_KEY"}]
    for settings in ways:
        async with opened(root, **settings) as tier:
            assert await fetch(tier, chunk_of(1), chunk_of(2, 100)) == [Status.OK] * 2


async def test_with_another_key_or_none_it_is_a_miss_and_stays(root: Path, key_file: Path, tmp_path: Path) -> None:
    """Counted, not removed while there is room, and a hit again for whoever has the key; both ways round."""
    other = secret_file(tmp_path / "other", b"another secret of some length")
    async with opened(root, checksum_key_file=key_file) as tier:
        await store(tier, chunk_of(1))
    ways: list[dict[str, Any]] = [{}, {"checksum_key_file": other}]
    for settings in ways:
        async with opened(root, **settings) as tier:
            assert (await read(tier, key_of(1)))[0] == [Status.MISSING]
            counters = tier.counters()
            assert (counters["unreadable"], counters["corrupt"], counters["deleted"]) == (1, 0, 0)
    async with opened(root) as tier:
        await store(tier, chunk_of(2))
    async with opened(root, checksum_key_file=key_file) as tier:
        assert await fetch(tier, chunk_of(1)) == [Status.OK]
        assert (await read(tier, key_of(2)))[0] == [Status.MISSING]
    assert one_file(root, 2).exists()


async def test_two_keys_on_one_root_share_room_and_nothing_else(root: Path, key_file: Path) -> None:
    """Living owners with and without a key: neither reads or removes the other's, and the capacity holds for both."""
    async with opened(root, 12, checksum_key_file=key_file) as keyed, opened(root, 12) as plain:
        for tier in (keyed, plain, keyed):
            assert tier._mount is not None
            tier._mount.beat()
        await store(keyed, chunk_of(1))
        await store(plain, chunk_of(1), chunk_of(2))
        assert await fetch(keyed, chunk_of(1)) == [Status.OK]
        assert (await read(keyed, key_of(2)))[0] == [Status.MISSING]
        assert await fetch(plain, chunk_of(1), chunk_of(2)) == [Status.OK] * 2
        assert recount(root) <= plain.usage()["capacity_nbytes"]


async def test_whatever_the_layout_every_header_is_keyed(root: Path, key_file: Path) -> None:
    """No page on the root that looks like a chunk's header passes without the key, and all pass with it."""
    async with opened(root, checksum_key_file=key_file) as tier:
        await store(tier, chunk_of(1), chunk_of(2, 100))
    pages = [
        memoryview(data)[at : at + PAGE]
        for data in (path.read_bytes() for path in files_under(root))
        for at in range(0, len(data), PAGE)
        if data[at:].startswith(fmt.MAGIC)
    ]
    assert {fmt.unpack_header(page, sums=SUMS).chunk.key for page in pages} == {key_of(1), key_of(2)}
    for page in pages:
        with pytest.raises(fmt.BadHeaderError):
            fmt.unpack_header(page)


def forge(path: Any, sums: fmt.Sums, digest: bytes) -> None:
    """What somebody with write access but without the key can make."""
    data = memoryview((b"forged " * LONGEST)[:LONGEST])
    header = bytearray(PAGE)
    owner = path.slab.name[:16] if isinstance(path, SlotPath) else path.name.rpartition(".")[2]
    fmt.pack_header(memoryview(header), chunk_of(1), digest, owner, sums.of(data), sums=sums)
    path.write_bytes((bytes(header) + data).ljust(len(path.read_bytes()), b"\0"))


@pytest.mark.parametrize("sums", [fmt.PLAIN, fmt.Sums(b"a key of their own making")])
async def test_a_forged_chunk_is_not_served(root: Path, key_file: Path, sums: fmt.Sums) -> None:
    """Whole, consistent and at the right place, but made without the key: corrupt, and removed as such."""
    async with opened(root, checksum_key_file=key_file) as tier:
        await store(tier, chunk_of(1))
        path = one_file(root, 1)
        forge(path, sums, bytes.fromhex(folder_of(root, SUMS).name))
        assert (await read(tier, key_of(1)))[0] == [Status.CORRUPT]
        assert tier.counters()["corrupt"] == 1
        assert not path.exists()


async def test_a_flag_that_lies_helps_nobody(root: Path, key_file: Path) -> None:
    """A forged chunk that says that it is keyed is compared with the key as any other."""
    async with opened(root, checksum_key_file=key_file) as tier:
        await store(tier, chunk_of(1))
        path = one_file(root, 1)
        forge(path, fmt.PLAIN, bytes.fromhex(folder_of(root, SUMS).name))
        data = bytearray(path.read_bytes())
        data[10] |= fmt._KEYED
        data[PAGE - 16 : PAGE] = fmt.PLAIN.of_header(memoryview(data)[:PAGE])
        path.write_bytes(data)
        assert (await read(tier, key_of(1)))[0] == [Status.CORRUPT]


async def test_swapped_files_and_swapped_payloads_are_not_served(root: Path, key_file: Path) -> None:
    """Two whole chunks under each other's names, and each with its own header over the other's payload: misses."""
    async with opened(root, checksum_key_file=key_file) as tier:
        for swap_headers in (True, False):
            await store(tier, chunk_of(1), chunk_of(2))
            one, two = one_file(root, 1), one_file(root, 2)
            first, second = one.read_bytes(), two.read_bytes()
            if swap_headers:
                first, second = second, first
            else:
                first, second = first[:PAGE] + second[PAGE:], second[:PAGE] + first[PAGE:]
            one.write_bytes(first)
            two.write_bytes(second)
            assert (await read(tier, key_of(1), key_of(2)))[0] == [Status.CORRUPT] * 2


@only_files
async def test_an_old_file_of_the_same_key_is_what_it_was(root: Path, key_file: Path) -> None:
    """Put back after its removal, it is served: it is the chunk of that name. In another namespace it is not."""
    async with opened(root, checksum_key_file=key_file) as tier:
        await store(tier, chunk_of(1))
        place = one_file(root, 1)
        kept = place.read_bytes()
        await tier.delete([key_of(1)])
    assert not place.exists()
    place.write_bytes(kept)
    async with opened(root, checksum_key_file=key_file) as tier:
        assert await fetch(tier, chunk_of(1)) == [Status.OK]
    async with opened(root, ctx=context(namespace=b"new weights"), checksum_key_file=key_file) as tier:
        await store(tier, chunk_of(1))
        folder = root / fmt.namespace_digest(b"new weights", SUMS).hex()
        (theirs,) = folder.rglob("*.*")
        theirs.write_bytes(kept)
        assert (await read(tier, key_of(1)))[0] == [Status.CORRUPT]


def test_every_byte_of_a_header_counts() -> None:
    """Changed anywhere, a keyed header is refused; so is one whose sum is of a payload that looks like a header."""
    page = memoryview(bytearray(PAGE))
    digest = fmt.namespace_digest(NAMESPACE, SUMS)
    fmt.pack_header(page, chunk_of(1), digest, "00" * 8, SUMS.of(memoryview(b"x")), sums=SUMS)
    assert fmt.unpack_header(page, sums=SUMS).chunk == chunk_of(1)
    for at in range(PAGE):
        page[at] ^= 1
        with pytest.raises(fmt.BadHeaderError):
            fmt.unpack_header(page, sums=SUMS)
        page[at] ^= 1
    assert fmt.unpack_header(page, sums=SUMS).chunk == chunk_of(1)
    page[-16:] = SUMS.of(page[:-16])
    with pytest.raises(fmt.BadHeaderError):
        fmt.unpack_header(page, sums=SUMS)


def test_the_sums_are_blake2b_with_a_key() -> None:
    """Equal for equal secrets, different for different ones and from xxh3; in pieces as in one; never pickled."""
    data = memoryview(payload_of(b"key", 70_000))
    assert SUMS.of(data) == fmt.Sums(SECRET).of(data) != fmt.Sums(SECRET + b"!").of(data)
    assert SUMS.of(data) != fmt.PLAIN.of(data) == fmt.checksum(data)
    for sums in (SUMS, fmt.PLAIN):
        hasher = sums.hasher()
        hasher.update(data[:1000])
        hasher.update(data[1000:])
        assert hasher.digest() == sums.of(data)
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(SUMS)


# -- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"checksum_key_file": "missing"}, "fs.checksum_key_file is 'missing', but must be a file that can be read ("),
        ({"checksum_key_file": "short"}, "fs.checksum_key_file is 'short', but must be the place of a secret of 16"),
        ({"checksum_key_file": "long"}, "fs.checksum_key_file is 'long', but must be the place of a secret of 16"),
        ({"checksum_key_file": "fifo"}, "fs.checksum_key_file is 'fifo', but must be the place of a secret"),
        ({"checksum_key_env": "TIERKV_UNSET"}, "fs.checksum_key_env is 'TIERKV_UNSET', but must be the name of a vari"),
        ({"checksum_key_env": "X", "checksum_key_file": "y"}, "fs.checksum_key_env is 'X', but must be left out"),
        ({"checksum_key_file": ""}, "fs.checksum_key_file is '', but must be the path of a file"),
        ({"checksum_key_env": SECRET.decode()}, "fs.checksum_key_env is 'not a name', but must be the name"),
    ],
)  # fmt: skip
async def test_a_wrong_setting_is_one_sentence_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], sentence: str
) -> None:
    """Option, place, what is allowed; never what was found there; no root comes to be."""
    monkeypatch.chdir(tmp_path)
    secret_file(tmp_path / "short", SECRET[:15])
    secret_file(tmp_path / "long", SECRET * 200)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError) as raised:
        await FSTier("root", capacity="1MiB", **settings).open(context())  # type: ignore[arg-type]
    assert sentence in str(raised.value)
    shown = "".join(traceback.format_exception(raised.value))
    assert not any(form in shown.encode() for form in forms_of(SECRET[:15]))
    assert not (tmp_path / "root").exists()


async def test_a_key_that_others_may_read_is_worth_a_warning(
    root: Path, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line that names the file and its mode; a private one is not worth it."""
    async with opened(root, checksum_key_file=key_file):
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    key_file.chmod(0o644)
    async with opened(root, checksum_key_file=key_file):
        (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert str(key_file) in record.getMessage() and "mode 644" in record.getMessage()


def test_text_takes_the_options(key_file: Path) -> None:
    """A tier as text or as an object may name the place of its key."""
    assert isinstance(parse_tier("tier", f"fs(/nowhere, checksum_key_file={key_file})"), FSTier)
    assert isinstance(parse_tier("tier", {"type": "fs", "root": "/nowhere", "checksum_key_env": "KEY"}), FSTier)


# -- commands ---------------------------------------------------------------------------------------------------------


async def test_commands_read_keyed_chunks_with_the_key_alone(root: Path, key_file: Path, capsys: Capture) -> None:
    """Commands that read chunks say why they cannot without it, and what is wrong with it; du and doctor need none."""
    async with opened(root, checksum_key_file=key_file) as tier:
        await store(tier, chunk_of(1), chunk_of(2))
    assert main(["verify", str(root), "--json", "--checksum-key-file", str(key_file)]) == 0
    assert json.loads(capsys.readouterr().out)["verified"] == 2
    assert main(["ls", str(root), "--json", "--checksum-key-file", str(key_file)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["verify", str(root)]) == 1
    assert capsys.readouterr().out.count("its checksum has a key") == 2
    assert main(["ls", str(root)]) == 1
    capsys.readouterr()
    data = bytearray(one_file(root, 1).read_bytes())
    data[PAGE + 7] ^= 1
    one_file(root, 1).write_bytes(data)
    assert main(["verify", str(root), "--checksum-key-file", str(key_file)]) == 1
    assert "payload checksum" in capsys.readouterr().out
    assert main(["verify", str(root), "--checksum-key-file", str(root / "none")]) == 2
    assert "--checksum-key-file is" in capsys.readouterr().err
    assert main(["du", str(root)]) == 0
    assert main(["doctor", str(root)]) == 0


# -- nowhere ----------------------------------------------------------------------------------------------------------


def forms_of(secret: bytes) -> Iterator[bytes]:
    """A secret as it could show: itself, in hexadecimal, base64 and as a repr; and what was derived from it."""
    for raw in (secret, fmt.Sums(secret)._key):
        yield raw
        yield raw.hex().encode()
        yield base64.b64encode(raw).rstrip(b"=")
        yield repr(raw).encode()


async def test_the_secret_is_nowhere(
    root: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: Capture
) -> None:
    """Not in a log at its finest, a repr, an event, an error, a file of the root, or a process's arguments."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("TIERKV_TEST_KEY", SECRET.decode())
    shown: list[object] = []
    events: list[Event] = []
    ways: list[dict[str, Any]] = [{"checksum_key_file": key_file}, {"checksum_key_env": "TIERKV_TEST_KEY"}]
    for settings in ways:
        tier = FSTier(root, min_free=0, **settings)
        levels = [Level(CPUTier(), LRU(), capacity=4 * STRIDE), Level(tier, LRU(), capacity="1MiB")]
        cache = TieredCache(chunker=ToyChunker(), namespace=b"toy", levels=levels, on_event=events.append)
        shown += [tier, cache, levels, tier._wishes]
        async with cache:
            for branch in (1, 2):
                await cache.store(prompt(branch), buffers(cache.chunks(prompt(branch))))
            await cache.wait_idle()
            for path in [p for p in root.rglob("*.*") if len(p.parent.name) == 2] + [p for _, p in rows_under(root)]:
                data = path.read_bytes()
                path.write_bytes(data[:PAGE] + b"damage" + data[PAGE + 6 :])
            await cache.reset(Scope.MEMORY)
            hit = await cache.lookup(prompt(1))
            await cache.load(hit, buffers(hit.chunks))
            mount = tier._mount
            assert mount is not None
            shown += [tier, cache, mount, mount._ownership, vars(mount._wishes), tier.counters(), tier.usage()]
            shown += [mount.operations._files._sums, cache.statistics()]
    command = [sys.executable, "-m", "tierkv.cli", "verify", str(root), "--checksum-key-env", "TIERKV_TEST_KEY"]
    ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=PATIENCE_S, check=False)
    shown += [ran.stdout, ran.stderr, command, Path("/proc/self/cmdline").read_bytes()]
    main(["doctor", str(root)])
    main(["du", str(root)])
    captured = capsys.readouterr()
    shown += [captured.out, captured.err, events]
    text = "\n".join(f"{thing!r} {thing}" for thing in shown) + caplog.text
    text += "\n".join(repr(vars(record)) for record in caplog.records)
    written = b"".join(path.read_bytes() for path in files_under(root))
    for form in forms_of(SECRET):
        assert form not in text.encode()
        assert form not in written
        assert form.decode("latin-1") not in text
    assert events and caplog.records and len(written) > 10 * PAGE, "there was something to look through"
