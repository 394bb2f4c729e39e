"""Whose KV bytes these are: what must tell two engines apart, and what must not."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.device.shapes import head_sharded
from tests.vllm.model import HYBRID, QWEN3, ModelSpec, make_model
from tierkv.device import DeviceLayout, PageRef
from tierkv.vllm import _fingerprint
from tierkv.vllm._fingerprint import Fingerprint, add_weights, canonical
from tierkv.vllm._identity import agreed_identity, identity_digest, kv_shapes, layout_digest


def vllm_config_of(model: str, **changes):
    """A real ``VllmConfig`` for this folder, with a field of one of its parts changed."""
    from vllm.config import CacheConfig, LoadConfig, ModelConfig

    names = {field.name for field in dataclasses.fields(ModelConfig)}
    model_changes = {name: changes.pop(name) for name in list(changes) if name in names}
    load_format = changes.pop("load_format", "auto")
    return SimpleNamespace(
        model_config=ModelConfig(model=model, **{"dtype": "float32", "max_model_len": 256} | model_changes),
        cache_config=CacheConfig(block_size=32, **changes),
        load_config=LoadConfig(load_format=load_format),
        speculative_config=None,
    )


def digest(model: str, **changes) -> bytes | None:
    return identity_digest(vllm_config_of(model, **changes))


class TestIdentity:
    """One digest for each model that a server can be."""

    def test_the_path_does_not_matter(self, models, tmp_path):
        """A copy of the folder elsewhere, or a symlink to it, is the same model."""
        shutil.copytree(models(), tmp_path / "copy")
        (tmp_path / "link").symlink_to(models())
        assert digest(models()) == digest(str(tmp_path / "copy")) == digest(str(tmp_path / "link"))

    def test_another_checkpoint_under_the_same_path(self, tmp_path):
        """Same folder, same shapes, same file sizes, other weights; and back again."""
        model = tmp_path / "model"
        seen = [digest(make_model(model, ModelSpec(seed=seed))) for seed in (0, 1, 0)]
        assert seen[0] == seen[2] != seen[1]

    @pytest.mark.parametrize(
        "changes",
        [
            {"dtype": "bfloat16"},
            {"hf_overrides": {"rope_theta": 500000.0}},
            {"hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}},
            {"cache_dtype": "fp8"},
            {"prefix_caching_hash_algo": "sha256_cbor"},
            {"revision": "v2"},
            {"load_format": "dummy"},
        ],
        ids=lambda changes: "-".join(map(str, changes)),
    )
    def test_settings_that_change_the_bytes(self, models, changes):
        """A difference in any of these is another model."""
        assert digest(models(), **changes) != digest(models())

    @pytest.mark.parametrize("changes", [{"served_model_name": "other"}, {"seed": 7}, {"max_model_len": 128}])
    def test_settings_that_do_not(self, models, changes):
        """Names, seeds and limits leave the bytes alone."""
        assert digest(models(), **changes) == digest(models())

    def test_other_architectures(self, models):
        assert digest(models()) != digest(models("hybrid"))
        assert QWEN3 != HYBRID

    def test_no_weights_in_sight(self, models, tmp_path):
        """A folder without weights, or no config at all: no identity, and a sentence that says what follows."""
        shutil.copytree(models(), tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
        assert digest(str(tmp_path / "bare")) is None
        assert identity_digest(None) is None

    def test_a_draft_model_counts(self, models, tmp_path):
        """Speculative decoding puts another model's layers into the cache: with its weights, not only its name."""

        def with_draft(draft: str) -> bytes | None:
            config = vllm_config_of(models())
            config.speculative_config = SimpleNamespace(
                method="draft_model", draft_model_config=vllm_config_of(draft).model_config, draft_load_config=None
            )
            return identity_digest(config)

        other = make_model(tmp_path / "other", ModelSpec(seed=1))
        assert len({digest(models()), with_draft(models()), with_draft(other), None}) == 4

    @pytest.mark.timeout(600)  # another process imports vLLM
    def test_every_process_says_the_same(self, models):
        """Whatever PYTHONHASHSEED."""
        code = (
            "import sys, warnings; warnings.simplefilter('ignore')\n"
            "from tests.vllm.test_identity import digest\n"
            "print('@@', digest(sys.argv[1]).hex())"
        )
        environment = os.environ | {"PYTHONHASHSEED": "4711", "PYTHONPATH": os.getcwd()}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, models()],
            env=environment, capture_output=True, text=True, timeout=200, check=True,
        )  # fmt: skip
        assert done.stdout.split("@@")[1].strip() == digest(models()).hex()


