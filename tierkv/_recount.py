"""What must hold of one level's books at any instant, recounted from scratch. For tests, and for a doubtful hour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tierkv._entry import GONE, PENDING, READY, WRITER, Entry
from tierkv._slots import Slots
from tierkv.types import ChunkKey


class Counts(Protocol):
    """What a ledger counts as it goes."""

    pending_nbytes: int
    ready_nbytes: int
    quarantined_nbytes: int
    foreign_nbytes: int
    held_nbytes: int
    n_pending: int
    n_held: int
    n_foreign: int

    @property
    def free_nbytes(self) -> int: ...


def recount(ledger: Counts, index: Mapping[ChunkKey, Entry], gone: Sequence[Entry], slots: Slots | None) -> None:
    """Assert that every count of a ledger agrees with its entries, and every entry with its state."""
    entries = list(index.values())
    everybody = [*entries, *gone]
    assert all(key == entry.key for key, entry in index.items())
    assert all(entry.state in (PENDING, READY) for entry in entries)
    assert all(entry.writing == (entry.state is PENDING) for entry in entries)
    assert all(entry.owned or entry.state is READY for entry in entries)
    assert all(entry.stored for entry in entries if entry.state is READY)
    assert all(entry.state is GONE for entry in gone)
    assert ledger.pending_nbytes == sum(e.charge_nbytes for e in entries if e.state is PENDING)
    assert ledger.ready_nbytes == sum(e.charge_nbytes for e in entries if e.state is READY and e.owned)
    assert ledger.foreign_nbytes == sum(e.charge_nbytes for e in entries if not e.owned)
    assert ledger.quarantined_nbytes == sum(e.charge_nbytes for e in gone if e.owned)
    assert all(0 <= entry.holds < 2 * WRITER for entry in everybody)
    pinned = [entry for entry in everybody if entry.n_pins]
    assert (ledger.n_held, ledger.held_nbytes) == (len(pinned), sum(entry.charge_nbytes for entry in pinned))
    assert ledger.n_pending == sum(entry.state is PENDING for entry in entries)
    assert ledger.n_foreign == sum(not entry.owned for entry in entries)
    if slots is None:
        assert all(entry.slot == -1 for entry in everybody)
    else:
        slots.check(everybody)
        assert ledger.free_nbytes == slots.n_free * slots.slot_nbytes
