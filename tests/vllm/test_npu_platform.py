"""On a platform that says it is an Ascend NPU: both plugins in either order, former settings, and K and V apart.

No NPU was near these tests, and no vllm-ascend: factories, connectors and scheduler are vLLM's real ones, the tensors
lie in host memory.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector as VllmConnector
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from tests.vllm import ascend
from tests.vllm import test_scheduler_machine as machine
from tests.vllm.manager_kit import PAGE_NBYTES, offloading_config
from tests.vllm.scheduler_rig import BLOCK, TOKEN_NBYTES, ManualRuntime, Rig
from tierkv.device import HostKind, tier
from tierkv.device.cpu import CpuRuntime
from tierkv.errors import ConfigError, TierError
from tierkv.vllm import _meeting, plugin, spec, worker
from tierkv.vllm._identity import kv_shapes
from tierkv.vllm._split_caches import split_caches
from tierkv.vllm.connector import OffloadingConnector
from tierkv.vllm.options import parse_options
from tierkv.vllm.spec import CPUOffloadingSpec, TieringOffloadingSpec, TierKVOffloadingSpec

pytestmark = pytest.mark.timeout(600)

CPU = {"cpu_bytes_to_use": 64 * 4096}
ORDERS = list(itertools.permutations((ascend.OURS, ascend.THEIRS)))


@pytest.fixture(autouse=True)
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TIERKV_VLLM", raising=False)
    monkeypatch.setattr(spec, "_warned", set())
    with ascend.npu_platform():
        yield


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What tierkv's half of the log says: vLLM's loggers do not propagate."""
    records: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    handler = Handler()
    loggers = [logging.getLogger(f"vllm.tierkv.{name}") for name in ("plugin", "spec")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    yield records
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


# -- plugins ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: " then ".join(plugin.name for plugin in order))
@pytest.mark.parametrize("n_times", [1, 2])
def test_whichever_plugin_is_loaded_first_the_specs_are_ours_once(order, n_times, logged):
    """Through vLLM's loader, once or again: both names are ours, one line says so, and theirs was not made."""
    for _ in range(n_times):
        ascend.load_plugins(*order)
    assert OffloadingSpecFactory.get_spec_cls({}) is CPUOffloadingSpec
    assert OffloadingSpecFactory.get_spec_cls({"spec_name": "TieringOffloadingSpec"}) is TieringOffloadingSpec
    assert sum("CPUOffloadingSpec, TieringOffloadingSpec" in line for line in logged) == 1
    config = offloading_config(CPU)
    assert type(OffloadingSpecFactory.create_spec(config)) is CPUOffloadingSpec


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: " then ".join(plugin.name for plugin in order))
def test_a_connector_of_vllm_ascend_stays_theirs(order):
    """It takes K and V apart already: whoever is loaded first, the engine gets theirs."""
    ascend.load_plugins(*order)
    assert KVConnectorFactory.get_connector_class_by_name("OffloadingConnector") is ascend.AscendOffloadingConnector


def test_without_a_connector_of_theirs_ours_takes_the_place_of_vllms():
    """Loaded alone, and again: our connector, under the name of vLLM's, by which its statistics are found."""
    for _ in range(2):
        ascend.load_plugins(ascend.OURS)
    cls = KVConnectorFactory.get_connector_class_by_name("OffloadingConnector")
    assert cls is OffloadingConnector
    assert issubclass(cls, VllmConnector)
    assert cls.__name__ == VllmConnector.__name__


def test_switched_off_nothing_of_it_is_touched(monkeypatch):
    """``TIERKV_VLLM=0`` on an NPU leaves vllm-ascend's specs and vLLM's connector alone."""
    monkeypatch.setenv("TIERKV_VLLM", "0")
    ascend.load_plugins(ascend.OURS)
    assert KVConnectorFactory.get_connector_class_by_name("OffloadingConnector") is VllmConnector
    ascend.load_plugins(ascend.OURS, ascend.THEIRS)
    assert OffloadingSpecFactory.get_spec_cls({}) is ascend.NPUOffloadingSpec
    assert OffloadingSpecFactory.get_spec_cls({"spec_name": "TierKVOffloadingSpec"}) is TierKVOffloadingSpec


