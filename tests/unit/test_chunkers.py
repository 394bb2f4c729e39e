"""Keys and namespaces: golden vectors, the cases that other projects got wrong, and what a wrong setting says."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests.gate import hold
from tierkv import CPUTier, Level, TieredCache
from tierkv.chunkers import Namespace, PrefixChunker, blocks_by_group, extra_bytes
from tierkv.errors import ConfigError
from tierkv.policies import LRU
from tierkv.types import Chunk

MODEL = Namespace(model="Qwen3-0.6B")
ODD = Namespace(
    model="org/m\x00\ud800\u00e9",
    revision="r2",
    tp_size=2,
    rank_order="0,1",
    epoch="e1",
    extra=(("b", ""), ("a", "1")),
)
# Worked out from the formulas in the module's docstring by a script that shares no code with it.
GOLDEN_DIGEST = "346b0e48ccce328b7226047bd6a9afce263182a20bacc28b5c5a1c1dbe3304c3"
GOLDEN_KEYS = [
    "0d19aa10d84aaadacb31fc191be6256e5fa3a803fa0cadfa3afa74b3f349d230",
    "fd0a06341ca0dc70e9aef6f3b20339ec89357db990160776d0b081a66e8d87f7",
    "cf75c06c231803d3132184b9659c5c010788ef11530266cb74c9b7802f30b453",
]
GOLDEN_ODD_DIGEST = "c674230a648d7eb5f3229dcba6ac9a862cbd706f7d5feb9b4074f824e1c98872"
GOLDEN_ODD_KEYS = [
    "64e778627411d9d6ff579da2310606e2be79d66cc14b341962a4b3f054be01f4",
    "282cbfb0e65a43edd1492939a46df1f4b52bdd09a1ea7759d8f4c55515c17b5b",
]


def keys(chunks: Any) -> list[str]:
    return [chunk.key.hex() for chunk in chunks]


def keys_of(namespace: Namespace = MODEL, *, extra: bytes = b"", n_tokens: int = 256, **options: Any) -> list[str]:
    return keys(PrefixChunker(namespace=namespace, **options).chunks(range(n_tokens), extra=extra))


def differ_from_the_first_chunk_on(*chains: list[str]) -> bool:
    everything = [key for chain in chains for key in chain]
    return len(set(everything)) == len(everything)


# -- golden ---------------------------------------------------------------------------------------------------------


def test_golden_keys() -> None:
    """A key is a promise to every file already on disk: change one and old chunks are lost."""
    chunker = PrefixChunker(namespace=MODEL, tokens_per_block=16, blocks_per_chunk=8, partial=True)
    assert chunker.namespace.digest.hex() == GOLDEN_DIGEST
    assert keys(chunker.chunks(range(300))) == GOLDEN_KEYS


def test_golden_keys_of_everything_unusual() -> None:
    """SHA-256, a group, an extra, ids above 32 bits, and a name that is not even valid Unicode."""
    chunker = PrefixChunker(namespace=ODD, tokens_per_block=4, blocks_per_chunk=1, group=3, hash="sha256")
    assert chunker.namespace.digest.hex() == GOLDEN_ODD_DIGEST
    tokens = [0, 2**64 - 1, 7, 2**32, 5, 6, 7, 8]
    assert keys(chunker.chunks(tokens, extra=extra_bytes(salt=b"\0", lora="A"))) == GOLDEN_ODD_KEYS


@pytest.mark.parametrize("seed", [None, "0", "random"])
def test_other_processes_make_the_same_keys(seed: str | None) -> None:
    """Case: https://github.com/LMCache/LMCache/issues/1139 - keys depend on no hash seed."""
    code = (
        "from tierkv.chunkers import *\n"
        "chunker = PrefixChunker(namespace=Namespace(model='Qwen3-0.6B'), partial=True)\n"
        "print(chunker.namespace.digest.hex(), *(chunk.key.hex() for chunk in chunker.chunks(range(300))))"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    env |= {} if seed is None else {"PYTHONHASHSEED": seed}
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [GOLDEN_DIGEST, *GOLDEN_KEYS]


# -- chunks ---------------------------------------------------------------------------------------------------------


def test_what_a_chunk_says() -> None:
    """Each names its parent, its group, where it ends and how long it is; tokens that do not fill one give none."""
    chunker = PrefixChunker(namespace=MODEL, tokens_per_chunk=64, group=2, chunk_nbytes="4KiB")
    a, b = chunker.chunks(range(150))
    assert a == Chunk(a.key, None, 2, 64, 4096)
    assert b == Chunk(b.key, a.key, 2, 128, 4096)
    assert chunker.chunks([]) == [] == chunker.chunks(range(63))
    assert len(a.key) == 32


def test_a_partial_tail() -> None:
    """It ends where the tokens end, has the bytes of the blocks it reaches into, and is replaced by a whole chunk."""
    chunker = PrefixChunker(namespace=MODEL, tokens_per_chunk=64, chunk_nbytes=4096, partial=True)
    whole = chunker.chunks(range(128))
    for n_left, n_blocks in ((1, 1), (16, 1), (17, 2), (63, 4)):
        head, tail = chunker.chunks(range(64 + n_left))
        assert head == whole[0]
        assert tail == Chunk(tail.key, head.key, 0, 64 + n_left, n_blocks * 1024, partial=True)
        assert tail.key != whole[1].key
    (only,) = chunker.chunks(range(5))
    assert only == Chunk(only.key, None, 0, 5, 1024, partial=True)


@pytest.mark.parametrize(
    "kind", ["list", "tuple", "array-i", "array-q", "int32", "int64", "uint8", "bytes", "memoryview"]
)
def test_the_kind_of_sequence_plays_no_part(kind: str) -> None:
    """Equal ids give equal keys, whatever holds them and however wide it holds them."""
    numpy = pytest.importorskip("numpy")
    ids = [i % 251 for i in range(300)]
    kinds: dict[str, Callable[[], Any]] = {
        "list": lambda: ids,
        "tuple": lambda: tuple(ids),
        "array-i": lambda: array("i", ids),
        "array-q": lambda: array("q", ids),
        "int32": lambda: numpy.array(ids, dtype=">i4"),
        "int64": lambda: numpy.array(ids * 2, dtype="i8")[: len(ids)],
        "uint8": lambda: numpy.array(ids, dtype="u1"),
        "bytes": lambda: bytes(ids),
        "memoryview": lambda: memoryview(bytes(ids)),
    }
    chunker = PrefixChunker(namespace=MODEL)
    assert keys(chunker.chunks(kinds[kind]())) == keys(chunker.chunks(list(map(int, ids))))


@pytest.mark.parametrize("tokens", [[-1], [2**64], [0] * 127 + [-1]])
def test_ids_out_of_range(tokens: list[int]) -> None:
    """An id that cannot be one is refused, not wrapped round to another's."""
    with pytest.raises(ValueError, match="token ids must be"):
        PrefixChunker(namespace=MODEL).chunks(tokens)


@pytest.mark.parametrize("tokens", [[1.0], ["1"], "12", [[1, 2]], None])
def test_ids_that_are_no_integers(tokens: Any) -> None:
    """Nothing is rounded or parsed into a token id."""
    with pytest.raises(TypeError):
        PrefixChunker(namespace=MODEL).chunks(tokens)


def test_extra_must_be_bytes() -> None:
    """Text has several encodings; the caller picks one, or lets extra_bytes do it."""
    with pytest.raises(TypeError, match="extra must be bytes, not str"):
        PrefixChunker(namespace=MODEL).chunks(range(128), extra="lora")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="salt must be str or bytes"):
        extra_bytes(salt=1)  # type: ignore[arg-type]


