"""A real vLLM engine over a disk that is full, read-only, failing and hanging, in turn, and well again after each."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.faults import REPOSITORY, Faults
from tests.faults.disks import ext4_disk


def test_a_disk_with_bad_days(models, tmp_path):
    """Every request has the right tokens, none waits past its deadline, all is found again by the second trial.

    In the end the kernel turns the disk read-only for good: what lies there is still served.
    """
    faults = Faults(tmp_path / "faults")
    with ext4_disk(tmp_path / "disk") as disk:
        command = [sys.executable, "-m", "tests.vllm.bad_days", models(), str(disk.path), disk._device]
        environment = os.environ | faults.environment | {"PYTHONPATH": str(REPOSITORY)}
        ended = subprocess.run(command, cwd=REPOSITORY, env=environment, text=True, capture_output=True, check=False)
    faults.close()
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-6000:]
    assert "requests, the longest wait" in ended.stdout
