"""Vector clocks over byte ranges: whether two accesses are ordered, whatever the schedule happened to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tierkv.testing._rules import ConformanceError

Clock = dict[int, int]
"""Per thread of execution (the host, each stream) the last of its steps that is known to be over."""

Range = tuple[int, int]
"""Address and length."""

HOST = -1


class RaceError(ConformanceError):
    """Two accesses to the same bytes, at least one a write, that nothing orders."""


class _Access(NamedTuple):
    start: int
    stop: int
    who: int
    tick: int
    is_write: bool
    label: str


class RaceCheck:
    """Accesses that are not over, and the clocks that say what is.

    Work is submitted by the host, so whatever happened before the host's present clock happened before everything that
    is still to come, and is forgotten: what is kept is in flight.

    Args:
        raises: raise the first race, and at every later access again, since the code under test may well take the
            first for a copy that failed; else only note it in :attr:`found`.
    """

    def __init__(self, *, raises: bool) -> None:
        self.host: Clock = {HOST: 0}
        self.found: list[str] = []
        self._raises = raises
        self._open: list[_Access] = []

    def host_access(self, ranges: Iterable[Range], label: str, *, is_write: bool) -> None:
        """The host touches bytes now."""
        self._again()
        self._forget()
        for start, length in ranges:
            self._check(_Access(start, start + length, HOST, 0, is_write, label), self.host)

    def task(self, who: int, clock: Clock, reads: Iterable[Range], writes: Iterable[Range], label: str) -> None:
        """A stream's next task, at its submission. ``clock`` is the stream's, and learns what the host knows."""
        self._again()
        self.host[HOST] += 1
        merge(clock, self.host)
        clock[who] = clock.get(who, 0) + 1
        self._forget()
        accesses = [
            _Access(start, start + length, who, clock[who], is_write, label)
            for ranges, is_write in ((reads, False), (writes, True))
            for start, length in ranges
        ]
        for access in accesses:
            self._check(access, clock)
        self._open.extend(accesses)

    def _check(self, access: _Access, clock: Clock) -> None:
        for other in self._open:
            if (
                access.start < other.stop
                and other.start < access.stop
                and (access.is_write or other.is_write)
                and clock.get(other.who, 0) < other.tick
            ):
                self._tell(access, other)

    def _tell(self, access: _Access, other: _Access) -> None:
        text = (
            f"{access.label} {'writes' if access.is_write else 'reads'} bytes that {other.label}, which nothing orders "
            f"before it, {'writes' if other.is_write else 'reads'}"
        )
        self.found.append(text)
        if self._raises:
            raise RaceError(text)

    def _again(self) -> None:
        if self._raises and self.found:
            raise RaceError(self.found[0])

    def _forget(self) -> None:
        self._open = [access for access in self._open if self.host.get(access.who, 0) < access.tick]


def merge(into: Clock, other: Clock) -> None:
    """``into`` knows what ``other`` knows."""
    for who, tick in other.items():
        if into.get(who, 0) < tick:
            into[who] = tick
