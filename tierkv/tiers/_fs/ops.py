"""The blocking side of the fs tier's calls: what one worker does with one chunk. Every outcome is a value."""

from __future__ import annotations

import errno
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from tierkv.errors import ChunkSizeError, CorruptChunkError, TierReadError, TierWriteError
from tierkv.tiers._fs.books import Books, Held
from tierkv.tiers._fs.dirs import NotRegularError
from tierkv.tiers._fs.file_io import NO_SPACE, ChunkFiles, CorruptFileError, Identity, LeftoverError, Tally
from tierkv.tiers._fs.format import charge_nbytes, file_name, fits_a_header
from tierkv.tiers._fs.leavers import shrink_leaver
from tierkv.tiers._fs.leftovers import Leftovers
from tierkv.tiers._fs.lookup import MOST_MOVES, Lookups
from tierkv.tiers._fs.memory import Scratch
from tierkv.tiers._fs.owners import Ownership
from tierkv.tiers._fs.settle import Settlement
from tierkv.tiers._fs.slab import Slab
from tierkv.tiers._fs.store import Store
from tierkv.types import Chunk, ChunkKey, Outcome, Reason, Status

_log = logging.getLogger(__name__)

_MISSING: Final = Status.MISSING
_IN_THE_WAY: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST})
_LEAVER_PARTS: Final = 16
"""A slab that nobody can read makes room in about so many steps: each reads its whole catalogue."""
_DENIED_IN_A_ROW: Final = 3
"""Writes that a file system with room to spare refuses for want of it before that counts as full."""


