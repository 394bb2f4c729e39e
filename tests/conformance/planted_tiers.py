"""Tiers that break one rule each, planted in two sound ones: a dict, and a directory of files."""

from __future__ import annotations

import asyncio
import os
import time
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from tierkv.protocols import TierContext
from tierkv.types import Chunk, ChunkKey, Found, Outcome, Reason, Status


class Dict:
    """The sound one in memory: copies on the loop, since memory does not block."""

    name = "dict"

    def __init__(self, directory: Path) -> None:
        self.chunks: dict[ChunkKey, bytes] = {}
        self.is_open = False

    async def open(self, ctx: TierContext) -> None:
        self.is_open = True

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        self.opened()
        return [key in self.chunks for key in keys]

    async def read(self, items: Sequence[tuple[ChunkKey, memoryview]]) -> Sequence[Outcome]:
        self.opened()
        return [self.read_one(key, buffer) for key, buffer in items]

    def read_one(self, key: ChunkKey, buffer: memoryview) -> Outcome:
        data = self.chunks.get(key)
        if data is None:
            return Outcome(key, Status.MISSING)
        buffer[: len(data)] = data
        buffer[len(data) :] = bytes(len(buffer) - len(data))
        return Outcome(key, Status.OK)

    async def write(self, items: Sequence[tuple[Chunk, memoryview]]) -> Sequence[Outcome]:
        self.opened()
        for chunk, buffer in items:
            await self.write_one(chunk, buffer)
        return [Outcome(chunk.key, Status.OK) for chunk, _ in items]

    async def write_one(self, chunk: Chunk, buffer: memoryview) -> None:
        self.chunks[chunk.key] = bytes(buffer[: chunk.nbytes])

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        self.opened()
        for key in keys:
            self.chunks.pop(key, None)

    async def aclose(self) -> None:
        self.is_open = False

    def opened(self) -> None:
        if not self.is_open:
            raise RuntimeError("not open")


class DictDoor:
    def __init__(self, tier: Any) -> None:
        self.chunks: dict[ChunkKey, bytes] = tier.chunks

    def get(self, key: ChunkKey) -> bytes | None:
        data = self.chunks.get(key)
        return None if data is None else bytes(data)

    def set(self, chunk: Chunk, data: bytes) -> None:
        self.chunks[chunk.key] = data

    def corrupt(self, key: ChunkKey, change: Callable[[bytes], bytes]) -> None:
        self.chunks[key] = change(self.chunks[key])

    def remove(self, key: ChunkKey) -> None:
        del self.chunks[key]


class DropsLastByte(Dict):
    """Long chunks are stored one byte short."""

    async def write_one(self, chunk: Chunk, buffer: memoryview) -> None:
        self.chunks[chunk.key] = bytes(buffer[: min(chunk.nbytes, 4999)])


class StoresTheSlot(Dict):
    """The whole buffer is stored, with whatever lies behind the payload."""

    async def write_one(self, chunk: Chunk, buffer: memoryview) -> None:
        self.chunks[chunk.key] = bytes(buffer)


class LeavesPadding(Dict):
    """Bytes behind the chunk stay what they were: another's."""

    def read_one(self, key: ChunkKey, buffer: memoryview) -> Outcome:
        data = self.chunks.get(key)
        if data is None:
            return Outcome(key, Status.MISSING)
        buffer[: len(data)] = data
        return Outcome(key, Status.OK)


class AnswersOutOfOrder(Dict):
    """What is there first, what is missing last."""

    async def read(self, items: Sequence[tuple[ChunkKey, memoryview]]) -> Sequence[Outcome]:
        return sorted(await super().read(items), key=lambda outcome: not outcome.ok)


class AnswersHitsOnly(Dict):
    """No outcome for what is missing."""

    async def read(self, items: Sequence[tuple[ChunkKey, memoryview]]) -> Sequence[Outcome]:
        return [outcome for outcome in await super().read(items) if outcome.ok]


class KeepsTheBuffer(Dict):
    """The caller's memory is kept, not copied."""

    async def write_one(self, chunk: Chunk, buffer: memoryview) -> None:
        self.chunks[chunk.key] = buffer[: chunk.nbytes]  # type: ignore[assignment]


class LendsItsMemory(Dict):
    """Writes the caller's buffer over after the write, as if it were scratch."""

    async def write_one(self, chunk: Chunk, buffer: memoryview) -> None:
        await super().write_one(chunk, buffer)
        buffer[: chunk.nbytes] = bytes(chunk.nbytes)


class ServesAfterDelete(Dict):
    """Deletes are forgotten for every fourth key."""

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        await super().delete([key for key in keys if zlib.crc32(key) % 4])


