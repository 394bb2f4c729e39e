"""The index of a clean close: which chunks an owner held, coldest first, and when each leaf last changed.

It is advice. The next open takes a leaf from it only if the directory's own time still equals the one written here;
any other leaf is listed again, and the index then only says how recent its files are. It is removed when it is taken,
so none outlives a process that was killed.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import stat
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Final, NamedTuple

import aiofiles
import aiofiles.os
import xxhash

from tierkv.tiers._fs.catalogue import STAMP_NBYTES
from tierkv.tiers._fs.dirs import unlink_quietly
from tierkv.tiers._fs.file_io import Tally
from tierkv.tiers._fs.format import LEAVES, MAX_KEY_NBYTES, N_LEAVES, PAGE_NBYTES, VERSION, padded_nbytes
from tierkv.types import Chunk, ChunkKey

_log = logging.getLogger(__name__)

_MAGIC: Final = b"tierkv-index\r\n\0\2"
# magic, version, number of ids, of tenants, of slabs, longest key, longest parent, namespace digest, number of entries
_HEAD = struct.Struct("<16sHHHHHH4x16sQ")
_SUM_NBYTES: Final = 16
_TIMES = struct.Struct(f"<{N_LEAVES}q")
_SLAB = struct.Struct(f"<HQ{STAMP_NBYTES}s")
# length of the key, of the parent, flags, id, tenant, group, pages, slot, row, last token, length of the payload
_ENTRY = "<BBBxHHIIIIqQ{key}s{parent}s"
_COLUMNS = "<BxBxH6xIII16x{key}s{parent}x"
"""Of an entry what the books need: length of the key, flags, id, pages, slot, row, key."""
_MOST_TENANT_NBYTES: Final = 2 + 0xFFFF
_MOST_TENANTS: Final = 0xFFFF
"""Chunks of others are nobody's after a restart, as those are of which no index tells."""
_AT_ID: Final = 4
_AT_TENANT: Final = 6
_PARTIAL: Final = 1
_HAS_PARENT: Final = 2
_IN_SLAB: Final = 4
_PER_CHUNK_NBYTES: Final = 192
"""What an entry is allowed for when room is set aside: enough for keys of 80 bytes."""


Stamps = Mapping[tuple[str, int], bytes]


class BadIndexError(Exception):
    """Not an index of ours, or not whole."""


class IndexEntry(NamedTuple):
    owner: str
    nbytes: int
    """Length in bytes of the file, or of the slot."""
    chunk: Chunk
    at: int | None = None
    """Slot of the owner's slab; None for a file."""
    row: int = 0
    """Place of the slot's row."""


class Span(NamedTuple):
    """Files that follow each other in an index, coldest first, one column a field."""

    first: int
    """Place of the first one."""
    keys: Sequence[ChunkKey]
    ids: Sequence[int]
    """Places in ``Index.covers``."""
    pages: Sequence[int]
    in_slab: Sequence[bool]
    slots: Sequence[int]
    """Where a chunk in a slab lay; the catalogue may say otherwise by now."""
    rows: Sequence[int]


class Index:
    """An index that was read. Entries stay packed until they are asked for: there may be a million.

    Attributes:
        covers: the owner ids all of whose files in the namespace are listed.
        leaf_times_ns: when each leaf directory had last changed; 0 if there was none.
        stamps: of the catalogue of each slab, by owner and bytes of a slot.
    """

    def __init__(
        self, covers: tuple[str, ...], leaf_times_ns: Mapping[str, int], stamps: Stamps, tenants: Sequence[str],
        entries: _Entries,
    ) -> None:  # fmt: skip
        self.covers = covers
        self.leaf_times_ns = leaf_times_ns
        self.stamps = stamps
        self._tenants = tenants
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries.packed) // self._entries.layout.size

    def spans(self, length: int) -> Iterator[Span]:
        """Everything, by columns, in pieces of ``length``: a few steps of C for a file, and none of Python."""
        packed, size = self._entries.packed, self._entries.layout.size
        for first in range(0, len(self), length):
            piece = packed[first * size : (first + length) * size]
            n_keys, flags, ids, pages, slots, rows, keys = zip(*self._entries.columns.iter_unpack(piece), strict=True)
            if set(n_keys) != {len(keys[0])}:
                keys = tuple(key[:n] for key, n in zip(keys, n_keys, strict=True))
            in_slab = {flag: flag & _IN_SLAB > 0 for flag in set(flags)}
            yield Span(first, keys, ids, pages, list(map(in_slab.__getitem__, flags)), slots, rows)

    def chunk(self, place: int, same_key: ChunkKey | None = None) -> Chunk:
        """The record at a place. It has ``same_key`` itself for a key, where the caller has it already."""
        layout = self._entries.layout
        n_key, n_parent, flags, _, tenant, group, _, _, _, end_token, nbytes, key, parent = layout.unpack_from(
            self._entries.packed, place * layout.size
        )
        return Chunk(
            same_key or key[:n_key],
            parent[:n_parent] if flags & _HAS_PARENT else None,
            group,
            end_token,
            nbytes,
            self._tenants[int(tenant)],
            bool(flags & _PARTIAL),
        )


