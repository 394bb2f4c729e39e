"""``tierkv doctor``: why a tier stays empty, or slow, in one sentence for each reason."""

from __future__ import annotations

import argparse
import json
import os
import stat
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tierkv.cli._words import OTHER, counted, lying
from tierkv.errors import bad_setting
from tierkv.sizes import format_size

if TYPE_CHECKING:
    from tierkv.tiers._fs.inspection import Owner, Root

DESCRIPTION = """\
Looks for the reasons for which a tier stays empty, small or slow: permissions, space, locks, owners, namespaces that do
not match, clocks, memory. One line a finding, what to do included. Safe beside running engines; makes one small file in
ROOT and removes it. Exit code 1 if something is wrong."""

STALE_S: Final = 30.0
"""Silence after which a living owner's heartbeat, due each second, is worth a word."""
AHEAD_S: Final = 60.0
"""What clocks may differ by."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that an operator should know. ``wrong``: it keeps the tier from doing its work."""

    wrong: bool
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``doctor``."""
    parser.add_argument("root", metavar="ROOT", help="the tier's root_dir; may not exist yet")
    parser.add_argument("--json", action="store_true", help="one JSON object a line: wrong, text")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; 1 if one of them is wrong."""
    findings = list(examine(arguments.root, time.time()))
    for finding in findings:
        print(
            json.dumps({"wrong": finding.wrong, "text": finding.text})
            if arguments.json
            else f"{'WRONG' if finding.wrong else 'note '}  {finding.text}"
        )
    n_wrong = sum(finding.wrong for finding in findings)
    if not arguments.json:
        n_notes = counted(len(findings) - n_wrong, "note")
        print(f"{n_wrong} wrong, {n_notes}" if findings else "nothing to say: all is well")
    return int(n_wrong > 0)


def examine(path: str, now_s: float) -> Iterator[Finding]:
    """Everything worth saying about a root. Raises ConfigError if nothing at all can be said."""
    from tierkv.tiers._fs.inspection import Root  # noqa: PLC0415 - needs the extra fs

    if not path.strip():
        raise bad_setting("ROOT", path, "the path of a directory", example="/var/cache/tierkv")
    try:
        os.lstat(path)
    except FileNotFoundError:
        yield from _not_there(path)
        return
    except OSError:
        pass  # it is out of reach, and opening it says why
    with closing(Root("ROOT", path)) as root:
        yield from _directory(path)
        yield from _file_system(path)
        owners = root.owners()
        yield from _space(path, owners)
        yield from _owners(owners, now_s)
        yield from _content(root, owners, now_s)
    yield from _memory()


def _not_there(path: str) -> Iterator[Finding]:
    parent = os.path.dirname(os.path.abspath(path))
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    if os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        yield Finding(False, f"{path} does not exist; an engine would make it in {parent}")
    else:
        yield Finding(True, f"{path} does not exist and this user may not make it: {parent} is not writable")


def _directory(path: str) -> Iterator[Finding]:
    from tierkv.tiers._fs.inspection import is_ours  # noqa: PLC0415 - needs the extra fs

    found = os.stat(path)
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        yield Finding(True, f"{path} is not readable and writable for uid {os.geteuid()}: it belongs to {found.st_uid}")
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        advice = "chmod 700"
        if mode & stat.S_ISVTX or not all(map(is_ours, os.listdir(path))):
            own = os.path.join(path, "tierkv")
            advice = f"it is not tierkv's alone, so give the tier a directory of its own, such as {own}"
        yield Finding(False, f"{path} has mode {mode:o}: others can see or change KV caches in it; {advice}")
    if found.st_uid != os.geteuid():
        yield Finding(
            False, f"{path} belongs to uid {found.st_uid}, this is uid {os.geteuid()}: ask as the engine's user"
        )


def _file_system(path: str) -> Iterator[Finding]:
    from tierkv.tiers._fs.probe import try_out  # noqa: PLC0415 - needs the extra fs

    abilities = try_out(path)
    if abilities.error is not None:
        yield Finding(True, f"no file can be made in {path}: {abilities.error.strerror}")
        return
    if not abilities.flock:
        yield Finding(True, "flock does not exclude anybody on this file system: two engines must not share this root")
    if not abilities.direct:
        yield Finding(False, "O_DIRECT does not work here: chunks go through the page cache, which costs host memory")
    if abilities.slab:
        yield Finding(False, 'layout "auto" takes a slab here: new chunks go into one file an engine')
    else:
        yield Finding(
            False,
            'layout "auto" takes files here, one a chunk, as the file system cannot give a file blocks and take them '
            'back; layout "slab" is refused',
        )


