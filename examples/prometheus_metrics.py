"""A cache whose numbers Prometheus scrapes: serve /metrics beside your own server, use the cache, look at the page.

python examples/prometheus_metrics.py [PORT]

Needs the extra ``metrics``. Without a port it takes a free one.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import urllib.request

from prometheus_client import CollectorRegistry, start_http_server

from tierkv import CPUTier, Level, Namespace, PrefixChunker, TieredCache
from tierkv.metrics import CacheCollector
from tierkv.policies import LRU
from tierkv.tiers.fs import FSTier

CHUNK_NBYTES = 64 << 10
TOKENS = list(range(1_000))


async def main(root_dir: str, port: int) -> None:
    """Store and load a prompt while somebody scrapes."""
    cache = TieredCache(
        chunker=PrefixChunker(namespace=Namespace(model="my-model"), tokens_per_block=16, blocks_per_chunk=8),
        levels=[
            Level(CPUTier(), policy=LRU(), capacity="8MiB"),
            Level(FSTier(root_dir), policy=LRU(), capacity="64MiB"),
        ],
        chunk_nbytes=CHUNK_NBYTES,
    )
    registry = CollectorRegistry()  # or prometheus_client.REGISTRY, which your server may serve already
    registry.register(CacheCollector(cache))
    server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    try:
        async with cache:
            await cache.store(TOKENS, [bytes(CHUNK_NBYTES)] * len(cache.chunks(TOKENS)))
            await cache.wait_idle()
            hit = await cache.lookup(TOKENS)
            await cache.load(hit, [bytearray(CHUNK_NBYTES) for _ in hit.chunks])
            url = f"http://127.0.0.1:{server.server_port}/metrics"
            page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())
            print("\n".join(line for line in page.splitlines() if not line.startswith("#")))
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(directory, int(sys.argv[1]) if len(sys.argv) > 1 else 0))