def test_a_long_prompt_costs_no_time_to_speak_of() -> None:
    """32,768 tokens take less than ten times what hashing the same bytes in one call takes, list conversion and all."""
    tokens = list(range(32_768))
    chunker = PrefixChunker(namespace=MODEL)
    raw = array("Q", tokens).tobytes()

    def best(call: Any) -> float:
        times = []
        for _ in range(15):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return min(times)

    hold(
        lambda: {"chunks": best(lambda: chunker.chunks(tokens)) / best(lambda: hashlib.blake2b(raw).digest())},
        {"chunks": 10.0},
    )


# -- identity -------------------------------------------------------------------------------------------------------


def test_adapters_and_salts_never_meet() -> None:
    """Case: https://github.com/vllm-project/vllm/issues/44250 - two adapters, one re-pointed, a salt like a name."""
    chains = [
        keys_of(extra=extra)
        for extra in (
            b"",
            extra_bytes(lora="A", path="/a"),
            extra_bytes(lora="B", path="/b"),
            extra_bytes(lora="A", path="/other"),
            extra_bytes(lora="A"),
            extra_bytes(salt="A"),
            extra_bytes(salt=b"A"),
            extra_bytes(lora="A", salt=""),
            extra_bytes(lora="A", salt="A"),
            b"A",
        )
    ]
    assert differ_from_the_first_chunk_on(*chains)
    assert keys_of(extra=extra_bytes(salt="s", lora="A")) == keys_of(extra=extra_bytes(lora="A", salt="s"))


