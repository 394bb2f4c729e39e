"""A22-A25, A34: under which key and namespace a chunk's bytes mean anything, and to whom."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cases.kit import cache_over, chunk_files, fetch, fs_tier, keep, opened, prefixes, settle
from tests.toys import prompt
from tierkv import Chunk, Namespace, PrefixChunker, Scope, TieredCache
from tierkv.chunkers import extra_bytes

MODEL = Namespace(model="org/m")
KEYS = """
from tierkv import Namespace, PrefixChunker
from tierkv.chunkers import extra_bytes
for how in ({}, {"hash": "sha256"}, {"group": 3}):
    chunker = PrefixChunker(namespace=Namespace(model="org/m", revision="7"), partial=True, **how)
    print(chunker.namespace.digest.hex())
    for extra in (b"", extra_bytes(lora="a", salt="s")):
        print(*(chunk.key.hex() for chunk in chunker.chunks(range(3000), extra=extra)))
"""


def _under(root: Path, namespace: Namespace, **options: Any) -> TieredCache:
    # Room for them all: each namespace's slab has a catalogue, and some idle slots.
    return cache_over(fs_tier(root), n_chunks=128, chunker=prefixes(namespace, **options), namespace=None)


def _apart(*chains: Sequence[Chunk]) -> bool:
    """From the first chunk on, no key stands in two of them."""
    keys = [chunk.key for chain in chains for chunk in chain]
    return len(set(keys)) == len(keys)


def test_a22_the_same_tokens_have_the_same_key_in_every_process() -> None:
    """The chain's start value was random for each process, so that sharing between processes never hit.

    https://github.com/LMCache/LMCache/issues/1139

    Three processes with the hash seed unset, 0 and random, for both digests, a group and an extra. Algorithm and group
    are part of the identity: another choice is a miss.
    """
    told = []
    for seed in (None, "0", "random"):
        env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        env |= {} if seed is None else {"PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", KEYS], env=env, capture_output=True, text=True, check=True)
        told.append(run.stdout)
    assert told[0] == told[1] == told[2] and len(told[0]) > 9000
    tokens = range(512)
    variants: list[dict[str, Any]] = [{}, {"hash": "sha256"}, {"group": 1}, {"tokens_per_block": 8}]
    assert _apart(*(PrefixChunker(namespace=MODEL, **how).chunks(tokens) for how in variants))
    digests = {PrefixChunker(namespace=MODEL, **how).namespace.digest for how in variants if "group" not in how}
    assert len(digests) == 3


@pytest.mark.usefixtures("layout")
async def test_a23_an_adapter_is_part_of_the_key(tmp_path: Path) -> None:
    """Two LoRA adapters on one base model, same tokens: the second was served what the first had computed.

    https://github.com/vllm-project/vllm/issues/44250

    Base, two adapters, one of them pointed at other files, and a salt that reads like an adapter's name: each hits its
    own and no other's, from the first chunk on, also from disk. In vLLM the block hashes carry all that.
    """
    extras = [
        b"",
        extra_bytes(lora="A", path="/a"),
        extra_bytes(lora="B", path="/b"),
        extra_bytes(lora="A", path="/other"),
        extra_bytes(salt="A"),
        extra_bytes(lora="A", salt=""),
        extra_bytes(loraA=""),
    ]
    chunker = prefixes(MODEL)
    assert _apart(*(chunker.chunks(prompt(1), extra=extra) for extra in extras))
    assert extra_bytes(salt="s", lora="A") == extra_bytes(lora="A", salt="s")
    for stored in extras[:3]:
        root = tmp_path / stored.hex()[-8:]
        async with opened(_under(root, MODEL)) as cache:
            await keep(cache, prompt(1), extra=stored)
        async with opened(_under(root, MODEL)) as cache:
            for extra in extras:
                assert await fetch(cache, prompt(1), extra=extra) == (4 if extra == stored else 0)


NAMES = [
    "org/m",
    "org_m",
    "org__m",
    "org--m",
    "org%2Fm",
    "org\\m",
    "Org/m",
    "org/M",
    "org/m/",
    "caf\u00e9",
    "cafe\u0301",
]


@pytest.mark.usefixtures("layout")
async def test_a24_two_names_are_two_models(tmp_path: Path) -> None:
    """A slash became a marker that names may contain: two models shared files, and one was served the other's bytes.

    https://github.com/LMCache/LMCache/issues/5069

    One root for names that are a slash, an escape, a case or a Unicode form apart: each finds its own and nothing else.
    """
    root = tmp_path / "root"
    for i, name in enumerate(NAMES):
        async with opened(_under(root, Namespace(model=name))) as cache:
            await settle(cache)
            for j in range(len(NAMES)):
                assert await fetch(cache, [j] * 4) == 0, "another model's"
            await keep(cache, [i] * 4)
    for i, name in enumerate(NAMES):
        async with opened(_under(root, Namespace(model=name))) as cache:
            assert [await fetch(cache, [j] * 4) for j in range(len(NAMES))] == [2 * (j == i) for j in range(len(NAMES))]
    folders = [path for path in root.iterdir() if path.is_dir()]
    assert [len(chunk_files(folder)) for folder in folders] == [2] * len(NAMES)


OTHER: dict[str, Any] = {
    "tokens_per_block": 2,
    "blocks_per_chunk": 1,
    "tp_size": 2,
    "pp_size": 2,
    "canonical_layout": True,
    "extra": (("k", "v"),),
    "key_hash": "blake2b",
}


@pytest.mark.usefixtures("layout")
async def test_a25_another_layout_finds_nothing(tmp_path: Path) -> None:
    """Files written under one KV layout were found and loaded under another of the same size.

    https://github.com/vllm-project/vllm/issues/55904

    Each field of the identity in turn, layout and rank order among them, sizes unchanged: a miss, and the first
    layout's files stay for it. The manifest names every field.
    """
    root = tmp_path / "root"
    async with opened(_under(root, MODEL)) as cache:
        await keep(cache, prompt(1))
    fields = [field.name for field in dataclasses.fields(Namespace)]
    assert set(fields) <= MODEL.describe().keys()
    n_different = 0
    for field in fields:
        other = dataclasses.replace(MODEL, **{field: OTHER.get(field, "other")})
        same = prefixes(other).namespace.digest == prefixes(MODEL).namespace.digest
        assert same is (field in ("tokens_per_block", "blocks_per_chunk", "key_hash")), "what the chunker fills in"
        if same:
            continue
        n_different += 1
        async with opened(_under(root, other)) as cache:
            assert await fetch(cache, prompt(1)) == 0
    assert n_different > 10
    async with opened(_under(root, MODEL)) as cache:
        assert await fetch(cache, prompt(1)) == 4


@pytest.mark.usefixtures("layout")
async def test_a34_new_weights_find_nothing_of_the_old(tmp_path: Path) -> None:
    """An online weight update cleared memory, but files keyed by tokens and model name were loaded under new weights.

    https://github.com/sgl-project/sglang/issues/26792

    Revision, digest of the weights and epoch, switched and switched back, over restarts: the new one misses at every
    level, the old one hits again. What a reset clears: memory only, or everything, unread files of the scan too.
    """
    root = tmp_path / "root"
    changes: list[dict[str, Any]] = [{"revision": "2"}, {"weights_digest": "ab"}, {"epoch": "1"}]
    for change in changes:
        first, second = MODEL, dataclasses.replace(MODEL, **change)
        async with opened(_under(root, first)) as cache:
            await keep(cache, prompt(1))
            assert await fetch(cache, prompt(1)) == 4
        for namespace, expected in itertools.chain(((second, 0), (second, 4), (first, 4))):
            async with opened(_under(root, namespace)) as cache:
                assert await fetch(cache, prompt(1)) == expected
                await keep(cache, prompt(1))
        async with opened(_under(root, second)) as cache:
            await cache.reset(Scope.ALL)
    async with opened(_under(root, MODEL)) as cache:
        await fetch(cache, prompt(1))
        await cache.reset(Scope.MEMORY)
        assert cache.statistics()["primary"].n_chunks == 0
        assert await fetch(cache, prompt(1)) == 4, "what lies on disk stays"
        await cache.reset(Scope.ALL)
        assert await fetch(cache, prompt(1)) == 0
        await settle(cache)
        assert chunk_files(root) == {}, "nor of the others, whose caches were closed right after their reset"
