"""A26, A44, A45: settings that cannot be are refused in one sentence, before anything is created."""

# ruff: noqa: B023 - functions made in a loop are used up in the same turn

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases.kit import fetch, keep
from tests.leaks import Snapshot, wait_for_none
from tests.patience import PATIENCE_S
from tests.toys import NBYTES, STRIDE, ToyChunker, prompt
from tierkv import ConfigError, CPUTier, Level, MemoryTier, MoverLimits, Namespace, PrefixChunker, TieredCache
from tierkv.chunkers import blocks_by_group
from tierkv.policies import LRU, TTL
from tierkv.tiers._fs.wishes import least_capacity_nbytes
from tierkv.tiers.fs import FSTier
from tierkv.vllm.options import check_capacity, check_reserve, parse_options

MODEL = Namespace(model="m")


def _refused(make: Callable[[], object], *told: str) -> None:
    """One sentence of one kind of error that says all of this; nothing was created."""
    before = Snapshot.take()
    with pytest.raises(ConfigError) as refusal:
        make()
    text = str(refusal.value)
    assert "\n" not in text and len(text) < 600
    assert all(word in text for word in told), (text, told)
    assert not [entry for entry in before.leaked(Snapshot.take()) if "/dev/shm" not in entry]


def test_a26_a_chunk_size_that_does_not_suit_the_blocks() -> None:
    """All groups must have the same block size, said every worker as it died, without the sizes.

    https://github.com/vllm-project/vllm/issues/48919

    Of the kind: a chunk that is no multiple, groups of several block sizes, both ways to say it at once, and 0, -1,
    text, 64.0, True for it; by the library, by vLLM's JSON. Each names the option, what was given, the block sizes with
    their groups and the nearest value that would do.
    """
    wrong: dict[Any, str] = {100: "96 or 112", 10: "16", 0: "16", -1: "16", "64": "64", 64.0: "64", True: "16"}
    for tokens, nearest in wrong.items():
        _refused(
            lambda: PrefixChunker(namespace=MODEL, tokens_per_block=16, tokens_per_chunk=tokens),
            f"tokens_per_chunk is {tokens!r}",
            "16 in group 0",
            f"nearest valid value: {nearest}",
        )
    _refused(
        lambda: blocks_by_group("block_size", 48, {0: 16, 1: 32}),
        "block_size is 48",
        "16 in group 0, 32 in group 1",
        "nearest valid value: 32 or 64",
    )
    assert blocks_by_group("block_size", 64, {0: 16, 1: 32}) == {0: 4, 1: 2}
    both = "blocks_per_chunk", "nearest valid value"
    _refused(lambda: PrefixChunker(namespace=MODEL, tokens_per_chunk=128, blocks_per_chunk=8), *both)
    cpu = {"cpu_bytes_to_use": 1 << 30}
    _refused(lambda: parse_options({**cpu, "block_size": 64, "blocks_per_chunk": 4}), *both)
    for value in (0, -1, "64", 64.0, True):
        for option in ("block_size", "blocks_per_chunk"):
            _refused(
                lambda: parse_options({**cpu, option: value}),
                f"{option} is {value!r}",
                "nearest valid value",
            )


async def test_a44_no_room_for_a_chunk(tmp_path: Path) -> None:
    """Capacity 0, a byte less than one chunk, and exactly one chunk, for each tier and for vLLM's settings.

    The first two are refused with what was given and what a chunk takes; the third works.
    """

    def levels(tier: Any, capacity: object) -> list[Level]:
        below = not isinstance(tier, CPUTier) and tier.name != "primary"
        top = [Level(MemoryTier(name="primary"), LRU(), capacity=4 * STRIDE)] if below else []
        return [*top, Level(tier, LRU(), capacity=capacity)]  # type: ignore[arg-type]

    least_nbytes = least_capacity_nbytes(NBYTES)
    tiers: dict[str, tuple[Callable[[], Any], int]] = {
        "primary": (lambda: MemoryTier(name="primary"), STRIDE),
        "cpu": (lambda: CPUTier(populate=False), STRIDE),
        "lower": (lambda: MemoryTier(name="lower"), STRIDE),
        "fs": (lambda: FSTier(tmp_path / "root", min_free=0, layout="auto"), least_nbytes),
        "slab": (
            lambda: FSTier(tmp_path / "slab", min_free=0, layout="slab", name="slab"),
            least_capacity_nbytes(NBYTES, in_slab=True),
        ),
    }
    for name, (make, nbytes) in tiers.items():
        for capacity in (0, nbytes - 1):
            before = Snapshot.take()
            with pytest.raises(ConfigError) as refusal:
                async with TieredCache(chunker=ToyChunker(), namespace=b"toy", levels=levels(make(), capacity)):
                    pass
            assert str(capacity) in str(refusal.value) and "capacity" in str(refusal.value)
            assert capacity == 0 or str(nbytes) in str(refusal.value), "what one chunk takes"
            assert not [entry for entry in wait_for_none(before) if "/dev/shm" not in entry]
            assert list(tmp_path.glob("[rs]*")) == [] or (name == "slab" and not (tmp_path / "slab").exists())
        async with TieredCache(chunker=ToyChunker(), namespace=b"toy", levels=levels(make(), nbytes)) as cache:
            await keep(cache, prompt(1, 1))
            assert await cache.wait_idle(PATIENCE_S)
            assert cache.statistics()[name].n_chunks == 1
            assert await fetch(cache, prompt(1, 1)) == 1
    for nbytes in (0, 4095):
        with pytest.raises(ConfigError, match=rf"cpu_bytes_to_use is {nbytes}"):
            check_capacity(parse_options({"cpu_bytes_to_use": nbytes}).cpu_nbytes, 4096, n_ranks=1, shared=True)
    assert check_capacity(4096, 4096, n_ranks=1, shared=True) == 1
    with pytest.raises(ConfigError, match="store_reserve"):
        check_reserve(parse_options({"cpu_bytes_to_use": 40960, "store_reserve": 40960}), 10, 4096)


