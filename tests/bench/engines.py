"""Real vLLM on CPU, prompt by prompt by turns: what a hit saves, what a miss costs, and vLLM's own manager beside.

``python -m tests.bench.engines DIRECTORY`` prints the table. Four engines live at once, each in processes of its own,
and one at a time works: without offloading; tierkv with host memory only; tierkv with little host memory and a disk;
and vLLM's own tiered manager with its fs tier, over the same copies and sizes. A pair is one prompt on two engines.

A conversation's first turn finds nothing anywhere: what offloading costs. Between a conversation's turns all others
take theirs, so the second turn is gone from the device and, where that is small, from host memory. Then the two engines
with a disk end and start again. Each answer's tokens are those of the engine without offloading, or the run fails.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.engine_side import EngineSide
from tests.bench.pairs import N_PAIRS, Row, table
from tests.vllm.engine import arguments, offloading
from tests.vllm.model import FIRST_BYTE, ModelSpec, make_model

KIB, MIB = 1 << 10, 1 << 20
BLOCK = 32
OFF, HOST, DISK, PEER = "off", "host", "host+disk", "vLLM"


LARGE = ModelSpec(n_layers=6, hidden=1024, n_heads=16, n_kv_heads=4, head=64, context=4096, std=0.02)


@dataclass(frozen=True)
class Plan:
    """Sizes. The default is a model of 215 MB whose prompts of 2,048 tokens are 24 MiB of KV each."""

    model: ModelSpec = LARGE
    n_first: int = 2048
    n_more: int = 64
    n_answer: int = 16
    n_conversations: int = N_PAIRS
    blocks_per_chunk: int = 4

    @property
    def token_nbytes(self) -> int:
        return self.model.n_layers * 2 * self.model.n_kv_heads * self.model.head * 4

    @property
    def turn_nbytes(self) -> int:
        return (self.n_first + self.n_more + 2 * self.n_answer) * self.token_nbytes


QUICK = Plan(ModelSpec(n_layers=2, hidden=256, n_heads=4, n_kv_heads=2, head=64, context=4096), 512, 128, 8, 3, 2)


def run(folder: Path, plan: Plan) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(dir=folder) as made, contextlib.ExitStack() as stack:
        where = Path(made)
        bench = _Bench(plan, where, make_model(where / "model", plan.model))
        bench.start(stack, OFF, HOST, DISK, PEER)
        first, second, third = bench.conversations()
        bench.warm_up()
        yield from bench.misses(first)
        yield from bench.hits(second)
        with contextlib.ExitStack() as again:
            bench.stop(DISK, PEER)
            bench.start(again, DISK, PEER)
            yield from bench.after_restart(third)


class _Bench:
    def __init__(self, plan: Plan, folder: Path, model: str) -> None:
        self._plan = plan
        self._folder = folder
        self._model = model
        self._sides: dict[str, EngineSide] = {}
        self._answers: dict[int, list[int]] = {}
        self._n_starts = 0

    # -- engines ------------------------------------------------------------------------------------------------

    def start(self, stack: contextlib.ExitStack, *names: str) -> None:
        """One after the other: each measures the memory that is free."""
        for name in names:
            self._n_starts += 1
            side = stack.enter_context(EngineSide(self._arguments(name), self._folder / f"{self._n_starts}.log"))
            side.ready()
            self._sides[name] = side

    def stop(self, *names: str) -> None:
        for name in names:
            self._sides.pop(name).close()

    def _arguments(self, name: str) -> dict[str, Any]:
        plan = self._plan
        n_blocks = (plan.n_first + plan.n_more) // BLOCK + 16
        return arguments(
            self._model,
            self._offloading(name),
            max_model_len=plan.n_first + plan.n_more + 2 * plan.n_answer,
            max_num_batched_tokens=plan.model.context,
            block_size=BLOCK,
            num_gpu_blocks_override=n_blocks,
            kv_cache_memory_bytes=n_blocks * BLOCK * plan.token_nbytes,
            max_num_seqs=2,
        )

    def _offloading(self, name: str) -> dict[str, Any] | None:
        plan = self._plan
        much, little = 2 * plan.n_conversations * plan.turn_nbytes, int(1.5 * plan.turn_nbytes)
        chunks: dict[str, Any] = {"blocks_per_chunk": plan.blocks_per_chunk}
        root = str(self._folder / f"root-{name}")
        if name == HOST:
            return offloading(cpu_bytes_to_use=much, **chunks)
        if name == DISK:
            tier: dict[str, Any] = {"type": "fs", "root_dir": root, "capacity": 2 * much, "min_free": 0}
            return offloading(cpu_bytes_to_use=little, secondary_tiers=[tier], **chunks)
        if name == PEER:
            tier = {"type": "fs", "root_dir": root, "n_read_threads": 4, "n_write_threads": 4}
            return offloading(
                "PeerTieringSpec", module="tests.bench.peer", cpu_bytes_to_use=little, secondary_tiers=[tier], **chunks
            )
        return None

    # -- prompts ------------------------------------------------------------------------------------------------

    def conversations(self) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        """Each conversation's first turn, its second, and its second again with another end."""
        plan, rng = self._plan, random.Random(7)

        def tokens(n: int) -> list[int]:
            return [rng.randrange(FIRST_BYTE, FIRST_BYTE + 256) for _ in range(n)]

        first = [tokens(plan.n_first) for _ in range(plan.n_conversations)]
        return first, [one + tokens(plan.n_more) for one in first], [one + tokens(plan.n_more) for one in first]

    def warm_up(self) -> None:
        """What an engine does once: pages touched, kernels chosen. A prompt that nothing later shares."""
        rng = random.Random(8)
        prompt = [rng.randrange(FIRST_BYTE, FIRST_BYTE + 256) for _ in range(self._plan.n_first)]
        for side in self._sides.values():
            side.ask(prompt, self._plan.n_answer)

    def ask(self, prompts: list[list[int]], *names: str) -> dict[str, list[dict[str, Any]]]:
        """Every prompt on each of these engines, the engines in another order each time."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for number, prompt in enumerate(prompts):
            turned = names[number % len(names) :] + names[: number % len(names)]
            answers = {name: self._sides[name].ask(prompt, self._plan.n_answer) for name in turned}
            if len({tuple(answer["tokens"]) for answer in answers.values()}) > 1:
                raise RuntimeError(f"prompt {number}: engines gave different tokens")
            for name, answer in answers.items():
                found[name].append(answer)
        return found

    # -- rows ---------------------------------------------------------------------------------------------------

    def misses(self, prompts: list[list[int]]) -> Iterator[Row]:
        found = self.ask(prompts, OFF, HOST, DISK, PEER)
        for name in (HOST, DISK, PEER):
            must = None if name == PEER else 0.97
            yield self._row(f"no reuse: {name} on against off", found, name, OFF, figure="total_s", must=must)

    def hits(self, prompts: list[list[int]]) -> Iterator[Row]:
        found = self.ask(prompts, OFF, HOST, DISK, PEER)
        yield self._row("second turn: host hit against recompute", found, HOST, OFF, must=1.0)
        yield self._row("second turn: disk hit against recompute", found, DISK, OFF, must=1.0)
        yield self._row("second turn: vLLM's disk hit against recompute", found, PEER, OFF)
        yield self._row("second turn: disk hit against vLLM's", found, DISK, PEER, must=1.0)
        yield self._row("second turn, whole answer: disk hit against vLLM's", found, DISK, PEER, figure="total_s")

    def after_restart(self, prompts: list[list[int]]) -> Iterator[Row]:
        """The disk alone is warm. What an engine does once falls on a prompt that is not counted."""
        self.warm_up()
        found = self.ask(prompts, OFF, DISK, PEER)
        yield self._row("after a restart: disk hit against recompute", found, DISK, OFF, must=1.0)
        yield self._row("after a restart: vLLM's disk hit against recompute", found, PEER, OFF)
        yield self._row("after a restart: disk hit against vLLM's", found, DISK, PEER, must=1.0)

    def _row(
        self, what: str, found: dict[str, list[dict[str, Any]]], ours: str, peer: str, *,
        figure: str = "ttft_s", must: float | None = None,
    ) -> Row:  # fmt: skip
        cached = [answer["cached"] for answer in found[ours]]
        return Row(
            "engine",
            f"{what} ({'TTFT' if figure == 'ttft_s' else 'whole answer'})",
            "s",
            [answer[figure] for answer in found[ours]],
            [answer[figure] for answer in found[peer]],
            peer,
            higher_is_better=False,
            must=must,
            note=f"{sum(cached) / len(cached):.0f} of {self._plan.n_first + self._plan.n_more} tokens from a cache",
        )


def main() -> None:
    plan = QUICK if "--quick" in sys.argv else Plan()
    began = time.monotonic()
    for row in run(Path(sys.argv[1]), plan):
        print(table([row]), f" [{row.note}; {time.monotonic() - began:.0f} s]", flush=True)


if __name__ == "__main__":
    main()
