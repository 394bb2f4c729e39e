"""What every tier promises; each function is one rule, tried on a tier of its own."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Any

from tierkv.testing._blocking import blocking_calls
from tierkv.testing._keys import payload
from tierkv.testing._leaks import no_leaked_tasks, no_leaks
from tierkv.testing._rules import require
from tierkv.testing._tier_bench import Bench, Slots, check_bytes
from tierkv.types import Chunk, ChunkKey, Status

_ABSENT = ChunkKey(b"never written")


async def constructors_do_no_io(bench: Bench) -> None:
    with no_leaks("a constructor", grace_s=0.0), blocking_calls() as seen:
        tier = bench.settings.factory(bench.directory)
    require(not seen and not os.listdir(bench.directory), "constructors do no I/O", *seen)
    require(tier.name and isinstance(tier.name, str), "a tier has a name", tier.name)
    require(tier.name == bench.settings.factory(bench.directory).name, "a tier's name is stable", tier.name)
    await tier.aclose()
    await tier.aclose()


async def closed_means_closed(bench: Bench) -> None:
    async with no_leaked_tasks("a closed tier"):
        async with bench.opened() as tier:
            await bench.write(tier, bench.chunks[0])
        await tier.aclose()
    view = memoryview(bytearray(bench.stride_nbytes))
    key = bench.chunks[0].key
    for verb, arguments in {"contains": [key], "read": [(key, view)], "write": [(bench.chunks[0], view)]}.items():
        try:
            answer = await getattr(tier, verb)(arguments)
        except Exception:  # noqa: BLE001, S112 - ClosedError from ours; any other says as much
            continue
        require(False, f"a closed tier raises from {verb}", answer)


async def a_cancelled_close_still_closes(bench: Bench) -> None:
    """The descriptors and threads are looked for when the loop has ended."""
    tier = bench.settings.factory(bench.directory)
    await tier.open(bench.context())
    closing = asyncio.create_task(tier.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with suppress(asyncio.CancelledError):
        await closing
    await tier.aclose()


async def batches_answer_per_key_in_order(bench: Bench) -> None:
    async with bench.opened() as tier:
        chunks = bench.chunks
        for nothing in (await tier.contains([]), await tier.read([]), await tier.write([])):
            require(len(nothing) == 0, "an empty batch has an empty answer", nothing)
        await tier.delete([])
        await bench.write(tier, *chunks)
        wanted = [chunk.key for chunk in reversed(chunks)]
        wanted[3:3] = [_ABSENT]
        there = list(await tier.contains(wanted))
        require(there == [key != _ABSENT for key in wanted], "contains answers in the order of the keys", there)
        answers = await bench.read(tier, *((key, bench.stride_nbytes) for key in wanted))
        require(answers.pop(3)[0] is Status.MISSING, "an absent key reads as MISSING among present ones")
        for chunk, (status, data) in zip(reversed(chunks), answers, strict=True):
            require(status is Status.OK, "every key of a batch is read", chunk, status)
            check_bytes(chunk, data, 0)


async def the_medium_holds_what_was_written(bench: Bench) -> None:
    async with bench.opened() as tier:
        await bench.write(tier, *bench.chunks)
        raw = bench.raw(tier)
        for chunk in bench.chunks:
            lies = raw.get(chunk.key)
            require(lies == payload(chunk.key, chunk.nbytes), "the medium holds the payload, and no more", chunk, lies)


async def what_lies_on_the_medium_is_read(bench: Bench) -> None:
    async with bench.opened() as tier:
        raw = bench.raw(tier)
        await bench.write(tier, bench.chunks[0], bench.chunks[1])
        with suppress(NotImplementedError):
            raw.set(bench.chunks[0], payload(bench.chunks[0].key, bench.chunks[0].nbytes, 7))
            await bench.expect(tier, bench.chunks[0], edition=7)
        await bench.expect(tier, bench.chunks[1])


async def buffers_are_the_callers(bench: Bench) -> None:
    """Any length from the chunk's to the slot's; the same key twice in one batch; memory is copied, not shared."""
    async with bench.opened() as tier:
        for chunk in bench.chunks[:5]:
            await bench.write(tier, chunk)
            lengths = sorted({chunk.nbytes, min(chunk.nbytes + 1, bench.stride_nbytes), bench.stride_nbytes})
            answers = await bench.read(tier, *((chunk.key, nbytes) for nbytes in [*lengths, chunk.nbytes]))
            for status, data in answers:
                require(status is Status.OK, "a buffer as long as the chunk is enough", chunk, status)
                check_bytes(chunk, data, 0)
        slots = Slots(1, bench.stride_nbytes)
        await tier.read([(bench.chunks[0].key, slots.views[0])])
        slots.views[0][:] = bytes(bench.stride_nbytes)
        await bench.expect(tier, bench.chunks[0])


async def a_later_write_replaces(bench: Bench) -> None:
    """Also by a shorter and by a longer chunk; nothing of the earlier bytes shows."""
    async with bench.opened() as tier:
        longest = bench.settings.chunk_nbytes
        for edition, nbytes in enumerate([longest, max(1, longest // 3), longest, 1]):
            chunk = Chunk(ChunkKey(b"rewritten"), nbytes=nbytes)
            await bench.write(tier, chunk, bench.chunks[1], edition=edition)
            await bench.expect(tier, chunk, bench.chunks[1], edition=edition)
            if bench.settings.raw is not None:
                lies = bench.raw(tier).get(chunk.key)
                require(lies == payload(chunk.key, nbytes, edition), "a later write replaces the bytes", chunk)


async def deleted_chunks_are_gone(bench: Bench) -> None:
    async with bench.opened() as tier:
        await bench.write(tier, *bench.chunks)
        gone, stay = bench.chunks[::2], bench.chunks[1::2]
        await tier.delete([*(chunk.key for chunk in gone), _ABSENT])
        await bench.expect_gone(tier, *gone)
        await bench.expect(tier, *stay)
        if bench.settings.raw is not None:
            left = [chunk.key for chunk in gone if bench.raw(tier).get(chunk.key) is not None]
            require(not left, "delete frees the medium", *left)
        await tier.delete([chunk.key for chunk in gone])
        await bench.write(tier, *gone, edition=1)
        await bench.expect(tier, *gone, edition=1)


async def calls_may_overlap(bench: Bench) -> None:
    """Reads, writes and deletes of different keys at once, as a cache's lanes make them."""
    async with bench.opened() as tier:
        old, new, gone = bench.chunks[:5], bench.chunks[5:10], bench.chunks[10:]
        await bench.write(tier, *old, *gone)
        for _ in range(3):
            await asyncio.gather(
                *(bench.expect(tier, chunk) for chunk in old),
                *(bench.write(tier, chunk) for chunk in new),
                *(tier.delete([chunk.key]) for chunk in gone),
            )
            await bench.expect(tier, *old, *new)
            await bench.expect_gone(tier, *gone)
            await asyncio.gather(tier.delete([chunk.key for chunk in new]), bench.write(tier, *gone))


