"""How long a test waits for what must come: so long that only a hang takes it, on the slowest machine.

A wait ends with what it waits for, so this costs nothing where all is well. What a test says about time is said by
order, by counts, by a clock of its own, or by a control in the same run; never by this.
"""

from __future__ import annotations

from typing import Final

from tierkv import _driver

PATIENCE_S: Final = 200.0
"""Less than the 300 s of a test (pyproject.toml), so that the wait that hangs is the one that says so."""


def patient_probes() -> None:
    """Lookups wait for tiers that have not listed everything yet for as long as it takes, not a tenth of a second.

    What a test says of a chunk that lies there would else be a matter of how fast the disk is. Called once a process.
    """
    _driver._PROBE_S = PATIENCE_S
