"""What the scheduler's side remembers of one request: where its offers ended, what it waits for, what it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from operator import itemgetter, lt
from typing import Any, NamedTuple

from tierkv._entry import GONE, PENDING, Columns, Entry, Kinds
from tierkv.types import Chunk, ChunkKey
from tierkv.vllm._wishes import NOTHING, Wishes

_SUFFIX = slice(-4, None)
_NO_TAIL: tuple[int, ChunkKey | None] = (0, None)
_Position = Callable[[Any], int | None]
_make = tuple.__new__  # half the cost of Chunk(...): one is built for each key that vLLM offers


class Group(NamedTuple):
    """One KV-cache group as its chunks need it."""

    group_id: int
    """As in the last four bytes of its keys."""
    tokens_per_chunk: int
    sliding: bool
    """No prefix group: its chunks have no parents, and a missing one hides only the windows that it lies in."""
    nbytes: int


class Hole(NamedTuple):
    """The first chunk of a request's prefix that was not taken: nothing behind it can be reached without it."""

    end_token: int
    key: ChunkKey


class Request:
    """Belongs to one ``ReqContext``; lives as long. See the state tables in ``docs/explanation/vllm-states.md``."""

    __slots__ = (
        "accessed_to",
        "deadline",
        "epoch",
        "hint",
        "hole",
        "lease",
        "position",
        "probe_deadline",
        "promoted",
        "req_id",
        "tails",
        "tenant",
    )

    def __init__(self, context: Any, wishes: Wishes = NOTHING, position: _Position | None = None) -> None:
        self.req_id: str = context.req_id
        self.tenant, self.hint = wishes
        self.position = position
        """``key -> end token``; None where vLLM has none, then call order has to do."""
        self.deadline: float | None = None
        """When it becomes late; None until its first deferral."""
        self.epoch = 0
        """Counts resets; see :meth:`forget`."""
        self.probe_deadline: float | None = None
        self.lease: list[Entry] = []
        self.promoted: set[ChunkKey] = set()
        """Keys whose promotion it waited for: their load counts as one from the level below."""
        self.hole: Hole | None = None
        self.tails: dict[int, tuple[int, ChunkKey]] = {}
        """For each prefix group the end token and key of the last chunk that was loaded or offered."""
        self.accessed_to: dict[int, int] = {}
        """For each group the end token up to which this request's use was reported: once a request."""

    def forget(self) -> None:
        """After a reset: nothing that it offered, hit or missed says anything any more. Its clock runs on."""
        self.hole = None
        self.tails.clear()
        self.accessed_to.clear()
        self.promoted.clear()

    def late(self, now: float) -> bool:
        return self.deadline is not None and now >= self.deadline


