"""Whether an eviction order keeps the promises of :class:`~tierkv.protocols.EvictionPolicy`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final

from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import run_state_machine_as_test

from tierkv.protocols import BatchEvicting, CommitAware, EvictionPolicy, Expiring, HintAware, PinAware, UsedByKey
from tierkv.testing._clock import ManualClock
from tierkv.testing._keys import Counted, counted
from tierkv.testing._policy_machine import policy_machine
from tierkv.testing._rules import Report, plainly, require
from tierkv.types import Chunk

_N_RESIDENT: Final = 64
_N_ROUNDS: Final = 100
_MOST_REMEMBERED: Final = 20 * _N_RESIDENT
"""Keys that an order may still hold after 6,400 have come and gone through 64 places."""


def check_policy(
    factory: Callable[[], EvictionPolicy],
    *,
    leaves: bool = False,
    forgets: bool = True,
    pure: bool = True,
    clock: ManualClock | None = None,
    ttl_s: float | None = None,
    turns: bool = True,
    settings: hypothesis_settings | None = None,
) -> Report:
    """Try an order with everything that a level may do to it; raise ConformanceError where it breaks a rule.

    It must name every resident chunk that may leave exactly once and nothing else, leave out what is held if it is
    :class:`~tierkv.protocols.PinAware`, put first and last what was hinted if it is
    :class:`~tierkv.protocols.HintAware`, do the same for the same calls whatever the hash seed, not change by being
    asked, forget what was deleted, and not remember for ever what was evicted.

    Args:
        factory: makes a new, empty order.
        leaves: it claims to be an order of leaves: no chunk before one that continues it.
        forgets: False for an order that counts uses of keys across deletions.
        pure: False for an order in which being asked may move what is passed over (a hand that clears marks; tails
            before heads). It must still name the right chunks, and do the same for the same calls and questions.
        clock: the clock that ``factory`` hands to the order, if it has one; the check lets it run.
        ttl_s: for an order whose chunks expire at a fixed age: that age, in steps of 0.5 s.
        turns: False for an order that has first victims of its own (a quota), whatever was hinted of them.
        settings: Hypothesis's; by default those of the active profile, without a deadline.

    Raises:
        ConformanceError: with the rule, and with Hypothesis's steps to get there as notes.
    """
    machine = policy_machine(factory, leaves=leaves, forgets=forgets, pure=pure, clock=clock, ttl_s=ttl_s, turns=turns)
    policy = factory()
    _check_memory(policy)
    with plainly():
        run_state_machine_as_test(machine, settings=quiet(settings))
    passed = ["order", "determinism", "memory"]
    skipped: list[str] = []
    optional = {
        "leaves": leaves,
        "forgets deletes": forgets,
        "asking changes nothing": pure,
        "PinAware": isinstance(policy, PinAware),
        "BatchEvicting": isinstance(policy, BatchEvicting),
        "CommitAware": isinstance(policy, CommitAware),
        "UsedByKey": isinstance(policy, UsedByKey),
        "Expiring": isinstance(policy, Expiring),
        "HintAware": isinstance(policy, HintAware),
    }
    for name, has in optional.items():
        (passed if has else skipped).append(name)
    return Report(tuple(passed), tuple(skipped))


def quiet(settings: hypothesis_settings | None) -> hypothesis_settings:
    """A deadline on a shared machine measures the neighbours."""
    return hypothesis_settings(settings or hypothesis_settings(), deadline=None)


def _check_memory(policy: EvictionPolicy) -> None:
    """Keys are counted while they live: 6,400 pass through 64 places, in both ways of leaving."""
    gc.collect()
    n_before = Counted.n_alive
    for i in range(_N_RESIDENT * _N_ROUNDS):
        policy.on_insert([Chunk(counted(b"churn %d" % i), nbytes=1)])
        if i >= _N_RESIDENT:
            victims = policy.victims()
            require(iter(victims) is victims, "victims() gives an iterator", victims)
            key = next(victims, None)
            del victims
            require(key is not None, "victims() names a key while one is resident")
            assert key is not None
            policy.on_remove(key, evicted=i % 2 == 0)
            del key
    gc.collect()
    n_remembered = Counted.n_alive - n_before
    require(
        n_remembered <= _MOST_REMEMBERED,
        f"an order remembers a bounded number of keys that have left; of {_N_RESIDENT * _N_ROUNDS} it still holds",
        n_remembered,
    )