def test_other_platforms_keep_vllms_connector(monkeypatch):
    """On a CPU the caches are one tensor a layer: nothing is put in its place."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    monkeypatch.setattr(vllm.platforms, "_current_platform", CpuPlatform())
    plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("OffloadingConnector") is VllmConnector
    with pytest.raises(ValueError, match="Unsupported spec type"):
        OffloadingSpecFactory.get_spec_cls({"spec_name": "NPUOffloadingSpec"})


@pytest.mark.parametrize("path", [{}, {"spec_module_path": "vllm_ascend.kv_offload.npu"}])
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: " then ".join(plugin.name for plugin in order))
def test_the_former_name_of_the_spec_is_understood(order, path):
    """``NPUOffloadingSpec`` of old guides, with or without its module, which need not exist any more."""
    ascend.load_plugins(*order)
    assert OffloadingSpecFactory.get_spec_cls({"spec_name": "NPUOffloadingSpec", **path}) is CPUOffloadingSpec


# -- former settings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
def test_num_cpu_blocks_is_understood_with_one_warning(world_size, logged):
    """So many chunks, whatever the number of workers; both halves are made, and one sentence says what to write."""
    ascend.load_plugins(ascend.OURS)
    extra = {"num_cpu_blocks": 24, "spec_name": "NPUOffloadingSpec"}
    made = [OffloadingSpecFactory.create_spec(offloading_config(extra, world_size=world_size)) for _ in range(2)]
    assert [one.n_slots for one in made] == [24, 24]
    (sentence,) = [line for line in logged if "num_cpu_blocks" in line]
    nbytes = int(sentence.rpartition(" ")[2])
    assert sentence.endswith(f'"cpu_bytes_to_use": {nbytes}')
    again = OffloadingSpecFactory.create_spec(offloading_config({"cpu_bytes_to_use": nbytes}, world_size=world_size))
    assert again.n_slots == 24, "the value that the sentence names gives the same pool"


def test_num_cpu_blocks_beside_the_new_name_has_no_effect(logged):
    """The name that vLLM has counts, and one warning says so."""
    for _ in range(2):
        assert CPUOffloadingSpec(offloading_config({**CPU, "num_cpu_blocks": 24})).n_slots == 64
    assert [line for line in logged if "num_cpu_blocks" in line] == [
        "num_cpu_blocks has no effect: cpu_bytes_to_use says how large host memory is"
    ]


@pytest.mark.parametrize("value", [0, -1, 1.5, "many", True])
def test_num_cpu_blocks_that_is_no_count_is_refused(value):
    """One sentence with the option, the value and what is allowed; the front end says the same."""
    for refused in (CPUOffloadingSpec.build_metric_definitions, parse_options):
        with pytest.raises(ConfigError, match=r"num_cpu_blocks is .*, but must be a whole number from 1") as caught:
            refused({"num_cpu_blocks": value})
        assert "\n" not in str(caught.value)


def test_the_front_end_takes_num_cpu_blocks():
    """It asks for the names of metrics before the size of a block is known."""
    assert CPUOffloadingSpec.build_metric_definitions({"num_cpu_blocks": 24})


def test_without_any_size_the_new_name_is_asked_for():
    """Nobody is told to use the former name."""
    with pytest.raises(ConfigError, match="cpu_bytes_to_use") as caught:
        parse_options({})
    assert "num_cpu_blocks" not in str(caught.value)


# -- pools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "extra", "shared"),
    [
        (CPUOffloadingSpec, {}, False),
        (TieringOffloadingSpec, {}, True),
        (TierKVOffloadingSpec, {}, False),
        (CPUOffloadingSpec, {"pool": "shared"}, True),
        (TieringOffloadingSpec, {"pool": "private"}, False),
        (CPUOffloadingSpec, {"canonical_layout": True}, True),
    ],
)
def test_host_memory_alone_is_private_and_tiers_share(cls, extra, shared):
    """``CPUOffloadingSpec`` has a pool for each worker, ``TieringOffloadingSpec`` one for all, unless ``pool`` says."""
    assert cls(offloading_config({**CPU, **extra})).shared is shared


class Accelerator(CpuRuntime):
    """Host memory that claims to be a device which blocks on pageable memory; what it offers is the test's."""

    offers: tuple[HostKind, ...] = ()
    blocks_on_pageable = True

    def alloc_host(self, nbytes: int, /) -> Any:
        if HostKind.PINNED not in self.offers:
            raise TierError("device", "planted: none left")
        return super().alloc_host(nbytes)

    def pin(self, memory: Any, /) -> Any:
        return mock.Mock() if HostKind.REGISTERED in self.offers else None


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> type[Accelerator]:
    for module in (_meeting, tier):
        monkeypatch.setattr(module, "open_runtime", lambda _device: Accelerator())
    monkeypatch.setattr(Accelerator, "offers", ())
    return Accelerator


