"""What holds for all tokens and all namespaces: prefixes keep their keys, and nothing else shares them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from tierkv.chunkers import Namespace, PrefixChunker, extra_bytes
from tierkv.types import ChunkKey

tokens = st.lists(st.integers(0, 3) | st.integers(0, 2**64 - 1), max_size=40)
# Characters that meet a packing where it hurts: its own tags and lengths, NUL, lone surrogates, combining forms.
text = st.text(st.sampled_from("ab:si\0\n\x01\ud800\udc00\u00e9e\u0301"), max_size=6)
namespaces = st.builds(
    Namespace,
    **{field.name: text for field in fields(Namespace) if field.type == "str" and field.name != "model"},
    model=text.filter(str.strip),
    **{field.name: st.integers(1, 3) for field in fields(Namespace) if field.type == "int"},
    canonical_layout=st.booleans(),
    extra=st.dictionaries(text, text, max_size=3).map(lambda pairs: tuple(pairs.items())),
)


def chunker(**options: Any) -> PrefixChunker:
    return PrefixChunker(namespace=Namespace(model="m"), tokens_per_block=2, blocks_per_chunk=2, **options)


@given(tokens=tokens, more=tokens, partial=st.booleans())
def test_longer_input_extends_and_never_changes(tokens: list[int], more: list[int], partial: bool) -> None:
    """The whole chunks of a prefix are the first chunks of all that it is a prefix of."""
    cut = chunker(partial=partial)
    whole = [chunk for chunk in cut.chunks(tokens) if not chunk.partial]
    longer = cut.chunks(tokens + more)
    assert list(longer[: len(whole)]) == whole
    assert [chunk.end_token for chunk in whole] == list(range(4, len(tokens) + 1, 4))
    assert all(not chunk.partial for chunk in longer[:-1])
    assert [chunk.parent for chunk in longer] == [None, *(chunk.key for chunk in longer)][: len(longer)]


@given(a=tokens, b=tokens, partial=st.booleans())
def test_equal_keys_mean_equal_prefixes(a: list[int], b: list[int], partial: bool) -> None:
    """Two chunks share a key exactly where everything up to their ends is the same."""
    cut = chunker(partial=partial)
    for one in cut.chunks(a):
        for other in cut.chunks(b):
            same = a[: one.end_token] == b[: other.end_token] and one.partial == other.partial
            assert (one.key == other.key) == same


@given(tokens=tokens.filter(len), n=st.integers(1, 40))
def test_a_partial_key_is_of_its_own_kind(tokens: list[int], n: int) -> None:
    """However the chunk size is chosen, a tail's key is no whole chunk's."""
    tails: set[ChunkKey] = set()
    wholes: set[ChunkKey] = set()
    for size in (1, n):
        cut = PrefixChunker(namespace=Namespace(model="m"), tokens_per_block=1, tokens_per_chunk=size, partial=True)
        for end in range(len(tokens) + 1):
            for chunk in cut.chunks(tokens[:end]):
                (tails if chunk.partial else wholes).add(chunk.key)
    assert not tails & wholes


@given(a=namespaces, b=namespaces)
def test_namespaces_are_injective(a: Namespace, b: Namespace) -> None:
    """Equal bytes, equal digests and equal records are one and the same thing."""
    assert (a.to_bytes() == b.to_bytes()) == (a == b) == (a.digest == b.digest)
    assert a.to_bytes() == Namespace(**{field.name: getattr(a, field.name) for field in fields(a)}).to_bytes()


@given(namespaces, st.data())
def test_one_field_is_enough_to_differ(namespace: Namespace, data: st.DataObject) -> None:
    """Moving text from one field into its neighbour makes another namespace."""
    names = [field.name for field in fields(Namespace) if field.type == "str"]
    other, one = data.draw(st.permutations(names).filter(lambda order: order[0] != "model"))[:2]  # it is never empty
    record = {field.name: getattr(namespace, field.name) for field in fields(namespace)}
    moved = {**record, one: record[one] + record[other], other: ""}
    changed = Namespace(**moved)
    assume(changed != namespace)
    assert changed.to_bytes() != namespace.to_bytes()


extras = st.dictionaries(st.sampled_from(["a", "b", "ab", "lora"]), text | st.binary(max_size=6), max_size=3)


@given(a=extras, b=extras, group=st.integers(0, 2))
def test_extras_are_injective(a: dict[str, str | bytes], b: dict[str, str | bytes], group: int) -> None:
    """Named extras give equal keys only where all names and values are equal, text and bytes apart."""
    cut, same = (
        chunker(),
        [(name, type(value), value) for name, value in sorted(a.items())]
        == [(name, type(value), value) for name, value in sorted(b.items())],
    )
    one = cut.chunks(range(8), extra=extra_bytes(**a))
    other = cut.chunks(range(8), extra=extra_bytes(**b))
    assert [x.key == y.key for x, y in zip(one, other, strict=True)] == [same, same]
    if group:
        assert not {chunk.key for chunk in one} & {chunk.key for chunk in chunker(group=group).chunks(range(8))}
