"""What the killed processes do until then: a :class:`~tierkv.TieredCache` over a small root, driven hard.

Chunk ``j`` of conversation ``c`` has a key, a length and bytes that follow from the two numbers alone, so whoever
finds a chunk, in whatever process, knows what it must be. A life says

- ``+ WHEN KEY`` when the disk level's stored event came, ``- WHEN KEY`` when its removed event came, before the file
  goes; what another owner wrote is left out;
- ``open WHEN`` before an open;
- ``ready CALLS DIRECTORIES`` when an open has ended: system calls of its own on the root, and directories found there;
- ``done`` when a life that waits for its end has nothing else to do;
- ``wrong KEY`` if a load gave other bytes than those that were stored.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from typing import Any, Final

from tests.crash.nursery import Diary
from tests.faults import Faults, Rule
from tests.fs_kit import LONGEST, NAMESPACE, _mount, context, payload_of, scanned, slots
from tests.patience import PATIENCE_S
from tierkv import Chunk, ChunkKey, Event, EventKind, Level, MemoryTier, TieredCache
from tierkv.policies import LRU
from tierkv.tiers._fs.pieces import LONG_NBYTES, PIECE_NBYTES
from tierkv.tiers._fs.store import Store
from tierkv.tiers.fs import FSTier

N_SLOTS: Final = 8
_STRIDE: Final = 3 * 4096
DEPTH: Final = 4
N_CONVERSATIONS: Final = 12


def nbytes_of(conversation: int, place: int) -> int:
    """Of different lengths, few of them whole pages."""
    return LONGEST - (conversation + 2 * place) % 5 * 1111


def chunk_at(conversation: int, place: int) -> Chunk:
    key = ChunkKey(b"c%d.%d" % (conversation, place) + b"\0" * 24)
    parent = ChunkKey(b"c%d.%d" % (conversation, place - 1) + b"\0" * 24) if place else None
    return Chunk(key, parent, 0, place + 1, nbytes_of(conversation, place))


def chunk_of_key(key: bytes) -> Chunk:
    conversation, place = key.rstrip(b"\0")[1:].split(b".")
    return chunk_at(int(conversation), int(place))


def content_of(chunk: Chunk) -> bytes:
    return payload_of(chunk.key, chunk.nbytes)


class Conversations:
    """A chunker of the above: tokens are a conversation's number, again and again."""

    chunk_nbytes = LONGEST

    def chunks(self, tokens: Sequence[int], *, extra: bytes = b"") -> Sequence[Chunk]:
        return [chunk_at(tokens[place], place) for place in range(len(tokens))]


class Life:
    """A cache on a root, and what is done with it."""

    def __init__(
        self, diary: Diary, root: str, capacity: int, counter: int, namespace: str = NAMESPACE.decode(), **settings: Any
    ) -> None:
        self._diary = diary
        self._root = root
        self.tier = FSTier(root, capacity=capacity, min_free=0, **settings)
        self._calls = Rule(Faults.attach(), counter)
        self._calls.only_here()  # not what a neighbour on the root does meanwhile
        self._n_before = self._calls.n_seen
        diary.say("open", time.monotonic_ns())
        self.cache = TieredCache(
            chunker=Conversations(),
            namespace=namespace.encode(),
            levels=[
                Level(MemoryTier(name="primary"), LRU(), capacity=N_SLOTS * _STRIDE),
                Level(self.tier, LRU(), capacity=None),
            ],
            on_event=self._on_event,
        )

    def _on_event(self, event: Event) -> None:
        # What another owner wrote is told of, too, but is that owner's to promise and to remove.
        stored, alone = event.kind is EventKind.STORED, not _mount(self.tier)._ownership.foreign_ids
        if event.level == 1 and (self.tier.owns(event.key) or (stored and alone)):
            self._diary.say("+" if stored else "-", time.monotonic_ns(), event.key.hex())

    async def ready(self) -> None:
        """Until the disk level takes writes."""
        await scanned(self.tier)
        n_calls = self._calls.n_seen - self._n_before
        self._diary.say("ready", n_calls, sum(1 for _ in os.walk(self._root)))

    async def store(self, conversation: int, depth: int = DEPTH) -> None:
        tokens = [conversation] * depth
        await self.cache.store(tokens, [bytearray(content_of(c)) for c in self.cache.chunks(tokens)])

    async def load(self, conversation: int, depth: int = DEPTH) -> None:
        hit = await self.cache.lookup([conversation] * depth)
        buffers = [bytearray(chunk.nbytes) for chunk in hit.chunks]
        n_arrived = await self.cache.load(hit, buffers)
        for chunk, buffer in list(zip(hit.chunks, buffers, strict=True))[:n_arrived]:
            if buffer != content_of(chunk):
                self._diary.say("wrong", chunk.key.hex())

    async def delete(self, conversation: int, depth: int = DEPTH) -> None:
        await self.cache.delete(self.cache.chunks([conversation] * depth))

    async def idle(self) -> None:
        await self.cache.wait_idle()


