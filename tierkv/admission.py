"""Who may enter a level. Rules are asked once for each offer of a chunk that the level lacks.

They combine: ``All(SecondTouch(), WriteBudget("300GB/day"))``, or ``"all(second_touch, write_budget(300GB/day))"`` as
text.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from tierkv._config_text import Kind, Parameter, Stage, Vocabulary, read_stage
from tierkv.errors import bad_setting
from tierkv.protocols import Admission, Clock
from tierkv.settings import parse_count
from tierkv.sizes import parse_size
from tierkv.types import Chunk, ChunkKey

__all__ = ("All", "Any", "DropPartialTail", "MaxSize", "SecondTouch", "TinyLFU", "WriteBudget", "parse_admission")

GROUP = "tierkv.admissions"
"""Entry points of third parties: a name, and a class or function that makes a rule."""

_MAX_WINDOW = 2**32
_PERIODS_S = {"s": 1, "min": 60, "h": 3_600, "day": 86_400, "week": 604_800, "month": 2_592_000, "year": 31_536_000}
_ROWS = 4
_A_RATE = "300GB/day"
_MOST = 255


class SecondTouch:
    """A chunk enters when it is offered for the second time while the first is remembered.

    Saves most writes, and loses the first reuse of everything: on conversations that was 8 to 18 points of hits. A key
    stays remembered after it was admitted, so that an offer which found no room, or a chunk that was evicted, is not
    asked to come twice again.

    Args:
        window: keys that are remembered, the latest offered.

    Concurrency: one thread.
    """

    def __init__(self, window: int = 64_000) -> None:
        self._window = parse_count("window", window, 1, _MAX_WINDOW)
        self._seen: OrderedDict[ChunkKey, None] = OrderedDict()

    def admits(self, chunk: Chunk) -> bool:
        seen = self._seen
        if chunk.key in seen:
            seen.move_to_end(chunk.key)
            return True
        seen[chunk.key] = None
        if len(seen) > self._window:
            seen.popitem(last=False)
        return False


class TinyLFU:
    """A chunk enters if it was offered at least ``n_offers`` times lately, by an estimate in a fixed little memory.

    Offers are counted in a sketch that may count too much, never too little, and all counts are halved once in
    ``window`` offers. Compared with :class:`SecondTouch` it remembers a far longer past in the same memory (about four
    bytes an offer of the window, and no keys), and can ask for more than two offers.

    Args:
        n_offers: offers that it takes, this one included.
        window: offers after which all counts are halved.

    Concurrency: one thread.

    Source: Einziger, Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", 2017.
    """

    def __init__(self, n_offers: int = 2, window: int = 1_000_000) -> None:
        self._n_offers = parse_count("n_offers", n_offers, 1, _MOST)
        self._window = parse_count("window", window, 1, _MAX_WINDOW)
        self._width = max(self._window, 16)
        self._counts = [bytearray(self._width) for _ in range(_ROWS)]
        self._n_counted = 0

    def admits(self, chunk: Chunk) -> bool:
        # Not hash(): it differs from process to process, and so would what is admitted.
        digest = hashlib.blake2b(chunk.key, digest_size=8 * _ROWS).digest()
        places = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") % self._width for i in range(_ROWS)]
        counts = [row[place] for row, place in zip(self._counts, places, strict=True)]
        n = min(counts)
        if n < _MOST:
            # Only the lowest counts grow: the others have counted somebody else as well.
            for row, place, count in zip(self._counts, places, counts, strict=True):
                if count == n:
                    row[place] = n + 1
        self._n_counted += 1
        if self._n_counted >= self._window:
            self._n_counted = 0
            self._counts = [row.translate(_HALVES) for row in self._counts]
        return n + 1 >= self._n_offers


_HALVES = bytes(i // 2 for i in range(256))


class MaxSize:
    """Chunks of at most ``limit`` bytes, a number or a size such as "8MiB"; the payload counts."""

    def __init__(self, limit: int | str) -> None:
        self._limit_nbytes = parse_size("limit", limit)

    def admits(self, chunk: Chunk) -> bool:
        return chunk.nbytes <= self._limit_nbytes


class WriteBudget:
    """At most so many bytes a time enter, so that an SSD lasts.

    Over any time ``t`` it admits at most ``rate * t``, plus what may come in one burst, plus one chunk. A chunk is
    charged when it is admitted, its payload only, also if the level has no room for it afterwards. So put it last among
    the rules of an :class:`All`.

    Args:
        rate: bytes a time, such as "300GB/day". The time is s, min, h, day, week, month (30 days) or year.
        burst: bytes that may enter at once after a quiet time. By default those of an hour, or of the rate's own time
            where that is shorter.
        clock: seconds, monotonic.

    Raises:
        ConfigError: the rate or the burst is not one.

    Concurrency: one thread.
    """

    def __init__(self, rate: str, burst: int | str | None = None, *, clock: Clock = time.monotonic) -> None:
        nbytes, period_s = _parse_rate("rate", rate)
        self._nbytes_per_s = nbytes / period_s
        self._most_nbytes = (
            self._nbytes_per_s * min(period_s, 3_600) if burst is None else float(parse_size("burst", burst))
        )
        self._clock = clock
        self._left_nbytes = self._most_nbytes
        self._as_of_s = clock()

    def admits(self, chunk: Chunk) -> bool:
        now_s = self._clock()
        earned_nbytes = max(now_s - self._as_of_s, 0.0) * self._nbytes_per_s
        self._as_of_s = now_s
        self._left_nbytes = min(self._left_nbytes + earned_nbytes, self._most_nbytes)
        if self._left_nbytes <= 0:
            return False
        # It may go below zero by one chunk, so that a chunk larger than a burst is not shut out for ever.
        self._left_nbytes -= chunk.nbytes
        return True


class DropPartialTail:
    """Whole chunks only. The partial tail of a prompt is hardly ever asked for again: the next turn is longer."""

    def admits(self, chunk: Chunk) -> bool:
        return not chunk.partial


class All:
    """Every rule must admit. They are asked in order, up to the first that refuses: what counts or charges, last."""

    def __init__(self, *rules: Admission) -> None:
        self._rules = _checked("All", rules)

    def admits(self, chunk: Chunk) -> bool:
        return all(rule.admits(chunk) for rule in self._rules)


class Any:
    """One rule must admit. They are asked in order, up to the first that does."""

    def __init__(self, *rules: Admission) -> None:
        self._rules = _checked("Any", rules)

    def admits(self, chunk: Chunk) -> bool:
        return any(rule.admits(chunk) for rule in self._rules)


def parse_admission(
    option: str, value: object, *, clock: Clock = time.monotonic, module_path: str | None = None
) -> Admission:
    """A new rule from text such as ``"all(second_touch, max_size(8MiB))"``, or from the equivalent nested objects.

    As an object: ``{"type": "all", "rules": ["second_touch", {"type": "max_size", "limit": "8MiB"}]}``. Rules of third
    parties are found by entry point (group ``tierkv.admissions``), as ``my_package.my_module:MyRule(1, name=2)``, or by
    ``"module_path"`` in an object.

    Args:
        option: name of the setting, for messages.
        value: what the user wrote.
        clock: what rates go by.
        module_path: a module in which a name that is not known is looked up.

    Raises:
        ConfigError: anything wrong, in one sentence, with the nearest valid name.
    """
    window = Parameter("window", partial(parse_count, low=1, high=_MAX_WINDOW), required=False)
    n_offers = Parameter("n_offers", partial(parse_count, low=1, high=_MOST), required=False)
    burst = Parameter("burst", parse_size, required=False)
    kinds: dict[str, Kind] = {
        "drop_partial_tail": Kind(DropPartialTail),
        "max_size": Kind(MaxSize, (Parameter("limit", parse_size),), example="max_size(8MiB)"),
        "second_touch": Kind(SecondTouch, (window,)),
        "tinylfu": Kind(TinyLFU, (n_offers, window)),
        "write_budget": Kind(
            partial(WriteBudget, clock=clock),
            (Parameter("rate", _read_rate), burst),
            example=f"write_budget({_A_RATE})",
        ),
    }
    vocabulary = Vocabulary(
        noun="an admission rule",
        group=GROUP,
        kinds=kinds,
        example="second_touch",
        check=_check_rule,
        module_path=module_path,
    )

    def rules(where: str, stage: Stage) -> tuple[object, ...]:
        listed = stage.named.get("rules") if not stage.values and set(stage.named) == {"rules"} else stage.values
        if (stage.named and listed is stage.values) or not isinstance(listed, (list, tuple)) or not listed:
            raise bad_setting(where, stage.named or None, "given at least one rule", example=f"{stage}(second_touch)")
        return tuple(
            vocabulary.make(option, rule if isinstance(rule, Stage) else read_stage(option, rule, "second_touch"))
            for rule in listed
        )

    kinds |= {
        name: Kind(make, rest=rules, example=f"{name}(second_touch)") for name, make in (("all", All), ("any", Any))
    }
    rule: Admission = vocabulary.make(option, read_stage(option, value, "second_touch"))
    return rule


def _check_rule(option: str, rule: object) -> None:
    if isinstance(rule, type) or not callable(getattr(rule, "admits", None)):
        raise bad_setting(option, rule, "an admission rule, with a method admits(chunk)", example="SecondTouch()")


def _checked(option: str, rules: Sequence[Admission]) -> tuple[Admission, ...]:
    if not rules:
        raise bad_setting(option, (), "given at least one rule", example=f"{option}(SecondTouch())")
    for rule in rules:
        _check_rule(option, rule)
    return tuple(rules)


def _read_rate(option: str, value: object) -> object:
    _parse_rate(option, value)
    return value


def _parse_rate(option: str, value: object) -> tuple[int, int]:
    """Bytes and the seconds in which they may be written."""
    size, slash, period = value.partition("/") if isinstance(value, str) else ("", "", "")
    period_s = _PERIODS_S.get(period.strip().lower())
    if not slash or period_s is None:
        allowed = f"a size a time, where the time is one of {', '.join(_PERIODS_S)}"
        raise bad_setting(option, value, allowed, example=_A_RATE)
    return parse_size(option, size), period_s
