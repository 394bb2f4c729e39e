"""Whether a rule of admission keeps the promises of :class:`~tierkv.protocols.Admission`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Final

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tierkv.protocols import Admission
from tierkv.testing._clock import ManualClock
from tierkv.testing._keys import AWKWARD, Counted, counted, salted
from tierkv.testing._policy import quiet
from tierkv.testing._rules import Report, fail, plainly, require
from tierkv.types import Chunk, ChunkKey

ORDINARY: Final = Chunk(ChunkKey(b"ordinary" * 4), ChunkKey(b"its parent" * 3), 0, 128, 4096)
"""A whole, small chunk in the middle of a prefix: what a rule must let in sooner or later."""
_DAY_S: Final = 86_400.0
_N_DAYS: Final = 30

_keys = st.sampled_from(AWKWARD)
_chunks = st.builds(
    Chunk, key=_keys, parent=st.none() | _keys, group=st.integers(0, 3), end_token=st.integers(1, 1 << 40),
    nbytes=st.sampled_from([0, 1, 4096, 1 << 20, 1 << 40]), tenant=st.sampled_from(["", "red", "\udcff"]),
    partial=st.booleans(),
)  # fmt: skip
_offers = st.lists(_chunks | st.sampled_from([0.0, 0.25, 1.0, 3600.0, _DAY_S]), max_size=40)


def check_admission(
    factory: Callable[[], Admission],
    *,
    clock: ManualClock | None = None,
    admits: Chunk | None = ORDINARY,
    most_keys: int = 100_000,
    settings: hypothesis_settings | None = None,
) -> Report:
    """Try a rule with all kinds of chunks; raise ConformanceError where it breaks a promise.

    It must say True or False and nothing else for any chunk, say the same for the same offers whatever the hash seed,
    go by no clock but the one it was given, remember a bounded number of keys, and admit an ordinary chunk some day.

    Args:
        factory: makes a new rule.
        clock: the clock that ``factory`` hands to the rule, if it has one; the check lets it run.
        admits: a chunk that must be let in if it is offered every day for a month; None if there is no such chunk.
        most_keys: how many keys it may remember. Twice as many are offered.
        settings: Hypothesis's; by default those of the active profile, without a deadline.

    Raises:
        ConformanceError: with the rule, and with Hypothesis's example as notes.
    """
    clock = clock or ManualClock()

    @quiet(settings)
    @given(_offers)
    def offers_are_answered(offers: Sequence[Chunk | float]) -> None:
        clock.restart()
        rule, same, other = factory(), factory(), factory()
        for offer in offers:
            if not isinstance(offer, Chunk):
                clock.advance(offer)
                continue
            answer = rule.admits(offer)
            require(isinstance(answer, bool), "admits() answers True or False", answer)
            require(same.admits(offer) is answer, "the same offers get the same answers", offer)
            require(
                other.admits(salted(offer)) is answer,
                "the same offers get the same answers, whatever the hash seed: it depends on hashes of keys",
                offer,
            )

    with plainly():
        offers_are_answered()
    clock.restart()
    _check_memory(factory(), most_keys)
    if admits is not None:
        clock.restart()
        _check_open(factory(), clock, admits)
    passed = ("answers", "determinism", "memory")
    return Report((*passed, "admits"), ()) if admits is not None else Report(passed, ("admits",))


def _check_memory(rule: Admission, most_keys: int) -> None:
    gc.collect()
    n_before = Counted.n_alive
    for i in range(2 * most_keys):
        rule.admits(Chunk(counted(b"churn %d" % i), nbytes=4096))
    gc.collect()
    n_remembered = Counted.n_alive - n_before
    require(n_remembered <= most_keys, f"a rule remembers at most {most_keys} keys; it still holds", n_remembered)


def _check_open(rule: Admission, clock: ManualClock, chunk: Chunk) -> None:
    for _ in range(_N_DAYS):
        if rule.admits(chunk):
            return
        clock.advance(_DAY_S)
    fail(f"a rule lets an ordinary chunk in some day; not in {_N_DAYS} days", chunk)
