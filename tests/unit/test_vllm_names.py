"""What ``tierkv.vllm`` answers where no vLLM is installed: a wrong order is still one sentence."""

from __future__ import annotations

import pytest

import tierkv.vllm
from tierkv.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("leaf_frist > mq", "eviction_policy is 'leaf_frist'.*nearest valid value: leaf_first"),
        ("mq > lru", "it wraps nothing"),
        ("TierKVOffloadingSpce", "nearest valid option: TierKVOffloadingSpec"),
        ("tierkvsecondarytier", "nearest valid option: TierKVSecondaryTier"),
    ],
)
def test_a_wrong_name_is_a_sentence_and_no_attribute(name: str, says: str) -> None:
    """An operator reads what was probably meant; Python sees that the module has no such attribute."""
    with pytest.raises(ConfigError, match=says) as caught:
        getattr(tierkv.vllm, name)
    assert isinstance(caught.value, AttributeError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["__wrapped__", "_anything", "options", "nothing_of_ours"])
def test_names_of_nothing_are_absent(name: str) -> None:
    """Private names, submodules not imported yet and words that mean nothing: ``hasattr`` is how Python asks."""
    assert name in vars(tierkv.vllm) or not hasattr(tierkv.vllm, name)
