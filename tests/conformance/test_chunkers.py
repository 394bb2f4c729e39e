"""Our chunker passes the kit in all its modes, and so does the toy of the other tests; planted faults do not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import pytest
from hypothesis import Phase, settings

from tests.toys import ToyChunker
from tierkv import Chunk, ChunkKey, Namespace, PrefixChunker
from tierkv.protocols import Chunker
from tierkv.testing import ConformanceError, check_chunker

FEW = settings(max_examples=50)
NO_SHRINKING = settings(max_examples=100, phases=[Phase.generate], database=None, derandomize=True)
HERE = Namespace(model="m")

CHUNKERS: dict[str, Callable[[], Chunker]] = {
    "whole": lambda: PrefixChunker(namespace=HERE, tokens_per_block=2, blocks_per_chunk=2),
    "partial tails": lambda: PrefixChunker(namespace=HERE, tokens_per_block=2, blocks_per_chunk=4, partial=True),
    "one token": lambda: PrefixChunker(namespace=HERE, tokens_per_block=1, blocks_per_chunk=1, group=3),
    "sha256": lambda: PrefixChunker(namespace=HERE, tokens_per_block=16, blocks_per_chunk=2, hash="sha256"),
    "with lengths": lambda: PrefixChunker(
        namespace=HERE, tokens_per_block=4, blocks_per_chunk=2, chunk_nbytes=4096, partial=True
    ),
    "toy": ToyChunker,
}


@pytest.mark.parametrize("name", CHUNKERS)
def test_a_chunker_conforms(name: str) -> None:
    """Longer input extends the result; a key depends on all that comes before its end, and on nothing else."""
    check_chunker(CHUNKERS[name], settings=FEW)


def key_of(*parts: object) -> ChunkKey:
    return ChunkKey(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())


class Chained:
    """The sound one: three tokens a chunk."""

    size = 3

    def key(self, before: ChunkKey | None, tokens: Sequence[int], extra: bytes) -> ChunkKey:
        return key_of(before or extra, list(tokens))

    def chunks(self, tokens: Sequence[int], *, extra: bytes = b"") -> Sequence[Chunk]:
        chunks: list[Chunk] = []
        before: ChunkKey | None = None
        for end in range(self.size, len(tokens) + 1, self.size):
            key = self.key(before, tokens[end - self.size : end], extra)
            chunks.append(Chunk(key, before, 0, end))
            before = key
        return chunks


class Unchained(Chained):
    """A key knows its own tokens only: equal pieces of different prompts share one."""

    def key(self, before: ChunkKey | None, tokens: Sequence[int], extra: bytes) -> ChunkKey:
        return key_of(list(tokens), extra)


class ForgetsExtra(Chained):
    """Two adapters share their keys."""

    def key(self, before: ChunkKey | None, tokens: Sequence[int], extra: bytes) -> ChunkKey:
        return key_of(before, list(tokens))


class ByHash(Chained):
    """Other keys in every process."""

    def key(self, before: ChunkKey | None, tokens: Sequence[int], extra: bytes) -> ChunkKey:
        return ChunkKey(hash((before or extra, tuple(tokens))).to_bytes(8, "little", signed=True))


class Counts(Chained):
    """Not pure: the third chunker that is made has other keys."""

    n = 0

    def key(self, before: ChunkKey | None, tokens: Sequence[int], extra: bytes) -> ChunkKey:
        Counts.n += 1
        return key_of(before or extra, list(tokens), Counts.n // 50)


class Looks(Chained):
    """Keys know how long the prompt is: longer input changes them."""

    def chunks(self, tokens: Sequence[int], *, extra: bytes = b"") -> Sequence[Chunk]:
        return super().chunks(tokens, extra=extra + str(len(tokens) // 16).encode())


class RoundsUp(Chained):
    """The last chunk ends behind the last token."""

    def chunks(self, tokens: Sequence[int], *, extra: bytes = b"") -> Sequence[Chunk]:
        chunks = list(super().chunks(tokens, extra=extra))
        return [*chunks[:-1], *(chunk._replace(end_token=chunk.end_token + 1) for chunk in chunks[-1:])]


class Grandparents(Chained):
    """Parents skip one."""

    def chunks(self, tokens: Sequence[int], *, extra: bytes = b"") -> Sequence[Chunk]:
        chunks = list(super().chunks(tokens, extra=extra))
        return [chunk._replace(parent=chunks[i - 2].key if i > 1 else None) for i, chunk in enumerate(chunks)]


class SharesGroups(Chained):
    """Two groups under one key."""

    def chunks(self, tokens: Sequence[int], *, extra: bytes = b"") -> Sequence[Chunk]:
        chunks = list(super().chunks(tokens, extra=extra))
        return [*chunks, *(chunk._replace(group=1) for chunk in chunks)]


class OneKindOfKey(Chained):
    """A partial tail is named by its first token alone."""

    def chunks(self, tokens: Sequence[int], *, extra: bytes = b"") -> Sequence[Chunk]:
        chunks = list(super().chunks(tokens, extra=extra))
        end = chunks[-1].end_token if chunks else 0
        if end < len(tokens):
            before = chunks[-1].key if chunks else None
            head = list(tokens[end:])
            chunks.append(Chunk(self.key(before, head[:1], extra), before, 0, len(tokens), partial=True))
        return chunks


class Nothing(Chained):
    def chunks(self, tokens: Sequence[int], *, extra: bytes = b"") -> Sequence[Chunk]:
        return []


FAULTS: dict[type[Chained], str] = {
    Unchained: "share a key|depends on every token",
    ForgetsExtra: "another extra gives other keys",
    ByHash: "depend on hash",
    Counts: "pure|equal chunkers|the same in every process|made again",  # whichever comparison its counter meets first
    Looks: "never changes it|does not depend on what comes after",
    RoundsUp: "ends rise, up to the number of tokens",
    Grandparents: "a parent is the chunk before",
    SharesGroups: "no two chunks of a prefix share a key",
    OneKindOfKey: "depends on every token",
    Nothing: "at least one chunk",
}


@pytest.mark.parametrize("chunker", FAULTS, ids=lambda chunker: chunker.__name__)
def test_a_planted_fault_is_found(chunker: type[Chained]) -> None:
    """With the promise that it breaks as the message."""
    with pytest.raises(ConformanceError, match=FAULTS[chunker]):
        check_chunker(chunker, settings=NO_SHRINKING)


def test_the_sound_one_passes() -> None:
    """So the faults are found because of what is planted."""
    check_chunker(Chained, settings=FEW)
