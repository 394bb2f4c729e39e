"""Importing vLLM in a test process: its environment first, its warnings silenced."""

from __future__ import annotations

import importlib
import os
import warnings

from tests.patience import PATIENCE_S, be_patient


def import_vllm() -> None:
    """Idempotent; to be called before anything of vLLM is imported."""
    from tests.vllm.engine import engine_environment

    os.environ.update(engine_environment())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, and most of them at import
        importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector")
    be_patient_with_vllm()


def be_patient_with_vllm() -> None:
    """As :func:`tests.patience.be_patient`: probes and closing take as long as the disk and the processor take."""
    from tierkv.vllm import _lookups, _loop, secondary

    be_patient()
    _lookups._PROBE_S = secondary._PROBE_S = PATIENCE_S
    _loop._CLOSE_S = 3 * PATIENCE_S
