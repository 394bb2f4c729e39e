"""A tier that misbehaves when it is told to, around any tier."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple, Self, cast

from tierkv.protocols import Bounded, Charging, HostTier, Owning, ScanTier, Tier, TierContext
from tierkv.testing._gate import Gate
from tierkv.types import Chunk, ChunkKey, Found, Outcome, Reason, Status

VERBS: Final = ("open", "contains", "read", "write", "delete", "aclose", "probe", "save_order")


class Does(Enum):
    """What a fault does to a call."""

    SLOW = "slow"
    """Waits ``delay_s``, then does what it should."""
    HANG = "hang"
    """Waits at ``gate``, then does what it should, late: as a thread does whose waiter has long gone."""
    RAISE = "raise"
    """Raises ``error`` and does nothing."""
    RAISE_AFTER = "raise_after"
    """Does what it should, and raises ``error`` all the same."""
    FAIL = "fail"
    """Does nothing, and answers FAILED for every key (read, write); raises ``error`` from the other verbs."""
    MISS = "miss"
    """Does nothing, and answers that nothing is there (contains, read, probe); refuses as full (write)."""
    SHORT = "short"
    """Does what it should, and answers one key fewer."""
    REORDER = "reorder"
    """Does what it should, and answers in the opposite order."""
    LIE = "lie"
    """Says that all went well and it did not: read gives wrong bytes, write and delete do nothing; contains and probe
    answer the opposite."""


class Fault(NamedTuple):
    """What happens on which calls of one verb."""

    verb: str
    """One of ``open contains read write delete aclose probe save_order``."""
    does: Does
    calls: int | Container[int] | None = None
    """Which calls of the verb, counted from 1: a number, a range or a set of numbers; None is all of them."""
    delay_s: float = 0.05
    gate: Gate | None = None
    """Where HANG waits; by default the tier's own :attr:`FaultTier.gate`."""
    error: Exception = OSError(errno.EIO, "planted")

    def strikes(self, verb: str, call: int) -> bool:
        if verb != self.verb:
            return False
        return self.calls is None or (call == self.calls if isinstance(self.calls, int) else call in self.calls)


class FaultTier:
    """Any tier, with faults. It has the capabilities that the inner tier has, and no others.

    ``isinstance(FaultTier(inner), ScanTier)`` is what ``isinstance(inner, ScanTier)`` is, and so for the others. What
    is no verb of a protocol (``counters``, ...) is the inner tier's.

    Args:
        inner: the tier that does the work.
        faults: which may be changed at any time through :attr:`faults`; of several that strike, the first one does.

    Concurrency: as the inner tier; one event loop.
    """

    def __new__(cls, inner: Tier, *faults: Fault) -> Self:  # noqa: ARG004 - __init__ takes them
        """An instance of a class that has just the inner tier's capabilities: since 3.12 isinstance looks there."""
        mixins = tuple(mixin for protocol, mixin in _CAPABILITIES.items() if isinstance(inner, protocol))
        kind = type(cls.__name__, (cls, *mixins), {"__module__": cls.__module__}) if mixins else cls
        return cast("Self", object.__new__(kind))

    def __init__(self, inner: Tier, *faults: Fault) -> None:
        unknown = [fault.verb for fault in faults if fault.verb not in VERBS]
        if unknown:
            raise ValueError(f"a fault of {unknown[0]!r}: the verbs are {', '.join(VERBS)}")
        self.inner: Any = inner
        self.faults = list(faults)
        self.gate = Gate()
        """Where calls hang that were given no gate of their own. ``aclose`` opens it: nothing may hang for ever."""
        self.n_calls: Counter[str] = Counter()
        self.struck: list[tuple[str, int, Does]] = []
        """Every fault that struck: verb, call, what it did."""

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not there yet: __init__ has not run
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"<FaultTier of {self.inner!r}: {len(self.faults)} faults, {len(self.struck)} struck>"

    @property
    def name(self) -> str:
        return str(self.inner.name)

    async def open(self, ctx: TierContext) -> None:
        await self._run("open", lambda: self.inner.open(ctx))

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        answers = await self._run(
            "contains", lambda: self.inner.contains(keys), miss=lambda: [False] * len(keys),
            lie=lambda answers: [not there for there in answers],
        )  # fmt: skip
        return cast("Sequence[bool]", answers)

    async def read(self, items: Sequence[tuple[ChunkKey, memoryview]]) -> Sequence[Outcome]:
        def lie(_: object) -> list[Outcome]:
            for _key, buffer in items:
                buffer[:] = bytes(byte ^ 0xA5 for byte in buffer)
            return [Outcome(key, Status.OK) for key, _ in items]

        answers = await self._run(
            "read", lambda: self.inner.read(items), fail=lambda error: [_failed(key, error) for key, _ in items],
            miss=lambda: [Outcome(key, Status.MISSING) for key, _ in items], lie=lie,
        )  # fmt: skip
        return cast("Sequence[Outcome]", answers)

    async def write(self, items: Sequence[tuple[Chunk, memoryview]]) -> Sequence[Outcome]:
        keys = [chunk.key for chunk, _ in items]
        answers = await self._run(
            "write", lambda: self.inner.write(items), fail=lambda error: [_failed(key, error) for key in keys],
            miss=lambda: [Outcome(key, Status.REFUSED, Reason.FULL) for key in keys],
            pretend=lambda: [Outcome(key, Status.OK) for key in keys],
        )  # fmt: skip
        return cast("Sequence[Outcome]", answers)

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        await self._run("delete", lambda: self.inner.delete(keys), miss=lambda: None, pretend=lambda: None)

    async def aclose(self) -> None:
        self.gate.open()
        await self._run("aclose", self.inner.aclose)

    async def _run(
        self,
        verb: str,
        act: Callable[[], Awaitable[Any]],
        *,
        fail: Callable[[Exception], object] | None = None,
        miss: Callable[[], object] | None = None,
        lie: Callable[[Any], object] | None = None,
        pretend: Callable[[], object] | None = None,
    ) -> object:
        """One call of a verb, with the fault that strikes it. ``pretend`` lies without acting, ``lie`` after it."""
        fault = self._fault(verb)
        if fault is None:
            return await act()
        instead = {Does.MISS: miss, Does.LIE: pretend}.get(fault.does)
        if instead is not None:
            return instead()
        if fault.does is Does.FAIL and fail is not None:
            return fail(fault.error)
        if fault.does in (Does.RAISE, Does.FAIL):
            raise fault.error.with_traceback(None)  # it is raised again and again, and would keep every frame
        if fault.does is Does.SLOW:
            await asyncio.sleep(fault.delay_s)
        if fault.does is Does.HANG:
            await (fault.gate or self.gate).wait(verb)
        answers = await act()
        if fault.does is Does.RAISE_AFTER:
            raise fault.error.with_traceback(None)
        if fault.does is Does.LIE and lie is not None:
            return lie(answers)
        return _reshaped(fault.does, answers)

    def _fault(self, verb: str) -> Fault | None:
        self.n_calls[verb] += 1
        call = self.n_calls[verb]
        for fault in self.faults:
            if fault.strikes(verb, call):
                self.struck.append((verb, call, fault.does))
                return fault
        return None


