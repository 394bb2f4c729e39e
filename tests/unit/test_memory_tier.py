"""The reference tier and the private CPU tier: the same behaviour, checked by the same tests."""

import pytest

from tierkv.errors import ChunkSizeError, ClosedError, ConfigError
from tierkv.protocols import Charging, HostTier, TierContext
from tierkv.tiers.cpu import CPUTier
from tierkv.tiers.memory import MemoryTier
from tierkv.types import Chunk, ChunkKey, Reason, Status

STRIDE = 4096
LONGEST = 4000
A, B, C = (ChunkKey(name) for name in (b"a", b"b", b"c"))


def context(n_slots: int = 2) -> TierContext:
    return TierContext(LONGEST, STRIDE, b"namespace", n_slots * STRIDE)


def payload(byte: int, nbytes: int) -> memoryview:
    return memoryview(bytearray([byte]) * nbytes)


@pytest.fixture(params=[MemoryTier, CPUTier])
async def tier(request):
    made = request.param()
    await made.open(context())
    yield made
    await made.aclose()


async def test_satisfies_the_protocols(tier):
    """Both are host tiers whose chunks occupy whole slots."""
    assert isinstance(tier, HostTier)
    assert isinstance(tier, Charging)
    assert [tier.charge_nbytes(n) for n in (1, LONGEST, STRIDE + 1)] == [STRIDE, STRIDE, 2 * STRIDE]


async def test_slots_are_apart_writable_and_zeroed(tier):
    """A slot is stride bytes of its own, zero at first; a number outside the pool is an IndexError."""
    assert tier.n_slots == 2
    assert tier.slot_view(0) == bytes(STRIDE)
    tier.slot_view(0)[:] = b"\xff" * STRIDE
    assert tier.slot_view(0) == b"\xff" * STRIDE
    assert tier.slot_view(1) == bytes(STRIDE)
    for outside in (-1, 2):
        with pytest.raises(IndexError):
            tier.slot_view(outside)


async def test_what_is_read_is_what_was_written(tier):
    """A batch answers per key in order; bytes past the chunk are zeroed, also in a longer buffer."""
    outcomes = await tier.write(
        [(Chunk(A, nbytes=10), payload(1, STRIDE)), (Chunk(B, nbytes=LONGEST), payload(2, LONGEST))]
    )
    assert [outcome.status for outcome in outcomes] == [Status.OK, Status.OK]
    first, second, third = payload(9, 20), payload(9, LONGEST), payload(9, 5)
    outcomes = await tier.read([(B, second), (C, third), (A, first)])
    assert [(outcome.key, outcome.status) for outcome in outcomes] == [
        (B, Status.OK), (C, Status.MISSING), (A, Status.OK),
    ]  # fmt: skip
    assert first == b"\1" * 10 + bytes(10)
    assert second == b"\2" * LONGEST
    assert third == b"\x09" * 5
    assert list(await tier.contains([C, A])) == [False, True]


async def test_stored_bytes_are_a_copy(tier):
    """The caller may reuse its buffer at once."""
    buffer = payload(1, 10)
    await tier.write([(Chunk(A, nbytes=10), buffer)])
    buffer[:] = bytes(10)
    read = payload(0, 10)
    await tier.read([(A, read)])
    assert read == b"\1" * 10


async def test_rewriting_replaces_in_place(tier):
    """A key written twice takes one slot and reads as the later bytes, also where the later ones are fewer."""
    await tier.write([(Chunk(A, nbytes=10), payload(1, 10)), (Chunk(B, nbytes=1), payload(2, 1))])
    assert (await tier.write([(Chunk(A, nbytes=5), payload(3, 5))]))[0].ok
    read = payload(9, 10)
    await tier.read([(A, read)])
    assert read == b"\3" * 5 + bytes(5)


async def test_full_refuses_and_delete_makes_room(tier):
    """A third chunk of two is refused and invisible; deleting frees exactly one place; absent keys are ignored."""
    one = payload(1, 1)
    outcomes = await tier.write([(Chunk(key, nbytes=1), one) for key in (A, B, C)])
    assert [(outcome.status, outcome.reason) for outcome in outcomes[1:]] == [
        (Status.OK, None), (Status.REFUSED, Reason.FULL),
    ]  # fmt: skip
    assert list(await tier.contains([C])) == [False]
    await tier.delete([A, A, C])
    outcomes = await tier.write([(Chunk(C, nbytes=1), one), (Chunk(A, nbytes=1), one)])
    assert [outcome.status for outcome in outcomes] == [Status.OK, Status.REFUSED]


