"""The control page: a few shared words in which workers tell the scheduler's side what vLLM has no words for.

For each rank, slot and direction a worker writes the ticket of the last copy that has ended and whether it went well,
since a vLLM worker that reports a failure stops the engine. And each rank writes, once, the digests of its model and of
its memory layout, since the scheduler's side of vLLM sees neither.

Each word has one writer (the worker of its rank) and is stored and loaded whole: an aligned 8-byte word is never seen
half-written. Standard library only, so that tests and tools need no vLLM.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Iterable, Sequence
from enum import Enum, IntEnum
from typing import NamedTuple

from tierkv.errors import ClosedError, ConfigError
from tierkv.settings import parse_count
from tierkv.tiers._mapping import SlotMapping
from tierkv.tiers._pool import JOIN_DEADLINE_S, join_memory, serve_memory
from tierkv.tiers._rendezvous import MAX_RANK, Geometry, Member, Purpose, Role, is_served, new_generation
from tierkv.tiers._server import Server

DIGEST_NBYTES = 32
MAX_TICKET = (1 << 63) - 1

# The page: for each rank 128 bytes of identity, then for each direction, rank and slot two words.
_RANK_NBYTES = 128  # two cache lines: the word that says "present", and at 64 the model's and the layout's digest
_MODEL_AT, _LAYOUT_AT = 64, 64 + DIGEST_NBYTES
_REORDERS = os.uname().machine not in {"x86_64", "i686", "i386"}
"""Whether this processor lets a load overtake a load, or a store a store. x86 does neither."""
_WORDS = 2  # last ticket that ended << 1 | whether it went well; last ticket that failed
_WORD_NBYTES = 8
_MAX_RANKS, _MAX_SLOTS = 1 << 16, 1 << 40


class Direction(IntEnum):
    """Of a copy between a device and a slot; tickets of the two rise independently."""

    STORE = 0
    LOAD = 1


class CopyStatus(Enum):
    """What the stamps of all ranks say about one ticket."""

    PENDING = "pending"
    """Some rank has not stamped it: its copy may still be running."""
    OK = "ok"
    FAILED = "failed"
    """All ranks' copies have ended and at least one of them failed."""


class Identities(NamedTuple):
    """The digests that all ranks have published, by rank."""

    models: tuple[bytes, ...]
    layouts: tuple[bytes, ...]