class _Entries(NamedTuple):
    layout: struct.Struct
    columns: struct.Struct
    packed: memoryview


def index_room_nbytes(n_chunks: int) -> int:
    """Bytes to set aside for an index of so many chunks."""
    return padded_nbytes(PAGE_NBYTES + n_chunks * _PER_CHUNK_NBYTES)


def pack_index(
    covers: Sequence[str], leaf_times_ns: Mapping[str, int], stamps: Stamps, entries: Sequence[IndexEntry],
    digest: bytes,
) -> bytes:  # fmt: skip
    """The whole file; ``entries`` are coldest first."""
    tenants = {"": 0}
    for entry in entries:
        if len(tenants) < _MOST_TENANTS:
            tenants.setdefault(entry.chunk.tenant, len(tenants))
    n_key = max((len(e.chunk.key) for e in entries), default=0)
    n_parent = max((len(e.chunk.parent or b"") for e in entries), default=0)
    slots = {owner: slot for slot, owner in enumerate(covers)}
    entry_struct = struct.Struct(_ENTRY.format(key=n_key, parent=n_parent))
    counts = len(slots), len(tenants), len(stamps)
    out = bytearray(_HEAD.pack(_MAGIC, VERSION, *counts, n_key, n_parent, digest, len(entries)))
    out += b"".join(bytes.fromhex(owner) for owner in covers)
    out += _TIMES.pack(*(leaf_times_ns.get(leaf, 0) for leaf in LEAVES))
    for (owner, slot_nbytes), stamp in stamps.items():
        out += _SLAB.pack(slots[owner], slot_nbytes, stamp)
    for tenant in tenants:
        text = tenant.encode("utf-8", "surrogatepass")
        out += struct.pack("<H", len(text)) + text
    for owner, nbytes, chunk, slot, row in entries:
        parent = chunk.parent or b""
        flags = _PARTIAL * chunk.partial | _HAS_PARENT * (chunk.parent is not None) | _IN_SLAB * (slot is not None)
        out += entry_struct.pack(
            len(chunk.key), len(parent), flags, slots[owner], tenants.get(chunk.tenant, 0), chunk.group,
            nbytes // PAGE_NBYTES, slot or 0, row, chunk.end_token, chunk.nbytes,
            chunk.key, parent,
        )  # fmt: skip
    out += xxhash.xxh3_128_digest(out)
    return bytes(out)


def unpack_index(data: bytes, digest: bytes) -> Index:
    """Raises BadIndexError for anything that ``pack_index`` did not write, whole, for this namespace and version."""
    body = memoryview(data)[:-_SUM_NBYTES]
    if len(data) < _HEAD.size + _SUM_NBYTES or xxhash.xxh3_128_digest(body) != data[-_SUM_NBYTES:]:
        raise BadIndexError("checksum")
    magic, version, n_ids, n_tenants, n_slabs, n_key, n_parent, its_digest, n_entries = _HEAD.unpack_from(body)
    if (magic, version, its_digest) != (_MAGIC, VERSION, digest):
        raise BadIndexError("another format or namespace")
    at = _HEAD.size
    owners = tuple(body[at + 8 * i : at + 8 * i + 8].hex() for i in range(n_ids))
    at += 8 * n_ids
    times = dict(zip(LEAVES, _TIMES.unpack_from(body, at), strict=True))
    at += _TIMES.size
    slabs = [_SLAB.unpack_from(body, at + i * _SLAB.size) for i in range(n_slabs)]
    at += n_slabs * _SLAB.size
    tenants = []
    for _ in range(n_tenants):
        (length,) = struct.unpack_from("<H", body, at)
        tenants.append(bytes(body[at + 2 : at + 2 + length]).decode("utf-8", "surrogatepass"))
        at += 2 + length
    layout, columns = (struct.Struct(text.format(key=n_key, parent=n_parent)) for text in (_ENTRY, _COLUMNS))
    if len(body) - at != n_entries * layout.size:
        raise BadIndexError("length")
    if n_entries:
        _refuse_strange(data[:-_SUM_NBYTES], at, layout.size, n_key=n_key, n_ids=n_ids, n_tenants=n_tenants)
    stamps = {(owners[i], slot_nbytes): stamp for i, slot_nbytes, stamp in slabs}
    return Index(owners, times, stamps, tenants, _Entries(layout, columns, body[at:]))


