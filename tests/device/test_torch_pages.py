"""What servers really register, seen as pages: every byte of every block, no copy, nothing unproven."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tierkv.device import DeviceTier, Direction, HostSlots  # noqa: E402 - torch comes first, or the page is skipped
from tierkv.device.pages import kv_pages  # noqa: E402
from tierkv.errors import TierError  # noqa: E402

N = 12


def fill(*tensors: Any, seed: int = 1) -> None:
    """Random bytes in the whole storage of each, paddings included."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        raw = torch.empty(0, dtype=torch.int8).set_(tensor.untyped_storage())
        raw.copy_(torch.randint(-128, 128, raw.shape, dtype=torch.int8, generator=generator))


def one_per_layer() -> Any:
    return {f"l{i}": torch.empty(N, 2, 4, 8, dtype=torch.float16) for i in range(3)}, None


def keys_and_values() -> Any:
    """As on Ascend: separate allocations."""
    return {f"l{i}": (torch.empty(N, 4, 8), torch.empty(N, 4, 8)) for i in range(2)}, None


def with_scales() -> Any:
    return {
        "l0": [torch.empty(N, 4, 8, dtype=torch.int8), torch.empty(N, 4, 8, dtype=torch.int8), [torch.empty(N, 4)]]
    }, None


def mla_parts() -> Any:
    """A latent part and a rotary part, of different widths, each its own tensor."""
    return {
        "l0": (torch.empty(N, 4, 1, 512, dtype=torch.bfloat16), torch.empty(N, 4, 1, 64, dtype=torch.bfloat16))
    }, None


def mla_views() -> Any:
    """The same as two interleaved views of one tensor: pieces of either alone, one page together."""
    joint = torch.empty(N, 4, 72)
    return {"l0": (joint[..., :64], joint[..., 64:])}, None


def stacked() -> Any:
    both = torch.empty(2, N, 4, 8)
    return {"l0": both.unbind(0)}, None


def permuted() -> Any:
    """Heads outside in memory, tokens outside in shape."""
    return {"l0": torch.empty(N, 2, 16, 8).permute(0, 2, 1, 3)}, None


def strided_rows() -> Any:
    return {"l0": torch.empty(N, 3, 64)[:, 1], "l1": torch.empty(N, 100, dtype=torch.int8)[:, :40]}, None


def over_aligned() -> Any:
    """Storage that begins before and goes on behind the blocks."""
    return {"l0": torch.empty(4096, dtype=torch.int8)[128 : 128 + N * 64].view(N, 64)}, None


def overlapping_views() -> Any:
    whole = torch.empty(N, 96)
    return {"l0": (whole[:, :64], whole[:, 32:])}, None


def mamba_states() -> Any:
    """Two states a block, one behind the other, in pages with padding: views of one raw buffer."""
    raw = torch.empty(N * 1024, dtype=torch.int8)
    conv = torch.as_strided(raw.view(torch.float16), (N, 3, 32), (512, 32, 1))
    ssm = torch.as_strided(raw.view(torch.float32), (N, 4, 16), (256, 16, 1), 48)
    return {"l0": [conv, ssm]}, None


def aliased_groups() -> Any:
    """A hybrid model: attention and states of two groups in the same buffers, pages of the same length."""
    raw = torch.empty(N * 1024, dtype=torch.int8)
    attention = raw.view(torch.float16).view(N, 2, 256)
    conv = torch.as_strided(raw.view(torch.float16), (N, 96), (512, 1))
    other = torch.empty(N, 512, dtype=torch.float16)
    return {"a": attention, "m": conv, "a2": other}, [["a", "a2"], ["m"]]


LAYOUTS = [
    one_per_layer,
    keys_and_values,
    with_scales,
    mla_parts,
    mla_views,
    stacked,
    permuted,
    strided_rows,
    over_aligned,
    overlapping_views,
    mamba_states,
    aliased_groups,
]


def flat(kv: Any) -> list[Any]:
    return [kv] if isinstance(kv, torch.Tensor) else [tensor for part in kv for tensor in flat(part)]


