"""What a request says to tierkv: ``kv_transfer_params["tierkv"]``, of which nothing may fail a request or an engine.

``{"tenant": "team-a", "hint": "dead" | "keep" | {"ttl_s": 600}}``, every part optional. The values come from whoever
may send requests, so each part is taken only if it is exactly right; what is not is ignored and counted.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from tierkv._hints import Hint

logger = logging.getLogger("vllm.tierkv.manager")

KEY = "tierkv"
_MOST_TENANT_NBYTES = 128
_LEAST_S, _MOST_S = 0.001, 1e9
_ALLOWED = f'"dead", "keep" or {{"ttl_s": a number of seconds from {_LEAST_S} to {_MOST_S:g}}}'
_FIXED = {"dead": Hint.DEAD, "keep": Hint.KEEP}


class Wishes(NamedTuple):
    """Of one request."""

    tenant: str = ""
    hint: Hint | None = None
    """For all chunks of the request, when it has finished."""


NOTHING = Wishes()


class WishReader:
    """Reads requests' wishes. One thread's."""

    def __init__(self) -> None:
        self.n_ignored = 0
        """Parts that were not right."""
        self._warned = False

    def read(self, context: Any) -> Wishes:
        """What the request of this ``ReqContext`` wishes. Never raises."""
        params = getattr(context, "kv_transfer_params", None)
        if not isinstance(params, dict) or KEY not in params:
            return NOTHING
        said = params[KEY]
        if not isinstance(said, dict):
            self._ignore(context, f"{_shown(said)} is no object")
            return NOTHING
        if not said.keys() <= {"tenant", "hint"}:
            self._ignore(context, "it has other parts than tenant and hint")
        return Wishes(self._tenant(context, said.get("tenant")), self._hint(context, said.get("hint")))

    def _tenant(self, context: Any, said: object) -> str:
        if said is None:
            return ""
        # What does not print cannot be read in a log, and a lone surrogate cannot even be written down.
        printable = isinstance(said, str) and len(said) <= _MOST_TENANT_NBYTES and said.isprintable()
        if isinstance(said, str) and printable and len(said.encode()) <= _MOST_TENANT_NBYTES:
            return said
        self._ignore(context, f"tenant is {_shown(said)}, but must be text of at most {_MOST_TENANT_NBYTES} bytes")
        return ""

    def _hint(self, context: Any, said: object) -> Hint | None:
        if said is None:
            return None
        if isinstance(said, str) and said in _FIXED:
            return _FIXED[said]
        if isinstance(said, dict) and len(said) == 1:
            ttl_s = said.get("ttl_s")
            if isinstance(ttl_s, (int, float)) and not isinstance(ttl_s, bool) and _LEAST_S <= ttl_s <= _MOST_S:
                return Hint.TTL(ttl_s)
        self._ignore(context, f"hint is {_shown(said)}, but must be {_ALLOWED}")
        return None

    def _ignore(self, context: Any, why: str) -> None:
        self.n_ignored += 1
        if not self._warned:
            self._warned = True
            logger.warning(
                "Request %s: kv_transfer_params[%r] is ignored in part: %s. Later ones are only counted",
                getattr(context, "req_id", "?"),
                KEY,
                why,
            )


def _shown(value: object) -> str:
    """Something of a stranger's value, in a line that it cannot break."""
    return repr(value[:60]) if isinstance(value, str) else f"a {type(value).__name__}"
