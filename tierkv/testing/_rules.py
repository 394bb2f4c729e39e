"""How the kit says what is wrong: one exception, one sentence; and what it answers when nothing is."""

from __future__ import annotations

from typing import NamedTuple, NoReturn


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
