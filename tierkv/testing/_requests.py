"""The chunks that orders are tried with: prefixes that share heads, a group without parents, two tenants."""

from __future__ import annotations

from typing import Final

from tierkv.types import Chunk, ChunkKey


def _chain(
    name: str, n: int, *, after: Chunk | None = None, group: int = 0, linked: bool = True, tenant: str = ""
) -> list[Chunk]:
    chain: list[Chunk] = []
    for i in range(n):
        end = (after.end_token if after else 0) + 8
        parent = after.key if after and linked else None
        nbytes = (64, 40, 52)[(i + len(name)) % 3]
        after = Chunk(ChunkKey(f"{name}{i}".encode()), parent, group, end, nbytes, tenant)
        chain.append(after)
    return chain


_TRUNK = _chain("trunk", 4, tenant="red")
_BRANCH = _chain("branch", 2, after=_TRUNK[1], tenant="blue")
_OTHER = _chain("other", 3, tenant="blue")
_WINDOW = _chain("window", 4, group=1, linked=False)

REQUESTS: Final[tuple[tuple[Chunk, ...], ...]] = (
    tuple(_TRUNK),
    tuple(_TRUNK[:2] + _BRANCH),
    tuple(_OTHER),
    tuple(_WINDOW),
)
"""Prefixes of the tenants "red", "blue" and ""; the last is of a sliding-window group, whose chunks have no parents."""

CHUNKS: Final[dict[ChunkKey, Chunk]] = {chunk.key: chunk for request in REQUESTS for chunk in request}
LONERS: Final = frozenset(chunk.key for chunk in _WINDOW)
"""Keys that no chunk names as its parent and that name none."""
