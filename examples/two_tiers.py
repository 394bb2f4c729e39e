"""Host memory over a directory: store the KV cache of a prompt, close, open again, and get it back from disk.

python examples/two_tiers.py [DIRECTORY]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile

from tierkv import CPUTier, Level, Namespace, PrefixChunker, TieredCache
from tierkv.policies import LRU
from tierkv.tiers.fs import FSTier

CHUNK_NBYTES = 64 << 10
TOKENS = list(range(1_000))  # what a tokenizer gave for some prompt


def make_cache(root_dir: str) -> TieredCache:
    """Two levels, fastest first. Order, size and place are said here and nowhere else."""
    return TieredCache(
        chunker=PrefixChunker(namespace=Namespace(model="my-model"), tokens_per_block=16, blocks_per_chunk=8),
        levels=[
            Level(CPUTier(), policy=LRU(), capacity="8MiB"),
            Level(FSTier(root_dir), policy=LRU(), capacity="64MiB"),
        ],
        chunk_nbytes=CHUNK_NBYTES,
    )


def computed(n: int) -> bytes:
    """Stands for what the model computed for the n-th chunk."""
    return bytes([n]) * CHUNK_NBYTES


async def main(root_dir: str) -> None:
    """Store, restart, use."""
    async with make_cache(root_dir) as cache:
        n_chunks = len(cache.chunks(TOKENS))
        outcomes = await cache.store(TOKENS, [computed(n) for n in range(n_chunks)])
        print(f"stored {sum(outcome.ok for outcome in outcomes)} chunks of {len(TOKENS)} tokens")
        await cache.wait_idle()  # the disk follows in the background; a server would not wait for it

    async with make_cache(root_dir) as cache:  # as after a restart: host memory is empty
        hit = await cache.lookup([*TOKENS, 7, 7, 7])  # the same prefix, then something new
        print(f"found {hit.n_tokens} tokens on levels {sorted(set(hit.levels))}; then: {hit.stop}")
        async with cache.lease(hit) as lease:  # in host memory now, and pinned
            for n, chunk in enumerate(lease.chunks):
                assert bytes(lease.view(chunk)) == computed(n)
            print(f"served {lease.n_tokens} tokens, every byte as stored")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(main(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(main(directory))