def _most_nbytes(head: bytes) -> int:
    """How long an index with this head can be. Raises struct.error."""
    _, _, n_ids, n_tenants, n_slabs, n_key, n_parent, _, n_entries = _HEAD.unpack(head)
    lists_nbytes: int = 8 * n_ids + _TIMES.size + n_slabs * _SLAB.size + n_tenants * _MOST_TENANT_NBYTES
    entries_nbytes: int = n_entries * struct.calcsize(_ENTRY.format(key=n_key, parent=n_parent))
    return _HEAD.size + lists_nbytes + entries_nbytes + _SUM_NBYTES


def _refuse_strange(data: bytes, first: int, size: int, *, n_key: int, n_ids: int, n_tenants: int) -> None:
    """Raises BadIndexError for a key of a length that none has, or a number of an id or tenant that is none.

    By columns of the bytes from ``first`` on, a few steps of C for all entries: there may be a million.
    """
    lengths = data[first::size]
    if min(lengths) < 1 or max(lengths) > min(n_key, MAX_KEY_NBYTES):
        raise BadIndexError("a key's length")
    for at, n in ((first + _AT_ID, n_ids), (first + _AT_TENANT, n_tenants)):
        numbers = bytearray(2 * len(lengths))
        numbers[0::2], numbers[1::2] = data[at::size], data[at + 1 :: size]
        column = array.array("H", bytes(numbers))
        if sys.byteorder == "big":
            column.byteswap()
        if max(column) >= n:
            raise BadIndexError("an id or a tenant that is not listed")


async def save_index(root_fd: int, owner: str, data: bytes, executor: Executor) -> None:
    """Write and name the file, on the executor's threads. What an error leaves behind, ``discard_part`` removes."""
    name, part = f"owner-{owner}.index", f"owner-{owner}.index.part"

    def opener(path: str, flags: int) -> int:
        fd = os.open(path, flags | os.O_NOFOLLOW, 0o600, dir_fd=root_fd)
        os.fchmod(fd, 0o600)
        return fd

    with contextlib.suppress(FileNotFoundError):
        await aiofiles.os.unlink(part, dir_fd=root_fd, executor=executor)
    async with aiofiles.open(part, "xb", opener=opener, executor=executor) as file:
        await file.write(data)
    await aiofiles.os.rename(part, name, src_dir_fd=root_fd, dst_dir_fd=root_fd, executor=executor)


def discard_part(root_fd: int, owner: str) -> None:
    """Remove an index that was not finished."""
    unlink_quietly(f"owner-{owner}.index.part", root_fd)


def index_nbytes(root_fd: int, owner: str) -> int:
    """What an owner's index occupies, 0 if there is none."""
    try:
        return padded_nbytes(os.stat(f"owner-{owner}.index", dir_fd=root_fd, follow_symlinks=False).st_size)
    except FileNotFoundError:
        return 0


def read_index(root_fd: int, owner: str, digest: bytes, *, remove: bool) -> Index | None:
    """Read a dead owner's index, and as a rule remove it: it may not outlive the next change of a file.

    None if there is none; raises BadIndexError if there is one of no use.
    """
    name = f"owner-{owner}.index"
    discard_part(root_fd, owner)
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=root_fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        if remove:
            unlink_quietly(name, root_fd)
        raise BadIndexError(str(error)) from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise BadIndexError("not a regular file")
        if os.fstat(fd).st_size > _most_nbytes(os.pread(fd, _HEAD.size, 0)):
            raise BadIndexError("length")  # whoever made it as long as he likes gets no memory for it
        with os.fdopen(fd, "rb", closefd=False) as file:
            return unpack_index(file.read(), digest)
    except (OSError, struct.error, ValueError, IndexError, MemoryError) as error:
        raise BadIndexError(str(error)) from None
    finally:
        os.close(fd)
        if remove:
            unlink_quietly(name, root_fd)


def read_indexes(
    name: str, root_fd: int, digest: bytes, owners: Sequence[str], trusted: Sequence[str], *, tally: Tally
) -> list[Index]:
    """Those of ``owners``, which are removed, and of the ``trusted``, which are for whoever takes those ids."""
    indexes = []
    for owner in (*owners, *trusted):
        try:
            index = read_index(root_fd, owner, digest, remove=owner not in trusted)
        except BadIndexError as error:
            tally.add("bad_index")
            _log.info("%s: ignoring the index of owner %s (%s), listing the tree", name, owner, error)
        else:
            indexes += [] if index is None else [index]
    return indexes
