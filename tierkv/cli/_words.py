"""Numbers in sentences: one chunk, two chunks, three days ago."""

from __future__ import annotations

from typing import Final

OTHER: Final = {
    "unfinished": "being written, or left by an engine that was killed, and then removed at the next start",
    "damaged": "of a length that no chunk has; the next start removes them",
    "misplaced": "where no lookup finds them; the next start removes them",
    "not regular": "links, FIFOs and the like that somebody planted; the next start removes them",
    "slab": "what slabs take beside their chunks: catalogues, and slots that are free",
    "foreign": "not tierkv's: never counted, never removed",
}
"""What lies in a root beside chunks, by kind, and why."""


def lying(kind: str, n: int) -> str:
    """How many things of a kind lie there."""
    return f"{kind}: {counted(n, 'thing' if kind in {'foreign', 'not regular'} else 'file')}"


def counted(n: int, noun: str) -> str:
    """``1 chunk``, ``1,200 chunks``; ``noun`` is a singular that takes an s, and may have words before it."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def ago(age_s: float) -> str:
    """An age in the largest unit of which there are two at least."""
    for unit_s, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if age_s >= 2 * unit_s:
            return f"{age_s // unit_s:,.0f} {unit} ago"
    return f"{age_s:,.0f} s ago"
