"""A root on which nothing has changed since a clean close: what its index lists is counted and announced by columns.

No object a chunk but its key: of a million chunks, objects would take seconds, and the garbage collector, looking
through them all with the interpreter held, as long again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

from tierkv.tiers._fs.books import Books
from tierkv.tiers._fs.catalogue import Row
from tierkv.tiers._fs.dirs import open_directory
from tierkv.tiers._fs.feed import BATCH, Feed, Listed
from tierkv.tiers._fs.format import PAGE_NBYTES
from tierkv.tiers._fs.index import Index, Span
from tierkv.tiers._fs.listing import leaf_times_ns, listed_in
from tierkv.tiers._fs.slab import Slab
from tierkv.types import ChunkKey

Ats = Sequence[int | None]


def is_unchanged(indexes: Sequence[Index], owners: Sequence[str], root_fd: int, digest: bytes) -> bool:
    """Whether there is one index, of exactly these owners' chunks, and no leaf has changed since. Raises OSError."""
    if len(indexes) != 1 or set(owners) != set(indexes[0].covers):
        return False
    namespace_fd = open_directory(digest.hex(), root_fd)
    try:
        return indexes[0].leaf_times_ns == leaf_times_ns(namespace_fd)
    finally:
        os.close(namespace_fd)


class Slots:
    """Which slot of which slab has a key, as the catalogues say."""

    def __init__(self) -> None:
        self._tables: dict[tuple[str, int], dict[ChunkKey, int]] = {}
        self._n_rows = 0

    def add(self, owner: str, slot_nbytes: int, rows: Sequence[Row]) -> None:
        self._tables.setdefault((owner, slot_nbytes), {}).update([(key, slot) for _, slot, _, key in rows])
        self._n_rows += len(rows)

    def match(self, index: Index) -> Match | None:
        """Every entry of an index with its place; None if one has none, or there are rows besides."""
        spans, n_in_slab, n_pages = [], 0, 0
        for span in index.spans(BATCH):
            ats = self._ats(index, span)
            if ats is None:
                return None
            spans.append((span, ats))
            n_in_slab += sum(span.in_slab)
            n_pages += sum(span.pages)
        return Match(index, spans, n_pages * PAGE_NBYTES) if n_in_slab == self._n_rows else None

    def _ats(self, index: Index, span: Span) -> Ats | None:
        kinds = set(zip(span.ids, span.pages, span.in_slab, strict=True))
        tables = {
            (i, pages): self._tables.get((index.covers[i], pages * PAGE_NBYTES), {})
            for i, pages, in_slab in kinds
            if in_slab
        }
        if not tables:
            return [None] * len(span.keys)
        ats: Ats
        if len(kinds) == 1:
            ats = list(map(next(iter(tables.values())).get, span.keys))
            return None if None in ats else ats
        columns = zip(span.keys, span.ids, span.pages, span.in_slab, strict=True)
        ats = [tables[i, pages].get(key, -1) if in_slab else None for key, i, pages, in_slab in columns]
        return None if -1 in ats else ats


def located(
    index: Index, slabs: Mapping[tuple[str, int], Slab], on_loaded: Callable[[Slab], None],
    rows: Iterable[tuple[str, Slab, Sequence[Row]]],
) -> Match | None:  # fmt: skip
    """Every entry of an index with its place: by the index itself if no catalogue was changed since, else by ``rows``.

    None if that is not so: an entry has no place, or there are rows besides.
    """
    match = _trusted(index, slabs, on_loaded)
    if match is None:
        slots = Slots()
        for owner, slab, piece in rows:
            slots.add(owner, slab.slot_nbytes, piece)
        match = slots.match(index)
    return match


def _trusted(
    index: Index, slabs: Mapping[tuple[str, int], Slab], on_loaded: Callable[[Slab], None]
) -> Match | None:  # fmt: skip
    """Every entry at the place that the index gives, if no catalogue was changed since; then the slabs are loaded.

    None: the rows are to be read. A slab that was loaded stays so.
    """
    if {which: slab.catalogue.stamp() for which, slab in slabs.items()} != index.stamps:
        return None
    spans: list[tuple[Span, Ats]] = []
    places: dict[tuple[str, int], tuple[list[int], list[int]]] = {slab: ([], []) for slab in slabs}
    for span in index.spans(BATCH):
        columns = list(zip(span.ids, span.pages, span.in_slab, strict=True))
        kinds = set(columns)
        for kind in (kind for kind in kinds if kind[2]):
            which = index.covers[kind[0]], kind[1] * PAGE_NBYTES
            if which not in places:
                return None  # the slab is gone, and had no stamp
            slots, rows = places[which]
            mine = [True] * len(span.keys) if len(kinds) == 1 else [each == kind for each in columns]
            slots += compress(span.slots, mine)
            rows += compress(span.rows, mine)
        ats: Ats = [slot if is_one else None for slot, is_one in zip(span.slots, span.in_slab, strict=True)]
        spans.append((span, ats))
    for which, slab in slabs.items():
        if not slab.trust(*places[which], index.stamps[which]):
            return None
        on_loaded(slab)
    return Match(index, spans, sum(sum(span.pages) for span, _ in spans) * PAGE_NBYTES)


class Match(NamedTuple):
    """An index, and where each of its chunks lies."""

    source: Index
    spans: Sequence[tuple[Span, Ats]]
    """With the slot of each chunk; None for a file."""
    nbytes: int
    """What all of them occupy."""


def enter(match: Match, numbers: Sequence[int], books: Books, feed: Feed) -> list[Listed]:
    """Count and announce all chunks, coldest first. Returns those that somebody else has counted.

    ``numbers`` are those of the ids that the index covers.
    """
    counted: list[Listed] = []
    for span, ats in match.spans:
        its_numbers = [numbers[i] for i in span.ids]
        if books.add_fresh(span.keys, its_numbers, span.pages, ats):
            feed.put_span(match.source, span)
            continue
        # A lookup found one of them, or one was removed: each by itself, but in its place, as order is recency.
        items = [item._replace(at=at) for item, at in zip(listed_in(match.source, span), ats, strict=True)]
        counted += (item for item in items if item.key in books)
        fresh = [(item, number) for item, number in zip(items, its_numbers, strict=True) if item.key not in books]
        added = books.add_all((item.key, number, item.owner, item.nbytes, item.at) for item, number in fresh)
        feed.put([item for (item, _), is_there in zip(fresh, added, strict=True) if is_there])
    return counted
