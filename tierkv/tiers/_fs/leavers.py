"""Files of ours that nobody alive can read: how they make room, coldest first."""

from __future__ import annotations

import logging
import os

from tierkv.tiers._fs.books import Leaver
from tierkv.tiers._fs.catalogue import BadCatalogueError, parse_slab_name
from tierkv.tiers._fs.dirs import NotRegularError, open_directory, unlink_first
from tierkv.tiers._fs.file_io import Tally
from tierkv.tiers._fs.listing import leaf_opened
from tierkv.tiers._fs.slab import Slab
from tierkv.tiers._fs.slab_files import SlabFiles

_log = logging.getLogger(__name__)


def shrink_leaver(root_fd: int, leaver: Leaver, nbytes: int) -> Leaver | None:
    """Free at least ``nbytes`` of it, or all there is. Returns what is left: None if it is gone, itself if it stays.

    A file goes as a whole. A slab gives back its idle slots, then its coldest chunks.
    """
    try:
        namespace_fd = open_directory(leaver.namespace, root_fd)
    except (FileNotFoundError, NotRegularError):
        return None
    try:
        if not leaver.leaf:
            return _shrink_slab(namespace_fd, leaver, nbytes)
        with leaf_opened(leaver.leaf, namespace_fd) as leaf_fd:
            return None if leaf_fd is None or unlink_first([leaver.name], leaf_fd) else leaver
    except OSError as error:
        _log.warning("a slab that nobody reads makes no room: %s", str(error))
        return leaver
    finally:
        os.close(namespace_fd)


def _shrink_slab(namespace_fd: int, leaver: Leaver, nbytes: int) -> Leaver | None:
    name = parse_slab_name(leaver.name)
    assert name is not None
    digest = bytes.fromhex(leaver.namespace)
    files = SlabFiles(namespace_fd, digest, direct=False, durable=False, tally=Tally())
    left_nbytes = 0
    if nbytes < leaver.nbytes:
        try:
            left_nbytes = _shrink(files.open(name.owner, name.slot_nbytes), nbytes)
        except (BadCatalogueError, FileNotFoundError):
            left_nbytes = 0
    if 0 < left_nbytes < leaver.nbytes:
        return leaver._replace(nbytes=left_nbytes)
    left = files.remove(name.owner, name.slot_nbytes)
    if left is None:
        return None
    return leaver if left >= leaver.nbytes else leaver._replace(nbytes=left)


def _shrink(slab: Slab, nbytes: int) -> int:
    """What the slab occupies afterwards; 0 if no chunk is left."""
    rows = sorted((row for piece in slab.load() for row in piece), key=lambda row: row.used_s)
    n_wanted = -(-nbytes // slab.slot_nbytes)
    n_wanted -= slab.give_back(n_wanted)
    for row in rows[: max(0, n_wanted)]:
        if slab.erase(row.slot, row.key):
            slab.discard(row.slot)
    return slab.catalogue.nbytes + (slab.n_idle + slab.n_taken) * slab.slot_nbytes if slab.n_taken else 0
