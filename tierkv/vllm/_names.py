"""What :mod:`tierkv.vllm` answers to besides the names that it lists: every eviction order, as vLLM's ``CachePolicy``.

vLLM looks a policy up as an attribute of the module that ``cache_policy_module_path`` names, whatever text that
attribute is. So the text of an order is the name of a class. Needs no vLLM as long as the text is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tierkv.errors import ConfigError, unknown_setting
from tierkv.policies.parse import parse_policy
from tierkv.vllm._settings import nearest_name


class NoSuchNameError(ConfigError, AttributeError):
    """Neither a name of the module nor the text of an order. An AttributeError too, as a module's lookup must raise."""


def policy_by_text(text: str, known: Iterable[str]) -> Any:
    """The class of vLLM's ``CachePolicy`` that evicts in the order that ``text`` describes.

    Args:
        text: such as ``"leaf_first > mq"``.
        known: the names that the module has, one of which may have been meant.

    Raises:
        NoSuchNameError: one sentence, with the nearest name.
    """
    by_lower = {name.lower(): name for name in known}
    near = nearest_name(text, frozenset(by_lower))
    if near is not None:
        raise NoSuchNameError(str(unknown_setting(text, "tierkv.vllm", [by_lower[near]])))
    try:
        parse_policy("eviction_policy", text)
    except ConfigError as error:
        raise NoSuchNameError(str(error)) from None
    from tierkv.vllm.policy import policy_class  # noqa: PLC0415 (imports vLLM and torch)

    try:
        return policy_class(text)
    except ConfigError as error:
        raise NoSuchNameError(str(error)) from None
