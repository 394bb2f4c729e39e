"""Blocks to bytes: every layout against a model that counts bytes out one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.device.shapes import (
    DIRT,
    Shape,
    copier,
    dirty_slots,
    expected_store,
    head_sharded,
    random_cut,
    shapes,
)
from tierkv.device import CopyJob, DeviceLayout, Direction, PageRef
from tierkv.errors import TierError

N_SLOTS = 12


def job(layout: DeviceLayout, cut, direction: Direction, **kwargs) -> CopyJob:
    return CopyJob(0, direction, layout.split(cut.blocks, cut.sizes, cut.firsts, cut.slots, **kwargs))


@given(shape=shapes(), seed=st.integers(0, 2**16), lead=st.sampled_from([0, 128]), strided=st.booleans())
@example(Shape([(64, 64), (64, 64)], [[0, 1], [0, 1]], 4), 1, 0, False)
def test_store_writes_pages_and_zeroes_the_rest_of_its_span(shape, seed, lead, strided):
    """Random tensors, groups and cuts: touched slots hold the pages and zeros, nothing else anywhere changed."""
    rng = random.Random(seed)
    tensors = shape.tensors(seed, strided=strided)
    slots = dirty_slots(N_SLOTS, lead + shape.nbytes + 100)
    cut = random_cut(rng, shape, N_SLOTS)
    layout = shape.layout(start=lead)
    expected = expected_store(shape, tensors, cut, slots, lead)
    with copier(tensors, layout, slots) as device:
        n_copied = device.copy(job(layout, cut, Direction.STORE))
    np.testing.assert_array_equal(slots, expected)
    assert n_copied == sum(shape.pages[t][1] for g, *_ in cut.places(shape.blocks_per_chunk) for t in shape.groups[g])


@given(shape=shapes(), seed=st.integers(0, 2**16), plain=st.booleans())
def test_load_gives_back_what_was_stored_and_touches_nothing_else(shape, seed, plain):
    """A stored cut comes back into other blocks byte for byte; other blocks and page paddings keep their bytes."""
    rng = random.Random(seed)
    tensors = shape.tensors(seed)
    slots = dirty_slots(N_SLOTS, shape.nbytes)
    layout = shape.layout()
    cut = random_cut(rng, shape, N_SLOTS)
    with copier(tensors, layout, slots) as device:
        device.copy(job(layout, cut, Direction.STORE))
    others = shape.tensors(seed + 1)
    expected = [tensor.copy() for tensor in others]
    moved = dict(zip(cut.blocks, rng.sample(range(shape.n_blocks), len(cut.blocks)), strict=True))
    for group, block, _, _ in cut.places(shape.blocks_per_chunk):
        for tensor in shape.groups[group]:
            n = shape.pages[tensor][1]
            expected[tensor][moved[block], :n] = tensors[tensor][block, :n]
    cut.blocks = [moved[block] for block in cut.blocks]
    with copier(others, layout, slots) as device:
        (device.copy_plain if plain else device.copy)(job(layout, cut, Direction.LOAD))
    assert all(np.array_equal(got, want) for got, want in zip(others, expected, strict=True))


@pytest.mark.parametrize("per_chunk", [1, 3, 4, 8])
def test_a_load_may_enter_a_chunk_in_its_middle(per_chunk):
    """Blocks already on the device are not asked for again: the first chunk's leading blocks are skipped."""
    shape = Shape([(64, 64)], [[0]], per_chunk)
    tensors, slots, layout = shape.tensors(), dirty_slots(4, shape.nbytes), shape.layout()
    whole = layout.split(range(2 * per_chunk), [2 * per_chunk], [0], [2, 0])
    with copier(tensors, layout, slots) as device:
        device.copy(CopyJob(0, Direction.STORE, whole))
    target = [np.zeros_like(tensors[0])]
    first = per_chunk - 1
    n = 2 * per_chunk - first
    tail = layout.split(range(n), [n], [first], [2, 0])
    with copier(target, layout, slots) as device:
        device.copy(CopyJob(1, Direction.LOAD, tail))
    assert np.array_equal(target[0][:n], tensors[0][first : first + n])
    assert not target[0][n:].any()


