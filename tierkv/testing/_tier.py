"""Whether a tier keeps the promises of :class:`~tierkv.protocols.Tier` and of the capabilities that it has."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import run_state_machine_as_test

from tierkv.protocols import Bounded, Charging, HostTier, Owning, ScanTier
from tierkv.testing import _tier_capabilities as capabilities
from tierkv.testing import _tier_rules as rules
from tierkv.testing._policy import quiet
from tierkv.testing._rules import Report, plainly
from tierkv.testing._tier_bench import Bench, DoorFactory, Settings, TierFactory, run
from tierkv.testing._tier_machine import tier_machine

_Check = Callable[[Bench], Coroutine[Any, Any, None]]

_ALWAYS: Final[tuple[_Check, ...]] = (
    rules.constructors_do_no_io,
    rules.closed_means_closed,
    rules.a_cancelled_close_still_closes,
    rules.batches_answer_per_key_in_order,
    rules.buffers_are_the_callers,
    rules.a_later_write_replaces,
    rules.deleted_chunks_are_gone,
    rules.calls_may_overlap,
    rules.a_write_shows_whole_or_not_at_all,
    rules.cancelled_calls_do_no_harm,
    rules.the_loop_is_never_blocked,
)
_WITH_RAW: Final[tuple[_Check, ...]] = (
    rules.the_medium_holds_what_was_written,
    rules.what_lies_on_the_medium_is_read,
    capabilities.what_vanished_is_missing,
)
_BY_CAPABILITY: Final[dict[type, tuple[_Check, ...]]] = {
    Charging: (capabilities.charges_cover_what_is_stored,),
    Bounded: (capabilities.a_bound_is_kept,),
    HostTier: (capabilities.slots_are_memory,),
    ScanTier: (
        capabilities.chunks_outlive_their_tier,
        capabilities.a_probe_finds_what_a_scan_has_not,
        capabilities.a_scan_ends_with_its_tier,
        capabilities.namespaces_are_apart,
    ),
    Owning: (capabilities.what_is_owned_is_there,),
}
_WITHOUT: Final[dict[type, tuple[_Check, ...]]] = {ScanTier: (capabilities.what_cannot_be_scanned_starts_empty,)}
_VERIFYING: Final[tuple[_Check, ...]] = (capabilities.damage_is_never_served,)


def check_tier(
    factory: TierFactory,
    *,
    raw: DoorFactory | None = None,
    verifies: bool | None = None,
    chunk_nbytes: int = 5000,
    capacity_nbytes: int = 1 << 22,
    settings: hypothesis_settings | None = None,
) -> Report:
    """Try a tier with everything that a cache does to it; raise ConformanceError where it breaks a rule.

    Every rule runs in an event loop and a directory of its own and must leave no descriptor, thread or task behind;
    then a state machine compares the tier with a dict. Rules of capabilities that the tier lacks are skipped, as are
    those of tiers that lack one; the report says which. Call it where no event loop runs (a plain test function).

    Args:
        factory: makes a tier over a directory of its own, which is empty at first; a tier that needs none ignores it.
            A :class:`~tierkv.protocols.ScanTier` that is made again for the same directory must find its chunks, any
            other must start without.
        raw: given an open tier, a side door to its medium (:class:`RawDoor`), so that the tier is not its own witness.
            Without one, what is checked is only that the tier agrees with itself.
        verifies: the tier notices damage; by default every ScanTier must. Needs ``raw``.
        chunk_nbytes: payload of the largest chunk; not a multiple of anything finds more.
        capacity_nbytes: with which the tier is opened; room for at least 40 chunks.
        settings: Hypothesis's, for the state machine; by default those of the active profile, without a deadline.

    Raises:
        ConformanceError: with the rule, and from the state machine with the steps to get there as notes.
    """
    probe = factory(Path("not there"))
    verifies = isinstance(probe, ScanTier) if verifies is None else verifies
    given = Settings(factory, raw, chunk_nbytes, capacity_nbytes, verifies)
    chosen: list[_Check] = list(_ALWAYS)
    skipped: list[_Check] = []
    (chosen if raw is not None else skipped).extend(_WITH_RAW)
    (chosen if raw is not None and verifies else skipped).extend(_VERIFYING)
    for capability, checks in _BY_CAPABILITY.items():
        (chosen if isinstance(probe, capability) else skipped).extend(checks)
    for capability, checks in _WITHOUT.items():
        (skipped if isinstance(probe, capability) else chosen).extend(checks)
    for check in chosen:
        run(given, check.__name__, check)
    machine = tier_machine(
        factory, raw=raw, verifies=verifies, chunk_nbytes=chunk_nbytes, capacity_nbytes=capacity_nbytes
    )
    with plainly():
        run_state_machine_as_test(machine, settings=quiet(settings))
    return Report((*map(_named, chosen), "agrees with a dict"), tuple(map(_named, skipped)))


def _named(check: _Check) -> str:
    return check.__name__.replace("_", " ")
