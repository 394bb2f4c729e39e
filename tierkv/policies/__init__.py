"""Orders of eviction: what leaves a level first. Size, entry and pins are other concerns, and elsewhere.

Wrappers change another order and nest: ``TTL(LeafFirst(MQ()), 3600)``.
"""

from tierkv.policies.arc import ARC
from tierkv.policies.fifo import FIFO
from tierkv.policies.leaf_first import LeafFirst
from tierkv.policies.lfu import LFU
from tierkv.policies.lru import LRU
from tierkv.policies.mq import MQ
from tierkv.policies.quota import Quota
from tierkv.policies.s3fifo import S3FIFO
from tierkv.policies.sieve import SIEVE
from tierkv.policies.ttl import TTL
from tierkv.policies.two_q import TwoQ

__all__ = ("ARC", "FIFO", "LFU", "LRU", "MQ", "S3FIFO", "SIEVE", "TTL", "LeafFirst", "Quota", "TwoQ")
