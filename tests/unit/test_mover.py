"""The Mover by itself: what of a batch is told apart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest

from tests.cases.kit import turns_until, virtual_time
from tests.fs_kit import LONGEST, STRIDE, chunk_of, payload_of, slots
from tests.toys import loop_time
from tierkv import MemoryTier, MoverLimits
from tierkv._breaker import Traffic
from tierkv._mover import Completion, Mover
from tierkv.protocols import TierContext
from tierkv.testing import Does, Fault, FaultTier
from tierkv.types import Chunk, Reason, Status, Transfer, TransferKind


class Between(NamedTuple):
    mover: Mover
    above: FaultTier
    chunks: list[Chunk]
    done: list[Completion]
    told: list[tuple[int, Traffic, Traffic]]
    """Each time a breaker changed: the level, its reads, its writes."""


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("does", [Does.RAISE, Does.FAIL, Does.SHORT])
async def test_one_of_a_batch_between_lower_levels(verb: str, does: Does) -> None:
    """The fifth of eight cannot be read above, or written below, in whatever way: the other seven are there."""
    above, below = FaultTier(MemoryTier(name="above")), FaultTier(MemoryTier(name="below"))
    (above if verb == "read" else below).faults.append(Fault(verb, does, 5))
    ctx = TierContext(LONGEST, STRIDE, b"", 8 * STRIDE)
    chunks = [chunk_of(i) for i in range(8)]
    done: list[Completion] = []
    for tier in (above, below):
        await tier.open(ctx)
    mover = Mover([MemoryTier(), above, below], lambda _: slots(1)[0], done.append, stride_nbytes=STRIDE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(above, "faults", [])
        await above.write([(chunk, memoryview(payload_of(chunk.key, LONGEST))) for chunk in chunks])
    mover.submit([Transfer(i, TransferKind.DEMOTE, chunk, 1, 2, None) for i, chunk in enumerate(chunks)])
    await turns_until(lambda: len(done) == 8)
    assert [each.transfer_id for each in done] == list(range(8))
    assert [each.outcome.status for each in done] == [Status.OK] * 4 + [Status.FAILED] + [Status.OK] * 3
    assert done[4].outcome.reason is Reason.TIER_ERROR
    there = await below.contains([chunk.key for chunk in chunks])
    done_after_all = verb == "write" and does is Does.SHORT
    assert there == [i != 4 or done_after_all for i in range(8)]
    await mover.aclose()
    for tier in (above, below):
        await tier.aclose()


@asynccontextmanager
async def between(does: Does, limits: MoverLimits | None = None) -> AsyncIterator[Between]:
    """A Mover, by the loop's clock, over two lower levels; the upper holds eight chunks, and its reads do that."""
    above, below = FaultTier(MemoryTier(name="above")), MemoryTier(name="below")
    chunks, done, told = [chunk_of(i) for i in range(8)], list[Completion](), list[tuple[int, Traffic, Traffic]]()
    for tier in (above, below):
        await tier.open(TierContext(LONGEST, STRIDE, b"", 16 * STRIDE))
    await above.write([(chunk, memoryview(payload_of(chunk.key, LONGEST))) for chunk in chunks])
    above.faults.append(Fault("read", does))
    mover = Mover(
        [MemoryTier(), above, below],
        lambda _: slots(1)[0],
        done.append,
        on_breaker=lambda level, *, reads, writes: told.append((level, reads, writes)),
        stride_nbytes=STRIDE,
        limits=limits,
        clock=loop_time,
    )
    yield Between(mover, above, chunks, done, told)
    await mover.aclose()
    for tier in (above, below):
        await tier.aclose()


@virtual_time
async def test_who_hangs_when_read_is_not_who_hangs_when_written() -> None:
    """Copies between lower levels whose source hangs: past the deadline its reads stop, and the level below goes on."""
    limits = MoverLimits(deadline_s=0.2, breaker_cooldown_s=3600.0, n_batches=1, batch_nbytes=LONGEST)
    async with between(Does.HANG, limits) as (mover, above, chunks, done, told):
        mover.submit([Transfer(i, TransferKind.DEMOTE, chunk, 1, 2, None) for i, chunk in enumerate(chunks)])
        await turns_until(lambda: len(done) == 8)
        assert {each.outcome.reason for each in done} == {Reason.DEADLINE}
        assert [each.ended for each in done].count(False) == 1, "one runs on, the others were in the queue"
        assert told == [(1, Traffic.STOPPED, Traffic.FLOWS)]
        above.faults.clear()
        above.gate.open()
        await turns_until(lambda: len(done) == 9)
        assert done[-1].outcome.ok
        mover.submit([Transfer(9, TransferKind.DEMOTE, chunks[1], 1, 2, None)])
        await turns_until(lambda: len(done) == 10)
        assert done[-1].outcome.ok


@pytest.mark.parametrize("does", [Does.RAISE, Does.FAIL, Does.MISS])
async def test_who_cannot_be_read_is_not_who_cannot_be_written(does: Does) -> None:
    """Copies between lower levels whose source fails: not the writes of the level below stop, but its own reads."""
    async with between(does) as (mover, _, chunks, done, told):
        for i, chunk in enumerate(chunks):
            mover.submit([Transfer(i, TransferKind.DEMOTE, chunk, 1, 2, None)])
            await turns_until(lambda i=i: len(done) == i + 1)  # type: ignore[misc]
        assert {each.outcome.status for each in done} == {Status.FAILED}
        broken = does is not Does.MISS  # a miss is an answer
        assert told == [(1, Traffic.STOPPED, Traffic.FLOWS)] * broken
