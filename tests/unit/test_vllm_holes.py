"""Stores whose first chunk begins in its middle: what of them may be kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierkv.vllm._holes import Offered, without_holes


def test_whole_chunks_are_left_as_they_are() -> None:
    """Nothing is dropped, and nothing is copied."""
    offered = Offered([1, 2, 3, 4, 9], [4, 1], [2, 0])
    assert without_holes(offered, 2) == (offered, ())


def test_a_chunk_that_begins_in_its_middle_is_dropped() -> None:
    """Its blocks, and its slot behind those of the groups before; what follows begins at the next chunk."""
    offered = Offered([10, 11, 12, 13, 20, 21, 22], [4, 3], [0, 3])
    kept, dropped = without_holes(offered, 2)
    assert kept == Offered([10, 11, 12, 13, 21, 22], [4, 2], [0, 4])
    assert dropped == [2]


def test_a_recurrent_state_is_its_last_block() -> None:
    """There the blocks before are never there."""
    offered = Offered([7, 8], [1, 1], [3, 3])
    assert without_holes(offered, 4, recurrent={0}) == (Offered([7], [1, 0], [3, 4]), [1])


@st.composite
def _jobs(draw: st.DrawFn) -> tuple[int, list[tuple[int, list[int]]]]:
    """Blocks a chunk, and for each group the index of its first block and its blocks, to the end of a chunk."""
    n = draw(st.integers(1, 5))
    groups = []
    for group in range(draw(st.integers(1, 4))):
        first, n_chunks = draw(st.integers(0, 3 * n)), draw(st.integers(0, 3))
        size = n_chunks * n - first % n if n_chunks else 0
        groups.append((first if size else 0, [1000 * group + first + i for i in range(size)]))
    return n, groups


@given(_jobs())
def test_what_is_kept_is_whole(job: tuple[int, list[tuple[int, list[int]]]]) -> None:
    """Every chunk all of whose blocks are there is kept with its blocks, in order, and no other is."""
    n, groups = job
    offered = Offered([b for _, blocks in groups for b in blocks], [len(b) for _, b in groups], [f for f, _ in groups])
    kept, dropped = without_holes(offered, n)
    place, expected, gone = 0, [], []
    for first, blocks in groups:
        present = set(range(first, first + len(blocks)))
        for chunk in sorted({i // n for i in present}):
            if set(range(chunk * n, chunk * n + n)) <= present:
                expected += [blocks[i - first] for i in range(chunk * n, chunk * n + n)]
            else:
                gone.append(place)
            place += 1
    assert list(kept.blocks) == expected
    assert list(dropped) == gone
    assert sum(kept.group_sizes) == len(expected)
    assert all(first % n == 0 for first, size in zip(kept.first_blocks, kept.group_sizes, strict=True) if size)
