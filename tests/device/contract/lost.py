"""A process whose NPU is lost: prints what each part of the device tier says then. Run by test_lost.py."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from tests.device.contract.conftest import _npu
from tests.device.contract.rigs import TorchRig
from tests.device.contract.server import Server, Shape
from tierkv.device.runtime import HostKind

SHAPE = Shape(((512, 512), (192, 160)), ((0, 1),), 4)


def main(way: str, refusal_us: int) -> dict[str, Any]:
    """A ``store``, a ``load`` or a ``stranger``'s copy is refused when it is submitted, within torch_npu's queue."""
    torch, standin = _npu()
    assert standin is not None, torch
    from tierkv.device import _npu_queue
    from tierkv.device.npu import NpuRuntime

    _npu_queue._CANARY_S, _npu_queue._DOUBT_S = 1.0, 1.0  # it is lost: more patience finds no more
    server = Server(TorchRig(torch, NpuRuntime("npu"), standin), SHAPE, HostKind.PINNED)
    server.store(0, [0, 1, 2, 3], 0, [0])
    server.engine.wait()
    server.poll()
    told: dict[str, Any] = {}
    torch.accelerator.synchronize()
    standin.set(fail_submit=1, refusal_us=refusal_us)
    if way == "stranger":
        target = torch.empty(64, dtype=torch.int8, device="npu")
        source = torch.empty(64, dtype=torch.int8, pin_memory=True)  # not freed: that may be what raises, and abort
        target.copy_(source, non_blocking=True)
    if way == "load":
        server.load(0, [8, 9], 0, [0])
    else:
        server.store(0, [4, 5], 0, [1])
    server.engine.wait()
    told["ends"] = [_name(done.error) for done in server.engine.poll()]
    told["lost"] = _name(server.engine.device_lost)
    server.store(0, [6], 0, [2])
    while not (ends := server.engine.poll()):
        time.sleep(0.01)
    told["next"] = [_name(done.error) for done in ends]
    told["close"] = _raised(server.engine.close)
    return told


def _name(error: BaseException | None) -> str:
    return type(error).__name__


def _raised(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return _name(error)
    return "nothing"


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))), flush=True)
    os._exit(0)  # torch_npu's own way out waits for what never comes
