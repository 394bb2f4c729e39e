"""What an operator asked of a tier and its root, and what that comes to on the disk that it lies on."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Final, Literal, get_args

from tierkv.errors import bad_setting
from tierkv.protocols import Clock, TierContext
from tierkv.sizes import format_size
from tierkv.tiers._fs.catalogue import catalogue_nbytes
from tierkv.tiers._fs.format import PAGE_NBYTES, charge_nbytes
from tierkv.tiers._fs.index import index_room_nbytes
from tierkv.tiers._fs.probe import default_min_free_nbytes
from tierkv.tiers._fs.scan import Gate
from tierkv.tiers._fs.secret import SecretSource

_log = logging.getLogger(__name__)

Layout = Literal["auto", "slab", "files"]
"""How new chunks lie on the disk; what is there is read, however it lies."""
LAYOUTS: Final[tuple[str, ...]] = get_args(Layout)


@dataclass(frozen=True)
class Wishes:
    """The settings of a tier, checked."""

    root: str
    capacity_nbytes: int | None
    min_free_nbytes: int | None
    n_workers: int
    durable: bool
    clock: Clock
    gate: Gate | None
    secret: SecretSource
    layout: Layout = "auto"

    def refuse_small(self, name: str, ctx: TierContext) -> None:
        """Raise ConfigError where a capacity does not hold one chunk."""
        in_slab = self.layout == "slab"
        least = least_capacity_nbytes(ctx.chunk_nbytes, in_slab=in_slab)
        allowed = (
            f"at least {least} bytes: one chunk of {ctx.chunk_nbytes} occupies {charge_nbytes(ctx.chunk_nbytes)}, "
            f"lock file{', index and catalogue' if in_slab else ' and index'} the rest"
        )
        if self.capacity_nbytes is not None and self.capacity_nbytes < least:
            raise bad_setting(f"{name}.capacity", self.capacity_nbytes, allowed, least)
        if 0 < ctx.capacity_nbytes < least:
            raise bad_setting(f"{name}'s level capacity", ctx.capacity_nbytes, allowed, least)

    def least_free_nbytes(self, name: str, ctx: TierContext, root_fd: int) -> int:
        """What is to stay free on the disk.

        Raises:
            ConfigError: the disk is so small that no chunk could ever be stored. One that is merely full for now is not
                refused: it may be freed.
        """
        found = os.fstatvfs(root_fd)
        if self.min_free_nbytes is None:
            return default_min_free_nbytes(found)
        # Less what is set aside for root, of which we get nothing; 0 where a file system does not tell.
        disk_nbytes = (found.f_blocks - found.f_bfree + found.f_bavail) * found.f_frsize if found.f_blocks else 0
        least = least_capacity_nbytes(ctx.chunk_nbytes, in_slab=self.layout == "slab")
        if self.min_free_nbytes > disk_nbytes - least >= 0:  # on a smaller disk it is the root that is wrong
            allowed = f"less than the {disk_nbytes} bytes that the file system has for us by the {least} of one chunk"
            raise bad_setting(f"{name}.min_free", self.min_free_nbytes, allowed, max(0, disk_nbytes - least))
        return self.min_free_nbytes

    def root_capacity_nbytes(self, name: str, ctx: TierContext, root_fd: int, ours_nbytes: int) -> int:
        """What was asked for, or half of what is free or ours. Raises ConfigError where that holds no chunk."""
        self._warn_if_full(name, ctx, root_fd, ours_nbytes)
        asked = [n for n in (self.capacity_nbytes, ctx.capacity_nbytes) if n]
        if asked:
            return min(asked)
        found = os.fstatvfs(root_fd)
        free_nbytes = found.f_bavail * found.f_frsize
        capacity = (free_nbytes + ours_nbytes) // 2
        least = least_capacity_nbytes(ctx.chunk_nbytes, in_slab=self.layout == "slab")
        if capacity < least:
            raise bad_setting(f"{name}.root", self.root, f"on a disk with {2 * least} bytes free or ours")
        _log.info(
            "%s: no capacity given; taking %s, half of %s free and %s ours on %s", name, format_size(capacity),
            format_size(free_nbytes), format_size(ours_nbytes), os.path.realpath(self.root),
        )  # fmt: skip
        return capacity

    def _warn_if_full(self, name: str, ctx: TierContext, root_fd: int, ours_nbytes: int) -> None:
        """Say so where nothing can be stored before somebody tidies up: a tier that is merely empty says nothing."""
        found = os.fstatvfs(root_fd)
        free_nbytes = found.f_bavail * found.f_frsize
        kept_nbytes = default_min_free_nbytes(found) if self.min_free_nbytes is None else self.min_free_nbytes
        least = least_capacity_nbytes(ctx.chunk_nbytes, in_slab=self.layout == "slab")
        if free_nbytes + ours_nbytes < kept_nbytes + least:
            sizes = map(format_size, (free_nbytes, ours_nbytes, kept_nbytes))
            told = "%s: no room for a chunk on %s: %s are free and %s ours, of which min_free leaves %s to others"
            _log.warning(told, name, os.path.realpath(self.root), *sizes)


def least_capacity_nbytes(chunk_nbytes: int, *, in_slab: bool = False) -> int:
    """The smallest capacity that holds a chunk: header and payload, our lock file, an index, a slab's catalogue."""
    least = PAGE_NBYTES + index_room_nbytes(1) + charge_nbytes(chunk_nbytes)
    return least + (catalogue_nbytes(1) if in_slab else 0)
