"""When a level that fails is left alone, and how it comes back. No clock and no timer; who runs it has those.

Reads and writes have a breaker each: a disk that turned read-only goes on serving. A breaker is closed (FLOWS) until so
many batches in a row fail without a single success, or one misses its deadline. Then it is open (STOPPED) for a while,
and half-open (TRIAL) after that: what is asked for next is tried, and nothing beside it; its end closes the breaker or
opens it.
"""

from __future__ import annotations

from enum import Enum


class Traffic(Enum):
    """What one direction of a level lets through."""

    FLOWS = "flows"
    TRIAL = "trial"
    STOPPED = "stopped"


class Door:
    """One direction of a level as those see it who want to pass."""

    __slots__ = ("traffic", "trying")

    def __init__(self) -> None:
        self.traffic = Traffic.FLOWS
        self.trying = False
        """Somebody has passed and not come back."""

    @property
    def lets_through(self) -> bool:
        return self.traffic is Traffic.FLOWS or (self.traffic is Traffic.TRIAL and not self.trying)

    def set(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.trying = False


class Breaker:
    """One direction of a level as its batches see it; see the module.

    Args:
        n_failures: batches in a row without a success that open it.
    """

    def __init__(self, n_failures: int) -> None:
        self._most_failures = n_failures
        self._n_failed = 0
        self.traffic = Traffic.FLOWS
        self.n_opened = 0
        """Since it was last closed: 1 and the trials that failed."""

    def record(self, *, success: bool, deadline: bool = False) -> bool:
        """Count a batch that has ended, or missed its deadline. True if that opened or closed the breaker."""
        if self.traffic is Traffic.STOPPED:
            return False  # it began before
        if success:
            self._n_failed = 0
            closed = self.traffic is Traffic.TRIAL
            self.traffic = Traffic.FLOWS
            return closed
        self._n_failed += 1
        if self.traffic is Traffic.FLOWS and not deadline and self._n_failed < self._most_failures:
            return False
        self.n_opened = 1 if self.traffic is Traffic.FLOWS else self.n_opened + 1
        self.traffic = Traffic.STOPPED
        return True

    def retry(self) -> None:
        """It has been open for long enough."""
        self.traffic = Traffic.TRIAL
