"""Request traces: which blocks each prompt had, and when; never a token.

:class:`tierkv.recorder.TraceRecorder` writes them, and ``tierkv tune`` reads them.

One JSON object a line, as Mooncake publishes its traces::

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

``timestamp`` is in milliseconds and never decreases; ``input_length`` is in tokens; ``hash_ids`` names the prompt's
blocks in order, equal ids standing for equal prefixes up to and including that block. The last block may be filled in
part, or left out. Other keys are ignored. A line with ``tierkv_trace`` says what the lines after it mean::

    {"tierkv_trace": 1, "tokens_per_block": 128, "block_nbytes": 14680064, "blocks_per_chunk": 8}

``block_nbytes`` is what one block of the trace takes in host memory over all workers, and ``blocks_per_chunk`` how many
of the engine's blocks it is; both may be missing. Without such a line a block has 512 tokens, as in Mooncake's.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final, NamedTuple

from tierkv.errors import ConfigError
from tierkv.settings import as_integer, parse_count

VERSION: Final = 1
KEY: Final = "tierkv_trace"
MOONCAKE_TOKENS: Final = 512
MAX_LINE_NBYTES: Final = 64 << 20
"""A line of a million blocks has 20 MB."""
_MOST: Final = 2**48
"""Of any number in a trace; far above what means anything, far below what arithmetic minds."""


def request_line(timestamp: int, n_tokens: int, ids: Sequence[int]) -> bytes:
    """One request as a line of JSON."""
    return json.dumps({"timestamp": timestamp, "input_length": n_tokens, "hash_ids": ids}).encode() + b"\n"


class Header(NamedTuple):
    """What the lines of a trace mean."""

    tokens_per_block: int = MOONCAKE_TOKENS
    block_nbytes: int | None = None
    """Host memory that one block of the trace takes, over all workers."""
    blocks_per_chunk: int | None = None
    """Blocks of the engine that make one block of the trace."""

    def to_line(self) -> bytes:
        """One line of JSON."""
        given = {name: value for name, value in self._asdict().items() if value is not None}
        return json.dumps({KEY: VERSION} | given).encode() + b"\n"


@dataclass
class Trace:
    """Requests in the order of their arrival, in flat arrays: 8 bytes a block and 32 a request."""

    header: Header = field(default_factory=Header)
    blocks: array[int] = field(default_factory=lambda: array("Q"))
    """Blocks of all requests one after another, numbered by first appearance."""
    ends: array[int] = field(default_factory=lambda: array("Q"))
    """For each request the end of its part of ``blocks``."""
    n_tokens: array[int] = field(default_factory=lambda: array("Q"))
    """Prompt tokens of each request."""
    times_s: array[float] = field(default_factory=lambda: array("d"))
    n_unique: int = 0

    def __len__(self) -> int:
        return len(self.ends)

    def requests(self) -> Iterator[tuple[int, Sequence[int]]]:
        """For each request its prompt tokens and its blocks."""
        start = 0
        for n_tokens, end in zip(self.n_tokens, self.ends, strict=True):
            yield n_tokens, self.blocks[start:end]
            start = end

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return self.times_s[-1] - self.times_s[0] if self.times_s else 0.0


def read_traces(
    option: str, sources: Sequence[str | os.PathLike[str] | BinaryIO], tokens_per_block: int | None = None
) -> Trace:
    """Read one trace from one file, or from several that follow each other (``trace.1``, ``trace``).

    Args:
        option: name of the setting, for messages.
        sources: paths, or open binary files.
        tokens_per_block: tokens of a block, whatever a header says.

    Raises:
        ConfigError: in one sentence, with file and line: what is no such trace, decreasing timestamps, or no request.
    """
    reader = _Reader(tokens_per_block)
    for source in sources:
        if not isinstance(source, (str, os.PathLike)):
            reader.read(getattr(source, "name", "standard input"), source)
            continue
        name = os.fspath(source)
        try:
            with open(name, "rb") as file:
                reader.read(name, file)
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(f"{option} is {name!r}, but must be a file of requests that can be read: {why}") from None
    if not reader.trace.blocks:
        names = ", ".join(str(source) for source in sources)
        raise ConfigError(
            f"{option} is {names!r}, but must hold at least one request with a block: one JSON object a line"
        )
    return reader.trace


class _Reader:
    """Checks line after line and packs what they say."""

    def __init__(self, tokens_per_block: int | None) -> None:
        self.trace = Trace()
        self._given = tokens_per_block
        if tokens_per_block is not None:
            self.trace.header = Header(tokens_per_block)
        self._numbers: dict[int | str, int] = {}
        self._has_header = False

    def read(self, name: str, file: BinaryIO) -> None:
        number = 0
        while line := file.readline(MAX_LINE_NBYTES + 1):
            number += 1
            where = f"{name}, line {number}"
            if len(line) > MAX_LINE_NBYTES:
                raise ConfigError(f"{where} is longer than {MAX_LINE_NBYTES >> 20} MiB: no trace has such a request")
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                if self._has_header and not line.endswith(b"\n"):
                    return  # the recorder is writing it
                raise ConfigError(f"{where} is no JSON: {_shown(line)}") from None
            if not isinstance(record, dict):
                raise ConfigError(f"{where} is no JSON object: {_shown(line)}")
            if KEY in record:
                self._take_header(where, record)
            else:
                self._take(where, record)

    def _take_header(self, where: str, record: Mapping[str, Any]) -> None:
        if record[KEY] != VERSION:
            raise ConfigError(f"{where} has {KEY} {_brief(record[KEY])}, but this tierkv reads {VERSION}")
        nbytes, n_blocks = (
            _count(where, record, key, 1) if record.get(key) is not None else None
            for key in ("block_nbytes", "blocks_per_chunk")
        )
        header = Header(self._given or _count(where, record, "tokens_per_block", 1), nbytes, n_blocks)
        if self.trace.ends and header != self.trace.header:
            raise ConfigError(f"{where} changes what a block is, after {len(self.trace):,} requests of another size")
        self.trace.header = header
        self._has_header = True

    def _take(self, where: str, record: Mapping[str, Any]) -> None:
        trace, tokens = self.trace, self.trace.header.tokens_per_block
        time_s = _time_ms(where, record) / 1000
        if trace.times_s and time_s < trace.times_s[-1]:
            before = trace.times_s[-1] * 1000
            raise ConfigError(
                f"{where} has timestamp {time_s * 1000:g}, earlier than {before:g} of the request before it"
            )
        n_tokens = _count(where, record, "input_length", 0)
        ids = record.get("hash_ids")
        if not isinstance(ids, list):
            raise ConfigError(f"{where} has hash_ids {_brief(ids)}, but must have a list of block ids")
        if len(ids) not in (n_tokens // tokens, -(-n_tokens // tokens)):
            raise ConfigError(
                f"{where} has {len(ids):,} hash_ids for {n_tokens:,} tokens, but blocks of {tokens} tokens make "
                f"{-(-n_tokens // tokens):,} (--tokens-per-block says how long a block is)"
            )
        numbers = self._numbers
        for each in ids:
            if type(each) is not int and type(each) is not str:
                raise ConfigError(f"{where} has the block id {_brief(each)}, but an id must be a whole number or text")
            trace.blocks.append(numbers.setdefault(each, len(numbers)))
        trace.n_unique = len(numbers)
        trace.ends.append(len(trace.blocks))
        trace.n_tokens.append(n_tokens)
        trace.times_s.append(time_s)


def _count(where: str, record: Mapping[str, Any], key: str, low: int) -> int:
    number = as_integer(record.get(key))
    if number is None or not low <= number <= _MOST:
        raise ConfigError(f"{where} has {key} {_brief(record.get(key))}, but must have a whole number from {low}")
    return number


def _time_ms(where: str, record: Mapping[str, Any]) -> float:
    value = record.get("timestamp")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MOST or math.isnan(value):
        raise ConfigError(f"{where} has timestamp {_brief(value)}, but must have a number of milliseconds")
    return float(value)


def _brief(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:40] + "..."


def _shown(line: bytes) -> str:
    text = repr(line[:40].decode(errors="replace").strip())
    return text + "..." * (len(line) > 40)


def check_tokens_per_block(option: str, value: object) -> int:
    """Raise ConfigError unless it is a number of tokens that a block may have."""
    return parse_count(option, value, 1, 1 << 20)
