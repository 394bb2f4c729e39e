"""Whether vLLM is here."""

from __future__ import annotations

import importlib.util

HAS_VLLM = all(importlib.util.find_spec(name) is not None for name in ("vllm", "torch"))
