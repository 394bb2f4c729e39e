"""The conformance kit: whether a policy, a rule of admission, a tier or a chunker of your own keeps its promises.

One call each::

    from tierkv.testing import check_policy

    check_policy(MyOrder)

The checks need Hypothesis (extra ``testing``) and no test framework: each raises :class:`ConformanceError`, an
AssertionError, with the rule that was broken, or returns what it tried. tierkv's own policies, rules, tiers and
chunkers are tested by the same calls.

Beside them: a clock that a test owns (:class:`ManualClock`), a point that coroutines pass when a test says so
(:class:`Gate`), a tier that misbehaves on order (:class:`FaultTier`), leak checks, and an accelerator whose streams
really run late (:class:`SimDevice`, and with tierkv's device tier :class:`SimRuntime`);
:mod:`tierkv.testing.simdevice` has the rest of it.
"""

from __future__ import annotations

from tierkv.testing import _needs  # noqa: F401 - before all others
from tierkv.testing._admission import ORDINARY, check_admission
from tierkv.testing._blocking import blocking_calls
from tierkv.testing._chunker import check_chunker
from tierkv.testing._clock import ManualClock
from tierkv.testing._faults import Does, Fault, FaultTier
from tierkv.testing._gate import Gate
from tierkv.testing._leaks import no_leaked_tasks, no_leaks
from tierkv.testing._policy import check_policy
from tierkv.testing._policy_machine import PolicyMachine, policy_machine
from tierkv.testing._rules import ConformanceError, Report
from tierkv.testing._sim_device import DeadlockError, SimDevice, SimSchedule
from tierkv.testing._sim_races import RaceError
from tierkv.testing._sim_runtime import SimRuntime
from tierkv.testing._tier import check_tier
from tierkv.testing._tier_bench import RawDoor
from tierkv.testing._tier_machine import TierMachine, tier_machine

__all__ = (
    "ORDINARY",
    "ConformanceError",
    "DeadlockError",
    "Does",
    "Fault",
    "FaultTier",
    "Gate",
    "ManualClock",
    "PolicyMachine",
    "RaceError",
    "RawDoor",
    "Report",
    "SimDevice",
    "SimRuntime",
    "SimSchedule",
    "TierMachine",
    "blocking_calls",
    "check_admission",
    "check_chunker",
    "check_policy",
    "check_tier",
    "no_leaked_tasks",
    "no_leaks",
    "policy_machine",
    "tier_machine",
)
