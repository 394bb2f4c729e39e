"""The stand-in itself, by its C interface: late, torn, out of step, and strict about memory."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import re

import pytest

from tests.device.npu_sim.build import CannotBuildError
from tests.device.npu_sim.standin import StandIn, load

if importlib.util.find_spec("torch_npu") is None:
    pytest.skip("torch-npu is not installed: no headers to build the stand-in with", allow_module_level=True)

pytestmark = pytest.mark.npu

H2D, D2H = 1, 2
SYS_DMA, PARAM_INVALID, NOT_SUPPORTED, INTERNAL = 507013, 107000, 207000, 507000
N = 64 << 10

EXPECTED_REFUSALS = re.compile(
    r"aclop\w+|acl\w*(TensorDesc|TensorFormat|TensorPlaceMent|TensorShape|DataBuffer|Compileopt)\w*"  # operators
    r"|aclrt(Binary|GetFunction)\w+|rt[A-Z]\w+"  # kernels
    r"|aclrt(Free|Malloc)Physical|aclrt(Map|Unmap)Mem|aclrt\w+(ReserveMem|ReleaseMem|MemAddress|ShareableHandle)"
    r"|aclrt(Reserve|Release)MemAddress"  # virtual memory, not used unless it is switched on
)


class Acl:
    """AscendCL by its own names, each error an exception."""

    def __init__(self, standin: StandIn) -> None:
        self.standin = standin

    def __call__(self, name: str, *arguments: object) -> None:
        error = getattr(self.standin.acl, name)(*arguments)
        if error:
            raise OSError(error, name)

    def make(self, name: str, *arguments: object) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self(name, ctypes.byref(made), *arguments)
        return made

    def device(self, nbytes: int = N) -> ctypes.c_void_p:
        return self.make("aclrtMalloc", ctypes.c_size_t(nbytes), 0)

    def host(self, nbytes: int = N, fill: int | None = None) -> ctypes.c_void_p:
        host = self.make("aclrtMallocHost", ctypes.c_size_t(nbytes))
        if fill is not None:
            ctypes.memset(host, fill, nbytes)
        return host

    def copy(self, target: object, source: object, kind: int, stream: object, nbytes: int = N) -> None:
        size = ctypes.c_size_t(nbytes)
        self("aclrtMemcpyAsync", target, size, source, size, kind, stream)


@pytest.fixture(scope="module")
def standin():
    try:
        return load()
    except CannotBuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def acl(standin):
    yield Acl(standin)
    standin.set(fail_submit=0, fail_run=0, fail_query=0, faults_stay=0, register_limit=-1, delay_us=200, slow=1)


@pytest.fixture
def streams(acl):
    made = [acl.make("aclrtCreateStream") for _ in range(2)]
    yield made
    for stream in made:
        with contextlib.suppress(OSError):
            acl("aclrtSynchronizeStream", stream)
        acl("aclrtDestroyStream", stream)


def content(address: ctypes.c_void_p, nbytes: int = N) -> set[int]:
    return set(ctypes.string_at(address, nbytes))


def completed(acl: Acl, event: ctypes.c_void_p) -> bool:
    status = ctypes.c_int()
    acl("aclrtQueryEventStatus", event, ctypes.byref(status))
    return status.value == 1


def test_what_a_wheel_needs_and_we_refuse_is_kernels_and_virtual_memory(standin):
    """A release that links to anything else stops here: then somebody decides whether it must be simulated."""
    assert [name for name in sorted(standin.files.refused) if not EXPECTED_REFUSALS.fullmatch(name)] == []


def test_new_and_freed_memory_is_poisoned(acl):
    """Nothing is zero by luck."""
    device, host = acl.device(), acl.host()
    assert content(device) == {0xDB}
    assert content(host) == {0xEB}
    assert acl.standin.place(device.value, N) == "device"
    assert acl.standin.place(host.value, N) == "locked"
    assert acl.standin.place(host.value, N + 4097) == "pageable"
    acl("aclrtFree", device)
    acl("aclrtFreeHost", host)
    assert acl.standin.place(device.value) == "pageable"
    with pytest.raises(OSError, match=str(PARAM_INVALID)):
        acl("aclrtFree", device)


def test_a_copy_runs_when_its_stream_does(acl, streams):
    """Submitting copies nothing; a held stream holds up what waits for it, and nothing else."""
    first, second = streams
    device, source, target = acl.device(), acl.host(fill=1), acl.host(fill=2)
    event = acl.make("aclrtCreateEventWithFlag", 0)
    with acl.standin.held(first.value):
        acl.copy(device, source, H2D, first)
        acl("aclrtRecordEvent", event, first)
        acl("aclrtStreamWaitEvent", second, event)
        acl.copy(target, device, D2H, second)
        acl.standin.settle()
        assert not completed(acl, event)
        assert content(target) == {2}
        acl.copy(source, device, D2H, other := acl.make("aclrtCreateStream"))
        acl("aclrtSynchronizeStream", other)
        assert content(source) == {0xDB}
        ctypes.memset(source, 3, N)
    acl("aclrtSynchronizeStream", second)
    assert content(target) == {3}
    assert completed(acl, event)
    acl("aclrtDestroyStream", other)


def test_streams_run_out_of_step(acl, streams):
    """Without an event one stream's copy is sometimes seen by the other, sometimes not, and sometimes in part."""
    acl.standin.set(delay_us=100)
    device, ones, twos, target = acl.device(), acl.host(fill=1), acl.host(fill=2), acl.host()
    seen = set()
    for _ in range(200):
        acl.copy(device, ones, H2D, streams[0])
        acl("aclrtSynchronizeStream", streams[0])
        acl.copy(device, twos, H2D, streams[0])
        acl.copy(target, device, D2H, streams[1])
        for stream in streams:
            acl("aclrtSynchronizeStream", stream)
        seen.add(frozenset(content(target)))
        if len(seen) == 3:
            break
    assert seen == {frozenset({1}), frozenset({2}), frozenset({1, 2})}


