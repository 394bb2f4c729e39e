"""Eviction orders as a user writes them: ``"ttl(3600) > leaf_first > mq"``, or the same as nested objects."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from tierkv._config_text import Kind, Parameter, Stage, Vocabulary, read_stage
from tierkv.errors import bad_setting
from tierkv.policies._wrapper import check_order
from tierkv.policies.arc import ARC
from tierkv.policies.fifo import FIFO
from tierkv.policies.leaf_first import LeafFirst
from tierkv.policies.lfu import LFU
from tierkv.policies.lru import LRU
from tierkv.policies.mq import MQ
from tierkv.policies.quota import Quota
from tierkv.policies.s3fifo import S3FIFO
from tierkv.policies.sieve import SIEVE
from tierkv.policies.ttl import TTL
from tierkv.policies.two_q import TwoQ
from tierkv.protocols import Clock, EvictionPolicy
from tierkv.settings import parse_count, parse_seconds
from tierkv.sizes import parse_size

GROUP = "tierkv.policies"
"""Entry points of third parties: a name, and a class or function that makes an order (of the inner order, if any)."""

_EXAMPLE = "ttl(3600) > leaf_first > mq"
_A_QUOTA = "quota(tenant=10GiB)"


def parse_policy(
    option: str, value: object, *, clock: Clock = time.monotonic, module_path: str | None = None
) -> EvictionPolicy:
    """A new order from text such as ``"ttl(3600) > leaf_first > mq"``, or from the equivalent nested objects.

    A wrapper is left of what it wraps. As an object: ``{"type": "ttl", "ttl_s": 3600, "order": {"type": "leaf_first",
    "order": "mq"}}``. Orders of third parties are found by entry point (group ``tierkv.policies``), as
    ``my_package.my_module:MyOrder(1, name=2)``, or by ``"module_path"`` in an object.

    Args:
        option: name of the setting, for messages.
        value: what the user wrote.
        clock: what expiry goes by.
        module_path: a module in which a name that is not known is looked up.

    Raises:
        ConfigError: anything wrong, in one sentence, with the nearest valid name.
    """
    vocabulary = Vocabulary(
        noun="an eviction order",
        group=GROUP,
        kinds=_kinds(clock),
        example="lru",
        check=check_order,
        module_path=module_path,
    )
    order: EvictionPolicy = vocabulary.make(option, read_stage(option, value, _EXAMPLE))
    return order


def _kinds(clock: Clock) -> Mapping[str, Kind]:
    capacity = (Parameter("capacity_chunks", partial(parse_count, low=1, high=2**48), required=False),)
    two_q = Kind(TwoQ, capacity)
    ttl_s = Parameter("ttl_s", partial(parse_seconds, low=0.001))
    return {
        "arc": Kind(ARC, capacity),
        "fifo": Kind(FIFO),
        "lfu": Kind(LFU),
        "lru": Kind(LRU),
        "mq": Kind(MQ, capacity),
        "s3fifo": Kind(S3FIFO, capacity),
        "sieve": Kind(SIEVE),
        "two_q": two_q,
        "2q": two_q,
        "leaf_first": Kind(LeafFirst, wraps=True),
        "quota": Kind(Quota, wraps=True, rest=_quotas, example=_A_QUOTA),
        "ttl": Kind(partial(TTL, clock=clock), (ttl_s,), wraps=True, example="ttl(3600)"),
    }


def _quotas(option: str, stage: Stage) -> tuple[object, ...]:
    """``quota(alice=10GiB, "team b"=5GiB)``, or ``{"type": "quota", "quotas": {...}}``."""
    quotas = stage.named.get("quotas")
    if stage.values or len(stage.named) != 1 or not isinstance(quotas, Mapping):
        quotas = stage.named
    if stage.values or not quotas:
        written = stage.values[0] if stage.values else None
        raise bad_setting(option, written, "given a size for each tenant by name", example=f"{_A_QUOTA} > lru")
    return ({tenant: parse_size(f"{option} of {tenant!r}", size, low=0) for tenant, size in quotas.items()},)