def _space(path: str, owners: list[Owner]) -> Iterator[Finding]:
    from tierkv.tiers._fs.probe import default_min_free_nbytes  # noqa: PLC0415 - needs the extra fs

    found = os.statvfs(path)
    free_nbytes, floor_nbytes = found.f_bavail * found.f_frsize, default_min_free_nbytes(found)
    if free_nbytes < floor_nbytes:
        yield Finding(
            True,
            f"{format_size(free_nbytes)} are free on the file system, and a tier leaves {format_size(floor_nbytes)} "
            f"free unless min_free says otherwise: it shrinks instead of growing; remove what is not tierkv's",
        )
    if found.f_files and found.f_favail < 1_000:
        yield Finding(
            True,
            f"{found.f_favail} inodes are left; each chunk outside of a slab is a file: make room or raise "
            "blocks_per_chunk",
        )
    for owner in owners:
        page = owner.page
        if owner.alive and page is not None and page.capacity_nbytes - page.used_nbytes > free_nbytes:
            yield Finding(
                False,
                f"pid {page.pid} may fill {format_size(page.capacity_nbytes)} and has {format_size(page.used_nbytes)}; "
                f"with {format_size(free_nbytes)} free it will not get there",
            )


def _owners(owners: list[Owner], now_s: float) -> Iterator[Finding]:
    alive = [owner for owner in owners if owner.alive]
    if len(owners) > len(alive):
        yield Finding(
            False,
            f"{counted(len(owners) - len(alive), 'dead owner')}: served as before, and taken over by the next engine",
        )
    capacities = {owner.page.capacity_nbytes for owner in alive if owner.page is not None}
    if len(capacities) > 1:
        sizes = ", ".join(map(format_size, sorted(capacities)))
        yield Finding(
            False, f"living engines were given different capacities ({sizes}): the least of them holds for all"
        )
    for owner in alive:
        page = owner.page
        if page is None or page.reserved_nbytes == 0:
            yield Finding(
                False, f"owner {owner.id} lives and has no room yet: it starts, or the others have given way to none"
            )
            continue
        age_s = now_s - page.heartbeat_s
        if not age_s <= STALE_S:
            yield Finding(
                True, f"pid {page.pid} (owner {owner.id}) lives and was last heard {age_s:,.0f} s ago: it hangs"
            )
        elif age_s < -AHEAD_S:
            yield Finding(True, f"the heartbeat of pid {page.pid} lies {-age_s:,.0f} s in the future: a clock is wrong")


def _content(root: Root, owners: list[Owner], now_s: float) -> Iterator[Finding]:
    from tierkv.tiers._fs.found import Kind  # noqa: PLC0415 - needs the extra fs
    from tierkv.tiers._fs.unlisted import unlisted_slabs  # noqa: PLC0415

    nbytes_of: defaultdict[str, int] = defaultdict(int)
    n_of: defaultdict[Kind, int] = defaultdict(int)
    n_ahead = 0
    for found in root.files():
        n_of[found.kind] += 1
        n_ahead += found.mtime_s > now_s + AHEAD_S
        if found.kind in (Kind.CHUNK, Kind.SLAB):
            nbytes_of[found.namespace] += found.charge_nbytes
    wanted = {owner.page.namespace for owner in owners if owner.alive and owner.page is not None}
    for namespace in sorted(wanted - nbytes_of.keys()):
        if nbytes_of:
            yield Finding(
                False,
                f"namespace {namespace[:8]} of a living engine is empty, unlike {counted(len(nbytes_of), 'other')}: "
                "its model, precision, layout, checksum key or tierkv's format differ, so nothing of theirs is of use",
            )
    left = [nbytes for namespace, nbytes in nbytes_of.items() if namespace not in wanted]
    if wanted and left:
        yield Finding(
            False,
            f"first to leave: {format_size(sum(left))} in {counted(len(left), 'namespace')} that nobody alive reads",
        )
    if n_ahead:
        yield Finding(
            False, f"dated in the future, so last to leave after a kill: {counted(n_ahead, 'file')}; a clock was wrong"
        )
    for slab in unlisted_slabs(root):
        yield Finding(not slab.is_mended, f"{slab.place}: {slab.text}")
    for kind in (Kind.DAMAGED, Kind.MISPLACED, Kind.NOT_REGULAR, Kind.FOREIGN):
        if n_of[kind]:
            yield Finding(False, f"{lying(kind.value, n_of[kind])}; {OTHER[kind.value]}")


def _memory() -> Iterator[Finding]:
    from tierkv.tiers._memory_limits import memory_limits  # noqa: PLC0415 - for this command only

    for limit in memory_limits()[:1]:
        size = format_size(limit.free_nbytes)
        yield Finding(
            False, f"{size} of memory are available ({limit.source}): what host memory levels can have in all"
        )
