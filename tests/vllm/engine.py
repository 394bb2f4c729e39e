"""Real vLLM engines for tests: many in this process, or one in a process of its own that may be killed.

Everything is greedy and float32, so that two runs with the same tokens in the cache give the same tokens out.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.vllm.model import FIRST_BYTE

SHM = "/dev/shm"
START_S = 500.0
"""What the slowest start of an engine may take on a loaded machine of two cores; half a minute is usual."""

Prompt = list[int]


def engine_environment() -> dict[str, str]:
    """What every engine process needs on a machine with CPUs only. Set before vLLM is imported."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierkv" / "vllm"
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two workers on two CPUs do not start otherwise
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT", str(cache)),  # the first start fills it: 20 s
    }


def free_port() -> int:
    """One that nobody has just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def prompts(n: int = 8, n_tokens: int = 500, n_common: int = 96, seed: int = 1234) -> list[Prompt]:
    """Prompts that begin alike and go on apart."""
    rng = random.Random(seed)
    common = [rng.randrange(FIRST_BYTE, FIRST_BYTE + 256) for _ in range(n_common)]
    return [
        common + [rng.randrange(FIRST_BYTE, FIRST_BYTE + 256) for _ in range(n_tokens - n_common)] for _ in range(n)
    ]


def offloading(
    spec: str = "TierKVOffloadingSpec", *, module: str | None = "tierkv.vllm", **extra: Any
) -> dict[str, Any]:
    """A ``kv_transfer_config`` as an operator writes it."""
    config = {"spec_name": spec} | ({"spec_module_path": module} if module else {}) | extra
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": config}


def arguments(model: str, kv: dict[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
    """Engine arguments: 64 blocks of 32 tokens on the device, so that eight prompts of 500 evict each other."""
    made: dict[str, Any] = {
        "model": model,
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 1024,
        "enforce_eager": True,
        "block_size": 32,
        "num_gpu_blocks_override": 64,
        "kv_cache_memory_bytes": 64 << 20,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "seed": 0,
    }
    if kv is not None:
        made["kv_transfer_config"] = kv
    return made | overrides


@dataclass
class Round:
    """What one pass over the prompts gave."""

    tokens: list[list[int]]
    cached: list[int]
    """Prompt tokens that were not computed, by prompt: from the device's own prefix cache or from tierkv."""


@dataclass
class Outcome:
    """What an engine in another process reported before it ended."""

    rounds: list[Round] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class Engine:
    """One engine in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``) or, for the subprocess runner, above others."""

    def __init__(self, model: str, kv: dict[str, Any] | None = None, **overrides: Any) -> None:
        from vllm import LLM

        self.llm = LLM(**arguments(model, kv, **overrides))
        self.answers: dict[str, Any] = {}
        self._n_begun = 0

    def generate(self, batch: Sequence[Prompt], *, n_tokens: int = 24, at_once: bool = False) -> Round:
        """Greedy tokens for each prompt, one prompt after the other or all ``at_once``.

        An engine in this process stops stepping with the last request, so what that one offered last is never copied:
        ask for a few tokens more than one.
        """
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in batch]
        if at_once:
            answers = self.llm.generate(asked, sampling, use_tqdm=False)
        else:
            answers = [self.llm.generate([one], sampling, use_tqdm=False)[0] for one in asked]
        return Round([list(a.outputs[0].token_ids) for a in answers], [a.num_cached_tokens for a in answers])

    def begin(self, batch: Sequence[Prompt], *, n_tokens: int = 24) -> list[str]:
        """Queue prompts for :meth:`step`, and return their request ids."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)
        ids = [f"{self._n_begun + i}" for i in range(len(batch))]
        self._n_begun += len(batch)
        for request_id, prompt in zip(ids, batch, strict=True):
            self.llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
        return ids

    def step(self) -> None:
        """One scheduler step; finished requests are kept in ``answers`` by id."""
        self.answers |= {answer.request_id: answer for answer in self.llm.llm_engine.step() if answer.finished}

    def finish(self, ids: Sequence[str]) -> Round:
        """Step until these requests have ended."""
        while not self.answers.keys() >= set(ids):
            self.step()
        ended = [self.answers[request_id] for request_id in ids]
        return Round([list(a.outputs[0].token_ids) for a in ended], [a.num_cached_tokens for a in ended])

    def metrics(self) -> dict[str, float]:
        """Counters and gauges by ``name`` or ``name{label values}``, without the ``vllm:`` before it."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            labels = ",".join(v for k, v in sorted(metric.labels.items()) if k not in {"model_name", "engine"})
            name = metric.name.removeprefix("vllm:") + (f"{{{labels}}}" if labels else "")
            value = getattr(metric, "value", getattr(metric, "count", None))
            if value is not None:
                found[name] = value
        return found

    def reset_prefix_cache(self) -> bool:
        """Forget the device's prefix cache (False: blocks are in use) and, through the connector, all of ours."""
        return self.llm.llm_engine.engine_core.reset_prefix_cache(reset_connector=True)

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


