"""The example of a server in torch: run as a user runs it, and shown to notice wrong bytes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the example is a server in torch")

from tests.patience import PATIENCE_S  # noqa: E402
from tierkv.device.tier import DeviceTier  # noqa: E402 - it needs torch
from tierkv.tiers._fs.catalogue import parse_slab_name, rows_of  # noqa: E402 - as above

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "torch_server.py"


def _example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_torch_server", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_server_gives_the_same_tokens_and_saves_prefill(tmp_path: Path) -> None:
    """Same tokens with and without, warm and restarted; only what fills no chunk is computed again."""
    run = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLE, tmp_path],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert not run.stderr
    counts = [[int(n) for n in re.findall(r"\d+", line)] for line in run.stdout.splitlines()]
    (_, n_tokens, n_plain), (n_cold, *_), (n_full, n_loaded, _), (n_restarted, n_reloaded, _) = counts
    assert n_plain == n_tokens
    assert n_cold < n_plain, "the system prompt is loaded by those that come later"
    assert n_full == n_restarted < n_plain // 5
    assert n_loaded == n_reloaded == n_tokens - n_full
    (slab,) = tmp_path.rglob("*.slab")
    name, digest = parse_slab_name(slab.name), bytes.fromhex(slab.parent.name)
    assert name is not None
    folder = os.open(slab.parent, os.O_RDONLY)
    try:
        assert sum(1 for _ in rows_of(name, folder, digest)) > 8, "they lie on the disk"
    finally:
        os.close(folder)


async def test_the_server_reads_from_disk_after_a_restart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The restarted server's chunks come from files, not from memory that survived by mistake."""
    report = await _example().main(torch.device("cpu"), str(tmp_path))
    assert report["read from disk"] > 8
    assert report["restarted, from disk"] == report["with a full cache"]


async def test_the_server_notices_wrong_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: if loads leave one block of one layer wrong, the comparison of tokens fails."""
    example = _example()
    load, new_cache = DeviceTier.load_chunks, example.new_cache
    pools: list[Any] = []

    def seen(root_dir: str, keys: list[Any], values: list[Any]) -> Any:
        pools[:] = keys
        return new_cache(root_dir, keys, values)

    async def damaged(device: DeviceTier, jobs: Sequence[Any]) -> Sequence[bool]:
        arrived = await load(device, jobs)
        for job in jobs:
            pools[0][job.place[0]] *= -1
        return arrived

    monkeypatch.setattr(example, "new_cache", seen)
    monkeypatch.setattr(DeviceTier, "load_chunks", damaged)
    with pytest.raises(AssertionError, match="other tokens"):
        await example.main(torch.device("cpu"), str(tmp_path))