class TestWeights:
    """Files by content, long ones by samples."""

    def of(self, path) -> bytes:
        fingerprint = Fingerprint("test")
        add_weights(fingerprint, str(path))
        return fingerprint.digest()

    @pytest.fixture
    def small(self, monkeypatch):
        monkeypatch.setattr(_fingerprint, "WHOLE_NBYTES", 10_000)
        monkeypatch.setattr(_fingerprint, "SAMPLE_NBYTES", 100)

    def test_a_long_file_is_told_by_header_time_and_samples(self, small, tmp_path):
        """Each of them alone makes a difference; the same bytes and time do not."""
        file = tmp_path / "model.safetensors"
        body = bytearray((1000).to_bytes(8, "little") + b"h" * 1000 + bytes(100_000))

        def written(at: int | None = None, mtime_ns: int = 10**18) -> bytes:
            changed = bytearray(body)
            if at is not None:
                changed[at] ^= 1
            file.write_bytes(changed)
            os.utime(file, ns=(mtime_ns, mtime_ns))
            return self.of(tmp_path)

        same = written()
        assert written() == same
        assert written(at=500) != same, "header, between two samples"
        assert written(at=len(body) - 1) != same, "last sample"
        assert written(mtime_ns=10**18 + 1) != same, "time of change"

    def test_a_short_file_is_hashed_whole_and_its_time_does_not_count(self, tmp_path):
        file = tmp_path / "a.bin"
        file.write_bytes(bytes(1_000))
        before = self.of(tmp_path)
        os.utime(file, ns=(1, 1))
        assert self.of(tmp_path) == before
        file.write_bytes(bytes(999) + b"\x01")
        assert self.of(tmp_path) != before

    def test_names_sizes_and_numbers_of_files(self, tmp_path):
        """Renamed, split or joined files are other files; what is no weight file, and hidden folders, do not count."""
        (tmp_path / "a.bin").write_bytes(b"one")
        one = self.of(tmp_path)
        (tmp_path / "README.md").write_text("x")
        (tmp_path / ".cache").mkdir()
        (tmp_path / ".cache" / "b.bin").write_bytes(b"x")
        assert self.of(tmp_path) == one
        (tmp_path / "a.bin").rename(tmp_path / "b.bin")
        renamed = self.of(tmp_path)
        (tmp_path / "c.bin").write_bytes(b"")
        assert len({one, renamed, self.of(tmp_path)}) == 3


def test_canonical_values_never_read_alike():
    """Kinds, nesting and order: all of these differ, and mappings and sets do not depend on order."""
    values = [
        None, False, 0, 0.0, "", b"", [], {}, set(), "0", b"0", [0], ["0"], [[0]], {0: 0}, {"0": 0}, ["a", "b"], ["ab"],
        [["a"], "b"], [["a", "b"]], {"a": "b"}, SimpleNamespace, 1, True, "None", "True",
    ]  # fmt: skip
    assert len({canonical(value) for value in values}) == len(values)
    assert canonical({"a": 1, "b": 2}) == canonical({"b": 2, "a": 1})
    assert canonical({1, 2, 3}) == canonical({3, 2, 1})
    assert canonical(object()) == canonical(object()), "never an address"


def config_of(rank: int = 0, n_ranks: int = 1, **changes):
    parallel = SimpleNamespace(rank=rank, world_size=n_ranks, tp_size=n_ranks, pp_size=1, pcp_size=1, dcp_size=1)
    made = {
        "groups": [SimpleNamespace(tokens_per_block=16, layer_names=("a", "b"))],
        "model": SimpleNamespace(name="m", dtype="float32"),
        "kv_cache_layout": "LBHNC",
        "parallel": parallel,
    }
    return SimpleNamespace(**made | changes)