class _Charging:
    inner: Any

    def charge_nbytes(self, chunk_nbytes: int) -> int:
        return int(self.inner.charge_nbytes(chunk_nbytes))


class _Bounded:
    inner: Any

    def share_nbytes(self) -> int:
        return int(self.inner.share_nbytes())


class _Host:
    inner: Any

    @property
    def n_slots(self) -> int:
        return int(self.inner.n_slots)

    def slot_view(self, slot: int) -> memoryview:
        return cast("memoryview", self.inner.slot_view(slot))


class _Owning:
    inner: Any

    def owns(self, key: ChunkKey) -> bool:
        return bool(self.inner.owns(key))


class _Scan:
    inner: Any
    _run: Callable[..., Awaitable[object]]

    @property
    def writable(self) -> bool:
        return bool(self.inner.writable)

    def settled(self, key: ChunkKey) -> bool:
        return bool(self.inner.settled(key))

    def scan(self) -> AsyncIterator[Sequence[Found]]:
        return cast("AsyncIterator[Sequence[Found]]", self.inner.scan())

    async def probe(self, keys: Sequence[ChunkKey]) -> Sequence[Found | None]:
        answers = await self._run(
            "probe", lambda: self.inner.probe(keys), miss=lambda: [None] * len(keys),
            lie=lambda answers: [None if found else Found(key, 1) for key, found in zip(keys, answers, strict=True)],
        )  # fmt: skip
        return cast("Sequence[Found | None]", answers)

    async def save_order(self, chunks: Sequence[Chunk]) -> None:
        await self._run("save_order", lambda: self.inner.save_order(chunks))


_CAPABILITIES: Final[dict[type, type]] = {
    HostTier: _Host,
    Charging: _Charging,
    Bounded: _Bounded,
    ScanTier: _Scan,
    Owning: _Owning,
}


def _reshaped(does: Does, answers: Any) -> object:
    if answers is None or does not in (Does.SHORT, Does.REORDER):
        return answers
    return list(answers)[:-1] if does is Does.SHORT else list(answers)[::-1]


def _failed(key: ChunkKey, error: Exception) -> Outcome:
    return Outcome(key, Status.FAILED, Reason.TIER_ERROR, error)