@contextmanager
def engine(model: str, kv: dict[str, Any] | None = None, **overrides: Any) -> Iterator[Engine]:
    """An engine in this process; shut down at the end, however it comes."""
    made = Engine(model, kv, **overrides)
    try:
        yield made
    finally:
        made.close()


def run_once(model: str, batch: Sequence[Prompt], kv: dict[str, Any] | None = None, *, n_rounds: int = 1,
             n_tokens: int = 24, at_once: bool = False, **overrides: Any) -> Outcome:  # fmt: skip
    """Start an engine in this process, pass over the prompts, read its metrics, stop it."""
    with engine(model, kv, **overrides) as running:
        rounds = [running.generate(batch, n_tokens=n_tokens, at_once=at_once) for _ in range(n_rounds)]
        return Outcome(rounds, running.metrics())


class EngineProcess:
    """An engine whose core and workers are processes of their own, under a process that reports answer by answer.

    ``python -m tests.vllm.engine`` reads one JSON line of what to do and writes one JSON line for each answer.
    """

    def __init__(self, model: str, batch: Sequence[Prompt], kv: dict[str, Any] | None = None, *, log: Path,
                 n_rounds: int = 1, n_tokens: int = 24, environment: dict[str, str] | None = None,
                 **overrides: Any) -> None:  # fmt: skip
        task = {"arguments": arguments(model, kv, **overrides), "prompts": list(batch), "n_rounds": n_rounds,
                "n_tokens": n_tokens}  # fmt: skip
        self._log = log.open("wb")
        self.left_behind: set[str] = set()
        """What of ours is in /dev/shm after the end."""
        environ = os.environ | engine_environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | (environment or {})
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path.cwd()), environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.engine"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environ, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()

    def events(self) -> Iterator[dict[str, Any]]:
        """Reports as they come: ``ready``, an ``answer`` for each prompt of each round, ``metrics``."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@@"):
                yield json.loads(line[2:])

    def until_round(self, n: int) -> list[Round]:
        """Wait for the first answer of round ``n`` and return the rounds before it, which are whole."""
        rounds: list[Round] = []
        for event in self.events():
            if "answer" in event:
                self._take(rounds, event)
                if event["round"] == n:
                    return rounds[:n]
        raise AssertionError(f"ended before round {n}: {self.log_tail()}")

    def outcome(self) -> Outcome:
        """Wait for the end. Raises AssertionError with the end of the log if it went wrong."""
        made, segments = Outcome(), set[str]()
        for event in self.events():
            if "answer" in event:
                self._take(made.rounds, event)
            elif "metrics" in event:
                made.metrics = event["metrics"]
                segments = self._segments()
        assert self._wait() == 0, self.log_tail()
        self._end(segments)
        return made

    @staticmethod
    def _take(rounds: list[Round], event: dict[str, Any]) -> None:
        if event["round"] == len(rounds):
            rounds.append(Round([], []))
        rounds[-1].tokens.append(event["answer"])
        rounds[-1].cached.append(event["cached"])

    def _wait(self) -> int:
        code = self.process.wait(START_S)
        self._log.close()
        return code

    def log_tail(self) -> str:
        return Path(self._log.name).read_text(errors="replace")[-6000:]

    def tree(self) -> list[int]:
        """Process ids of the reporter and of everything below it."""
        import psutil

        me = psutil.Process(self.process.pid)
        return [me.pid, *(child.pid for child in me.children(recursive=True))]

    def kill(self) -> None:
        """SIGKILL every process of this engine, as one."""
        segments = self._segments()
        for pid in self.tree():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._wait()
        self._end(segments)

    def _segments(self) -> set[str]:
        """Names in /dev/shm that this engine has mapped: other engines on this machine have some, too."""
        names = set()
        for pid in self.tree():
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, shm, name = line.partition(f"{SHM}/")
                if shm and not name.endswith(" (deleted)"):
                    names.add(name)
        return names

    def _end(self, segments: set[str]) -> None:
        """Take away vLLM's own segments, which outlive a kill and, with two workers, even a good end."""
        left = segments & set(os.listdir(SHM))
        for name in left:
            os.unlink(f"{SHM}/{name}")
        self.left_behind |= {name for name in left if not name.startswith(("psm_", "sem.", "vllm_dist_"))}
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing of this engine outlives the test, however it ended."""
        if self.process.poll() is None:
            self.kill()


def main() -> None:
    task = json.loads(sys.stdin.readline())
    from tests.vllm.ready import be_patient_with_vllm

    be_patient_with_vllm()

    def report(**event: Any) -> None:
        print("@@" + json.dumps(event), flush=True)

    given = task["arguments"]
    running = Engine(given.pop("model"), given.pop("kv_transfer_config", None), **given)
    report(ready=time.time())
    for n in range(task["n_rounds"]):
        for prompt in task["prompts"]:
            answer = running.generate([prompt], n_tokens=task["n_tokens"])
            report(round=n, answer=answer.tokens[0], cached=answer.cached[0])
    report(metrics=running.metrics())
    running.close()


if __name__ == "__mp_main__":  # a core or a worker of such an engine, which vLLM has spawned
    from tests.vllm.ready import be_patient_with_vllm

    be_patient_with_vllm()

if __name__ == "__main__":
    main()
