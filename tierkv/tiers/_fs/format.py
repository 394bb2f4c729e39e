"""What lies on disk: names, sizes and the 4 KiB header of a chunk file. Pure: no I/O.

A root looks like this::

    root/tierkv.lock                                   held for moments, by whoever changes who owns what; empty
    root/owner-<owner id>.lock                         flock-held by a living owner; see owners.py
    root/owner-<owner id>.index                        written by a clean close; see index.py
    root/<namespace digest>/<leaf>/<key hex>.<owner id>        a whole chunk: header, payload, zeros up to 4 KiB
    root/<namespace digest>/<leaf>/<key hex>.<owner id>.part<n>  one that its owner's worker n is writing
    root/<namespace digest>/<owner id>.<slot bytes>.slab       an owner's slots, with the slab layout; see catalogue.py
    root/<namespace digest>/<owner id>.<slot bytes>.slots      which key lies in which of them

Everything else in a root is foreign and never touched or counted.
"""

from __future__ import annotations

import hmac
import re
import struct
import zlib
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import xxhash

from tierkv.types import Chunk, ChunkKey

PAGE_NBYTES: Final = 4096
HEADER_NBYTES: Final = PAGE_NBYTES
VERSION: Final = 1
MAGIC: Final = b"tierkv\r\n"
"""The line end shows a file that went through a text-mode copy."""

N_LEAVES: Final = 256
LEAVES: Final = tuple(f"{i:02x}" for i in range(N_LEAVES))
PART: Final = ".part"
ROOT_LOCK: Final = "tierkv.lock"
MAX_KEY_NBYTES: Final = 115
"""File names end at 255 bytes: two hex digits a byte, a dot, 16 digits of owner id, ``.part`` and a number."""

_NAME = re.compile(r"([0-9a-f]{2,230})\.([0-9a-f]{16})(\.part[0-9a-f]{0,3})?")
_OWNER_FILE = re.compile(r"owner-([0-9a-f]{16})\.(lock|index|index\.part)")
_DIGEST = re.compile(r"[0-9a-f]{32}")

# magic, version, flags, group, namespace digest, owner, payload length, end_token, key length, parent length,
# tenant length, payload checksum; then key, parent and tenant; the last 16 bytes are the header's own checksum.
_FIXED = struct.Struct("<8sHHI16s8sQqHHH6x16s")
_SUM_AT: Final = HEADER_NBYTES - 16
_VARIABLE_NBYTES: Final = _SUM_AT - _FIXED.size
_SUMMED = struct.Struct(f"{_FIXED.format}{_VARIABLE_NBYTES}s")
# Of the same: magic, version, flags, digest, payload length, key length, payload checksum, key, header checksum
_PROOF = struct.Struct(f"<8sHH4x16s8xQ8xH10x16s{MAX_KEY_NBYTES}s{_VARIABLE_NBYTES - MAX_KEY_NBYTES}x16s")
_PARTIAL: Final = 1
_HAS_PARENT: Final = 2
_KEYED: Final = 4


class BadHeaderError(Exception):
    """These 4,096 bytes are not a header that we can read; says why."""


class Header(NamedTuple):
    """What a chunk file says about itself."""

    chunk: Chunk
    namespace_digest: bytes
    owner: str
    checksum: bytes
    """Of the payload's ``chunk.nbytes`` bytes; see :class:`Sums`."""


class Sums:
    """How chunks are proven: xxh3-128, or with a secret keyed BLAKE2b of the same length.

    With a secret, only who has it can write what passes. The payload's sum stands in the header and the header's own
    sum covers that, so no part can be exchanged for another chunk's. The secret itself is not kept, and no ``repr``
    shows what was made of it.
    """

    __slots__ = ("_key", "salt")

    def __init__(self, secret: bytes = b"") -> None:
        self._key = blake2b(secret, digest_size=32, person=b"tierkv checksum").digest() if secret else b""
        self.salt = blake2b(key=self._key, digest_size=16, person=b"tierkv namespace").digest() if secret else b""
        """Tells namespaces apart whose chunks have different secrets; says nothing of the secret."""

    @property
    def is_keyed(self) -> bool:
        return bool(self._key)

    def hasher(self, part: bytes = b"payload") -> Any:
        """An object with ``update`` and ``digest``, 16 bytes."""
        if self._key:
            return blake2b(digest_size=16, key=self._key, person=part)
        return xxhash.xxh3_128()

    def of(self, data: memoryview, part: bytes = b"payload") -> bytes:
        """The sum of a payload, or of another part. Releases the GIL for large ones."""
        if self._key:
            return blake2b(data, digest_size=16, key=self._key, person=part).digest()
        return xxhash.xxh3_128_digest(data)

    def of_header(self, page: memoryview) -> bytes:
        """The sum of a header page up to where the sum stands."""
        return self.of(page[:_SUM_AT], b"header")

    def __repr__(self) -> str:
        return "Sums(keyed)" if self._key else "Sums()"

    def __reduce__(self) -> Any:
        raise TypeError("a checksum key leaves its process by no pickle")


