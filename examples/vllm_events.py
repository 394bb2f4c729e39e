"""Listen to what vLLM tells of its KV cache: blocks stored and removed, by medium. Needs pyzmq and msgspec, as vLLM.

    python examples/vllm_events.py ENDPOINT

The endpoint is the engine's own. Where it names a host (tcp://127.0.0.1:5555) vLLM connects and we listen; where it has
a star (tcp://*:5555) vLLM listens, to everybody, and we connect.
"""

from __future__ import annotations

import contextlib
import sys

import msgspec
import zmq


def main(endpoint: str) -> None:
    """Print a line for each event until interrupted."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt_string(zmq.SUBSCRIBE, "")
        if "*" in endpoint:
            socket.connect(endpoint.replace("*", "127.0.0.1"))
        else:
            socket.bind(endpoint)
        print(f"listening at {endpoint}", flush=True)
        while True:
            topic, number, payload = socket.recv_multipart()
            _, events, *_ = msgspec.msgpack.decode(payload)
            for event in events:
                what = f"{event['type']} {len(event.get('block_hashes', []))} {event.get('medium')}"
                print(f"{topic.decode()} {int.from_bytes(number, 'big')}: {what}", flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1])