def _worker_of(cls: type[Any], extra: dict[str, Any]) -> Any:
    config = offloading_config({**CPU, **extra})
    tensor = torch.zeros((8, PAGE_NBYTES), dtype=torch.int8)
    return cls(config).get_worker(
        CanonicalKVCaches([CanonicalKVCacheTensor(tensor, PAGE_NBYTES)], [[CanonicalKVCacheRef(0, PAGE_NBYTES)]])
    )


@pytest.mark.parametrize(
    ("cls", "offers", "kind"),
    [
        (CPUOffloadingSpec, (HostKind.PINNED, HostKind.REGISTERED), HostKind.PINNED),
        (CPUOffloadingSpec, (HostKind.REGISTERED,), HostKind.REGISTERED),
        (CPUOffloadingSpec, (), HostKind.PAGEABLE),
        (TieringOffloadingSpec, (HostKind.PINNED, HostKind.REGISTERED), HostKind.REGISTERED),
        (TieringOffloadingSpec, (HostKind.PINNED,), HostKind.PAGEABLE),
    ],
)
def test_a_private_pool_is_pinned_where_that_is_offered_and_a_shared_one_cannot_be(
    accelerator, cls, offers, kind, logged
):
    """Else ordinary memory, page-locked if that works; what could not be had is one warning, and nothing fails."""
    accelerator.offers = offers
    worker = _worker_of(cls, {})
    try:
        assert worker._tier.stats().slots is kind
        refused = cls is CPUOffloadingSpec and HostKind.PINNED not in offers
        assert sum("No pinned host memory" in line for line in logged) == refused
    finally:
        worker.shutdown()


def test_host_memory_needs_no_pinning(logged):
    """Where the KV cache lies in host memory itself the pool is ordinary, and nobody is warned."""
    worker = _worker_of(CPUOffloadingSpec, {})
    try:
        assert worker._tier.stats().slots is HostKind.PAGEABLE
        assert not logged
    finally:
        worker.shutdown()


def test_a_pinned_pool_that_does_not_fit_is_refused_with_the_numbers(accelerator, monkeypatch):
    """The machine's and the cgroup's limits count for it, too, before any of it is allocated."""
    accelerator.offers = (HostKind.PINNED,)

    def little(option: str, wanted_nbytes: int, unit_nbytes: int) -> None:
        raise ConfigError(f"{option} is {wanted_nbytes}, but must be less")

    monkeypatch.setattr(_meeting, "check_memory", little)
    with pytest.raises(ConfigError, match=f"cpu_bytes_to_use is {CPU['cpu_bytes_to_use']}"):
        _worker_of(CPUOffloadingSpec, {})


# -- K and V apart ----------------------------------------------------------------------------------------------------


