"""How long a test waits for what must come: so long that only a hang takes it, on the slowest machine.

A wait ends with what it waits for, so this costs nothing where all is well. What a test says about time is said by
order, by counts, by a clock of its own, or by a control in the same run; never by this.
"""

from __future__ import annotations

from typing import Final

from tierkv import _driver, cache

PATIENCE_S: Final = 200.0
"""Less than the 300 s of a test (pyproject.toml), so that the wait that hangs is the one that says so."""


def be_patient() -> None:
    """The library's own limits on what a disk may take are no part of what a test shows: called once a process.

    A lookup waits for a tier that has not listed everything yet as long as it takes, not a tenth of a second, and a
    cache for a tier that closes, not ten seconds. What shows these limits sets them itself.
    """
    _driver._PROBE_S = PATIENCE_S
    cache._TIER_CLOSE_S = PATIENCE_S
