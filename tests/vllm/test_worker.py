"""The worker on real tensors, vLLM's real base classes, a real pool and a real control page."""

from __future__ import annotations

import pickle
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    GPULoadStoreSpec,
)

from tests.device.shapes import DIRT
from tests.patience import PATIENCE_S
from tierkv.device import cpu
from tierkv.device.runtime import DeviceLostError
from tierkv.errors import TierError
from tierkv.tiers._pool import PrivatePool
from tierkv.vllm._control import ControlPage, CopyStatus, Direction
from tierkv.vllm._spec_types import ChunkGeometry, SlotSpec
from tierkv.vllm.worker import open_worker

N_SLOTS, N_BLOCKS, PAGE, UNPADDED = 6, 16, 512, 500
DEADLINE_S = PATIENCE_S


def config_of(rank: int = 0, n_ranks: int = 1, per_chunk: int = 2, *, canonical: bool = False, groups=(0, 3)):
    """The fields of vLLM's ``OffloadingConfig`` that the worker reads; group numbers in keys need not be dense."""
    return SimpleNamespace(
        groups=[SimpleNamespace(group_id=g, tokens_per_block=16, layer_names=(f"l{g}",)) for g in groups],
        worker_kv_bytes_per_block=2 * PAGE,
        canonical_layout=canonical,
        kv_cache_layout="LBHNC",
        model=SimpleNamespace(name="m", dtype="float32"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=per_chunk),
        parallel=SimpleNamespace(rank=rank, world_size=n_ranks, tp_size=n_ranks, pp_size=1, pcp_size=1, dcp_size=1),
    )


def caches_of(seed: int = 0, device: str = "cpu", mapping=None) -> CanonicalKVCaches:
    """Two tensors that two groups overlay."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randint(-128, 128, (N_BLOCKS, PAGE), dtype=torch.int8, generator=generator) for _ in range(2)]
    refs = [[CanonicalKVCacheRef(t, UNPADDED, mapping) for t in range(2)] for _ in range(2)]
    return CanonicalKVCaches([CanonicalKVCacheTensor(tensor.to(device), PAGE) for tensor in made], refs)


class Rig:
    """A worker or two over one pool and one page."""

    def __init__(self, n_ranks: int = 1, *, shared: bool = True, **config) -> None:
        self.configs = [config_of(rank, n_ranks, **config) for rank in range(n_ranks)]
        geometry = ChunkGeometry.of(self.configs[0], shared=shared)
        self.pool = PrivatePool(N_SLOTS, geometry.stride_nbytes, populate=False)
        self.page = ControlPage.private(n_ranks=n_ranks, n_slots=N_SLOTS)
        self.slots = np.frombuffer(self.pool.buffer, np.int8).reshape(N_SLOTS, -1)
        self.slots[:] = DIRT
        self.caches = [caches_of(rank) for rank in range(n_ranks)]
        self.released: list[int] = []
        self.workers = [
            open_worker(
                config,
                caches,
                pool=self.pool,
                page=self.page,
                shared=shared,
                release=lambda r=r: self.released.append(r),
            )
            for r, (config, caches) in enumerate(zip(self.configs, self.caches, strict=True))
        ]
        self.tickets = 0

    def spec(self, slots, groups=(), generation=None) -> SlotSpec:
        self.tickets += 1
        tickets = (self.tickets,) * len(slots)
        return SlotSpec(
            tuple(slots), tickets, self.page.generation if generation is None else generation, tuple(groups)
        )

    def status(self, slot: int, direction: Direction, ticket: int) -> CopyStatus:
        return self.page.status(slot, direction, ticket)

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        del self.slots
        self.page.close()
        self.pool.close()


@pytest.fixture
def rig():
    made = Rig()
    yield made
    made.close()


def blocks(ids, sizes, firsts=None) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(ids, sizes, firsts or [0] * len(sizes))


def finish(worker, *jobs):
    worker.wait(set(jobs))
    return {result.job_id: result for result in worker.get_finished()}


def test_store_then_load_brings_every_byte_back(rig):
    """Chunks of two groups go to slots and return to other blocks; both ends are stamped; 0.33's keyword is taken."""
    worker, tensors = rig.workers[0], [t.tensor for t in rig.caches[0].tensors]
    store = rig.spec([4, 1], groups=[0, 3])
    assert worker.submit_store(7, blocks([2, 3, 5, 6], [2, 2]), store)
    done = finish(worker, 7)
    assert done[7].success
    assert done[7].transfer_size == 4 * 2 * UNPADDED
    assert rig.status(4, Direction.STORE, 1) is rig.status(1, Direction.STORE, 1) is CopyStatus.OK
    before = [tensor.clone() for tensor in tensors]
    assert worker.submit_load(8, rig.spec([4, 1], groups=[0, 3]), blocks([10, 11, 12, 13], [2, 2]), expedited=True)
    assert finish(worker, 8)[8].success
    assert rig.status(4, Direction.LOAD, 2) is CopyStatus.OK
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[10:14, :UNPADDED], old[[2, 3, 5, 6], :UNPADDED])
        assert torch.equal(tensor[10:14, UNPADDED:], old[10:14, UNPADDED:])
        assert torch.equal(tensor[:10], old[:10])


