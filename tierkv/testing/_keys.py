"""Keys as a test wants them: with another hash, counted, or awkward; and bytes that follow from a key."""

from __future__ import annotations

import zlib
from typing import ClassVar, Self, cast

from tierkv.types import Chunk, ChunkKey


class Salted(bytes):
    """A key whose hash is not the one of equal bytes: what an order would meet under another hash seed."""

    def __hash__(self) -> int:
        return zlib.crc32(self, 0x5EED) ^ 0x2545F491

    def __eq__(self, other: object) -> bool:
        return bytes.__eq__(self, other) if isinstance(other, bytes) else NotImplemented


class Counted(bytes):
    """A key that knows how many of its kind are alive, so that what remembers keys can be found out."""

    n_alive: ClassVar[int] = 0

    def __new__(cls, value: bytes) -> Self:
        Counted.n_alive += 1
        return super().__new__(cls, value)

    def __del__(self) -> None:
        Counted.n_alive -= 1

    __hash__ = bytes.__hash__


def salted(chunk: Chunk) -> Chunk:
    parent = None if chunk.parent is None else ChunkKey(Salted(chunk.parent))
    return chunk._replace(key=ChunkKey(Salted(chunk.key)), parent=parent)


def counted(name: bytes) -> ChunkKey:
    return cast("ChunkKey", Counted(name))


def payload(key: bytes, nbytes: int, edition: int = 0) -> bytes:
    """Bytes that belong to a key; never 0 and never the canary, so that padding cannot pass for payload."""
    seed = zlib.crc32(key, edition)
    word = bytes(1 + (seed >> shift) % 0xDF for shift in range(0, 28, 4)) + bytes(1 + byte % 0xDF for byte in key)
    return (word * (nbytes // len(word) + 1))[:nbytes]


CANARY = 0xEE
"""What lies where nobody may read from or write to. No byte of :func:`payload` is this."""

AWKWARD = tuple(
    ChunkKey(key)
    for key in (
        b"k", b"kk", b"k\0", b"\0", b"K", b"/", b"../k", b".", b"\xff" * 20, b"\n", b"k\0\0\0\1", b"k" * 36, b"\0" * 32,
        bytes(range(64)), b"%6b", b"6b", bytes(range(63)) + b"\0", b"\1" + bytes(range(1, 64)),
    )
)  # fmt: skip
"""Keys that are opaque bytes: prefixes of one another, NUL, slashes, what a file system or a text would take amiss, and
long ones of which only the first byte tells two apart, or only the last."""
