"""The header and the names: what is written can be read, and nothing else can."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.tiers._fs import format as fmt
from tierkv.types import Chunk, ChunkKey

OWNER = "0123456789abcdef"
DIGEST = bytes(range(16))
SUM = bytes(range(16, 32))

keys = st.binary(min_size=1, max_size=fmt.MAX_KEY_NBYTES).map(ChunkKey)
chunks = st.builds(
    Chunk,
    key=keys,
    parent=st.none() | st.binary(max_size=fmt.MAX_KEY_NBYTES).map(ChunkKey),
    group=st.integers(0, 2**32 - 1),
    end_token=st.integers(0, 2**63 - 1),
    nbytes=st.integers(0, 2**40),
    tenant=st.text(max_size=100),
    partial=st.booleans(),
)


def page() -> memoryview:
    return memoryview(bytearray(b"\xee" * fmt.HEADER_NBYTES))


@given(chunks)
def test_a_header_says_everything_about_its_chunk(chunk: Chunk) -> None:
    """Pack and unpack are inverse, for every chunk whose fields fit."""
    assert fmt.fits_a_header(chunk)
    header = page()
    fmt.pack_header(header, chunk, DIGEST, OWNER, SUM)
    assert fmt.unpack_header(header) == (chunk, DIGEST, OWNER, SUM)


@given(st.integers(0, 8 * fmt.HEADER_NBYTES - 1))
def test_one_flipped_bit_anywhere_in_a_header_is_noticed(bit: int) -> None:
    """The header has its own checksum: all 4,096 bytes are covered."""
    header = page()
    fmt.pack_header(header, Chunk(ChunkKey(b"key"), nbytes=5, tenant="t"), DIGEST, OWNER, SUM)
    header[bit // 8] ^= 1 << bit % 8
    with pytest.raises(fmt.BadHeaderError):
        fmt.unpack_header(header)


def test_what_does_not_fit_is_said_before_it_is_written() -> None:
    """Keys that would give too long a name, empty keys, and tenants longer than a page."""
    assert not fmt.fits_a_header(Chunk(ChunkKey(b"")))
    assert not fmt.fits_a_header(Chunk(ChunkKey(bytes(fmt.MAX_KEY_NBYTES + 1))))
    assert not fmt.fits_a_header(Chunk(ChunkKey(b"k"), tenant="x" * 4096))
    name = fmt.part_name(fmt.file_name(bytes(fmt.MAX_KEY_NBYTES), OWNER), 511)
    assert len(name) <= 255 and fmt.parse_file_name(name) is not None


@given(keys, st.booleans())
def test_names_go_both_ways(key: ChunkKey, is_part: bool) -> None:
    """A chunk file's name says its key, its owner and whether it is finished."""
    name = fmt.file_name(key, OWNER)
    name = fmt.part_name(name, 0x1F) if is_part else name
    assert fmt.parse_file_name(name) == (key, OWNER, is_part)


@pytest.mark.parametrize(
    "name",
    ["", "x", "00", f"00.{OWNER}.tmp", f"0.{OWNER}", f"000.{OWNER}", f"AA.{OWNER}", f"00.{OWNER[:-1]}", f"00.{OWNER}\n",
     f"../00.{OWNER}", f".{OWNER}", "lost+found"],
)  # fmt: skip
def test_foreign_names_are_not_ours(name: str) -> None:
    """What we did not name is never taken for a chunk file."""
    assert fmt.parse_file_name(name) is None


def test_leaves_are_two_hex_digits_and_spread_keys_that_are_alike() -> None:
    """100,000 keys that differ in their last bytes only: 256 directories, none above 1,000 entries.

    https://github.com/sgl-project/sglang/issues/28653
    """
    counts: dict[str, int] = {}
    for i in range(100_000):
        leaf = fmt.leaf_of(b"prefix" * 4 + i.to_bytes(4, "big"))
        counts[leaf] = counts.get(leaf, 0) + 1
    assert len(counts) == 256 and all(re.fullmatch("[0-9a-f]{2}", leaf) for leaf in counts)
    assert max(counts.values()) < 1_000


def test_sizes() -> None:
    """A chunk occupies its header and whole pages."""
    assert [fmt.charge_nbytes(n) for n in (0, 1, 4096, 4097)] == [4096, 8192, 8192, 12288]


def test_namespaces_and_versions_do_not_share_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another namespace, or the same one in another format version, lies elsewhere."""
    mine = fmt.namespace_digest(b"org/m")
    assert len({mine, *(fmt.namespace_digest(n) for n in (b"org_m", b"org__m", b"Org/m", b"", b"org/m\0"))}) == 6
    monkeypatch.setattr(fmt, "VERSION", fmt.VERSION + 1)
    assert fmt.namespace_digest(b"org/m") != mine


def test_golden_header() -> None:
    """The format does not change by accident: a root outlives the release that wrote it."""
    header = page()
    chunk = Chunk(ChunkKey(b"K" * 36), ChunkKey(b"P" * 36), 3, 128, 5_000, "tenant", True)
    fmt.pack_header(header, chunk, DIGEST, OWNER, SUM)
    assert bytes(header[:84]).hex() == (
        "746965726b760d0a" + "0100" + "0300" + "03000000" + DIGEST.hex() + OWNER
        + "8813000000000000" + "8000000000000000" + "2400" + "2400" + "0600" + "00" * 6 + SUM.hex()
    )  # fmt: skip
    assert bytes(header[84:162]) == b"K" * 36 + b"P" * 36 + b"tenant"
    assert not any(header[162:-16])
    assert fmt.leaf_of(b"K" * 36) == "dc"
    assert fmt.namespace_digest(b"namespace").hex() == "10b5bb330b298c13729f9e0f10ae3e19"