def test_ranks_write_side_by_side_and_nothing_old_is_left():
    """Two ranks share a dirty slot: each has its pages there; paddings and the slot's tail are zero."""
    rig = Rig(2, per_chunk=1)
    for worker in rig.workers:
        worker.submit_store(1, blocks([9], [1, 0]), SlotSpec((3,), (1,), 0, (0,)))
        assert finish(worker, 1)[1].success
    assert rig.status(3, Direction.STORE, 1) is CopyStatus.OK
    expected = np.zeros_like(rig.slots[3])
    for rank, caches in enumerate(rig.caches):
        for t, cache in enumerate(caches.tensors):
            at = (2 * rank + t) * PAGE
            expected[at : at + UNPADDED] = cache.tensor[9, :UNPADDED].numpy()
    np.testing.assert_array_equal(rig.slots[3], expected)
    assert (rig.slots[[0, 1, 2, 4, 5]] == DIRT).all()
    rig.close()


def test_private_pools_hold_one_ranks_bytes_each():
    """Rank 1 of 2 with a pool of its own starts at its slots' beginning."""
    config = config_of(1, 2, per_chunk=1)
    geometry = ChunkGeometry.of(config, shared=False)
    pool = PrivatePool(2, geometry.stride_nbytes, populate=False)
    page = ControlPage.private(n_ranks=2, n_slots=2)
    caches = caches_of(1)
    worker = open_worker(config, caches, pool=pool, page=page, shared=False)
    worker.submit_store(1, blocks([9], [1, 0]), SlotSpec((1,), (1,)))
    assert finish(worker, 1)[1].success
    assert bytes(pool.view(1)[:UNPADDED]) == caches.tensors[0].tensor[9, :UNPADDED].numpy().tobytes()
    assert page.status(1, Direction.STORE, 1) is CopyStatus.PENDING, "rank 0 has stamped nothing"
    worker.shutdown()
    page.close()
    pool.close()


