"""The control page between a worker and a scheduler's side that hold separate mappings of it."""

import secrets
from collections.abc import Iterator

import pytest

from tests.pool_process import PoolProcess
from tierkv.errors import ClosedError, ConfigError
from tierkv.tiers._pool import SharedPool
from tierkv.tiers._rendezvous import NotServedError, Role
from tierkv.vllm._control import MAX_TICKET, ControlPage, CopyStatus, Direction

MODEL, LAYOUT, OTHER = b"m" * 32, b"l" * 32, b"o" * 32
STORE, LOAD = Direction.STORE, Direction.LOAD
PENDING, OK, FAILED = CopyStatus.PENDING, CopyStatus.OK, CopyStatus.FAILED


@pytest.fixture
def pages() -> Iterator[tuple[ControlPage, ControlPage]]:
    """A page of 2 ranks and 8 slots, as worker rank 0 and as the scheduler see it."""
    shared_id = secrets.token_hex(8)
    worker = ControlPage.create(shared_id, n_ranks=2, n_slots=8)
    scheduler = ControlPage.join(shared_id, role=Role.SCHEDULER, rank=0, n_ranks=2, n_slots=8)
    yield worker, scheduler
    scheduler.close()
    worker.close()


def test_ok_only_when_every_rank_has_stamped(pages):
    """Pending until the last rank; then ok for that ticket and the ones before, pending for the next."""
    worker, scheduler = pages
    assert scheduler.status(3, STORE, 7) is PENDING
    worker.stamp(0, 3, STORE, 7, ok=True)
    assert scheduler.status(3, STORE, 7) is PENDING
    worker.stamp(1, 3, STORE, 7, ok=True)
    assert [scheduler.status(3, STORE, ticket) for ticket in (6, 7, 8)] == [OK, OK, PENDING]
    assert [scheduler.ended(3, STORE, ticket) for ticket in (7, 8)] == [True, False]


def test_one_failing_rank_fails_the_ticket(pages):
    """One rank's failure fails the whole copy, but only once all have ended: till then memory is written."""
    worker, scheduler = pages
    worker.stamp(1, 0, STORE, 1, ok=False)
    assert scheduler.status(0, STORE, 1) is PENDING
    worker.stamp(0, 0, STORE, 1, ok=True)
    assert scheduler.status(0, STORE, 1) is FAILED
    assert scheduler.ended(0, STORE, 1)


@pytest.mark.parametrize(("first", "second"), [(OK, FAILED), (FAILED, OK)])
def test_a_later_ticket_does_not_hide_an_earlier_outcome(pages, first, second):
    """A failed ticket stays failed after a good one; a good one before a failure is unknown, thus failed."""
    worker, scheduler = pages
    for rank in (0, 1):
        worker.stamp(rank, 0, LOAD, 1, ok=first is OK)
    assert scheduler.status(0, LOAD, 1) is first
    for rank in (0, 1):
        worker.stamp(rank, 0, LOAD, 2, ok=second is OK)
    assert scheduler.status(0, LOAD, 2) is second
    assert scheduler.status(0, LOAD, 1) is FAILED


def test_directions_slots_and_ranks_are_apart(pages):
    """A stamp touches its own word and nothing else."""
    worker, scheduler = pages
    for rank in (0, 1):
        worker.stamp_many(rank, STORE, [0, 7], [5, 6], ok=True)
    assert scheduler.statuses(STORE, range(8), [5, *[1] * 6, 6]) == [OK, *[PENDING] * 6, OK]
    assert scheduler.statuses(LOAD, range(8), [1] * 8) == [PENDING] * 8
    assert scheduler.identities() is None


def test_tickets_rise(pages):
    """An equal, an earlier and an impossible ticket are errors that change nothing; the largest one works."""
    worker, scheduler = pages
    worker.stamp(0, 1, STORE, 5, ok=True)
    for wrong in (5, 4, 0, MAX_TICKET + 1):
        with pytest.raises(ValueError, match=f"slot 1: ticket {wrong} after 5"):
            worker.stamp(0, 1, STORE, wrong, ok=True)
    worker.stamp(1, 1, STORE, MAX_TICKET, ok=True)
    assert scheduler.status(1, STORE, 5) is OK
    worker.stamp(0, 1, STORE, MAX_TICKET, ok=False)
    assert scheduler.status(1, STORE, MAX_TICKET) is FAILED


def test_nothing_outside_the_page_is_touched(pages):
    """Numbers outside, negative ones too, are IndexErrors on both sides."""
    worker, scheduler = pages
    for slot in (-1, 8):
        with pytest.raises(IndexError, match="slot"):
            worker.stamp(0, slot, STORE, 1, ok=True)
        with pytest.raises(IndexError, match="slot"):
            scheduler.status(slot, STORE, 1)
    for rank in (-1, 2):
        with pytest.raises(IndexError, match="rank"):
            worker.stamp(rank, 0, STORE, 1, ok=True)
        with pytest.raises(IndexError, match="rank"):
            worker.publish_identity(rank, MODEL, LAYOUT)
    assert scheduler.statuses(STORE, range(8), [1] * 8) == [PENDING] * 8


