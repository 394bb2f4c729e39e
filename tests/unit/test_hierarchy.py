"""The hierarchy's rules by example, one a test; the state machines in tests/property prove them in any order."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from tierkv._breaker import Traffic
from tierkv._hierarchy import ABSENT, UNSETTLED, Hierarchy
from tierkv._ledger import GONE, PENDING, READY, Entry
from tierkv._level import Flight, LevelPlan, Waiting, Writes
from tierkv.policies import FIFO, LRU
from tierkv.types import (
    Chunk,
    ChunkKey,
    EventKind,
    Found,
    Outcome,
    Reason,
    Status,
    Stop,
    Transfer,
    TransferKind,
)

SLOT = 100


def chain(name: str, n: int, *, parent: Chunk | None = None, nbytes: int = SLOT) -> list[Chunk]:
    """``n`` chunks, each the next one's parent: name0, name1, ..."""
    chunks: list[Chunk] = []
    for i in range(n):
        end_token = parent.end_token + 8 if parent else 8
        key = ChunkKey(f"{name}{i}".encode())
        parent = Chunk(key, parent.key if parent else None, 0, end_token, nbytes)
        chunks.append(parent)
    return chunks


def over(n_slots: int, *lowers: LevelPlan, policy: LRU | FIFO | None = None) -> Hierarchy:
    primary = LevelPlan("primary", 0, policy or LRU(), n_slots=n_slots, slot_nbytes=SLOT)
    return Hierarchy([primary, *lowers], record_events=True)


def disk(n_chunks: int = 100, **options: object) -> LevelPlan:
    return LevelPlan("disk", n_chunks * SLOT, LRU(), **options)  # type: ignore[arg-type]


def store(h: Hierarchy, chunks: Sequence[Chunk]) -> list[ChunkKey]:
    """Offer and fill; the keys that got in."""
    reserved = h.offer(chunks).reserved
    h.commit_store(reserved)
    return [entry.key for entry in reserved]


def run(h: Hierarchy, fails: Callable[[Transfer], Status] = lambda _: Status.OK) -> list[Transfer]:
    """Run every transfer, and those that follow, to its end."""
    done: list[Transfer] = []
    while batch := h.take_transfers():
        for transfer in batch:
            h.finish(transfer.id, Outcome(transfer.chunk.key, fails(transfer)))
        done += batch
    h.check()
    return done


def keys(h: Hierarchy, level: int = 0, state: object = READY) -> set[ChunkKey]:
    return {entry.key for entry in h.levels[level].ledger if entry.state is state}


def names(chunks: Iterable[Chunk]) -> set[ChunkKey]:
    return {chunk.key for chunk in chunks}


def told(h: Hierarchy, level: int) -> set[ChunkKey]:
    """The level's index, rebuilt from all events so far."""
    known: set[ChunkKey] = set()
    for event in h.take_events():
        if event.level == level:
            (known.add if event.kind is EventKind.STORED else known.remove)(event.key)
    return known


# -- who may leave ----------------------------------------------------------------------------------------------------


def test_idle_chunks_make_room_while_others_are_pinned() -> None:
    """Pinned chunks stay, idle ones go, and what is left over is refused without a change.

    https://github.com/vllm-project/vllm/pull/55461 (A1)
    """
    h = over(4)
    for name in "abcd":
        store(h, chain(name, 1))
    pinned = [h.primary.get(ChunkKey(key)) for key in (b"c0", b"d0")]
    for entry in pinned:
        assert entry is not None
        h.hold(entry)
    assert store(h, chain("e", 1) + chain("f", 1)) == [b"e0", b"f0"]
    assert keys(h) == {b"c0", b"d0", b"e0", b"f0"}
    for key in (b"e0", b"f0"):
        entry = h.primary.get(ChunkKey(key))
        assert entry is not None
        h.hold(entry)
    h.take_events()
    offer = h.offer(chain("g", 2))
    assert [reason for _, reason in offer.refused] == [Reason.FULL] * 2 and not offer.reserved
    assert not h.take_events() and keys(h) == {b"c0", b"d0", b"e0", b"f0"}


def test_tails_leave_before_heads_while_a_prefix_still_arrives() -> None:
    """A prefix that is stored in pieces loses its tail first, also before its request has ended.

    https://github.com/novitalabs/pegaflow/issues/396 (A2)
    """
    h = over(4)
    prefix = chain("c", 4)
    store(h, prefix[:2])
    store(h, prefix[2:])
    store(h, chain("x", 1))
    assert b"c3" not in keys(h)
    assert h.lookup(prefix).n_tokens == prefix[2].end_token


def test_a_shared_head_leaves_after_all_its_tails() -> None:
    """Two requests share c0 and c1: both tails are gone before c1 goes.

    https://github.com/novitalabs/pegaflow/issues/396 (A2)
    """
    h = over(4)
    shared = chain("c", 2)
    store(h, [*shared, *chain("l", 1, parent=shared[1])])
    store(h, chain("r", 1, parent=shared[1]))
    left: list[ChunkKey] = []
    for i in range(3):
        store(h, chain(f"x{i}-", 1))
        left += [event.key for event in h.take_events() if event.kind is EventKind.REMOVED]
    assert left == [b"l0", b"r0", b"c1"]


