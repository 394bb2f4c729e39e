"""vLLM's primary tier as our hierarchy sees it: somebody else's slots, which are ours while a copy runs.

The hierarchy wants a level 0 of slots. Here it is a shadow: an entry stands there for one chunk under way between a row
of vLLM's pool and our level, in a slot that points to the row, and leaves when its copy has *ended*, since vLLM may use
the row again from the moment it hears of the job's end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

from tierkv._entry import GONE, Entry
from tierkv._level import LevelPlan
from tierkv.protocols import Admission
from tierkv.types import Chunk, ChunkKey, Outcome, Reason, TransferKind
from tierkv.vllm._books import EpochHierarchy


class Rows:
    """The rows of vLLM's pool by shadow slot; what the Mover takes for a pool.

    Args:
        view: two dimensions, rows of one chunk each.

    Concurrency: the scheduler's thread points a slot to a row before the copy is handed over; the Mover's reads it.
    """

    def __init__(self, view: memoryview) -> None:
        assert view.shape is not None and view.strides is not None
        self.n_rows, self.stride_nbytes = view.shape[0], view.strides[0]
        self._bytes = view.cast("B")
        self._row_of = [0] * self.n_rows

    def point(self, slot: int, row: int) -> None:
        self._row_of[slot] = row

    def view(self, slot: int) -> memoryview:
        start = self._row_of[slot] * self.stride_nbytes
        return self._bytes[start : start + self.stride_nbytes]

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a call that hangs still has it; vLLM is told, and keeps the memory
            self._bytes.release()


class GatewayHierarchy(EpochHierarchy):
    """A hierarchy over a shadow primary: it tells which of the primary's entries no copy touches any more."""

    def __init__(self, plans: Sequence[LevelPlan], **options: bool) -> None:
        super().__init__(plans, recycles=False, **options)  # vLLM's jobs keep them until they are told of their ends
        self._done: list[Entry] = []

    def finish(self, transfer_id: int, outcome: Outcome, *, ended: bool = True) -> None:
        flight = self._flights[transfer_id]
        super().finish(transfer_id, outcome, ended=ended)
        if ended and flight.transfer.kind is TransferKind.PROMOTE:
            assert flight.target is not None
            self._done.append(flight.target)

    def _release(self, level: Any, *entries: Entry) -> None:
        super()._release(level, *entries)
        if not level.index:
            self._done += [entry for entry in entries if not entry.holds]

    def take_done(self, idle: Collection[Entry] = ()) -> list[Entry]:
        """Entries whose copies have all ended, ``idle`` ones that never had one included; they leave the shadow."""
        done, self._done = [*self._done, *(entry for entry in idle if not entry.holds)], []
        for entry in done:
            if entry.state is not GONE:
                self._leave(self.levels[0], entry, Reason.DELETED)
        return list(dict.fromkeys(done))


class Declining:
    """A rule that remembers whom it has declined: such a chunk is not lost, it was not wanted."""

    def __init__(self, rule: Admission) -> None:
        self._rule = rule
        self.declined: set[ChunkKey] = set()

    def admits(self, chunk: Chunk) -> bool:
        if self._rule.admits(chunk):
            return True
        self.declined.add(chunk.key)
        return False


class Job:
    """One of vLLM's jobs: done when none of its chunks is under way any more."""

    __slots__ = ("good", "is_load", "job_id", "n_bad", "n_left", "started_s")

    def __init__(self, job_id: int, *, is_load: bool, started_s: float) -> None:
        self.job_id = job_id
        self.is_load = is_load
        self.started_s = started_s
        self.n_left = 0
        self.good: list[ChunkKey] = []
        """Keys that arrived, in a load; that the tier holds now or did not want, in a store."""
        self.n_bad = 0


def row_of_key(keys: Sequence[ChunkKey], rows: Any) -> dict[ChunkKey, int]:
    """The row of each key; of a key given twice, the first one's."""
    found: dict[ChunkKey, int] = {}
    for key, row in zip(keys, rows, strict=True):
        found.setdefault(key, int(row))
    return found
