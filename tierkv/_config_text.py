"""Policies and admission rules as a user writes them: short text, or the same as nested JSON objects.

::

    chain = stage (">" stage)*           a wrapper is left of what it wraps
    stage = name ["(" [argument ("," argument)*] ")"]
    argument = [name "="] (value | chain)

A value is a number, a size, a word, or text in quotes. As an object a stage is ``{"type": name, parameter: value}``; a
wrapper has its inner stage under ``order``. Names are the same whatever their case, hyphens and underscores.

Everything wrong is one :class:`~tierkv.errors.ConfigError` of one sentence, however odd the input.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tierkv.errors import ConfigError, bad_setting, closest, unknown_setting

MAX_LENGTH = 4_096
MAX_DEPTH = 32

_TOKEN = re.compile(r"""\s*(?:(?P<punct>[(),=>])|"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<word>[^\s(),=>"']+))""")
_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_NUMBER = re.compile(r"[+-]?([0-9]{1,30}(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_WORDS = {"true": True, "false": False}


@dataclass
class Stage:
    """One name with its arguments, as written; ``inner`` is what stands right of it."""

    name: str
    values: list[object] = field(default_factory=list)
    named: dict[str, object] = field(default_factory=dict)
    inner: Stage | None = None
    module_path: str | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Parameter:
    """One argument of a kind. ``read(option, value)`` checks it and raises ConfigError; None takes what is written."""

    name: str
    read: Callable[[str, Any], object]
    required: bool = True


@dataclass(frozen=True)
class Kind:
    """How a name becomes an object: ``make(*inner, **arguments)``.

    ``rest`` reads all arguments at once instead, of which there may be any number, by position or by name.
    """

    make: Callable[..., Any]
    parameters: Sequence[Parameter] = ()
    wraps: bool = False
    rest: Callable[[str, Stage], tuple[object, ...]] | None = None
    example: str = ""
    """For messages: as one is written, without what it wraps, if its name alone will not do."""


# -- reading ----------------------------------------------------------------------------------------------------------


def read_stage(option: str, value: object, expected: str) -> Stage:
    """The stages of a text or a nested object, unchecked but for their form.

    Args:
        option: name of the setting, for messages.
        value: what the user wrote.
        expected: an example of a right value, for messages.

    Raises:
        ConfigError: the value has not the form of one.
    """
    if isinstance(value, str):
        return _Text(option, value, expected).whole()
    return _from_object(option, value, expected, MAX_DEPTH)


class _Text:
    """A parser by recursive descent. The depth is limited, so that the answer to nonsense is never a traceback."""

    def __init__(self, option: str, text: str, expected: str) -> None:
        self.option, self.text, self.expected = option, text, expected
        self.tokens: list[tuple[str, str]] = []
        self.at = 0
        if len(text) > MAX_LENGTH:
            raise bad_setting(option, text[:40] + "...", f"at most {MAX_LENGTH} characters long", example=expected)
        position, end = 0, len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if match is None:
                raise self.wrong("without unclosed quotes")
            kind = match.lastgroup or ""
            self.tokens.append(("quoted" if kind in {"double", "single"} else kind, match[kind]))
            position = match.end()

    def wrong(self, allowed: str) -> ConfigError:
        return bad_setting(self.option, self.text, allowed, example=self.expected)

    def whole(self) -> Stage:
        stage = self.chain(MAX_DEPTH)
        if self.at < len(self.tokens):
            raise self.wrong(f"stages joined by '>', where {self.tokens[self.at][1]!r} makes no sense")
        return stage

    def next_is(self, punct: str) -> bool:
        if self.at < len(self.tokens) and self.tokens[self.at] == ("punct", punct):
            self.at += 1
            return True
        return False

    def chain(self, depth: int) -> Stage:
        if depth == 0:
            raise self.wrong(f"at most {MAX_DEPTH} deep")
        first = last = self.stage(depth)
        n = 1
        while self.next_is(">"):
            last.inner = self.stage(depth)
            last = last.inner
            n += 1
            if n > MAX_DEPTH:
                raise self.wrong(f"at most {MAX_DEPTH} deep")
        return first

    def stage(self, depth: int) -> Stage:
        if self.at >= len(self.tokens) or self.tokens[self.at][0] != "word":
            found = repr(self.tokens[self.at][1]) if self.at < len(self.tokens) else "its end"
            raise self.wrong(f"stages joined by '>', where a name is missing before {found}")
        stage = _named(self.tokens[self.at][1])
        self.at += 1
        if self.next_is("("):
            while not self.next_is(")"):
                self.argument(stage, depth - 1)
                if not self.next_is(","):
                    if not self.next_is(")"):
                        raise self.wrong(f"written with ',' or ')' after each argument of {stage.name}")
                    break
        return stage

    def argument(self, stage: Stage, depth: int) -> None:
        name = None
        if self.at + 1 < len(self.tokens) and self.tokens[self.at + 1] == ("punct", "="):
            kind, name = self.tokens[self.at]
            if kind == "punct":
                raise self.wrong(f"written with a name before each '=' of {stage.name}")
            self.at += 2
        value = self.value(stage, depth)
        if name is None:
            stage.values.append(value)
        elif name in stage.named:
            raise self.wrong(f"without a second {name!r} in {stage.name}")
        else:
            stage.named[name] = value

    def value(self, stage: Stage, depth: int) -> object:
        if self.at >= len(self.tokens):
            raise self.wrong(f"closed by ')' after the arguments of {stage.name}")
        kind, text = self.tokens[self.at]
        if kind == "punct":
            raise self.wrong(f"written with a value where {stage.name} has {text!r}")
        following = self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else ("", "")
        if kind == "word" and following in {("punct", "("), ("punct", ">")}:
            return self.chain(depth)
        self.at += 1
        return text if kind == "quoted" else _plain(text)


def _from_object(option: str, value: object, expected: str, depth: int) -> Stage:
    if isinstance(value, str):
        return _Text(option, value, expected).whole()
    if not isinstance(value, Mapping):
        raise bad_setting(option, _short(value), "text, or an object with a type", example=expected)
    if depth == 0:
        raise bad_setting(option, _short(value), f"at most {MAX_DEPTH} deep", example=expected)
    stage = _head(option, value, expected)
    for key, item in value.items():
        if key == "order":
            stage.inner = _from_object(f"{option}.order", item, expected, depth - 1)
        elif key not in {"type", "module_path"}:
            stage.named[key] = item
    return stage


def _head(option: str, value: Mapping[object, object], expected: str) -> Stage:
    """A stage by an object's ``type`` and ``module_path``."""
    for key in value:
        if not isinstance(key, str):
            allowed = f"an object with names of text, unlike {_short(key)!r}"
            raise bad_setting(option, _short(value), allowed, example=expected)
    name, module_path = value.get("type"), value.get("module_path")
    if not isinstance(name, str) or not name.strip():
        raise bad_setting(option, _short(value), "text, or an object whose type is a name", example=expected)
    if module_path is not None and (not isinstance(module_path, str) or not module_path):
        raise bad_setting(f"{option}.module_path", _short(module_path), "the import path of a module, or left out")
    stage = _named(name.strip())
    stage.module_path = module_path or stage.module_path
    return stage


def _named(name: str) -> Stage:
    module_path, colon, attribute = name.rpartition(":")
    return Stage(attribute, module_path=module_path) if colon and module_path and attribute else Stage(name)


def _plain(word: str) -> object:
    if _INTEGER.fullmatch(word):
        return int(word)
    if _NUMBER.fullmatch(word):
        return float(word)
    return _WORDS.get(word.lower(), word)


def _short(value: object) -> object:
    """The value as a message shows it: small, on one line."""
    if value is None or isinstance(value, (bool, int, float)):
        return value if not isinstance(value, int) or abs(value) < 10**40 else "a huge number"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - anybody's __repr__, also one that recurses too deep
        return f"a {type(value).__name__}"
    return value if isinstance(value, str) and len(text) <= 80 else _Shown(text[:80] + "..." * (len(text) > 80))


class _Shown(str):
    """Text that is its own repr, unless that would take more than a line."""

    __slots__ = ()

    def __repr__(self) -> str:
        return " ".join(self.split())


# -- making -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vocabulary:
    """The names that one sort of setting knows, and how others are found."""

    noun: str
    group: str
    """Entry points that are looked at for a name that is not known."""
    kinds: Mapping[str, Kind]
    example: str
    check: Callable[[str, object], None]
    """``check(option, made)`` raises ConfigError for what a third party's factory should not have returned."""
    module_path: str | None = None
    """A module that is looked at first for a name that is not known."""

    def make(self, option: str, stage: Stage) -> Any:
        """Build the inner stage, then the outer.

        Raises:
            ConfigError: a name or an argument is wrong.
        """
        kind = self._kind(option, stage)
        inner: tuple[object, ...] = ()
        if stage.inner is not None:
            if not kind.wraps:
                outer = f"{self._written(stage.inner)} > " if self._wraps(stage.inner) else ""
                allowed, right = f"with {stage} last: it wraps nothing", outer + self._written(stage)
                raise bad_setting(option, f"{stage} > {stage.inner}", allowed, example=right)
            inner = (self.make(option, stage.inner),)
        elif kind.wraps and (stage.module_path is None and _plain_name(stage.name) in self._by_plain_name()):
            right = f"{self._written(stage)} > {self.example}"
            raise bad_setting(option, str(stage), "followed by what it wraps", example=right)
        where = f"{option}: {stage}"
        if kind.rest is not None:
            first, arguments = kind.rest(where, stage), {}
        else:
            first, arguments = (), _bind(where, stage, kind.parameters)
        try:
            return kind.make(*first, *inner, **arguments)
        except ConfigError:
            raise
        except Exception as error:
            raise _not_made(option, stage.name, error) from error

    def _by_plain_name(self) -> dict[str, str]:
        return {_plain_name(name): name for name in self.kinds}

    def _wraps(self, stage: Stage) -> bool:
        name = self._by_plain_name().get(_plain_name(stage.name))
        return name is not None and self.kinds[name].wraps

    def _written(self, stage: Stage) -> str:
        """How one of its kind, which is ours, is written."""
        return self.kinds[self._by_plain_name()[_plain_name(stage.name)]].example or stage.name

    def _kind(self, option: str, stage: Stage) -> Kind:
        known = self._by_plain_name()
        if stage.module_path is not None:
            return self._foreign(option, stage, _attribute(option, stage.module_path, stage.name))
        name = known.get(_plain_name(stage.name))
        if name is not None:
            return self.kinds[name]
        if self.module_path is not None:
            return self._foreign(option, stage, _attribute(option, self.module_path, stage.name))
        points = {point.name: point for point in entry_points(group=self.group)}
        if stage.name in points:
            return self._foreign(option, stage, _load(option, points[stage.name]))
        names = sorted({*self.kinds, *points})
        raise bad_setting(
            option,
            _short(stage.name),
            f"{self.noun} ({', '.join(names)}, or module:Class)",
            closest(stage.name, names),
        )

    def _foreign(self, option: str, stage: Stage, factory: object) -> Kind:
        if not callable(factory):
            raise bad_setting(option, stage.name, f"a class or function that makes {self.noun}", example=self.example)

        def make(*inner: object) -> object:
            made = factory(*inner, *stage.values, **stage.named)
            self.check(f"{option}: {stage.name!r}", made)
            return made

        return Kind(make, wraps=True, rest=lambda _option, _stage: ())


def _bind(where: str, stage: Stage, parameters: Sequence[Parameter]) -> dict[str, object]:
    names = [parameter.name for parameter in parameters]
    for name in stage.named:
        if name not in names:
            if not names:
                raise ConfigError(f"{where} takes no arguments, but was given {name!r}")
            raise unknown_setting(name, where, names)
    if len(stage.values) > len(parameters):
        allowed = f"at most {_counted(len(names))} ({', '.join(names)})" if names else "no arguments"
        raise bad_setting(f"{where} with {_counted(len(stage.values))}", _short(stage.values), allowed)
    given = dict(zip(names, stage.values, strict=False))
    for name, value in stage.named.items():
        if name in given:
            raise bad_setting(f"{where}.{name}", _short(value), "given once")
        given[name] = value
    arguments = {}
    for parameter in parameters:
        if parameter.name in given:
            value = given[parameter.name]
            shown = value if isinstance(value, (str, Mapping, Stage)) else _short(value)
            arguments[parameter.name] = parameter.read(f"{where}.{parameter.name}", shown)
        elif parameter.required:
            raise bad_setting(f"{where}.{parameter.name}", None, "given")
    return arguments


def _counted(n: int) -> str:
    return f"{n} argument" if n == 1 else f"{n} arguments"


def _load(option: str, point: EntryPoint) -> object:
    try:
        return point.load()
    except Exception as error:
        raise _not_loaded(option, point.name, f"entry point {point.value!r}", error) from error


def _attribute(option: str, module_path: str, name: str) -> object:
    try:
        module = importlib.import_module(module_path)
    except Exception as error:
        raise _not_loaded(option, name, f"module {module_path!r}", error) from error
    try:
        return getattr(module, name)
    except AttributeError:
        public = [each for each, made in vars(module).items() if not each.startswith("_") and callable(made)]
        raise bad_setting(option, name, f"a name of the module {module_path!r}", closest(name, public)) from None


def _not_loaded(option: str, name: str, where: str, error: Exception) -> ConfigError:
    return ConfigError(f"{option} names {name!r}, but {where} cannot be loaded: {_one_line(error)}")


def _not_made(option: str, name: str, error: Exception) -> ConfigError:
    return ConfigError(f"{option} names {name!r}, which cannot be made from these arguments: {_one_line(error)}")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _plain_name(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