async def restless(diary: Diary, *, root: str, seed: int, part: int = 0, n_parts: int = 1, **settings: Any) -> None:
    """Several tasks store, load and delete at random; the cache closes now and then and opens again. Never ends.

    Of ``n_parts`` such lives on one root, each stores conversations of its own and loads everybody's.
    """
    rng = random.Random(seed)

    async def do(life: Life) -> None:
        for _ in range(rng.randrange(5, 60)):
            what, depth = rng.random(), rng.randint(1, DEPTH)
            conversation = rng.randrange(N_CONVERSATIONS)
            if what < 0.5:
                await life.store(conversation - conversation % n_parts + part, depth)
            elif what < 0.95:
                await life.load(conversation, depth)
            else:
                await life.delete(conversation - conversation % n_parts + part, depth)

    while True:
        life = Life(diary, root, **settings)
        async with life.cache:
            await life.ready()
            await asyncio.gather(*(do(life) for _ in range(3)))


async def hesitant(diary: Diary, **settings: Any) -> None:
    """As above, but a probe takes its time between what it sees on the disk and what it makes of it."""
    look, rng = Store.look, random.Random(settings["seed"])

    def slowly(self: Store, *asked: Any) -> Any:
        seen = look(self, *asked)
        time.sleep(rng.choice((0.0, 0.002, 0.008)))
        return seen

    setattr(Store, "look", slowly)  # noqa: B010 - for the rest of the process, which is a life's
    await restless(diary, **settings)


# -- scripts: the same system calls in the same order each time ----------------------------------------------------


async def storing(diary: Diary, *, root: str, **settings: Any) -> None:
    """A root is made; chunks are stored, evicted to make room, loaded and deleted; a clean close."""
    life = Life(diary, root, n_write_threads=1, n_read_threads=1, **settings)
    async with life.cache:
        await life.ready()
        for conversation in (1, 2, 3):
            await life.store(conversation, 3)
            await life.idle()
        await life.load(2, 3)
        await life.delete(2, 3)
        await life.idle()


async def staying(diary: Diary, *, root: str, conversations: Sequence[int], **settings: Any) -> None:
    """Some conversations are stored; then it waits to be killed."""
    life = Life(diary, root, **settings)
    async with life.cache:
        await life.ready()
        for conversation in conversations:
            await life.store(conversation)
        await life.idle()
        diary.say("done")
        await asyncio.Event().wait()


async def returning(diary: Diary, *, root: str, **settings: Any) -> None:
    """A root that another process left behind is opened, cleanly closed or not; what it holds is loaded; a store."""
    life = Life(diary, root, n_write_threads=1, n_read_threads=1, **settings)
    async with life.cache:
        await life.ready()
        for conversation in range(3):
            await life.load(conversation, 2)
        await life.store(9, 2)
        await life.idle()


async def adopting(diary: Diary, *, root: str, **settings: Any) -> None:
    """As above, and then the minute passes after which the files of all other dead processes are taken over."""
    late_s = 0.0
    life = Life(
        diary, root, n_write_threads=1, n_read_threads=1, clock=lambda: time.monotonic() + late_s, **settings
    )  # fmt: skip
    async with life.cache:
        await life.ready()
        mount = _mount(life.tier)
        mount.beat()
        late_s = 61.0
        mount.beat()
        await asyncio.to_thread(mount._scan_lane.wait_idle, PATIENCE_S)
        await life.store(9, 2)
        await life.idle()


_LONGEST: Final = LONG_NBYTES + PIECE_NBYTES // 4
LONG: Final = context(longest=_LONGEST, stride=_LONGEST)
"""What a tier of long chunks is opened for."""


def long_chunk(number: int) -> Chunk:
    """Of three pieces, the last of which does not end with a page."""
    return Chunk(ChunkKey(b"long %d" % number), nbytes=LONG.chunk_nbytes - 4096 * number - 5)


def long_chunk_of_key(key: bytes) -> Chunk:
    return long_chunk(int(key.split()[1]))


async def writing_long(diary: Diary, *, root: str, capacity: int, counter: int, **settings: Any) -> None:
    """A long chunk is stored and deleted, another is stored twice; with room for two, the second time where one was."""
    tier = FSTier(root, capacity=capacity, min_free=0, **settings)
    diary.say("open", time.monotonic_ns())
    await tier.open(LONG)
    await scanned(tier)
    diary.say("ready", 0, 0)
    (view,) = slots(1, LONG.stride_nbytes)
    for number in (0, 1, 1):
        chunk = long_chunk(number)
        view[: chunk.nbytes] = content_of(chunk)
        (outcome,) = await tier.write([(chunk, view)])
        assert outcome.ok, outcome
        diary.say("+", time.monotonic_ns(), chunk.key.hex())
        if not number:
            diary.say("-", time.monotonic_ns(), chunk.key.hex())
            await tier.delete([chunk.key])
    await tier.aclose()
