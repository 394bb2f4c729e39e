"""How the kit says what is wrong: one exception, one sentence; and what it answers when nothing is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple, NoReturn

from hypothesis.errors import Flaky

_FLAKY: Final = (
    "the same calls give the same answers; here they did not when they were made again: it depends on something else "
    "(identity, time, state that instances share)"
)


class ConformanceError(AssertionError):
    """An implementation breaks a rule of its protocol; the message is the rule, and what happened instead."""


class Report(NamedTuple):
    """What a check did, for whoever wants to print it: ``passed`` and ``skipped`` rules, by name."""

    passed: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    """Rules of capabilities that the implementation does not have, and rules for which no side door was given."""

    def __str__(self) -> str:
        skipped = f"; skipped: {', '.join(self.skipped)}" if self.skipped else ""
        return f"passed: {', '.join(self.passed)}{skipped}"


def require(holds: object, rule: str, *seen: object) -> None:
    """Raise ConformanceError unless ``holds``. Not ``assert``: a kit must bite under ``python -O`` too."""
    if not holds:
        fail(rule, *seen)


def fail(rule: str, *seen: object) -> NoReturn:
    raise ConformanceError(f"{rule}: {', '.join(map(repr, seen))}" if seen else rule)


@contextmanager
def plainly() -> Iterator[None]:
    """Of a group that Hypothesis raises raise the broken rule; what it calls flaky is a rule broken, too."""
    try:
        yield
    except Flaky as error:
        raise _first(error) or ConformanceError(_FLAKY) from error
    except BaseExceptionGroup as group:
        raise _first(group) or group from group


def _first(error: BaseException) -> ConformanceError | None:
    if isinstance(error, BaseExceptionGroup):
        found = (_first(each) for each in error.exceptions)
        return next((each for each in found if each is not None), None)
    return error if isinstance(error, ConformanceError) else None
