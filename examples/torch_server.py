"""A small LLM server in torch whose KV blocks go through tierkv: same tokens, most of the prefill saved.

    python examples/torch_server.py [--device cpu|cuda|npu] [DIRECTORY]

The model is a decoder with random weights, but all that matters to a cache is real: paged attention over a fixed pool
of blocks, K and V in tensors of their own, several requests in one batch that come and go, and blocks that are reused
the moment a call of the cache has returned. Requests share a system prompt. They are served four times: without a
cache, with one that is still empty, with one that has them all, and by a "restarted" server that has nothing but the
directory.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from tierkv import CPUTier, Level, Namespace, PrefixChunker, TieredCache
from tierkv.device.tier import DeviceTier
from tierkv.policies import LRU
from tierkv.tiers.fs import FSTier

N_LAYERS, WIDTH, N_HEADS, N_KV_HEADS, HEAD, VOCABULARY = 2, 64, 4, 2, 16, 256
TOKENS_PER_BLOCK, BLOCKS_PER_CHUNK, N_BLOCKS = 16, 2, 64
TOKENS_PER_CHUNK = TOKENS_PER_BLOCK * BLOCKS_PER_CHUNK
N_AT_ONCE, N_NEW, MAX_TOKENS = 4, 24, 512


class Model:
    """A decoder with grouped-query attention. Its weights follow from the seed alone."""

    def __init__(self, device: torch.device, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * scale / math.sqrt(shape[-1])).to(device)

        # Sharp attention with a strong voice, so that every token depends on all of the context.
        self.embedding, self.head = weight(VOCABULARY, WIDTH, scale=4), weight(VOCABULARY, WIDTH)
        self.luck = -(-torch.rand(MAX_TOKENS, VOCABULARY, generator=generator).log()).log().to(device)
        self.layers = [
            {
                "q": weight(N_HEADS * HEAD, WIDTH, scale=4),
                "k": weight(N_KV_HEADS * HEAD, WIDTH),
                "v": weight(N_KV_HEADS * HEAD, WIDTH),
                "o": weight(WIDTH, N_HEADS * HEAD, scale=16),
                "up": weight(4 * WIDTH, WIDTH),
                "down": weight(WIDTH, 4 * WIDTH),
            }
            for _ in range(N_LAYERS)
        ]
        self.device = device

    def forward(self, batch: list[Piece], keys: list[torch.Tensor], values: list[torch.Tensor]) -> list[int]:
        """Compute one piece of each request, leave its K and V in the request's blocks; the next token of each."""
        tokens = torch.tensor([token for piece in batch for token in piece.tokens], device=self.device)
        positions = torch.cat([torch.arange(piece.start, piece.stop) for piece in batch]).to(self.device)
        slots = torch.tensor([slot for piece in batch for slot in piece.slots], device=self.device)
        x = self.embedding[tokens] + self._at(positions)
        for layer, k_pool, v_pool in zip(self.layers, keys, values, strict=True):
            normed = functional.rms_norm(x, (WIDTH,))
            q = (normed @ layer["q"].T).view(-1, N_HEADS, HEAD)
            k_pool.view(-1, N_KV_HEADS, HEAD)[slots] = (normed @ layer["k"].T).view(-1, N_KV_HEADS, HEAD)
            v_pool.view(-1, N_KV_HEADS, HEAD)[slots] = (normed @ layer["v"].T).view(-1, N_KV_HEADS, HEAD)
            parts = q.split([piece.stop - piece.start for piece in batch])
            seen = [self._attend(part, piece, k_pool, v_pool) for part, piece in zip(parts, batch, strict=True)]
            x = x + torch.cat(seen) @ layer["o"].T
            x = x + functional.silu(functional.rms_norm(x, (WIDTH,)) @ layer["up"].T) @ layer["down"].T
        ends = torch.tensor([piece.stop - piece.start for piece in batch], device=self.device).cumsum(0) - 1
        logits = functional.rms_norm(x[ends], (WIDTH,)) @ self.head.T
        luck = self.luck[torch.tensor([piece.stop for piece in batch], device=self.device)]
        return [int(token) for token in (logits + luck).argmax(-1).tolist()]  # sampled, with luck that repeats

    def _attend(self, q: torch.Tensor, piece: Piece, k_pool: torch.Tensor, v_pool: torch.Tensor) -> torch.Tensor:
        """Attention of a piece over all of its request up to it, read through the block table."""
        table = torch.tensor(piece.blocks, device=self.device)
        k = k_pool[table].view(-1, N_KV_HEADS, HEAD)[: piece.stop].repeat_interleave(N_HEADS // N_KV_HEADS, 1)
        v = v_pool[table].view(-1, N_KV_HEADS, HEAD)[: piece.stop].repeat_interleave(N_HEADS // N_KV_HEADS, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(HEAD)
        future = torch.arange(piece.stop)[None, :] > torch.arange(piece.start, piece.stop)[:, None]
        scores = scores.masked_fill(future.to(self.device), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(-1, N_HEADS * HEAD)

    def _at(self, positions: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(torch.arange(0, WIDTH, 2, device=self.device) * (-math.log(10_000.0) / WIDTH))
        angles = positions[:, None] * rates
        return torch.cat([angles.sin(), angles.cos()], -1)


@dataclass
class Request:
    """One prompt on its way."""

    tokens: list[int]
    n_prompt: int
    blocks: list[int]
    n_computed: int = 0
    """Tokens whose K and V lie in the blocks."""
    loading: asyncio.Task[None] | None = None

    @property
    def loaded(self) -> bool:
        """Whether the request may be computed: nothing is being copied to its blocks. Raises what the cache raised."""
        if self.loading is None or not self.loading.done():
            return self.loading is None
        self.loading.result()
        return True


@dataclass
class Piece:
    """What one step computes of one request."""

    tokens: list[int]
    start: int
    stop: int
    blocks: list[int]

    @property
    def slots(self) -> list[int]:
        """Where in the pool each token's K and V go."""
        return [
            self.blocks[position // TOKENS_PER_BLOCK] * TOKENS_PER_BLOCK + position % TOKENS_PER_BLOCK
            for position in range(self.start, self.stop)
        ]


@dataclass
class Server:
    """Continuous batching: each step takes a piece of every running request; finished ones make room for others."""

    model: Model
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    cache: TieredCache | None = None
    n_prefilled: int = 0
    n_loaded: int = 0
    _free: list[int] = field(default_factory=lambda: list(range(N_BLOCKS)))
    _storing: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, prompts: list[list[int]]) -> list[list[int]]:
        """What the model says to each prompt."""
        waiting = [(i, prompt) for i, prompt in enumerate(prompts)]
        running: dict[int, Request] = {}
        answers: list[list[int]] = [[] for _ in prompts]
        while waiting or running:
            while waiting and len(running) < N_AT_ONCE and (request := self._admitted(waiting[0][1])):
                running[waiting.pop(0)[0]] = request
            ready = {i: request for i, request in running.items() if request.loaded}
            if not ready:
                tasks = [request.loading for request in running.values() if request.loading] + [*self._storing]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                continue
            self._step(list(ready.values()))
            for i, request in ready.items():
                if len(request.tokens) == request.n_prompt + N_NEW:
                    answers[i] = request.tokens[request.n_prompt :]
                    self._finish(running.pop(i))
            await asyncio.sleep(0)  # the cache's turn
        await asyncio.gather(*self._storing)
        return answers

    def _admitted(self, prompt: list[int]) -> Request | None:
        n_blocks = -(-(len(prompt) + N_NEW) // TOKENS_PER_BLOCK)
        if n_blocks > len(self._free):
            return None
        request = Request([*prompt], len(prompt), [self._free.pop() for _ in range(n_blocks)])
        if self.cache is not None:
            request.loading = asyncio.create_task(self._load(self.cache, request))
        return request

    async def _load(self, cache: TieredCache, request: Request) -> None:
        hit = await cache.lookup(request.tokens[:-1])  # the last token is computed in any case: it says the next one
        request.n_computed = await cache.load(hit, request.blocks)
        self.n_loaded += request.n_computed

    def _step(self, requests: list[Request]) -> None:
        batch = []
        for request in requests:
            # Prompts are cut where chunks end, wherever a load left off: the same shapes give the same bits.
            start = request.n_computed
            stop = min(len(request.tokens), (start // TOKENS_PER_CHUNK + 1) * TOKENS_PER_CHUNK)
            batch.append(Piece(request.tokens[start:stop], start, stop, request.blocks))
            self.n_prefilled += max(0, min(stop, request.n_prompt) - start)
        said = self.model.forward(batch, self.keys, self.values)
        for request, piece, token in zip(requests, batch, said, strict=True):
            request.n_computed = piece.stop
            if piece.stop == len(request.tokens):
                request.tokens.append(token)

    def _finish(self, request: Request) -> None:
        if self.cache is None:
            self._free += request.blocks
            return
        storing = asyncio.create_task(self._store(self.cache, request))
        self._storing.add(storing)
        storing.add_done_callback(self._storing.discard)

    async def _store(self, cache: TieredCache, request: Request) -> None:
        try:
            await cache.store(request.tokens[: request.n_computed], request.blocks)
        finally:
            self._free += request.blocks  # ours again: no copy touches them any more, also if we were cancelled


def new_pool(device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """K and V of each layer, in blocks."""
    shape = (N_BLOCKS, TOKENS_PER_BLOCK, N_KV_HEADS, HEAD)
    keys, values = ([torch.zeros(shape, device=device) for _ in range(N_LAYERS)] for _ in range(2))
    return keys, values


def new_cache(root_dir: str, keys: list[torch.Tensor], values: list[torch.Tensor]) -> TieredCache:
    """The blocks on the device, host memory below them, the directory below that."""
    chunker = PrefixChunker(
        namespace=Namespace(model="a decoder with random weights, seed 1", dtype="float32"),
        tokens_per_block=TOKENS_PER_BLOCK,
        blocks_per_chunk=BLOCKS_PER_CHUNK,
    )
    return TieredCache(
        chunker=chunker,
        levels=[
            Level(CPUTier(), policy=LRU(), capacity="4MiB"),
            Level(FSTier(root_dir), policy=LRU(), capacity="64MiB"),
        ],
        device=DeviceTier([*keys, *values], blocks_per_chunk=BLOCKS_PER_CHUNK),
    )


def some_prompts(n: int = 8) -> list[list[int]]:
    """A system prompt that all share, and a question of each its own."""
    generator = torch.Generator().manual_seed(2)

    def some(n_tokens: int) -> list[int]:
        return [int(token) for token in torch.randint(VOCABULARY, (n_tokens,), generator=generator)]

    system = some(3 * TOKENS_PER_CHUNK)
    return [system + some(20 + 13 * i) for i in range(n)]


async def main(device: torch.device, root_dir: str) -> dict[str, Any]:
    """Serve the same prompts four times, and compare."""
    model, prompts = Model(device), some_prompts()
    n_tokens = sum(map(len, prompts))
    keys, values = new_pool(device)
    plain = Server(model, keys, values)
    expected = await plain.serve(prompts)
    print(f"{len(prompts)} prompts of {n_tokens} tokens on {device}: {plain.n_prefilled} prefilled without a cache")
    report: dict[str, Any] = {"tokens": n_tokens, "without a cache": plain.n_prefilled}

    async def again(what: str, cache: TieredCache) -> None:
        for pool in (*keys, *values):
            pool.fill_(float("nan"))  # whatever is not loaded or computed shows
        server = Server(model, keys, values, cache)
        answers = await server.serve(prompts)
        assert answers == expected, f"other tokens {what}"
        await cache.wait_idle()
        saved = 1 - server.n_prefilled / n_tokens
        print(f"{what}: same tokens, {server.n_prefilled} prefilled, {server.n_loaded} loaded ({saved:.0%} saved)")
        report[what] = server.n_prefilled

    async with new_cache(root_dir, keys, values) as cache:
        await again("with an empty cache", cache)
        await again("with a full cache", cache)
    async with new_cache(root_dir, keys, values) as cache:
        await again("restarted, from disk", cache)
        report["read from disk"] = cache.statistics()["fs"].n_read
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", help="kept; by default a temporary one")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or npu")
    arguments = parser.parse_args()
    if arguments.device.startswith("npu"):
        import torch_npu  # noqa: F401 - makes torch know the device
    with tempfile.TemporaryDirectory() as temporary:
        asyncio.run(main(torch.device(arguments.device), arguments.directory or temporary))
