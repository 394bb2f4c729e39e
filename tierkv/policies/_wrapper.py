"""What an order around another order does where it has nothing of its own to say: pass it on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

from tierkv._turns import hint_aware
from tierkv.errors import bad_setting
from tierkv.protocols import CommitAware, EvictionPolicy, Expiring, HintAware, PinAware, Refreshing, UsedByKey
from tierkv.types import Chunk, ChunkKey, Turn

_METHODS = ("on_insert", "on_access", "on_remove", "victims")


class Wrapper:
    """An order around another. It can do what the inner one can: ``isinstance(wrapper, Expiring)`` tells the truth.

    But it knows holds and hints in any case. It is neither BatchEvicting nor Seating: the inner order would let go of
    what the wrapper has others leave before, and would not tell. A wrapper that does something of its own when it is
    told of a use, a commit or of recency says so by a method; one that learns parents from uses has no ``on_use``.
    """

    expired: Callable[[Chunk], bool]
    refresh: Callable[[Sequence[Chunk]], None]
    on_commit: Callable[[ChunkKey], None]
    on_use: Callable[[Sequence[ChunkKey]], None]

    _learns_from_uses = False
    """What a use says of a parent matters to the wrapper, so keys alone will not do."""

    def __init__(self, order: EvictionPolicy) -> None:
        check_order(type(self).__name__, order)
        self._order = order
        self._pins = order if isinstance(order, PinAware) else None
        self._commits = order if isinstance(order, CommitAware) else None
        self._hints = order if isinstance(order, HintAware) else None
        self._uses = order if isinstance(order, UsedByKey) else None
        self._refreshes = order if isinstance(order, Refreshing) else None
        self._held: set[ChunkKey] = set()
        if isinstance(order, Expiring) and not hasattr(type(self), "expired"):
            self.expired = order.expired
        if self._refreshes is not None:
            self.refresh = self._refresh
        if self._commits is not None and not hasattr(type(self), "on_commit"):
            self.on_commit = self._on_commit
        if self._uses is not None and not self._learns_from_uses:
            self.on_use = self._on_use

    def __contains__(self, key: object) -> bool:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._order!r}>"

    def on_insert(self, chunks: Sequence[Chunk]) -> None:
        self._order.on_insert(chunks)

    def _on_commit(self, key: ChunkKey) -> None:
        if self._commits is not None:
            self._commits.on_commit(key)

    def on_access(self, chunks: Sequence[Chunk]) -> None:
        self._order.on_access(chunks)

    def _on_use(self, keys: Sequence[ChunkKey]) -> None:
        assert self._uses is not None
        self._uses.on_use(keys)

    def _refresh(self, chunks: Sequence[Chunk]) -> None:
        assert self._refreshes is not None
        self._refreshes.refresh(chunks)

    def on_remove(self, key: ChunkKey, *, evicted: bool) -> None:
        self._held.discard(key)
        self._order.on_remove(key, evicted=evicted)

    def on_hint(self, key: ChunkKey, turn: Turn) -> None:
        """The inner order learns to take hints when the first one comes: until then nobody pays for it."""
        if key not in self:
            return
        if self._hints is None:
            self._follow(hint_aware(self._order))
        assert self._hints is not None
        self._hints.on_hint(key, turn)

    def _follow(self, order: EvictionPolicy) -> None:
        """Go on with an order around the inner one, which knows all that the inner one was told."""
        self._order = order
        self._pins = order if self._pins is not None and isinstance(order, PinAware) else None
        self._commits = order if isinstance(order, CommitAware) else None
        self._hints = order if isinstance(order, HintAware) else None
        self._uses = order if isinstance(order, UsedByKey) else None

    def hold(self, key: ChunkKey) -> None:
        if key in self:
            self._held.add(key)
            if self._pins is not None:
                self._pins.hold(key)

    def release(self, key: ChunkKey) -> None:
        self._held.discard(key)
        if self._pins is not None:
            self._pins.release(key)

    def _rest(self) -> Iterator[ChunkKey]:
        """The inner order's victims, less what is held. An inner order that knows no holds is walked over them."""
        victims = self._order.victims()
        return victims if self._pins is not None else (key for key in victims if key not in self._held)


def copy_of(order: EvictionPolicy) -> EvictionPolicy:
    """Another one like it.

    Raises:
        ConfigError: it has chunks already, or cannot be copied.
    """
    if next(iter(order.victims()), None) is not None:
        raise bad_setting("order", order, "a new order, without chunks", example=type(order).__name__ + "()")
    try:
        return copy.deepcopy(order)
    except Exception as error:
        raise bad_setting("order", order, f"an order that can be copied ({error})") from error


def check_order(option: str, order: object) -> None:
    """Raise ConfigError unless ``order`` is an order, rather than, say, the class of one."""
    missing = [name for name in _METHODS if not callable(getattr(order, name, None))]
    if isinstance(order, type) or missing:
        lacks = f" (this one has no {', '.join(missing)})" if missing else " (this is a class; call it)"
        raise bad_setting(option, order, f"an eviction order{lacks}", example="LRU()")
