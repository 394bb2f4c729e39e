"""Tokens to chunks with chained keys, and the identity under which keys mean anything.

A chunk's key depends on the namespace, the group, ``extra`` and every token up to its end: equal keys mean equal KV
bytes. Keys are the same in every process and on every machine; Python's ``hash`` plays no part.

::

    seed      = H("tierkv.seed/1"  | namespace digest, 32 bytes | group, u32 | length of extra, u64 | extra)
    key[i]    = H("tierkv.chunk/1" | key[i - 1] or seed, 32 bytes | tokens of chunk i, u64 each)
    partial   = H("tierkv.tail/1"  | key of the last whole chunk or seed, 32 bytes | its tokens, u64 each)

All integers are little endian, all fields but the last have a fixed length, H is BLAKE2b or SHA-256 with 32 bytes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from math import lcm
from typing import Final

from tierkv.errors import ConfigError, bad_setting, closest
from tierkv.namespace import Namespace, pack
from tierkv.settings import meant_number, parse_count
from tierkv.sizes import parse_size
from tierkv.types import Chunk, ChunkKey

__all__ = ("Namespace", "PrefixChunker", "blocks_by_group", "extra_bytes")

_SEED: Final = b"tierkv.seed/1"
_CHUNK: Final = b"tierkv.chunk/1"
_TAIL: Final = b"tierkv.tail/1"
_MOST_TOKENS: Final = 1 << 24
"""Of a block or chunk: far beyond any engine, and small enough that no product of two overflows anything."""
_DEFAULT_BLOCKS_PER_CHUNK: Final = 8


def _blake2b(data: bytes) -> bytes:
    import hashlib  # noqa: PLC0415 - it loads OpenSSL, which `import tierkv` does not need

    return hashlib.blake2b(data, digest_size=32).digest()


def _sha256(data: bytes) -> bytes:
    import hashlib  # noqa: PLC0415 - as above

    return hashlib.sha256(data).digest()


_HASHES: Final[Mapping[str, Callable[[bytes], bytes]]] = {"blake2b": _blake2b, "sha256": _sha256}


class PrefixChunker:
    """Cuts a token sequence into chunks of ``blocks_per_chunk`` blocks and names each by all that came before it.

    Longer input extends the result and never changes it: tokens that do not fill a chunk give none. With
    ``partial=True`` they give a last chunk with ``Chunk.partial`` set. Its key is of another kind than a whole chunk's,
    so once more tokens are there, the whole chunk is a chunk of its own beside it, with the same parent.

    Args:
        namespace: what the KV bytes depend on beside tokens and ``extra``. Where it names block and chunk size or the
            hash, they must agree with the chunker's; where it does not, the chunker's are filled in.
        tokens_per_block: the engine's block size for this group.
        blocks_per_chunk: chunk size in blocks; 8 if neither size is given.
        tokens_per_chunk: chunk size in tokens instead, a multiple of ``tokens_per_block``.
        group: index of the KV-cache group; keys of different groups differ.
        chunk_nbytes: payload of a whole chunk in bytes (or text such as "1MiB"), for ``Chunk.nbytes``; None leaves
            that 0. A partial chunk has the bytes of the blocks that its tokens reach into.
        hash: "blake2b" or "sha256".
        partial: whether tokens that do not fill a chunk give a partial one.

    Raises:
        ConfigError: a setting is wrong; the message names the nearest valid value.

    Concurrency: immutable; any thread.
    """

    __slots__ = (
        "_hash",
        "_head",
        "blocks_per_chunk",
        "chunk_nbytes",
        "group",
        "namespace",
        "partial",
        "tokens_per_block",
        "tokens_per_chunk",
    )

    def __init__(
        self,
        *,
        namespace: Namespace,
        tokens_per_block: int = 16,
        blocks_per_chunk: int | None = None,
        tokens_per_chunk: int | None = None,
        group: int = 0,
        chunk_nbytes: int | str | None = None,
        hash: str = "blake2b",  # noqa: A002 - the word users know
        partial: bool = False,
    ) -> None:
        if not isinstance(namespace, Namespace):
            raise bad_setting("namespace", namespace, "a tierkv.Namespace", example='Namespace(model="...")')
        if hash not in tuple(_HASHES):
            nearest = closest(str(hash), _HASHES)
            raise bad_setting("hash", hash, " or ".join(map(repr, _HASHES)), nearest)
        if not isinstance(partial, bool):
            raise bad_setting("partial", partial, "True or False", bool(partial))
        self.group = parse_count("group", group, 0, 2**32 - 1)
        self.tokens_per_block = parse_count("tokens_per_block", tokens_per_block, 1, _MOST_TOKENS)
        self.blocks_per_chunk = _blocks_per_chunk(self.group, self.tokens_per_block, blocks_per_chunk, tokens_per_chunk)
        self.tokens_per_chunk = self.tokens_per_block * self.blocks_per_chunk
        self.chunk_nbytes = None if chunk_nbytes is None else parse_size("chunk_nbytes", chunk_nbytes)
        if partial and (self.chunk_nbytes or 0) % self.blocks_per_chunk:
            nearest_nbytes = max(self.chunk_nbytes or 0, self.blocks_per_chunk) // self.blocks_per_chunk
            allowed = f"a multiple of blocks_per_chunk ({self.blocks_per_chunk}) where partial chunks are wanted"
            raise bad_setting("chunk_nbytes", chunk_nbytes, allowed, nearest_nbytes * self.blocks_per_chunk)
        self.partial = partial
        self._hash = _HASHES[hash]
        self.namespace = namespace.filled(
            tokens_per_block=self.tokens_per_block, blocks_per_chunk=self.blocks_per_chunk, key_hash=hash
        )
        self._head = _SEED + self.namespace.digest + self.group.to_bytes(4, "little")

    def __repr__(self) -> str:
        return (
            f"<PrefixChunker of {self.namespace.model!r}, group {self.group}: {self.tokens_per_chunk} tokens, "
            f"{self.blocks_per_chunk} blocks a chunk{', partial tails' if self.partial else ''}>"
        )

    def chunks(self, tokens: Sequence[int], *, extra: bytes = b"") -> Sequence[Chunk]:
        """The chunks of ``tokens``, head first.

        Args:
            tokens: token ids, 0 to 2**64 - 1, in any sequence (list, tuple, array, range, numpy or torch vector):
                equal ids give equal keys.
            extra: what else the KV bytes of this request depend on (LoRA adapter, cache salt). Build it with
                :func:`extra_bytes` if there can be more than one such thing.

        Raises:
            ValueError: an id out of range.
            TypeError: an id is not an integer, or ``extra`` is not bytes.
        """
        size = self.tokens_per_chunk
        ids = _little_endian_u64(tokens)
        n_tokens = len(ids) // 8
        key = self._seed(extra)
        parent: ChunkKey | None = None
        digest, group, nbytes = self._hash, self.group, self.chunk_nbytes or 0
        chunks = []
        for end in range(size, n_tokens + 1, size):
            key = digest(b"".join((_CHUNK, key, ids[(end - size) * 8 : end * 8])))
            chunks.append(Chunk(ChunkKey(key), parent, group, end, nbytes))
            parent = ChunkKey(key)
        n_left = n_tokens % size
        if self.partial and n_left:
            key = digest(b"".join((_TAIL, key, ids[(n_tokens - n_left) * 8 :])))
            n_blocks = -(-n_left // self.tokens_per_block)
            nbytes = nbytes // self.blocks_per_chunk * n_blocks
            chunks.append(Chunk(ChunkKey(key), parent, group, n_tokens, nbytes, partial=True))
        return chunks

    def _seed(self, extra: bytes) -> bytes:
        if not isinstance(extra, (bytes, bytearray, memoryview)):
            msg = f"extra must be bytes, not {type(extra).__name__}; extra_bytes() makes them from names and values"
            raise TypeError(msg)
        extra = bytes(extra)
        return self._hash(b"".join((self._head, len(extra).to_bytes(8, "little"), extra)))


def extra_bytes(**fields: str | bytes) -> bytes:
    """Bytes for ``extra`` from named values, e.g. ``extra_bytes(lora="a", lora_digest=d, salt="s")``.

    Injective: no name or value can be made to look like another, and text differs from bytes. Order does not matter. A
    field that is left out differs from one that is empty. No fields give ``b""``.
    """
    for name, value in fields.items():
        if not isinstance(value, (str, bytes)):
            msg = f"extra_bytes: {name} must be str or bytes, not {type(value).__name__}"
            raise TypeError(msg)
    return b"".join(pack(name) + pack(fields[name]) for name in sorted(fields))


def blocks_by_group(option: str, tokens_per_chunk: object, tokens_per_block: Mapping[int, int]) -> dict[int, int]:
    """Blocks per chunk of each group, for one chunk size in tokens that all groups share.

    Args:
        option: name of the setting that gave ``tokens_per_chunk``, for the message.
        tokens_per_chunk: must be a multiple of every group's block size.
        tokens_per_block: the engine's block size by group.

    Raises:
        ConfigError: it is not; the message has every group's block size and the nearest valid values.
    """
    unit = lcm(*tokens_per_block.values())
    sizes = ", ".join(f"{n} in group {group}" for group, n in sorted(tokens_per_block.items()))
    allowed = f"a positive multiple of {unit} (tokens per block: {sizes})"
    try:
        size = parse_count(option, tokens_per_chunk, 1, _MOST_TOKENS)
    except ConfigError as error:
        meant = meant_number(tokens_per_chunk)
        n_units = 0 if meant is None else max(round(min(max(meant, 1), _MOST_TOKENS) / unit), 1)
        raise bad_setting(option, tokens_per_chunk, allowed, n_units * unit or None) from error
    below = size // unit * unit
    if below != size:
        nearest = f"{below} or {below + unit}" if below else unit
        raise bad_setting(option, tokens_per_chunk, allowed, nearest)
    return {group: size // n for group, n in tokens_per_block.items()}


def _blocks_per_chunk(group: int, tokens_per_block: int, blocks: int | None, tokens: int | None) -> int:
    if blocks is not None and tokens is not None:
        nearest = f"blocks_per_chunk={blocks!r} alone"
        raise bad_setting("tokens_per_chunk", tokens, f"left out where blocks_per_chunk is given ({blocks!r})", nearest)
    if tokens is not None:
        return blocks_by_group("tokens_per_chunk", tokens, {group: tokens_per_block})[group]
    blocks = _DEFAULT_BLOCKS_PER_CHUNK if blocks is None else blocks
    return parse_count("blocks_per_chunk", blocks, 1, _MOST_TOKENS // tokens_per_block)


def _little_endian_u64(tokens: Sequence[int]) -> memoryview:
    # numpy, torch and array make plain ints far faster than iterating over them does.
    tolist = getattr(tokens, "tolist", None)
    values = tokens if tolist is None else tolist()
    try:
        # list(): array() would take bytes for memory, not for numbers.
        ids = array("Q", values if isinstance(values, (list, tuple, range)) else list(values))
    except OverflowError as error:
        msg = "token ids must be 0 to 2**64 - 1"
        raise ValueError(msg) from error
    if sys.byteorder == "big":
        ids.byteswap()
    return memoryview(ids).cast("B")