class SplitRig(Rig):
    """The rig on an NPU platform: of a token's 16 bytes 5 lie in K, the others in V; tuples and lists."""

    CUT = 5

    def _start_worker(self, n_blocks: int) -> None:
        ascend.load_plugins(ascend.OURS)
        # More rows than blocks, and gaps behind each row of K: as allocators leave them.
        self.k = torch.zeros((n_blocks + 3, 2, BLOCK, 1, self.CUT), dtype=torch.int8)[:, 0]
        self.v = torch.zeros((n_blocks, BLOCK, 1, TOKEN_NBYTES - self.CUT), dtype=torch.int8)
        with (
            set_current_vllm_config(self.config),
            mock.patch.object(tier, "open_runtime", side_effect=lambda _device: ManualRuntime()),
            mock.patch.object(worker, "identity_digest", return_value=bytes(32)),
        ):
            self.worker = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, self.cache_config)
            kinds = itertools.cycle((tuple, list))
            self.worker.register_kv_caches(
                {
                    group.layer_names[0]: kind((self.k, self.v))
                    for group, kind in zip(self.cache_config.kv_cache_groups, kinds, strict=False)
                }
            )
        self.runtime = ManualRuntime.current

    def _at(self, table: list[int], position: int) -> bytes:
        block, row = table[position // BLOCK], position % BLOCK
        assert block, "attention reads no null block"
        return b"".join(part[block, row, 0].numpy().tobytes() for part in (self.k, self.v))

    def _put(self, table: list[int], position: int, data: bytes) -> None:
        block, row = table[position // BLOCK], position % BLOCK
        if block:
            for part, piece in ((self.k, data[: self.CUT]), (self.v, data[self.CUT :])):
                part[block, row, 0] = torch.frombuffer(bytearray(piece), dtype=torch.int8)


def _n_loaded(rig: Rig, req_id: str, prompt: list[int], n_new: int) -> int:
    """Serve a request to its end; tokens of it that were not computed."""
    n_computed, step = [], rig.step

    def counted() -> int:
        n_computed.append(step())
        return n_computed[-1]

    with mock.patch.object(rig, "step", counted):
        rig.add(req_id, prompt, n_new)
        rig.settle()
    return len(prompt) + n_new - 1 - sum(n_computed)


@pytest.mark.parametrize(
    ("blocks_per_chunk", "two_groups", "n_tokens"), [(1, False, 30), (3, False, 30), (3, True, 30)]
)
def test_k_and_v_apart_come_back_through_the_real_scheduler(blocks_per_chunk, two_groups, n_tokens):
    """Registered as tuples and lists through our connector: every byte that attention would read is right.

    https://github.com/vllm-project/vllm-ascend/issues/9078
    """
    rig = SplitRig(
        blocks_per_chunk=blocks_per_chunk, two_groups=two_groups, n_slots=40, tiered=False, device_caches=False
    )
    try:
        assert type(rig.worker) is OffloadingConnector
        prompt, chunk = ([1, 2, 3, 4, 5, 6] * 5)[:n_tokens], BLOCK * blocks_per_chunk
        assert _n_loaded(rig, "r0", prompt, 3) == 0
        for turn in range(1, 3):
            assert _n_loaded(rig, f"r{turn}", prompt, 3) == (len(prompt) - 1) // chunk * chunk
        assert rig.n_verified > 2 * n_tokens
        rig.check()
    finally:
        rig.close()


def test_k_and_v_apart_under_the_state_machine(monkeypatch):
    """The machine of ``test_scheduler_machine``, over two tensors: late and failing copies, preemption."""
    monkeypatch.setattr(machine, "Rig", SplitRig)
    few = settings(machine.SchedulerMachine.TestCase.settings, max_examples=10)
    run_state_machine_as_test(machine.SchedulerMachine, settings=few)


def test_a_whole_tensor_goes_the_way_of_vllm():
    """Where every layer has one tensor our connector changes nothing."""
    ascend.load_plugins(ascend.OURS)
    rig = Rig(two_groups=False, tiered=False, device_caches=False)
    try:
        assert type(rig.worker) is OffloadingConnector
        assert [_n_loaded(rig, f"r{turn}", [1, 2, 3, 4, 5, 6] * 3, 2) for turn in range(2)] == [0, 16]
    finally:
        rig.close()


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def _config(n_blocks: int, **layers: Any) -> KVCacheConfig:
    return KVCacheConfig(n_blocks, [], [KVCacheGroupSpec([name], kind) for name, kind in layers.items()])


ATTENTION = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float16)
LATENT = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=24, dtype=torch.float16)
PAGE = 2 * 4 * 8 * 2


