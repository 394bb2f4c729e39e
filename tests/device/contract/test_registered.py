"""What a server registers on a real torch accelerator, by DeviceTier itself: page views, mapped slots, awaiting.

The rest of the contract makes its pages by hand; here they come from torch's tensors, as vLLM's do.
"""

from __future__ import annotations

import asyncio
import mmap
import random
from typing import Any

import pytest

from tests.device.contract.conftest import why_not
from tests.device.npu_sim import standin
from tests.device.npu_sim.build import CannotBuildError, RealCannError
from tierkv.device import DeviceTier, Direction, HostSlots

KINDS = [pytest.param(kind, marks=getattr(pytest.mark, kind)) for kind in ("npu", "cuda") if why_not(kind) is None]
if not KINDS:
    pytest.skip("neither an NPU (or the stand-in) nor a GPU: test_here.py says why", allow_module_level=True)

N, PER_CHUNK = 16, 4


@pytest.fixture(scope="module", params=KINDS)
def accelerator(request: pytest.FixtureRequest) -> Any:
    """Torch and the name of its device."""
    if request.param == "cuda":
        import torch

        return torch, "cuda"
    try:
        standin.load().set(delay_us=100, slow=1, seed=11)
    except RealCannError:
        pass
    except CannotBuildError as error:
        pytest.skip(str(error))
    return standin.import_torch_npu(), "npu"


class Caches:
    """Three layers of K and V of different widths, and one layer whose two parts are views of one buffer."""

    def __init__(self, torch: Any, device: str) -> None:
        self.torch = torch
        self.raw = [torch.empty(N * n, dtype=torch.int8, device=device) for n in (512, 256) * 3]
        joint = torch.empty(N * 4 * 72, dtype=torch.int8, device=device)
        self.layers: dict[str, Any] = {
            f"l{i}": tuple(raw.view(torch.float16).view(N, 4, -1) for raw in self.raw[2 * i : 2 * i + 2])
            for i in range(3)
        }
        rows = joint.view(N, 4, 72)
        self.layers["mla"] = (rows[..., :64], rows[..., 64:])
        self.raw.append(joint)

    def host(self, raw: Any) -> Any:
        return self.torch.empty(raw.shape, dtype=self.torch.int8, pin_memory=True)

    def fill(self, seed: int) -> list[Any]:
        """Random bytes everywhere, queued on the current stream; returns them by tensor and block."""
        generator, out = self.torch.Generator().manual_seed(seed), []
        for raw in self.raw:
            host = self.host(raw)
            host.copy_(self.torch.randint(-128, 128, raw.shape, dtype=self.torch.int8, generator=generator))
            raw.copy_(host, non_blocking=True)
            out.append(host.view(N, -1))
        return out

    def read(self) -> list[Any]:
        out = []
        for raw in self.raw:
            host = self.host(raw)
            host.copy_(raw, non_blocking=True)
            out.append(host.view(N, -1))
        self.torch.accelerator.synchronize()
        return out


@pytest.fixture
def bound(accelerator):
    """(caches, a tier over them and mapped slots), whichever way those are reached here."""
    caches = Caches(*accelerator)
    tier = DeviceTier(caches.layers, blocks_per_chunk=PER_CHUNK)
    stride = -(-tier.chunk_nbytes // 4096) * 4096
    tier.bind(HostSlots.over(memoryview(mmap.mmap(-1, 6 * stride)), stride))
    yield caches, tier
    tier.close()


def test_every_byte_of_what_was_registered(bound):
    """Blocks in any order to slots and back to others, right behind the work that fills them; others keep theirs."""
    caches, tier = bound
    for seed in range(4):
        rng = random.Random(seed)
        blocks, targets = rng.sample(range(N), 12), rng.sample(range(N), 12)
        lead = rng.randrange(PER_CHUNK)
        blocks, targets = blocks[: 12 - lead], targets[: 12 - lead]
        want = caches.fill(seed)
        tier.submit(Direction.STORE, blocks, [4, 0, 2], first_blocks=[lead], whole=True)
        tier.wait()
        before = caches.fill(100 + seed)
        tier.submit(Direction.LOAD, targets, [4, 0, 2], first_blocks=[lead])
        tier.wait()
        assert [done.error for done in tier.poll()] == [None, None]
        for stored, old, got in zip(want, before, caches.read(), strict=True):
            expected = old.clone()
            expected[targets] = stored[blocks]
            assert caches.torch.equal(got, expected)
    stats = tier.stats()
    assert stats.n_retried == sum(stats.n_failed.values()) == 0
    assert stats.path and (stats.slots.value == "registered" or "staged" in stats.path)


async def test_awaiting(bound):
    """The same for asyncio: many at once, both directions."""
    caches, tier = bound
    want = caches.fill(7)
    chunks = [list(range(4 * i, 4 * i + 4)) for i in range(4)]
    assert all(await asyncio.gather(*(tier.store(blocks, [i]) for i, blocks in enumerate(chunks))))
    caches.fill(8)
    assert all(await asyncio.gather(*(tier.load([i], blocks) for i, blocks in enumerate(reversed(chunks)))))
    order = [block for blocks in reversed(chunks) for block in blocks]
    for stored, got in zip(want, caches.read(), strict=True):
        assert caches.torch.equal(got[order], stored[:N])
