"""The devices on which each test of the contract runs; ``-m npu`` and ``-m cuda`` choose those that need something."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.device.contract.rigs import CpuRig, Rig, SimRig, TorchRig, mapped
from tests.device.npu_sim import standin
from tests.device.npu_sim.build import CannotBuildError, RealCannError

_KINDS = pytest.StashKey[set[str]]()

RigFactory = Callable[..., Rig]
"""Makes a rig; ``seed`` is for those that have a schedule."""

SCHEDULES = ("random", "copies_first", "compute_first", "loads_last", "stores_last")
PACES = {"prompt": {"delay_us": 0}, "late": {"delay_us": 150, "slow": 1}, "slow": {"delay_us": 100, "slow": 30}}


@functools.cache
def _npu() -> tuple[Any, standin.StandIn | None]:
    """torch, and the stand-in unless the machine has the real thing; or why there is neither."""
    fake = None
    try:
        fake = standin.load()
    except RealCannError:
        pass
    except CannotBuildError as error:
        return str(error), None
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
    import torch

    from tierkv.device.cuda import CudaRuntime

    return lambda seed=0: TorchRig(torch, CudaRuntime("cuda"))


def why_not(kind: str) -> str | None:
    """Why this machine can not run the contract on an ``npu`` or on ``cuda``; None if it can."""
    if kind == "npu":
        return None if find_spec("torch_npu") else "torch-npu is not installed"
    if find_spec("torch") is None:
        return "torch is not installed"
    return None if Path("/dev/nvidiactl").exists() else "no CUDA device"


def _rigs() -> list[Any]:
    """What cannot be here is left out rather than skipped two hundred times: test_here.py says it once."""
    rigs: list[Any] = [*(f"sim-{schedule}" for schedule in SCHEDULES), "cpu"]
    if why_not("npu") is None:
        rigs += [pytest.param(f"npu-{pace}", marks=pytest.mark.npu) for pace in PACES]
    if why_not("cuda") is None:
        rigs.append(pytest.param("cuda", marks=pytest.mark.cuda))
    return rigs


@pytest.fixture(scope="session", params=_rigs())
def make_rig(request: pytest.FixtureRequest) -> RigFactory:
    """Makes a rig of one kind."""
    kind, _, how = request.param.partition("-")
    request.config.stash.setdefault(_KINDS, set()).add(kind)
    if kind == "sim":
        return lambda seed=0: SimRig(seed, how)
    if kind == "cpu":
        return lambda seed=0: CpuRig()
    return _npu_rig(how) if kind == "npu" else _cuda_rig()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """On what the contract ran, where that is more than this machine's memory: what a report from hardware needs."""
    for kind in sorted(config.stash.get(_KINDS, set()) & {"npu", "cuda"}):
        terminalreporter.section("the contract ran on", sep="-")
        for what, value in _described(kind).items():
            terminalreporter.write_line(f"{what}: {value}")


def _described(kind: str) -> dict[str, Any]:
    import torch

    from tierkv.device.runtime import open_runtime

    runtime = open_runtime(torch.device(kind))
    memory = mapped(1 << 20)
    pin = runtime.pin(memory)
    if pin is not None:
        pin.release()
    versions = {name: version(name) for name in ("torch", "torch-npu") if find_spec(name.replace("-", "_"))}
    simulated = kind == "npu" and _npu()[1] is not None
    said = {
        "device": f"a stand-in for CANN {os.environ.get('NPU_SIM_CANN') or 'of no version'}"
        if simulated
        else _name(kind),
        "copies by": runtime.path,
        "mapped host memory": "can be page-locked" if pin is not None else "cannot be page-locked: copies block",
    }
    runtime.close()
    return versions | said


def _name(kind: str) -> str:
    import torch

    return str(getattr(torch, kind).get_device_name(0))
