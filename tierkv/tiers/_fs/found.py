"""What lies at a place of a root, as far as its name, kind and length tell: nothing is read but a slab's catalogue."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tierkv.tiers._fs.catalogue import PART, SLAB, SlabName, allocated_nbytes, rows_of, slab_name
from tierkv.tiers._fs.file_io import damage
from tierkv.tiers._fs.format import FileName, leaf_of, padded_nbytes, parse_file_name
from tierkv.types import ChunkKey


class Kind(StrEnum):
    """What lies at a place of a root, as far as name, kind and length tell."""

    CHUNK = "chunk"
    UNFINISHED = "unfinished"
    """Being written; or left by a writer that was killed, until its owner's files are adopted."""
    DAMAGED = "damaged"
    """A length that no chunk file has."""
    MISPLACED = "misplaced"
    """In a directory where no lookup finds it."""
    NOT_REGULAR = "not regular"
    """A link, FIFO, device, socket or directory with a name of ours."""
    SLAB = "slab"
    """A file of slots, or its catalogue: what it occupies besides the chunks that are told of by themselves."""
    FOREIGN = "foreign"
    """Nothing of ours: never touched, never counted."""


@dataclass(frozen=True, slots=True)
class Found:
    """Something in a root, unread."""

    kind: Kind
    place: str
    """Path below the root."""
    name: FileName | None
    """None for what is foreign."""
    namespace: str
    """Digest; empty outside of any."""
    nbytes: int
    """Length of the file."""
    mtime_s: float
    """When it was written, or lately read; Unix seconds."""

    @property
    def charge_nbytes(self) -> int:
        """What counts against the root's capacity."""
        return 0 if self.kind is Kind.FOREIGN else padded_nbytes(self.nbytes)


def foreign_at(place: str, namespace: str, found: os.stat_result) -> Found:
    return Found(Kind.FOREIGN, place, None, namespace, found.st_size, found.st_mtime)


def found_at(namespace: str, leaf: str, name: str, found: os.stat_result) -> Found:
    place, parsed = f"{namespace}/{leaf}/{name}", parse_file_name(name)
    if parsed is None:
        return foreign_at(place, namespace, found)
    kind = Kind.CHUNK
    match damage(found):
        case "not_regular":
            kind = Kind.NOT_REGULAR
        case _ if parsed.is_part:
            kind = Kind.UNFINISHED
        case "corrupt":
            kind = Kind.DAMAGED
        case _ if leaf_of(parsed.key) != leaf:
            kind = Kind.MISPLACED
    return Found(kind, place, parsed, namespace, found.st_size, found.st_mtime)


def in_slab(
    namespace: str, namespace_fd: int, slab: SlabName, found: os.stat_result, *, slots: bool
) -> Iterator[Found]:
    """One file of a slab, after its chunks if they are asked for."""
    name = slab_name(slab.owner, slab.slot_nbytes, slab.kind) + PART * slab.is_part
    kind = Kind.UNFINISHED if slab.is_part else Kind.SLAB
    chunks = (
        rows_of(slab, namespace_fd, bytes.fromhex(namespace))
        if slots and slab.kind == SLAB and not slab.is_part
        else ()
    )
    n_chunks = 0
    for row in chunks:
        n_chunks += 1
        key_name = FileName(row.key, slab.owner, is_part=False)
        place = f"{namespace}/{name}/{row.slot}"
        yield Found(Kind.CHUNK, place, key_name, namespace, slab.slot_nbytes, row.used_s)
    nbytes = max(0, allocated_nbytes(found) - n_chunks * slab.slot_nbytes)
    yield Found(
        kind, f"{namespace}/{name}", FileName(ChunkKey(b""), slab.owner, is_part=False), namespace, nbytes,
        found.st_mtime,
    )  # fmt: skip
