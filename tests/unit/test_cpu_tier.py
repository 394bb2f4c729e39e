"""CPUTier over shared and handed-over pools; what it does as a private tier is in test_memory_tier."""

import asyncio
import gc
import secrets
import threading

import pytest

from tests.patience import PATIENCE_S
from tests.pool_process import PoolProcess
from tierkv.errors import ClosedError, ConfigError, TierError
from tierkv.protocols import HostTier, TierContext
from tierkv.tiers._pool import PrivatePool, SharedPool
from tierkv.tiers._rendezvous import NotServedError, Role
from tierkv.tiers.cpu import CPUTier
from tierkv.types import Chunk, ChunkKey

STRIDE = 4096
CTX = TierContext(4000, STRIDE, b"", 4 * STRIDE)


@pytest.fixture
def shared_id():
    return secrets.token_hex(8)


def test_constructing_does_no_io(shared_id):
    """A tier that is never opened has made nothing: no thread, no name, no slots; its views are refused."""
    before = threading.active_count()
    tier = CPUTier(shared_id=shared_id)
    assert (threading.active_count(), tier.n_slots) == (before, 0)
    with pytest.raises(ClosedError):
        tier.slot_view(0)
    with pytest.raises(NotServedError):
        SharedPool.join(shared_id, role=Role.WORKER, rank=1, deadline_s=0)


async def test_tiers_of_one_engine_open_in_any_order(shared_id):
    """The scheduler's tier opens first and waits without blocking the loop; then both see the same bytes."""
    scheduler = CPUTier(shared_id=shared_id, role="scheduler", join_deadline_s=PATIENCE_S)
    opening = asyncio.create_task(scheduler.open(CTX))
    await asyncio.sleep(0.05)
    assert not opening.done()
    worker = CPUTier(shared_id=shared_id)
    assert isinstance(worker, HostTier)
    await worker.open(CTX)
    await opening
    worker.slot_view(3)[:] = b"w" * STRIDE
    assert scheduler.slot_view(3) == b"w" * STRIDE
    assert scheduler.n_slots == 4
    assert scheduler.buffer[-1] == ord("w")
    await scheduler.aclose()
    await worker.aclose()


async def test_a_worker_in_another_process_joins(shared_id):
    """Rank 0's tier lives here, rank 1 in a process of its own."""
    tier = CPUTier(shared_id=shared_id)
    await tier.open(CTX)
    with PoolProcess() as other:
        other.ask("join", shared_id=shared_id, role="WORKER", rank=1, n_slots=4, stride_nbytes=STRIDE)
        other.ask("fill", slot=1, byte=5)
    assert tier.slot_view(1) == b"\5" * STRIDE
    await tier.aclose()


async def test_waiting_for_nobody_ends(shared_id):
    """The deadline is kept, is an error of the tier, and names itself."""
    with pytest.raises(TierError, match=r"^cpu: not open after 0.1 s: .*nobody serves it"):
        await CPUTier(shared_id=shared_id, rank=1, join_deadline_s=0.1).open(CTX)


async def test_another_capacity_is_refused(shared_id):
    """A rank that was given another size does not join."""
    worker = CPUTier(shared_id=shared_id)
    await worker.open(CTX)
    with pytest.raises(ConfigError, match="n_slots is 4, not 5"):
        await CPUTier(shared_id=shared_id, rank=1).open(TierContext(4000, STRIDE, b"", 5 * STRIDE))
    await worker.aclose()


async def test_cancelled_while_waiting_leaves_nothing(shared_id):
    """A join that is cancelled can be tried again: it was no member yet."""
    tier = CPUTier(shared_id=shared_id, rank=1)
    opening = asyncio.create_task(tier.open(CTX))
    await asyncio.sleep(0.05)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    worker = CPUTier(shared_id=shared_id)
    await worker.open(CTX)
    await tier.open(CTX)
    await tier.aclose()
    await worker.aclose()


async def test_closing_goes_on_when_cancelled(shared_id):
    """A cancelled aclose has given up the pool all the same: the name is free for the next engine."""
    tier = CPUTier(shared_id=shared_id, populate=False)
    await tier.open(CTX)
    closing = asyncio.create_task(tier.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    for thread in [thread for thread in threading.enumerate() if thread.name == "tierkv-unmap"]:
        thread.join(PATIENCE_S)
    SharedPool.create(shared_id, 1, STRIDE).close()


async def test_shared_slots_take_no_keyed_writes(shared_id):
    """Two processes that each assign slots would overwrite each other: a shared pool refuses to be a lower level."""
    tier = CPUTier(shared_id=shared_id)
    await tier.open(CTX)
    key = ChunkKey(b"k")
    with pytest.raises(TierError, match="keyed"):
        await tier.write([(Chunk(key, nbytes=1), memoryview(b"x"))])
    assert list(await tier.contains([key])) == [False]
    await tier.aclose()


async def test_a_pool_that_is_handed_over_stays_its_makers():
    """The tier shows the maker's slots and leaves them mapped; another size is refused with both numbers."""
    pool = PrivatePool(4, STRIDE, populate=False)
    tier = CPUTier(pool=pool)
    with pytest.raises(ConfigError, match=f"capacity is {3 * STRIDE}, .*{4 * STRIDE} bytes of the pool handed over"):
        await tier.open(TierContext(4000, STRIDE, b"", 3 * STRIDE))
    await tier.open(CTX)
    tier.slot_view(2)[:1] = b"x"
    await tier.aclose()
    assert pool.view(2)[0] == ord("x")
    pool.close()


async def test_repeated_opening_keeps_no_memory():
    """100 openings with a view kept of every tenth leave ten mappings, which go with their views."""
    tier, kept = CPUTier(populate=False), []
    for turn in range(100):
        await tier.open(CTX)
        if turn % 10 == 0:
            kept.append(tier.slot_view(0))
            kept[-1][:] = bytes([turn]) * STRIDE
        await tier.aclose()
    assert [view[0] for view in kept] == list(range(0, 100, 10))
    kept.clear()
    gc.collect()


async def test_opening_twice_is_an_error_that_keeps_the_first():
    """A second open would lose the slots that the first has handed out."""
    tier = CPUTier(populate=False)
    await tier.open(CTX)
    tier.slot_view(0)[:1] = b"x"
    with pytest.raises(TierError, match="open already"):
        await tier.open(CTX)
    assert tier.slot_view(0)[0] == ord("x")
    await tier.aclose()


@pytest.mark.parametrize(
    "wrong",
    [{"role": "manager"}, {"rank": -1}, {"rank": True}, {"join_deadline_s": -1}, {"join_deadline_s": float("nan")}],
)
def test_wrong_settings_are_refused_at_construction(wrong):
    """Unknown roles, negative or boolean ranks, and impossible deadlines name the option."""
    with pytest.raises(ConfigError, match=f"cpu.{next(iter(wrong))} is"):
        CPUTier(shared_id="x", **wrong)


def test_a_pool_and_an_id_exclude_each_other():
    """Both would say where the slots are."""
    pool = PrivatePool(1, STRIDE, populate=False)
    with pytest.raises(ConfigError, match="shared_id"):
        CPUTier(shared_id="x", pool=pool)
    pool.close()
