"""What may leave a root without an engine's doing: what no engine can serve, and on request what is old or too much."""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from tierkv.tiers._fs.catalogue import SLAB, SLOTS
from tierkv.tiers._fs.found import Found, Kind
from tierkv.tiers._fs.inspection import Root
from tierkv.tiers._fs.sweep import Broom, Census, Fate, Swept, ending, orphans_of, settle

UNREAD: Final = "unread"
OVER: Final = "over capacity"
_KEPT: Final = (Kind.CHUNK, Kind.SLAB)
"""What leaves only if somebody asks for it. A slab leaves as a whole: what is in it is its owner's affair."""
WHY: Final = {
    Kind.UNFINISHED.value: "their writers are dead",
    Kind.DAMAGED.value: "a length that no chunk file has",
    Kind.MISPLACED.value: "in a directory where no lookup finds them",
    Kind.NOT_REGULAR.value: "links, FIFOs, devices, sockets or directories in a chunk's place",
    UNREAD: "no living engine reads their namespace, and nobody has used it for that long",
    OVER: "the coldest of what no living engine owns",
}
"""What each reason means, in the order in which they are told."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What shall leave beside plain garbage; None: nothing.

    Attributes:
        unread_for_s: namespaces that no living engine reads and that were last used longer ago.
        capacity_nbytes: the coldest, until the root is no larger, as the start-up trim of an engine does it.
    """

    unread_for_s: float | None = None
    capacity_nbytes: int | None = None


@dataclass
class _Sums:
    """One pass over a root."""

    total_nbytes: int = 0
    newest_s: dict[str, float] = field(default_factory=dict)
    """By namespace: when its latest chunk was written or read."""
    ids: set[str] = field(default_factory=set)
    row_s: dict[str, float] = field(default_factory=dict)
    """By slab: when a row of its catalogue was last written, as it is when a chunk is read."""

    def count(self, found: Found) -> None:
        self.total_nbytes += found.charge_nbytes
        if found.name is not None:
            self.ids.add(found.name.owner)
        slab = _slab_of(found)
        if slab is not None:
            self.row_s[slab] = found.mtime_s
        if found.kind in _KEPT:
            self.newest_s[found.namespace] = max(found.mtime_s, self.newest_s.get(found.namespace, -math.inf))


