"""What a tier promises by having a capability, or by claiming to verify; each function is one rule."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from tierkv.testing._keys import payload
from tierkv.testing._rules import require
from tierkv.testing._tier_bench import Bench, check_bytes, scanned, until, writable
from tierkv.types import Chunk, ChunkKey, Status

_ABSENT = ChunkKey(b"never written")


async def charges_cover_what_is_stored(bench: Bench) -> None:
    """Charging."""
    async with bench.opened() as tier:
        longest = bench.settings.chunk_nbytes
        charges = [tier.charge_nbytes(nbytes) for nbytes in range(1, longest + 1, max(1, longest // 50))]
        require(charges == sorted(charges), "a longer chunk is charged no less", charges)
        require(tier.charge_nbytes(longest) >= longest, "a chunk is charged its payload at least")
        require(tier.charge_nbytes(longest) == tier.charge_nbytes(longest), "a charge is pure")


async def a_bound_is_kept(bench: Bench) -> None:
    """Bounded: it refuses what does not fit, loses nothing over it, and takes chunks again once there is room."""
    async with bench.opened(bench.context(capacity_nbytes=32 * bench.stride_nbytes)) as tier:
        share = tier.share_nbytes()
        other = await asyncio.to_thread(tier.share_nbytes)
        require(isinstance(share, int) and share > 0, "a share is bytes, above 0 while open", share)
        require(other == share, "a share can be asked for from any thread", share, other)
        nbytes = bench.settings.chunk_nbytes
        charge = tier.charge_nbytes(nbytes) if hasattr(tier, "charge_nbytes") else nbytes
        chunks = [Chunk(ChunkKey(b"fill %d" % i), nbytes=nbytes) for i in range(share // charge + 2)]
        taken = []
        for chunk in chunks:
            (outcome,) = await bench.offer(tier, chunk)
            require(outcome.status in (Status.OK, Status.REFUSED), "a full tier refuses", outcome)
            if outcome.ok:
                taken.append(chunk)
            else:
                await bench.expect_gone(tier, chunk)
        await bench.expect(tier, *taken)
        require(taken and len(taken) * charge <= tier.share_nbytes(), "a tier holds no more than its share", len(taken))
        (again,) = await bench.offer(tier, taken[0], edition=1)
        await bench.expect(tier, taken[0], edition=int(again.ok))
        await tier.delete([taken[1].key])
        await bench.write(tier, taken[1], edition=2)
        await bench.expect(tier, taken[1], edition=2)


async def slots_are_memory(bench: Bench) -> None:
    """HostTier."""
    async with bench.opened() as tier:
        n = min(tier.n_slots, 8)
        require(n >= 1, "an open host tier has slots", tier.n_slots)
        views = [tier.slot_view(slot) for slot in range(n)]
        for slot, view in enumerate(views):
            require(len(view) == bench.stride_nbytes and not view.readonly, "a slot is stride_nbytes to write into")
            view[:] = bytes([slot + 1]) * len(view)
        for slot, view in enumerate(views):
            require(view == bytes([slot + 1]) * len(view), "slots do not overlap", slot)
            require(tier.slot_view(slot) == view, "a slot stays where it is", slot)
        for outside in (-1, tier.n_slots):
            try:
                tier.slot_view(outside)
            except IndexError:
                continue
            require(False, "a slot outside range(n_slots) is an IndexError", outside)


async def what_vanished_is_missing(bench: Bench) -> None:
    """A chunk that was taken away behind the tier's back is a miss, not an error, and can be written again."""
    async with bench.opened() as tier:
        await bench.write(tier, *bench.chunks[:4])
        bench.raw(tier).remove(bench.chunks[1].key)
        ((status, _),) = await bench.read(tier, (bench.chunks[1].key, bench.stride_nbytes))
        require(status is Status.MISSING, "what has vanished reads as MISSING", status)
        await bench.expect_gone(tier, bench.chunks[1])
        await tier.delete([bench.chunks[1].key])
        await bench.write(tier, bench.chunks[1], edition=1)
        await bench.expect(tier, bench.chunks[1], edition=1)
        await bench.expect(tier, bench.chunks[0], bench.chunks[2])