def test_an_event_may_be_destroyed_and_recorded_again_under_a_waiting_stream(acl, streams):
    """A wait means the record that was the newest when it was queued, and keeps what it needs."""
    device, ones, target = acl.device(), acl.host(fill=1), acl.host(fill=2)
    event = acl.make("aclrtCreateEventWithFlag", 0)
    assert completed(acl, event)
    acl("aclrtStreamWaitEvent", streams[1], event)
    acl.copy(target, device, D2H, streams[1])
    acl("aclrtSynchronizeStream", streams[1])  # a wait for an event that was never recorded holds nobody
    with acl.standin.held(streams[0].value):
        acl("aclrtRecordEvent", event, streams[0])
        acl.copy(device, ones, H2D, streams[0])
        acl("aclrtRecordEvent", event, streams[0])
        acl("aclrtStreamWaitEvent", streams[1], event)
        acl.copy(target, device, D2H, streams[1])
        acl("aclrtDestroyEvent", event)
    acl("aclrtSynchronizeStream", streams[1])
    assert content(target) == {1}


def test_a_copy_that_is_not_between_host_and_this_device_is_refused(acl, streams):
    """Addresses that the kind does not mean, runs past an end, and memory freed before the submission."""
    device, host = acl.device(), acl.host()
    for target, source, kind, nbytes in ((host, device, H2D, N), (device, host, D2H, N), (device, host, H2D, N + 4097)):
        with pytest.raises(OSError, match=str(PARAM_INVALID)):
            acl.copy(target, source, kind, streams[0], nbytes)
    acl("aclrtFree", device)
    with pytest.raises(OSError, match=str(PARAM_INVALID)):
        acl.copy(device, host, H2D, streams[0])


@pytest.mark.parametrize("stay", [0, 1])
@pytest.mark.parametrize("which", ["device", "host"])
def test_memory_freed_under_a_copy_is_a_fault(acl, streams, which, stay):
    """The event behind the copy tells of it; then the stream goes on, or copies nothing until it was asked itself."""
    acl.standin.set(faults_stay=stay)
    device, host, other = acl.device(), acl.host(fill=1), acl.device()
    events = [acl.make("aclrtCreateEventWithFlag", 0) for _ in range(2)]
    with acl.standin.held(streams[0].value):
        acl.copy(device, host, H2D, streams[0])
        acl("aclrtRecordEvent", events[0], streams[0])
        acl.copy(other, acl.host(fill=1), H2D, streams[0])
        acl("aclrtRecordEvent", events[1], streams[0])
        acl(*(("aclrtFree", device) if which == "device" else ("aclrtFreeHost", host)))
    for tells, event in zip((True, bool(stay)), events, strict=True):
        for ask in (lambda event=event: acl("aclrtSynchronizeEvent", event), lambda event=event: completed(acl, event)):
            with pytest.raises(OSError, match=str(SYS_DMA)) if tells else contextlib.nullcontext():
                ask()
    with pytest.raises(OSError, match=str(SYS_DMA)) if stay else contextlib.nullcontext():
        acl("aclrtSynchronizeStream", streams[0])
    acl("aclrtSynchronizeStream", streams[0])
    assert content(other) == {0xDB if stay else 1}


