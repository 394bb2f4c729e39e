"""A multi-turn chat workload: one system prompt shared by all sessions, each with a history that grows turn by turn.

Generated from a seed and from nothing else, so that two processes agree on it without talking.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import shake_128

VOCABULARY = 50_000


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of the workload, in tokens where nothing else is said."""

    n_sessions: int
    n_turns: int
    n_system_tokens: int
    n_user_tokens: int
    """Mean length of a question; each lies between half of it and one and a half."""
    n_reply_tokens: int
    """Length of every reply."""
    seed: int

    def order(self) -> Iterator[tuple[int, int]]:
        """All (turn, session) pairs: turn by turn, and within one in an order that changes, as users do."""
        rng = random.Random(f"{self.seed}/order")  # noqa: S311  a workload, not a secret
        for turn in range(self.n_turns):
            sessions = list(range(self.n_sessions))
            rng.shuffle(sessions)
            yield from ((turn, session) for session in sessions)

    def prompt(self, turn: int, session: int) -> list[int]:
        """What the server is asked: system prompt, history and the new question."""
        return self._history(turn, session)[: -self.n_reply_tokens or None]

    def answered(self, turn: int, session: int) -> list[int]:
        """The prompt and its reply: what is in the KV cache when the turn has ended."""
        return self._history(turn, session)

    def _history(self, turn: int, session: int) -> list[int]:
        tokens = list(_tokens(f"{self.seed}/system", self.n_system_tokens))
        lengths = random.Random(f"{self.seed}/{session}/lengths")  # noqa: S311
        for past in range(turn + 1):
            n_user = lengths.randint(self.n_user_tokens // 2, self.n_user_tokens * 3 // 2)
            tokens += _tokens(f"{self.seed}/{session}/{past}", n_user + self.n_reply_tokens)
        return tokens


@cache
def _tokens(name: str, n_tokens: int) -> tuple[int, ...]:
    rng = random.Random(name)  # noqa: S311
    return tuple(rng.randrange(VOCABULARY) for _ in range(n_tokens))


def content(key: bytes, nbytes: int) -> bytes:
    """The bytes that belong to a key: different for every key, so that a swap shows as well as a flipped bit."""
    return shake_128(key).digest(nbytes)
