"""Options that have two defaults, the second one with ``--quick``; what ``demo`` and ``bench`` share."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping

Options = Mapping[str, tuple[str, str, str, str]]
"""Option: what it takes, its default, its default with ``--quick``, what it is."""


def add_options(parser: argparse.ArgumentParser, options: Options) -> None:
    """Each of them as ``--name``; :func:`given` has the values."""
    for name, (metavar, default, quick, meaning) in options.items():
        parser.add_argument(f"--{name}", metavar=metavar, help=f"{meaning} (default {default}, with --quick {quick})")


def given(arguments: argparse.Namespace, options: Options) -> dict[str, str]:
    """What was typed, else the default that goes with ``--quick`` or without."""
    return {
        name: (quick if arguments.quick else default) if getattr(arguments, name) is None else getattr(arguments, name)
        for name, (_, default, quick, _) in options.items()
    }


def parse_integer(text: str) -> object:
    """The number that was typed, or the text itself, which then is refused by name."""
    with contextlib.suppress(ValueError):
        return int(text)
    return text
