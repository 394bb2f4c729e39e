"""The hierarchy as vLLM needs it: a level below can be forgotten as a whole without deleting what it holds."""

from __future__ import annotations

from tierkv._hierarchy import Hierarchy
from tierkv.types import Reason


class EpochHierarchy(Hierarchy):
    """A hierarchy whose lower levels can begin again under another namespace."""

    def busy(self, index: int) -> bool:
        """Whether a copy from or to this level is under way. O(copies)."""
        return any(index in (flight.transfer.source, flight.transfer.target) for flight in self._flights.values())

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
        for entry in level.ledger.gone():
            # Deletions that failed: the bytes are the tier's to account for, under its share of the root.
            level.ledger.free(entry)
