"""What a tier says on the spot, between two awaits: never an exception, whatever it raises.

A bad tier is no worse than none. One that cannot answer holds nothing that is worth a look, owns nothing and has the
room that it had. Writes are tried there, since what waits for a tier keeps slots above it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from tierkv._faults import Faults
from tierkv.errors import TierError, TierKVError
from tierkv.protocols import Bounded, Charging, Owning, ScanTier, Tier
from tierkv.types import Chunk, ChunkKey, Found

_log = logging.getLogger(__name__)

_FITS_NOWHERE: Final = 1 << 62
"""Charged for a chunk of which the tier cannot say what it occupies."""
_MOST_TOLD: Final = 80
_CHUNK_OR_NOT: Final = (Chunk, type(None))  # made once: a scan tells of millions


class Answers:
    """The synchronous questions to one tier, those of its optional protocols among them.

    Args:
        tier: any. What it does not offer is answered as for a tier that remembers nothing and has a fixed size.
        capacity_nbytes: its share until it says another one.

    Concurrency: as the tier's own methods.
    """

    def __init__(self, tier: Tier, capacity_nbytes: int) -> None:
        self._name = tier.name
        self._scan = tier if isinstance(tier, ScanTier) else None
        self._owning = tier if isinstance(tier, Owning) else None
        self._bounded = tier if isinstance(tier, Bounded) else None
        self._charging = tier if isinstance(tier, Charging) else None
        self._share_nbytes = capacity_nbytes
        self._faults = Faults(_log)

    def settled(self, key: ChunkKey) -> bool:
        """A key unknown to the ledger is surely absent: true also of a tier that cannot say."""
        try:
            return self._scan is None or self._scan.settled(key)
        except Exception as error:  # noqa: BLE001 - see the module
            self._fault("settled", error)
            return True

    def owns(self, key: ChunkKey) -> bool:
        """It has this chunk of ours."""
        try:
            return self._owning is None or self._owning.owns(key)
        except Exception as error:  # noqa: BLE001
            self._fault("owns", error)
            return False

    def writable(self) -> bool:
        try:
            return self._scan is None or self._scan.writable
        except Exception as error:  # noqa: BLE001
            self._fault("writable", error)
            return True

    def share_nbytes(self) -> int:
        """Bytes that the level may hold now."""
        if self._bounded is not None:
            try:
                self._share_nbytes = _size(self._name, "share", self._bounded.share_nbytes())
            except Exception as error:  # noqa: BLE001
                self._fault("share_nbytes", error)
        return self._share_nbytes

    def charge_nbytes(self, chunk_nbytes: int) -> int:
        """Bytes that a payload of this length occupies."""
        if self._charging is None:
            return chunk_nbytes
        try:
            return _size(self._name, "charge", self._charging.charge_nbytes(chunk_nbytes))
        except Exception as error:  # noqa: BLE001
            self._fault("charge_nbytes", error)
            return _FITS_NOWHERE

    def _fault(self, what: str, error: Exception) -> None:
        self._faults.tell(f"{self._name}: {what} raised", error)


def found_in(told: object) -> Sequence[Found]:
    """What a scan or a probe told of, without the keys that are not there. Raises TierKVError: it is nonsense."""
    if not isinstance(told, Sequence):
        raise TierKVError(f"it told of {_brief(told)}")
    found = told if all(told) else [item for item in told if item is not None]
    if not _are_usual(found):
        _check_each(found)
    return found


def _are_usual(found: Sequence[Found]) -> bool:
    """By column: a scan may tell of millions, and to look at one after another costs as much as to take them in."""
    types = set(map(type, found))
    if types != {Found}:
        return not types
    keys, sizes, _, chunks = zip(*found, strict=True)
    key_types, size_types, chunk_types = (set(map(type, column)) for column in (keys, sizes, chunks))
    return key_types == {bytes} and size_types == {int} and chunk_types <= {Chunk, type(None)} and min(sizes) >= 0


def _check_each(found: Sequence[object]) -> None:
    for item in found:
        fields: tuple[object, ...] = item if isinstance(item, Found) else (None,) * 4
        key, nbytes, _, chunk = fields
        if not isinstance(key, bytes) or not isinstance(chunk, _CHUNK_OR_NOT):
            raise TierKVError(f"it told of {_brief(item)}")
        if not isinstance(nbytes, int) or nbytes < 0:
            raise TierKVError(f"it told of a chunk of {_brief(nbytes)} bytes")


def _brief(told: object) -> str:
    text = repr(told)
    return text if len(text) <= _MOST_TOLD else f"{text[:_MOST_TOLD]}..."


def _size(name: str, what: str, nbytes: object) -> int:
    if not isinstance(nbytes, int) or nbytes < 0:
        raise TierError(name, f"a {what} of {nbytes!r} bytes")
    return nbytes
