"""The page of text in an owner's lock file: what it may hold and holds. An operator can read it with ``cat``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

import xxhash

from tierkv.tiers._fs.format import PAGE_NBYTES

FRESH_S: Final = 10.0
"""Without flock, an owner whose heartbeat is younger than this counts as alive."""
_LARGEST_NBYTES: Final = 2**63 - 1


@dataclass(frozen=True)
class OwnerPage:
    """What an owner's lock file says. Every number in bytes; times in Unix seconds."""

    owner: str
    holder: str
    """Id of the process that holds this lock: another one than ``owner`` if that died and was adopted."""
    namespace: str
    capacity_nbytes: int
    reserved_nbytes: int
    """What the holder may write up to without asking: never less than what it holds."""
    used_nbytes: int
    heartbeat_s: float
    pid: int
    boot: str
    host: str = ""
    """Name of the holder's machine, for people."""

    def pack(self) -> bytes:
        body = json.dumps(asdict(self)).encode()
        return (body + b"\n" + xxhash.xxh3_64_hexdigest(body).encode() + b"\n").ljust(PAGE_NBYTES)

    @classmethod
    def unpack(cls, data: bytes) -> OwnerPage | None:
        """None for an empty, torn or foreign page."""
        body, _, rest = data.partition(b"\n")
        if not body or rest.strip() != xxhash.xxh3_64_hexdigest(body).encode():
            return None
        try:
            page = cls(**json.loads(body))
        except (ValueError, TypeError, RecursionError):
            return None
        return page if page._is_sound() else None

    def _is_sound(self) -> bool:
        """Numbers are numbers and text is text, whoever wrote them."""
        sizes = (self.capacity_nbytes, self.reserved_nbytes, self.used_nbytes)
        texts = (self.owner, self.holder, self.namespace, self.boot, self.host)
        return (
            all(type(size) is int and 0 <= size <= _LARGEST_NBYTES for size in sizes)
            and all(isinstance(text, str) for text in texts)
            and type(self.pid) is int
            and isinstance(self.heartbeat_s, (int, float))
        )


def processes(holder_of: Mapping[str, str]) -> list[list[str]]:
    """Put together the ids that one process held, for which one page speaks: whoever takes that takes them all.

    Holders are followed from page to page: a process that has changed its id may be killed before all pages say so.

    Args:
        holder_of: id of the process that holds each lock, as the page says.
    """
    up = {owner: owner for owner in holder_of}

    def last(owner: str) -> str:
        while (holder := up.setdefault(owner, owner)) != owner:
            owner = holder
        return owner

    for owner, holder in holder_of.items():
        up[last(owner)] = last(holder)
    together: dict[str, list[str]] = {}
    for owner in holder_of:
        together.setdefault(last(owner), []).append(owner)
    return list(together.values())


def boot_id() -> str:
    """Of this start of the machine; empty if nobody knows."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
