"""A37-A40: files that execute, secrets that leak, names that climb, links that lead astray."""

from __future__ import annotations

import ast
import logging
import os
import pickle
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import tierkv
from tests.cases.kit import (
    LIMITS,
    cache_over,
    chunk_files,
    ear,
    fetch,
    file_of,
    forget_primary,
    fs_tier,
    keep,
    opened,
    prefixes,
    settle,
    store,
    turns_until,
)
from tests.fs_kit import files_under, only_files
from tests.toys import prompt
from tierkv import ConfigError, MemoryTier, Namespace, Outcome, TierError
from tierkv.chunkers import extra_bytes
from tierkv.protocols import TierContext
from tierkv.types import Chunk, ChunkKey


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.path),)


EXECUTES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle", "yaml"}


def _that_execute(source: str) -> list[str]:
    """Names in a module by which data become code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names if alias.name.split(".")[0] in EXECUTES]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in EXECUTES:
                found.append(module)
            case ast.Call(func=ast.Name(id=("eval" | "exec" | "compile") as name)):
                found.append(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
                found.append("torch.load")
    return found


@pytest.mark.usefixtures("layout")
async def test_a37_cache_files_do_not_execute(tmp_path: Path) -> None:
    """Values were pickled in shared directories: whoever could write there ran code in the reader (CVE-2025-69872).

    https://github.com/grantjenks/python-diskcache/issues/357

    A pickle with a side effect at a chunk's path, as long as a chunk or not, in the place of the index, of a lock file
    and of the root's lock; looked up, loaded, scanned, across a restart. No module of ours knows how to run data. Files
    are 0600 and directories 0700, whatever the umask.
    """
    exploded = tmp_path / "exploded"
    bomb = pickle.dumps(_Bomb(exploded))
    pickle.loads(bomb)
    exploded.rmdir()  # it works
    root = tmp_path / "root"
    for umask in (0o000, 0o777):
        before = os.umask(umask)
        try:
            async with opened(cache_over(fs_tier(root))) as cache:
                await keep(cache, prompt(1))
                await forget_primary(cache)
                for i, length in ((1, None), (2, len(bomb))):
                    path = file_of(root, cache.chunks(prompt(1))[i].key)
                    path.write_bytes(bomb.ljust(length or len(path.read_bytes()), b"."))
                assert await fetch(cache, prompt(1)) == 1
        finally:
            os.umask(before)
        for path in (root, *root.rglob("*")):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
        for path in files_under(root):  # a slab and its catalogue, too
            path.write_bytes(bomb.ljust(path.stat().st_size, b"."))
        async with opened(cache_over(fs_tier(root))) as cache:
            await turns_until(lambda: cache._levels[1].tier.writable)
            assert await fetch(cache, prompt(1)) == 0
        shutil.rmtree(root)
    assert not exploded.exists()
    sources = {path: path.read_text() for path in Path(tierkv.__file__).parent.rglob("*.py")}
    assert len(sources) > 50
    assert {path: found for path, text in sources.items() if (found := _that_execute(text))} == {}
    assert _that_execute("import pickle\nfrom yaml import load\neval('1')\ntorch.load(f)") == [
        "pickle", "yaml", "eval", "torch.load",
    ]  # fmt: skip


SECRET = "hunter2-a-marked-secret"


class _RemoteTier(MemoryTier):
    """A tier of somebody's that holds a secret, and fails now and then as clients do."""

    def __init__(self) -> None:
        super().__init__(name="remote")
        self.secret = SECRET
        self.options = {"secret_key": SECRET}
        self.fails = False

    async def open(self, ctx: TierContext) -> None:
        await super().open(ctx)

    async def read(self, items: Sequence[tuple[ChunkKey, memoryview]]) -> Sequence[Outcome]:
        self._maybe()
        return await super().read(items)

    async def write(self, items: Sequence[tuple[Chunk, memoryview]]) -> Sequence[Outcome]:
        self._maybe()
        return await super().write(items)

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        self._maybe()
        await super().delete(keys)

    def _maybe(self) -> None:
        if self.fails:
            credentials = self.options  # noqa: F841 - a traceback with locals would show it
            raise TierError("remote", "the store said 403")


