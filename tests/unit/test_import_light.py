"""`import tierkv` is standard library only, and cheap beside asyncio, which every user of it has loaded anyway."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import tierkv
from tests.gate import hold
from tests.patience import PATIENCE_S

ROOT = Path(tierkv.__file__).parents[1]
N_RUNS = 7


def _python(code: str, **variables: str) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    return run.stdout


def test_import_loads_the_standard_library_only() -> None:
    """Nothing from outside the standard library enters sys.modules; no thread, task or descriptor comes to be."""
    report = json.loads(
        _python(
            "import json, os, sys, threading\n"
            "before, fds = set(sys.modules), len(os.listdir('/proc/self/fd'))\n"
            "import tierkv\n"
            "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
            "print(json.dumps([sorted(new - set(sys.stdlib_module_names) - {'tierkv'}), threading.active_count(),\n"
            "                  len(os.listdir('/proc/self/fd')) - fds]))"
        )
    )
    assert report == [[], 1, 0]


def test_import_costs_less_than_asyncio(tmp_path: Path) -> None:
    """On top of asyncio, tierkv takes at most half as many modules, and less time: the median of ratios in a process.

    Both from byte code, as an installed package is, and in processor time, since waiting would measure the neighbours.
    On an ordinary machine it takes 0.4 of the time; what is asserted has room for one with other caches.
    """
    code = (
        "import sys\n"
        "from time import process_time as now\n"
        "m = len(sys.modules); a = now(); import asyncio; b = now(); n = len(sys.modules); import tierkv; c = now()\n"
        "print((c - b) / (b - a), (len(sys.modules) - n) / (n - m))"
    )
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    _python(code, **compiled)  # the first one compiles

    def beside_asyncio() -> dict[str, float]:
        ran = [_python(code, **compiled).split() for _ in range(N_RUNS)]
        times, modules = ([float(ratio) for ratio in ratios] for ratios in zip(*ran, strict=True))
        return {"time": statistics.median(times), "modules": max(modules)}

    hold(beside_asyncio, {"time": 1.0, "modules": 0.5})
