"""The guide's offline and events snippets, as the example programs that a user runs, on loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

from tests.patience import PATIENCE_S
from tests.vllm.engine import START_S, arguments, engine_environment, free_port

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextmanager
def listening(endpoint, environment):
    """``vllm_events.py`` in a process of its own; it ends well when interrupted."""
    command = [sys.executable, EXAMPLES / "vllm_events.py", endpoint]
    # A shell that started us in the background has SIGINT ignored, and children inherit that.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    signal.signal(signal.SIGINT, ignored)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"listening at {endpoint}\n"
        yield process
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


def read_until(process, pattern):
    """Lines up to the first one that matches; what was sent before the engine ended may still be on its way."""
    watchdog = threading.Timer(PATIENCE_S, process.kill)
    watchdog.start()
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if re.fullmatch(pattern, line.strip()):
                return
        raise AssertionError("".join(lines[-50:]))
    finally:
        watchdog.cancel()
        watchdog.join()


def test_offline_with_events(models, tmp_path):
    """One engine: the second answer is the first one, its prompt comes from host memory, and events tell of it."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    engine = arguments(models(), max_model_len=1536)
    model, environment = engine.pop("model"), os.environ | engine_environment()
    environment |= {"PYTHONPATH": str(EXAMPLES.parent), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with listening(endpoint, environment) as listener:
        command = [sys.executable, str(EXAMPLES / "vllm_offline.py"), model, "--cpu-bytes", "8MiB"]
        command += ["--root", str(tmp_path / "root"), "--events", endpoint, "--engine", json.dumps(engine)]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * START_S, check=False)
        assert ran.returncode == 0, ran.stderr[-6000:]
        read_until(listener, r"kv_events \d+: BlockStored [1-9]\d* CPU")
    counts = re.findall(r"(\d+) of (\d+) prompt tokens were not computed", ran.stdout)
    (first_cached, n_tokens), (cached, _) = [(int(part), int(whole)) for part, whole in counts]
    assert first_cached == 0
    if re.findall(r"The device forgot: (True|False)", ran.stdout)[0] == "True":
        assert cached == n_tokens // 256 * 256, "whole chunks of 8 blocks of 32 tokens"
    first, second = re.findall(r"Generated: (.*)", ran.stdout)
    assert first == second
    assert (tmp_path / "root").is_dir()
