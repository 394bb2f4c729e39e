"""Events of the hierarchy in vLLM's words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from vllm.v1.kv_offload.base import Medium

from tierkv.types import Event, EventKind
from tierkv.vllm import _compat
from tierkv.vllm._below import Below


def as_vllm_events(events: Sequence[Event], below: Below | None) -> Iterator[Any]:
    """One ``OffloadingEvent`` for each run of events of one kind and level; levels that were not asked to emit, do not.

    vLLM's own fs tier never says that it has removed something; ours does, and says so beforehand.
    """
    for (index, kind), run in groupby(events, key=lambda event: (event.level, event.kind)):
        keys = [event.chunk.key for event in run]
        removed = kind is EventKind.REMOVED
        if index == 0:
            yield _compat.event(keys, Medium.CPU, removed=removed, locality=None, ownership=None)
            continue
        assert below is not None, "events of a level come from a level"
        level = below.levels[index - 1]
        if level.emits_events:
            yield _compat.event(
                keys, level.medium, removed=removed, locality=level.locality, ownership=f"{index}:{level.name}"
            )
