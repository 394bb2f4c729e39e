"""A root on which nothing has changed since a clean close: what its index lists is counted and announced by columns.

No object a chunk but its key: of a million chunks, objects would take seconds, and the garbage collector, looking
through them all with the interpreter held, as long again.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.tiers._fs.books import Books
from tierkv.tiers._fs.feed import BATCH, Feed, Listed
from tierkv.tiers._fs.format import PAGE_NBYTES
from tierkv.tiers._fs.index import Index
from tierkv.tiers._fs.listing import listed_in


def files_nbytes(index: Index) -> int:
    """What all files of an index occupy."""
    return sum(sum(span.pages) for span in index.spans(BATCH)) * PAGE_NBYTES


def enter_files(index: Index, slots: Sequence[int], books: Books, feed: Feed) -> list[Listed]:
    """Count and announce the files of an index, coldest first. Returns those that somebody else has counted.

    ``slots`` are the small numbers of the ids that the index covers.
    """
    counted: list[Listed] = []
    for span in index.spans(BATCH):
        places = [slots[i] for i in span.ids]
        if not any(span.in_slab) and books.add_fresh(span.keys, places, span.pages):
            feed.put_span(index, span)
            continue
        # A lookup found one of them, or one was removed: each by itself, but in its place, as order is recency.
        files = [(item, slot) for item, slot in zip(listed_in(index, span), places, strict=True) if item.at is None]
        counted += (item for item, _ in files if item.key in books)
        fresh = [(item, slot) for item, slot in files if item.key not in books]
        added = books.add_all((item.key, slot, item.owner, item.nbytes, None) for item, slot in fresh)
        feed.put([item for (item, _), is_there in zip(fresh, added, strict=True) if is_there])
    return counted