@pytest.mark.parametrize("per_chunk", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_every_byte_of_a_block_comes_back_and_no_other_changes(layout, per_chunk):
    """Store some blocks of each group, scramble all memory, load into other blocks: elements and bystanders."""
    layers, groups = layout()
    tensors = [tensor for kv in layers.values() for tensor in flat(kv)]
    fill(*tensors)
    of_groups = groups or [list(layers)]
    tier = DeviceTier(layers, blocks_per_chunk=per_chunk, groups=groups)
    stride = -(-tier.chunk_nbytes // 4096) * 4096
    slots = bytearray(4 * stride)
    tier.bind(HostSlots.over(memoryview(slots), stride))
    rng = random.Random(per_chunk)
    for group, names in enumerate(of_groups):
        own = [tensor for name in names for tensor in flat(layers[name])]
        sizes = [per_chunk if g == group else 0 for g in range(len(of_groups))]
        source = rng.sample(range(N), per_chunk)
        want = [tensor[source].contiguous().view(torch.int8).clone() for tensor in own]
        tier.submit(Direction.STORE, source, [group], group_sizes=sizes, whole=True)
        tier.wait()
        fill(*tensors, seed=2 + group)
        before = [torch.empty(0, dtype=torch.int8).set_(t.untyped_storage()).clone() for t in tensors]
        target = rng.sample(range(N), per_chunk)
        tier.submit(Direction.LOAD, target, [group], group_sizes=sizes)
        tier.wait()
        assert [done.error for done in tier.poll()] == [None, None]
        got = [tensor[target].contiguous().view(torch.int8) for tensor in own]
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        for tensor, old in zip(tensors, before, strict=True):
            raw = torch.empty(0, dtype=torch.int8).set_(tensor.untyped_storage())
            mask = torch.zeros_like(raw, dtype=torch.bool)
            for other in own:
                if other.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                    _mark(mask, other, target)
            assert torch.equal(raw[~mask], old[~mask])
    tier.close()


def _mark(mask: Any, tensor: Any, blocks: list[int]) -> None:
    """Set the bytes of these blocks of a view of the storage that ``mask`` stands for."""
    n = tensor.element_size()
    elements = mask.view(-1, n) if len(mask) % n == 0 else mask[: len(mask) // n * n].view(-1, n)
    for byte in range(n):
        column = elements[:, byte]
        view = torch.as_strided(
            column, tensor.shape, [s * n for s in tensor.stride()], tensor.storage_offset() * n + byte
        )
        view[blocks] = True


def test_nothing_is_copied():
    """The page views share the server's memory."""
    layers, _ = keys_and_values()
    pages = kv_pages(layers)
    starts = {tensor.data_ptr() for kv in layers.values() for tensor in kv}
    assert {tensor.data_ptr() for tensor in pages.tensors} == starts
    assert pages.page_nbytes == (128,) * 4


def test_interleaved_views_become_one_page():
    """Latent and rotary parts of one tensor are stored as the one run of bytes that they are together."""
    assert kv_pages(mla_views()[0]).page_nbytes == (4 * 72 * 4,)
    assert kv_pages(overlapping_views()[0]).page_nbytes == (96 * 4,)


def test_more_physical_blocks_than_used():
    """The server says how many it uses; blocks behind that are refused when they are named."""
    tier = DeviceTier({"l0": torch.zeros(N, 64), "l1": torch.zeros(N + 4, 64)}, blocks_per_chunk=1, n_blocks=N - 2)
    assert tier.n_blocks == N - 2
    tier.bind(HostSlots.over(memoryview(bytearray(4096)), 4096))
    tier.submit(Direction.STORE, [N - 2], [0])
    tier.wait()
    assert "does not exist" in str(tier.poll()[0].error)
    tier.close()


@pytest.mark.parametrize(
    ("layers", "kwargs", "says"),
    [
        ({"l7": torch.zeros(N, 64).expand(3, N, 64)}, {}, r"layer l7.*\[3, 12, 64\].*share bytes"),
        ({"l0": torch.zeros(N, 1).expand(N, 64)}, {}, "repeats elements"),
        ({"l0": torch.as_strided(torch.zeros(600), (N, 64), (32, 1))}, {}, "share bytes"),
        ({"l0": torch.as_strided(torch.zeros(N * 64), (N, 8, 8), (64, 4, 1))}, {}, "overlap"),
        ({"l0": torch.zeros(N, 2048)[:, ::2]}, {}, "1024 pieces"),
        ({"l0": torch.zeros(2, N, 64)}, {"n_blocks": N}, r"unbind\(0\)"),
        ({"l0": torch.zeros(N, 0)}, {}, "bytes in each block"),
        ({"l0": torch.zeros(N)}, {}, "n_blocks, ..."),
        ({"l0": torch.zeros(N, 4).to_sparse()}, {}, "strided"),
        ({"l0": "cache"}, {}, "layer l0: str"),
        ({"l0": ()}, {}, "layer l0: tuple"),
        ({}, {}, "no KV tensors"),
        ({"l0": torch.zeros(N, 4), "l1": torch.zeros(N, 4, device="meta")}, {}, "several devices"),
        ({"l0": torch.zeros(N, 4)}, {"groups": [["l0", "l9"]]}, r"\['l9'\]"),
        ({"l0": torch.zeros(N, 4), "l1": torch.zeros(N, 4)}, {"groups": [["l0"]]}, r"\['l1'\].*no group"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_proven_is_refused(layers, kwargs, says):
    """One sentence with the layer, its shape and its strides; nothing is registered."""
    with pytest.raises(TierError, match=says):
        kv_pages(layers, kwargs.pop("groups", None), **kwargs)


def test_views_whose_blocks_lie_elsewhere_are_refused():
    """Two layers over one storage, the second a block further, or with other rows: block i is not block i."""
    whole = torch.zeros(N + 1, 64)
    with pytest.raises(TierError, match=r"layer b.*shares bytes with layer a"):
        kv_pages({"a": whole[:-1], "b": whole[1:]})
    raw = torch.zeros(N * 64)
    with pytest.raises(TierError, match="shares bytes"):
        kv_pages({"a": raw.view(N, 64), "b": raw.view(2 * N, 32)}, [["a"], ["b"]])
