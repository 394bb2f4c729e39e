"""The identity under which chunk keys mean anything: all that makes KV bytes interchangeable, beside the tokens."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from tierkv.errors import bad_setting
from tierkv.settings import as_integer, parse_count

_FORMAT = "tierkv.namespace"
_VERSION = 1
"""Raise it with every change of the fields or of their packing: old chunks are then misses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """What two processes must agree on before one may use KV bytes that the other wrote.

    A difference in any field is another namespace, hence a miss: org/m, org_m and Org/m are three models, and so are
    two Unicode forms of one name. Text is taken as it is, whatever is in it; it never becomes a path. The tokenizer
    plays no part, since keys are made from token ids. A field that does not apply or is not known keeps its default.

    Put no secrets in: :meth:`describe` and ``repr`` show every field. On disk there is only a digest of it.

    Raises:
        ConfigError: a field has the wrong type or range, or ``model`` is empty.
    """

    model: str
    """Name or path. Not empty: what says nothing would be the same for two models."""
    revision: str = ""
    """Revision of the weights. After an online update of weights: the new one, else old KV is served."""
    weights_digest: str = ""
    """Digest over the weight files: two checkpoints under one name are two models."""
    config_digest: str = ""
    """Digest over the model's config with its overrides, RoPE scaling among them."""
    quantization: str = ""
    """Of the weights; it changes what lands in the KV cache."""
    dtype: str = ""
    """Of the activations."""
    kv_dtype: str = ""
    """Of the KV cache, with its scales' origin if it is quantized."""
    layout_digest: str = ""
    """Digest over how KV bytes lie in a chunk: tensors, pages, groups, order of heads and layers."""
    tokens_per_block: int = 0
    """0: left to the chunker."""
    blocks_per_chunk: int = 0
    """0: left to the chunker."""
    tp_size: int = 1
    pp_size: int = 1
    rank_order: str = ""
    """How the ranks' parts follow one another in a chunk."""
    canonical_layout: bool = False
    """True if chunks do not depend on the ranks that wrote them; sizes and order of ranks are then set to defaults."""
    key_hash: str = ""
    """Algorithm of the keys; empty: left to the chunker."""
    epoch: str = ""
    """A new one makes all that is stored unreachable, without deleting anything."""
    extra: tuple[tuple[str, str], ...] = ()
    """Names and values of what this record does not foresee; kept sorted by name."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # Annotations of this module are text, and so are these types.
            if field.type == "str" and not isinstance(value, str):
                meant = isinstance(value, (int, os.PathLike)) and not isinstance(value, bool)
                raise bad_setting(field.name, value, "text", repr(str(value)) if meant else None)
            if field.type == "int":
                low = field.default if isinstance(field.default, int) else 0
                self._set(field.name, parse_count(field.name, value, low, 2**32 - 1))
        if not self.model.strip():
            raise bad_setting("model", self.model, "the name or the path of the model", example="Qwen/Qwen3-0.6B")
        if not isinstance(self.canonical_layout, bool):
            raise bad_setting("canonical_layout", self.canonical_layout, "True or False", bool(self.canonical_layout))
        if self.canonical_layout:
            self._set("tp_size", 1)
            self._set("pp_size", 1)
            self._set("rank_order", "")
        self._set("extra", _sorted_pairs(self.extra))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def to_bytes(self) -> bytes:
        """The record as bytes: canonical and injective, the same in every process, with a version in front."""
        fields = [pack(field.name) + pack(getattr(self, field.name)) for field in dataclasses.fields(self)]
        return b"".join((pack(_FORMAT), pack(_VERSION), *fields))

    @property
    def digest(self) -> bytes:
        """32 bytes that stand for the record: BLAKE2b over :meth:`to_bytes`."""
        import hashlib  # noqa: PLC0415 - it loads OpenSSL, which `import tierkv` does not need

        return hashlib.blake2b(self.to_bytes(), digest_size=32).digest()

    def describe(self) -> dict[str, Any]:
        """Every field by name, for people: a log line, or a file of your own. Goes through ``json.dumps``.

        tierkv itself writes it nowhere. The digest in it decides, not the text: JSON cannot tell every pair of odd
        strings apart.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["extra"] = dict(self.extra)
        return {"format": _FORMAT, "version": _VERSION, "digest": self.digest.hex(), **fields}

    def filled(self, **known: int | str) -> Namespace:
        """A copy with the fields named in ``known`` filled in where they are at their default.

        Raises:
            ConfigError: a field says something else already.
        """
        for name, value in known.items():
            present = getattr(self, name)
            if present and present != value:
                raise bad_setting(
                    f"namespace.{name}", present, f"what the chunker uses, or left out ({value!r})", value
                )
        return dataclasses.replace(self, **known)  # type: ignore[arg-type]


def pack(value: object) -> bytes:
    """One value with its kind and length in front, so that packed values joined together can be read in one way only.

    Text is UTF-8 in which lone surrogates keep a form of their own: different text, different bytes.
    """
    if isinstance(value, str):
        kind, body = b"s", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes):
        kind, body = b"b", value
    elif isinstance(value, tuple):
        kind, body = b"t", b"".join(pack(item) for item in value)
    else:
        number = int(value) if isinstance(value, bool) else as_integer(value)
        assert number is not None, "fields were checked when the record was made"
        kind, body = b"?" if isinstance(value, bool) else b"i", number.to_bytes(8, "little")
    return kind + len(body).to_bytes(8, "little") + body


def _sorted_pairs(extra: object) -> tuple[tuple[str, str], ...]:
    allowed = "a tuple of (name, value) pairs of text, each name once"
    pairs = list(extra) if isinstance(extra, (tuple, list)) else None
    if pairs is None or not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        raise bad_setting("extra", extra, allowed, ())
    if not all(isinstance(part, str) for pair in pairs for part in pair):
        raise bad_setting("extra", extra, allowed, tuple((str(name), str(value)) for name, value in pairs))
    if len(dict(pairs)) != len(pairs):
        raise bad_setting("extra", extra, allowed, tuple(sorted(dict(pairs).items())))
    return tuple(sorted((name, value) for name, value in pairs))
