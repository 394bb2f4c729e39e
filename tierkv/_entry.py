"""One chunk at one level, and the states it goes through.

States of an entry::

    reserve -> PENDING --commit--> READY --remove--> GONE --free--> (forgotten)
    reserve -> PENDING -----remove (abort, reset)--> GONE --free--> (forgotten)

PENDING and READY entries are in the index. GONE ones are not, but their space stays charged ("quarantined") until
whatever still touches it has ended: a copy into it (``writing``), a copy out of it or a lease (``holds``), a deletion.
"""

from __future__ import annotations

from enum import Enum

from tierkv.protocols import Seat
from tierkv.types import Chunk


class State(Enum):
    PENDING = "pending"
    READY = "ready"
    GONE = "gone"


PENDING, READY, GONE = State.PENDING, State.READY, State.GONE


class Entry(Seat):
    """One chunk at one level. A handle: it outlives the key's stay in the index, so late completions stay harmless.

    Where the level's policy can rank entries, it keeps what it knows in the fields of :class:`~tierkv.protocols.Seat`.
    """

    __slots__ = (
        "charge_nbytes", "chunk", "demote_refused", "generation", "holds", "owned", "promoted", "slot", "state",
        "stored", "writing",
    )  # fmt: skip

    def __init__(self, chunk: Chunk, charge_nbytes: int, state: State, *, owned: bool = True) -> None:
        super().__init__(chunk.key)
        self.chunk = chunk
        self.charge_nbytes = charge_nbytes
        self.state = state
        self.owned = owned
        self.held = state is PENDING
        self.slot: int = -1
        self.generation: int = 0
        self.holds: int = 0
        """Leases and copies out of it: while positive it is no victim and its space is not reused."""
        self.writing: bool = state is PENDING
        """A copy into it has not ended."""
        self.stored: bool = state is READY
        """The medium holds it: leaving takes a deletion where the level is not the primary."""
        self.promoted: bool = False
        """It came up from a lower level rather than from the device."""
        self.demote_refused: bool = False
        """The level below would not take it: its eviction is a removal."""

    @property
    def settled(self) -> bool:
        """Nothing touches its space any more."""
        return not self.writing and not self.holds

    def __repr__(self) -> str:
        flags = f"{' writing' if self.writing else ''}{'' if self.owned else ' foreign'}"
        return f"<Entry {self.chunk.key.hex()[:12]} {self.state.value} slot={self.slot} holds={self.holds}{flags}>"


def of_its_tenant(chunk: Chunk, stored: Chunk) -> Chunk:
    """A chunk as somebody asks for it, but of the tenant that stored it, where that is known."""
    return chunk._replace(tenant=stored.tenant) if stored.tenant and stored.tenant != chunk.tenant else chunk
