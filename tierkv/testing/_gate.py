"""A point that coroutines pass only when a test lets them, and at which the test sees them wait."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Final

_PATIENCE_S: Final = 60.0


class Gate:
    """Holds whoever comes to :meth:`wait` until it is opened, or lets them through one by one, first come first served.

    With it a test makes two calls overlap exactly as it wants to, without sleeping::

        gate = Gate()
        tier = FaultTier(MemoryTier(), Fault("read", Does.HANG, gate=gate))
        load = asyncio.create_task(cache.load(hit, buffers))
        await gate.arrived()          # the read has begun
        ...                           # whatever must happen meanwhile
        gate.open()

    Concurrency: one event loop. A waiter that is cancelled is not counted any more.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self.is_open = is_open
        self.n_passed = 0
        self._waiters: dict[asyncio.Future[None], Hashable] = {}
        self._change: asyncio.Event = asyncio.Event()

    @property
    def waiting(self) -> tuple[Hashable, ...]:
        """Labels of those who wait, first come first."""
        return tuple(self._waiters.values())

    @property
    def n_waiting(self) -> int:
        return len(self._waiters)

    async def wait(self, label: Hashable = None) -> None:
        """Return at once while the gate is open; else once it is opened, or :meth:`let` counts this waiter."""
        if not self.is_open:
            turn = asyncio.get_running_loop().create_future()
            self._waiters[turn] = label
            self._changed()
            try:
                await turn
            finally:
                self._waiters.pop(turn, None)
                self._changed()
        self.n_passed += 1

    def open(self) -> None:
        """Let everybody through who waits, and who comes until :meth:`close`."""
        self.is_open = True
        self.let(len(self._waiters))

    def close(self) -> None:
        """Hold whoever comes from now on."""
        self.is_open = False

    def let(self, n: int = 1) -> None:
        """Let the first ``n`` waiters through. Raises ValueError if fewer wait: a test should know."""
        if n > len(self._waiters):
            raise ValueError(f"{n} were to pass, but {len(self._waiters)} wait: {self.waiting}")
        for turn in list(self._waiters)[:n]:
            # Out of the list now, not when its task runs: whoever is let through does not wait any more.
            del self._waiters[turn]
            if not turn.done():
                turn.set_result(None)

    async def arrived(self, n: int = 1, timeout_s: float = _PATIENCE_S) -> None:
        """Wait until at least ``n`` wait. Raises TimeoutError with what waits, rather than hanging a test."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._waiters) < n:
                    self._change.clear()
                    await self._change.wait()
        except TimeoutError:
            msg = f"{n} were to come to the gate; after {timeout_s:g} s there are {len(self._waiters)}: {self.waiting}"
            raise TimeoutError(msg) from None

    def _changed(self) -> None:
        self._change.set()

    def __repr__(self) -> str:
        return f"<Gate {'open' if self.is_open else 'closed'}: {self.n_waiting} waiting, {self.n_passed} passed>"
