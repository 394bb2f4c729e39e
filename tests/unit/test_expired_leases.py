"""What has expired while somebody uses it stays until it is let go: neither an offer nor a promotion takes it away."""

from __future__ import annotations

import pytest

from tierkv import Chunk, ChunkKey
from tierkv._hierarchy import Hierarchy
from tierkv._ledger import GONE, READY, Entry
from tierkv._level import LevelPlan
from tierkv.policies import LRU, TTL
from tierkv.testing import ManualClock

CHUNK = Chunk(ChunkKey(b"k"), nbytes=8)


@pytest.fixture
def leased() -> tuple[Hierarchy, Entry]:
    """A chunk that was stored, leased, and has expired since."""
    clock = ManualClock()
    hierarchy = Hierarchy([LevelPlan("primary", 0, TTL(LRU(), 5, clock), n_slots=2, slot_nbytes=64)])
    (entry,) = hierarchy.offer([CHUNK]).reserved
    hierarchy.commit_store([entry])
    hierarchy.hold(entry)
    clock.advance(5)
    assert hierarchy.find(CHUNK.key) < 0, "it answers a miss"
    return hierarchy, entry


def test_an_offer_keeps_it(leased: tuple[Hierarchy, Entry]) -> None:
    """Offered again it is present, in the slot that its user looks at."""
    hierarchy, entry = leased
    offer = hierarchy.offer([CHUNK])
    assert (offer.present, offer.reserved) == ([entry], [])
    assert entry.state is READY


def test_a_promotion_and_a_trim_keep_it(leased: tuple[Hierarchy, Entry]) -> None:
    """A promotion stops there, a trim passes it over; once it is let go the trim takes it."""
    hierarchy, entry = leased
    assert hierarchy.promote([CHUNK]) == []
    hierarchy.refresh()
    assert entry.state is READY
    hierarchy.release(entry)
    hierarchy.refresh()
    assert entry.state is GONE
    assert hierarchy.primary.free_nbytes == hierarchy.primary.capacity_nbytes
