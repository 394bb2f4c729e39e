"""Every wrong setting of a cache and its levels ends in one sentence, before anything is created (A26, A44, A45)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.toys import ToyChunker
from tierkv import ConfigError, CPUTier, Level, MemoryTier, MoverLimits, PrefixChunker, TieredCache
from tierkv.admission import SecondTouch
from tierkv.policies import LRU
from tierkv.tiers.fs import FSTier

ONE_ORDER = LRU()


def level(**changes: Any) -> Level:
    return Level(MemoryTier(name="primary"), LRU(), capacity="64KiB")._replace(**changes)


def below(root: Path, **changes: Any) -> list[Level]:
    return [level(), Level(FSTier(root), LRU(), capacity="1MiB")._replace(**changes)]


LEVELS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no list": (lambda _: level(), "levels is"),
    "none": (lambda _: None, "levels is None"),
    "empty": (lambda _: [], r"levels is \[\]"),
    "text": (lambda _: "cpu", "levels is 'cpu'"),
    "a tier for a level": (lambda _: [CPUTier()], r"levels\[0\] is"),
    "text for a tier": (lambda root: below(root, tier="fs"), r"levels\[1\]\.tier is 'fs'"),
    "a class for a tier": (lambda _: [level(tier=CPUTier)], r"levels\[0\]\.tier is"),
    "a lower tier on top": (lambda root: below(root)[1:], r"levels\[0\]\.tier is"),
    "a number for a name": (lambda _: [level(tier=MemoryTier(name=5))], r"levels\[0\]\.tier\.name is 5"),  # type: ignore[arg-type]
    "one name twice": (lambda _: [level(), level()], "tier name is 'primary'"),
    "no policy": (lambda root: below(root, policy=None), "fs.policy is None"),
    "text for a policy": (lambda root: below(root, policy="lru"), "fs.policy is 'lru'"),
    "a class for a policy": (lambda root: below(root, policy=LRU), "fs.policy is"),
    "one policy for two": (
        lambda root: [level(policy=ONE_ORDER), below(root, policy=ONE_ORDER)[1]],
        r"primary\.policy is .* a second LRU\(\)",
    ),
    "a class for an admission": (lambda root: below(root, admission=SecondTouch), "fs.admission is"),
    "true for an admission": (lambda root: below(root, admission=True), "fs.admission is True"),
    "text for writes": (lambda root: below(root, writes="demot"), r"fs.writes is 'demot'.*Writes\.DEMOTE"),
    "none for writes": (lambda root: below(root, writes=None), "fs.writes is None"),
    "a queue below a chunk": (lambda root: below(root, queue=5000), r"fs\.queue is 5000.*12288"),
    "no capacity": (lambda _: [Level(CPUTier(), LRU())], "cpu.capacity is None"),
}


@pytest.mark.parametrize(("levels", "sentence"), LEVELS.values(), ids=LEVELS)
def test_levels(tmp_path: Path, levels: Callable[[Path], Any], sentence: str) -> None:
    """Told by the constructor, which touches no disk."""
    with pytest.raises(ConfigError, match=sentence) as raised:
        TieredCache(chunker=ToyChunker(), namespace=b"toy", levels=levels(tmp_path / "root"))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("chunk_nbytes", 0, "chunk_nbytes is 0"),
        ("chunk_nbytes", "1MiBx", "chunk_nbytes is '1MiBx'.*nearest valid value: 1MiB"),
        ("chunk_nbytes", 4096, "chunk_nbytes is 4096.*nearest valid value: 5000"),
        ("namespace", "toy", "namespace is 'toy'"),
        ("chunker", None, "chunker is None"),
        ("chunker", PrefixChunker, "chunker is"),
        ("device", 5, "device is 5"),
        ("on_event", 5, "on_event is 5"),
        ("clock", 5, "clock is 5"),
        ("limits", 5, "limits is 5"),
        ("limits", MoverLimits(deadline_s=-1), r"limits\.deadline_s is -1"),
        ("limits", MoverLimits(deadline_s=math.nan), r"limits\.deadline_s is nan"),
        ("limits", MoverLimits(n_batches=0), r"limits\.n_batches is 0"),
        ("limits", MoverLimits(batch_nbytes=0), r"limits\.batch_nbytes is 0"),
        ("limits", MoverLimits(breaker_failures=0), r"limits\.breaker_failures is 0"),
        ("limits", MoverLimits(breaker_cooldown_s=-1), r"limits\.breaker_cooldown_s is -1"),
    ],
)
def test_options_of_the_cache(option: str, value: Any, sentence: str) -> None:
    """Told by the constructor: in use some of them would hang (no batches), others raise far from their cause."""
    options: dict[str, Any] = {"chunker": ToyChunker(), "namespace": b"toy", "levels": [level()], option: value}
    with pytest.raises(ConfigError, match=sentence):
        TieredCache(**options)


@pytest.mark.parametrize("options", [{"name": ""}, {"shared_id": 5}, {"shared_id": ""}, {"populate": "no"}], ids=repr)
def test_options_of_the_cpu_tier(options: dict[str, Any]) -> None:
    """An empty id would be everybody's."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        CPUTier(**options)


async def test_a_chunk_size_may_be_text() -> None:
    """As every other size."""
    async with TieredCache(chunker=ToyChunker(), namespace=b"toy", levels=[level()], chunk_nbytes="8KiB") as cache:
        assert cache.statistics()["primary"].capacity_nbytes == 64 << 10


async def test_a_tenant_is_text() -> None:
    """Told before anything is reserved: no header can hold something else."""
    async with TieredCache(chunker=ToyChunker(), namespace=b"toy", levels=[level()]) as cache:
        with pytest.raises(TypeError, match="tenant must be text, not int"):
            await cache.store([1, 2], [bytes(5000)], tenant=5)  # type: ignore[arg-type]