PLAIN: Final = Sums()


class FileName(NamedTuple):
    key: ChunkKey
    owner: str
    is_part: bool


def padded_nbytes(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages: what a file of that length occupies."""
    return (nbytes + PAGE_NBYTES - 1) & -PAGE_NBYTES


def charge_nbytes(chunk_nbytes: int) -> int:
    """What a payload of this length occupies, header included."""
    return HEADER_NBYTES + padded_nbytes(chunk_nbytes)


def namespace_digest(namespace: bytes, sums: Sums = PLAIN) -> bytes:
    """16 bytes that name a namespace *in this format version* and under this checksum key.

    Version and key go in so that files which we could not read never lie where we look, and can be told from ours by
    their directory alone.
    """
    return blake2b(namespace, digest_size=16, key=b"tierkv fs %d" % VERSION, salt=sums.salt).digest()


def checksum(payload: memoryview) -> bytes:
    """xxh3-128. Releases the GIL for large payloads."""
    return PLAIN.of(payload)


def leaf_of(key: bytes) -> str:
    """Directory of a key. A checksum, since keys are opaque and need not be spread evenly themselves."""
    return LEAVES[zlib.crc32(key) & 0xFF]


def file_name(key: bytes, owner: str) -> str:
    return f"{key.hex()}.{owner}"


def part_name(name: str, worker: int) -> str:
    """Unfinished files are told apart by their worker, so that two writes of one key cannot mix."""
    return f"{name}{PART}{worker:x}"


def parse_file_name(name: str) -> FileName | None:
    """The parts of a chunk file's name, or None if the name is none of ours."""
    match = _NAME.fullmatch(name)
    if match is None or len(match[1]) % 2:
        return None
    return FileName(ChunkKey(bytes.fromhex(match[1])), match[2], match[3] is not None)


def parse_owner_file(name: str) -> tuple[str, str] | None:
    """(owner id, "lock" or "index" or "index.part") of a file in the root itself, or None if it is none of ours."""
    match = _OWNER_FILE.fullmatch(name)
    return None if match is None else (match[1], match[2])


def is_namespace_dir(name: str) -> bool:
    return _DIGEST.fullmatch(name) is not None


def fits_a_header(chunk: Chunk) -> bool:
    """False if key, parent or tenant are too long to be written down (or the key is empty), or a number too large."""
    n = len(chunk.key) + len(chunk.parent or b"") + len(_tenant_bytes(chunk.tenant))
    numbers_fit = 0 <= chunk.group < 1 << 32 and -1 << 63 <= chunk.end_token < 1 << 63
    return 0 < len(chunk.key) <= MAX_KEY_NBYTES and n <= _VARIABLE_NBYTES and numbers_fit


def pack_header(
    page: memoryview, chunk: Chunk, digest: bytes, owner: str, payload_checksum: bytes, *, sums: Sums = PLAIN
) -> None:
    """Write a header over all of ``page``, which is ``HEADER_NBYTES`` long. ``fits_a_header(chunk)`` holds."""
    parent, tenant = chunk.parent or b"", _tenant_bytes(chunk.tenant)
    flags = _PARTIAL * chunk.partial | _HAS_PARENT * (chunk.parent is not None) | _KEYED * sums.is_keyed
    _SUMMED.pack_into(
        page, 0, MAGIC, VERSION, flags, chunk.group, digest, bytes.fromhex(owner), chunk.nbytes, chunk.end_token,
        len(chunk.key), len(parent), len(tenant), payload_checksum, chunk.key + parent + tenant,
    )  # fmt: skip
    page[_SUM_AT:] = sums.of_header(page)


def unpack_header(page: memoryview, *, sums: Sums = PLAIN) -> Header:
    """Read a header. Raises BadHeaderError for anything that this version did not write, whole and unchanged."""
    (magic, version, flags, group, digest, owner, nbytes, end_token, n_key, n_parent, n_tenant, payload_checksum) = (
        _FIXED.unpack_from(page)
    )
    if magic != MAGIC:
        raise BadHeaderError("no chunk file")
    if version != VERSION:
        raise BadHeaderError(f"format version {version}, this is version {VERSION}")
    if bool(flags & _KEYED) != sums.is_keyed:
        raise BadHeaderError("no checksum key was used" if sums.is_keyed else "its checksum has a key")
    if not hmac.compare_digest(page[_SUM_AT:], sums.of_header(page)):
        raise BadHeaderError("header checksum")
    if not 0 < n_key <= MAX_KEY_NBYTES or n_key + n_parent + n_tenant > _VARIABLE_NBYTES:
        raise BadHeaderError("a key or a name longer than can be")
    at_parent = _FIXED.size + n_key
    at_tenant = at_parent + n_parent
    key = ChunkKey(bytes(page[_FIXED.size : at_parent]))
    parent = ChunkKey(bytes(page[at_parent:at_tenant])) if flags & _HAS_PARENT else None
    try:
        tenant = bytes(page[at_tenant : at_tenant + n_tenant]).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise BadHeaderError("tenant is no text") from None
    chunk = Chunk(key, parent, group, end_token, nbytes, tenant, bool(flags & _PARTIAL))
    return Header(chunk, digest, owner.hex(), payload_checksum)


def header_of(page: memoryview, key: bytes, digest: bytes, file_nbytes: int, *, sums: Sums = PLAIN) -> Header:
    """The header of the file in which this key's chunk should lie. Raises BadHeaderError if another one's does."""
    header = _header_of(page, key, digest, sums)
    if charge_nbytes(header.chunk.nbytes) != file_nbytes:
        raise BadHeaderError("length differs from the header's")
    return header


def header_in_slot(page: memoryview, key: bytes, digest: bytes, slot_nbytes: int, *, sums: Sums = PLAIN) -> Header:
    """As ``header_of`` for a slot of a slab, which a chunk need not fill."""
    header = _header_of(page, key, digest, sums)
    if charge_nbytes(header.chunk.nbytes) > slot_nbytes:
        raise BadHeaderError("longer than its slot")
    return header


def payloads_in_slots(
    pages: memoryview, keys: Sequence[bytes], digest: bytes, slot_nbytes: int, *, sums: Sums = PLAIN
) -> list[tuple[int, bytes] | None]:
    """What ``header_in_slot`` says of each payload, its length and sum, in a fifth of the time; None where that raises.

    It tells nothing else, and not why: for a read that finds what it came for. ``pages`` begins with the headers.
    """
    most_nbytes = slot_nbytes - HEADER_NBYTES
    found: list[tuple[int, bytes] | None] = []
    headers = _PROOF.iter_unpack(pages[: len(keys) * HEADER_NBYTES])
    for i, (magic, version, flags, its_digest, nbytes, n_key, checksum, its_key, its_sum) in enumerate(headers):
        key, at = keys[i], i * HEADER_NBYTES
        is_right = (
            magic == MAGIC
            and version == VERSION
            and bool(flags & _KEYED) == sums.is_keyed
            and hmac.compare_digest(its_sum, sums.of(pages[at : at + _SUM_AT], b"header"))
            and its_digest == digest
            and n_key == len(key)
            and its_key[:n_key] == key
            and nbytes <= most_nbytes
        )
        found.append((nbytes, checksum) if is_right else None)
    return found


def _header_of(page: memoryview, key: bytes, digest: bytes, sums: Sums) -> Header:
    header = unpack_header(page, sums=sums)
    if header.chunk.key != key or header.namespace_digest != digest:
        raise BadHeaderError("another chunk's file")
    return header


def _tenant_bytes(tenant: str) -> bytes:
    return tenant.encode("utf-8", "surrogatepass") if tenant else b""
