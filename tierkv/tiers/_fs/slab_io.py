"""Chunks into and out of slots. Slots that lie side by side go in one ``pwritev`` or ``preadv``, headers and all."""

from __future__ import annotations

import contextlib
import errno
import hmac
from collections.abc import Sequence
from functools import partial
from typing import Final

from tierkv.errors import ChunkSizeError
from tierkv.tiers._fs.file_io import CorruptFileError
from tierkv.tiers._fs.format import (
    HEADER_NBYTES,
    PAGE_NBYTES,
    PLAIN,
    BadHeaderError,
    Header,
    Sums,
    header_in_slot,
    pack_header,
    padded_nbytes,
    payloads_in_slots,
)
from tierkv.tiers._fs.memory import Scratch, zero
from tierkv.tiers._fs.pieces import LONG_NBYTES, PIECE_NBYTES, in_pages, sum_of_pieces
from tierkv.tiers._fs.slab import Berth, Slab
from tierkv.types import Chunk, ChunkKey

RUN_NBYTES: Final = 2176 << 10
"""Slots of one call, two of a MiB or more smaller ones: a disk likes long calls."""
RUN_IN_MEMORY_NBYTES: Final = 2 << 20
"""A checksum that follows finds its bytes still in a cache, if not the nearest; a chunk of a MiB is alone."""
MOST_IN_RUN: Final = 16


