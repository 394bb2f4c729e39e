"""What was typed, against the commands and options that there are: a slip ends in one sentence with the nearest."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Self

from tierkv.errors import unknown_name

USAGE = 2
_NEGATIVE = re.compile(r"-\.?[0-9]")
"""How a value below zero begins, -5 or -1d: what it is given to says what is wrong with it."""


class Parser(argparse.ArgumentParser):
    """An argument parser that takes no abbreviations and refuses in one sentence.

    An abbreviation means whatever option comes to begin with it, and here some remove files.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self._negative_number_matcher = _NEGATIVE

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}\n")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The command that was typed; ends the process if there is none, or none like it."""
        command = self.checked(words)
        found, rest = self.parse_known_args(words)
        if rest:
            command.error(f"{rest[0]!r} is one argument too many")
        return found

    def checked(self, words: Sequence[str]) -> Parser:
        """The parser of the command; says what is unknown before argparse says what is missing besides."""
        title, commands = self.commands()
        for place, word in enumerate(words):
            if word == "--":
                return self
            if word.startswith("-") and word != "-" and not _NEGATIVE.match(word):
                self._check_option(word)
            elif commands:
                if word not in commands:
                    self.error(unknown_name(title.lower(), word, commands))
                return commands[word].checked(words[place + 1 :])
        if commands and not {"-h", "--help", "--version"}.intersection(words):
            self.error(f"{title} is missing; there are {', '.join(commands)}")
        return self

    def _check_option(self, word: str) -> None:
        name, equals, value = word.partition("=")
        known = {name: action for action in self._actions for name in action.option_strings}
        if name not in known:
            self.error(unknown_name("option", name, [each for each in known if each.startswith("--")]))
        if equals and known[name].nargs == 0:
            self.error(f"{name} takes no value, but was given {value!r}")

    def commands(self) -> tuple[str, Mapping[str, Self]]:
        """What a command is called here, and all of them."""
        for action in self._actions:
            if isinstance(action.choices, dict):
                return str(action.metavar), action.choices
        return "", {}
