"""A level that fails is left alone, tried again one at a time, and comes back; reads and writes each by themselves."""

from __future__ import annotations

import asyncio
import logging
from itertools import pairwise

import pytest

from tests.cases.kit import (
    LIMITS,
    cache_over,
    fetch,
    forget_primary,
    in_virtual_time,
    keep,
    opened,
    settle,
    turns_until,
    virtual_time,
)
from tests.toys import prompt
from tierkv import MemoryTier, MoverLimits, TieredCache
from tierkv._breaker import Breaker, Door, Traffic
from tierkv.errors import ConfigError
from tierkv.testing import Does, Fault, FaultTier


def test_failures_in_a_row_open_it_and_a_trial_decides() -> None:
    """Two failures with a success between them are none in a row; after the pause one batch closes or opens it."""
    breaker = Breaker(2)

    def after(*, success: bool) -> tuple[bool, Traffic]:
        return breaker.record(success=success), breaker.traffic

    assert after(success=False) == (False, Traffic.FLOWS)
    assert after(success=True) == (False, Traffic.FLOWS)
    assert after(success=False) == (False, Traffic.FLOWS)
    assert after(success=False) == (True, Traffic.STOPPED)
    assert after(success=True) == (False, Traffic.STOPPED), "that one had begun before"
    breaker.retry()
    assert after(success=False) == (True, Traffic.STOPPED)
    assert breaker.n_opened == 2
    breaker.retry()
    assert after(success=True) == (True, Traffic.FLOWS)
    assert after(success=False) == (False, Traffic.FLOWS), "it counts from the start again"


def test_a_missed_deadline_opens_it_at_once() -> None:
    """Whoever waits for a tier that hangs should be the only one."""
    breaker = Breaker(3)
    assert breaker.record(success=False, deadline=True) and breaker.traffic is Traffic.STOPPED


def test_a_door_on_trial_lets_one_through() -> None:
    """Nobody beside the one that is tried; another one if that ended without a verdict."""
    door = Door()
    assert door.lets_through
    door.set(Traffic.TRIAL)
    assert door.lets_through
    door.trying = True
    assert not door.lets_through
    door.set(Traffic.FLOWS)
    door.trying = True
    assert door.lets_through
    door.set(Traffic.STOPPED)
    assert not door.lets_through


async def _reads_of(cache: TieredCache, tier: FaultTier, n: int) -> int:
    """How many reads ``n`` askers of prompts that lie below have cost."""
    before = tier.n_calls["read"]
    await asyncio.gather(*(fetch(cache, prompt(branch)) for branch in range(1, 2 * n, 2)))
    return tier.n_calls["read"] - before


async def _until_trial(cache: TieredCache, door: str) -> None:
    """It stays so until somebody passes."""
    lower = cache._opened().hierarchy.levels[1]
    await turns_until(lambda: getattr(lower, door).traffic is Traffic.TRIAL)


@virtual_time
async def test_on_trial_one_is_tried_and_nobody_waits_with_it() -> None:
    """Half-open: of five askers one reads, the others miss at once; its end opens the breaker again or closes it."""
    tier = FaultTier(MemoryTier(name="lower"))
    limits = LIMITS._replace(deadline_s=0.2, breaker_cooldown_s=0.05)
    async with opened(cache_over(tier, n_slots=40, limits=limits)) as cache:
        for branch in range(1, 11, 2):
            await keep(cache, prompt(branch))
        await forget_primary(cache)
        tier.faults[:] = [Fault("read", Does.HANG)]
        assert await fetch(cache, prompt(1)) == 0
        await _until_trial(cache, "reads")
        assert await _reads_of(cache, tier, 5) == 1
        await _until_trial(cache, "reads")
        tier.faults.clear()
        tier.gate.open()
        assert await _reads_of(cache, tier, 5) >= 1
        assert [await fetch(cache, prompt(branch)) for branch in range(1, 11, 2)] == [4] * 5, "and all flows again"