def direct(n_rank_nbytes: int = 64, per_chunk: int = 1, start: int = 0) -> DeviceLayout:
    return DeviceLayout.direct(
        [n_rank_nbytes], [[PageRef(0, n_rank_nbytes)]], blocks_per_chunk=per_chunk, start_nbytes=start
    )


def shared(rank: int, n_ranks: int) -> DeviceLayout:
    page = head_sharded(rank, n_ranks, heads=4, tokens=2, head_nbytes=8, by_token=False)
    n = 64 // n_ranks
    return DeviceLayout.canonical([n], [[PageRef(0, n, page)]], blocks_per_chunk=1, stop_nbytes=64)


class TestLayout:
    """One digest for each way in which a chunk's bytes can lie."""

    def test_what_tells_layouts_apart(self):
        """Page length, chunk length, place, layers, token count, dtype, layout name, rank, ranks, backend."""
        seen = [
            layout_digest(config_of(), direct()),
            layout_digest(config_of(), direct(128)),
            layout_digest(config_of(), direct(per_chunk=2)),
            layout_digest(config_of(), direct(start=64)),
            layout_digest(config_of(rank=0, n_ranks=2), direct()),
            layout_digest(config_of(rank=1, n_ranks=2), direct()),
            layout_digest(config_of(kv_cache_layout="LBNHC"), direct()),
            layout_digest(config_of(model=SimpleNamespace(name="m", dtype="fp8")), direct()),
            layout_digest(config_of(groups=[SimpleNamespace(tokens_per_block=32, layer_names=("a", "b"))]), direct()),
            layout_digest(config_of(groups=[SimpleNamespace(tokens_per_block=16, layer_names=("b", "a"))]), direct()),
            layout_digest(config_of(), direct(), [("a", "FlashAttentionBackend")]),
            layout_digest(config_of(), shared(0, 1)),
        ]
        assert len(set(seen)) == len(seen)
        assert layout_digest(config_of(), direct()) == seen[0]

    def test_canonical_pages_show_no_rank(self):
        """Every rank of every number of ranks says the same; and none of them if the pages are not portable."""
        seen = {layout_digest(config_of(r, n), shared(r, n)) for n in (1, 2, 4) for r in range(n)}
        assert len(seen) == 1
        page = dataclasses.replace(head_sharded(0, 1, heads=4, tokens=2, head_nbytes=8, by_token=False), portable=False)
        bound = DeviceLayout.canonical([64], [[PageRef(0, 64, page)]], blocks_per_chunk=1)
        assert len({layout_digest(config_of(0, n), bound) for n in (1, 2)} | seen) == 3

    def test_the_number_of_blocks_does_not_count(self):
        """It changes from start to start with the free memory."""
        import torch

        def shapes(n_blocks: int, backend: str = "A"):
            layer = SimpleNamespace(attn_backend=type(backend, (), {}), kv_cache=torch.zeros(2, n_blocks, 4, 8))
            config = SimpleNamespace(
                compilation_config=SimpleNamespace(static_forward_context={"a": layer}),
                cache_config=SimpleNamespace(num_gpu_blocks=n_blocks),
            )
            return kv_shapes(config, config_of())

        assert shapes(64) == shapes(65) != shapes(64, "B")


def test_ranks_must_agree():
    """Missing or different models: no identity. Different layouts: one, in rank order. Equal layouts: no rank in it."""
    m, n, a, b = (bytes([i]) * 32 for i in range(4))
    assert agreed_identity([], []) is None
    assert agreed_identity([m, None], [a, a]) is None
    assert agreed_identity([m, m], [a, None]) is None
    assert agreed_identity([m, n], [a, a]) is None
    seen = [
        agreed_identity([m] * 2, [a, b]),
        agreed_identity([m] * 2, [b, a]),
        agreed_identity([m], [a]),
        agreed_identity([n], [a]),
    ]
    assert len(set(seen)) == 4
    assert agreed_identity([m] * 2, [a, a]) == agreed_identity([m], [a])
