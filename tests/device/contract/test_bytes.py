"""Every byte of every part comes back, whatever the order of things."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.device.contract.server import LOAD, Flying, Server, Shape
from tierkv.device.runtime import HostKind

N_EXAMPLES = int(os.environ.get("TIERKV_CONTRACT_EXAMPLES", "12"))

KINDS = [*((kind, 0) for kind in HostKind), (HostKind.PAGEABLE, 4096)]
"""And pageable slots by way of a pinned ring, too small for the longest pages and for most batches."""

IDS = [*(kind.value for kind in HostKind), "staged"]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """K and V apart, parts of different widths, tensors shared by groups, padding, rows further apart than pages."""
    pages = []
    for _ in range(draw(st.integers(1, 3))):
        used = draw(st.sampled_from([1, 64, 200, 1024, 9000]))
        pages.append((used + draw(st.sampled_from([0, 56])), used))
    tensor = st.integers(0, len(pages) - 1)
    group = st.lists(tensor, min_size=1, max_size=3, unique=True).map(tuple)
    groups = draw(st.lists(group, min_size=1, max_size=2).map(tuple))
    return Shape(tuple(pages), groups, draw(st.sampled_from([1, 3, 4, 8])), draw(st.sampled_from([0, 48])))


STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "load", "poll", "consume", "wait", "idle"]), st.integers(0, 1 << 20)),
    min_size=4,
    max_size=30,
)


def play(server: Server, steps: list[tuple[str, int]]) -> None:
    """Interpret drawn steps; what is not possible at that moment is left out."""
    for verb, seed in steps:
        rng = random.Random(seed)
        if verb == "store":
            _store(server, rng)
        elif verb == "load":
            _load(server, rng)
        elif verb == "poll":
            server.poll()
        elif verb == "idle":
            server.rig.settle()
        elif server.flying:
            flying = rng.choice(list(server.flying.values()))
            if verb == "wait":
                server.engine.wait([(flying.job.direction, flying.job.id)])
                assert flying.job.id in [done.job.id for done in server.poll()]
            elif flying.job.direction is LOAD and not flying.read_early:
                server.consume(flying)


def _store(server: Server, rng: random.Random) -> Flying | None:
    """New bytes by a kernel, then at once their store, unaligned at both ends."""
    shape, free = server.shape, server.free_blocks()
    slots = rng.sample(server.free_slots(), min(len(server.free_slots()), rng.randint(1, 3)))
    first = rng.randrange(2 * shape.blocks_per_chunk)
    end = (first // shape.blocks_per_chunk + len(slots)) * shape.blocks_per_chunk - rng.randrange(
        shape.blocks_per_chunk
    )
    if not slots or end <= first or end - first > len(free):
        return None
    group, blocks = rng.randrange(len(shape.groups)), rng.sample(free, end - first)
    for block in blocks[: rng.randint(0, len(blocks))]:
        for tensor in shape.groups[group]:
            server.write(tensor, block, rng.randbytes(shape.pages[tensor][1]))
    return server.store(group, blocks, first, slots)


def _load(server: Server, rng: random.Random) -> Flying | None:
    """A part of a chunk that is there, into blocks that a kernel is still zeroing."""
    ready = [slot for slot in server.free_slots() if slot in server.chunks]
    if not ready:
        return None
    slot = rng.choice(ready)
    group, subs = server.chunks[slot]
    first, last = min(subs), max(subs)
    start = rng.randint(first, last)
    n_blocks = rng.randint(1, last - start + 1)
    free = server.free_blocks()
    if n_blocks > len(free):
        return None
    blocks = rng.sample(free, n_blocks)
    for block in blocks:
        for tensor in server.shape.groups[group]:
            server.write(tensor, block, bytes(server.shape.pages[tensor][1]))
    return server.load(group, blocks, start + server.shape.blocks_per_chunk * rng.randrange(3), [slot])


@pytest.mark.parametrize(("kind", "half_nbytes"), KINDS, ids=IDS)
def test_every_byte_comes_back(make_rig, kind, half_nbytes):
    """Stores of blocks still being written, loads into blocks still being zeroed, reuse as soon as it is allowed."""

    @settings(max_examples=N_EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(shape=shapes(), steps=STEPS, seed=st.integers(0, 1 << 16))
    def run(shape: Shape, steps: list[tuple[str, int]], seed: int) -> None:
        server = Server(make_rig(seed), shape, kind, half_nbytes=half_nbytes)
        try:
            play(server, [*steps[:2], ("store", seed), ("wait", 0), *steps[2:], ("load", seed)])
        except BaseException:
            server.abandon()
            raise
        assert not server.failed
        server.close()

    run()


@pytest.mark.parametrize("blocks_per_chunk", [1, 3, 4, 8])
@pytest.mark.parametrize(("kind", "half_nbytes"), KINDS, ids=IDS)
def test_a_prefix_that_begins_and_ends_within_chunks(make_rig, kind, half_nbytes, blocks_per_chunk):
    """Every first block and every length over three chunks, stored and loaded back elsewhere."""
    shape = Shape(((256, 200), (64, 64)), ((0, 1),), blocks_per_chunk, n_blocks=6 * blocks_per_chunk)
    server = Server(make_rig(blocks_per_chunk), shape, kind, half_nbytes=min(half_nbytes, 512))
    n = 3 * blocks_per_chunk
    blocks = server.random.sample(range(2 * n), 2 * n)
    for first in range(blocks_per_chunk):
        for end in sorted({first + 1, blocks_per_chunk, n - 1, n} - set(range(first + 1))):
            slots = server.random.sample(range(shape.n_slots), -(-end // blocks_per_chunk))
            server.store(0, blocks[first:end], first, slots)
            server.engine.wait()
            server.poll()
            server.load(0, blocks[n + first : n + end], first, slots)
            server.engine.wait()
            server.poll()
    assert not server.failed
    server.close()