@pytest.mark.parametrize("by_token", [False, True], ids=["heads outside", "tokens outside"])
@pytest.mark.parametrize("per_chunk", [1, 4])
@pytest.mark.parametrize(("write_ranks", "read_ranks"), [(1, 2), (2, 1), (4, 2), (8, 4), (2, 8)])
def test_canonical_pages_look_the_same_for_every_number_of_ranks(write_ranks, read_ranks, per_chunk, by_token):
    """What n ranks wrote together, with holes in a dirty slot, m ranks read; 8 ranks hold 4 heads twice each."""
    heads, tokens, head_nbytes, n_blocks = 4, 8, 24, 16
    rng = np.random.default_rng(write_ranks)
    truth = rng.integers(-128, 128, (2, n_blocks, heads, tokens, head_nbytes), np.int8)
    cut = ([5, 3, 9] if per_chunk == 4 else [5, 3, 9, 2], [3 if per_chunk == 4 else 4], [1], [2, 0, 1, 3])
    cut = (cut[0], cut[1], cut[2], [2] if per_chunk == 4 else cut[3])

    def rank(r: int, n: int, *, empty: bool):
        local = heads // min(heads, n)
        shard = r // (n // min(heads, n))
        mine = truth[:, :, shard * local : (shard + 1) * local]
        mine = mine.transpose(0, 1, 3, 2, 4) if by_token else mine
        pages = np.ascontiguousarray(mine).reshape(2, n_blocks, -1)
        if empty:
            pages = np.zeros_like(pages)
        page = head_sharded(r, n, heads=heads, tokens=tokens, head_nbytes=head_nbytes, by_token=by_token)
        refs = [PageRef(t, pages.shape[2], page) for t in range(2)]
        layout = DeviceLayout.canonical(
            [pages.shape[2]] * 2, [refs], blocks_per_chunk=per_chunk, stop_nbytes=slots.shape[1], zeroes_gaps=r == 0
        )
        return [pages[0], pages[1]], layout

    slots = dirty_slots(4, 2 * per_chunk * heads * tokens * head_nbytes + 40)
    for r in range(write_ranks):
        tensors, layout = rank(r, write_ranks, empty=False)
        with copier(tensors, layout, slots) as device:
            device.copy(CopyJob(0, Direction.STORE, layout.split(*cut)))
    together = slots.copy()
    alone = dirty_slots(*slots.shape)
    tensors, layout = rank(0, 1, empty=False)
    with copier(tensors, layout, alone) as device:
        device.copy(CopyJob(0, Direction.STORE, layout.split(*cut)))
    np.testing.assert_array_equal(together, alone)
    assert not (together[cut[3]] == DIRT).all(axis=1).any()
    for r in range(read_ranks):
        want, _ = rank(r, read_ranks, empty=False)
        got, layout = rank(r, read_ranks, empty=True)
        with copier(got, layout, slots) as device:
            device.copy(CopyJob(0, Direction.LOAD, layout.split(*cut)))
        for t in range(2):
            assert np.array_equal(got[t][cut[0]], want[t][cut[0]])
    np.testing.assert_array_equal(slots, together)


def test_a_groups_unused_tensors_are_zeroed():
    """Two groups over different tensors share slots in turn: the second never carries the first's bytes."""
    shape = Shape([(64, 64), (64, 48)], [[0], [1]], 2)
    tensors, slots, layout = shape.tensors(), dirty_slots(1, shape.nbytes), shape.layout()
    with copier(tensors, layout, slots) as device:
        device.copy(CopyJob(0, Direction.STORE, layout.split([1, 2], [2, 0], [0, 0], [0])))
        device.copy(CopyJob(1, Direction.STORE, layout.split([3, 4], [0, 2], [0, 0], [0])))
    assert not slots[0, :128].any()
    assert slots[0, 128:176].tobytes() == tensors[1][3, :48].tobytes()
    assert not slots[0, 176:192].any()


class TestRefusals:
    """What does not match is refused with its numbers; no pair of it could be trusted."""

    layout = Shape([(64, 64)], [[0], [0]], 4).layout()

    @pytest.mark.parametrize(
        ("blocks", "sizes", "firsts", "slots"),
        [
            ([1, 2], [2], [0], [0]),
            ([1, 2], [1, 2], [0, 0], [0, 1]),
            ([1, 2], [1, 1], [0, 0], [0]),
            ([1, 2], [2, 0], [3, 0], [0]),
            ([1, 2], [2, 0], [0, 0], [0, 1]),
        ],
        ids=["groups", "blocks", "slots for two groups", "slots for two chunks", "too many slots"],
    )
    def test_counts_that_do_not_match(self, blocks, sizes, firsts, slots):
        with pytest.raises(TierError):
            self.layout.split(blocks, sizes, firsts, slots)

    def test_slots_of_another_group(self):
        """The key's group and the block counts must tell the same story."""
        self.layout.split([1, 2], [1, 1], [3, 3], [5, 6], slot_groups=[0, 1], whole=True)
        with pytest.raises(TierError, match="groups"):
            self.layout.split([1, 2], [1, 1], [3, 3], [5, 6], slot_groups=[0, 0])

    def test_a_hole_in_the_middle_of_a_chunk(self):
        """Seven blocks from the start of two chunks of four: the scheduler left one out, who knows which."""
        with pytest.raises(TierError, match="hole"):
            self.layout.split(range(7), [7, 0], [0, 0], [0, 1], whole=True)

    def test_pages_that_do_not_fit(self):
        with pytest.raises(TierError, match="need 256 bytes"):
            Shape([(64, 64)], [[0]], 4).layout(stop=255)

    def test_a_tensor_that_is_not_there(self):
        with pytest.raises(TierError, match="tensor 1"):
            DeviceLayout.direct([64], [[PageRef(1, 64)]], blocks_per_chunk=1)

    def test_a_page_nobody_vouches_for(self):
        with pytest.raises(TierError, match="canonical"):
            DeviceLayout.canonical([64], [[PageRef(0, 64)]], blocks_per_chunk=1)


def test_two_layers_of_a_group_in_one_tensor():
    """Of two uses of one tensor by one group the longer is copied, whichever comes first."""
    for lengths in ([64, 48], [48, 64]):
        layout = DeviceLayout.direct([64], [[PageRef(0, n) for n in lengths]], blocks_per_chunk=1)
        tensors, slots = Shape([(64, 64)], [[0]], 1).tensors(), dirty_slots(1, 64)
        with copier(tensors, layout, slots) as device:
            device.copy(CopyJob(0, Direction.STORE, layout.split([3], [1], [0], [0])))
        assert slots[0].tobytes() == tensors[0][3].tobytes()
