"""Answers about keys that the ledger does not know: surely absent, or worth a look at the disk."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Final

from tierkv.protocols import Clock
from tierkv.tiers._fs.books import Books, Held
from tierkv.tiers._fs.file_io import Identity, Tally
from tierkv.tiers._fs.format import file_name, leaf_of, padded_nbytes
from tierkv.tiers._fs.leftovers import Leftovers
from tierkv.tiers._fs.owners import Ownership
from tierkv.tiers._fs.scan import Scanner
from tierkv.tiers._fs.store import Seen, Store
from tierkv.types import ChunkKey, Found

_log = logging.getLogger(__name__)

ABSENT_FOR_S: Final = 1.0
"""A negative answer holds this long while the scan runs or another owner may write the key."""
MOST_MOVES: Final = 8
"""How often a key is looked for again that was written anew, elsewhere, while it was looked for."""
_MOST_ABSENT: Final = 1 << 16
_MOST_SHUNNED: Final = 1 << 12


class Lookups:
    """Probes files by name: a few ``stat`` calls a key, no directory is read.

    Concurrency: any thread.
    """

    def __init__(
        self, *, store: Store, books: Books, ownership: Ownership, scanner: Scanner, leftovers: Leftovers,
        tally: Tally, clock: Clock,
    ) -> None:  # fmt: skip
        self._store = store
        self._books = books
        self._ownership = ownership
        self._scanner = scanner
        self._leftovers = leftovers
        self._tally = tally
        self._clock = clock
        self._absent: dict[ChunkKey, float] = {}
        # How many are just removing each: it is not where the books say, and has not vanished.
        self._removing: Counter[ChunkKey] = Counter()
        self._shunned: dict[tuple[ChunkKey, str], Identity] = {}

    def settled(self, key: ChunkKey) -> bool:
        """True if a key that the ledger does not know is surely absent, or was so within the last second."""
        if self._books.get(key) is not None:
            return False
        if not self._books.is_scanning and not self._ownership.foreign_ids:
            return True
        until = self._absent.get(key)
        return until is not None and self._clock() < until

    def probe(self, keys: Sequence[ChunkKey]) -> list[Found | None]:
        """Look for each key; an answer is as old as its last ``stat``."""
        return [self._probe_one(key) for key in keys]

    def owners_of(self, key: ChunkKey) -> list[str]:
        """Owner ids under which a file of this key may lie, likeliest first."""
        held = self._books.get(key)
        if held is not None:
            return [self._ownership.ids[held.number]]
        return [*(self._ownership.held_ids() if self._books.is_scanning else ()), *self._ownership.foreign_ids]

    def found(self, key: ChunkKey) -> None:
        """The key was written: forget that it was absent."""
        self._absent.pop(key, None)

    def remove(self, key: ChunkKey, owner: str, held: Held | None, *, identity: Identity | None = None) -> bool:
        """Remove a chunk of ours, from the books too; False if it was gone, or is not that very one. Raises OSError."""
        with self._books.lock:
            self._removing[key] += 1
        try:
            removed = self._store.remove(key, owner, held, identity=identity)
            if removed and held is not None:
                self._books.drop(key, owner, held)
            return removed
        finally:
            with self._books.lock:
                self._removing[key] -= 1
                if not self._removing[key]:
                    del self._removing[key]

    def forget(self, key: ChunkKey, owner: str, held: Held | None, why: str) -> None:
        """A chunk of ours is not where the books say, unless it is just being removed: then that does the rest."""
        if held is None or key in self._removing:  # asked first: a removal that has ended has changed the books
            return
        if self._books.get(key) != held or not self._store.reclaim(owner, held):
            return
        if self._books.drop(key, owner, held) is not None:
            self._tally.add(why)

    def shun(self, key: ChunkKey, owner: str, identity: Identity) -> None:
        """A foreign file proved to be corrupt. It is not ours to remove, and must not be offered again."""
        if len(self._shunned) >= _MOST_SHUNNED:
            self._shunned.clear()
        self._shunned[key, owner] = identity

    def _probe_one(self, key: ChunkKey) -> Found | None:
        for _ in range(MOST_MOVES):
            seen = self._books.n_forgotten
            held = self._books.get(key)
            found = self._probe_where(key, held, seen)
            if found is not None:
                return found
            if self._books.get(key) in (held, None):
                break
        self._remember_absent(key)
        return None

    def _probe_where(self, key: ChunkKey, held: Held | None, seen: int) -> Found | None:
        """``held`` and ``seen`` are what the books said before: whatever is looked at may be removed meanwhile."""
        for owner in self.owners_of(key):
            found = self._store.look(key, owner, held)
            number = self._ownership.number_of(owner)
            if found is None:
                self.forget(key, owner, held, "vanished")
            elif found.damage is not None:
                self._remove_damaged(key, owner, held, found, found.damage)
            elif number is None:
                if self._shunned.get((key, owner)) != found.identity:
                    return Found(key, found.nbytes, owned=False)
            else:
                if held is None:
                    now = self._books.add(key, number, owner, found.nbytes, found.at, seen=seen)
                else:
                    # Entered anew it would be a record of what was removed since it was looked at.
                    now = self._books.get(key)
                    now = now if now == held else None
                if now is not None and now.nbytes == found.nbytes:
                    return Found(key, found.nbytes)
                if now is not None and now.at is found.at is None:
                    self._remove_damaged(key, owner, now, found, "corrupt")  # somebody changed its length
        return None

    def _remove_damaged(self, key: ChunkKey, owner: str, held: Held | None, found: Seen, why: str) -> None:
        """What was found is no chunk. If it is ours it goes, from the books as well, unless another is there by now."""
        if self._ownership.number_of(owner) is None:
            return
        try:
            if not self.remove(key, owner, held, identity=found.identity):
                return
        except OSError as error:
            _log.warning("%s: cannot remove what lies at a chunk's path: %s", owner, error)
            if held is not None and why == "corrupt":
                self._keep_charged(key, owner, held, found)
                return
            if held is not None:
                self._books.drop(key, owner, held)
        self._tally.add(why)

    def _keep_charged(self, key: ChunkKey, owner: str, held: Held, found: Seen) -> None:
        """A file that cannot be removed is nobody's chunk, and counts for as long as it is there."""
        nbytes = padded_nbytes(found.nbytes)
        if self._books.set_aside(key, owner, held, nbytes):
            name = file_name(key, owner)
            self._leftovers.add(leaf_of(key), name, (name,), nbytes, identity=found.identity, is_charged=True)
            self._tally.add("corrupt")

    def _remember_absent(self, key: ChunkKey) -> None:
        if self._books.is_scanning:
            self._scanner.ask_first(leaf_of(key))
        now = self._clock()
        self._absent[key] = now + ABSENT_FOR_S
        if len(self._absent) > _MOST_ABSENT:
            # Entries are in order of time, near enough. Another thread may change the dict while it is copied.
            live = {k: until for k, until in list(self._absent.items()) if until > now}
            self._absent = live if len(live) <= _MOST_ABSENT // 2 else {}