async def a_write_shows_whole_or_not_at_all(bench: Bench) -> None:
    """A read that meets a write, at each turn of the loop, sees the earlier bytes, the later ones, or none."""
    chunk = bench.chunks[0]
    async with bench.opened() as tier:
        for n_turns in range(12):
            if n_turns % 2:
                await tier.delete([chunk.key])
            writing = asyncio.create_task(bench.write(tier, chunk, edition=n_turns))
            for _ in range(n_turns // 2):
                await asyncio.sleep(0)
            (there,) = await tier.contains([chunk.key])
            ((status, data),) = await bench.read(tier, (chunk.key, bench.stride_nbytes))
            if status is Status.OK:
                check_bytes(chunk, data, n_turns, n_turns - 1)
            require(status in (Status.OK, Status.MISSING), "a read beside a write is a hit or a miss", status)
            require(status is Status.OK or not there, "what is contained can be read", status)
            await writing
            await bench.expect(tier, chunk, edition=n_turns)


async def cancelled_calls_do_no_harm(bench: Bench) -> None:
    """What was cancelled half-way is whole or absent afterwards, and the tier goes on."""
    other, cancelled = bench.chunks[0], bench.chunks[1:5]
    async with bench.opened() as tier:
        await bench.write(tier, other)
        for n_turns, chunk in enumerate(cancelled):
            calls = [
                asyncio.create_task(bench.offer(tier, chunk)),
                asyncio.create_task(bench.read(tier, (other.key, bench.stride_nbytes))),
            ]
            for _ in range(n_turns):
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            await bench.expect(tier, other)
        for chunk in cancelled:
            ((status, data),) = await bench.read(tier, (chunk.key, bench.stride_nbytes))
            if status is Status.OK:
                check_bytes(chunk, data, 0)
        await bench.write(tier, other, edition=1)
        await bench.expect(tier, other, edition=1)


async def the_loop_is_never_blocked(bench: Bench) -> None:
    """No file or network call and no sleep on the loop's thread; the first round may import things."""
    async with bench.opened() as tier:
        for watched in (False, True):
            with blocking_calls() as seen:
                await _all_verbs(bench, tier)
            require(not watched or not seen, "calls that can block run on another thread", *seen)


async def _all_verbs(bench: Bench, tier: Any) -> None:
    await bench.write(tier, *bench.chunks[:4])
    await tier.contains([chunk.key for chunk in bench.chunks[:6]])
    await bench.expect(tier, *bench.chunks[:4])
    await tier.delete([chunk.key for chunk in bench.chunks[:4]])
