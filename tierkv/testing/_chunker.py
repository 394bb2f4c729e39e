"""Whether a chunker keeps the promises of :class:`~tierkv.protocols.Chunker`."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tierkv.protocols import Chunker
from tierkv.testing._policy import quiet
from tierkv.testing._rules import Report, plainly, require
from tierkv.types import Chunk, ChunkKey

_TOKEN: Final = st.integers(0, 3) | st.integers(0, (1 << 31) - 1)
_TOKENS: Final = st.lists(_TOKEN, max_size=80) | st.lists(_TOKEN, min_size=33, max_size=80)
_EXTRAS: Final = st.sampled_from([b"", b"lora", b"lora\0", b"\0"]) | st.binary(max_size=8)


def check_chunker(factory: Callable[[], Chunker], *, settings: hypothesis_settings | None = None) -> Report:
    """Try a chunker with token sequences and their prefixes; raise ConformanceError where it breaks a promise.

    Longer input must extend the result and never change it; a key must differ as soon as anything before the chunk's
    end differs, or ``extra``, or the group; parents are the chunk before in the same group, or not said; the result is
    the same in every process.

    Args:
        factory: makes a chunker, the same each time. Small chunks find more: up to 80 tokens are cut at a time.
        settings: Hypothesis's; by default those of the active profile, without a deadline.

    Raises:
        ConformanceError: with the rule, and with Hypothesis's example as notes.
    """
    settings = quiet(settings)

    @settings
    @given(_TOKENS, _EXTRAS)
    def a_result_is_well_formed(tokens: list[int], extra: bytes) -> None:
        chunks = factory().chunks(tokens, extra=extra)
        _check_form(chunks, len(tokens))

    @settings
    @given(_TOKENS, _EXTRAS)
    def the_same_input_gives_the_same(tokens: list[int], extra: bytes) -> None:
        chunker = factory()
        chunks = list(chunker.chunks(tokens, extra=extra))
        require(list(chunker.chunks(tokens, extra=extra)) == chunks, "a chunker is pure: asked twice it says the same")
        require(list(factory().chunks(tuple(tokens), extra=extra)) == chunks, "equal chunkers say the same", tokens)
        with _other_hash_seed():
            other = list(factory().chunks(tokens, extra=extra))
        require(other == chunks, "keys are the same in every process; these depend on hash()", tokens)

    @settings
    @given(_TOKENS, _TOKENS, _EXTRAS)
    def longer_input_extends(tokens: list[int], more: list[int], extra: bytes) -> None:
        chunker = factory()
        whole = [chunk for chunk in chunker.chunks(tokens, extra=extra) if not chunk.partial]
        tails = {chunk.key for chunk in chunker.chunks(tokens, extra=extra) if chunk.partial}
        longer = [chunk for chunk in chunker.chunks(tokens + more, extra=extra) if not chunk.partial]
        for group in {chunk.group for chunk in whole}:
            before, after = _of(group, whole), _of(group, longer)
            require(
                after[: len(before)] == before, "longer input extends the result and never changes it", before, after
            )
        both = tails & {chunk.key for chunk in longer}
        require(not both, "a partial chunk's key is no whole chunk's", *both)

    @settings
    @given(_TOKENS.filter(len), st.data(), _EXTRAS)
    def another_token_is_another_key(tokens: list[int], data: st.DataObject, extra: bytes) -> None:
        chunker = factory()
        borders = [chunk.end_token - before for chunk in chunker.chunks(tokens, extra=extra) for before in (1, 0)]
        inside = [at for at in borders if at < len(tokens)]
        anywhere = st.integers(0, len(tokens) - 1)
        at = data.draw(st.sampled_from(inside) | anywhere if inside else anywhere, label="position")
        changed = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
        _check_change(chunker.chunks(tokens, extra=extra), chunker.chunks(changed, extra=extra), at)

    @settings
    @given(_TOKENS, _EXTRAS, _EXTRAS)
    def another_extra_is_another_key(tokens: list[int], extra: bytes, other: bytes) -> None:
        chunker = factory()
        keys = {chunk.key for chunk in chunker.chunks(tokens, extra=extra)}
        same = keys & {chunk.key for chunk in chunker.chunks(tokens, extra=other)}
        require(extra == other or not same, "another extra gives other keys", extra, other)

    rules = (
        a_result_is_well_formed, the_same_input_gives_the_same, longer_input_extends, another_token_is_another_key,
        another_extra_is_another_key,
    )  # fmt: skip
    for rule in rules:
        with plainly():
            rule()
    cut = factory().chunks(list(range(1, 4097)))
    require(cut, "4,096 tokens give at least one chunk")
    return Report(tuple(rule.__name__.replace("_", " ") for rule in rules))


def _of(group: int, chunks: Sequence[Chunk]) -> list[Chunk]:
    return [chunk for chunk in chunks if chunk.group == group]


def _check_form(chunks: Sequence[Chunk], n_tokens: int) -> None:
    keys = [chunk.key for chunk in chunks]
    require(all(key[:1] for key in keys), "a key has at least one byte", keys)
    require(len(set(keys)) == len(keys), "no two chunks of a prefix share a key, whatever their groups", keys)
    for group in {chunk.group for chunk in chunks}:
        before: ChunkKey | None = None
        end = 0
        of_group = _of(group, chunks)
        for i, chunk in enumerate(of_group):
            require(end < chunk.end_token <= n_tokens, "ends rise, up to the number of tokens", chunk, n_tokens)
            require(chunk.parent in (None, before), "a parent is the chunk before in the same group, or None", chunk)
            require(chunk.nbytes >= 0, "a length is not negative", chunk)
            require(not chunk.partial or i == len(of_group) - 1, "only the last chunk of a group is partial", chunk)
            before, end = chunk.key, chunk.end_token


def _check_change(chunks: Sequence[Chunk], changed: Sequence[Chunk], at: int) -> None:
    """The token at ``at`` was changed: keys before it stay, all others are new."""
    before = [chunk for chunk in chunks if chunk.end_token <= at and not chunk.partial]
    kept = [chunk for chunk in changed if chunk.end_token <= at and not chunk.partial]
    require(before == kept, "a chunk does not depend on what comes after its end", at)
    old = {chunk.key for chunk in chunks if chunk.end_token > at}
    new = {chunk.key for chunk in changed if chunk.end_token > at}
    require(not old & new, "a key depends on every token up to the chunk's end", at, *(old & new))


@contextmanager
def _other_hash_seed() -> Iterator[None]:
    """``hash()`` as another process would have it for text and bytes. One thread at a time."""
    real = builtins.hash
    builtins.hash = lambda value: real(value) ^ 0x5EED5EED5EED
    try:
        yield
    finally:
        builtins.hash = real
