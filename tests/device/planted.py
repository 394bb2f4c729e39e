"""Engines with one bug each. Every one has been made by somebody, in a connector that shipped."""

from __future__ import annotations

from typing import Any

from tierkv.device.engine import CopyJob, TransferEngine
from tierkv.device.lowering import DescriptorPool
from tierkv.device.runtime import Direction


class _NoProducer(TransferEngine):
    """Copies of one direction do not wait for the stream that writes or zeroes their blocks."""

    direction: Direction

    def _launch(self, flight: Any) -> None:
        if flight.job.direction is self.direction:
            flight.ready = self._runtime.new_event()  # never recorded: holds nobody
        super()._launch(flight)


class StoreWithoutProducer(_NoProducer):
    direction = Direction.STORE


class LoadWithoutProducer(_NoProducer):
    direction = Direction.LOAD


class EndedAtOnce(TransferEngine):
    """A job counts as ended when it is polled, whatever its event says."""

    def _has_ended(self, flight: Any) -> bool:
        return True


class EventOnTheWrongStream(TransferEngine):
    """The job's event is recorded on the producer's stream: it happens when the kernel has run, not the copy."""

    def _launch(self, flight: Any) -> None:
        super()._launch(flight)
        flight.event = self._runtime.new_event()
        flight.event.record(self._runtime.current_stream())


class DescriptorsReusedEarly(TransferEngine):
    """The descriptors of a batch go back to the pool when it has been submitted."""

    def _launch(self, flight: Any) -> None:
        super()._launch(flight)
        self._pool.give_back(flight.descriptors)
        flight.descriptors = None


class DirectionSwappedForOneGroup(TransferEngine):
    """The pairs of the second group are copied the other way."""

    def _launch(self, flight: Any) -> None:
        batch = flight.batch
        n = sum(self._n_pairs(flight.job, copy) for copy in flight.job.copies if copy.group == 0)
        batch.device[n:], batch.host[n:] = batch.host[n:].copy(), batch.device[n:].copy()
        super()._launch(flight)

    def _n_pairs(self, job: CopyJob, copy: Any) -> int:
        return len(self._lowering.batch(job.direction, [copy], _NoPool())[0].nbytes)


class _NoPool(DescriptorPool):
    """Keeps its hands off the engine's pool."""


class OrderAcrossDirections(TransferEngine):
    """A store that has ended ends the loads that were submitted before it."""

    def _settle(self, direction: Direction) -> None:
        ended = len(self._ended)
        super()._settle(direction)
        if direction is Direction.STORE and len(self._ended) > ended:
            last = self._ended[-1].job.id
            loads = self._flights[Direction.LOAD]
            while loads and loads[0].job.id < last:
                self._ended.append(self._end(loads.popleft()))


class WaitsForTheDevice(TransferEngine):
    """Submitting waits for the copy: nothing is wrong but the time."""

    def submit(self, job: CopyJob, *, refused: Exception | None = None) -> None:
        super().submit(job, refused=refused)
        self._streams[job.direction].synchronize()


ENGINE_BUGS: tuple[type[TransferEngine], ...] = (
    StoreWithoutProducer,
    LoadWithoutProducer,
    EndedAtOnce,
    EventOnTheWrongStream,
    DescriptorsReusedEarly,
    DirectionSwappedForOneGroup,
    OrderAcrossDirections,
)
SCHEDULER_BUGS = ("slot_reuse", "block_reuse")
