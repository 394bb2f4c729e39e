"""Tiered storage for the KV cache of language-model servers.

Standard library only. Policies live in :mod:`tierkv.policies`, the filesystem tier in :mod:`tierkv.tiers.fs` (extra
``fs``), the vLLM adapter in :mod:`tierkv.vllm`: the import path is the dependency.
"""

from tierkv._hints import Hint
from tierkv._lease import Lease
from tierkv._level import Writes
from tierkv._mover import MoverLimits
from tierkv._setup import Level
from tierkv.cache import Scope, TieredCache
from tierkv.chunkers import Namespace, PrefixChunker
from tierkv.errors import (
    ChunkSizeError,
    ClosedError,
    ConfigError,
    CorruptChunkError,
    PinError,
    TierError,
    TierKVError,
)
from tierkv.tiers.cpu import CPUTier
from tierkv.tiers.memory import MemoryTier
from tierkv.types import (
    Chunk,
    ChunkKey,
    Event,
    EventKind,
    LevelStatistics,
    Outcome,
    PrefixHit,
    Reason,
    Status,
    Stop,
)

__all__ = (
    "CPUTier",
    "Chunk",
    "ChunkKey",
    "ChunkSizeError",
    "ClosedError",
    "ConfigError",
    "CorruptChunkError",
    "Event",
    "EventKind",
    "Hint",
    "Lease",
    "Level",
    "LevelStatistics",
    "MemoryTier",
    "MoverLimits",
    "Namespace",
    "Outcome",
    "PinError",
    "PrefixChunker",
    "PrefixHit",
    "Reason",
    "Scope",
    "Status",
    "Stop",
    "TierError",
    "TierKVError",
    "TieredCache",
    "Writes",
)