@pytest.mark.usefixtures("layout")
async def test_a38_secrets_are_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An object-store client wrote its credentials into its logs.

    https://github.com/rustsec/advisory-db/pull/2024

    tierkv ships no remote tier and no option of its own that takes a secret, so the case applies to what others hand
    it: a tier that holds one, through all of its failures, and a request's salt. It shows in no repr, statistics,
    event, outcome, log at the lowest level, nor in any file.
    """
    root, remote = tmp_path / "root", _RemoteTier()
    salt = extra_bytes(salt=SECRET)
    said: list[object] = []
    with caplog.at_level(logging.DEBUG):
        cache = cache_over(fs_tier(root), remote, chunker=prefixes(Namespace(model="m")), namespace=None, limits=LIMITS)
        said.append(cache)
        async with cache:
            await keep(cache, prompt(1), extra=salt)
            await forget_primary(cache)
            for path in chunk_files(root).values():
                path.write_bytes(b"x" * len(path.read_bytes()))
            remote.fails = True
            for branch in (1, 2, 3, 1, 2, 3):
                said.append(await cache.lookup(prompt(branch), extra=salt))
                await fetch(cache, prompt(branch), extra=salt)
                said += await store(cache, prompt(branch), extra=salt)
            await cache.delete(cache.chunks(prompt(1), extra=salt))
            await cache.wait_idle(1)
            remote.fails = False
            said += [cache, cache._levels, cache.statistics(), ear(cache).events]
        said += [cache, cache.__dict__["_levels"][1].tier]
    said += [record.getMessage() + str(record.exc_text) for record in caplog.records]
    assert "corrupt" in caplog.text and "403" in caplog.text, "it did log"
    marks = [SECRET, SECRET.encode().hex(), SECRET[:12]]
    text = caplog.text + "".join(repr(thing) + str(thing) for thing in said)
    assert not [mark for mark in marks if mark in text]
    assert not [path for path in files_under(tmp_path) if SECRET.encode() in path.read_bytes()]


ODD_NAMES = [
    "../../etc", "/abs", "a/../../b", "..", ".", "", "\0", "a\nb", "x" * 300, "\ud800", "\udcff", "/p" * 3000,
    "~", "$HOME", "con", "a\\..\\b", "%2e%2e%2f", "\u202e", " ",
]  # fmt: skip


@pytest.mark.usefixtures("layout")
async def test_a39_odd_model_names(tmp_path: Path) -> None:
    """Names that climb, are absolute, empty, long, or no text a disk can take; and roots of that kind.

    Each name but a blank one works, with every file really inside the root; each root works or is refused at start,
    with the option, the value and the reason, and nothing made.
    """
    root = tmp_path / "deep" / "root"
    outside = {path: path.stat().st_mtime_ns for path in (tmp_path, tmp_path.parent)}
    for i, name in enumerate(ODD_NAMES):
        if not name.strip():
            with pytest.raises(ConfigError, match="model is"):  # two models that say nothing would share their keys
                Namespace(model=name)
            continue
        chunker = prefixes(Namespace(model=name))
        async with opened(cache_over(fs_tier(root), n_chunks=256, chunker=chunker, namespace=None)) as cache:
            await keep(cache, [i] * 4)
            await forget_primary(cache)
            assert await fetch(cache, [i] * 4) == 2
            assert cache.statistics()["fs"].n_chunks == 2
    real = os.path.realpath(root)
    assert all(os.path.realpath(path).startswith(real + os.sep) for path in files_under(tmp_path))
    assert len(chunk_files(root)) == 2 * sum(bool(name.strip()) for name in ODD_NAMES)
    assert list(tmp_path.iterdir()) == [tmp_path / "deep"] and outside.keys()
    long = tmp_path / ("n" * 300)
    for odd in (
        "",
        "\0",
        f"{tmp_path}/\ud800",
        "a\0b",
        str(long),
        str(tmp_path / "x") + ("/" + "y" * 200) * 25,
        5,
        None,
        b"x",
    ):
        with pytest.raises(ConfigError, match=r"fs\.root is .*, but must be"):
            async with cache_over(fs_tier(odd)):  # type: ignore[arg-type]
                pass
    assert list(tmp_path.iterdir()) == [tmp_path / "deep"]
    for odd in ("\udcff", "sp ace", "new\nline", "..hidden", "~", "$HOME"):
        async with opened(cache_over(fs_tier(tmp_path / "odd" / odd))) as cache:
            await keep(cache, prompt(1))
        assert chunk_files(tmp_path / "odd" / odd)


@pytest.mark.usefixtures("layout")
@only_files
async def test_a40_links_are_not_followed(tmp_path: Path) -> None:
    """A link for a root (legal), at a chunk's path, for a leaf, for the namespace, at a name that a write starts with.

    Resolved once at the root; elsewhere neither read through, nor written through, nor deleted at its target: a miss,
    and the next store puts a file in its place.
    """
    disk, root = tmp_path / "disk", tmp_path / "root"
    disk.mkdir()
    root.symlink_to(disk)
    async with opened(cache_over(fs_tier(root), n_slots=12)) as cache:
        await keep(cache, prompt(1))
        await forget_primary(cache)
        chunks = cache.chunks(prompt(1))
        victim = tmp_path / "victim"
        victim.write_bytes(file_of(disk, chunks[1].key).read_bytes())  # right bytes, wrong place
        precious = victim.read_bytes()
        for target in (victim, tmp_path / "nowhere", tmp_path, file_of(disk, chunks[2].key)):
            path = file_of(disk, chunks[1].key)
            before = target.read_bytes() if target.is_file() else None
            path.unlink()
            path.symlink_to(target)
            assert await fetch(cache, prompt(1)) == 1
            assert before is None or target.read_bytes() == before
            assert not (tmp_path / "nowhere").exists()
            await keep(cache, prompt(1))
            await forget_primary(cache)
            assert await fetch(cache, prompt(1)) == 4
            await forget_primary(cache)
            assert file_of(disk, chunks[1].key).is_file() and not file_of(disk, chunks[1].key).is_symlink()
        for worker in range(16):  # where a write of the fourth chunk would start
            path = file_of(disk, chunks[3].key)
            path.with_name(f"{path.name}.part{worker}").symlink_to(victim)
        await cache.delete([chunks[3]])
        await settle(cache)
        await keep(cache, prompt(1))
        await forget_primary(cache)
        assert await fetch(cache, prompt(1)) == 4
        assert victim.read_bytes() == precious
    elsewhere = tmp_path / "elsewhere"
    leaf = file_of(disk, chunks[2].key).parent
    shutil.move(leaf, elsewhere)
    leaf.symlink_to(elsewhere)
    there = {path: path.read_bytes() for path in files_under(elsewhere)}
    async with opened(cache_over(fs_tier(root), n_slots=12)) as cache:
        assert await fetch(cache, prompt(1)) == 2
        await store(cache, prompt(1))
        await settle(cache)
        await cache.reset()
        await settle(cache)
    assert {path: path.read_bytes() for path in files_under(elsewhere)} == there
    namespace = leaf.parent
    shutil.rmtree(namespace)
    namespace.symlink_to(elsewhere)
    with pytest.raises(TierError, match="namespace"):
        async with cache_over(fs_tier(root)):
            pass
    assert {path: path.read_bytes() for path in files_under(elsewhere)} == there