def test_a_key_that_is_resident_takes_no_second_charge() -> None:
    """Storing what is there is no write: used bytes do not move and no neighbour is evicted.

    https://github.com/tkem/cachetools/issues/405 (A3)
    """
    h = over(4, LevelPlan("disk", 10, FIFO(), charge=lambda n: n // 10))
    a, b = chain("a", 1, nbytes=30), chain("b", 1, nbytes=30)
    store(h, a + b)
    run(h)
    assert h.levels[1].ledger.ready_nbytes == 6
    for nbytes in (70, 30, 99):
        assert len(h.offer(chain("b", 1, nbytes=nbytes)).present) == 1
    h.delete([b[0].key])
    run(h)
    store(h, chain("b", 1, nbytes=70))
    run(h)
    assert keys(h, 1) == {b"a0", b"b0"} and h.levels[1].ledger.ready_nbytes == 10
    assert h.levels[1].counts.evicted == 0


def test_lookups_pin_nothing() -> None:
    """A thousand lookups whose requests end in all sorts of ways leave every slot replaceable.

    https://github.com/LMCache/LMCache/issues/2017 (A4)
    """
    h = over(6, disk())
    hot = chain("h", 3)
    store(h, hot)
    store(h, chain("cold", 3))
    run(h)
    chance = random.Random(4)
    for _ in range(1000):
        assert h.lookup(hot).n_tokens == hot[-1].end_token
        how = chance.randrange(4)
        if how:  # else: cancelled before anything was asked for
            entries = h.promote(hot)
            for entry in entries:
                h.hold(entry)
            run(h, lambda _, how=how: (Status.OK, Status.FAILED, Status.MISSING)[how - 1])  # type: ignore[misc]
            for entry in entries:
                h.release(entry)
        assert h.primary.n_held == 0
    assert len(store(h, chain("new", 6))) == 6
    assert keys(h) == names(chain("new", 6))


def test_the_same_key_twice_takes_one_slot() -> None:
    """Two equal keys in one offer are one chunk, and nothing stays pending.

    https://github.com/NVIDIA/TensorRT-LLM/pull/12834 (A5)
    """
    h = over(4)
    twice = chain("k", 1) * 2
    assert store(h, twice) == [b"k0"]
    assert (h.primary.free_nbytes, h.primary.n_pending) == (3 * SLOT, 0)
    counts = h.levels[0].counts
    assert (counts.offered, counts.stored, counts.present) == (2, 1, 1)


def test_overlapping_stores_take_what_is_new() -> None:
    """[k1,k2], [k2,k3], [k3,k4] at once: four slots, four events, and each call hears what became of each key.

    https://github.com/kvcache-ai/Mooncake/issues/2827 (A8)
    """
    h = over(8)
    k = chain("k", 5)
    offers = [h.offer(k[i : i + 2]) for i in (1, 2, 3)]
    assert [[entry.key for entry in offer.reserved] for offer in offers] == [[b"k1", b"k2"], [b"k3"], [b"k4"]]
    assert [[entry.key for entry in offer.present] for offer in offers] == [[], [b"k2"], [b"k3"]]
    for offer in offers:
        h.commit_store(offer.reserved)
    assert [(event.kind, event.key) for event in h.take_events()] == [(EventKind.STORED, c.key) for c in k[1:]]
    assert h.primary.free_nbytes == 4 * SLOT


# -- promotions -------------------------------------------------------------------------------------------------------


def below(n_slots: int, *requests: Sequence[Chunk]) -> Hierarchy:
    """A hierarchy whose disk holds these requests, and whose primary is empty."""
    h = over(n_slots, disk())
    for request in requests:
        h.absorb(1, [Found(chunk.key, SLOT) for chunk in request])
    return h


def test_promotions_leave_room_for_stores() -> None:
    """Ten waiting requests with disk hits, under a limit of slots, do not starve the one that runs.

    https://github.com/vllm-project/vllm/issues/49902 (A11a)
    """
    waiting = [chain(f"w{i}-", 4) for i in range(10)]
    h = below(8, *waiting)
    n_read, leased = 0, list[list[Entry]]()
    for step in range(20):
        for request in waiting:
            room = 6 - h.primary.n_held  # two slots stay for stores
            if room > 0:
                entries = h.promote(request, limit=room)
                for entry in entries:
                    h.hold(entry)
                leased.append(entries)
        n_read += sum(transfer.kind is TransferKind.PROMOTE for transfer in run(h))
        assert len(store(h, chain(f"run{step}-", 2))) == 2, "the running request is never refused"
        run(h)
        if leased:  # the request at the head of the queue runs and lets go
            done = leased.pop(0)
            h.access([entry.chunk for entry in done])
            for entry in done:
                h.release(entry)
            waiting = [request for request in waiting if request[0].key not in {entry.key for entry in done}]
    assert not waiting and n_read == 40, "no chunk is read twice"


def test_a_prefix_larger_than_the_primary_does_not_evict_itself() -> None:
    """Eight chunks below, six slots: the answer is there after one round, with six leading hits and six reads.

    https://github.com/vllm-project/vllm/issues/49902 (A11b)
    """
    request = chain("r", 8)
    h = below(6, request)
    reads, entries = 0, list[Entry]()
    for _ in range(5):
        entries = h.promote(request)
        reads += sum(transfer.kind is TransferKind.PROMOTE for transfer in run(h))
    assert [entry.key for entry in entries] == [chunk.key for chunk in request[:6]]
    assert all(entry.state is READY for entry in entries) and reads == 6


def test_one_bad_chunk_of_a_batch_costs_one_chunk() -> None:
    """Chunk 3 of eight is damaged: the other seven are used, and one slot more is free.

    https://github.com/vllm-project/vllm/pull/50321 (A14)
    """
    request = chain("r", 8)
    h = below(8, request)
    h.promote(request)
    run(h, lambda transfer: Status.CORRUPT if transfer.chunk.key == b"r3" else Status.OK)
    assert keys(h) == names(request) - {b"r3"} and h.primary.free_nbytes == SLOT
    assert h.find(request[3].key) == ABSENT
    assert h.levels[1].counts.dropped == {"corrupt": 1}
    assert h.lookup(request).n_tokens == request[2].end_token


def test_a_vanished_file_is_read_once() -> None:
    """A read that finds nothing turns the key into a miss, and a later store into a hit again.

    https://github.com/vllm-project/vllm/issues/49176 (A6)
    """
    request = chain("r", 1)
    h = below(2, request)
    n_failed = 0
    for _ in range(20):
        h.promote(request)
        n_failed += len(run(h, lambda _: Status.MISSING))
    assert n_failed == 1 and h.find(request[0].key) == ABSENT and h.primary.free_nbytes == 2 * SLOT
    store(h, request)
    run(h)
    assert keys(h, 0) == keys(h, 1) == names(request)


def test_a_failed_read_keeps_the_lower_copy() -> None:
    """An error of the tier is not a verdict over the chunk: it is asked for again."""
    request = chain("r", 1)
    h = below(2, request)
    h.promote(request)
    run(h, lambda _: Status.FAILED)
    assert h.find(request[0].key) == 1
    h.promote(request)
    run(h)
    assert h.find(request[0].key) == 0


def test_many_askers_share_one_read() -> None:
    """Fifty requests for the same chunks cause one read a chunk.

    https://github.com/vllm-project/vllm/issues/44294 (A7)
    """
    request = chain("r", 4)
    h = below(8, request)
    answers = [h.promote(request) for _ in range(50)]
    assert len(h.take_transfers()) == 4
    assert all(answer == answers[0] and all(entry.state is PENDING for entry in answer) for answer in answers)


# -- lower levels -----------------------------------------------------------------------------------------------------


def test_a_hanging_tier_pins_no_more_than_its_queue() -> None:
    """Writes to a tier that hangs are bounded in bytes; the rest is dropped and counted, another tier gets all.

    https://github.com/vllm-project/vllm/issues/50031 (A12)
    """
    h = over(8, disk(), disk(queue_nbytes=3 * SLOT))
    for i in range(100):
        assert len(store(h, chain(f"s{i}-", 1))) == 1
        for transfer in h.take_transfers():
            if transfer.target == 1:  # the second tier never answers
                h.finish(transfer.id, Outcome(transfer.chunk.key, Status.OK))
        assert h.primary.n_held <= 3
    assert h.levels[1].counts.stored == 100
    assert h.levels[2].counts.refused == {"queue_full": 97}
    h.set_open(2, is_open=False)
    store(h, chain("more", 1))
    assert h.levels[2].counts.refused["tier_broken"] == 1
    h.check()


def test_under_demote_a_chunk_is_never_nowhere() -> None:
    """What leaves the primary is on the disk before it has left."""
    h = over(4, disk(writes=Writes.DEMOTE))
    stored: list[ChunkKey] = []
    for i in range(10):
        stored += store(h, chain(f"s{i}-", 1))
        run(h)
        assert all(h.find(key) >= 0 for key in stored)
    assert len(stored) == 10 and not h.levels[0].counts.dropped
    assert h.levels[0].counts.evicted == h.levels[1].counts.stored == 7, "one slot is kept free"


def test_a_promoted_chunk_keeps_its_lower_copy() -> None:
    """Under DEMOTE a chunk that came up is evicted again without a second write."""
    request = chain("r", 2)
    h = over(3, disk(writes=Writes.DEMOTE))
    h.absorb(1, [Found(chunk.key, SLOT, True, chunk) for chunk in request])
    h.promote(request)
    run(h)
    store(h, chain("x", 3))
    done = run(h)
    assert not names(request) & names(t.chunk for t in done if t.kind is TransferKind.DEMOTE)
    assert all(h.find(chunk.key) == 1 for chunk in request)


def test_a_refused_demotion_is_a_counted_removal() -> None:
    """The disk takes nothing: evictions go on, and each is counted as a drop."""
    h = over(2, disk(writes=Writes.DEMOTE))
    for i in range(5):
        assert store(h, chain(f"s{i}-", 1))
        run(h, lambda _: Status.REFUSED)
    assert h.levels[0].counts.dropped == {"demote_dropped": 4} == {"demote_dropped": h.levels[0].counts.evicted}


@pytest.mark.parametrize(
    ("status", "reason", "n_dropped"),
    [
        (Status.REFUSED, Reason.FULL, 0), (Status.REFUSED, Reason.NO_SPACE, 0), (Status.REFUSED, Reason.SCANNING, 0),
        (Status.REFUSED, None, 0), (Status.REFUSED, Reason.TOO_LARGE, 1), (Status.FAILED, Reason.TIER_ERROR, 1),
    ],
)  # fmt: skip
def test_a_refusal_of_a_moment_is_none_for_ever(status: Status, reason: Reason | None, n_dropped: int) -> None:
    """A disk was full as a chunk was to go down, and then the chunk was used: its eviction hours later is a copy.

    What may be the chunk's own fault is not tried again.
    """
    h = over(3, disk(writes=Writes.DEMOTE))
    a, *others = (chain(name, 1) for name in "abcdefgh")
    store(h, a)
    for chunks in others[:2]:
        store(h, chunks)
    [copy] = h.take_transfers()
    assert (copy.kind, copy.chunk.key) == (TransferKind.DEMOTE, a[0].key)
    use(h, a[0].key)
    h.finish(copy.id, Outcome(a[0].key, status, reason))
    run(h)  # another goes down instead, so there is room
    for chunks in others[2:]:
        assert store(h, chunks)
        run(h)
    assert h.levels[0].counts.dropped["demote_dropped"] == n_dropped
    assert h.find(a[0].key) == (ABSENT if n_dropped else 1)
    assert h.levels[0].counts.evicted == 6


def use(h: Hierarchy, key: ChunkKey) -> None:
    entry = h.primary.get(key)
    assert entry is not None
    h.primary.touch([entry])


def evicted_below(h: Hierarchy) -> Transfer:
    """A chunk that the disk evicts just before the primary would; its deletion."""
    [a] = chain("a", 1)
    h.absorb(1, [Found(a.key, SLOT, True, a)])
    h.promote([a])
    run(h)
    assert h.find(a.key) == 0
    entry = h.levels[1].ledger.get(a.key)
    assert entry is not None
    h._evict(h.levels[1], [entry])
    [deletion] = h.take_transfers()
    assert (deletion.kind, deletion.chunk.key) == (TransferKind.DELETE, a.key)
    return deletion


def test_both_levels_evict_a_chunk_at_once() -> None:
    """Its copy below is just being deleted: the one above waits for the end of that and goes down again."""
    h = over(3, disk(writes=Writes.DEMOTE))
    deletion = evicted_below(h)
    for name in "bc":
        assert store(h, chain(name, 1))
    [instead] = h.take_transfers()
    assert (instead.kind, instead.chunk.key) == (TransferKind.DEMOTE, b"b0"), "who may be copied now"
    h.finish(deletion.id, Outcome(deletion.chunk.key, Status.OK))
    h.finish(instead.id, Outcome(instead.chunk.key, Status.OK))
    for name in "de":
        assert store(h, chain(name, 1))
        run(h)
    assert not h.levels[0].counts.dropped and h.find(deletion.chunk.key) == 1


def test_a_deletion_that_hangs_is_not_waited_for() -> None:
    """As above, on a disk that does not answer: the chunk leaves, counted, as it would without a disk."""
    h = over(3, disk(writes=Writes.DEMOTE))
    deletion = evicted_below(h)
    h.finish(deletion.id, Outcome(deletion.chunk.key, Status.FAILED, Reason.DEADLINE), ended=False)
    for name in "bc":
        assert store(h, chain(name, 1))
    assert h.find(deletion.chunk.key) == ABSENT and h.levels[0].counts.dropped == {"demote_dropped": 1}
    h.finish(deletion.id, Outcome(deletion.chunk.key, Status.OK))
    run(h)
    assert h.at_rest and not h.levels[1].hanging


def test_no_write_waits_for_a_deletion_that_hangs() -> None:
    """On a full disk: another chunk makes room, else the primary ends up pinned by writes that wait for ever.

    https://github.com/vllm-project/vllm/issues/50031 (A12)
    """
    h = over(4, disk(4))
    for name in "abcd":
        store(h, chain(name, 1))
        run(h)
    store(h, chain("e", 1))
    [deletion] = h.take_transfers()
    h.finish(deletion.id, Outcome(deletion.chunk.key, Status.FAILED, Reason.DEADLINE), ended=False)
    h.set_traffic(1, reads=Traffic.FLOWS, writes=Traffic.TRIAL)
    for name in "ijklmn":
        assert store(h, chain(name, 1)), "nothing keeps the primary"
        run(h)
    assert not h.levels[1].waiting and h.levels[1].ledger.quarantined_nbytes == SLOT
    h.finish(deletion.id, Outcome(deletion.chunk.key, Status.OK))
    run(h)
    assert h.at_rest and not h.levels[1].hanging


def test_a_read_that_hangs_is_not_waited_for() -> None:
    """Its chunk was deleted and stored anew: the primary may let go of that although the old copy cannot be deleted."""
    h = over(2, disk(8, writes=Writes.DEMOTE))
    k = chain("k", 1)
    for chunks in (k, chain("a", 1)):
        store(h, chunks)
        run(h)
    h.reset([0])
    h.promote(k)
    [read] = h.take_transfers()
    h.finish(read.id, Outcome(read.chunk.key, Status.FAILED, Reason.DEADLINE), ended=False)
    h.delete(names(k))
    assert store(h, k)
    run(h)
    assert store(h, chain("b", 1)), "the other slot is the read's until it ends"
    h.finish(read.id, Outcome(read.chunk.key, Status.OK))
    run(h)
    assert h.at_rest and not h.levels[1].hanging


def test_what_came_down_leaves_above_before_it_leaves_below() -> None:
    """Both levels wanted the only chunk gone that may leave: it was written below, deleted there, written, ..."""
    h = over(2, disk(2, writes=Writes.DEMOTE, high_water=0.9, low_water=0.9))
    a, b = chain("a", 1), chain("b", 1)
    n_transfers = 0
    for chunks in (a, b):
        store(h, chunks)
        h.guard(names(a))
        while n_transfers < 20 and (transfers := h.take_transfers()):
            for transfer in transfers:
                h.finish(transfer.id, Outcome(transfer.chunk.key, Status.OK))
            n_transfers += len(transfers)
    assert n_transfers == 2, "a write and a deletion"
    assert keys(h) == names(a) and not keys(h, 1)
    h.check()


def test_a_small_level_has_no_reserve_beside_what_others_own() -> None:
    """Less than a chunk is no reserve, however many a neighbour on the root has: it would cost one that fits."""
    h = over(4, disk(3, high_water=0.3, low_water=0.3))
    h.absorb(1, [Found(ChunkKey(b"foreign%d" % i), SLOT, owned=False) for i in range(9)])
    for name in "abc":
        store(h, chain(name, 1))
        run(h)
    assert {entry.key for entry in h.levels[1].ledger if entry.owned} == {b"a0", b"b0", b"c0"}


def test_no_write_waits_for_a_copy_down_that_hangs() -> None:
    """Its source leaves without it, but its space is not free soon: who waited for that is told, and waits no more."""
    h = over(4, disk(2, high_water=0.0, low_water=0.0), disk(writes=Writes.DEMOTE))
    a = chain("a", 2)
    store(h, a)
    run(h)
    store(h, chain("b", 2))
    late: list[Transfer] = []
    while copies := h.take_transfers():
        for copy in copies:
            h.finish(copy.id, Outcome(copy.chunk.key, Status.FAILED, Reason.DEADLINE), ended=False)
        late += copies
    assert [copy.kind for copy in late] == [TransferKind.DEMOTE] * 2, "each makes room by itself"
    assert not h.levels[1].waiting and h.levels[1].counts.refused["full"] == 2
    for copy in late:
        h.finish(copy.id, Outcome(copy.chunk.key, Status.OK))
    run(h)
    assert h.at_rest


def test_a_write_that_comes_late_is_undone() -> None:
    """A write past its deadline is a refusal; should it succeed after all, its file is deleted."""
    h = over(2, disk())
    store(h, chain("k", 1))
    [write] = h.take_transfers()
    h.finish(write.id, Outcome(write.chunk.key, Status.FAILED, Reason.DEADLINE), ended=False)
    assert h.levels[1].ledger.quarantined_nbytes == SLOT and h.primary.n_held == 1, "its thread still reads the slot"
    assert h.levels[1].counts.refused == {"deadline": 1}
    h.finish(write.id, Outcome(write.chunk.key, Status.OK))
    [undo] = h.take_transfers()
    assert undo.kind is TransferKind.DELETE
    h.finish(undo.id, Outcome(undo.chunk.key, Status.OK))
    assert h.at_rest and h.levels[1].ledger.free_nbytes == 100 * SLOT


def test_a_deletion_that_failed_is_tried_again() -> None:
    """Its bytes stay charged, since they are on the medium, until a retry or a write of the key settles it."""
    h = over(4, disk())
    k = chain("k", 2)
    store(h, k)
    run(h)
    h.delete(names(k[:1]) | names(k[1:]))
    run(h, lambda _: Status.FAILED)
    ledger = h.levels[1].ledger
    assert ledger.quarantined_nbytes == 2 * SLOT and h.levels[1].counts.dropped["tier_error"] == 2
    store(h, k[1:])
    run(h)
    assert (ledger.quarantined_nbytes, ledger.ready_nbytes) == (SLOT, SLOT), "the write replaced what was stuck"
    h.refresh()
    assert [transfer.chunk.key for transfer in run(h)] == [b"k0"]
    assert h.at_rest and ledger.quarantined_nbytes == 0


def test_a_deletion_of_what_a_scan_may_bring_is_not_doubled() -> None:
    """Deleting a key again, whose deletion failed, tries that one again: its file is charged once."""
    h = over(4, disk(settled=lambda _: False))
    k = chain("k", 1)
    store(h, k)
    run(h)
    h.delete(names(k))
    run(h, lambda _: Status.FAILED)
    h.delete(names(k))
    assert h.levels[1].ledger.quarantined_nbytes == SLOT
    assert [transfer.kind for transfer in run(h)] == [TransferKind.DELETE]
    assert h.at_rest and h.levels[1].ledger.quarantined_nbytes == 0


def test_what_has_just_lost_its_copy_below_stays() -> None:
    """A trim drops what the disk has and demotes what it lacks; what that pushes out of the disk is not dropped."""
    primary = LevelPlan("primary", 0, LRU(), n_slots=4, slot_nbytes=SLOT, high_water=0.5, low_water=0.5)
    h = Hierarchy([primary, disk(1, writes=Writes.DEMOTE, high_water=0.0, low_water=0.0)], record_events=True)
    [a], [b] = chain("a", 1), chain("b", 1)
    store(h, [a])
    store(h, [b])
    h.absorb(1, [Found(a.key, SLOT, True, a)])
    h.offer(chain("c", 2))  # two slots are to be made free: a has a copy below, b has none
    assert h.find(a.key) == 0 and h.find(b.key) == 0
    run(h)
    assert h.find(b.key) == 1


def test_what_has_lost_a_copy_that_could_not_be_read_stays() -> None:
    """Reads of the last level are stopped, its writes flow: it evicts the tail's copy for the head; the tail stays."""
    no_reserve = {"high_water": 0.0, "low_water": 0.0}
    h = over(4, disk(1, **no_reserve), disk(1, writes=Writes.DEMOTE, **no_reserve))
    head, tail, other = *chain("k", 2, nbytes=SLOT // 2), *chain("o", 1, nbytes=SLOT // 2)
    for index, chunk in ((1, head), (1, tail), (2, tail), (2, other)):
        h.absorb(index, [Found(chunk.key, chunk.nbytes, True, chunk)])
    h.set_traffic(2, reads=Traffic.STOPPED, writes=Traffic.FLOWS)
    store(h, chain("a", 1))  # takes all of level 1, which the head leaves by a copy and the tail by the one it has
    assert (keys(h, 1), keys(h, 2)) == ({head.key, tail.key}, {other.key})
    run(h)
    assert (keys(h, 1), keys(h, 2)) == ({b"a0"}, {head.key, tail.key})
    assert not h.levels[1].counts.dropped


@pytest.mark.parametrize("reads", [Traffic.STOPPED, Traffic.TRIAL])
def test_reads_that_are_stopped_keep_nobody_above(reads: Traffic) -> None:
    """What has a copy on a disk that cannot be read for now leaves as ever, and can be read there again later."""
    h = over(3, disk(writes=Writes.DEMOTE))
    request = chain("r", 3)
    h.absorb(1, [Found(chunk.key, SLOT, True, chunk) for chunk in [*request, *chain("t", 1)]])
    h.promote(request)
    run(h)
    h.promote(request)
    run(h)
    h.set_traffic(1, reads=reads, writes=Traffic.FLOWS)
    h.promote(chain("t", 1))  # the trial, if there is one, lasts
    assert [len(store(h, chain(name, 1))) for name in "xy"] == [1, 1], "a bad tier is never worse than none"
    assert not h.levels[0].counts.dropped and not h.levels[0].counts.refused
    run(h)
    h.set_traffic(1, reads=Traffic.FLOWS, writes=Traffic.FLOWS)
    assert [h.find(chunk.key) for chunk in request] == [1, 1, 1]


def test_a_level_waits_for_the_one_below_it() -> None:
    """A full middle level takes a write as soon as its own demotion has made room."""
    h = over(4, disk(1, high_water=0.0, low_water=0.0), disk(writes=Writes.DEMOTE))
    store(h, chain("a", 1))
    run(h)
    store(h, chain("b", 1))
    run(h)
    assert (keys(h, 1), keys(h, 2)) == ({b"b0"}, {b"a0"})
    assert h.at_rest


def test_a_scan_finds_what_waits_to_be_written() -> None:
    """Until a tier's total is known writes wait; if the scan then finds the very chunk, nothing is written."""
    writable = False
    h = over(4, disk(writable=lambda: writable))
    k = chain("k", 2)
    store(h, k)
    assert not h.take_transfers()
    h.absorb(1, [Found(k[0].key, SLOT)])
    writable = True
    h.refresh()
    assert [transfer.chunk.key for transfer in run(h)] == [k[1].key]
    counts = h.levels[1].counts
    assert (counts.offered, counts.present, counts.stored) == (2, 1, 1)


def test_a_scan_finds_what_waits_after_a_reset() -> None:
    """What a reset has yet to find is deleted as it comes; a write of that key that waits is refused, and counted."""
    writable = False
    h = over(4, disk(writable=lambda: writable, scans=True))
    h.reset()
    k = chain("k", 2)
    store(h, k)
    h.absorb(1, [Found(k[0].key, SLOT)])
    assert h.levels[1].counts.refused == {Reason.BUSY.value: 1}
    writable = True
    h.refresh()
    done = {(transfer.kind, transfer.chunk.key) for transfer in run(h)}
    assert done == {(TransferKind.DELETE, k[0].key), (TransferKind.CASCADE, k[1].key)}
    assert h.at_rest


def test_what_is_learned_of_a_chunk_changes_no_queue() -> None:
    """A demotion waits; meanwhile its chunk, which a scan had found by name, is used and its length becomes known."""
    h = over(4, disk(1, high_water=0.0, low_water=0.0), disk(writes=Writes.DEMOTE, writable=lambda: False))
    [k] = chain("k", 1, nbytes=SLOT - 40)
    h.absorb(1, [Found(k.key, SLOT)])
    store(h, chain("other", 1))
    lowest = h.levels[2]
    assert list(lowest.waiting) == [k.key] and lowest.queued_nbytes == SLOT
    h.levels[1].ledger.access([(lowest.waiting[k.key].source, k)])
    h.delete(names([k]))
    assert lowest.queued_nbytes == 0
    run(h)


def test_a_share_that_shrinks_is_followed() -> None:
    """Another owner comes: the level trims to its new share, and writes nothing before it is under it."""
    share = 10 * SLOT
    h = over(20, disk(10, share=lambda: share))
    store(h, chain("k", 10))
    run(h)
    share = 4 * SLOT
    h.refresh()
    store(h, chain("n", 1))
    first = h.take_transfers()
    assert {transfer.kind for transfer in first} == {TransferKind.DELETE}
    for transfer in first:
        h.finish(transfer.id, Outcome(transfer.chunk.key, Status.OK))
    run(h)
    assert h.levels[1].ledger.ready_nbytes <= share and b"n0" in keys(h, 1)
    assert names(chain("k", 2)) <= keys(h, 1), "the head is what stays"


def test_what_another_owner_wrote_is_read_and_never_evicted() -> None:
    """Foreign chunks are hits, charged to nobody here; ours once their owner is gone."""
    h = over(2, disk(2))
    f = chain("f", 1)
    h.absorb(1, [Found(f[0].key, SLOT, owned=False)])
    ledger = h.levels[1].ledger
    assert (h.find(f[0].key), ledger.free_nbytes, ledger.foreign_nbytes) == (1, 2 * SLOT, SLOT)
    for i in range(4):
        store(h, chain(f"s{i}-", 1))
        run(h)
    assert h.find(f[0].key) == 1
    h.absorb(1, [Found(f[0].key, SLOT, owned=True)])
    run(h)
    assert ledger.foreign_nbytes == 0 and ledger.ready_nbytes + ledger.free_nbytes == 2 * SLOT


def test_an_answer_that_is_older_than_a_deletion_brings_nothing_back() -> None:
    """A probe saw a chunk that was evicted and deleted before its answer came: nobody is told that it is there."""
    medium: set[ChunkKey] = set()
    h = over(2, disk(2, owns=medium.__contains__))
    [k] = chain("k", 1)
    medium.add(k.key)
    answer = [Found(k.key, SLOT)]
    h.absorb(1, answer)
    h.delete(names([k]))
    h.absorb(1, answer)  # on its way out: it stays so
    run(h)
    medium.remove(k.key)
    h.take_events()
    h.absorb(1, answer)
    assert not h.take_events() and h.find(k.key) == ABSENT and h.at_rest
    h.absorb(1, [Found(k.key, SLOT, owned=False)])
    assert h.find(k.key) == 1, "another owner's is not the tier's to own"


def test_an_unsettled_key_asks_for_a_probe() -> None:
    """A key that no ledger knows is a miss only if the tiers are sure."""
    h = over(2, disk(settled=lambda key: key == b"sure"))
    assert h.find(ChunkKey(b"sure")) == ABSENT
    assert h.find(ChunkKey(b"who knows")) == UNSETTLED
    h.set_open(1, is_open=False)
    assert h.find(ChunkKey(b"who knows")) == ABSENT, "a broken tier is not asked"


def test_a_deletion_that_failed_before_the_scan_came_by_is_charged_once_it_has() -> None:
    """Deleted unseen, for nothing, which failed; then a reset, and the scan finds it: now its length is known."""
    h = over(2, disk(settled=lambda _: False, scans=True, writable=lambda: False))
    (chunk,) = chain("k", 1)
    h.delete([chunk.key])
    run(h, lambda _: Status.FAILED)
    assert h.levels[1].ledger.quarantined_nbytes == 0, "nobody knows yet how long it is"
    h.reset()
    h.absorb(1, [Found(chunk.key, SLOT, owned=True)])
    assert h.levels[1].ledger.quarantined_nbytes == SLOT, "the books never say less than the medium holds"
    run(h, lambda _: Status.FAILED)
    assert h.levels[1].ledger.quarantined_nbytes == SLOT
    assert h.levels[1].counts.dropped == {"tier_error": 1}, "one chunk that could not be deleted, however often"
    h.refresh()
    run(h)
    assert h.levels[1].ledger.quarantined_nbytes == 0
    assert h.at_rest


def test_a_demotion_that_hangs_keeps_no_ancestor() -> None:
    """Its source leaves at the deadline, though its slot is the copy's until that has ended; its prefix may follow."""
    h = over(4, disk(writes=Writes.DEMOTE))
    k = chain("k", 4)
    for chunk in k:
        store(h, [chunk])
    (copy,) = [transfer for transfer in h.take_transfers() if transfer.chunk.key == k[-1].key]
    h.finish(copy.id, Outcome(copy.chunk.key, Status.FAILED, Reason.DEADLINE), ended=False)
    assert h.find(k[-1].key) == ABSENT
    assert h.levels[0].counts.dropped == {"deadline": 1}
    h.set_traffic(1, reads=Traffic.FLOWS, writes=Traffic.STOPPED)
    assert h.levels[0].demoting_nbytes == 0, "no room that anybody may count on"
    assert h.primary.quarantined_nbytes == SLOT
    assert len(store(h, chain("other", 3))) == 3, "all others could leave"
    h.check()
    h.finish(copy.id, Outcome(copy.chunk.key, Status.OK))
    h.set_traffic(1, reads=Traffic.FLOWS, writes=Traffic.FLOWS)
    run(h)
    assert h.primary.quarantined_nbytes == 0 and h.find(k[-1].key) == ABSENT, "late, and taken back"


def test_a_demotion_that_hangs_leaves_its_source_to_who_reads_it() -> None:
    """A lease keeps what it holds, whatever becomes of the copy down."""
    h = over(2, disk(writes=Writes.DEMOTE))
    k = chain("k", 2)
    for chunk in k:
        store(h, [chunk])
    (copy,) = h.take_transfers()
    entry = h.primary.get(copy.chunk.key)
    assert entry is not None
    h.hold(entry)
    h.finish(copy.id, Outcome(copy.chunk.key, Status.FAILED, Reason.DEADLINE), ended=False)
    assert entry.state is READY and h.find(copy.chunk.key) == 0
    h.finish(copy.id, Outcome(copy.chunk.key, Status.FAILED, Reason.DEADLINE))
    assert entry.state is READY and h.find(copy.chunk.key) == 0
    h.release(entry)
    h.check()


def test_a_trial_that_was_called_off_lets_the_next_one_through() -> None:
    """A promotion on trial that its asker gave up before it was read tells nothing: another one is tried."""
    h = over(2, disk())
    k = chain("k", 2)
    for chunk in k:
        store(h, [chunk])
    run(h)
    h.reset([0])
    h.set_traffic(1, reads=Traffic.TRIAL, writes=Traffic.FLOWS)
    assert [h.find(chunk.key) for chunk in k] == [1, 1]
    h.promote(k[:1])
    assert h.find(k[1].key) == ABSENT, "one is under way"
    (read,) = h.take_transfers()
    h.finish(read.id, Outcome(k[0].key, Status.REFUSED, Reason.CANCELLED))
    assert [h.find(chunk.key) for chunk in k] == [1, 1]


def test_a_prefix_stops_for_a_reason() -> None:
    """A lookup says whether the next chunk is missing or on its way."""
    h = over(4)
    k = chain("k", 3)
    store(h, k[:1])
    h.offer(k[1:2])
    assert (h.lookup(k).stop, h.lookup(k[:1]).stop, h.lookup(k[2:]).stop) == (Stop.PENDING, Stop.COMPLETE, Stop.MISS)


# -- books ------------------------------------------------------------------------------------------------------------


def test_nothing_is_dropped_without_a_trace() -> None:
    """Overflow, a broken tier, too large, a failing tier, a reset: each is counted by reason, and the sum is exact.

    https://github.com/ai-dynamo/dynamo/pull/10930 (A32)
    """
    h = over(3, disk(queue_nbytes=SLOT))
    store(h, [*chain("k", 5), *chain("huge", 1, nbytes=SLOT + 1)])
    run(h, lambda _: Status.FAILED)
    h.set_open(1, is_open=False)
    store(h, chain("b", 1))
    h.abort_store(h.offer(chain("c", 1)).reserved, Reason.DEVICE_ERROR)
    lost = h.offer(chain("d", 1)).reserved
    h.reset()
    h.commit_store(lost)
    assert h.levels[0].counts.refused == {"full": 2, "too_large": 1, "device_error": 1, "reset": 1}
    assert h.levels[1].counts.refused == {"queue_full": 2, "tier_error": 1, "tier_broken": 1}
    for level in h.levels:
        counts = level.counts
        assert counts.offered == counts.stored + counts.present + counts.refused.total()
    h.check()
    assert h.at_rest


def test_events_alone_rebuild_the_index() -> None:
    """Ten thousand operations: per level and key stored and removed alternate, and the set they leave is the index.

    https://github.com/llm-d/llm-d-kv-cache/pull/680 (A31)
    """
    h = over(6, disk(8), disk(12, writes=Writes.DEMOTE))
    chance = random.Random(31)
    requests = [chain(name, 4) for name in "abcdef"]
    known: list[set[ChunkKey]] = [set(), set(), set()]
    for _ in range(10_000):
        request = chance.choice(requests)[: chance.randrange(1, 5)]
        act = chance.randrange(20)
        if act == 0:
            h.delete([chance.choice(request).key])
        elif act == 1:
            h.reset([chance.randrange(3)])
        elif act < 12:
            store(h, request)
        else:
            h.promote(request)
        for transfer in h.take_transfers():
            status = chance.choice([Status.OK] * 8 + [Status.FAILED, Status.MISSING])
            h.finish(transfer.id, Outcome(transfer.chunk.key, status))
        for event in h.take_events():
            assert (event.key in known[event.level]) is (event.kind is EventKind.REMOVED)
            (known[event.level].add if event.kind is EventKind.STORED else known[event.level].remove)(event.key)
    run(h)
    for event in h.take_events():
        (known[event.level].add if event.kind is EventKind.STORED else known[event.level].remove)(event.key)
    assert known == [keys(h, level) for level in range(3)]
    assert h.levels[2].counts.stored > 100, "the script reaches the last level"


def test_a_reset_with_copies_under_way() -> None:
    """Three requests - storing, loading, writing down - and a reset: late ends are ignored once, all space comes back.

    https://github.com/vllm-project/vllm/pull/48102 (A33)
    """
    storing, loading, draining = chain("s", 1), chain("l", 1), chain("d", 1)
    h = over(3, disk())
    h.absorb(1, [Found(loading[0].key, SLOT)])
    store(h, draining)
    filling = h.offer(storing).reserved
    [pending] = h.promote(loading)
    h.hold(pending)
    under_way = h.take_transfers()
    h.reset()
    assert h.primary.free_nbytes == 0 and h.primary.quarantined_nbytes == 3 * SLOT
    for request in (storing, loading, draining):
        assert h.lookup(request).n_tokens == 0
    h.commit_store(filling)
    h.release(pending)
    assert h.primary.free_nbytes == SLOT, "a store that comes late is not resurrected"
    again = h.offer(storing).reserved
    for transfer in under_way:
        h.finish(transfer.id, Outcome(transfer.chunk.key, Status.OK))
    h.commit_store(again)
    run(h)
    assert keys(h) == keys(h, 1) == names(storing)
    assert (h.primary.free_nbytes, h.primary.quarantined_nbytes) == (2 * SLOT, 0)
    assert told(h, 0) == names(storing)


def test_a_level_that_was_reset_takes_what_is_demoted_at_once() -> None:
    """A reset of the disk alone forgets what it held; the primary kept its own, and room is made there as ever."""
    h = over(2, disk(writes=Writes.DEMOTE))
    old, kept, filling = chain("old", 1), chain("kept", 1), chain("new", 1)
    h.absorb(1, [Found(chunk.key, SLOT, True, chunk) for chunk in old])
    store(h, kept)
    entry = h.primary.get(kept[0].key)
    assert entry is not None
    h.hold(entry)
    h.offer(filling)
    h.release(entry)  # from now on it may be copied down, which the next call begins
    h.reset([1])
    assert (keys(h, 1), keys(h, 1, PENDING), keys(h, 0)) == (set(), names(kept), names(kept))
    run(h)
    assert keys(h, 1) == names(kept) and h.find(old[0].key) == ABSENT


def test_a_leased_slot_outlives_a_delete() -> None:
    """Who reads a slot goes on reading its bytes: it is given to nobody else before the lease ends."""
    h = over(1)
    k = chain("k", 1)
    store(h, k)
    entry = h.primary.get(k[0].key)
    assert entry is not None
    h.hold(entry)
    h.delete([k[0].key])
    assert entry.state is GONE and not store(h, chain("x", 1)), "there is no other slot"
    h.release(entry)
    assert store(h, chain("x", 1)) == [b"x0"]


def test_handles_do_not_grow() -> None:
    """Churn, with every thousandth handle kept, leaves memory where it was.

    https://github.com/sgl-project/sglang/pull/21624 (A35)
    """
    h = over(64)
    kept: list[Entry] = []

    def churn(n: int, round_: int) -> None:
        for i in range(n):
            [entry] = h.offer([Chunk(ChunkKey(b"%d-%d" % (round_, i)), None, 0, 8, SLOT)]).reserved
            h.commit_store([entry])
            if i % 1000 == 0:
                kept.append(entry)
            h.take_events()

    tracemalloc.start()
    try:
        churn(2_000, 0)
        before = tracemalloc.get_traced_memory()[0]
        churn(8_000, 1)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert all(type(entry.slot) is int for entry in kept)
    assert after < before * 1.05 + 20 * 1024


SCRIPT = """
import hashlib, random, sys
sys.path.insert(0, sys.argv[1])
from tests.unit.test_hierarchy import chain, disk, over, store
from tierkv._level import Writes
from tierkv.types import Outcome, Status

h = over(5, disk(6, writes=Writes[sys.argv[2]]), disk(9))
chance, told = random.Random(11), hashlib.sha256()
requests = [chain(name, 4) for name in "abcdef"]
flying = []
for _ in range(2000):
    request = chance.choice(requests)
    shielded = {chunk.key for chunk in chance.choice(requests)} if chance.random() < 0.5 else set()
    if chance.random() < 0.5:
        h.commit_store(h.offer(request, shielded=shielded).reserved)
    else:
        h.promote(request, shielded=shielded)
    flying += h.take_transfers()
    chance.shuffle(flying)
    for transfer in flying[:3]:
        h.finish(transfer.id, Outcome(transfer.chunk.key, chance.choice([Status.OK, Status.OK, Status.FAILED])))
    del flying[:3]
    told.update(repr((h.take_events(), flying)).encode())
print(told.hexdigest())
"""


@pytest.mark.parametrize("writes", Writes)
def test_the_same_operations_have_the_same_victims(writes: Writes) -> None:
    """Neither the hash seed nor the order of a caller's set decides who leaves (invariant 11)."""

    def digest(hash_seed: str) -> str:
        command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parents[2]), writes.name]
        run = subprocess.run(command, env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        return run.stdout

    assert digest("0") == digest("1") == digest("2")


def test_fields_by_number() -> None:
    """Where every chunk comes by, fields are read by number and tuples made of all of them; these are their numbers."""
    assert Chunk._fields[:5] == ("key", "parent", "group", "end_token", "nbytes")
    assert Transfer._fields == ("id", "kind", "chunk", "source", "target", "slot", "generation")
    assert Waiting._fields == ("source_level", "source", "demote", "charge_nbytes")
    assert Flight._fields == ("transfer", "source", "target", "demote")


def test_an_offer_does_not_displace_its_parent() -> None:
    """The oldest leaf of a full primary stays if it is the parent of what is offered; the next one leaves."""
    h = Hierarchy([LevelPlan("primary", 0, LRU(), n_slots=2, slot_nbytes=64)])
    head, other = Chunk(ChunkKey(b"head"), end_token=8, nbytes=64), Chunk(ChunkKey(b"other"), end_token=8, nbytes=64)
    for chunk in (head, other):
        h.commit_store(h.offer([chunk]).reserved)
    tail = Chunk(ChunkKey(b"tail"), head.key, 0, 16, 64)
    assert len(h.offer([tail]).reserved) == 1
    assert h.primary.get(head.key) is not None and h.primary.get(other.key) is None
    h.check()