def _damages(stranger: bytes) -> dict[str, Callable[[bytes], bytes]]:
    def flipped(place: float) -> Callable[[bytes], bytes]:
        def flip(record: bytes) -> bytes:
            at = int(place * (len(record) - 1))
            return record[:at] + bytes([record[at] ^ 0x40]) + record[at + 1 :]

        return flip

    return {
        **{f"a byte flipped at {place:.0%}": flipped(place) for place in (0.0, 0.01, 0.2, 0.55, 0.8, 1.0)},
        "one byte short": lambda record: record[:-1],
        "cut in half": lambda record: record[: len(record) // 2],
        "emptied": lambda _: b"",
        "zeroed": lambda record: bytes(len(record)),
        "garbage behind it": lambda record: record + b"garbage",
        "another chunk's record": lambda _: stranger,
    }


async def damage_is_never_served(bench: Bench) -> None:
    """Verifying tiers: whatever happened to the record, a read gives the right bytes or a miss; then it is gone."""
    chunk, stranger = bench.chunks[0], bench.chunks[5]
    async with bench.opened() as tier:
        raw = bench.raw(tier)
        await bench.write(tier, stranger)
        record: list[bytes] = []

        def copy(data: bytes) -> bytes:
            record.append(data)
            return data

        raw.corrupt(stranger.key, copy)
        for edition, (name, change) in enumerate(_damages(record[0]).items()):
            await bench.write(tier, chunk, edition=edition)
            raw.corrupt(chunk.key, change)
            ((status, data),) = await bench.read(tier, (chunk.key, bench.stride_nbytes))
            if status is Status.OK:
                right = payload(chunk.key, chunk.nbytes, edition)
                require(data[: chunk.nbytes] == right, f"{name}: damage is not served as if it were whole")
                check_bytes(chunk, data, edition)
                continue
            require(status in (Status.CORRUPT, Status.MISSING), f"{name}: damage is CORRUPT or MISSING", status)
            await bench.expect_gone(tier, chunk)
        await bench.write(tier, chunk, edition=99)
        await bench.expect(tier, chunk, edition=99)
        await bench.expect(tier, stranger)


async def what_cannot_be_scanned_starts_empty(bench: Bench) -> None:
    """Tiers that are no ScanTier: what an earlier run left is nowhere, else it lies there and nobody counts it."""
    async with bench.opened() as tier:
        await bench.write(tier, *bench.chunks)
        as_killed = bench.copied("as a kill leaves it")
    for earlier in (bench, as_killed):
        async with earlier.opened() as tier:
            keys = [chunk.key for chunk in earlier.chunks]
            there = list(await tier.contains(keys))
            require(not any(there), "a tier that cannot be scanned starts empty", there)
            await earlier.expect_gone(tier, *earlier.chunks)
            if earlier.settings.raw is not None:
                lies = [key for key in keys if earlier.raw(tier).get(key) is not None]
                require(not lies, "a tier that cannot be scanned starts empty, and so does its medium", lies)
            await earlier.write(tier, *earlier.chunks[:2], edition=1)
            await earlier.expect(tier, *earlier.chunks[:2], edition=1)


async def chunks_outlive_their_tier(bench: Bench) -> None:
    """ScanTier: what was acknowledged is announced, once, by the next tier over the same medium, and read there."""
    async with bench.opened() as tier:
        await bench.write(tier, *bench.chunks)
        await tier.delete([chunk.key for chunk in bench.chunks[::4]])
        stay = [chunk for i, chunk in enumerate(bench.chunks) if i % 4]
        order = stay[::-1]
        await tier.save_order(order)
    async with bench.opened() as tier, scanned(tier) as found:
        keys = {chunk.key for chunk in stay}
        await until(lambda: keys <= {item.key for item in found}, "a scan announces every chunk that is there")
        announced = [item.key for item in found]
        require(sorted(announced) == sorted(keys), "a scan announces what is there, each once", announced)
        known = {chunk.key: chunk for chunk in stay}
        for item in found:
            require(item.owned and item.charge_nbytes >= known[item.key].nbytes, "a tier owns what it wrote", item)
            require(item.chunk in (None, known[item.key]), "a record that is told is the one that was written", item)
        if all(item.chunk is not None for item in found):
            require(
                announced == [chunk.key for chunk in order], "a saved order is the order of the next scan", announced
            )
        await bench.expect(tier, *stay)
        await bench.expect_gone(tier, *bench.chunks[::4])


async def a_probe_finds_what_a_scan_has_not(bench: Bench) -> None:
    """ScanTier: a single key can be asked for at any time after opening."""
    async with bench.opened() as tier:
        await bench.write(tier, *bench.chunks[:3])
    tier = bench.settings.factory(bench.directory)
    try:
        await tier.open(bench.context())
        wanted = [bench.chunks[2].key, _ABSENT, bench.chunks[0].key]
        answers = await tier.probe(wanted)  # type: ignore[attr-defined]
        found = [None if answer is None else answer.key for answer in answers]
        require(found == [wanted[0], None, wanted[2]], "a probe answers per key, in order", found)
        require(isinstance(tier.settled(_ABSENT), bool), "settled() answers True or False")  # type: ignore[attr-defined]
        await writable(tier)
        await bench.expect(tier, *bench.chunks[:3])
    finally:
        await tier.aclose()


async def what_is_owned_is_there(bench: Bench) -> None:
    """Owning: a chunk is owned from its write, or from when it was announced, until it was deleted."""
    gone, stay = bench.chunks[0], bench.chunks[1]
    async with bench.opened() as tier:
        await bench.write(tier, gone, stay)
        _expect_owned(tier, {gone: True, stay: True})
        await tier.delete([gone.key])
        _expect_owned(tier, {gone: False, stay: True})
    async with bench.opened() as tier, scanned(tier) as found:
        await until(lambda: stay.key in {item.key for item in found}, "a scan announces every chunk that is there")
        _expect_owned(tier, {gone: False, stay: True})


def _expect_owned(tier: object, expected: Mapping[Chunk, bool]) -> None:
    owned = {chunk: tier.owns(chunk.key) for chunk in expected}  # type: ignore[attr-defined]
    require(owned == expected, "owns() says what is there", owned)


async def a_scan_ends_with_its_tier(bench: Bench) -> None:
    """ScanTier: who listens for later news is not left waiting when the tier closes."""
    async with bench.opened() as tier:
        await bench.write(tier, bench.chunks[0])

        async def listen() -> None:
            async for _ in tier.scan():
                pass

        listener = asyncio.create_task(listen())
        await asyncio.sleep(0)
    try:
        await until(listener.done, "scan() ends when its tier closes")
    finally:
        listener.cancel()
        await asyncio.gather(listener, return_exceptions=True)


async def namespaces_are_apart(bench: Bench) -> None:
    """ScanTier: keys mean something within a namespace only, also where two share a medium."""
    chunks = bench.chunks[:3]
    await _in_namespace(bench, b"one", lambda tier: bench.write(tier, *chunks))
    await _in_namespace(bench, b"two", lambda tier: bench.expect_gone(tier, *chunks))
    await _in_namespace(bench, b"two", lambda tier: bench.write(tier, chunks[0], edition=2))
    await _in_namespace(bench, b"one", lambda tier: bench.expect(tier, *chunks))
    await _in_namespace(bench, b"two", lambda tier: bench.expect(tier, chunks[0], edition=2))


async def _in_namespace(bench: Bench, namespace: bytes, act: Callable[[Any], Any]) -> None:
    async with bench.opened(bench.context(namespace=namespace)) as tier:
        await act(tier)
