"""A29, A30: caches made of unlike parts, and copies that overtake the kernels whose bytes they want."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.device.planted import LoadWithoutProducer, StoreWithoutProducer
from tests.device.shapes import Cut, Shape, copier, dirty_slots, expected_store, random_cut
from tests.device.workload import N_BLOCKS, PAGES, SimMachine
from tierkv.device import CopyJob, DeviceLayout, DeviceTier, Direction, PageRef, TransferEngine
from tierkv.device.layout import GroupCopy
from tierkv.errors import TierError
from tierkv.testing.simdevice import RaceError, SimSchedule

N_SLOTS = 12


def _split(layout: DeviceLayout, cut: Cut) -> tuple[GroupCopy, ...]:
    return tuple(layout.split(cut.blocks, cut.sizes, cut.firsts, cut.slots))


def test_a29_a_cache_made_of_unlike_parts() -> None:
    """Models whose cache is not one tensor a layer failed under the offloading connector.

    https://github.com/vllm-project/vllm-ascend/issues/7971

    Parts of 512 and 128 bytes a block, groups that share one, padded pages, rows further apart than they are long; 1, 3
    and 8 blocks a chunk; any first block and any end: the slots hold exactly the pages and zeros, and random bytes of
    every part come back into other blocks identical, nothing else touched. A layout that cannot be copied is refused
    when it is registered, with tensor, shape and strides, and nothing has been copied then.
    """
    rng = random.Random(29)
    for per_chunk in (1, 3, 8):
        for strided in (False, True):
            shape = Shape([(512, 512), (128, 128), (640, 512)], [[0, 1], [1, 2]], per_chunk)
            layout = shape.layout()
            for seed in range(10):
                tensors, others = shape.tensors(seed, strided=strided), shape.tensors(seed + 100, strided=strided)
                slots, cut = dirty_slots(N_SLOTS, shape.nbytes), random_cut(rng, shape, N_SLOTS)
                expected = expected_store(shape, tensors, cut, slots, 0)
                with copier(tensors, layout, slots) as device:
                    device.copy(CopyJob(0, Direction.STORE, _split(layout, cut)))
                np.testing.assert_array_equal(slots, expected)
                moved = Cut(rng.sample(range(shape.n_blocks), len(cut.blocks)), cut.sizes, cut.firsts, cut.slots)
                wanted = [tensor.copy() for tensor in others]
                for (group, source, _, _), (_, target, _, _) in zip(
                    cut.places(per_chunk), moved.places(per_chunk), strict=True
                ):
                    for tensor in shape.groups[group]:
                        n = shape.pages[tensor][1]
                        wanted[tensor][target, :n] = tensors[tensor][source, :n]
                with copier(others, layout, slots) as device:
                    device.copy(CopyJob(0, Direction.LOAD, _split(layout, moved)))
                assert all(np.array_equal(got, want) for got, want in zip(others, wanted, strict=True))
    shape = Shape([(64, 64)], [[0]], 2)
    refused: list[tuple[Any, str]] = [
        (np.zeros((8, 65), np.int8), r"tensor 0.*65"),
        (np.zeros((8, 64), np.float32), r"tensor 0"),
        (np.zeros((64, 8), np.int8).T, r"tensor 0.*\[8, 64\] with strides \[1, 8\]"),
    ]
    for wrong, told in refused:
        with pytest.raises(TierError, match=told):
            DeviceTier(blocks_per_chunk=2).register_pages([wrong], shape.layout())
    with pytest.raises(TierError, match="tensor 1"):
        DeviceLayout.direct([64], [[PageRef(1, 64)]], blocks_per_chunk=1)
    with pytest.raises(TierError, match="need 128 bytes"):
        shape.layout(stop=127)


def _all_well(machine: SimMachine) -> None:
    for done in machine.engine.poll():
        if done.error is not None:
            raise done.error


def _store_and_load(seed: int, schedule: SimSchedule, engine: type[TransferEngine]) -> None:
    """A block is stored at once behind its kernel; kernels still read and write the block that it is loaded into."""
    machine, rng = SimMachine(seed, schedule, per_chunk=1, engine=engine), random.Random(seed)
    source, target = rng.sample(range(N_BLOCKS), 2)
    value, slot = 1 + seed % 200, rng.randrange(6)

    def copy(direction: Direction, block: int) -> None:
        machine.engine.submit(
            CopyJob(1 + block, direction, machine.layout.split([block], [1, 0], [0, 0], [slot], whole=True))
        )

    machine.fill(0, source, value)
    copy(Direction.STORE, source)
    machine.engine.wait()
    _all_well(machine)
    stored = machine.slot_bytes(slot)
    assert set(stored[: PAGES[0][1]]) == {value}, "what was there before the kernel"
    machine.fill(0, target, 250)
    earlier = machine.read(0, target)
    copy(Direction.LOAD, target)
    while machine.engine.n_open:
        machine.sim.progress()
        _all_well(machine)
    later = machine.read(0, target)
    machine.sim.synchronize()
    assert set(earlier[0]) == {250} and set(later[0]) == {value} and set(later[1]) == {value + 1}
    machine.engine.close()


def test_a30_a_copy_waits_for_the_kernel_whose_bytes_it_wants() -> None:
    """Copies to the host overtook the kernels that write the blocks, and restored text was garbled under load.

    https://github.com/vllm-project/vllm/issues/45704

    On a simulated device whose queues really run late and out of step, a thousand runs under six schedules: a block is
    stored right behind its kernel, and loaded into a block that earlier kernels still read and write. The slot holds
    what was written; earlier readers see their own bytes, later ones the loaded. An engine that leaves out either wait
    is found in each run, by its race. On a CPU the model's work has ended before vLLM hands a store over, and there is
    nothing to order.
    """
    schedules = list(SimSchedule)
    for seed in range(1000):
        _store_and_load(seed, schedules[seed % len(schedules)], TransferEngine)
    for engine in (StoreWithoutProducer, LoadWithoutProducer):
        for seed in range(30):
            with pytest.raises(RaceError):
                _store_and_load(seed, schedules[seed % len(schedules)], engine)
