"""Orders of eviction: what leaves a level first. Size, entry, expiry and pins are other concerns, and elsewhere."""

from tierkv.policies.fifo import FIFO
from tierkv.policies.lru import LRU

__all__ = ("FIFO", "LRU")
