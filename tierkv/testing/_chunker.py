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


_Rule = Callable[[Callable[[], Chunker], st.DataObject], None]


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
    require(factory().chunks(list(range(1, 4097))), "4,096 tokens give at least one chunk")
    for rule in _RULES:
        _try(rule, factory, quiet(settings))
    return Report(tuple(rule.__name__.replace("_", " ") for rule in _RULES))


def _try(rule: _Rule, factory: Callable[[], Chunker], settings: hypothesis_settings) -> None:
    @settings
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        rule(factory, data)

    with plainly():
        holds()


def a_result_is_well_formed(factory: Callable[[], Chunker], data: st.DataObject) -> None:
    tokens, extra = data.draw(_TOKENS, label="tokens"), data.draw(_EXTRAS, label="extra")
    _check_form(factory().chunks(tokens, extra=extra), len(tokens))


def the_same_input_gives_the_same(factory: Callable[[], Chunker], data: st.DataObject) -> None:
    tokens, extra = data.draw(_TOKENS, label="tokens"), data.draw(_EXTRAS, label="extra")
    chunker = factory()
    chunks = list(chunker.chunks(tokens, extra=extra))
    require(list(chunker.chunks(tokens, extra=extra)) == chunks, "a chunker is pure: asked twice it says the same")
    require(list(factory().chunks(tuple(tokens), extra=extra)) == chunks, "equal chunkers say the same", tokens)
    with _other_hash_seed():
        other = list(factory().chunks(tokens, extra=extra))
    require(other == chunks, "keys are the same in every process; these depend on hash()", tokens)


def longer_input_extends(factory: Callable[[], Chunker], data: st.DataObject) -> None:
    tokens, more = data.draw(_TOKENS, label="tokens"), data.draw(_TOKENS, label="more")
    extra = data.draw(_EXTRAS, label="extra")
    chunker = factory()
    chunks = chunker.chunks(tokens, extra=extra)
    whole = [chunk for chunk in chunks if not chunk.partial]
    longer = [chunk for chunk in chunker.chunks(tokens + more, extra=extra) if not chunk.partial]
    for group in {chunk.group for chunk in whole}:
        before, after = _of(group, whole), _of(group, longer)
        extends = after[: len(before)] == before
        require(extends, "longer input extends the result and never changes it", before, after)
    both = {chunk.key for chunk in chunks if chunk.partial} & {chunk.key for chunk in longer}
    require(not both, "a partial chunk's key is no whole chunk's", *both)


def another_token_is_another_key(factory: Callable[[], Chunker], data: st.DataObject) -> None:
    """Any token, but most often one beside a chunk's end."""
    tokens, extra = data.draw(_TOKENS.filter(len), label="tokens"), data.draw(_EXTRAS, label="extra")
    chunks = factory().chunks(tokens, extra=extra)
    beside = [
        chunk.end_token - before for chunk in chunks for before in (1, 0) if chunk.end_token - before < len(tokens)
    ]
    anywhere = st.integers(0, len(tokens) - 1)
    at = data.draw(st.sampled_from(beside) | anywhere if beside else anywhere, label="position")
    changed = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    _check_change(chunks, factory().chunks(changed, extra=extra), at)


def another_extra_is_another_key(factory: Callable[[], Chunker], data: st.DataObject) -> None:
    tokens = data.draw(_TOKENS, label="tokens")
    extra, other = data.draw(_EXTRAS, label="extra"), data.draw(_EXTRAS, label="other extra")
    keys = {chunk.key for chunk in factory().chunks(tokens, extra=extra)}
    same = keys & {chunk.key for chunk in factory().chunks(tokens, extra=other)}
    require(extra == other or not same, "another extra gives other keys", extra, other)


_RULES: Final[tuple[_Rule, ...]] = (
    a_result_is_well_formed,
    the_same_input_gives_the_same,
    longer_input_extends,
    another_token_is_another_key,
    another_extra_is_another_key,
)


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