class ControlPage:
    """Stamps and identities of one engine's workers, over shared memory or one process's own.

    Made by :meth:`create` in worker rank 0 and by :meth:`join` in the others and in the scheduler, which may all be one
    process; or by :meth:`private` where both sides hold the same object.

    Stamps mean something only if copies end in the order of their tickets: one direction's copies of one rank do, as
    they run on one stream. Then a stamp of at least ``t`` says that every copy up to ``t`` on that slot has ended.

    Concurrency: a rank's words of one direction are written by one thread of one process; anybody may read at any time.
    What a worker wrote to a slot before its stamp is seen by whoever has read the stamp.
    """

    def __init__(
        self, mapped: mmap.mmap, n_ranks: int, n_slots: int, generation: int, held: Server | socket.socket | None
    ) -> None:
        """Use :meth:`create`, :meth:`join` or :meth:`private`."""
        self._memory = SlotMapping(mapped, 1, len(mapped))
        self._n_ranks, self._n_slots = n_ranks, n_slots
        self.generation = generation
        """128 random bits of the pool that this page belongs to, or of its own creation."""
        self._held = held
        self._closed = False
        self._lock = threading.Lock()
        self._bytes = self._memory.buffer
        self._words = self._bytes.cast("Q")
        first = n_ranks * _RANK_NBYTES // _WORD_NBYTES
        self._starts = [
            [first + (direction * n_ranks + rank) * n_slots * _WORDS for rank in range(n_ranks)]
            for direction in Direction
        ]

    @classmethod
    def create(cls, shared_id: str, *, n_ranks: int, n_slots: int, rank: int = 0, generation: int = 0) -> ControlPage:
        """Make the page and serve it until :meth:`close` or the end of this process.

        Args:
            shared_id: what the processes of one engine, and nobody else, have in common; a pool may be served under it
                as well.
            n_ranks: workers that copy; at least 1.
            n_slots: slots of the primary.
            rank: of this worker.
            generation: that of the pool it belongs to; 0 draws one.

        Raises:
            ConfigError: a number is wrong, or another page is served under this id (the message names its process).
        """
        geometry = _geometry(n_ranks, n_slots, generation or new_generation())
        member, nbytes = Member(Role.WORKER, parse_count("rank", rank, 0, n_ranks - 1)), _nbytes(n_ranks, n_slots)
        mapped, server = serve_memory(shared_id, geometry, member, nbytes)
        return cls(mapped, n_ranks, n_slots, geometry.generation, server)

    @classmethod
    def join(
        cls, shared_id: str, *, role: Role, rank: int, n_ranks: int, n_slots: int,
        generation: int = 0, deadline_s: float = JOIN_DEADLINE_S,
    ) -> ControlPage:  # fmt: skip
        """Map the page that worker rank 0 has made or is about to make; blocks until ``deadline_s``, 0 tries once.

        Raises:
            NotServedError: nobody serves it; another try may succeed.
            ConfigError: the creator refused: other numbers, another generation, or this (role, rank) has joined.
        """
        asked = _geometry(n_ranks, n_slots, generation)
        member = Member(role, parse_count("rank", rank, 0, n_ranks - 1 if role is Role.WORKER else MAX_RANK))
        mapped, membership = join_memory(shared_id, asked, member, deadline_s)
        if len(mapped) != _nbytes(n_ranks, n_slots):
            membership.connection.close()
            raise ConfigError(f"shared_id is {shared_id!r}, but its control page has {len(mapped)} bytes")
        return cls(mapped, n_ranks, n_slots, membership.geometry.generation, membership.connection)

    @classmethod
    def private(cls, *, n_ranks: int, n_slots: int, generation: int = 0) -> ControlPage:
        """A page in this process's own memory. Raises ConfigError if a number is wrong."""
        geometry = _geometry(n_ranks, n_slots, generation or new_generation())
        mapped = mmap.mmap(-1, _nbytes(n_ranks, n_slots))
        return cls(mapped, n_ranks, n_slots, geometry.generation, None)

    @property
    def n_ranks(self) -> int:
        return self._n_ranks

    @property
    def n_slots(self) -> int:
        return self._n_slots

    def creator_alive(self) -> bool:
        """False once the creator has closed the page or ended: nobody new will join, and its rank stamps no more."""
        held = self._held
        if self._memory.closed:
            return False
        return held is None or (held.open if isinstance(held, Server) else is_served(held))

    def stamp(self, rank: int, slot: int, direction: Direction, ticket: int, *, ok: bool) -> None:
        """Say that this rank's copy under ``ticket`` has ended; as :meth:`stamp_many` for one slot."""
        self.stamp_many(rank, direction, (slot,), (ticket,), ok=ok)

    def stamp_many(
        self, rank: int, direction: Direction, slots: Sequence[int], tickets: Sequence[int], *, ok: bool
    ) -> None:
        """Say that this rank's copies under these tickets have ended, all well or all badly.

        To be called after the event behind the copies, and whether or not they went well: a ticket that is never
        stamped keeps its slot in quarantine for ever.

        Raises:
            ValueError: a ticket is not above the slot's last one; the slots before it have been stamped.
            IndexError: no such rank or slot; nothing has been stamped.
        """
        words, start = self._opened(), self._start(rank, direction)
        places = [start + place for place in self._places(slots)]
        self._fence()  # the slots' bytes are there before the stamps that vouch for them
        for place, ticket in zip(places, tickets, strict=True):
            if not words[place] >> 1 < ticket <= MAX_TICKET:
                raise ValueError(f"slot {(place - start) // _WORDS}: ticket {ticket} after {words[place] >> 1}")
            if not ok:
                words[place + 1] = ticket
                self._fence()  # whoever sees the stamp sees the failure
            words[place] = ticket << 1 | ok

    def status(self, slot: int, direction: Direction, ticket: int) -> CopyStatus:
        """What all ranks say about one ticket.

        If a rank has stamped a later ticket of the slot meanwhile, this one went well there unless it is the last
        that failed, or one before it: then nobody knows, and the answer is ``FAILED``.
        """
        return self.statuses(direction, (slot,), (ticket,))[0]

    def statuses(self, direction: Direction, slots: Sequence[int], tickets: Sequence[int]) -> list[CopyStatus]:
        """As :meth:`status`, for many slots: about 0.2 us for each and 0.1 us more for each further rank."""
        words, starts = self._opened(), self._starts[direction]
        places = self._places(slots)
        good = [ticket << 1 | 1 for ticket in tickets]
        if all([words[start + place] for place in places] == good for start in starts):
            found = [CopyStatus.OK] * len(places)
        else:
            found = [
                self._status(words, [start + place for start in starts], ticket)
                for place, ticket in zip(places, tickets, strict=True)
            ]
        self._fence()  # whoever now reads a slot reads what its stamp vouches for
        return found

    def all_ok(self, direction: Direction, slots: Sequence[int], ticket: int) -> bool:
        """Whether exactly this ticket is every rank's latest on each of these slots, and went well: the usual case.

        Raises:
            IndexError: no such slot.
        """
        if self._closed:
            self._opened()
        words, n_slots, good = self._words, self._n_slots, ticket << 1 | 1
        for start in self._starts[direction]:
            for slot in slots:
                if not 0 <= slot < n_slots:
                    raise IndexError(f"slot {slot} is not in range({n_slots})")
                if words[start + slot * _WORDS] != good:
                    return False
        if _REORDERS:
            self._fence()  # whoever now reads a slot reads what its stamp vouches for
        return True

    def ended(self, slot: int, direction: Direction, ticket: int) -> bool:
        """True if no rank's copy of the slot up to ``ticket`` runs any more, well or badly."""
        return self.status(slot, direction, ticket) is not CopyStatus.PENDING

    def publish_identity(self, rank: int, model: bytes, layout: bytes) -> None:
        """Say once which model and which layout this rank has; again is fine if it is the same.

        Raises:
            ValueError: a digest is not 32 bytes, or another one has been published for this rank.
            IndexError: no such rank.
        """
        words, at = self._opened(), self._rank_at(rank)
        if (len(model), len(layout)) != (DIGEST_NBYTES, DIGEST_NBYTES):
            raise ValueError(f"digests have {DIGEST_NBYTES} bytes, not {len(model)} and {len(layout)}")
        if words[at // _WORD_NBYTES]:
            if self._identity(at) != (model, layout):
                raise ValueError(f"rank {rank} has published another identity")
            return
        self._bytes[at + _MODEL_AT : at + _MODEL_AT + DIGEST_NBYTES] = model
        self._bytes[at + _LAYOUT_AT : at + _LAYOUT_AT + DIGEST_NBYTES] = layout
        self._fence()  # the digests are whole before they are announced
        words[at // _WORD_NBYTES] = 1

    def identities(self) -> Identities | None:
        """What the ranks have published; None until all have."""
        words = self._opened()
        places = [self._rank_at(rank) for rank in range(self._n_ranks)]
        if not all(words[at // _WORD_NBYTES] for at in places):
            return None
        self._fence()
        models, layouts = zip(*(self._identity(at) for at in places), strict=True)
        return Identities(models, layouts)

    def close(self) -> None:
        """Leave the page; for the creator also: close it to newcomers. Idempotent. Later calls raise ClosedError."""
        self._closed = True
        if self._held is not None:
            self._held.close()
        self._words.release()
        self._bytes.release()
        self._memory.close()

    def _opened(self) -> memoryview:
        if self._closed:
            raise ClosedError("the control page was closed")
        return self._words

    def _start(self, rank: int, direction: Direction) -> int:
        if not 0 <= rank < self._n_ranks:
            raise IndexError(f"rank {rank} is not in range({self._n_ranks})")
        return self._starts[direction][rank]

    def _rank_at(self, rank: int) -> int:
        if not 0 <= rank < self._n_ranks:
            raise IndexError(f"rank {rank} is not in range({self._n_ranks})")
        return rank * _RANK_NBYTES

    def _places(self, slots: Sequence[int]) -> list[int]:
        if slots and not 0 <= min(slots) <= max(slots) < self._n_slots:
            raise IndexError(f"slots {min(slots)} to {max(slots)} are not all in range({self._n_slots})")
        return [slot * _WORDS for slot in slots]

    def _identity(self, at: int) -> tuple[bytes, bytes]:
        model = bytes(self._bytes[at + _MODEL_AT : at + _MODEL_AT + DIGEST_NBYTES])
        return model, bytes(self._bytes[at + _LAYOUT_AT : at + _LAYOUT_AT + DIGEST_NBYTES])

    def _status(self, words: memoryview, places: Iterable[int], ticket: int) -> CopyStatus:
        failed = False
        for place in places:
            word = words[place]
            if word >> 1 < ticket:
                return CopyStatus.PENDING
            if word >> 1 == ticket:
                failed |= not word & 1
            else:
                self._fence()  # the failure was written before a stamp that we have seen
                failed |= words[place + 1] >= ticket
        return CopyStatus.FAILED if failed else CopyStatus.OK

    def _fence(self) -> None:
        """Order this thread's memory accesses before and after it, on processors that would not (ARM).

        Python has no fence, but letting a lock go is a release and taking it again an acquire, and no access passes
        both in order.
        """
        if not _REORDERS:
            return
        with self._lock:
            pass
        with self._lock:
            pass


def _nbytes(n_ranks: int, n_slots: int) -> int:
    return n_ranks * (_RANK_NBYTES + len(Direction) * n_slots * _WORDS * _WORD_NBYTES)


def _geometry(n_ranks: int, n_slots: int, generation: int) -> Geometry:
    parse_count("n_ranks", n_ranks, 1, _MAX_RANKS)
    parse_count("n_slots", n_slots, 1, _MAX_SLOTS)
    per_slot_nbytes = n_ranks * len(Direction) * _WORDS * _WORD_NBYTES
    return Geometry(Purpose.CONTROL, n_slots, per_slot_nbytes, generation)