class ChunkMaker:
    """Turns vLLM's keys into chunks: group from the key's last four bytes, end and parent from the request.

    Args:
        groups: all groups of the engine.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = {group.group_id.to_bytes(4, "big"): group for group in groups}
        self._only = groups[0] if len(groups) == 1 else None

    def group(self, key: bytes) -> Group:
        return self._only or self._groups[key[_SUFFIX]]

    def make(self, keys: Iterable[ChunkKey], request: Request) -> list[Chunk]:
        """Chunks of one call, in its order; the request's tails move along.

        Each prefix chunk's parent is the last one of its group before it that this request has named.
        """
        position = request.position or _call_order(request, self)
        chunks: list[Chunk] = []
        tenant, tails = request.tenant, request.tails
        for group, its_keys in ((self._only, keys),) if self._only is not None else self._by_group(keys):
            group_id, _, sliding, nbytes = group
            before, parent = (0, None) if sliding else tails.get(group_id, _NO_TAIL)
            for key in its_keys:
                end = position(key) or 0
                if sliding or before >= end:
                    parent = None
                chunks.append(_make(Chunk, (key, parent, group_id, end, nbytes, tenant, False)))
                before, parent = end, key
            if parent is not None and not sliding:
                tails[group_id] = (before, parent)
        return chunks

    def columns(self, keys: Sequence[ChunkKey], request: Request, kinds: Kinds) -> Columns | None:
        """:meth:`make` by column, cheaply, for keys of one group that come in order; None: they do not, or may not."""
        if request.position is None or self._only is None:
            return None
        ends: list[Any] = [*map(request.position, keys)]
        group_id, _, sliding, nbytes = self._only
        before, parent = request.tails.get(group_id, _NO_TAIL)
        if None in ends or not (before < ends[0] and all(map(lt, ends, islice(ends, 1, None)))):
            return None
        if sliding:
            parent = None
        else:
            request.tails[group_id] = (ends[-1], keys[-1])
        kind = kinds.of((group_id, nbytes, request.tenant, False))
        return _make(Columns, (keys, ends, parent, not sliding, kind))

    def make_one(self, key: ChunkKey, request: Request) -> Chunk:
        """:meth:`make` for one key where there is one group: what a request in pieces of 1 pays each time."""
        assert self._only is not None
        group_id, _, sliding, nbytes = self._only
        end = (request.position or _call_order(request, self))(key) or 0
        parent = None
        if not sliding:
            before, parent = request.tails.get(group_id, _NO_TAIL)
            if before >= end:
                parent = None
            request.tails[group_id] = (end, key)
        return _make(Chunk, (key, parent, group_id, end, nbytes, request.tenant, False))

    def _by_group(self, keys: Iterable[ChunkKey]) -> Iterator[tuple[Group, Iterable[ChunkKey]]]:
        for suffix, its_keys in groupby(keys, key=itemgetter(_SUFFIX)):
            yield self._groups[suffix], its_keys

    def learned(self, entries: Sequence[Entry], request: Request) -> Sequence[Chunk] | None:
        """Chunks about to be loaded, made again where entries that a scan found know too little. None: all is known."""
        group = self._only
        if group is None or not entries or not entries[0].end_token or not _is_chain(entries):
            return self.make([entry.key for entry in entries], request)
        if not group.sliding:
            request.tails[group.group_id] = (entries[-1].end_token, entries[-1].key)
        return None

    def one(self, key: ChunkKey, request: Request, parent: ChunkKey | None) -> Chunk:
        """A chunk that a lookup has found below."""
        group = self.group(key)
        end = request.position(key) if request.position is not None else None
        return Chunk(key, None if group.sliding else parent, group.group_id, end or 0, group.nbytes, request.tenant)


def _is_chain(entries: Sequence[Entry]) -> bool:
    """Whether all know a parent but perhaps the first, of which a head may have none."""
    return all([entry.parent for entry in islice(entries, 1, None)])  # noqa: C419 - a generator takes twice as long


def _call_order(request: Request, maker: ChunkMaker) -> Callable[[Any], int]:
    """End tokens counted up in the order of calls, from the request's last known chunk of the group."""
    ends = {index: end for index, (end, _) in request.tails.items()}

    def position(key: Any) -> int:
        group = maker.group(key)
        ends[group.group_id] = end = ends.get(group.group_id, 0) + group.tokens_per_chunk
        return end

    return position


class Leases:
    """Pins that waiting requests hold on ready and pending chunks, so that nothing they wait for leaves again.

    Args:
        hold: pin an entry.
        release: take one pin back.
    """

    def __init__(self, hold: Callable[[Entry], None], release: Callable[[Entry], None]) -> None:
        self._hold = hold
        self._release = release
        self.holders: dict[int, Request] = {}
        """Requests that hold something."""
        self._pending: dict[int, Entry] = {}

    @property
    def n_held_pending(self) -> int:
        """Leased entries that no copy has filled yet: they are counted as held and as pending."""
        if self._pending:
            self._pending = {i: e for i, e in self._pending.items() if e.state is PENDING and e.n_pins}
        return len(self._pending)

    def renew(self, request: Request, entries: Sequence[Entry]) -> None:
        """Let the request hold exactly these entries from now on. Cheap where nothing changes from step to step."""
        entries = [entry for entry in entries if entry.state is not GONE]
        if entries == request.lease:
            return
        wanted = list({id(entry): entry for entry in entries}.values())
        for entry in wanted:
            self._hold(entry)
            if entry.state is PENDING:
                self._pending[id(entry)] = entry
        old, request.lease = request.lease, wanted
        for entry in old:
            self._release(entry)
        if wanted:
            self.holders[id(request)] = request
        else:
            self.holders.pop(id(request), None)

    def end(self, request: Request) -> None:
        """Give everything back."""
        if request.lease:
            self.renew(request, ())