def test_parts_of_different_widths_are_pages_of_their_own_memory():
    """A latent part and a rotary one: two tensors of a page each, no copy, offsets as they are.

    https://github.com/vllm-project/vllm-ascend/issues/7971
    """
    storage = torch.zeros(4096, dtype=torch.float16)
    latent = storage[64:][: 6 * 64].view(6, 4, 1, 16)
    rope = torch.zeros(6, 4, 1, 8, dtype=torch.float16)
    caches = split_caches(_config(6, mla=LATENT), {"mla": (latent, rope)})
    assert [tuple(one.tensor.shape) for one in caches.tensors] == [(6, 128), (6, 64)]
    assert [one.tensor.data_ptr() for one in caches.tensors] == [latent.data_ptr(), rope.data_ptr()]
    assert [(ref.tensor_idx, ref.page_size_bytes) for ref in caches.group_data_refs[0]] == [(0, 128), (1, 64)]
    rope[5] = 1
    assert caches.tensors[1].tensor[5].any()
    assert not caches.tensors[1].tensor[:5].any()


def test_several_rows_make_a_block():
    """Kernels with smaller blocks than vLLM's: two rows of K and of V are one page each."""
    k, v = (torch.zeros(12, 2, 1, 8, dtype=torch.float16) for _ in range(2))
    caches = split_caches(_config(6, a=ATTENTION), {"a": [k, v]})
    assert [tuple(one.tensor.shape) for one in caches.tensors] == [(6, PAGE // 2)] * 2
    v[3] = 1
    assert caches.tensors[1].tensor.any(1).tolist() == [False, True, False, False, False, False]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_view_of_the_whole_beside_its_parts_counts_once(at):
    """K, V and the tensor that holds both, in any order: one page with all bytes, not twice or half of them."""
    whole = torch.zeros(6, 2, 4, 1, 8, dtype=torch.float16)
    parts = [whole[:, 0], whole[:, 1]]
    parts.insert(at, whole)
    caches = split_caches(_config(6, a=ATTENTION), {"a": tuple(parts)})
    assert [tuple(one.tensor.shape) for one in caches.tensors] == [(6, PAGE)]
    assert caches.tensors[0].tensor.data_ptr() == whole.data_ptr()


def _one_memory(*strided: tuple[int, tuple[int, ...], tuple[int, ...]]) -> tuple[torch.Tensor, ...]:
    memory = torch.zeros(2000, dtype=torch.float16)
    return tuple(memory[at:].as_strided(shape, stride) for at, shape, stride in strided)


@pytest.mark.parametrize(
    "parts",
    [
        lambda: (_zeros(6, 4, 1, 8), _zeros(6, 4, 1, 8)),
        lambda: (_zeros(9, 4, 1, 8)[2:], _zeros(6, 4, 1, 8)),
        lambda: (_zeros(6, 2, 4, 1, 8)[:, 1], _zeros(6, 3, 4, 1, 8)[:, 1]),
        lambda: _one_memory((7, (6, 4, 1, 8), (64, 8, 8, 1)), (39, (6, 4, 1, 8), (64, 8, 8, 1))),
        lambda: _one_memory((0, (6, 4, 1, 8), (100, 8, 8, 1)), (50, (6, 4, 1, 8), (100, 8, 8, 1))),
        lambda: _one_memory((0, (6, 4, 1, 8), (32, 8, 8, 1)), (200, (6, 4, 1, 8), (32, 8, 8, 1))),
        lambda: (_zeros(12, 2, 1, 8), _zeros(13, 2, 1, 8)),
        lambda: (_zeros(12, 4, 1, 8)[:, :2], _zeros(12, 2, 1, 8)),
        lambda: (_zeros(6, 8, 1, 4).transpose(1, 3), _zeros(6, 4, 1, 8)),
        lambda: (_zeros(6, 4, 1, 8), _zeros(6, 4, 1, 6), _zeros(6, 4, 1, 2)),
    ],
)  # fmt: skip
def test_pages_hold_the_bytes_of_their_blocks_and_no_others(parts):
    """Offsets, gaps, more rows than blocks, interleaved halves, several rows a block, scales: byte for byte."""
    tensors = parts()
    caches = split_caches(_config(6, a=ATTENTION), {"a": tensors})
    assert sum(one.page_size_bytes for one in caches.tensors) == PAGE
    assert [ref.page_size_bytes for ref in caches.group_data_refs[0]] == [one.page_size_bytes for one in caches.tensors]
    n_rows = PAGE // sum(tensor[0].numel() * 2 for tensor in tensors)
    for block in range(6):
        for tensor in tensors:
            tensor.fill_(0)
            tensor[block * n_rows : (block + 1) * n_rows].view(torch.int16).fill_(-1)
        for one in caches.tensors:
            assert one.tensor[block].eq(-1).all()
            assert one.tensor.ne(0).sum() == one.page_size_bytes


def test_groups_that_share_tensors_have_them_once():
    """Hybrid models lay their groups over the same memory: the pages are registered once, and named twice."""
    k, v = (torch.zeros(6, 4, 1, 8, dtype=torch.float16) for _ in range(2))
    caches = split_caches(_config(6, a=ATTENTION, b=ATTENTION), {"a": (k, v), "b": [k, v]})
    assert len(caches.tensors) == 2
    assert [[ref.tensor_idx for ref in refs] for refs in caches.group_data_refs] == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("cache", "why"),
    [
        (lambda: (), "neither a tensor nor a tuple or list of them"),
        (lambda: (_zeros(6, 4, 1, 8), None), "NoneType is neither a tensor nor a tuple or list of them"),
        (lambda: (_zeros(6, 4, 1, 8), _zeros(0, 4, 1, 8)), "is not [n_blocks, ...] with bytes in each block"),
        (lambda: [_zeros(6, 4, 1, 8) for _ in range(3)], "192 bytes in all, which do not make up blocks of 128"),
        (lambda: (_zeros(6, 4, 1, 8), _zeros(6, 4, 1, 7)), "120 bytes in all, which do not make up blocks of 128"),
        (lambda: (_zeros(5, 4, 1, 8), _zeros(6, 4, 1, 8)), "have fewer rows than 6 blocks of 1"),
        (lambda: (_zeros(6, 2, 1, 8), _zeros(6, 2, 1, 8)), "have fewer rows than 6 blocks of 2"),
        (lambda: (_zeros(400).as_strided((6, 4, 1, 8), (16, 8, 8, 1)), _zeros(6, 4, 1, 8)), "they share bytes"),
        (lambda: _one_memory((0, (6, 4, 1, 8), (32, 8, 8, 1)), (32, (6, 4, 1, 8), (32, 8, 8, 1))), "of other blocks"),
        (lambda: _one_memory((0, (6, 4, 1, 8), (64, 8, 8, 1)), (16, (6, 4, 1, 8), (64, 8, 8, 1))), "rows of 96 bytes"),
    ],
)  # fmt: skip
def test_a_layout_that_is_not_proven_is_refused(cache, why):
    """The sentence names the layer, with the shapes and strides of what does not fit."""
    with pytest.raises(TierError, match=r"layer layers\.0") as caught:
        split_caches(_config(6, **{"layers.0": ATTENTION}), {"layers.0": cache()})
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("nested", [False, True])
def test_the_layout_that_is_persisted_knows_every_part(nested):
    """Another order of strides in V alone, and chunks on disk are another layout's: nobody reads them as this one's."""

    def shapes(v: torch.Tensor) -> list[tuple[object, ...]]:
        cache = (_zeros(6, 4, 2, 8), v)
        layer = SimpleNamespace(attn_backend=None, kv_cache=[cache] if nested else cache)
        forward = SimpleNamespace(static_forward_context={"layer0": layer})
        return kv_shapes(SimpleNamespace(compilation_config=forward, cache_config=None), offloading_config(CPU))

    plain, turned = shapes(_zeros(6, 4, 2, 8)), shapes(_zeros(6, 2, 4, 8).transpose(1, 2))
    assert len(plain) == 2
    assert plain != turned