class FailsOnAbsentDeletes(Dict):
    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            del self.chunks[key]


class WritesInTwoSteps(Dict):
    """The first half can be read while the second is on its way."""

    async def write_one(self, chunk: Chunk, buffer: memoryview) -> None:
        whole = bytes(buffer[: chunk.nbytes])
        self.chunks[chunk.key] = whole[: chunk.nbytes // 2] + bytes(chunk.nbytes - chunk.nbytes // 2)
        await asyncio.sleep(0)
        self.chunks[chunk.key] = whole


class NeverReplaces(Dict):
    """A key that is there stays as it is."""

    async def write_one(self, chunk: Chunk, buffer: memoryview) -> None:
        if chunk.key not in self.chunks:
            await super().write_one(chunk, buffer)


class FoldsKeys(Dict):
    """Keys that differ in trailing zeros are one, as in a C string."""

    @staticmethod
    def fold(key: ChunkKey) -> ChunkKey:
        return ChunkKey(key.rstrip(b"\0"))

    async def write_one(self, chunk: Chunk, buffer: memoryview) -> None:
        await super().write_one(chunk._replace(key=self.fold(chunk.key)), buffer)

    def read_one(self, key: ChunkKey, buffer: memoryview) -> Outcome:
        return super().read_one(self.fold(key), buffer)._replace(key=key)

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return await super().contains([*map(self.fold, keys)])

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        await super().delete([*map(self.fold, keys)])


class CutsKeys(FoldsKeys):
    """Of a long key it keeps the first bytes."""

    @staticmethod
    def fold(key: ChunkKey) -> ChunkKey:
        return ChunkKey(key[:40])


class KeepsTheEndsOfKeys(FoldsKeys):
    """Of a long key it keeps the last bytes."""

    @staticmethod
    def fold(key: ChunkKey) -> ChunkKey:
        return ChunkKey(key[-40:])


class ReadsPastTheBuffer(Dict):
    """A slot's worth is written whatever the buffer's length: into the neighbour's bytes."""

    def read_one(self, key: ChunkKey, buffer: memoryview) -> Outcome:
        whole = buffer.obj
        outcome = super().read_one(key, buffer)
        if outcome.ok and len(buffer) == 5000 and hasattr(whole, "find"):
            at = whole.find(bytes(buffer[:64]))
            memoryview(whole)[at + 5000 : at + 5004] = b"over"
        return outcome


class ServesWhenClosed(Dict):
    def opened(self) -> None:
        pass


class BlocksTheLoop(Dict):
    """A sleep, or a slow disk: on the loop's own thread."""

    async def write_one(self, chunk: Chunk, buffer: memoryview) -> None:
        time.sleep(0.001)  # noqa: ASYNC251 - that is the fault
        await super().write_one(chunk, buffer)


class BlocksTheLoopWithFiles(Dict):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory

    async def write_one(self, chunk: Chunk, buffer: memoryview) -> None:
        (self.directory / "journal").write_bytes(buffer)
        await super().write_one(chunk, buffer)


class WorksInTheConstructor(Dict):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        if directory.exists():
            (directory / "made").touch()


class LeaksADescriptor(Dict):
    """One at each open."""

    opened_fds: list[int] = []  # noqa: RUF012 - so that the test can close them

    async def open(self, ctx: TierContext) -> None:
        await super().open(ctx)
        self.opened_fds.append(os.open("/", os.O_RDONLY))


class LeaksATask(Dict):
    async def open(self, ctx: TierContext) -> None:
        await super().open(ctx)
        self.task = asyncio.create_task(asyncio.sleep(3600))


class FailsToCloseTwice(Dict):
    async def aclose(self) -> None:
        self.opened()
        await super().aclose()


class Bounded(Dict):
    """The sound one with a bound."""

    n_over = 0

    async def open(self, ctx: TierContext) -> None:
        await super().open(ctx)
        self.limit_nbytes = ctx.capacity_nbytes

    def share_nbytes(self) -> int:
        return self.limit_nbytes

    async def write(self, items: Sequence[tuple[Chunk, memoryview]]) -> Sequence[Outcome]:
        self.opened()
        outcomes = []
        for chunk, buffer in items:
            used = sum(map(len, self.chunks.values())) - len(self.chunks.get(chunk.key, b""))
            if used + chunk.nbytes > self.limit_nbytes + self.n_over:
                outcomes.append(self.full(chunk))
            else:
                await self.write_one(chunk, buffer)
                outcomes.append(Outcome(chunk.key, Status.OK))
        return outcomes

    def full(self, chunk: Chunk) -> Outcome:
        return Outcome(chunk.key, Status.REFUSED, Reason.FULL)


class OverItsBound(Bounded):
    """Off by one chunk."""

    n_over = 5000


class FailsWhenFull(Bounded):
    """A full tier is no broken one."""

    def full(self, chunk: Chunk) -> Outcome:
        return Outcome(chunk.key, Status.FAILED, Reason.NO_SPACE)


class EvictsByItself(Bounded):
    """Decides who leaves, which is the policy's business."""

    def full(self, chunk: Chunk) -> Outcome:
        del self.chunks[next(iter(self.chunks))]
        return super().full(chunk)


class Files(Dict):
    """The sound persistent one: a file a chunk, key and checksum in front, written aside and renamed, on threads."""

    name = "files"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.root = directory

    async def open(self, ctx: TierContext) -> None:
        await super().open(ctx)
        self.folder = self.root / ctx.namespace.hex()
        await asyncio.to_thread(self.folder.mkdir, exist_ok=True)
        self.closed = asyncio.Event()

    def path(self, key: ChunkKey) -> Path:
        return self.folder / key.hex()

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        self.opened()
        return await asyncio.to_thread(lambda: [self.path(key).exists() for key in keys])

    async def read(self, items: Sequence[tuple[ChunkKey, memoryview]]) -> Sequence[Outcome]:
        self.opened()
        return await asyncio.to_thread(lambda: [self.read_one(key, buffer) for key, buffer in items])

    def read_one(self, key: ChunkKey, buffer: memoryview) -> Outcome:
        try:
            record = self.path(key).read_bytes()
        except FileNotFoundError:
            return Outcome(key, Status.MISSING)
        data = self.verified(key, record)
        if data is None:
            self.path(key).unlink()
            return Outcome(key, Status.CORRUPT)
        buffer[: len(data)] = data
        buffer[len(data) :] = bytes(len(buffer) - len(data))
        return Outcome(key, Status.OK)

    def verified(self, key: ChunkKey, record: bytes) -> bytes | None:
        data = record[4:]
        return data if record[:4] == self.checksum(key, data) else None

    def checksum(self, key: ChunkKey, data: bytes) -> bytes:
        return zlib.crc32(data, zlib.crc32(key + b"key")).to_bytes(4, "little")

    async def write(self, items: Sequence[tuple[Chunk, memoryview]]) -> Sequence[Outcome]:
        self.opened()

        def write() -> None:
            for chunk, buffer in items:
                data = bytes(buffer[: chunk.nbytes])
                aside = self.path(chunk.key).with_suffix(".part")
                aside.write_bytes(self.checksum(chunk.key, data) + data)
                aside.rename(self.path(chunk.key))

        # A cancelled caller does not stop the thread; what it writes must not meet the next write of the key.
        await asyncio.shield(asyncio.to_thread(write))
        return [Outcome(chunk.key, Status.OK) for chunk, _ in items]

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        self.opened()
        for key in keys:
            await asyncio.to_thread(self.path(key).unlink, missing_ok=True)

    async def aclose(self) -> None:
        await super().aclose()
        if hasattr(self, "closed"):
            self.closed.set()

    @property
    def writable(self) -> bool:
        return self.is_open

    def settled(self, key: ChunkKey) -> bool:
        return False

    def owns(self, key: ChunkKey) -> bool:
        return self.path(key).exists()

    async def found(self, keys: Sequence[ChunkKey]) -> list[Found | None]:
        there = await self.contains(keys)
        return [Found(key, 1 << 13) if is_there else None for key, is_there in zip(keys, there, strict=True)]

    async def scan(self) -> AsyncIterator[Sequence[Found]]:
        names = await asyncio.to_thread(lambda: sorted(os.listdir(self.folder)))
        yield [Found(ChunkKey(bytes.fromhex(name)), 1 << 13) for name in names if "." not in name]
        await self.closed.wait()

    async def probe(self, keys: Sequence[ChunkKey]) -> Sequence[Found | None]:
        return await self.found(keys)

    async def save_order(self, chunks: Sequence[Chunk]) -> None:
        pass


class FilesDoor:
    def __init__(self, tier: Any) -> None:
        self.tier: Files = tier

    def get(self, key: ChunkKey) -> bytes | None:
        path = self.tier.path(key)
        return path.read_bytes()[4:] if path.exists() else None

    def set(self, chunk: Chunk, data: bytes) -> None:
        self.tier.path(chunk.key).write_bytes(self.tier.checksum(chunk.key, data) + data)

    def corrupt(self, key: ChunkKey, change: Callable[[bytes], bytes]) -> None:
        self.tier.path(key).write_bytes(change(self.tier.path(key).read_bytes()))

    def remove(self, key: ChunkKey) -> None:
        self.tier.path(key).unlink()


class NoChecksum(Files):
    """What lies there is served."""

    def verified(self, key: ChunkKey, record: bytes) -> bytes | None:
        return record[4:]


class OwnsForEver(Files):
    """What was deleted passes for its own."""

    def owns(self, key: ChunkKey) -> bool:
        return True


class OwnsWhatItWrote(Files):
    """What it wrote in an earlier run is nobody's."""

    async def write(self, items: Sequence[tuple[Chunk, memoryview]]) -> Sequence[Outcome]:
        self.written = {*getattr(self, "written", ()), *(chunk.key for chunk, _ in items)}
        return await super().write(items)

    def owns(self, key: ChunkKey) -> bool:
        return key in getattr(self, "written", ()) and super().owns(key)


class AcceptsTruncated(Files):
    """An empty record is taken for an empty chunk."""

    def verified(self, key: ChunkKey, record: bytes) -> bytes | None:
        return super().verified(key, record) if record else b""


class KeyNotChecked(Files):
    """The checksum covers the payload only: another chunk's record passes for this one's."""

    def checksum(self, key: ChunkKey, data: bytes) -> bytes:
        return zlib.crc32(data).to_bytes(4, "little")


class KeepsTheDamaged(Files):
    """Damage is noticed, and met again at the next read."""

    def read_one(self, key: ChunkKey, buffer: memoryview) -> Outcome:
        record = self.path(key).read_bytes() if self.path(key).exists() else None
        if record is not None and self.verified(key, record) is None:
            return Outcome(key, Status.CORRUPT)
        return super().read_one(key, buffer)


class RaisesOnDamage(Files):
    def read_one(self, key: ChunkKey, buffer: memoryview) -> Outcome:
        outcome = super().read_one(key, buffer)
        return outcome._replace(status=Status.FAILED) if outcome.status is Status.CORRUPT else outcome


class SharesNamespaces(Files):
    """One directory for all."""

    async def open(self, ctx: TierContext) -> None:
        await super().open(ctx._replace(namespace=b"all"))


class ScansTwice(Files):
    """Every chunk is announced again."""

    async def scan(self) -> AsyncIterator[Sequence[Found]]:
        async for batch in super().scan():
            yield batch
            yield batch


class ScanNeverEnds(Files):
    async def scan(self) -> AsyncIterator[Sequence[Found]]:
        async for batch in super().scan():
            yield batch
            await asyncio.sleep(3600)


class ProbesHitsOnly(Files):
    async def probe(self, keys: Sequence[ChunkKey]) -> Sequence[Found | None]:
        return [found for found in await self.found(keys) if found is not None]


class LosesAtClose(Files):
    """What was written since it was opened is gone after a clean close."""

    async def aclose(self) -> None:
        if self.is_open:
            for name in await asyncio.to_thread(os.listdir, self.folder):
                await asyncio.to_thread(os.remove, self.folder / name)
        await super().aclose()


class Unlisted(Files):
    """A sound one that cannot say what it holds, and so starts without."""

    scan = owns = None  # type: ignore[assignment]

    async def open(self, ctx: TierContext) -> None:
        await super().open(ctx)
        await asyncio.to_thread(self.clear)

    def clear(self) -> None:
        for name in os.listdir(self.folder):
            os.remove(self.folder / name)


class StartsWithWhatLies(Unlisted):
    """What an earlier run left is there, and nobody counts it."""

    def clear(self) -> None:
        pass


class ClearsAtClose(Unlisted):
    """Tidies up behind itself, which a kill does not."""

    async def open(self, ctx: TierContext) -> None:
        await Files.open(self, ctx)

    async def aclose(self) -> None:
        if self.is_open:
            await asyncio.to_thread(self.clear)
        await super().aclose()


class ForgetsWhatLies(Unlisted):
    """Starts with an empty index and leaves the files."""

    async def open(self, ctx: TierContext) -> None:
        await Files.open(self, ctx)
        self.written: set[ChunkKey] = set()

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        there = await super().contains(keys)
        return [is_there and key in self.written for key, is_there in zip(keys, there, strict=True)]

    def read_one(self, key: ChunkKey, buffer: memoryview) -> Outcome:
        return super().read_one(key, buffer) if key in self.written else Outcome(key, Status.MISSING)

    async def write(self, items: Sequence[tuple[Chunk, memoryview]]) -> Sequence[Outcome]:
        outcomes = await super().write(items)
        self.written |= {chunk.key for chunk, _ in items}
        return outcomes