class SlabIO:
    """Packs, checks and moves. Who may use which slot is the caller's affair.

    Args:
        in_memory: the root lies there: what a call has read is summed up while it is still in a cache, so calls are
            shorter.

    Concurrency: any thread, on different slots.
    """

    def __init__(self, digest: bytes, *, durable: bool, in_memory: bool = False, sums: Sums = PLAIN) -> None:
        self._in_memory = in_memory
        self._digest = digest
        self._sums = sums
        self._durable = durable

    def run_length(self, slot_nbytes: int) -> int:
        """Most slots of one call."""
        return max(1, min(MOST_IN_RUN, (RUN_IN_MEMORY_NBYTES if self._in_memory else RUN_NBYTES) // slot_nbytes))

    def write(self, slab: Slab, slots: range, items: Sequence[tuple[Chunk, memoryview]], scratch: Scratch) -> None:
        """Fill ``slots`` with as many chunks. Nobody can find them before they are committed. Raises OSError."""
        if len(items) == 1 and items[0][0].nbytes > LONG_NBYTES:
            self._write_pieces(slab, slots.start, *items[0], scratch)
        else:
            self._write_whole(slab, slots, items, scratch)
        if self._durable:
            slab.sync()

    def _write_whole(
        self, slab: Slab, slots: range, items: Sequence[tuple[Chunk, memoryview]], scratch: Scratch
    ) -> None:
        parts: list[memoryview] = []
        first = slots.start
        for i, (chunk, buffer) in enumerate(items):
            payload = buffer[: chunk.nbytes]
            pack_header(scratch.headers[i], chunk, self._digest, slab.owner, self._sums.of(payload), sums=self._sums)
            parts += (scratch.headers[i], *in_pages(payload, scratch.tails[i]))
            if HEADER_NBYTES + padded_nbytes(chunk.nbytes) < slab.slot_nbytes or i == len(items) - 1:
                # A shorter chunk ends the call: what lies behind it in its slot is left as it is.
                slab.write(first, parts)
                parts, first = [], slots.start + i + 1

    def _write_pieces(self, slab: Slab, slot: int, chunk: Chunk, buffer: memoryview, scratch: Scratch) -> None:
        """A long chunk, its first piece last: that has the sum of all of them before it."""
        payload, hasher = buffer[: chunk.nbytes], self._sums.hasher()
        hasher.update(payload[:PIECE_NBYTES])
        for at in range(PIECE_NBYTES, chunk.nbytes, PIECE_NBYTES):
            piece = payload[at : at + PIECE_NBYTES]
            hasher.update(piece)
            slab.write(slot, in_pages(piece, scratch.tail), HEADER_NBYTES + at)
        pack_header(scratch.header, chunk, self._digest, slab.owner, hasher.digest(), sums=self._sums)
        slab.write(slot, [scratch.header, payload[:PIECE_NBYTES]])

    def commit(self, slab: Slab, slots: range, keys: Sequence[ChunkKey]) -> list[OSError | None]:
        """Let each chunk be found, and say why one cannot be."""
        errors = slab.commit(slots, keys)
        if self._durable:
            try:
                slab.sync_rows()
            except OSError as error:
                for slot, key in zip(slots, keys, strict=True):
                    with contextlib.suppress(OSError):
                        slab.erase(slot, key)
                return [error] * len(keys)
        return errors

    def read(self, berth: Berth, key: ChunkKey, buffer: memoryview, scratch: Scratch) -> None:
        """Fill ``buffer`` with a verified chunk and zeros behind it.

        Raises:
            CorruptFileError: it is not what was written under this key; or its slot is another's by now.
            ChunkSizeError: the chunk is longer than the buffer.
            OSError: it could not be read now.
        """
        slab = berth.slab
        if len(buffer) >= slab.slot_nbytes - HEADER_NBYTES > LONG_NBYTES:
            self._read_pieces(berth, key, buffer, scratch)
            return
        payload_nbytes = min(slab.slot_nbytes - HEADER_NBYTES, padded_nbytes(len(buffer)))
        straight_nbytes = min(payload_nbytes, len(buffer) & -PAGE_NBYTES)
        parts = [scratch.header, buffer[:straight_nbytes]]
        if straight_nbytes < payload_nbytes:
            parts.append(scratch.tail)
        self._fill(berth, parts)
        header = self._header(berth, key, scratch)
        nbytes = header.chunk.nbytes
        if nbytes > len(buffer):
            raise ChunkSizeError(f"a buffer of {len(buffer)} bytes for a chunk of {nbytes}")
        if nbytes > straight_nbytes:
            buffer[straight_nbytes:nbytes] = scratch.tail[: nbytes - straight_nbytes]
        if not hmac.compare_digest(self._sums.of(buffer[:nbytes]), header.checksum):
            raise CorruptFileError("payload checksum", berth.identity)
        zero(buffer, nbytes)

    def _read_pieces(self, berth: Berth, key: ChunkKey, buffer: memoryview, scratch: Scratch) -> None:
        self._fill(berth, [scratch.header, buffer[:PIECE_NBYTES]])
        header = self._header(berth, key, scratch)
        nbytes = header.chunk.nbytes
        found = sum_of_pieces(self._sums, buffer, nbytes, partial(self._fill, berth))
        if not hmac.compare_digest(found, header.checksum):
            raise CorruptFileError("payload checksum", berth.identity)
        zero(buffer, nbytes)

    def _fill(self, berth: Berth, parts: Sequence[memoryview], skip_nbytes: int = 0) -> None:
        if berth.slab.read(berth.row.slot, parts, skip_nbytes):
            return
        if berth.slab.covers(berth.row.slot):
            raise OSError(errno.EIO, "the read ended short")
        raise CorruptFileError("the slab ends before this slot", berth.identity)

    def _header(self, berth: Berth, key: ChunkKey, scratch: Scratch) -> Header:
        try:
            return header_in_slot(scratch.header, key, self._digest, berth.slab.slot_nbytes, sums=self._sums)
        except BadHeaderError as error:
            raise CorruptFileError(str(error), berth.identity) from None

    def read_run(
        self, slab: Slab, first: int, keys: Sequence[ChunkKey], buffers: Sequence[memoryview], scratch: Scratch
    ) -> list[bool]:
        """Fill buffers from slots side by side; which of them hold their verified chunk. The others hold anything."""
        payload_nbytes = slab.slot_nbytes - HEADER_NBYTES
        parts: list[memoryview] = []
        for page, buffer in zip(scratch.headers, buffers, strict=False):
            parts += (page, buffer[:payload_nbytes])
        try:
            if not slab.read(first, parts):
                return [False] * len(keys)
        except OSError:
            return [False] * len(keys)  # one bad sector: each is read by itself
        proofs = payloads_in_slots(scratch.all_headers, keys, self._digest, slab.slot_nbytes, sums=self._sums)
        return [self._is_right(buffer, proof) for buffer, proof in zip(buffers, proofs, strict=True)]

    def _is_right(self, buffer: memoryview, proof: tuple[int, bytes] | None) -> bool:
        if proof is None:
            return False
        nbytes, payload_sum = proof
        payload = buffer if len(buffer) == nbytes else buffer[:nbytes]
        if not hmac.compare_digest(self._sums.of(payload), payload_sum):
            return False
        if len(buffer) > nbytes:
            zero(buffer, nbytes)
        return True
