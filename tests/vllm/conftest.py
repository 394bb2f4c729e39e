"""Tests that need torch and vLLM: they run in the nox session ``vllm`` and are passed over where there is none."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.vllm.engine import engine_environment

    os.environ.update(engine_environment())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, and most of them at import
        importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector")
