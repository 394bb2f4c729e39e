"""A device that is lost without saying so: everybody is told, nobody hangs, nothing counts as arrived."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.device.contract.conftest import why_not
from tests.device.contract.rigs import CpuRig
from tests.device.contract.server import Server, Shape
from tierkv.device.cpu import CpuRuntime
from tierkv.device.layout import DeviceLayout, PageRef
from tierkv.device.runtime import DeviceLostError, HostKind
from tierkv.device.slots import HostSlots
from tierkv.device.tier import DeviceTier

SHAPE = Shape(((512, 512),), ((0,),), 4)


@pytest.mark.npu
@pytest.mark.timeout(600)  # a process that imports torch_npu, on a busy machine
@pytest.mark.parametrize(("way", "refusal_us"), [("store", 0), ("store", 300_000), ("load", 300_000), ("stranger", 0)])
def test_a_failure_in_torch_npus_queue_is_the_end_for_all(way, refusal_us):
    """torch_npu raises once and then drops all work silently; each end after that is an error, and close returns.

    Where the refusal takes its time, the job's event is in the queue when that fails, and counts as happened for torch.
    """
    if why_not("npu") is not None:
        pytest.skip("torch-npu is not installed")
    command = [sys.executable, "-m", "tests.device.contract.lost", way, str(refusal_us)]
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["ends"] == ["DeviceLostError"]
    assert told["lost"] == "DeviceLostError"
    assert told["next"] == ["DeviceLostError"]
    assert told["close"] == "nothing"


class _Lost:
    """A host device that is lost from a copy on."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.lost = False

    def __getattr__(self, name):
        return getattr(self._runtime, name)

    def copy_batch(self, batch):
        if self.lost:
            raise DeviceLostError("device", "it is gone")
        return self._runtime.copy_batch(batch)

    copy_plain = copy_batch


@pytest.mark.parametrize("direction", ["store", "load"])
def test_the_engine_remembers_a_lost_device(direction, caplog):
    """A store, too, is told as what it is, so that its caller can stop; the log says it once, as critical."""
    rig = CpuRig()
    rig.runtime = _Lost(rig.runtime)
    server = Server(rig, SHAPE, HostKind.PINNED)
    server.store(0, [0, 1, 2, 3], 0, [0])
    server.engine.wait()
    server.poll()
    assert server.engine.device_lost is None
    rig.runtime.lost = True
    for block in (4, 5):
        if direction == "store":
            server.store(0, [block], 0, [1])
        else:
            server.load(0, [block], 0, [0])
        server.engine.wait()
        server.poll()
    assert [type(done.error) for done in server.failed] == [DeviceLostError] * 2
    assert server.engine.device_lost is server.failed[0].error
    assert [record.levelname for record in caplog.records].count("CRITICAL") == 1
    server.abandon()


async def test_an_asyncio_caller_is_told_by_an_exception():
    """A store or a load raises, and so does every later call that begins with a check: False would read as a miss."""
    runtime: Any = _Lost(CpuRuntime())
    tier = DeviceTier(blocks_per_chunk=1, runtime=runtime)
    layout = DeviceLayout.direct([4096], [[PageRef(0, 4096)]], blocks_per_chunk=1)
    tier.register_pages([np.zeros((4, 4096), np.int8)], layout)
    tier.bind(HostSlots.allocate(runtime, 2, 4096))
    assert await tier.store([1], [0])
    tier.check([])
    runtime.lost = True
    with pytest.raises(DeviceLostError, match="it is gone"):
        await tier.store([1], [0])
    with pytest.raises(DeviceLostError, match="it is gone"):
        await tier.load([0], [1])
    with pytest.raises(DeviceLostError, match="it is gone"):
        tier.check([])
    tier.close()
