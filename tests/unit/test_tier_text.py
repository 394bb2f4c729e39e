"""Tiers by text, by object, by a third party's entry point and by module: made, refused in one sentence, and used."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributions import install_shelves
from tests.patience import PATIENCE_S
from tests.toys import NBYTES, STRIDE, ToyChunker, buffers, payload, prompt
from tierkv import ConfigError, Level, MemoryTier, TieredCache
from tierkv.policies import LRU
from tierkv.tiers.fs import FSTier
from tierkv.tiers.parse import parse_tier, third_party_names
from tierkv.vllm.options import parse_options

CPU = {"cpu_bytes_to_use": "8MiB"}


@pytest.fixture(scope="session")
def shelves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a distribution with entry points of group ``tierkv.tiers`` is installed."""
    return install_shelves(tmp_path_factory.mktemp("shelves"))


@pytest.fixture
def installed(shelves: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The distribution on the path of this process, and its module."""
    monkeypatch.syspath_prepend(str(shelves))
    import shelves as module  # type: ignore[import-not-found]

    yield module
    sys.modules.pop("shelves", None)


@pytest.mark.parametrize(
    ("value", "kind", "name"),
    [
        ("memory", MemoryTier, "memory"),
        ("memory(n_slots=3, name=small)", MemoryTier, "small"),
        ("fs(/nvme/kv, capacity=500GiB)", FSTier, "fs"),
        ({"type": "fs", "root": "/nvme/kv", "n_read_threads": 2, "name": "disk"}, FSTier, "disk"),
        ("tierkv.tiers.memory:MemoryTier(name=foreign)", MemoryTier, "foreign"),
        ({"type": "MemoryTier", "module_path": "tierkv.tiers.memory", "n_slots": 1}, MemoryTier, "memory"),
    ],
)
def test_text_and_objects_are_tiers(value: object, kind: type, name: str) -> None:
    """What is written is what is made, ours or from a module; nothing is opened."""
    tier: Any = parse_tier("tier", value)
    assert (type(tier), tier.name) == (kind, name)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("sf(/x)", "tier is 'sf'.*nearest valid value: fs"),
        ("fs", r"tier: fs\.root is None, but must be given"),
        ("fs(/x, capcity=1)", "no option 'capcity'.*nearest valid option: capacity"),
        ("fs(/x, capacity=-1)", r"fs\.capacity is -1"),
        ("fs(/x) > memory", "it wraps nothing"),
        ("no.such.module:Tier", "'no.such.module' cannot be loaded"),
        ("tierkv.tiers.memory:NoTier", "a name of the module"),
        ("collections:OrderedDict", "a tier .this one has no open"),
        ({"type": "memory", "n_slots": 0}, "n_slots is 0"),
        (7, "tier is 7"),
    ],
)
def test_wrong_ones_are_one_sentence(value: object, says: str) -> None:
    """Option, value, what is allowed, the nearest: never a traceback."""
    with pytest.raises(ConfigError, match=says) as caught:
        parse_tier("tier", value)
    assert "\n" not in str(caught.value)


async def test_an_installed_tier_is_a_level(installed: Any) -> None:
    """A distribution's tier is a name: chunks go down to it, leave the primary and come back from it, byte for byte."""
    assert "shelf" in third_party_names()
    tier = parse_tier("tier", "shelf(color=green)")
    assert tier.name == "green shelf"
    levels = [
        Level(MemoryTier(name="primary"), LRU(), capacity=4 * STRIDE),
        Level(tier, LRU(), capacity=64 * STRIDE),
    ]
    chunker = ToyChunker()
    async with TieredCache(chunker=chunker, namespace=b"toy", levels=levels) as cache:
        for branch in range(4):
            tokens = prompt(branch)
            await cache.store(tokens, buffers(chunker.chunks(tokens)))
        assert await cache.wait_idle(PATIENCE_S)
        hit = await cache.lookup(prompt(0))
        assert hit.chunks
        assert set(hit.levels) == {1}
        async with cache.lease(hit) as lease:
            assert lease.chunks
            for chunk in lease.chunks:
                assert bytes(lease.view(chunk))[:NBYTES] == payload(chunk)
    assert installed.ShelfTier.n_written >= 12


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("shelve", "'shelve'.*nearest valid value: shelf"),
        ("broken", "'no_such_module_of_shelves:Tier' cannot be loaded: ModuleNotFoundError"),
        ("no-tier", "a tier .this one has no open"),
        ("explodes", "cannot be made from these arguments: RuntimeError: out of shelves"),
        ("shelf", "cannot be made from these arguments: TypeError.*color"),
    ],
)
def test_a_bad_entry_point_is_one_sentence(name: str, says: str) -> None:
    """A distribution's tier that is misspelt, cannot be imported, is none, raises or wants more: one sentence each."""
    with pytest.raises(ConfigError, match=says) as caught:
        parse_tier("tier", name)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("installed")
def test_an_entry_point_is_a_type_of_secondary_tier() -> None:
    """In vLLM's JSON too: keys that all tiers have are checked, the others go to the tier; a wrong name names both."""
    raw = {"type": "shelf", "color": "red", "capacity": "1MiB", "eviction_policy": "mq"}
    (tier,) = parse_options({**CPU, "secondary_tiers": [raw]}).tiers
    assert (tier.is_foreign, tier.capacity_nbytes, dict(tier.extra)) == (True, 1 << 20, {"color": "red"})
    with pytest.raises(
        ConfigError, match=r"secondary_tiers\[0\].type is 'shelv'.*fs, .*shelf.*nearest valid value: shelf"
    ):
        parse_options({**CPU, "secondary_tiers": [{"type": "shelv"}]})
