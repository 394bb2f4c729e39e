"""Where a CPU pool's bytes lie: in this process alone, or in a memfd that one process makes and others join."""

from __future__ import annotations

import mmap

from tierkv.errors import ConfigError, bad_setting
from tierkv.tiers._mapping import SlotMapping
from tierkv.tiers._memory_limits import check_memory

ALIGNMENT_NBYTES = 4096


class PrivatePool(SlotMapping):
    """Slots in anonymous memory of this process. Sync; nothing is touched before the size was checked.

    Args:
        n_slots: at least 1.
        stride_nbytes: distance of slots, a multiple of 4,096.
        populate: fault the pages in from a background thread.

    Raises:
        ConfigError: a size is wrong, or larger than the machine or the cgroup has left.
    """

    def __init__(self, n_slots: int, stride_nbytes: int, *, populate: bool = True) -> None:
        nbytes = check_geometry(n_slots, stride_nbytes)
        check_memory("capacity", nbytes, stride_nbytes)
        try:
            mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"capacity is {nbytes}, but the kernel maps no such size here ({error})") from error
        super().__init__(mapped, n_slots, stride_nbytes)
        if populate:
            self.populate()


def check_geometry(n_slots: int, stride_nbytes: int) -> int:
    """Bytes of the pool. Raises ConfigError if it would have no slot or a stride that no direct I/O could use."""
    if stride_nbytes < ALIGNMENT_NBYTES or stride_nbytes % ALIGNMENT_NBYTES:
        nearest = max(1, -(-stride_nbytes // ALIGNMENT_NBYTES)) * ALIGNMENT_NBYTES
        raise bad_setting("stride_nbytes", stride_nbytes, f"a multiple of {ALIGNMENT_NBYTES}", nearest)
    if n_slots < 1:
        raise bad_setting("n_slots", n_slots, "at least 1", 1)
    return n_slots * stride_nbytes
