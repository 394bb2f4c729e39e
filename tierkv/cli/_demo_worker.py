"""The demo's worker process: a pretend model server that asks its cache first and checks every byte it gets.

Reads the plan and where to go on from its standard input, writes one message a line to its standard output, and ends
when its input does, so that it cannot outlive the demo.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence

from tierkv import Level, TieredCache
from tierkv.cli._demo_plan import Failed, Message, Opened, Plan, Stored, Turn, to_line
from tierkv.cli._workload import content
from tierkv.errors import TierKVError
from tierkv.policies import LRU
from tierkv.tiers.cpu import CPUTier
from tierkv.tiers.fs import FSTier
from tierkv.types import Event, EventKind, PrefixHit, Stop

_SCAN_PAUSE_S = 0.02
_DISK = 1
"""Index of the level below host memory."""


def main() -> int:
    """Serve until the workload or the input ends."""
    plan = Plan.from_json(sys.stdin.readline())
    last_turns: list[int] = json.loads(sys.stdin.readline())
    try:
        asyncio.run(_serve(plan, last_turns))
    except TierKVError as error:
        _send(Failed(str(error), usage=isinstance(error, ValueError)))
        return 1
    except OSError as error:
        # The machine's fault, not ours: a read-only or full disk, no descriptors left. Its own words say enough.
        _send(Failed(f"the cache could not open: {error}", usage=False))
        return 1
    except asyncio.CancelledError:
        return 1  # the demo is gone
    return 0


def _send(message: Message) -> None:
    """Synchronously and whole: what was sent before a SIGKILL is in the pipe, and in order."""
    line = memoryview(to_line(message))
    while line:
        line = line[os.write(1, line) :]


async def _serve(plan: Plan, last_turns: Sequence[int]) -> None:
    task = asyncio.current_task()
    assert task is not None
    # The demo writes nothing more, so that input becomes readable only at its end.
    asyncio.get_running_loop().add_reader(0, task.cancel)
    worker = Worker(plan)
    began = time.monotonic()
    async with worker.cache:
        _send(Opened(time.monotonic() - began))
        await worker.run(last_turns)
        await worker.cache.wait_idle()


class Worker:
    """Answers the workload's turns through one cache."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.memory = CPUTier(name="memory")
        self.disk = FSTier(plan.root_dir, name="disk")
        self.cache = TieredCache(
            chunker=plan.chunker(),
            levels=[
                Level(self.memory, policy=LRU(), capacity=plan.memory_nbytes),
                Level(self.disk, policy=LRU(), capacity=plan.disk_nbytes),
            ],
            chunk_nbytes=plan.chunk_nbytes,
            on_event=_on_event,
        )
        self._at_once = asyncio.Semaphore(plan.n_at_once)

    async def run(self, last_turns: Sequence[int]) -> None:
        """Ask the finished conversations of an earlier worker once more, then answer what is left.

        ``last_turns`` has the last turn that was answered, by session; -1 where none was.
        """
        n_turns, order = self.plan.workload.n_turns, list(self.plan.workload.order())
        async with asyncio.TaskGroup() as group:
            for session, turn in enumerate(last_turns):
                if turn >= 0:
                    group.create_task(self._again(turn, session))
        for turn in range(n_turns):
            async with asyncio.TaskGroup() as group:
                for _, session in (pair for pair in order if pair[0] == turn):
                    if turn > last_turns[session]:
                        group.create_task(self._answer(turn, session))
        if self.plan.damage:
            await self._find_damage()

    async def _again(self, turn: int, session: int) -> None:
        async with self._at_once:
            tokens = self.plan.workload.answered(turn, session)
            keys = [chunk.key.hex() for chunk in self.cache.chunks(tokens)]
            await self._use(turn, session, tokens, keys)

    async def _answer(self, turn: int, session: int) -> None:
        async with self._at_once:
            await self._use(turn, session, self.plan.workload.prompt(turn, session))
            # The model would compute the rest now; its KV cache is then what the keys say it is.
            tokens = self.plan.workload.answered(turn, session)
            places = [content(chunk.key, chunk.nbytes) for chunk in self.cache.chunks(tokens)]
            await self.cache.store(tokens, places)

    async def _use(self, turn: int, session: int, tokens: Sequence[int], keys: Sequence[str] = ()) -> None:
        """Bring what is cached of a prompt to host memory, compare every byte, and report."""
        hit = await self._lookup(tokens)
        n_wrong, nbytes = 0, 0
        async with self.cache.lease(hit) as lease:
            chunks = list(lease.chunks)
            for chunk in chunks:
                n_wrong += bytes(lease.view(chunk)) != content(chunk.key, chunk.nbytes)
                nbytes += chunk.nbytes
                await asyncio.sleep(0)  # others want the loop, too
            n_served = lease.n_tokens
        by_level = _by_level(hit, len(chunks))
        levels = [record._asdict() for record in self.cache.statistics().values()]
        _send(Turn(turn, session, len(tokens), n_served, len(chunks), nbytes, by_level, n_wrong, keys, levels))

    async def _lookup(self, tokens: Sequence[int]) -> PrefixHit:
        """Look up; a miss while the directory is still being scanned is asked again and not called a loss."""
        while True:
            scanned = self.disk.writable
            hit = await self.cache.lookup(tokens)
            if scanned or hit.stop is not Stop.MISS:
                return hit
            await asyncio.sleep(_SCAN_PAUSE_S)

    async def _find_damage(self) -> None:
        """Flip a bit of the system prompt's first chunk where it lies in host memory, and use it once more."""
        tokens = self.plan.workload.answered(0, 0)
        async with self.cache.lease(await self.cache.lookup(tokens)) as lease:
            whole = bytes(lease.view(lease.chunks[0]))
            for slot in range(self.memory.n_slots):
                view = self.memory.slot_view(slot)
                if view[: len(whole)] == whole:
                    view[0] ^= 1
        await self._use(0, 0, tokens)


def _by_level(hit: PrefixHit, n_chunks: int) -> list[int]:
    counts = [0, 0]
    for level in hit.levels[:n_chunks]:
        counts[level] += 1
    return counts


def _on_event(event: Event) -> None:
    if event.level == _DISK:
        _send(Stored(event.key.hex(), removed=event.kind is EventKind.REMOVED))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
