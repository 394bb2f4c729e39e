"""One mapping cut into slots: views of it, faulting it in, and closing it without pulling it from under a user."""

from __future__ import annotations

import errno
import logging
import mmap
import threading
from typing import ClassVar

from tierkv.errors import ClosedError

_logger = logging.getLogger(__name__)
_MADV_POPULATE_WRITE = 23  # Linux 5.14; faults pages in and changes no content, so it is safe beside running copies
_STEP_NBYTES = 64 << 20
"""Faulted per call: about 60 ms, which is what a close may have to wait for."""


class SlotMapping:
    """``n_slots`` slots of ``stride_nbytes`` in one mapping.

    Concurrency: views may be taken and used in any thread; ``close`` is called once, by the owner.

    Attributes:
        n_left_mapped: class-wide count of mappings that were still in use when they were closed. They live until their
            last view is gone.
        shared: True if other processes may map the same bytes.
    """

    n_left_mapped: ClassVar[int] = 0
    shared: ClassVar[bool] = False

    def __init__(self, mapped: mmap.mmap, n_slots: int, stride_nbytes: int) -> None:
        assert len(mapped) == n_slots * stride_nbytes, "a mapping of another size"
        self._mmap: mmap.mmap | None = mapped
        self._whole: memoryview | None = memoryview(mapped)
        self._n_slots = n_slots
        self._stride_nbytes = stride_nbytes
        self._stop = threading.Event()
        self._populating: threading.Thread | None = None
        self._populated_nbytes = 0

    @property
    def n_slots(self) -> int:
        return self._n_slots

    @property
    def stride_nbytes(self) -> int:
        return self._stride_nbytes

    @property
    def nbytes(self) -> int:
        return self._n_slots * self._stride_nbytes

    @property
    def populated_nbytes(self) -> int:
        """How far the background faulting has come."""
        return self._populated_nbytes

    @property
    def closed(self) -> bool:
        return self._whole is None

    @property
    def buffer(self) -> memoryview:
        """The whole mapping, writable: for ``numpy.frombuffer`` and ``torch.frombuffer``. It outlives ``close``."""
        return self._opened()[:]

    def view(self, slot: int) -> memoryview:
        """Writable bytes of one slot. It outlives ``close``. Raises IndexError outside ``range(n_slots)``."""
        if not 0 <= slot < self._n_slots:
            raise IndexError(f"slot {slot} is not in range({self._n_slots})")
        start = slot * self._stride_nbytes
        return self._opened()[start : start + self._stride_nbytes]

    def populate(self) -> None:
        """Fault all pages in from a daemon thread that never holds the GIL for it. At most once; returns at once.

        What the kernel refuses (no memory, too old) is logged and left to be faulted in by use.
        """
        if self._populating is None and not self.closed:
            self._populating = threading.Thread(target=self._populate, name="tierkv-populate", daemon=True)
            self._populating.start()

    def wait_populated(self, timeout_s: float | None = None) -> bool:
        """True once the background faulting has ended, however it ended, or was never begun."""
        if self._populating is not None:
            self._populating.join(timeout_s)
            return not self._populating.is_alive()
        return True

    def close(self) -> None:
        """Unmap, or leave that to the last live view. Idempotent; may take 0.2 s a GiB; never raises BufferError."""
        self._stop.set()
        self.wait_populated()
        whole, mapped, self._whole, self._mmap = self._whole, self._mmap, None, None
        if whole is None or mapped is None:
            return
        try:
            whole.release()
            mapped.close()
        except BufferError:
            # A copy, a tensor or a lease still looks at it: dropping our reference lets the last of them unmap it.
            SlotMapping.n_left_mapped += 1

    def _opened(self) -> memoryview:
        if self._whole is None:
            raise ClosedError("the pool was closed")
        return self._whole

    def _populate(self) -> None:
        assert self._mmap is not None, "close() waits for this thread"
        import ctypes  # noqa: PLC0415 - `import tierkv` is to be cheap, and this thread is not waited for

        libc = ctypes.CDLL(None, use_errno=True)  # not PyDLL: calls let go of the GIL, which mmap.madvise does not
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        anchor = ctypes.c_char.from_buffer(self._mmap)  # an export: the mapping cannot go while it lives
        address = ctypes.addressof(anchor)
        while self._populated_nbytes < self.nbytes and not self._stop.is_set():
            step = min(_STEP_NBYTES, self.nbytes - self._populated_nbytes)
            if libc.madvise(address + self._populated_nbytes, step, _MADV_POPULATE_WRITE) != 0:
                number = ctypes.get_errno()
                if number == errno.EINTR:
                    continue
                # Kernels before 5.14 do not know the call: nothing is wrong then, the first copies just wait longer.
                _logger.log(
                    logging.INFO if number == errno.EINVAL else logging.WARNING,
                    "host pool: faulting in stopped at %d of %d bytes (%s); the rest is faulted in by use",
                    self._populated_nbytes, self.nbytes, errno.errorcode.get(number, number),
                )  # fmt: skip
                return
            self._populated_nbytes += step
