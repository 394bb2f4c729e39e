"""Side doors to the media of our own tiers, which bypass everything but the format."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierkv.tiers._fs.catalogue import SLAB, slab_name
from tierkv.tiers._fs.format import (
    HEADER_NBYTES,
    checksum,
    file_name,
    leaf_of,
    pack_header,
    padded_nbytes,
    unpack_header,
)
from tierkv.types import Chunk, ChunkKey


class MemoryDoor:
    """The dict of a MemoryTier."""

    def __init__(self, tier: Any) -> None:
        self._chunks: dict[ChunkKey, bytes] = tier._chunks

    def get(self, key: ChunkKey) -> bytes | None:
        return self._chunks.get(key)

    def set(self, chunk: Chunk, data: bytes) -> None:
        self._chunks[chunk.key] = data

    def corrupt(self, key: ChunkKey, change: Callable[[bytes], bytes]) -> None:
        self._chunks[key] = change(self._chunks[key])

    def remove(self, key: ChunkKey) -> None:
        del self._chunks[key]


class CPUDoor:
    """The mapping of a CPUTier, by the slot that its books name."""

    def __init__(self, tier: Any) -> None:
        self._tier = tier

    def get(self, key: ChunkKey) -> bytes | None:
        held = self._tier._held.get(key)
        return None if held is None else bytes(self._tier.buffer[self._start(held[0]) :][: held[1]])

    def set(self, chunk: Chunk, data: bytes) -> None:
        start = self._start(self._tier._held[chunk.key][0])
        self._tier.buffer[start : start + len(data)] = data

    def corrupt(self, key: ChunkKey, change: Callable[[bytes], bytes]) -> None:
        raise NotImplementedError

    def remove(self, key: ChunkKey) -> None:
        slot, _ = self._tier._held.pop(key)
        self._tier._free.append(slot)

    def _start(self, slot: int) -> int:
        return slot * int(self._tier._ctx.stride_nbytes)


class FSDoor:
    """The files of an FSTier, as somebody with a shell sees them."""

    def __init__(self, tier: Any) -> None:
        mount = tier._mount
        self._root = Path(os.readlink(f"/proc/self/fd/{mount._root_fd}"))
        self._owner: str = mount._ownership.id
        self._digest = bytes.fromhex(Path(os.readlink(f"/proc/self/fd/{mount._namespace_fd}")).name)

    def get(self, key: ChunkKey) -> bytes | None:
        """The payload, by the header's own word about its length; nothing is verified."""
        try:
            record = self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        header = unpack_header(memoryview(record)[:HEADER_NBYTES])
        assert header.chunk.key == key
        assert not any(record[HEADER_NBYTES + header.chunk.nbytes :]), "bytes behind the payload are zero on disk, too"
        return record[HEADER_NBYTES:][: header.chunk.nbytes]

    def set(self, chunk: Chunk, data: bytes) -> None:
        page = bytearray(HEADER_NBYTES)
        pack_header(memoryview(page), chunk, self._digest, self._owner, checksum(memoryview(data)))
        self._path(chunk.key).write_bytes(bytes(page) + data.ljust(padded_nbytes(len(data)), b"\0"))

    def corrupt(self, key: ChunkKey, change: Callable[[bytes], bytes]) -> None:
        path = self._path(key)
        path.write_bytes(change(path.read_bytes()))

    def remove(self, key: ChunkKey) -> None:
        self._path(key).unlink()

    def _path(self, key: ChunkKey) -> Path:
        """Of our own file, or of the one that an earlier owner wrote and we adopted."""
        folder = self._root / self._digest.hex() / leaf_of(key)
        own = folder / file_name(key, self._owner)
        others = sorted(folder.glob(f"{key.hex()}.{'[0-9a-f]' * 16}"))
        return own if own.exists() or not others else others[0]


class SlabDoor:
    """The slots of an FSTier, by what its books say of a key."""

    def __init__(self, tier: Any) -> None:
        self._mount = tier._mount
        self._folder = Path(os.readlink(f"/proc/self/fd/{self._mount._namespace_fd}"))

    def get(self, key: ChunkKey) -> bytes | None:
        """The payload, by the header's own word about its length; nothing is verified."""
        berth = self._berth(key)
        if berth is None:
            return None
        record = self._record(berth)
        header = unpack_header(memoryview(record)[:HEADER_NBYTES])
        assert header.chunk.key == key
        payload_nbytes = header.chunk.nbytes
        padding = record[HEADER_NBYTES + payload_nbytes : HEADER_NBYTES + padded_nbytes(payload_nbytes)]
        assert not any(padding), "bytes behind the payload are zero on disk, too"
        return record[HEADER_NBYTES:][:payload_nbytes]

    def set(self, chunk: Chunk, data: bytes) -> None:
        page = bytearray(HEADER_NBYTES)
        berth = self._berth(chunk.key)
        digest = bytes.fromhex(self._folder.name)
        pack_header(memoryview(page), chunk, digest, berth.slab.owner, checksum(memoryview(data)))
        self._write(berth, bytes(page) + data)

    def corrupt(self, key: ChunkKey, change: Callable[[bytes], bytes]) -> None:
        berth = self._berth(key)
        self._write(berth, change(self._record(berth)).ljust(berth.slab.slot_nbytes, b"\0"))

    def remove(self, key: ChunkKey) -> None:
        self._berth(key).slab.catalogue.clear(self._berth(key).row.line)

    def _berth(self, key: ChunkKey) -> Any:
        held = self._mount.books.get(key)
        for owner in self._mount._ownership.held_ids() if held is None else [self._mount._ownership.ids[held.number]]:
            berth = self._mount._slabs.find(key, owner, held)
            if berth is not None:
                return berth
        return None

    def _record(self, berth: Any) -> bytes:
        with self._path(berth).open("rb") as file:
            return os.pread(file.fileno(), berth.slab.slot_nbytes, berth.row.slot * berth.slab.slot_nbytes)

    def _write(self, berth: Any, data: bytes) -> None:
        with self._path(berth).open("rb+") as file:
            os.pwrite(file.fileno(), data[: berth.slab.slot_nbytes], berth.row.slot * berth.slab.slot_nbytes)

    def _path(self, berth: Any) -> Path:
        return self._folder / slab_name(berth.slab.owner, berth.slab.slot_nbytes, SLAB)
