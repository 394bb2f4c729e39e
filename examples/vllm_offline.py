"""vLLM from Python with its KV cache offloaded, to host memory and a bounded directory below. Needs vLLM and a model.

    python examples/vllm_offline.py MODEL [--root DIRECTORY] [--events ENDPOINT] [--engine JSON]

Asks, lets the device forget, and asks again: the second time the prompt comes from host memory. With ``--root`` a
second run of the program finds it on disk. With ``--events`` the engine tells ``vllm_events.py`` what it stores and
removes.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

PROMPT = "You are a careful assistant. " * 40 + "What is a KV cache?"


def transfer_config(cpu_bytes: str | int = "8GiB", root_dir: str | None = None) -> dict[str, Any]:
    """What goes to ``--kv-transfer-config`` as JSON, or to ``KVTransferConfig`` as here."""
    extra: dict[str, Any] = {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": cpu_bytes, "blocks_per_chunk": 8}
    if root_dir is not None:
        tier = {"type": "fs", "root_dir": root_dir, "capacity": "100GiB", "enable_kv_events": True}
        extra |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def events_config(endpoint: str) -> dict[str, Any]:
    """Where events go: vLLM listens at ``tcp://*:5555``, for anybody; to an endpoint that names a host it connects."""
    return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "topic": "kv_events"}


def main() -> None:
    """Ask twice, and say how much of the prompt was not computed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--cpu-bytes", default="8GiB", help="host memory, over all workers")
    parser.add_argument("--root", help="directory below it, for what host memory has no room for")
    parser.add_argument("--events", metavar="ENDPOINT", help="where KV-cache events go, such as tcp://127.0.0.1:5555")
    parser.add_argument("--engine", type=json.loads, default={}, help="more arguments of vllm.LLM, as JSON")
    given = parser.parse_args()

    from vllm import LLM, SamplingParams  # noqa: PLC0415 - so that reading the configuration needs no vLLM
    from vllm.config import KVEventsConfig, KVTransferConfig  # noqa: PLC0415

    events = None if given.events is None else KVEventsConfig(**events_config(given.events))
    config = KVTransferConfig(**transfer_config(given.cpu_bytes, given.root))
    engine = {"gpu_memory_utilization": 0.5} | given.engine
    llm = LLM(model=given.model, kv_transfer_config=config, kv_events_config=events, **engine)
    for _ in range(2):
        (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=100, temperature=0.0))
        print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens were not computed")
        print(f"Generated: {output.outputs[0].text!r}")
        print(f"The device forgot: {llm.reset_prefix_cache()}", flush=True)  # what was offloaded stays


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
