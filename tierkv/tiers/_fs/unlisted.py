"""Slabs whose catalogue tells nothing: nobody finds what lies in them until an engine has mended it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from tierkv.tiers._fs.catalogue import (
    SLAB,
    BadCatalogueError,
    SlabName,
    allocated_nbytes,
    is_no_use,
    opened,
    parse_slab_name,
)
from tierkv.tiers._fs.dirs import directory, entries_of
from tierkv.tiers._fs.inspection import Root


class Unlisted(NamedTuple):
    """A slab whose catalogue cannot be read."""

    place: str
    """Path below the root."""
    owner: str
    why: str
    """What is the matter with the catalogue."""
    n_slots: int
    """Slots with blocks: each may hold a chunk, one that was evicted, or nothing."""
    is_mended: bool
    """By an engine that opens the root; False if that could not read it either."""

    @property
    def text(self) -> str:
        """For an operator."""
        until = " until an engine that opens the root has mended it from the slots' own headers" * self.is_mended
        return f"the catalogue {self.why}: {self.n_slots:,} slots may hold chunks, which nobody finds{until}"


def unlisted_slabs(root: Root, namespace: str = "") -> Iterator[Unlisted]:
    """Those in namespaces whose digest begins so; not those that are just being made, renamed or removed."""
    for digest in root.namespaces():
        with directory(digest, root.fd) as dir_fd:
            if dir_fd is None or not digest.startswith(namespace):
                continue
            for name, found in entries_of(dir_fd):
                slab = parse_slab_name(name)
                if slab is None or slab.kind != SLAB or slab.is_part or not stat.S_ISREG(found.st_mode):
                    continue
                n_slots = allocated_nbytes(found) // slab.slot_nbytes
                lack = _lack(slab, name, dir_fd, bytes.fromhex(digest)) if n_slots else None
                if lack is not None:
                    yield Unlisted(f"{digest}/{name}", slab.owner, _words(lack), n_slots, is_no_use(lack))


def _lack(slab: SlabName, name: str, dir_fd: int, digest: bytes) -> BadCatalogueError | OSError | None:
    """Why a slab's catalogue cannot be read; None if it can, or if the slab has gone."""
    lack: BadCatalogueError | OSError | None = None
    for _ in range(2):  # who takes a slab over renames it before its catalogue; who removes one removes it first
        try:
            os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        try:
            with opened(slab, dir_fd, digest):
                return None
        except (BadCatalogueError, OSError) as error:
            lack = error
    return lack


def _words(lack: BadCatalogueError | OSError) -> str:
    if isinstance(lack, FileNotFoundError):
        return "is missing"
    if isinstance(lack, BadCatalogueError):
        return f"was cut or is not this slab's ({lack})"
    return f"cannot be read ({lack.strerror})"
