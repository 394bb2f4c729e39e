"""A tiny trace of requests: the chat sessions of ``tierkv demo``, written as Mooncake writes its traces."""

from __future__ import annotations

import json
from pathlib import Path

from tierkv.cli._workload import Workload

TOKENS = 64
"""Tokens of a block."""


def chat_lines(n_sessions: int = 10, n_turns: int = 5, seed: int = 1) -> list[str]:
    """One line a request; equal ids are equal prefixes."""
    work = Workload(n_sessions, n_turns, n_system_tokens=512, n_user_tokens=200, n_reply_tokens=250, seed=seed)
    ids: dict[tuple[int, ...], int] = {}
    lines = []
    for number, (turn, session) in enumerate(work.order()):
        prompt = work.prompt(turn, session)
        ends = range(TOKENS, len(prompt) + TOKENS, TOKENS)
        hash_ids = [ids.setdefault(tuple(prompt[:end]), len(ids)) for end in ends]
        record = {"timestamp": 1_500 * number, "input_length": len(prompt), "output_length": 250, "hash_ids": hash_ids}
        lines.append(json.dumps(record))
    return lines


def write_chat(path: Path, **sizes: int) -> Path:
    """The same as a file."""
    path.write_text("\n".join(chat_lines(**sizes)) + "\n")
    return path