class Operations:
    """Reads, writes and removes chunks of one open tier.

    Concurrency: any thread, on different keys.
    """

    def __init__(
        self, name: str, root_fd: int, *, files: ChunkFiles, store: Store, books: Books, ownership: Ownership,
        settlement: Settlement, lookups: Lookups, leftovers: Leftovers, tally: Tally, chunk_nbytes: int,
        spare_nbytes: Callable[[], int],
    ) -> None:  # fmt: skip
        self._name = name
        self._root_fd = root_fd
        self._files = files
        self._store = store
        self._books = books
        self._ownership = ownership
        self._settlement = settlement
        self._lookups = lookups
        self._leftovers = leftovers
        self._tally = tally
        self._chunk_nbytes = chunk_nbytes
        self._spare_nbytes = spare_nbytes
        self._room_lock = threading.Lock()
        self._n_denied = 0
        self._stale: deque[tuple[ChunkKey, str, Held]] = deque()
        """Earlier copies that could not be removed, charged as fixed."""

    def read_some(
        self, items: Sequence[tuple[ChunkKey, memoryview]], outcomes: list[Outcome | None], indices: Iterable[int],
        scratch: Scratch,
    ) -> None:  # fmt: skip
        """One worker's part of a batch: take indices until none is left."""
        for i in indices:
            outcomes[i] = self.read(*items[i], scratch)

    def write_some(
        self, items: Sequence[tuple[Chunk, memoryview]], outcomes: list[Outcome | None], indices: Iterable[int],
        scratch: Scratch,
    ) -> None:  # fmt: skip
        """One worker's part of a batch, each chunk into a file: take indices until none is left."""
        for i in indices:
            outcomes[i] = self._write(*items[i], scratch)

    def delete_some(self, errors: dict[ChunkKey, OSError], keys: Iterator[ChunkKey]) -> None:
        """One worker's part of a batch; ``errors`` takes what could not be removed."""
        for key in keys:
            self._delete(key, errors)

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [found is not None for found in self._lookups.probe(keys)]

    def read(self, key: ChunkKey, buffer: memoryview, scratch: Scratch) -> Outcome:
        """Fill the buffer, or say why not."""
        for _ in range(MOST_MOVES):
            held = self._books.get(key)
            outcome = self._read(key, held, buffer, scratch)
            if outcome.status is not _MISSING or self._books.get(key) == held:
                return outcome
            # It was written anew in another slot while we looked into the earlier one.
        return Outcome(key, _MISSING)

    def _read(self, key: ChunkKey, held: Held | None, buffer: memoryview, scratch: Scratch) -> Outcome:
        for owner in self._lookups.owners_of(key):
            ours = self._ownership.number_of(owner) is not None
            try:
                self._store.read(key, owner, held, as_bytes(buffer), scratch, touch=ours)
            except FileNotFoundError:
                self._lookups.forget(key, owner, held, "vanished")
            except NotRegularError:
                if not (ours and self._try_to_remove(key, owner, held, None)):
                    self._lookups.forget(key, owner, held, "not_regular")
                elif held is not None:
                    self._tally.add("not_regular")
            except CorruptFileError as error:
                return self._corrupt(key, owner, held, error)
            except (ChunkSizeError, OSError) as error:
                self._tally.add("failed_reads")
                return Outcome(key, Status.FAILED, Reason.TIER_ERROR, _because(TierReadError, self._name, key, error))
            else:
                return Outcome(key, Status.OK)
        return Outcome(key, _MISSING)

    def _write(self, chunk: Chunk, buffer: memoryview, scratch: Scratch) -> Outcome:
        refused = self.unfit(chunk, buffer)
        if refused is not None:
            return refused
        charge = charge_nbytes(chunk.nbytes)
        refusal = self._refusal(charge)
        if refusal is not None:
            return Outcome(chunk.key, Status.REFUSED, refusal)
        try:
            owner = self._ownership.id
            self._leftovers.settle(file_name(chunk.key, owner))
            self._files.write(chunk, as_bytes(buffer), owner, scratch)
        except OSError as error:
            if isinstance(error, LeftoverError):
                self._leftovers.add(error.leaf, error.name, error.names, charge)
            self._books.abort_write(charge)
            return self.failed_write(chunk.key, charge, error)
        except BaseException:
            self._books.abort_write(charge)
            raise
        return self._written(chunk.key, owner, charge)

    def unfit(self, chunk: Chunk, buffer: memoryview) -> Outcome | None:
        """Why this chunk is not taken, whatever room there is."""
        if len(buffer) < chunk.nbytes:
            error = ChunkSizeError(f"{self._name}: a buffer of {len(buffer)} bytes for a chunk of {chunk.nbytes}")
            return Outcome(chunk.key, Status.FAILED, Reason.TIER_ERROR, error)
        if chunk.nbytes > self._chunk_nbytes or not fits_a_header(chunk):
            return Outcome(chunk.key, Status.REFUSED, Reason.TOO_LARGE)
        if not self._settlement.writable:
            return Outcome(chunk.key, Status.REFUSED, Reason.SCANNING)
        return None

    def failed_write(self, key: ChunkKey, charge: int, error: OSError) -> Outcome:
        """What the file system said; nothing is left behind, and nothing charged."""
        if error.errno in NO_SPACE:
            self._no_room(charge)
            return Outcome(key, Status.REFUSED, Reason.NO_SPACE)
        self._tally.add("failed_writes")
        return Outcome(key, Status.FAILED, Reason.TIER_ERROR, _because(TierWriteError, self._name, key, error))

    def _written(self, key: ChunkKey, owner: str, charge: int) -> Outcome:
        """The chunk's file is whole and can be found: count it, and put an earlier copy away that lies elsewhere."""
        number = self._ownership.number_of(owner)
        assert number is not None
        old = self._books.end_write(key, number, owner, charge)
        if old is not None:
            self._replaced(key, old, (number, None))
        self._n_denied = 0
        self._lookups.found(key)
        return Outcome(key, Status.OK)

    def all_written(self, keys: Sequence[ChunkKey], slab: Slab, slots: Sequence[int]) -> list[Outcome]:
        """As ``_written``, of chunks in slots side by side."""
        number = self._ownership.number_of(slab.owner)
        assert number is not None
        for old, key, at in zip(
            self._books.end_writes(keys, number, slab.owner, slab.slot_nbytes, slots), keys, slots, strict=True
        ):
            if old is not None:
                self._replaced(key, old, (number, at))
            self._lookups.found(key)
        self._n_denied = 0
        return [Outcome(key, Status.OK) for key in keys]

    def _replaced(self, key: ChunkKey, old: Held, now_at: tuple[int, int | None]) -> None:
        """An earlier copy goes, if it lies elsewhere."""
        elsewhere = (old.number, old.at) != now_at
        if elsewhere and self._try_to_remove(key, self._ownership.ids[old.number], old, None) is None:
            self._books.add_fixed(old.nbytes)  # it stays, so it counts, though nobody may use it
            self._stale.append((key, self._ownership.ids[old.number], old))
        self._books.abort_write(old.nbytes)

    def retry(self) -> None:
        """Put away earlier copies that could not be when they were replaced; the first that still cannot ends it."""
        while self._stale:
            key, owner, old = self._stale[0]
            try:
                if not self._store.remove(key, owner, old):
                    self._store.reclaim(owner, old)
            except OSError:
                return
            self._books.add_fixed(-old.nbytes)
            self._stale.popleft()

    def _refusal(self, charge: int) -> Reason | None:
        """Why there is no room for a file; None once its bytes are charged."""
        if self._spare_nbytes() < charge:
            self._no_room(charge)
            return Reason.NO_SPACE
        while not self._books.start_write(charge):
            if not self.make_room():
                return Reason.FULL
        return None

    def _no_room(self, charge: int) -> None:
        """The file system is full: hold no more than we do, so that the ledger makes room within its share.

        At once where the file system says so itself; where it does not (a quota), after a few writes in a row.
        """
        self._tally.add("no_space")
        self._n_denied += 1
        spare_nbytes = self._spare_nbytes()
        if spare_nbytes < charge:
            self._books.grow_by_at_most(max(0, spare_nbytes))
        elif self._n_denied >= _DENIED_IN_A_ROW:
            self._books.grow_by_at_most(0)

    def make_room(self) -> bool:
        """Remove a file that nobody alive can read, or a part of such a slab; False if there is none, or it stays."""
        with self._room_lock:
            if not self._books.leavers:
                return False
            leaver = self._books.leavers.popleft()
            left = shrink_leaver(self._root_fd, leaver, max(self._chunk_nbytes, leaver.nbytes // _LEAVER_PARTS))
            if left is leaver:
                self._books.leavers.append(leaver)
                return False
            if left is not None:
                self._books.add_leaver(left, first=True)
            self._books.drop_leaver(leaver)
            self._tally.add("leavers_removed")
            return True

    def _delete(self, key: ChunkKey, errors: dict[ChunkKey, OSError]) -> None:
        for owner in self._lookups.owners_of(key):
            if self._ownership.number_of(owner) is None:
                continue  # another owner's: we forget it, that owner keeps it
            held = self._books.get(key)
            if held is None and not self._books.claim(key, owner):
                continue
            try:
                removed = self._lookups.remove(key, owner, held)
            except OSError as error:
                if error.errno not in _IN_THE_WAY:
                    self._tally.add("failed_deletes")
                    errors[key] = error.with_traceback(None)
                    continue
                removed = False  # a directory with something in it: ours is gone, and that is somebody's
            if not removed:
                self._lookups.forget(key, owner, held, "vanished")
            elif held is not None:
                self._tally.add("deleted")

    def _corrupt(self, key: ChunkKey, owner: str, held: Held | None, error: CorruptFileError) -> Outcome:
        if self._ownership.number_of(owner) is None:
            self._lookups.shun(key, owner, error.identity)
        elif held is not None and self._books.get(key) != held:
            return Outcome(key, _MISSING)  # removed while it was read, and perhaps written anew in the same place
        else:
            removed = self._try_to_remove(key, owner, held, error.identity)
            if removed is False:
                return Outcome(key, _MISSING)  # another read found it first, or a write has replaced it
        count = self._tally.add("corrupt")
        if count & (count - 1) == 0:  # 1, 2, 4, 8, ... : a dying disk must not fill the log too
            # Not the exception itself: its traceback holds the slot's buffer for as long as somebody keeps the record.
            _log.warning("%s: corrupt chunk file (%s); %d so far", self._name, str(error), count)
        cause = CorruptChunkError(self._name, str(error), [key])
        return Outcome(key, Status.CORRUPT, Reason.CORRUPT, cause)

    def _try_to_remove(self, key: ChunkKey, owner: str, held: Held | None, identity: Identity | None) -> bool | None:
        """Remove what lies at a path of ours; False if it is gone or another file by now, None if it cannot be."""
        try:
            return self._lookups.remove(key, owner, held, identity=identity)
        except OSError as error:
            # Not the exception itself, as above.
            _log.warning("%s: cannot remove what lies at a chunk's path: %s", self._name, str(error))
            return None


def as_bytes(buffer: memoryview) -> memoryview:
    return buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")


def _because(kind: type[TierReadError | TierWriteError], name: str, key: ChunkKey, error: Exception) -> Exception:
    """What an outcome carries: no traceback, since its frames hold the caller's buffer as long as the outcome lives."""
    error = error.with_traceback(None)
    if isinstance(error, ChunkSizeError):
        return error
    wrapped = kind(name, str(error), [key])
    wrapped.__cause__ = error
    return wrapped
