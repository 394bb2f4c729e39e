"""The rigs on which each test of the contract runs: ``--rig NAME`` chooses some, ``-m npu`` and ``-m cuda`` hardware."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.device.contract.rigs import CpuRig, Rig, SimRig, TorchRig
from tests.device.npu_sim import standin

RigFactory = Callable[..., Rig]
"""Makes a rig; ``seed`` is for those that have a schedule."""

SCHEDULES = ("random", "copies_first", "compute_first", "loads_last", "stores_last", "eager")
PACES = {"prompt": {"delay_us": 0}, "late": {"delay_us": 150, "slow": 1}, "slow": {"delay_us": 100, "slow": 30}}


@functools.cache
def _npu() -> tuple[Any, standin.StandIn | None]:
    """torch, and the stand-in unless the machine has the real thing. Skips where neither can be."""
    try:
        fake = standin.load()
    except standin.CannotBuildError as error:
        if "real" not in str(error):
            return str(error), None
        fake = None
    return standin.import_torch_npu(), fake


def _npu_rig(pace: str) -> RigFactory:
    torch, fake = _npu()
    if isinstance(torch, str):
        pytest.skip(torch)
    from tierkv.device.npu import NpuRuntime

    def make(seed: int = 0) -> Rig:
        if fake is not None:
            fake.set(**PACES[pace], seed=seed)
        return TorchRig(torch, NpuRuntime("npu"), fake)

    return make


def _cuda_rig() -> RigFactory:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from tierkv.device.cuda import CudaRuntime

    return lambda seed=0: TorchRig(torch, CudaRuntime("cuda"))


@pytest.fixture(
    scope="session",
    params=[
        *(pytest.param(f"sim-{schedule}") for schedule in SCHEDULES),
        pytest.param("cpu"),
        *(pytest.param(f"npu-{pace}", marks=pytest.mark.npu) for pace in PACES),
        pytest.param("cuda", marks=pytest.mark.cuda),
    ],
)
def make_rig(request: pytest.FixtureRequest) -> RigFactory:
    """Makes a rig of one kind."""
    kind, _, how = request.param.partition("-")
    if kind == "sim":
        return lambda seed=0: SimRig(seed, how)
    if kind == "cpu":
        return lambda seed=0: CpuRig()
    return _npu_rig(how) if kind == "npu" else _cuda_rig()
