"""What the torch runtimes do without an accelerator to be had: views, batches in parts, what a probe decides."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tierkv.device import _torch, open_runtime  # noqa: E402 - torch comes first, or the page is skipped
from tierkv.device._torch import TorchRuntime, Views  # noqa: E402
from tierkv.device.runtime import CopyBatch, Direction, HostKind, Memory, Strip  # noqa: E402
from tierkv.errors import TierError  # noqa: E402

N_PAIRS, NBYTES = 50, 24


def memory(tensor, kind=None) -> Memory:
    return Memory(tensor.data_ptr(), tensor.numel(), tensor, kind)


class Twin(TorchRuntime):
    """The torch runtime with host memory in the device's place, where copies are synchronous."""

    def __init__(self, library=None) -> None:
        self.device = torch.device("cpu")
        self._views = Views()
        self.library = library
        self._way, self._path = self._choose()

    def batched(self):
        return self.library

    def alloc_host(self, nbytes, /):
        return memory(torch.zeros(nbytes, dtype=torch.int8), HostKind.PINNED)

    def new_stream(self):
        return Inert()

    def new_event(self):
        return Inert()

    def current_stream(self):
        return Inert()


class Inert:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def record(self, stream):
        pass

    def synchronize(self):
        pass


@pytest.fixture
def batch():
    """Pairs at odd places: (batch of a load, device, host)."""
    device, host = torch.zeros(4096, dtype=torch.int8), torch.arange(4096).remainder(120).to(torch.int8)
    places = torch.arange(N_PAIRS) * 37
    sizes = torch.full((N_PAIRS,), NBYTES)
    own, other = memory(device), Memory(host.data_ptr(), 4096, host.numpy().data.cast("B"), HostKind.PAGEABLE)
    arrays = ((places + own.address).numpy(), (places * 2 + other.address).numpy(), sizes.numpy())
    strips = (Strip(0, 20, NBYTES, own, other), Strip(20, N_PAIRS, NBYTES, own, other))
    return CopyBatch(Direction.LOAD, *arrays, strips), device, host


def check(device, host) -> None:
    want = torch.zeros(4096, dtype=torch.int8)
    for i in range(N_PAIRS):
        want[37 * i : 37 * i + NBYTES] = host[74 * i : 74 * i + NBYTES]
    assert torch.equal(device, want)


@pytest.mark.parametrize("way", ["foreach", "loop", "copy_plain"])
def test_each_way_copies_all_pairs(batch, way):
    """Whatever the way, the same bytes arrive."""
    made, device, host = batch
    getattr(Twin(), way)(made)
    check(device, host)


def test_a_large_batch_goes_in_parts(batch, monkeypatch):
    """``_foreach_copy_`` keeps its arrays on the stack: no call gets more pairs than it can take."""
    made, device, host = batch
    monkeypatch.setattr(_torch, "MAX_PAIRS", 16)
    runtime, foreach, sizes = Twin(), torch._foreach_copy_, []

    def counted(targets, sources, **kwargs):
        sizes.append(len(targets))
        foreach(targets, sources, **kwargs)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    runtime.copy_batch(made)
    assert sizes == [16, 16, 16, 2]
    check(device, host)


def test_views_are_made_once_and_their_number_is_bounded(batch, monkeypatch):
    """A second batch of the same blocks makes none; a full cache is emptied, never grown."""
    made, _, _ = batch
    views = Views()
    first, again = views.of(made), views.of(made)
    assert all(a is b for one, other in zip(first, again, strict=True) for a, b in zip(one, other, strict=True))
    monkeypatch.setattr(_torch, "_MAX_VIEWS", 64)
    views.clear()
    views.of(made)
    assert len(views._views) <= 64
    views.clear()
    assert not views._views and not views._flat


class TestProbe:
    def test_the_library_comes_first(self):
        """A batched operator that works is taken and named."""
        runtime, calls = Twin(), []

        def operator(made):
            calls.append(made)
            runtime.foreach(made)

        assert Twin(("an operator", operator)).path == "an operator"
        assert len(calls) == 2

    @pytest.mark.parametrize("wrong", ["raises", "copies nothing"])
    def test_an_operator_that_does_not_work_is_passed_over(self, wrong, caplog):
        """One that raises or brings other bytes back is not used, with one warning that says why."""

        def operator(made):
            if wrong == "raises":
                raise RuntimeError("not on this chip")

        assert Twin(("an operator", operator)).path == "torch._foreach_copy_"
        assert len(caplog.records) == 1 and "an operator" in caplog.text

    def test_if_nothing_works_the_runtime_is_refused(self, monkeypatch):
        """All ways with their reasons in one sentence."""
        monkeypatch.setattr(Twin, "foreach", lambda *_: None)
        monkeypatch.setattr(Twin, "loop", lambda *_: 1 / 0)
        with pytest.raises(TierError, match=r"foreach.*other bytes.*one by one raised ZeroDivision"):
            Twin()


@pytest.mark.parametrize("device", ["cuda", "npu:0"])
def test_a_device_that_is_not_there(device):
    """One sentence that names the device; nothing else is imported or made."""
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(TierError, match=device):
        open_runtime(device)


@pytest.mark.parametrize(("off", "asked"), [(0, [1 << 20]), (64, [1 << 20, (1 << 20) + 4096])])
def test_pinned_memory_is_asked_for_exactly(monkeypatch, off, asked):
    """Torch rounds pinned memory up to a power of two: a page more is asked for only where it is not aligned.

    https://github.com/vllm-project/vllm/issues/50094
    """
    zeros, seen = torch.zeros, []

    def pinned(nbytes, *, dtype, pin_memory):
        assert pin_memory
        seen.append(nbytes)
        whole = zeros(nbytes + 8192, dtype=dtype)
        return whole[-whole.data_ptr() % 4096 + off :][:nbytes]

    monkeypatch.setattr(torch, "zeros", pinned)
    got = TorchRuntime.alloc_host(object.__new__(TorchRuntime), 1 << 20)
    assert seen == asked
    assert (got.address % 4096, got.nbytes, got.kind) == (0, 1 << 20, HostKind.PINNED)
    assert got.owner.numel() == 1 << 20
