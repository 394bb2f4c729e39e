"""A simulated accelerator, whose streams really run late and out of step, and whose race check needs no luck.

:class:`~tierkv.testing.SimDevice` is the machine, in the standard library alone: streams, events, kernels and copies
that a seeded scheduler runs step by step. :class:`~tierkv.testing.SimRuntime` makes it a device of tierkv's engine
(that needs numpy), with faults on order. Run your own engine, or ours with your own scheduler, over some seeds: a
missing wait raises :class:`~tierkv.testing.RaceError` whatever the schedule did, and the same seed replays it.
"""

from tierkv.testing._sim_device import (
    POISON,
    DeadlockError,
    SimBuffer,
    SimDevice,
    SimEvent,
    SimSchedule,
    SimSpan,
    SimStream,
    overlaps,
)
from tierkv.testing._sim_races import RaceError, Range
from tierkv.testing._sim_runtime import FAULTS, SimRuntime

__all__ = [
    "FAULTS",
    "POISON",
    "DeadlockError",
    "RaceError",
    "Range",
    "SimBuffer",
    "SimDevice",
    "SimEvent",
    "SimRuntime",
    "SimSchedule",
    "SimSpan",
    "SimStream",
    "overlaps",
]