NAMES = ["org/m", "org_m", "org__m", "org--m", "Org/m", "org/M", "org%2Fm", "org\\m", "caf\u00e9", "cafe\u0301"]
ODD_NAMES = [
    "../../etc",
    "/abs",
    "a/../../b",
    "..",
    ".",
    "\0",
    "a\n",
    "a\nb",
    "x" * 300,
    "\ud800",
    "\udcff",
    "/p" * 3000,
]


def test_names_that_other_caches_took_for_one() -> None:
    """Case: https://github.com/LMCache/LMCache/issues/5069 - one slash, escape, case or Unicode form apart."""
    assert differ_from_the_first_chunk_on(*(keys_of(Namespace(model=name)) for name in NAMES))
    assert len({Namespace(model=name).digest for name in NAMES}) == len(NAMES)


def test_odd_names_work_and_never_become_a_path() -> None:
    """Any text is a name, lone surrogates and 6,000 characters too: what reaches a disk is 64 hexadecimal digits."""
    digests = [Namespace(model=name).digest.hex() for name in ODD_NAMES]
    assert len(set(digests)) == len(digests)
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
    assert differ_from_the_first_chunk_on(*(keys_of(Namespace(model=name)) for name in ODD_NAMES))
    for name in ODD_NAMES:
        assert json.loads(json.dumps(Namespace(model=name).describe()))["digest"] == Namespace(model=name).digest.hex()


DIFFERENT: dict[str, Any] = {
    "model": "other",
    "tokens_per_block": 8,
    "blocks_per_chunk": 4,
    "tp_size": 2,
    "pp_size": 2,
    "canonical_layout": True,
    "extra": (("k", "v"),),
}


@pytest.mark.parametrize("field", [field.name for field in fields(Namespace)])
def test_a_difference_in_any_field_is_a_miss(field: str) -> None:
    """Case: https://github.com/vllm-project/vllm/issues/55904 - and the manifest names every field that matters."""
    other = replace(MODEL, **{field: DIFFERENT.get(field, "other")})
    assert other.digest != MODEL.digest
    assert field in other.describe()
    assert other.describe()[field] != MODEL.describe()[field]
    if field not in ("tokens_per_block", "blocks_per_chunk", "key_hash"):
        assert differ_from_the_first_chunk_on(keys_of(), keys_of(other))


def test_chunker_options_are_part_of_the_identity() -> None:
    """Block size, chunk size, group and hash: keys made under another choice are misses, not other bytes."""
    chains = [
        keys_of(),
        keys_of(tokens_per_block=32, blocks_per_chunk=4),
        keys_of(blocks_per_chunk=4),
        keys_of(group=1),
        keys_of(hash="sha256"),
    ]
    assert differ_from_the_first_chunk_on(*chains)


def test_new_weights_miss_and_old_ones_hit_again() -> None:
    """Case: https://github.com/sgl-project/sglang/issues/26792 - and an epoch does the same without new weights."""
    first, second = replace(MODEL, revision="1"), replace(MODEL, revision="2")
    assert differ_from_the_first_chunk_on(keys_of(first), keys_of(second), keys_of(replace(first, epoch="7")))
    assert keys_of(Namespace(model="Qwen3-0.6B", revision="1")) == keys_of(first)


def test_canonical_layout_is_shared_across_ranks() -> None:
    """Chunks that no rank's share shows in may be read by any number of ranks; others may not."""
    by_ranks = [replace(MODEL, tp_size=n, pp_size=n, rank_order=f"{n}") for n in (1, 2)]
    assert by_ranks[0].digest != by_ranks[1].digest
    canonical = [replace(namespace, canonical_layout=True) for namespace in by_ranks]
    assert canonical[0] == canonical[1]
    assert canonical[0].digest == canonical[1].digest


