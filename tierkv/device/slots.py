"""Primary slots as memory that a device copies to and from: in pieces, page-locked where the device can."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from tierkv.device.runtime import DeviceRuntime, HostKind, HostTrimmer, Memory, Pin
from tierkv.errors import TierError

logger = logging.getLogger(__name__)

PIECE_NBYTES = 1 << 30
"""At most this much is allocated or page-locked by one call: larger ones fail on some drivers with memory to spare."""

_PAGE_NBYTES = 4096


class HostSlots:
    """Slots of equal length in one or several pieces of host memory; a slot never crosses from one into another.

    Args:
        pieces: all but the last hold ``slots_per_piece`` slots.
        stride_nbytes: distance of slots.
        slots_per_piece: slots of each piece but the last.

    Attributes:
        kind: how a device reaches them; :meth:`register` may change it.
    """

    def __init__(self, pieces: Sequence[Memory], stride_nbytes: int, slots_per_piece: int) -> None:
        self.pieces = tuple(pieces)
        self.stride_nbytes = stride_nbytes
        self.slots_per_piece = slots_per_piece
        self.n_slots = sum(piece.nbytes // stride_nbytes for piece in self.pieces)
        self.kind = self.pieces[0].kind or HostKind.PAGEABLE
        self._pins: list[Pin] = []

    @classmethod
    def over(cls, buffer: memoryview, stride_nbytes: int) -> HostSlots:
        """Slots in memory that somebody else has mapped; it stays theirs, and must outlive all copies."""
        n_slots = len(buffer) // stride_nbytes
        whole = buffer[: n_slots * stride_nbytes]
        return cls([Memory(address_of(whole), len(whole), whole, HostKind.PAGEABLE)], stride_nbytes, max(1, n_slots))

    @classmethod
    def allocate(
        cls, runtime: DeviceRuntime, n_slots: int, stride_nbytes: int, *, piece_nbytes: int = PIECE_NBYTES
    ) -> HostSlots:
        """Slots in the device's own host memory; what was allocated is let go if a later piece fails.

        Args:
            runtime: whose memory.
            n_slots: how many.
            stride_nbytes: distance of slots, a multiple of 4096.
            piece_nbytes: at most this much at a time, but at least a slot.

        Raises:
            TierError: the device has no such memory, or not enough.
        """
        if stride_nbytes % _PAGE_NBYTES or n_slots < 1:
            raise TierError(
                "device", f"{n_slots} slots of {stride_nbytes} bytes: must be at least 1, of 4096-byte pages"
            )
        per_piece = min(n_slots, max(1, piece_nbytes // stride_nbytes))
        pieces: list[Memory] = []
        try:
            pieces.extend(
                _aligned(runtime, min(per_piece, n_slots - first) * stride_nbytes)
                for first in range(0, n_slots, per_piece)
            )
        except TierError:
            pieces.clear()
            if isinstance(runtime, HostTrimmer):  # or ordinary memory in its place would be taken on top
                runtime.trim_host()
            raise
        return cls(pieces, stride_nbytes, per_piece)

    def register(self, runtime: DeviceRuntime, *, piece_nbytes: int = PIECE_NBYTES) -> bool:
        """Page-lock all pieces, or none: whatever was locked is released again if one part cannot be.

        Args:
            runtime: which device is to reach them.
            piece_nbytes: at most this much at a time, but at least a slot.

        Returns:
            Whether copies run beside the host now.
        """
        if self.kind is not HostKind.PAGEABLE:
            return True
        pins: list[Pin] = []
        # Whole slots: drivers may refuse a copy that crosses from one locked range into the next.
        part_nbytes = max(1, piece_nbytes // self.stride_nbytes) * self.stride_nbytes
        for piece in self.pieces:
            for start in range(0, piece.nbytes, part_nbytes):
                n = min(part_nbytes, piece.nbytes - start)
                pin = runtime.pin(Memory(piece.address + start, n, piece.owner, HostKind.PAGEABLE))
                if pin is None:
                    _release(pins)
                    return False
                pins.append(pin)
        self._pins, self.kind = pins, HostKind.REGISTERED
        self.pieces = tuple(Memory(p.address, p.nbytes, p.owner, self.kind) for p in self.pieces)
        return True

    def close(self) -> None:
        """Undo the page locks and let go of the memory. No copy may be under way. Idempotent."""
        _release(self._pins)
        self._pins, self.pieces, self.n_slots = [], (), 0

    def view(self, slot: int) -> memoryview:
        """Writable bytes of one slot; valid until :meth:`close`. Raises IndexError outside ``range(n_slots)``."""
        if not 0 <= slot < self.n_slots:
            raise IndexError(f"slot {slot} is not in range({self.n_slots})")
        piece, index = divmod(slot, self.slots_per_piece)
        return bytes_at(self.pieces[piece]).data[index * self.stride_nbytes :][: self.stride_nbytes]


def _aligned(runtime: DeviceRuntime, nbytes: int) -> Memory:
    memory = runtime.alloc_host(nbytes)
    if memory.address % _PAGE_NBYTES:
        raise TierError("device", f"{runtime.name} gave host memory at {memory.address:#x}: not aligned to 4096")
    return memory


def address_of(buffer: memoryview) -> int:
    """Where a writable buffer begins."""
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]) if len(buffer) else 0


def bytes_at(memory: Memory) -> Any:
    """The memory as an array of ``uint8``, whatever its owner is. Valid as long as the owner lives."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * memory.nbytes).from_address(memory.address)), np.uint8)


def _release(pins: list[Pin]) -> None:
    for pin in reversed(pins):
        try:
            pin.release()
        except Exception as error:  # noqa: BLE001 - the others must be released all the same
            logger.warning("A page lock could not be released: %r", error)
