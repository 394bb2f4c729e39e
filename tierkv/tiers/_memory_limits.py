"""How much memory this process may still take: the machine's and the cgroup's word, read before anything is touched.

A memfd of a terabyte can be made and mapped on any machine; the kernel's only other answer is the OOM killer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tierkv.errors import bad_setting

_NO_LIMIT_NBYTES = 1 << 60
"""cgroup v1 writes "no limit" as the largest page-aligned signed integer; nobody means an exbibyte."""


class MemoryLimit(NamedTuple):
    """One limit that holds for this process."""

    source: str
    """Where the number stands, for the message."""
    free_nbytes: int


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Every limit known, tightest first; empty where the kernel tells nothing.

    Args:
        root: where ``proc`` and the cgroup mounts are looked for; tests plant a tree.
    """
    return sorted([*_machine(root), *_cgroups(root)], key=lambda limit: limit.free_nbytes)


def check_memory(option: str, wanted_nbytes: int, unit_nbytes: int = 1, root: Path = Path("/")) -> None:
    """Refuse what is larger than the tightest limit, with the numbers.

    Args:
        option: the setting that asks for the bytes.
        wanted_nbytes: bytes about to be taken.
        unit_nbytes: the nearest valid value is named in multiples of it.
        root: as for :func:`memory_limits`.

    Raises:
        ConfigError: there is less than that.
    """
    for limit in memory_limits(root)[:1]:
        if wanted_nbytes > limit.free_nbytes:
            allowed = f"at most the {limit.free_nbytes} bytes that are available now ({limit.source})"
            raise bad_setting(option, wanted_nbytes, allowed, limit.free_nbytes // unit_nbytes * unit_nbytes)


def _machine(root: Path) -> Iterator[MemoryLimit]:
    for name, value in _pairs(root / "proc/meminfo"):
        if name == "MemAvailable:":
            yield MemoryLimit("MemAvailable of /proc/meminfo", value * 1024)


def _cgroups(root: Path) -> Iterator[MemoryLimit]:
    mounts = dict(_cgroup_mounts(root))
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and "v2" in mounts:
            yield from _walk(root, mounts["v2"], path, _V2)
        elif "memory" in controllers.split(",") and "v1" in mounts:
            yield from _walk(root, mounts["v1"], path, _V1)


class _Names(NamedTuple):
    limit: str
    usage: str
    reclaimable: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def _cgroup_mounts(root: Path) -> Iterator[tuple[str, str]]:
    for line in _lines(root / "proc/self/mounts"):
        _, mount_point, kind, options, *_ = line.split()
        if kind == "cgroup2":
            yield "v2", mount_point
        elif kind == "cgroup" and "memory" in options.split(","):
            yield "v1", mount_point


def _walk(root: Path, mount_point: str, path: str, names: _Names) -> Iterator[MemoryLimit]:
    """Limits from the process's own group up to the mount: a parent's limit binds its children.

    Inside a container the path may name groups that only the host sees; then those steps read nothing and the mount
    itself, which is the container's own group, still answers.
    """
    group = PurePosixPath("/", path.lstrip("/"))
    for step in (group, *group.parents):
        shown = PurePosixPath(mount_point) / step.relative_to("/")
        directory = root / shown.relative_to("/")
        limit, usage = _number(directory / names.limit), _number(directory / names.usage)
        if limit is None or usage is None or limit >= _NO_LIMIT_NBYTES:
            continue
        # Page cache nobody uses is dropped by the kernel before the group runs out.
        reclaimable = dict(_pairs(directory / "memory.stat")).get(names.reclaimable, 0)
        yield MemoryLimit(f"{names.limit} of {shown}", max(0, limit - usage + reclaimable))


def _number(path: Path) -> int | None:
    """The file's integer; None if it is absent, unreadable or says ``max``."""
    text = next(iter(_lines(path)), "")
    return int(text) if text.isdecimal() else None


def _pairs(path: Path) -> Iterator[tuple[str, int]]:
    for line in _lines(path):
        name, _, rest = line.partition(" ")
        value = rest.split()[:1]
        if value and value[0].isdecimal():
            yield name, int(value[0])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