def test_faults_on_order(acl, streams):
    """The nth submission is refused, the nth copy fails when it runs, the nth query raises; each once."""
    device, host = acl.device(), acl.host(fill=1)
    event = acl.make("aclrtCreateEventWithFlag", 0)
    acl.standin.set(fail_submit=2)
    acl.copy(device, host, H2D, streams[0])
    with pytest.raises(OSError, match=str(INTERNAL)):
        acl.copy(device, host, H2D, streams[0])
    acl.copy(device, host, H2D, streams[0])
    acl("aclrtSynchronizeStream", streams[0])
    acl.standin.set(fail_run=1)
    acl.copy(device, host, H2D, streams[0])
    with pytest.raises(OSError, match=str(SYS_DMA)):
        acl("aclrtSynchronizeStream", streams[0])
    acl.standin.set(fail_query=1)
    with pytest.raises(OSError, match=str(INTERNAL)):
        completed(acl, event)
    assert completed(acl, event)


def test_registering_host_memory(acl, streams):
    """Whole pages, once each; so many pieces as the knob allows; what is registered is copied beside the host."""
    memory = ctypes.create_string_buffer(4 * N + 4096)
    start = -(-ctypes.addressof(memory) // 4096) * 4096
    pieces = [ctypes.c_void_p(start + i * N) for i in range(3)]
    size = ctypes.c_uint64(N)
    acl.standin.set(register_limit=2)
    for piece in pieces[:2]:
        acl("aclrtHostRegisterV2", piece, size, 0)
    with pytest.raises(OSError, match=str(NOT_SUPPORTED)):
        acl("aclrtHostRegisterV2", pieces[2], size, 0)
    acl.standin.set(register_limit=-1)
    for wrong in (start, start + 64, start + N + 4096):
        with pytest.raises(OSError, match=str(PARAM_INVALID)):
            acl("aclrtHostRegisterV2", ctypes.c_void_p(wrong), size, 0)
    assert [acl.standin.place(piece.value, N) for piece in pieces] == ["locked", "locked", "pageable"]
    device, waits = acl.device(), acl.standin.count("pageable_copies")
    acl.copy(device, pieces[0], H2D, streams[0])
    assert acl.standin.count("pageable_copies") == waits
    acl.copy(device, pieces[2], H2D, streams[0])
    assert acl.standin.count("pageable_copies") == waits + 1
    for piece in pieces[:2]:
        acl("aclrtHostUnregister", piece)
    with pytest.raises(OSError, match=str(PARAM_INVALID)):
        acl("aclrtHostUnregister", pieces[0])


def test_a_batch_is_copied_whole_in_any_order(acl, streams):
    """Each pair of a batch arrives; an invalid one is named, and then none is copied."""

    class Attributes(ctypes.Structure):
        _fields_ = [(n, t) for n, t in zip("abcd", [ctypes.c_uint32, ctypes.c_int] * 2, strict=True)]
        _fields_ += [("rest", ctypes.c_uint8 * 16)]

    n_pairs, nbytes = 16, N // 16
    device, host = acl.device(), acl.host()
    ctypes.memmove(host, bytes(i // nbytes for i in range(N)), N)
    pointers, sizes = ctypes.c_void_p * n_pairs, (ctypes.c_size_t * n_pairs)(*[nbytes] * n_pairs)
    order = list(range(n_pairs))[::-1]
    targets = pointers(*(device.value + i * nbytes for i in range(n_pairs)))
    sources = pointers(*(host.value + i * nbytes for i in order))
    starts, failed = (ctypes.c_size_t * 1)(0), ctypes.c_size_t()
    to_device = Attributes(0, 1, 0, 0)
    batch = [targets, sizes, sources, sizes, ctypes.c_size_t(n_pairs), ctypes.byref(to_device), starts]
    batch += [ctypes.c_size_t(1), ctypes.byref(failed), streams[0]]
    acl("aclrtMemcpyBatchAsync", *batch)
    acl("aclrtSynchronizeStream", streams[0])
    assert ctypes.string_at(device, N) == bytes(order[i // nbytes] for i in range(N))
    targets[3] = host.value
    with pytest.raises(OSError, match=str(PARAM_INVALID)):
        acl("aclrtMemcpyBatchAsync", *batch)
    assert failed.value == 3
