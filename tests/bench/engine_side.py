"""One vLLM engine in processes of its own that answers prompts one by one: ``python -m tests.bench.engine_side``.

Its core is a process, as under a server: in one with its asker it would spin while a chunk is on its way. Reads a JSON
line of engine arguments, then a JSON line for each prompt, and writes a JSON line for each answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.bench.pairs import cpus
from tests.vllm.engine import Engine, engine_environment


class EngineSide:
    """The other end: an engine that is idle unless asked."""

    def __init__(self, arguments: dict[str, Any], log: Path) -> None:
        self._log = log.open("wb")
        environment = os.environ | engine_environment()
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": str(cpus())}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path.cwd()), environment.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.engine_side"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment, text=True,
        )  # fmt: skip
        self._say(arguments)

    def ready(self) -> float:
        """Seconds that the start took."""
        return float(self._hear()["ready_s"])

    def ask(self, prompt: list[int], n_tokens: int) -> dict[str, Any]:
        """``ttft_s``, ``total_s``, ``cached``, ``tokens``."""
        self._say({"prompt": prompt, "n_tokens": n_tokens})
        return self._hear()

    def _say(self, what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@@"):
                heard: dict[str, Any] = json.loads(line[2:])
                return heard
        raise RuntimeError(f"an engine ended: {Path(self._log.name).read_text(errors='replace')[-3000:]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, frames: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let the engine end by itself; idempotent."""
        if self._log.closed:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


def _report(**event: Any) -> None:
    print("@@" + json.dumps(event), flush=True)


def main() -> None:
    from vllm import SamplingParams

    given = json.loads(sys.stdin.readline())
    began = time.perf_counter()
    engine = Engine(given.pop("model"), given.pop("kv_transfer_config", None), **given)
    _report(ready_s=time.perf_counter() - began)
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = SamplingParams(temperature=0, max_tokens=asked["n_tokens"], ignore_eos=True)
        began = time.perf_counter()
        (answer,) = engine.llm.generate([{"prompt_token_ids": asked["prompt"]}], sampling, use_tqdm=False)
        _report(
            total_s=time.perf_counter() - began,
            ttft_s=answer.metrics.first_token_latency,
            cached=answer.num_cached_tokens,
            tokens=list(answer.outputs[0].token_ids),
        )
    engine.close()


if __name__ == "__main__":
    main()
