"""vLLM with host memory and a bounded directory below the device, from Python. Needs vLLM and a model.

    python examples/vllm_tiering.py MODEL ROOT_DIRECTORY

Run it twice: the second run finds on disk what the first one computed.
"""

from __future__ import annotations

import sys
from typing import Any

PROMPT = "You are a careful assistant. " * 60 + "What is a KV cache?"


def transfer_config(root_dir: str) -> dict[str, Any]:
    """What goes to ``--kv-transfer-config`` as JSON, or to ``KVTransferConfig`` as here."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": "256MiB",
            "blocks_per_chunk": 1,
            "secondary_tiers": [{"type": "fs", "root_dir": root_dir, "capacity": "1GiB"}],
        },
    }


def main(model: str, root_dir: str) -> None:
    """Ask once, and say how much of the prompt was not computed."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - so that reading the configuration needs no vLLM
    from vllm.config import KVTransferConfig  # noqa: PLC0415

    llm = LLM(model=model, kv_transfer_config=KVTransferConfig(**transfer_config(root_dir)))
    (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=16, temperature=0.0))
    print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens came from the cache")
    print(output.outputs[0].text)


if __name__ == "__main__":
    main(*sys.argv[1:3])
