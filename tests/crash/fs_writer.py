"""A process that stores as fast as it can and says what was acknowledged; the tests kill it.

Run as ``python -m tests.crash.fs_writer ROOT CAPACITY_CHUNKS FIRST STEP LAYOUT``. It keeps its chunks under its share
as a ledger would, oldest first. Lines on standard output: ``+ i`` after chunk i was acknowledged, ``- i`` *before* it
is deleted, ``ready`` once it writes, ``probe i STATUS`` for a chunk of the other process's.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import deque
from pathlib import Path

from tests.fs_kit import (
    CHARGE,
    capacity_for,
    chunk_of,
    context,
    first_batches,
    key_of,
    payload_of,
    scanned,
    slots,
    using,
)
from tierkv.tiers.fs import FSTier
from tierkv.types import Status

BATCH = 8
WRAP = 200
"""Chunk numbers come round again, so that two writers meet each other's."""


def say(*words: object) -> None:
    # One write a line: what the parent has read was acknowledged before the kill.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def number_of(key: bytes) -> int:
    return int(key.split(b"\0")[0].split()[1])


async def main(root: Path, n_chunks: int, first: int, step: int) -> None:
    tier = FSTier(root, capacity=capacity_for(n_chunks), min_free=0)
    await tier.open(context())
    held = deque(number_of(found.key) for found in await first_batches(tier))
    await scanned(tier)
    say("ready")
    views, n_written, seed = slots(BATCH), 0, random.Random(first)
    while True:
        while (len(held) + BATCH) * CHARGE > tier.share_nbytes() and held:
            gone = [held.popleft() for _ in range(min(BATCH, len(held)))]
            say(*(f"- {i}\n" for i in gone))
            await tier.delete([key_of(i) for i in gone])
        items = []
        for view in views:
            chunk = chunk_of(first + n_written % WRAP * step)
            view[: chunk.nbytes] = payload_of(chunk.key, chunk.nbytes)
            items.append((chunk, view))
            n_written += 1
        outcomes = await tier.write(items)
        stored = [number_of(o.key) for o in outcomes if o.ok]
        held += stored
        say(*(f"+ {i}\n" for i in stored))
        assert all(o.status in (Status.OK, Status.REFUSED) for o in outcomes), outcomes
        if not stored:
            await asyncio.sleep(0.02)
        other = (1 - first % 2) + 2 * seed.randrange(WRAP)
        (found,) = await tier.probe([key_of(other)])
        if found is not None:
            ((key, status),) = [(o.key, o.status) for o in await tier.read([(key_of(other), views[0])])]
            right = views[0] == payload_of(key, items[0][0].nbytes) + bytes(len(views[0]) - items[0][0].nbytes)
            say("probe", other, status.name if status is not Status.OK or right else "WRONG")


if __name__ == "__main__":
    with using(sys.argv[5]):
        asyncio.run(main(Path(sys.argv[1]), *map(int, sys.argv[2:5])))