class TestFailures:
    """vLLM hears that stores succeed; the page says which did not. A load fails only after its second try."""

    def test_a_store_that_fails(self, rig):
        worker = rig.workers[0]
        worker.submit_store(1, blocks([2, N_BLOCKS], [2, 0]), rig.spec([0]))
        worker.submit_store(2, blocks([2, 3], [2, 0]), rig.spec([1]))
        done = finish(worker, 1, 2)
        assert [(r.job_id, r.success, r.transfer_size is None) for r in done.values()] == [
            (1, True, True),
            (2, True, False),
        ]
        assert rig.status(0, Direction.STORE, 1) is CopyStatus.FAILED
        assert rig.status(1, Direction.STORE, 2) is CopyStatus.OK

    def test_a_store_on_a_lost_device(self, rig, monkeypatch):
        """Unlike another failed store it stops vLLM: on that device the model's kernels do not run either."""

        def lost(*_):
            raise DeviceLostError("device", "lost on purpose")

        monkeypatch.setattr(cpu.CpuRuntime, "copy_batch", lost)
        rig.workers[0].submit_store(1, blocks([2, 3], [2, 0]), rig.spec([0]))
        assert not finish(rig.workers[0], 1)[1].success
        assert rig.status(0, Direction.STORE, 1) is CopyStatus.FAILED

    @pytest.mark.parametrize("plain_fails", [False, True])
    def test_a_load_that_fails(self, rig, monkeypatch, plain_fails):
        worker, tensor = rig.workers[0], rig.caches[0].tensors[0].tensor
        worker.submit_store(1, blocks([2, 3], [2, 0]), rig.spec([0]))
        finish(worker, 1)

        def broken(*_):
            raise OSError("broken on purpose")

        monkeypatch.setattr(cpu, "copy_rows", broken)
        if plain_fails:
            monkeypatch.setattr(cpu.CpuRuntime, "copy_plain", broken)
        worker.submit_load(2, rig.spec([0]), blocks([8, 9], [2, 0]))
        result = finish(worker, 2)[2]
        assert result.success is not plain_fails
        assert rig.status(0, Direction.LOAD, 2) is (CopyStatus.FAILED if plain_fails else CopyStatus.OK)
        assert torch.equal(tensor[8:10, :UNPADDED], tensor[2:4, :UNPADDED]) is not plain_fails

    @pytest.mark.parametrize(
        ("ids", "sizes", "slots", "groups"),
        [
            ([1, 2, 3], [3, 0], [0, 1], [0, 0]),
            ([1, 2], [2, 0], [0, 1], []),
            ([1, 2], [2, 0], [0], [3]),
            ([1, 2], [2, 0], [0], [1]),
        ],
        ids=["hole in a chunk", "a slot too many", "another group's slot", "no such group"],
    )
    def test_blocks_and_slots_that_do_not_match(self, rig, ids, sizes, slots, groups):
        """Nothing is copied, the store is dropped by its stamps, the engine lives."""
        worker = rig.workers[0]
        worker.submit_store(1, blocks(ids, sizes), rig.spec(slots, groups))
        assert finish(worker, 1)[1].success
        assert {rig.status(slot, Direction.STORE, 1) for slot in slots} == {CopyStatus.FAILED}
        assert (rig.slots == DIRT).all()

    def test_a_load_that_does_not_match_is_no_success(self, rig):
        """Never wrong tokens: there is nothing to try again plainly."""
        before = rig.caches[0].tensors[0].tensor.clone()
        rig.workers[0].submit_load(1, rig.spec([0, 1]), blocks([1, 2], [2, 0]))
        assert not finish(rig.workers[0], 1)[1].success
        assert torch.equal(rig.caches[0].tensors[0].tensor, before)

    def test_slots_of_another_pool(self, rig):
        """A job with another page's generation copies nothing."""
        rig.workers[0].submit_store(1, blocks([1, 2], [2, 0]), rig.spec([0], generation=1234))
        finish(rig.workers[0], 1)
        assert (rig.slots == DIRT).all()


@pytest.fixture
def gate(monkeypatch):
    """Stores that begin only when the gate opens."""
    opened, entered = threading.Event(), threading.Event()
    copy = cpu.copy_rows

    def held(batch):
        if batch.direction.value == "store":
            entered.set()
            assert opened.wait(DEADLINE_S)
        copy(batch)

    monkeypatch.setattr(cpu, "copy_rows", held)
    yield opened, entered
    opened.set()


def test_a_refused_job_does_not_overtake_a_running_copy(rig, gate):
    """Its failure stamp says that every earlier copy on the slot has ended, so it waits its turn."""
    opened, entered = gate
    worker = rig.workers[0]
    worker.submit_store(1, blocks([1, 2], [2, 0]), rig.spec([0]))
    assert entered.wait(DEADLINE_S)
    worker.submit_store(2, blocks([1], [1, 0]), rig.spec([0]))
    assert rig.status(0, Direction.STORE, 2) is CopyStatus.PENDING
    assert worker.get_finished() == []
    opened.set()
    assert list(finish(worker, 1, 2)) == [1, 2]
    assert rig.status(0, Direction.STORE, 2) is CopyStatus.FAILED


def test_waiting_covers_the_named_jobs_in_both_directions(rig, gate):
    """``wait`` for a load returns while a store is held; for the store it returns only after its end is stamped."""
    opened, entered = gate
    worker = rig.workers[0]
    worker.submit_store(1, blocks([1, 2], [2, 0]), rig.spec([0]))
    worker.submit_load(2, rig.spec([1]), blocks([3, 4], [2, 0]))
    worker.wait({2, 99})
    assert [r.job_id for r in worker.get_finished()] == [2]
    stamped: list[CopyStatus] = []
    waiting = threading.Thread(target=lambda: (worker.wait({1}), stamped.append(rig.status(0, Direction.STORE, 1))))
    waiting.start()
    assert entered.wait(DEADLINE_S)
    opened.set()
    waiting.join(DEADLINE_S)
    assert stamped == [CopyStatus.OK]


