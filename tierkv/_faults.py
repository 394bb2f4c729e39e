"""What somebody else's code raised, told without filling a log."""

from __future__ import annotations

import logging

from tierkv.errors import TierKVError


class Faults:
    """Logs what was raised: once, and then ever more rarely. Concurrency: any thread, where a number may be told twice.

    Args:
        log: where to.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._n_faults = 0

    def tell(self, what: str, error: Exception) -> None:
        self._n_faults += 1
        if self._n_faults & (self._n_faults - 1) == 0:
            is_bug = not isinstance(error, (OSError, TierKVError))
            self._log.warning("%s: %r (fault %d)", what, error, self._n_faults, exc_info=error if is_bug else None)
