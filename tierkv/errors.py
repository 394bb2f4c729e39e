"""What tierkv raises.

Misses, refusals and failures of single keys are values (:class:`~tierkv.Outcome`), not exceptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

_LIKENESS: Final = 0.65
"""Part that two names have in common, as difflib counts it, from which on one may be a slip of the other."""
_LONGEST_VALUE: Final = 500


class TierKVError(Exception):
    """Base of what tierkv raises when something goes wrong that it foresees.

    What has the wrong type or range by Python's own rules - a token that is no integer, a slot that is not there -
    raises TypeError, ValueError or IndexError, as it does everywhere.
    """


class ConfigError(TierKVError, ValueError):
    """A setting is wrong. Raised before anything was created.

    The message is one sentence with the option, the value given, what is allowed and the nearest valid value, if the
    one given is like any.
    Build it with :func:`bad_setting` or :func:`unknown_setting`, so that all of them read alike.
    """


class ClosedError(TierKVError):
    """The cache, tier or pool was closed before or while the call ran."""


class PinError(TierKVError):
    """A lease was used after it ended, or asked for a chunk that it does not hold."""


class ChunkSizeError(TierKVError, ValueError):
    """A buffer's length differs from its chunk's, or a chunk is larger than the tier's slots."""


class TierError(TierKVError):
    """A tier could not do what it was asked.

    Attributes:
        tier: the tier's name.
        keys: the chunk keys concerned; empty if the whole tier is.
    """

    def __init__(self, tier: str, message: str, keys: Sequence[bytes] = ()) -> None:
        super().__init__(f"{tier}: {message}")
        self.tier = tier
        self.keys = tuple(keys)


class TierReadError(TierError):
    """A read failed although the chunk may well be intact (EIO, EMFILE, a deadline)."""


class TierWriteError(TierError):
    """A write failed; nothing of the chunk is visible."""


class CorruptChunkError(TierError):
    """What was stored under a key is not what was written. The chunk was removed and is a miss from now on."""


def bad_setting(
    option: str, value: object, allowed: str, nearest: object = None, *, example: str | None = None
) -> ConfigError:
    """One sentence: ``option`` is ``value``; ``allowed`` is what it may be; ``nearest`` the closest valid value.

    Where no valid value is like ``value``, ``nearest`` is None: a guess sends people astray. ``example`` then shows the
    form of a valid one, where ``allowed`` does not.
    """
    hint = "" if nearest is None else f"; nearest valid value: {nearest}"
    hint += "" if example is None or hint else f"; for example: {example}"
    return ConfigError(f"{option} is {_shown(value)}, but must be {allowed}{hint}")


def unknown_setting(option: str, where: str, known: Iterable[str]) -> ConfigError:
    """One sentence for a key that nobody reads, naming the key that was probably meant."""
    names = sorted(known)
    near = closest(option, names)
    return ConfigError(
        f"{where} has no option {_shown(option)}; it knows {', '.join(names)}"
        + (f"; nearest valid option: {near}" if near else "")
    )


def unknown_name(noun: str, name: str, known: Iterable[str]) -> str:
    """One sentence for a command that is not there, or an option of one."""
    names = list(known)
    near = closest(name, names)
    return f"there is no {noun} {name!r}; there are {', '.join(names)}" + (
        f"; nearest valid {noun}: {near}" if near else ""
    )


def _shown(value: object) -> str:
    """As Python writes it, if that is not too long for a sentence."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - an integer of thousands of digits, a list in itself: it is wrong, whatever it is
        return f"{type(value).__name__} that cannot be shown"
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def closest(text: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant, for a message; None if none is like it.

    One that begins like it, has its letters in another order, or is spelled much like it; case and hyphens are no
    difference.
    """
    import difflib  # noqa: PLC0415 - loaded for a message only

    plain = _plain(text)
    if not plain:
        return None
    by_plain = {_plain(name): name for name in names}
    likely = [name for name in by_plain if name.startswith(plain) or sorted(name) == sorted(plain)]
    near = difflib.get_close_matches(plain, likely or by_plain, n=1, cutoff=0.0 if likely else _LIKENESS)
    return by_plain[near[0]] if near else None


def _plain(name: str) -> str:
    """Of no odd length, and without what distinguishes no two names."""
    return name[:100].lower().lstrip("-").replace("-", "_")