ABSURD: tuple[object, ...] = (0, -1, 1_000_000, "8", 2.5, math.nan, math.inf, True, None, 10**400, [], "NaN")


def test_a45_absurd_numbers(tmp_path: Path) -> None:  # noqa: C901 - many options, one question
    """Threads 0, -1, a million, "8", 2.5, NaN, True; negative bytes and deadlines: refused, naming option and range.

    For every count, size and time of the library and of vLLM's JSON; what is allowed in one place (0 bytes to leave
    free, None for "default") is left out there.
    """
    root = tmp_path / "root"
    counts: dict[str, Callable[[Any], object]] = {
        "fs.n_read_threads": lambda n: FSTier(root, n_read_threads=n),
        "fs.n_write_threads": lambda n: FSTier(root, n_write_threads=n),
        "cpu.rank": lambda n: CPUTier(rank=n),
        "blocks_per_chunk": lambda n: PrefixChunker(namespace=MODEL, blocks_per_chunk=n),
        "tokens_per_block": lambda n: PrefixChunker(namespace=MODEL, tokens_per_block=n),
        "limits.n_batches": lambda n: _cache(limits=MoverLimits(n_batches=n)),
        "limits.breaker_failures": lambda n: _cache(limits=MoverLimits(breaker_failures=n)),
    }
    allowed = {"cpu.rank": (0, 1_000_000), "blocks_per_chunk": (1_000_000, None)}
    large = {"tokens_per_block", "limits.n_batches", "limits.breaker_failures", "limits.batch_nbytes"}
    for option, make in counts.items():
        for value in ABSURD:
            if value in allowed.get(option, ()) and not isinstance(value, bool):
                continue
            if option in large and value == 1_000_000:
                continue
            _refused(lambda: make(value), f"{option} is {value!r}"[:80], "must be")
    sizes: dict[str, Callable[[Any], object]] = {
        "fs.capacity": lambda n: FSTier(root, capacity=n),
        "fs.min_free": lambda n: FSTier(root, min_free=n),
        "primary.capacity": lambda n: _cache(capacity=n),
        "chunk_nbytes": lambda n: _cache(chunk_nbytes=n),
    }
    for option, make in sizes.items():
        for value in (-1, "-1GiB", "many", 2.5, math.nan, True, [], 1 << 70):
            _refused(lambda: make(value), f"{option} is {value!r}", "must be")
    seconds: dict[str, Callable[[Any], object]] = {
        "limits.deadline_s": lambda s: _cache(limits=MoverLimits(deadline_s=s)),
        "limits.breaker_cooldown_s": lambda s: _cache(limits=MoverLimits(breaker_cooldown_s=s)),
        "cpu.join_deadline_s": lambda s: CPUTier(join_deadline_s=s),
        "ttl_s": lambda s: TTL(LRU(), s),
    }
    for option, make in seconds.items():
        for value in (-1, -0.1, math.nan, math.inf, "8", True, None):
            _refused(lambda: make(value), f"{option} is {value!r}", "must be")
    cpu = {"cpu_bytes_to_use": 1 << 30}
    for option in ("n_read_threads", "n_write_threads", "capacity", "queue_bytes"):
        for value in (0, -1, "8x", 2.5, math.nan, True, 1 << 70):
            tier = {"type": "fs", "root_dir": str(root), option: value}
            _refused(lambda: parse_options({**cpu, "secondary_tiers": [tier]}), f"{option} is {value!r}")
    for option in ("lookup_deadline_s", "transfer_deadline_s", "ttl_s"):
        for value in (0, -1, "8", math.nan, True):
            _refused(lambda: parse_options({**cpu, option: value}), f"{option} is {value!r}")
    assert not root.exists()


def _cache(*, capacity: Any = 4 * STRIDE, **options: Any) -> TieredCache:
    levels = [Level(MemoryTier(name="primary"), LRU(), capacity=capacity)]
    return TieredCache(chunker=ToyChunker(), namespace=b"toy", levels=levels, **options)
