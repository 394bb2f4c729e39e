"""What :mod:`tierkv.tiers.fs` is made of. Begin with ``mount``, which puts the others together.

From outside only ``cli`` looks in, at what a root holds, and ``vllm``, for where the key of checksums comes from.
"""

from tierkv._extras import require

require("tierkv.tiers.fs", "aiofiles", "xxhash")