# -- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tokens_per_chunk": 100},
            "must be a positive multiple of 16 (tokens per block: 16 in group 0); nearest valid value: 96 or 112",
        ),
        ({"tokens_per_chunk": 10}, "nearest valid value: 16"),
        ({"tokens_per_chunk": 0}, "nearest valid value: 16"),
        ({"tokens_per_chunk": -1}, "nearest valid value: 16"),
        ({"tokens_per_chunk": "64"}, "nearest valid value: 64"),
        ({"tokens_per_chunk": 64.0}, "nearest valid value: 64"),
        (
            {"tokens_per_chunk": float("nan")},
            "nan, but must be a positive multiple of 16 (tokens per block: 16 in group 0)",
        ),
        ({"tokens_per_chunk": True}, "nearest valid value: 16"),
        ({"tokens_per_chunk": 128, "blocks_per_chunk": 8}, "nearest valid value: blocks_per_chunk=8 alone"),
        ({"blocks_per_chunk": 0}, "blocks_per_chunk is 0, but must be a whole number from 1 to 1048576"),
        ({"blocks_per_chunk": 2.0}, "nearest valid value: 2"),
        ({"blocks_per_chunk": True}, "nearest valid value: 1"),
        ({"tokens_per_block": 0}, "tokens_per_block is 0, but must be"),
        ({"tokens_per_block": "16"}, "nearest valid value: 16"),
        ({"group": -1}, "nearest valid value: 0"),
        ({"hash": "sha512"}, "hash is 'sha512', but must be 'blake2b' or 'sha256'; nearest valid value: sha256"),
        ({"hash": None}, "hash is None, but must be"),
        ({"chunk_nbytes": 0}, "chunk_nbytes is 0, but must be"),
        ({"chunk_nbytes": 100, "partial": True}, "nearest valid value: 96"),
        ({"partial": 1}, "nearest valid value: True"),
        ({"namespace": "Qwen3-0.6B"}, "namespace is 'Qwen3-0.6B', but must be a tierkv.Namespace"),
        ({"namespace": Namespace(model="m", tokens_per_block=32)}, "namespace.tokens_per_block is 32, but must be"),
        ({"namespace": Namespace(model="m", key_hash="sha256")}, "namespace.key_hash is 'sha256', but must be"),
    ],
)
def test_settings_that_are_refused(options: dict[str, Any], message: str) -> None:
    """Case: https://github.com/vllm-project/vllm/issues/48919 - one sentence with the numbers that settle it."""
    with pytest.raises(ConfigError) as refused:
        PrefixChunker(**{"namespace": MODEL, **options})
    assert message in str(refused.value)


def test_groups_with_different_block_sizes() -> None:
    """Case: https://github.com/vllm-project/vllm/issues/48919 - a chunk size must suit all of them, and names them."""
    assert blocks_by_group("block_size", 64, {0: 16, 1: 32}) == {0: 4, 1: 2}
    with pytest.raises(ConfigError) as refused:
        blocks_by_group("block_size", 48, {0: 16, 1: 32})
    assert str(refused.value) == (
        "block_size is 48, but must be a positive multiple of 32 (tokens per block: 16 in group 0, 32 in group 1); "
        "nearest valid value: 32 or 64"
    )
    with pytest.raises(ConfigError, match=r"multiple of 48 .*nearest valid value: 48$"):
        blocks_by_group("block_size", "50", {0: 16, 1: 24})


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": None},
        {"model": b"m"},
        {"model": ""},
        {"model": " \n"},
        {"epoch": 7},
        {"tp_size": 0},
        {"tp_size": "2"},
        {"tokens_per_block": True},
        {"canonical_layout": 1},
        {"extra": "ab"},
        {"extra": (("a", 1),)},
        {"extra": (("a",),)},
        {"extra": (("a", "1"), ("a", "2"))},
        {"extra": {"a": "1"}},
    ],
)
def test_namespaces_that_are_refused(wrong: dict[str, Any]) -> None:
    """A field of another type would be another identity by accident."""
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))} is "):
        Namespace(**{"model": "m", **wrong})


@pytest.mark.parametrize("model", [None, b"m", "", True])
def test_a_missing_model_has_no_nearest(model: Any) -> None:
    """Case: a name that was looked up and not found: 'None', or nothing, would be one model for all of them."""
    with pytest.raises(ConfigError) as refused:
        Namespace(model=model)
    assert "nearest" not in str(refused.value)


async def test_a_cache_of_no_namespace_is_refused() -> None:
    """Empty bytes of a caller's own would be the same for every model, too."""
    cut, levels = PrefixChunker(namespace=MODEL, chunk_nbytes=16), [Level(CPUTier(), LRU(), "1MiB")]
    with pytest.raises(ConfigError, match=r"^namespace is b'', but must be bytes that only one model has"):
        TieredCache(chunker=cut, levels=levels, namespace=b"")


def test_a_namespace_is_a_value() -> None:
    """Frozen, hashable, and its extras in one order."""
    a = Namespace(model="m", extra=(("x", "1"), ("b", "2")))
    b = Namespace(model="m", extra=(("b", "2"), ("x", "1")))
    assert a == b
    assert {a: 1}[b] == 1
    assert a.to_bytes() == b.to_bytes()
    with pytest.raises(AttributeError):
        a.model = "n"  # type: ignore[misc]