@pytest.mark.parametrize("second", [(MODEL, LAYOUT), (MODEL, OTHER), (OTHER, LAYOUT)])
def test_identities_wait_for_every_rank(pages, second):
    """None until the last rank has published; then all digests by rank."""
    worker, scheduler = pages
    worker.publish_identity(1, *second)
    assert scheduler.identities() is None
    worker.publish_identity(0, MODEL, LAYOUT)
    found = scheduler.identities()
    assert found is not None
    assert found.models == (MODEL, second[0])
    assert found.layouts == (LAYOUT, second[1])


def test_identity_is_published_once(pages):
    """The same again is fine, another one or a digest of another length is an error."""
    worker, scheduler = pages
    worker.publish_identity(0, MODEL, LAYOUT)
    worker.publish_identity(0, MODEL, LAYOUT)
    with pytest.raises(ValueError, match="another identity"):
        worker.publish_identity(0, MODEL, OTHER)
    with pytest.raises(ValueError, match="32 bytes"):
        worker.publish_identity(1, MODEL, b"short")
    worker.publish_identity(1, MODEL, LAYOUT)
    assert scheduler.identities() == ((MODEL, MODEL), (LAYOUT, LAYOUT))


def test_a_page_and_a_pool_live_under_one_id():
    """They do not clash, and the page can name the pool's generation, so that a joiner gets the pair."""
    shared_id = secrets.token_hex(8)
    pool = SharedPool.create(shared_id, 1, 4096)
    page = ControlPage.create(shared_id, n_ranks=1, n_slots=1, generation=pool.generation)
    seen = ControlPage.join(shared_id, role=Role.SCHEDULER, rank=0, n_ranks=1, n_slots=1)
    joined = SharedPool.join(shared_id, role=Role.SCHEDULER, rank=0, generation=seen.generation)
    assert seen.generation == page.generation == pool.generation == joined.generation != 0
    for thing in (joined, seen, page, pool):
        thing.close()


@pytest.mark.parametrize("wrong", [{"n_ranks": 1}, {"n_slots": 9}, {"generation": 1}])
def test_another_geometry_is_refused(pages, wrong):
    """A worker that counts ranks or slots otherwise, or comes from another generation, does not get in."""
    shared_id = secrets.token_hex(8)
    page = ControlPage.create(shared_id, n_ranks=2, n_slots=8)
    with pytest.raises(ConfigError, match="refused us its control page"):
        ControlPage.join(shared_id, role=Role.SCHEDULER, rank=0, **{"n_ranks": 2, "n_slots": 8} | wrong)
    page.close()


@pytest.mark.parametrize("wrong", [{"n_ranks": 0}, {"n_slots": 0}, {"n_ranks": True}, {"rank": 2}, {"rank": -1}])
def test_wrong_numbers_make_nothing(wrong):
    """No ranks, no slots, a boolean, a rank outside: one error, and nobody serves the id afterwards."""
    shared_id = secrets.token_hex(8)
    with pytest.raises(ConfigError):
        ControlPage.create(shared_id, **{"n_ranks": 2, "n_slots": 8, "rank": 0} | wrong)
    with pytest.raises(NotServedError):
        ControlPage.join(shared_id, role=Role.SCHEDULER, rank=0, n_ranks=2, n_slots=8, deadline_s=0)


def test_closed_means_closed(pages):
    """Closing twice is silent, later calls raise ClosedError, and the other side sees that the creator went."""
    worker, scheduler = pages
    assert scheduler.creator_alive()
    assert worker.creator_alive()
    worker.close()
    worker.close()
    assert not worker.creator_alive()
    for call in (lambda: worker.stamp(0, 0, STORE, 1, ok=True), worker.identities, lambda: worker.status(0, LOAD, 1)):
        with pytest.raises(ClosedError):
            call()
    assert not scheduler.creator_alive()
    assert scheduler.status(0, STORE, 1) is PENDING


def test_stamps_cross_processes():
    """A real worker process stamps and publishes; this one reads it, and goes on reading after it was killed."""
    shared_id = secrets.token_hex(8)
    with PoolProcess() as other:
        other.ask("create_page", shared_id=shared_id, n_ranks=1, n_slots=4)
        page = ControlPage.join(shared_id, role=Role.SCHEDULER, rank=0, n_ranks=1, n_slots=4)
        other.ask("stamp", rank=0, direction=0, slots=[1, 2], tickets=[3, 4], ok=True)
        other.ask("publish", rank=0, model=MODEL.hex(), layout=LAYOUT.hex())
        other.kill()
    assert page.statuses(STORE, [1, 2, 3], [3, 4, 1]) == [OK, OK, PENDING]
    assert page.identities() == ((MODEL,), (LAYOUT,))
    assert not page.creator_alive()
    page.close()


def test_no_word_is_ever_seen_half_written():
    """A process that stamps tickets with all bytes alike is read meanwhile: each word seen has all bytes alike."""
    shared_id = secrets.token_hex(8)
    with PoolProcess() as other:
        other.ask("create_page", shared_id=shared_id, n_ranks=1, n_slots=1)
        page = ControlPage.join(shared_id, role=Role.SCHEDULER, rank=0, n_ranks=1, n_slots=1)
        other.start("hammer")
        place = page._start(0, STORE)
        seen: set[int] = set()
        n_looks = 0
        while n_looks < 100_000 or len(seen) < 10:
            seen.add(page._words[place])
            n_looks += 1
        other.start("creator_alive_of_page")
        assert other.wait() > 0
        assert other.wait() is True
    page.close()
    torn = [word for word in seen if len(set(word.to_bytes(8, "little"))) != 1]
    assert torn == []
