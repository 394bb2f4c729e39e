"""Which requests the scheduler's half sees, told to a :class:`~tierkv.recorder.TraceRecorder`.

A request is recorded in the step in which it is scheduled first: then its keys are there, and they are its prompt's.
vLLM tells a manager of whole chunks only: prompts are as long as their whole chunks, and shorter ones are no requests.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from tierkv.recorder import TraceRecorder
from tierkv.traces import Header
from tierkv.vllm import _compat
from tierkv.vllm._requests import Group

logger = logging.getLogger("vllm.tierkv.recording")


class Recording:
    """Belongs to the scheduler's thread. The work is done on the recorder's.

    Args:
        recorder: where requests go.
        group: the group whose chunks stand for a request's.
    """

    def __init__(self, recorder: TraceRecorder, group: Group) -> None:
        self.recorder = recorder
        self._suffix = group.group_id.to_bytes(4, "big")
        self._tokens = group.tokens_per_chunk
        self._arrived: dict[str, Any] = {}
        self._warned = False

    def arrived(self, context: Any) -> None:
        """A request has come and waits to be scheduled."""
        self._arrived[context.req_id] = context

    def scheduled(self, req_ids: Collection[str]) -> None:
        """These run for the first time in this step."""
        for req_id in req_ids:
            context = self._arrived.pop(req_id, None)
            if context is not None:
                self._record(context)

    def finished(self, context: Any) -> None:
        """A request that never ran is not recorded."""
        self._arrived.pop(context.req_id, None)

    def close(self) -> None:
        self.recorder.close()

    def _record(self, context: Any) -> None:
        if _compat.position_getter(context) is None:
            if not self._warned:
                self._warned = True
                logger.warning("record_trace records nothing: this vLLM does not say where a request's chunks end")
            return
        # vLLM names chunks in order; ends inside a chunk are those of a tail that it may also store.
        keys: list[bytes] = []
        for key, end in _compat.key_positions(context).items():
            if key[-4:] == self._suffix and end == (len(keys) + 1) * self._tokens:
                keys.append(bytes(key))
        if keys:
            self.recorder.record(len(keys) * self._tokens, keys)


def make_recording(spec: Any, groups: list[Group]) -> Recording | None:
    """The recording that the settings ask for. Opens nothing."""
    options, parallel = spec.options, spec.config.parallel
    if options.record_trace is None:
        return None
    group = next((group for group in groups if not group.sliding), groups[0])
    n_pools = 1 if spec.shared else parallel.world_size
    header = Header(
        tokens_per_block=group.tokens_per_chunk,
        block_nbytes=spec.geometry.stride_nbytes * n_pools * len(groups),
        blocks_per_chunk=spec.blocks_per_chunk,
    )
    # Engines that share the work share their settings, and a file has one writer.
    rank = f".dp{parallel.data_parallel_index}" if getattr(parallel, "data_parallel_size", 1) > 1 else ""
    recorder = TraceRecorder(options.record_trace + rank, header, limit_nbytes=options.record_trace_nbytes)
    return Recording(recorder, group)
