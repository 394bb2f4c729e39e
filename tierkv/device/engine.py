"""Copy jobs, and runtimes that take them whole; an engine over :class:`tierkv.device.runtime.DeviceRuntime` follows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tierkv.device.layout import DeviceLayout, GroupCopy
from tierkv.device.runtime import Direction
from tierkv.errors import TierError


@dataclass(frozen=True, slots=True)
class CopyJob:
    """One copy in one direction. ``id`` is unique among the jobs of that direction that have not ended."""

    id: int
    direction: Direction
    copies: Sequence[GroupCopy]
    tag: Any = None
    """The submitter's; handed back untouched."""


@dataclass(frozen=True, slots=True)
class CopyDone:
    """A copy that has ended: no thread and no DMA touches its blocks or slots any more."""

    job: CopyJob
    nbytes: int
    duration_s: float
    error: Exception | None = None
    """Set if it failed: then its target holds anything."""


class CopyRuntime(Protocol):
    """Copies between the pages of a device's tensors and host slots.

    Jobs of one direction run and end in the order in which they were submitted; the two directions run side by side.
    A store starts after the work that writes its blocks, a load after earlier work on its blocks.
    """

    def submit(self, job: CopyJob) -> None:
        """Queue a copy and return at once. After :meth:`close` it fails at once, on the calling thread."""
        ...

    def copy_plain(self, job: CopyJob) -> int:
        """Copy now, on the calling thread, by the simplest means that the device has; returns the bytes copied.

        For a copy that failed by the usual means.
        """
        ...

    def wait(self, ids: Collection[tuple[Direction, int]] | None = None) -> None:
        """Block until these jobs (None: all) have ended and their ``done`` has returned. Unknown ones have."""
        ...

    def close(self) -> None:
        """Wait for running copies, fail those that have not begun, touch nothing afterwards. Idempotent."""
        ...


def open_runtime(
    tensors: Sequence[torch.Tensor],
    layout: DeviceLayout,
    slots: memoryview,
    stride_nbytes: int,
    done: Callable[[CopyDone], None],
) -> CopyRuntime:
    """The runtime of the device on which the tensors lie.

    Args:
        tensors: one a tensor of the layout, each ``int8 [n_blocks, page_nbytes]``, rows at any stride.
        layout: where their pages lie in a slot.
        slots: all slots, one behind the other; must outlive the runtime.
        stride_nbytes: distance of slots.
        done: called once for each job when it has ended, in order for each direction, on a thread of the runtime.

    Raises:
        TierError: no runtime for this device, or the tensors are not what the layout says.
    """
    devices = {tensor.device.type for tensor in tensors}
    if devices != {"cpu"}:
        raise TierError(
            "device",
            f"KV tensors on {', '.join(sorted(devices)) or 'no device'}: only the cpu runtime exists so far, "
            "the npu and cuda runtimes (streams, events and pinned slots) do not",
        )
    from tierkv.device.cpu import CpuRuntime  # noqa: PLC0415 - one runtime is loaded, the device's

    return CpuRuntime(tensors, layout, slots, stride_nbytes, done)
