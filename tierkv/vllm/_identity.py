"""Under which identity a worker's KV bytes mean anything: its model, and how its pages lie.

The scheduler's side of vLLM cannot see the model, so each worker puts two digests on the control page and the scheduler
opens the tiers below the primary once they agree. vLLM's own keys already tell tokens, LoRA adapters and salts apart;
what they do not know is here. Everything is read with ``getattr``: releases rename and drop fields.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence
from typing import Any

from tierkv.device import DeviceLayout
from tierkv.vllm import _compat
from tierkv.vllm._control import Identities
from tierkv.vllm._fingerprint import Fingerprint, add_weights

logger = logging.getLogger("vllm.tierkv.identity")

_MODEL_FIELDS = (
    "dtype",
    "quantization",
    "quantization_config",
    "revision",
    "code_revision",
    "runner",
    "convert",
    "model_impl",
    "model_class_overrides",
    "disable_sliding_window",
)
_CACHE_FIELDS = (
    "cache_dtype",
    "calculate_kv_scales",
    "kv_cache_dtype_skip_layers",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "mamba_cache_mode",
    "prefix_caching_hash_algo",
    "kv_sharing_fast_prefill",
)
_NOT_IDENTITY = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})
"""Fields of a Hugging Face config that say where it lay and who wrote it, not what it computes."""


def identity_digest(vllm_config: Any) -> bytes | None:
    """32 bytes that stand for the model whose KV this engine computes, or None if nothing vouches for its weights.

    The same files under another path give the same digest; other files under the same path another. With None the
    tiers below the primary stay closed: a chunk of unknown origin would be somebody's wrong answer.

    Args:
        vllm_config: vLLM's ``VllmConfig``; None where no engine is running.
    """
    model = getattr(vllm_config, "model_config", None)
    if model is None:
        logger.warning("No VllmConfig is set where the worker starts: tiers below host memory stay closed")
        return None
    fingerprint = Fingerprint("tierkv identity 1")
    if not _add_model(fingerprint, model, getattr(vllm_config, "load_config", None)):
        return None
    cache = getattr(vllm_config, "cache_config", None)
    fingerprint.add("cache", {name: getattr(cache, name, None) for name in _CACHE_FIELDS})
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    fingerprint.add("draft", str(getattr(speculative, "method", None)))
    if draft is not None and draft is not model:
        load = getattr(speculative, "draft_load_config", None) or getattr(vllm_config, "load_config", None)
        if not _add_model(fingerprint, draft, load):
            return None
    return fingerprint.digest()


def passing_keys(vllm_config: Any) -> str | None:
    """The algorithm of vLLM's keys if they end with the process, since it starts them from a random seed; else None."""
    algorithm = getattr(getattr(vllm_config, "cache_config", None), "prefix_caching_hash_algo", None)
    is_random = isinstance(algorithm, str) and algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ
    return algorithm if is_random else None


