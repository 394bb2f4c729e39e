"""Where a chunk lies, in a file of its own or in a slot of a slab: the one place that knows that there are two ways.

Both are read whatever the layout that is written: a root may change its layout, and its chunks stay.
"""

from __future__ import annotations

import contextlib
import time
from typing import Final, NamedTuple

from tierkv.tiers._fs.books import Held
from tierkv.tiers._fs.file_io import ChunkFiles, CorruptFileError, Identity, damage, identity_of
from tierkv.tiers._fs.memory import Scratch
from tierkv.tiers._fs.slab import Berth
from tierkv.tiers._fs.slab_io import SlabIO
from tierkv.tiers._fs.slabs import Slabs
from tierkv.types import ChunkKey

_MOST_TRIES: Final = 2
"""A slot has to change hands twice in a tenth of a second, and do so again, before what it holds is left unread."""


class Seen(NamedTuple):
    """What lies where a chunk would, unread."""

    nbytes: int
    identity: Identity
    damage: str | None = None
    """Why it can be no chunk, as a counter's name."""
    at: int | None = None
    """Slot in a slab; None for a file."""


class Store:
    """The chunks of one namespace.

    ``held`` is what the books know of a key; None to look in every place.

    Concurrency: any number of threads, on different keys.
    """

    def __init__(self, files: ChunkFiles, slabs: Slabs, slab_io: SlabIO) -> None:
        self._files = files
        self._slabs = slabs
        self._slab_io = slab_io

    def look(self, key: ChunkKey, owner: str, held: Held | None) -> Seen | None:
        """What an owner has under a key; None if nothing."""
        berth = self._slabs.find(key, owner, held)
        if berth is not None:
            return Seen(berth.slab.slot_nbytes, berth.identity, None, berth.row.slot)
        if held is not None and held.at is not None:
            return None
        found = self._files.look(key, owner)
        return None if found is None else Seen(found.st_size, identity_of(found), damage(found))

    def read(
        self, key: ChunkKey, owner: str, held: Held | None, buffer: memoryview, scratch: Scratch, *, touch: bool
    ) -> None:
        """Fill ``buffer`` with a verified chunk and zeros behind it. Raises as :meth:`ChunkFiles.read`."""
        berth = self._slabs.find(key, owner, held)
        if berth is not None:
            self._read_slot(berth, key, (owner, held), buffer, scratch, touch=touch)
        elif held is not None and held.at is not None:
            raise FileNotFoundError
        else:
            self._files.read(key, buffer, owner, scratch, touch=touch)

    def remove(
        self, key: ChunkKey, owner: str, held: Held | None, *, identity: Identity | None = None, keep_slot: bool = True
    ) -> bool:
        """Remove an owner's chunk; False if it was gone. With ``identity`` only that very one. Raises OSError."""
        berth = self._slabs.find(key, owner, held)
        if berth is not None:
            if identity is not None and berth.identity != identity:
                return False
            return self._slabs.free(berth, key, keep_slot=keep_slot)
        if held is not None and held.at is not None:
            return False
        return self._files.remove(key, owner, identity=identity)

    def reclaim(self, owner: str, held: Held) -> bool:
        """A chunk of ours is not there: take its slot back. False if that is the affair of who is removing it."""
        return held.at is None or self._slabs.reclaim(owner, held)

    def _read_slot(
        self, berth: Berth, key: ChunkKey, known: tuple[str, Held | None], buffer: memoryview, scratch: Scratch, *,
        touch: bool,
    ) -> None:  # fmt: skip
        for n_left in reversed(range(_MOST_TRIES)):
            is_fresh = berth.row.is_fresh
            try:
                self._slab_io.read(berth, key, buffer, scratch)
                break
            except CorruptFileError:
                # Its owner may have removed it and used the slot again while we read.
                again = self._slabs.find(key, *known)
                if again is None or again.identity != berth.identity:
                    raise FileNotFoundError from None
                # Or even for another chunk and then for this one, of which no row as fresh as this could tell. Of a
                # chunk of ours the books can, so the caller knows better.
                if not is_fresh or (not n_left and known[1] is not None):
                    raise
                if not n_left:
                    raise FileNotFoundError from None  # not now: a writer is busy there
                berth = again
        if touch:
            with contextlib.suppress(OSError):  # a file system that turned read-only still serves
                berth.slab.renew(berth.row.slot, key, time.time())
