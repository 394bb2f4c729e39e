"""Leases: chunks promoted to the primary and pinned there for as long as somebody reads them."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from tierkv._driver import Driver
from tierkv._ledger import GONE, READY, Entry
from tierkv.errors import PinError
from tierkv.types import Chunk, ChunkKey, PrefixHit


class Pins:
    """Promotes and holds on behalf of leases; what a lease knows of its cache.

    ``deadline_s`` bounds a lease's waiting for several rounds of transfers, each of which has a deadline of its own.
    """

    def __init__(self, driver: Driver, deadline_s: float = 60.0) -> None:
        self._driver = driver
        self._deadline_s = deadline_s

    def allowance(self, chunks: Sequence[Chunk]) -> int:
        """Slots that promotions for these chunks may take: a share stays free for stores, leases keep theirs."""
        hierarchy = self._driver.hierarchy
        ledger = hierarchy.primary
        n_slots = hierarchy.levels[0].plan.n_slots or 0
        reserve = max(1, n_slots // 8) if n_slots > 1 else 0
        present = (ledger.get(chunk.key) for chunk in chunks)
        n_mine = sum(entry is not None and entry.state is READY and not entry.holds for entry in present)
        return max(0, n_slots - reserve - ledger.n_held - ledger.n_pending - ledger.n_gone - n_mine)

    async def pin(self, chunks: Sequence[Chunk]) -> list[Entry]:
        """Promote and hold the leading chunks; those that are ready when it returns stay held.

        Where slots are held by copies to the level below, what did not fit is tried again as those end.
        """
        hierarchy = self._driver.hierarchy
        pinned: list[Entry] = []
        deadline = self._driver.clock() + self._deadline_s
        keys = [chunk.key for chunk in chunks]
        hierarchy.guard(keys)
        try:
            while len(pinned) < len(chunks):
                n_before = len(pinned)
                failed = not await self._pin_some(chunks[n_before:], pinned, deadline)
                stuck = len(pinned) == n_before
                # A chunk whose read has failed is not read again for the same asker: what is behind it is out of reach.
                if failed or self._driver.clock() >= deadline or (stuck and not hierarchy.primary_busy):
                    break
                if stuck:
                    await self._driver.change(deadline - self._driver.clock())
        except BaseException:
            self.unpin(pinned)
            raise
        finally:
            hierarchy.unguard(keys)
        hierarchy.access(chunks[: len(pinned)])
        return pinned

    async def _pin_some(self, chunks: Sequence[Chunk], pinned: list[Entry], deadline: float) -> bool:
        """Promote what fits now, wait for it, and append the entries that are ready and held to ``pinned``.

        False if one of them did not come.
        """
        hierarchy = self._driver.hierarchy
        entries = hierarchy.promote(chunks, limit=self.allowance(chunks))
        for entry in entries:
            hierarchy.hold(entry)
        self._driver.kick()
        n_ready = 0

        def decided() -> bool:
            nonlocal n_ready
            while n_ready < len(entries) and entries[n_ready].state is READY:
                n_ready += 1
            return n_ready == len(entries) or entries[n_ready].state is GONE

        try:
            await self._driver.until(decided, deadline - self._driver.clock())
        except BaseException:
            self.unpin(entries)
            raise
        self.unpin(entries[n_ready:])
        pinned += entries[:n_ready]
        return n_ready == len(entries)

    def unpin(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._driver.hierarchy.release(entry)
        self._driver.wake()
        self._driver.kick()

    def slot_view(self, entry: Entry) -> memoryview:
        return self._driver.primary.slot_view(entry.slot)


class Lease:
    """The leading chunks of a hit, in host memory and safe from eviction inside ``async with``.

    Made by :meth:`tierkv.TieredCache.lease`. Entering promotes what lies below and waits for it; what could not be
    brought (a file that had gone, no room, a deadline) shortens the lease, so look at ``n_tokens``.

    One that was entered and is forgotten gives its chunks back when it is collected, with a ``ResourceWarning`` -
    unless an array is still built on one of its views: then they stay pinned, since nobody said that those bytes are
    done with.
    """

    def __init__(self, pins: Pins, hit: PrefixHit) -> None:
        self._pins = pins
        self._hit = hit
        self._entries: list[Entry] | None = None
        """One for each leading chunk of the hit: twice the same where a key comes twice."""
        self._by_key: dict[ChunkKey, Entry] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._views: list[memoryview] = []

    @property
    def chunks(self) -> Sequence[Chunk]:
        """What is really here, a leading part of the hit."""
        return self._hit.chunks[: len(self._held())]

    @property
    def n_tokens(self) -> int:
        chunks = self.chunks
        return chunks[-1].end_token if chunks else 0

    @property
    def slots(self) -> Sequence[int]:
        """Primary slots of ``chunks``, for a device that copies from them."""
        return [entry.slot for entry in self._held()]

    def view(self, chunk: Chunk) -> memoryview:
        """Read-only bytes of one chunk, ``chunk.nbytes`` long, without a copy. Invalid once the lease ends.

        Raises:
            PinError: the lease has ended, or does not hold the chunk.
        """
        self._held()
        entry = self._by_key.get(chunk.key)
        if entry is None:
            raise PinError(f"the lease does not hold the chunk that ends at token {chunk.end_token}")
        view = self._pins.slot_view(entry)[: entry.nbytes].toreadonly()
        self._views.append(view)
        return view

    async def __aenter__(self) -> Self:
        if self._entries is not None:
            raise PinError("a lease is entered once")
        self._loop = asyncio.get_running_loop()
        self._entries = await self._pins.pin(self._hit.chunks)
        self._by_key = {entry.key: entry for entry in self._entries}
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entries = self._held()
        self._release_views()  # somebody's array may still be built on one; then it is theirs to let go of
        self._pins.unpin(entries)
        self._entries = None
        self._hit = PrefixHit((), (), 0, self._hit.stop)

    def __del__(self) -> None:
        entries: list[Entry] | None = self.__dict__.get("_entries")
        if not entries:
            return
        warnings.warn(f"a lease of {len(entries)} chunks was never ended", ResourceWarning, source=self, stacklevel=2)
        if self._release_views() and self._loop is not None:
            # Collected in the middle of anything, on any thread: the loop's is the one that may touch the books.
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the cache with it
                self._loop.call_soon_threadsafe(self._pins.unpin, entries)

    def _release_views(self) -> bool:
        """True if nothing is built on any of them."""
        n_in_use = 0
        for view in self._views:
            try:
                view.release()
            except BufferError:
                n_in_use += 1
        self._views.clear()
        return not n_in_use

    def _held(self) -> list[Entry]:
        if self._entries is None:
            raise PinError("the lease is not open: use `async with cache.lease(hit) as lease`")
        return self._entries
