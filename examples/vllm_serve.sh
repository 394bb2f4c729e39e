#!/bin/sh
# vLLM's HTTP server with its KV cache offloaded: to host memory, and to a bounded directory below it.
#
#     sh examples/vllm_serve.sh MODEL ROOT_DIRECTORY [more options of vllm serve]
#
# Without a directory below: "spec_name": "CPUOffloadingSpec", and no secondary_tiers.
set -eu
model=$1 root_dir=$2
shift 2
exec vllm serve "$model" --kv-transfer-config '{
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": "'"${CPU_BYTES:-8GiB}"'",
        "blocks_per_chunk": '"${BLOCKS_PER_CHUNK:-8}"',
        "secondary_tiers": [
            {"type": "fs", "root_dir": "'"$root_dir"'", "capacity": "100GiB", "enable_kv_events": true}
        ]
    }
}' "$@"
