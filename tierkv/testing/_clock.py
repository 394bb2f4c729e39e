"""A clock that a test owns."""

from __future__ import annotations


class ManualClock:
    """Seconds that pass only when a test says so: a :data:`~tierkv.protocols.Clock`.

    Copying it, also as part of a policy, gives the same clock: time is one.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self._start_s = now_s
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, by_s: float) -> float:
        """Let time pass; returns the new time. Raises ValueError for less than 0: the clock is monotonic."""
        if by_s < 0:
            raise ValueError(f"a monotonic clock does not run backwards, not by {by_s!r} s either")
        self.now_s += by_s
        return self.now_s

    def restart(self) -> None:
        """Back to the start, for the next example; whatever looked at this clock must be gone by then."""
        self.now_s = self._start_s

    def __copy__(self) -> ManualClock:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> ManualClock:
        return self

    def __repr__(self) -> str:
        return f"<ManualClock: {self.now_s:g} s>"