class Garbage:
    """The garbage of one root, found and removed; what a living owner owns stays whatever it is.

    Attributes:
        left_over_nbytes: by how much the root still exceeds the wished capacity; known after :meth:`collect`.
        n_ended: dead owners of whom nothing was left, so that their lock files went, too, or would.
    """

    def __init__(self, root: Root, wish: Wish, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.left_over_nbytes = 0
        self.n_ended = 0
        self._root = root
        self._wish = wish
        sums = _Sums()
        for found in root.files():
            sums.count(found)
        self._orphans = orphans_of(root, sums.ids, sleep)
        self._owners = root.owners()
        self._census = Census(self._owners, self._orphans)
        self._row_s = sums.row_s
        self._total_nbytes = sums.total_nbytes + sum(owner.charge_nbytes for owner in self._owners)
        unread = self._census.read_by_nobody
        now_s, age_s = time.time(), wish.unread_for_s
        self._unread = {
            namespace
            for namespace, newest_s in sums.newest_s.items()
            if age_s is not None and unread(namespace) and now_s - newest_s >= age_s
        }

    def collect(self, *, dry_run: bool) -> Iterator[Swept]:
        """Each file that leaves, once it has; with ``dry_run`` it would, and nothing changes.

        Raises:
            TimeoutError: the root's lock is held for 10 s.
        """
        left: Counter[str] = Counter()
        for swept in self._swept(self._candidates(left), dry_run=dry_run):
            if swept.fate in (Fate.SPARED, Fate.STAYS):
                self._stays(swept.found, left)
            else:
                self._total_nbytes -= swept.found.charge_nbytes
            yield swept
        ended = ending(self._owners, left) if dry_run else settle(self._root, left, self._owners)
        self.n_ended = len(ended)
        self._total_nbytes -= sum(owner.charge_nbytes for owner in ended)
        if self._wish.capacity_nbytes is not None:
            self.left_over_nbytes = max(0, self._total_nbytes - self._wish.capacity_nbytes)

    @property
    def has_living(self) -> bool:
        """Whether an engine was alive, which may own what stays."""
        return bool(self._census.users())

    def _swept(self, items: Iterator[tuple[Found, str]], *, dry_run: bool) -> Iterator[Swept]:
        if dry_run:
            return (Swept(found, why, Fate.REMOVED) for found, why in items)
        return Broom(self._root, self._may, orphans=self._orphans).sweep(items)

    def _may(self, now: Census, found: Found) -> bool:
        assert found.name is not None
        # An engine may have come since we looked: then what it reads is not "unread" any more.
        read_now = found.namespace in self._unread and not now.read_by_nobody(found.namespace)
        return now.is_dead(found.name.owner) and not (read_now and found.kind in _KEPT)

    def _candidates(self, left: Counter[str]) -> Iterator[tuple[Found, str]]:
        excess_nbytes = 0
        if self._wish.capacity_nbytes is not None:
            excess_nbytes = self._total_nbytes - self._wish.capacity_nbytes
        coldest = _Coldest(self._census.read_by_nobody)
        catalogues: dict[str, Found] = {}
        for found in self._files_of_the_dead():
            why = self._why(found)
            if why is not None:
                excess_nbytes -= found.charge_nbytes
                yield found, why
                continue
            slab = _slab_of(found)
            if slab is not None:
                catalogues[slab] = found
                continue
            used_s = max(found.mtime_s, self._row_s.get(found.place, -math.inf))
            for kept in coldest.add(replace(found, mtime_s=used_s), excess_nbytes):
                self._stays(kept, left)
        for found, leaves in coldest.take(excess_nbytes):
            if leaves:
                yield found, OVER
                if found.place in catalogues:
                    yield catalogues.pop(found.place), OVER
            else:
                self._stays(found, left)
        for found in catalogues.values():
            self._stays(found, left)

    def _files_of_the_dead(self) -> Iterator[Found]:
        return (
            found for found in self._root.files() if found.name is not None and self._census.is_dead(found.name.owner)
        )

    def _why(self, found: Found) -> str | None:
        if found.kind not in _KEPT:
            return found.kind.value
        return UNREAD if found.namespace in self._unread else None

    def _stays(self, found: Found, left: Counter[str]) -> None:
        assert found.name is not None
        left[found.name.owner] += found.charge_nbytes


def _slab_of(found: Found) -> str | None:
    """The place of the slab that this catalogue is of, with which it stays or leaves; None for anything else."""
    is_catalogue = found.kind is Kind.SLAB and found.place.endswith(f".{SLOTS}")
    return found.place.removesuffix(SLOTS) + SLAB if is_catalogue else None


class _Coldest:
    """The coldest files that make up an excess; remembers no more than those."""

    def __init__(self, unread: Callable[[str], bool]) -> None:
        self._unread = unread
        self._heap: list[tuple[bool, float, str, Found]] = []
        self._nbytes = 0

    def add(self, found: Found, excess_nbytes: int) -> Iterator[Found]:
        """Returns those that are not among the coldest after all."""
        if excess_nbytes <= 0 and not self._heap:
            yield found
            return
        # What nobody alive can read leaves first; then by time. A heap names its smallest: so all is negated.
        rank = (self._unread(found.namespace), -found.mtime_s, found.place)
        heapq.heappush(self._heap, (*rank, found))
        self._nbytes += found.charge_nbytes
        while self._heap and self._nbytes - self._heap[0][-1].charge_nbytes >= max(0, excess_nbytes):
            warmest = heapq.heappop(self._heap)[-1]
            self._nbytes -= warmest.charge_nbytes
            yield warmest

    def take(self, excess_nbytes: int) -> Iterator[tuple[Found, bool]]:
        """All of them, coldest first, and whether each still has to go."""
        for *_, found in sorted(self._heap, reverse=True):
            yield found, excess_nbytes > 0
            excess_nbytes -= found.charge_nbytes
