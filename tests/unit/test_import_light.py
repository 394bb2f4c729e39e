"""`import tierkv` is standard library only, and cheap beside asyncio, which every user of it has loaded anyway."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import tierkv
from tests.patience import PATIENCE_S

ROOT = Path(tierkv.__file__).parents[1]
N_RUNS = 15


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


def test_import_costs_at_most_half_of_asyncio(tmp_path: Path) -> None:
    """On top of asyncio, tierkv takes at most half of what asyncio took: the median of ratios within one process.

    Both from byte code, as an installed package is, and in processor time, since waiting would measure the neighbours.
    """
    code = (
        "from time import process_time as now\n"
        "a = now(); import asyncio; b = now(); import tierkv; c = now()\n"
        "print((c - b) / (b - a))"
    )
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    ratios = [float(_python(code, **compiled)) for _ in range(N_RUNS + 1)][1:]  # the first one compiles
    assert statistics.median(ratios) <= 0.5, sorted(ratios)
