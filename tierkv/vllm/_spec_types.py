"""What both halves of the adapter must agree on: the slots of a job, and how a chunk lies in a slot."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.v1.kv_offload.base import LoadStoreSpec

ALIGN_NBYTES = 4096
"""Slots start at multiples of this: a page of memory and the unit of O_DIRECT."""


class SlotSpec(LoadStoreSpec):
    """The slots of one store or load, sent by the scheduler to every worker (pickled).

    One entry a chunk, in the order of the keys that the manager answered for: groups ascending, chunks ascending.

    Attributes:
        slots: slot of each chunk.
        tickets: ticket of each slot in this direction; the worker stamps it when the copy has ended.
        generation: generation of the pool's control page; a worker that knows another one copies nothing.
        groups: KV-cache group of each chunk, as in the last four bytes of its key. Not asked of the scheduler's own
            job: if a chunk has a hole in its middle, the job's block counts alone do not say which chunk it is.
    """

    __slots__ = ("generation", "groups", "slots", "tickets")

    def __init__(
        self, slots: tuple[int, ...], tickets: tuple[int, ...], generation: int = 0, groups: tuple[int, ...] = ()
    ) -> None:
        self.slots = slots
        self.tickets = tickets
        self.generation = generation
        self.groups = groups

    def __repr__(self) -> str:
        return f"SlotSpec(slots={self.slots}, tickets={self.tickets}, generation={self.generation})"


class ChunkGeometry(NamedTuple):
    """Bytes of a chunk and of its slot; the same on the scheduler's side and in every worker.

    In a shared pool a slot is ``rank 0's bytes | rank 1's | ... | padding`` (or canonical pages, which are never
    longer); a private pool's slot holds one rank's bytes and the padding.
    """

    rank_nbytes: int
    """Bytes of a chunk that one worker holds."""
    chunk_nbytes: int
    """Bytes of a chunk in one slot: every rank's in a shared pool, one rank's in a private one."""
    stride_nbytes: int
    """Distance of slots: ``chunk_nbytes`` rounded up to :data:`ALIGN_NBYTES`."""

    @classmethod
    def of(cls, config: Any, *, shared: bool) -> ChunkGeometry:
        """Geometry under vLLM's ``OffloadingConfig``."""
        rank_nbytes = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk
        chunk_nbytes = rank_nbytes * (config.parallel.world_size if shared else 1)
        return cls(rank_nbytes, chunk_nbytes, -(-chunk_nbytes // ALIGN_NBYTES) * ALIGN_NBYTES)
