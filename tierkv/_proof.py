"""What must hold of all levels together at any instant, recounted from scratch. For tests, and for a doubtful hour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tierkv._ledger import GONE, PENDING
from tierkv._level import Flight, LevelBooks
from tierkv.types import TransferKind


def check_books(levels: Sequence[LevelBooks], flights: Sequence[Flight]) -> None:
    """Assert that every count agrees with a recount, within levels and between them."""
    holds = Counter(id(flight.source) for flight in flights if flight.transfer.kind is not TransferKind.DELETE)
    holds.update(id(waiting.source) for level in levels for waiting in level.waiting.values())
    for level in levels:
        level.ledger.check()
        _check_queue(level, flights)
        _check_leaving(level, levels, flights)
        _check_counts(level)
        for entry in [*level.ledger, *level.ledger.gone()]:
            assert entry.holds >= holds[id(entry)], "each copy holds its source"


def _check_queue(level: LevelBooks, flights: Sequence[Flight]) -> None:
    """Writes to a level, waiting or under way, are what its queue is charged for."""
    waiting = sum(waiting.charge_nbytes for waiting in level.waiting.values())
    writing = sum(
        flight.target.charge_nbytes
        for flight in flights
        if flight.target is not None and flight.transfer.target == level.index and level.index
    )
    assert level.queued_nbytes == waiting + writing
    assert not any(level.ledger.get(key) or key in level.leaving for key in level.waiting), "only what is absent waits"


def _check_leaving(level: LevelBooks, levels: Sequence[LevelBooks], flights: Sequence[Flight]) -> None:
    """What leaves a level, by deletion or by demotion, is counted on as room to come."""
    own = [flight for flight in flights if flight.transfer.source == level.index]
    deletes = [flight.source for flight in own if flight.transfer.kind is TransferKind.DELETE]
    demotes = [flight.source for flight in own if flight.demote]
    demotes += [
        waiting.source
        for lower in levels
        for waiting in lower.waiting.values()
        if waiting.demote and waiting.source_level == level.index
    ]
    assert level.deleting_nbytes == sum(entry.charge_nbytes for entry in deletes if entry.key not in level.hanging)
    assert level.demoting_nbytes == sum(entry.charge_nbytes for entry in demotes)
    leaving = {id(entry) for entry in level.leaving.values()}
    stuck = {id(entry) for entry in level.stuck.values()}
    assert {id(entry) for entry in deletes} <= leaving
    assert all(entry.state is GONE for entry in [*level.leaving.values(), *level.stuck.values()])
    assert not level.index or leaving | stuck == {id(entry) for entry in level.ledger.gone()}


def _check_counts(level: LevelBooks) -> None:
    pending = sum(entry.state is PENDING and not entry.promoted for entry in level.ledger)
    counts = level.counts
    told = counts.stored + counts.present + counts.refused.total() + pending + len(level.waiting)
    assert counts.offered == told, "offered = stored + present + refused, exactly"
