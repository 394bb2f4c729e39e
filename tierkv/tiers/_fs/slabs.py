"""All slabs of a namespace: whose they are, where a key lies in them, and room for the next chunk.

The space of a slab is charged slot by slot from the moment the file system is asked for it until it is given back:
slots with a chunk as that chunk, the others as idle. An idle slot is used again before a slab grows, and given back
only when this process holds more than its limit. A slab that cannot be written to any more, as its slots have another
length than our chunks need, gives back each slot that becomes free.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Final

from tierkv.tiers._fs.books import Books, Held
from tierkv.tiers._fs.catalogue import BadCatalogueError, Row, catalogue_nbytes, is_no_use
from tierkv.tiers._fs.file_io import as_far_as_there_is_room
from tierkv.tiers._fs.owners import Ownership
from tierkv.tiers._fs.remains import Remains
from tierkv.tiers._fs.slab import Berth, Slab
from tierkv.tiers._fs.slab_files import SlabFiles
from tierkv.types import ChunkKey

_log = logging.getLogger(__name__)

_STEP_NBYTES: Final = 64 << 20
"""A slab grows by so much: one call of the file system for many chunks."""
_LEAST_STEP: Final = 4


class Slabs:
    """The slabs of one namespace: ours, dead owners', and living ones' to read from.

    Args:
        slot_nbytes: what we write has slots of this length; None if we write files.
        usual_nbytes: what a slot of ours has, or would have.
        n_slots: most slots that our own slab may ever have; room for a catalogue of so many has been set aside.
        spare_nbytes: what the file system can still give.

    Concurrency: any thread, but ``look_around``, ``load`` and ``retire`` one at a time for each owner.
    """

    def __init__(
        self, files: SlabFiles, *, books: Books, ownership: Ownership, slot_nbytes: int | None, usual_nbytes: int,
        n_slots: int, spare_nbytes: Callable[[], int],
    ) -> None:  # fmt: skip
        self._files = files
        self._tally = files.tally
        self._books = books
        self._ownership = ownership
        self._slot_nbytes = slot_nbytes
        self._usual_nbytes = usual_nbytes
        self._n_slots = n_slots
        self._spare_nbytes = spare_nbytes
        self._slabs: dict[str, dict[int, Slab]] = {}
        self._remains = Remains(files, books)
        self._room_lock = threading.Lock()
        self._room_nbytes = 0 if slot_nbytes is None else catalogue_nbytes(n_slots)
        self._has_own_catalogue = False

    @property
    def any(self) -> bool:
        """Whether there is a slab at all."""
        return bool(self._slabs)

    # -- who --------------------------------------------------------------------------------------------------------

    def look_around(self) -> None:
        """Open what has appeared and let go of what is gone. Raises OSError: the directory cannot be listed."""
        for owner, slabs in list(self._slabs.items()):
            for slot_nbytes, slab in list(slabs.items()):
                if not slab.is_linked:
                    with self._room_lock:  # or one that is made meanwhile would be taken for its remains
                        del slabs[slot_nbytes]
                        if self._is_held(owner) and slab.is_loaded:  # else a scan may be mending it
                            self._lose(slab)
        for owner, slot_nbytes in self._files.listed():
            if slot_nbytes not in self._slabs.get(owner, ()) and (owner, slot_nbytes) not in self._remains:
                self._open_to_read(owner, slot_nbytes)

    def owners(self) -> set[str]:
        """Of every slab that lies here."""
        return {owner for owner, _ in self._files.listed()}

    def open_ones(self, owners: list[str]) -> dict[tuple[str, int], Slab] | None:
        """The slabs of these; None if one must be mended before it can be loaded."""
        there = [(owner, n) for owner, n in self._files.listed() if owner in owners]
        if not all(n in self._slabs.get(owner, ()) for owner, n in there):
            return None
        for which in there:
            self._files.tidy(*which)
        return {(owner, n): self._slabs[owner][n] for owner, n in there}

    def take_over(self, owner: str) -> bool:
        """Slabs without a living or dead owner become ours by a new name; False if we have some of that length."""
        there = self._files.listed()
        lengths = {slot_nbytes for its_owner, slot_nbytes in there if its_owner == owner}
        if any((self._ownership.id, slot_nbytes) in there for slot_nbytes in lengths):
            return False
        self._slabs.pop(owner, None)
        for slot_nbytes in lengths:
            self._files.rename(owner, self._ownership.id, slot_nbytes)
        return True

    def fit_catalogue(self) -> None:
        """Before anything is looked up: our own slab gets a catalogue for as many slots as it may have."""
        slab = self._slabs.get(self._ownership.id, {}).get(self._slot_nbytes or 0)
        if slab is None:
            return
        if not slab.catalogue.n_slots // 2 <= self._n_slots <= slab.catalogue.n_slots:
            try:
                self._add(self._files.resize(slab, self._n_slots))
            except (BadCatalogueError, OSError) as error:
                _log.warning("slab of owner %s: its catalogue stays as large as it is: %s", slab.owner, str(error))

    def load(self, owner: str, stopped: Callable[[], bool]) -> Iterator[tuple[Slab, list[Row]]]:
        """What lies in an owner's slabs, in pieces. Raises OSError: try again.

        Then what they occupy besides is charged, if the owner's id is ours; else ``besides_nbytes`` tells of it.
        """
        for its_owner, slot_nbytes in sorted(self._files.listed()):
            if its_owner != owner:
                continue
            self._files.tidy(owner, slot_nbytes)
            if not slot_nbytes:
                continue  # a file system was tried, no more
            slab = self._slabs.get(owner, {}).get(slot_nbytes)
            if slab is None or not (slab.is_loaded or slab.is_linked):
                slab = self._open_or_mend(owner, slot_nbytes, stopped)
            if slab is not None:
                known = slab.is_loaded
                try:
                    for rows in slab.load():
                        yield slab, rows
                except BadCatalogueError as error:  # cut since we opened it: the next try will mend it
                    self._slabs.get(owner, {}).pop(slot_nbytes, None)
                    if known and self._is_held(owner):
                        self._uncount(slab)
                    raise OSError(errno.EIO, f"catalogue: {error}") from None
                if not known and self._is_held(owner):
                    self.count(slab)

    def besides_nbytes(self, owner: str) -> int:
        """What the slabs of a dead owner that is not ours occupy besides chunks."""
        slabs = self._slabs.get(owner, {}).values()
        slabs_nbytes: int = sum(slab.catalogue.nbytes + slab.n_idle * slab.slot_nbytes for slab in slabs)
        return slabs_nbytes + sum(self._remains.of(owner).values())

    def give_back_idle(self, owner: str) -> None:
        """A dead owner's idle slots. Raises OSError."""
        for slab in self._slabs.get(owner, {}).values():
            slab.give_back(slab.n_slots)

    def forget(self, owner: str) -> None:
        """It is somebody else's to change, and to count, from now on: open anew what is needed of it."""
        self._slabs.pop(owner, None)
        self._remains.forget(owner)

    def retire(self, owner: str) -> bool:
        """Remove the slabs of an owner none of whose chunks are left; False if one is being written, or stays."""
        with self._room_lock:
            slabs = self._slabs.get(owner, {})
            if any(slab.n_taken for slab in slabs.values()):
                return False
            self._slabs.pop(owner, None)
        for slot_nbytes in {*slabs, *self._remains.of(owner)}:
            self._remains.remove(owner, slot_nbytes)
            if slot_nbytes in slabs and self._is_held(owner):
                self._uncount(slabs[slot_nbytes])
        return not self._remains.of(owner)

    def retry(self) -> None:
        """Try again to remove what was given up and could not be."""
        with self._room_lock:
            self._remains.retry()

    def close(self) -> None:
        """Let go of every file. Nothing is under way any more."""
        self._slabs.clear()

    # -- where ------------------------------------------------------------------------------------------------------

    def find(self, key: ChunkKey, owner: str, held: Held | None = None) -> Berth | None:
        """Where an owner has a key, as its catalogue says now; None if nowhere. Raises OSError."""
        if held is not None:
            slab = None if held.at is None else self.at(owner, held.nbytes)
            row = None if slab is None or held.at is None else slab.row_of(held.at, key)
            return None if slab is None or row is None else Berth(slab, row)
        if owner not in self._slabs and not self._is_held(owner):
            # Seen by the heartbeat sooner or later; a slab as young as this one has slots like ours as a rule.
            self._open_to_read(owner, self._usual_nbytes)
        for slab in list(self._slabs.get(owner, {}).values()):
            row = slab.catalogue.find(key)
            if row is not None and slab.covers(row.slot):
                return Berth(slab, row)
        return None

    def at(self, owner: str, slot_nbytes: int) -> Slab | None:
        """An owner's slab."""
        return self._slabs.get(owner, {}).get(slot_nbytes)

    def free(self, berth: Berth, key: ChunkKey, *, keep_slot: bool = True) -> bool:
        """Remove a chunk. Its bytes are idle or gone afterwards, and still charged as the chunk's. False: it was gone.

        Without ``keep_slot`` they are gone. A process over its limit keeps none either.

        Raises OSError: it stays.
        """
        slab, slot = berth.slab, berth.row.slot
        if not slab.erase(slot, key, berth.row.line):
            return False
        if keep_slot and self._is_written(slab) and self._books.used_nbytes <= self._books.limit_nbytes:
            self._books.add_idle(slab.slot_nbytes)
            slab.release(slot)
            return True
        try:
            slab.discard(slot)
        except OSError as error:
            _log.warning("slab of owner %s: cannot give back the space of a slot: %s", slab.owner, str(error))
            self._books.add_fixed(slab.slot_nbytes)  # it stays, so it counts, though nobody may use it
        return True

    def reclaim(self, owner: str, held: Held) -> bool:
        """A slot of ours whose row somebody else cleared is idle; the chunk is charged, too, until the caller drops it.

        False if we cleared it ourselves: whoever did has yet to say that the slot is idle, and drops the chunk.
        """
        slab = self.at(owner, held.nbytes)
        if slab is None or held.at is None or not slab.is_loaded:
            return True  # what is loaded later finds no row
        if not slab.reclaim(held.at):
            return False
        self._books.add_idle(slab.slot_nbytes)
        slab.release(held.at)
        return True

    # -- room -------------------------------------------------------------------------------------------------------

    def take(self, n: int) -> tuple[Slab, range] | None:
        """Up to ``n`` slots side by side, charged as being written; None if not one fits into our limit.

        Raises OSError: the file system has no room, though our limit has.
        """
        assert self._slot_nbytes is not None
        with self._room_lock:
            while n > 1 and not self._books.fits(n * self._slot_nbytes):
                n //= 2
            if not self._books.fits(n * self._slot_nbytes):
                return None
            taken = self._take_idle(n)
            if taken is None and self._grow():
                taken = self._take_idle(n)
            if taken is not None:
                self._books.start_slots(len(taken[1]) * self._slot_nbytes)
            return taken

    def undo(self, slab: Slab, slot: int) -> None:
        """A slot that was taken and holds no chunk after all."""
        self._books.add_idle(slab.slot_nbytes)
        self._books.abort_write(slab.slot_nbytes)
        slab.release(slot)

    def give_back(self, nbytes: int) -> int:
        """Bring so many bytes of idle slots back to the file system, or what there is; how many. Raises OSError."""
        given = 0
        for slab in self._all_held():
            if given < nbytes and slab.is_loaded:
                n = slab.give_back(-(-(nbytes - given) // slab.slot_nbytes))
                self._books.add_idle(-n * slab.slot_nbytes)
                given += n * slab.slot_nbytes
        return given

    def most_nbytes(self) -> int:
        """What chunks of ours may occupy if we write slots: a catalogue has rows for no more, whatever our limit is."""
        assert self._slot_nbytes is not None
        written = [slab for slab in self._all_held() if self._is_written(slab)]
        n_slots = sum(slab.catalogue.n_slots for slab in written)
        n_slots += 0 if any(map(self._is_own, written)) else self._n_slots
        elsewhere_nbytes = self._books.chunks_nbytes - sum(slab.n_taken for slab in written) * self._slot_nbytes
        return n_slots * self._slot_nbytes + max(0, elsewhere_nbytes)

    def _take_idle(self, n: int) -> tuple[Slab, range] | None:
        for slab in self._all_held():
            slots = slab.take(n) if self._is_written(slab) else None
            if slots:
                return slab, slots
        return None

    def _grow(self) -> bool:
        """Raises OSError."""
        assert self._slot_nbytes is not None
        # No more than a sixteenth of all that it may ever have: idle, it would be missing in other namespaces.
        wanted = max(_LEAST_STEP, min(_STEP_NBYTES // self._slot_nbytes, self._n_slots // 16))
        n = self._books.start_growth(wanted, self._slot_nbytes)
        given = 0
        try:
            allowed = min(n, self._spare_nbytes() // self._slot_nbytes)
            if n and allowed <= 0:
                raise OSError(errno.ENOSPC, "no room but what is left to others")
            for slab in self._all_held():
                if self._is_written(slab) and slab.is_loaded and not given:
                    given = as_far_as_there_is_room(slab.grow, allowed)
            if not given and allowed > 0:
                given = as_far_as_there_is_room(self._own().grow, allowed)
        finally:
            self._books.add_idle((given - n) * self._slot_nbytes)
        return given > 0

    def _own(self) -> Slab:
        """The slab of the id that we write under, made if need be. Raises OSError."""
        assert self._slot_nbytes is not None
        slab = self._slabs.get(self._ownership.id, {}).get(self._slot_nbytes)
        if slab is None:
            which = (self._ownership.id, self._slot_nbytes)
            if which in self._remains:
                self._remains.remove(*which)  # or what is left is in the way for ever
            try:
                slab = self._files.make(*which, self._n_slots)
            except OSError as error:
                if error.errno != errno.EEXIST:
                    self._remains.remove(*which)  # what it had made and could not remove is known from now on
                raise
            for _ in slab.load():
                pass
            self._has_own_catalogue = True
            self._add(slab)
        return slab

    def _all_held(self) -> list[Slab]:
        return [slab for owner in self._ownership.held_ids() for slab in list(self._slabs.get(owner, {}).values())]

    def _is_held(self, owner: str) -> bool:
        return self._ownership.number_of(owner) is not None

    def _is_written(self, slab: Slab) -> bool:
        return slab.slot_nbytes == self._slot_nbytes and self._is_held(slab.owner)

    def _is_own(self, slab: Slab) -> bool:
        return slab.owner == self._ownership.id and slab.slot_nbytes == self._slot_nbytes

    def count(self, slab: Slab) -> None:
        """A slab of ours was loaded: charge what it occupies besides chunks. Raises OSError."""
        if self._is_written(slab):
            self._books.add_idle(slab.n_found_idle * slab.slot_nbytes)
        else:
            slab.give_back(slab.n_slots)
        if self._is_own(slab) and not self._has_own_catalogue:
            self._has_own_catalogue = True
            slab.catalogue_charge_nbytes = max(0, slab.catalogue.nbytes - self._room_nbytes)
        else:
            slab.catalogue_charge_nbytes = slab.catalogue.nbytes
        self._books.add_fixed(slab.catalogue_charge_nbytes)

    def _uncount(self, slab: Slab) -> None:
        self._books.add_idle(-slab.n_idle * slab.slot_nbytes)
        self._books.add_fixed(-slab.catalogue_charge_nbytes)
        self._has_own_catalogue = self._has_own_catalogue and not self._is_own(slab)

    def _open_or_mend(self, owner: str, slot_nbytes: int, stopped: Callable[[], bool]) -> Slab | None:
        """None if it is of no use and was removed. Raises OSError: try again."""
        try:
            try:
                slab = self._files.open(owner, slot_nbytes)
            except (BadCatalogueError, OSError) as error:
                if not is_no_use(error):
                    raise
                slab = self._files.mend(owner, slot_nbytes, self._n_slots, stopped)
        except (BadCatalogueError, OSError) as error:
            if not is_no_use(error):
                raise
            _log.warning("slab of owner %s cannot be used and is removed: %s", owner, str(error))
            self._remains.remove(owner, slot_nbytes)
            return None
        self._add(slab)
        return slab

    def _open_to_read(self, owner: str, slot_nbytes: int) -> None:
        """If it can be, now. Never in place of one that is there: a scan may just have begun to load that."""
        with contextlib.suppress(BadCatalogueError, OSError):
            slab = self._files.open(owner, slot_nbytes)
            self._slabs.setdefault(owner, {}).setdefault(slot_nbytes, slab)

    def _add(self, slab: Slab) -> None:
        self._slabs.setdefault(slab.owner, {})[slab.slot_nbytes] = slab
        self._remains.forget(slab.owner, slab.slot_nbytes)

    def _lose(self, slab: Slab) -> None:
        """Somebody removed a slab of ours; what was in it is gone, and what it occupied will be."""
        _log.warning("slab of owner %s: its files were removed", slab.owner)
        number = self._ownership.number_of(slab.owner)
        for key in self._books.keys():  # noqa: SIM118 - a copy of them
            held = self._books.get(key)
            if held is not None and held.at is not None and (held.number, held.nbytes) == (number, slab.slot_nbytes):
                self._books.drop(key, slab.owner)
                self._tally.add("vanished")
        self._remains.remove(slab.owner, slab.slot_nbytes)  # half of a pair would be in the way, and counted by nobody
        self._uncount(slab)
