"""Importing vLLM in a test process: its environment first, its warnings silenced."""

from __future__ import annotations

import importlib
import os
import warnings


def import_vllm() -> None:
    """Idempotent; to be called before anything of vLLM is imported."""
    from tests.vllm.engine import engine_environment

    os.environ.update(engine_environment())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, and most of them at import
        importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector")
