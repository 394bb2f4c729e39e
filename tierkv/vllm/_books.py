"""The hierarchy as vLLM needs it: a level below can be forgotten as a whole without deleting what it holds."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv._flow import End
from tierkv._hierarchy import Hierarchy
from tierkv._level import LevelPlan
from tierkv.types import Outcome, Reason, Status, TransferKind


class EpochHierarchy(Hierarchy):
    """A hierarchy whose lower levels can begin again under another namespace."""

    def __init__(self, plans: Sequence[LevelPlan], *, recycles: bool = True, **options: bool) -> None:
        super().__init__(plans, recycles=recycles, **options)
        self._disowned: set[int] = set()
        """Transfers of an earlier epoch that hang: they keep their slots, and nothing they say is believed."""

    def busy(self, index: int) -> bool:
        """Whether a copy from or to this level is under way. O(copies)."""
        return any(id_ not in self._disowned for id_ in self._touching(index))

    def _touching(self, index: int) -> list[int]:
        flights = self._flights.items()
        return [id_ for id_, flight in flights if index in (flight.transfer.source, flight.transfer.target)]

    def disown(self, index: int) -> None:
        """Wait no longer for copies and deletions of this level that hang: they belong to a tier that is given up."""
        self._disowned.update(self._touching(index))
        for entry in self.levels[index].ledger.gone():
            entry.stored = False  # what is under its key from now on is another tier's

    def finish(self, transfer_id: int, outcome: Outcome, *, ended: bool = True) -> None:
        """As for any hierarchy; a transfer that was disowned only gives back what it kept."""
        if transfer_id in self._disowned:
            if ended:
                self._disowned.discard(transfer_id)
            deletes = self._flights[transfer_id].transfer.kind is TransferKind.DELETE
            outcome = Outcome(outcome.key, Status.OK if deletes else Status.FAILED, Reason.RESET)
        super().finish(transfer_id, outcome, ended=ended)

    def _levels_of_good_write(self, end: End) -> tuple[int, int] | None:
        return None if end[0] in self._disowned else super()._levels_of_good_write(end)

    def abandon(self, index: int) -> None:
        """Forget all that a level holds and leave it on the medium, under a namespace that nobody asks for any more.

        Only while the level is not :meth:`busy`: a copy that ended later would enter the new epoch.
        """
        assert not self.busy(index)
        level = self.levels[index]
        self._refuse_waiting(level, Reason.RESET)
        for entry in list(level.ledger):
            entry.stored = False
            self._leave(level, entry, Reason.RESET)
        for key, entry in level.stuck.items():
            # Deletions that failed: the bytes are the tier's to account for, under its share of the root.
            if key not in level.leaving:
                level.ledger.free(entry)
        level.stuck.clear()
