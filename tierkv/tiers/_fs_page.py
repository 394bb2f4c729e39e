"""The page of text in an owner's lock file: what it may hold and holds. An operator can read it with ``cat``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import xxhash

from tierkv.tiers._fs_format import PAGE_NBYTES


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

    def pack(self) -> bytes:
        body = json.dumps(asdict(self)).encode()
        return (body + b"\n" + xxhash.xxh3_64_hexdigest(body).encode() + b"\n").ljust(PAGE_NBYTES)

    @classmethod
    def unpack(cls, page: bytes) -> OwnerPage | None:
        """None for an empty, torn or foreign page."""
        body, _, rest = page.partition(b"\n")
        if not body or rest.strip() != xxhash.xxh3_64_hexdigest(body).encode():
            return None
        try:
            return cls(**json.loads(body))
        except (ValueError, TypeError):
            return None