def test_after_shutdown_nothing_touches_the_pool(rig, gate):
    """What was submitted ends first and is stamped, a late job does nothing, the pool can be unmapped."""
    opened, entered = gate
    worker = rig.workers[0]
    worker.submit_store(1, blocks([1, 2], [2, 0]), rig.spec([0]))
    worker.submit_store(2, blocks([1, 2], [2, 0]), rig.spec([1]))
    assert entered.wait(DEADLINE_S)
    closing = threading.Thread(target=worker.shutdown)
    closing.start()
    assert rig.released == []
    opened.set()
    closing.join(DEADLINE_S)
    assert rig.released == [0]
    assert rig.status(0, Direction.STORE, 1) is CopyStatus.OK
    assert rig.status(1, Direction.STORE, 2) is CopyStatus.OK
    before = rig.slots.copy()
    assert worker.submit_store(3, blocks([1, 2], [2, 0]), rig.spec([2]))
    worker.shutdown()
    assert rig.released == [0]
    assert rig.status(2, Direction.STORE, 3) is CopyStatus.PENDING
    np.testing.assert_array_equal(rig.slots, before)


def test_canonical_pages_of_two_ranks_are_read_by_one():
    """With vLLM's own records: two ranks interleave heads in one slot, and a rank that has all heads reads them."""

    def mapping(rank: int, n_ranks: int) -> CanonicalPageMapping:
        n = UNPADDED // n_ranks
        run = CopyRun(0, rank * n // 10, n // 10, 10, n // 10, UNPADDED // 10)
        return CanonicalPageMapping(UNPADDED, n, (run,), 1, 0, True)

    pool = PrivatePool(N_SLOTS, 4096, populate=False)
    truth = torch.randint(-128, 128, (2, N_BLOCKS, 10, 50), dtype=torch.int8)

    def worker_of(rank: int, n_ranks: int, pages: torch.Tensor):
        config = config_of(rank, n_ranks, per_chunk=2, canonical=True)
        n = UNPADDED // n_ranks
        refs = [[CanonicalKVCacheRef(t, n, mapping(rank, n_ranks)) for t in range(2)] for _ in range(2)]
        caches = CanonicalKVCaches([CanonicalKVCacheTensor(p, n) for p in pages.reshape(2, N_BLOCKS, n)], refs)
        page = ControlPage.private(n_ranks=n_ranks, n_slots=N_SLOTS)
        return open_worker(config, caches, pool=pool, page=page, shared=True, release=page.close)

    for rank in range(2):
        worker = worker_of(rank, 2, truth[:, :, :, rank * 25 : rank * 25 + 25].contiguous())
        worker.submit_store(1, blocks([4, 7], [2, 0]), SlotSpec((5,), (1,)))
        assert finish(worker, 1)[1].success
        worker.shutdown()
    got = torch.zeros(2, N_BLOCKS, UNPADDED, dtype=torch.int8)
    worker = worker_of(0, 1, got)
    worker.submit_load(1, SlotSpec((5,), (1,)), blocks([4, 7], [2, 0]))
    assert finish(worker, 1)[1].success
    worker.shutdown()
    pool.close()
    assert torch.equal(got[:, [4, 7]], truth.reshape(2, N_BLOCKS, UNPADDED)[:, [4, 7]])


@pytest.mark.parametrize(
    ("config", "caches", "shared", "says"),
    [
        (config_of(0, 2, canonical=True), caches_of(), False, "shared pool"),
        (config_of(canonical=True), caches_of(), True, "canonical page"),
        (config_of(), caches_of(device="meta"), True, "no runtime for meta"),
    ],
    ids=["canonical pages in private pools", "no mapping", "a device without a runtime"],
)
def test_what_cannot_be_copied_is_refused_at_start(config, caches, shared, says):
    """One sentence that names what is missing, before anything was copied."""
    pool = PrivatePool(N_SLOTS, ChunkGeometry.of(config, shared=shared).stride_nbytes, populate=False)
    page = ControlPage.private(n_ranks=config.parallel.world_size, n_slots=N_SLOTS)
    with pytest.raises(TierError, match=says):
        open_worker(config, caches, pool=pool, page=page, shared=shared)
    page.close()
    pool.close()


def test_a_spec_travels_between_processes():
    """The scheduler pickles it for every worker."""
    spec = pickle.loads(pickle.dumps(SlotSpec((3, 1), (5, 6), 77, (0, 1))))
    assert (spec.slots, spec.tickets, spec.generation, spec.groups) == ((3, 1), (5, 6), 77, (0, 1))


def test_without_an_engine_no_identity_is_published(rig):
    """Nothing vouches for the model here, so the levels below stay closed."""
    assert rig.page.identities() is None
