"""What the demo's two processes must agree on: the sizes of a run, and the lines that the worker writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tierkv.chunkers import Namespace, PrefixChunker
from tierkv.cli._workload import Workload


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of the demo."""

    workload: Workload
    root_dir: str
    memory_nbytes: int
    disk_nbytes: int
    chunk_nbytes: int
    tokens_per_block: int = 16
    blocks_per_chunk: int = 8
    n_at_once: int = 4
    """Sessions that ask at the same time."""
    damage: bool = False
    """Flip one bit in host memory behind the cache's back, to see the verdict fail."""

    @property
    def tokens_per_chunk(self) -> int:
        return self.tokens_per_block * self.blocks_per_chunk

    def chunker(self) -> PrefixChunker:
        return PrefixChunker(
            namespace=Namespace(model="tierkv-demo"),
            tokens_per_block=self.tokens_per_block,
            blocks_per_chunk=self.blocks_per_chunk,
        )

    def system_keys(self) -> set[str]:
        """The system prompt's chunks. They are asked for first; that they are on disk first is not said: many write."""
        tokens = self.workload.prompt(0, 0)[: self.workload.n_system_tokens]
        return {chunk.key.hex() for chunk in self.chunker().chunks(tokens)}

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        raw = json.loads(text)
        return Plan(**raw | {"workload": Workload(**raw["workload"])})


@dataclass(frozen=True, slots=True)
class Turn:
    """One question answered: what came from where. One line of the worker's output."""

    turn: int
    session: int
    n_tokens: int
    n_served: int
    """Leading tokens of the prompt that came from the cache."""
    n_chunks: int
    """Chunks that were verified."""
    nbytes: int
    """Their bytes."""
    by_level: Sequence[int]
    """The same chunks by the level on which they were found."""
    n_wrong: int
    keys: Sequence[str] = ()
    """All chunk keys of the prompt; only after a restart, where they tell what should have been there."""
    levels: Sequence[dict[str, Any]] = ()
    """Statistics of each level at this moment."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk became readable on disk, or stopped being so."""

    key: str
    removed: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """The worker's cache is open."""

    duration_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker could not go on; ``usage`` if a setting was to blame."""

    message: str
    usage: bool


Message = Turn | Stored | Opened | Failed
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Turn, Stored, Opened, Failed)}


def to_line(message: Message) -> bytes:
    """One line of JSON."""
    return json.dumps({"kind": type(message).__name__} | asdict(message)).encode() + b"\n"


def from_line(line: bytes) -> Message:
    raw = json.loads(line)
    message: Message = _KINDS[raw.pop("kind")](**raw)
    return message


@dataclass
class Tally:
    """What the whole run has shown so far."""

    n_tokens: int = 0
    n_served: int = 0
    n_chunks: int = 0
    nbytes: int = 0
    n_wrong: int = 0
    by_level: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, turn: Turn) -> None:
        self.n_tokens += turn.n_tokens
        self.n_served += turn.n_served
        self.n_chunks += turn.n_chunks
        self.nbytes += turn.nbytes
        self.n_wrong += turn.n_wrong
        for level, n in enumerate(turn.by_level):
            self.by_level[level] += n