@pytest.mark.parametrize("verb", ["read", "write"])
@virtual_time
async def test_reads_and_writes_are_left_alone_each_by_itself(verb: str) -> None:
    """Writes fail: what lies there is served meanwhile. Reads fail: chunks are still written."""
    tier = FaultTier(MemoryTier(name="lower"))
    limits = LIMITS._replace(breaker_cooldown_s=60.0, breaker_failures=1)
    async with opened(cache_over(tier, n_slots=12, limits=limits)) as cache:
        await keep(cache, prompt(1))
        await forget_primary(cache)
        tier.faults[:] = [Fault(verb, Does.FAIL)]
        if verb == "write":
            await keep(cache, prompt(2))
        else:
            assert await fetch(cache, prompt(1)) == 0
        await settle(cache)
        assert cache.statistics()["lower"].broken
        tier.faults.clear()
        if verb == "write":
            await keep(cache, prompt(4))
            await forget_primary(cache)
            assert await fetch(cache, prompt(4)) == 0, "dropped"
            assert await fetch(cache, prompt(1)) == 4, "served"
        else:
            await keep(cache, prompt(2))
            await settle(cache)
            assert await fetch(cache, prompt(1)) == 0, "a miss"
            assert cache.statistics()["lower"].n_stored == 8, "written"


def test_each_level_has_its_own_pause() -> None:
    """``Level(breaker_cooldown_s=...)``, in virtual time: that long, and that long again after a trial that failed."""
    opened_s: list[float] = []

    async def run() -> None:
        tier = FaultTier(MemoryTier(name="lower"), Fault("write", Does.FAIL))
        limits = MoverLimits(deadline_s=600.0, breaker_failures=1)
        cache = cache_over(tier, n_slots=40, limits=limits)
        cache._levels = (cache._levels[0], cache._levels[1]._replace(breaker_cooldown_s=7.0))
        cache = TieredCache(chunker=cache._chunker, levels=cache._levels, namespace=b"toy", limits=limits)
        async with cache:
            for n in range(3):
                await keep(cache, [n, n])
                assert await cache.wait_idle()
                opened_s.append(asyncio.get_running_loop().time())
                while cache.statistics()["lower"].broken:
                    await cache._opened().change(60.0)
            opened_s.append(asyncio.get_running_loop().time())
            assert cache.statistics()["lower"].refused == {"tier_error": 3}

    in_virtual_time(run())
    assert [later - earlier for earlier, later in pairwise(opened_s)] == pytest.approx([7.0] * 3)


def test_a_pause_that_is_none() -> None:
    """One sentence, before anything is opened."""
    level = cache_over(MemoryTier(name="lower"))._levels
    with pytest.raises(ConfigError, match=r"lower\.breaker_cooldown_s is -1"):
        TieredCache(
            chunker=cache_over()._chunker, levels=[level[0], level[1]._replace(breaker_cooldown_s=-1)], namespace=b"toy"
        )


@virtual_time
async def test_a_tier_that_stays_dead_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Each opening at first, then ever fewer of them, and one line when it works again."""
    tier = FaultTier(MemoryTier(name="lower"), Fault("write", Does.FAIL))
    limits = LIMITS._replace(breaker_cooldown_s=0.0, breaker_failures=1)
    async with opened(cache_over(tier, n_slots=4, limits=limits)) as cache:
        for n in range(20):
            await keep(cache, [n, n])
            await settle(cache)
            await _until_trial(cache, "writes")
        lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(lines) == 5, "the 1st, 2nd, 4th, 8th and 16th"
        assert lines[0] == "lower: writes fail ([Errno 5] planted): chunks are dropped for 0 s, then one is tried"
        tier.faults.clear()
        await keep(cache, [99, 99])
        await settle(cache)
    assert caplog.records[-1].getMessage() == "lower: writes work again"