def layout_digest(config: Any, layout: DeviceLayout, kv_shapes: object = None) -> bytes:
    """32 bytes that stand for the bytes of one rank in a chunk: equal only if they can take each other's place.

    Args:
        config: vLLM's ``OffloadingConfig``.
        layout: how this rank's pages lie in a slot.
        kv_shapes: what else is known of the tensors (backend, strides); see ``kv_shapes``.
    """
    fingerprint = Fingerprint("tierkv layout 1")
    fingerprint.add("blocks_per_chunk", layout.blocks_per_chunk)
    fingerprint.add("tokens", [getattr(group, "tokens_per_block", None) for group in config.groups])
    fingerprint.add("layers", [getattr(group, "layer_names", None) for group in config.groups])
    fingerprint.add("dtype", config.model.dtype)
    fingerprint.add("kv_cache_layout", getattr(config, "kv_cache_layout", None))
    pages = [[ref.canonical for ref in group] for group in layout.groups]
    if layout.is_canonical and all(page is not None and page.portable for group in pages for page in group):
        fingerprint.add("canonical", [[page and page.nbytes for page in group] for group in pages])
        return fingerprint.digest()
    fingerprint.add("pages", layout.page_nbytes)
    fingerprint.add("groups", [[(ref.tensor, ref.nbytes) for ref in group] for group in layout.groups])
    fingerprint.add("span", layout.span)
    fingerprint.add("shapes", kv_shapes)
    names = ("rank", "world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
    fingerprint.add("parallel", {name: getattr(config.parallel, name, None) for name in names})
    fingerprint.add(
        "canonical", [[page and (page.nbytes, page.runs, page.writer) for page in group] for group in pages]
    )
    return fingerprint.digest()


def kv_shapes(vllm_config: Any, config: Any) -> list[tuple[object, ...]]:
    """What the engine knows of each layer's cache beyond its page length: backend, dtype, shape, order of strides.

    Two attention backends may fill pages of one length in different orders. The number of blocks, which changes from
    start to start, is left out.
    """
    layers = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", None) or {}
    shapes: list[tuple[object, ...]] = []
    for name in (name for group in config.groups for name in getattr(group, "layer_names", ())):
        layer = layers.get(name)
        backend = getattr(getattr(layer, "attn_backend", None), "__qualname__", None)
        for cache in _parts(getattr(layer, "kv_cache", None)):
            shape, strides = list(getattr(cache, "shape", ())), list(getattr(cache, "stride", tuple)())
            n_blocks = getattr(getattr(vllm_config, "cache_config", None), "num_gpu_blocks", None)
            axis = next((i for i, n in enumerate(shape) if n == n_blocks), 0)
            order = sorted(range(len(strides)), key=lambda i: strides[i], reverse=True)
            device = getattr(getattr(cache, "device", None), "type", None)
            dtype = str(getattr(cache, "dtype", None))
            shapes.append((name, backend, device, dtype, shape[:axis] + shape[axis + 1 :], order))
    return shapes


def _parts(cache: Any) -> list[Any]:
    """The tensors of a layer's cache, whose K and V may be apart, in one list or a list each; never empty."""
    if not isinstance(cache, list | tuple) or not cache:
        return [cache]
    return [part for nested in cache for part in _parts(nested)]


def agreed_identity(identities: Sequence[bytes | None], layouts: Sequence[bytes | None]) -> bytes | None:
    """One identity for the chunks of all ranks, or None while a rank's is missing or two ranks disagree.

    Args:
        identities: each rank's identity digest, in rank order; all must be equal.
        layouts: each rank's layout digest. Equal ones mean that no rank shows in the bytes (canonical pages).
    """
    if not identities or None in identities or None in layouts or len(set(identities)) != 1:
        return None
    fingerprint = Fingerprint("tierkv namespace 1")
    fingerprint.add("identity", identities[0])
    fingerprint.add("layouts", layouts[0] if len(set(layouts)) == 1 else list(layouts))
    return fingerprint.digest()


def _add_model(fingerprint: Fingerprint, model: Any, load: Any) -> bool:
    """Add one model; False, with a warning, if its weights cannot be found on this machine."""
    config: Any = getattr(model, "hf_config", None)
    record = config.to_dict() if hasattr(config, "to_dict") else {}
    fingerprint.add("config", _without_origin(record))
    fingerprint.add("model", {name: getattr(model, name, None) for name in _MODEL_FIELDS})
    if "longrope" in str(record).lower():
        fingerprint.add("max_model_len", getattr(model, "max_model_len", None))  # it picks one of two sets of factors
    load_format = str(getattr(load, "load_format", "auto"))
    if load_format == "dummy":
        fingerprint.add("dummy weights", getattr(model, "seed", None))
        return True
    path = _weights_path(model, load)
    try:
        n_files = add_weights(fingerprint, path) if path else 0
    except OSError as error:
        logger.warning("The weights at %s cannot be read (%s): tiers below host memory stay closed", path, error)
        return False
    if not n_files:
        name = getattr(model, "model", None)
        logger.warning("No weight files of %s lie on this machine: tiers below host memory stay closed", name)
        return False
    return True


def _without_origin(record: Any) -> Any:
    if isinstance(record, dict):
        return {key: _without_origin(value) for key, value in record.items() if key not in _NOT_IDENTITY}
    return record


def _weights_path(model: Any, load: Any) -> str | None:
    """The folder or file from which vLLM loaded the weights; nothing is downloaded."""
    name = getattr(model, "model_weights", None) or getattr(model, "model", None)
    if not isinstance(name, str):
        return None
    if os.path.exists(name):
        return name
    try:
        hub = importlib.import_module("huggingface_hub")
        revision, cache_dir = getattr(model, "revision", None), getattr(load, "download_dir", None)
        return str(hub.snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except Exception as error:  # noqa: BLE001 - any failure means the same: we cannot see the files
        logger.info("%s is not in the local Hugging Face cache (%s)", name, error)
        return None


class SchedulerIdentity:
    """An engine's identity from its scheduler's side, for a tier under vLLM's own spec, where workers tell us nothing.

    The model is taken from the ``VllmConfig`` of whoever made the tier. How pages lie in a chunk cannot be seen there,
    so everything from which vLLM derives it counts instead: the cache specs, the layout's name, all parallel sizes,
    attention settings, platform and vLLM's version. More than need be: it costs a miss, never a wrong byte.

    Args:
        config: vLLM's ``OffloadingConfig``.
        row_nbytes: bytes of a chunk.
    """

    def __init__(self, config: Any, row_nbytes: int) -> None:
        vllm_config = _compat.callers_local("vllm_config", "model_config") or _compat.current_vllm_config()
        model = identity_digest(vllm_config)
        layout = None if model is None else _derived_layout(vllm_config, config, row_nbytes)
        self._known = None if model is None or layout is None else Identities((model,), (layout,))

    def identities(self) -> Identities | None:
        """As a control page's: one rank's digests, or None if nothing vouches for the weights."""
        return self._known


def _derived_layout(vllm_config: Any, config: Any, row_nbytes: int) -> bytes:
    fingerprint = Fingerprint("tierkv scheduler layout 1")
    fingerprint.add("software", _compat.software())
    fingerprint.add("row", row_nbytes)
    for name in ("groups", "worker_kv_bytes_per_block", "cache", "replicated_layout", "canonical_layout"):
        fingerprint.add(name, getattr(config, name, None))
    fingerprint.add("dtype", config.model.dtype)
    fingerprint.add("kv_cache_layout", getattr(config, "kv_cache_layout", None))
    sizes = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
    fingerprint.add("parallel", {name: getattr(config.parallel, name, None) for name in sizes})
    fingerprint.add("attention", getattr(vllm_config, "attention_config", None))
    fingerprint.add("runner", getattr(vllm_config, "use_v2_model_runner", None))
    caches = _compat.callers_local("kv_cache_config", "kv_cache_groups")
    specs = [(group.layer_names, group.kv_cache_spec) for group in getattr(caches, "kv_cache_groups", ())]
    fingerprint.add("specs", specs)
    return fingerprint.digest()