async def test_wrong_sizes_are_answers_that_change_nothing(tier):
    """Too large a chunk is refused; too short a buffer fails, both ways, and stays as it was."""
    items = [(Chunk(A, nbytes=LONGEST + 1), STRIDE), (Chunk(B, nbytes=10), 9), (Chunk(C, nbytes=10), 10)]
    outcomes = await tier.write([(chunk, payload(7, length)) for chunk, length in items])
    assert (outcomes[0].status, outcomes[0].reason) == (Status.REFUSED, Reason.TOO_LARGE)
    assert outcomes[1].status is Status.FAILED
    assert isinstance(outcomes[1].error, ChunkSizeError)
    assert list(await tier.contains([A, B, C])) == [False, False, True]
    short = payload(9, 9)
    (outcome,) = await tier.read([(C, short)])
    assert isinstance(outcome.error, ChunkSizeError)
    assert short == b"\x09" * 9


async def test_closed_means_closed_but_views_live_on(tier):
    """Closing twice is silent, calls then raise ClosedError, and a view handed out still reads its bytes."""
    view = tier.slot_view(1)
    view[:4] = b"live"
    await tier.aclose()
    await tier.aclose()
    assert tier.n_slots == 0
    assert view[:4] == b"live"
    for call in (tier.contains([A]), tier.read([]), tier.write([]), tier.delete([A])):
        with pytest.raises(ClosedError):
            await call
    with pytest.raises(ClosedError):
        tier.slot_view(0)


async def test_reopening_remembers_nothing(tier):
    """Chunks and slot bytes of an earlier opening are gone, and all places are free again."""
    await tier.write([(Chunk(A, nbytes=1), payload(1, 1)), (Chunk(B, nbytes=1), payload(1, 1))])
    tier.slot_view(0)[:1] = b"x"
    await tier.aclose()
    await tier.open(context())
    assert list(await tier.contains([A, B])) == [False, False]
    assert tier.slot_view(0) == bytes(STRIDE)
    assert (await tier.write([(Chunk(C, nbytes=1), payload(1, 1))]))[0].ok


@pytest.mark.parametrize("kind", [MemoryTier, CPUTier])
@pytest.mark.parametrize(("capacity", "n_slots"), [(STRIDE, 1), (2 * STRIDE - 1, 1), (2 * STRIDE, 2)])
async def test_capacity_is_whole_slots(kind, capacity, n_slots):
    """Exactly one chunk's stride is enough; a rest below a stride is not used."""
    tier = kind()
    await tier.open(TierContext(LONGEST, STRIDE, b"", capacity))
    assert tier.n_slots == n_slots
    await tier.aclose()


@pytest.mark.parametrize("kind", [MemoryTier, CPUTier])
@pytest.mark.parametrize("capacity", [0, STRIDE - 1])
async def test_less_than_one_chunk_is_refused_with_the_numbers(kind, capacity):
    """Zero, or one byte less than a chunk, names the option, the value and the smallest that would do."""
    with pytest.raises(ConfigError, match=rf"capacity is {capacity}, .*{STRIDE} bytes.*nearest valid value: {STRIDE}"):
        await kind().open(TierContext(LONGEST, STRIDE, b"", capacity))


@pytest.mark.parametrize(("asked", "capacity", "n_slots"), [(3, 0, 3), (3, 2 * STRIDE, 2), (2, 3 * STRIDE, 2)])
async def test_memory_tier_takes_the_smaller_bound(asked, capacity, n_slots):
    """A number of slots stands in for a capacity, and never exceeds one that is given."""
    tier = MemoryTier(asked)
    await tier.open(TierContext(LONGEST, STRIDE, b"", capacity))
    assert (tier.n_slots, tier.share_nbytes()) == (n_slots, n_slots * STRIDE)


@pytest.mark.parametrize("wrong", [0, -1, True])
def test_memory_tier_refuses_no_slots(wrong):
    """Nought, a negative number and a boolean are not a number of slots."""
    with pytest.raises(ConfigError, match="n_slots"):
        MemoryTier(wrong)
