"""Tiers as a user writes them, and where others' tiers are found: entry points and modules."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from tierkv._config_text import Kind, Parameter, Stage, Vocabulary, read_stage
from tierkv.errors import bad_setting
from tierkv.protocols import Tier
from tierkv.tiers.memory import MemoryTier

GROUP = "tierkv.tiers"
"""Entry points of third parties: a name, and a class or function that makes a tier from settings by name."""

_EXAMPLE = "fs(/nvme/kv, capacity=500GiB)"
_METHODS = ("open", "contains", "read", "write", "delete", "aclose")
_FS_SETTINGS = (
    "capacity", "min_free", "n_read_threads", "n_write_threads", "durability", "checksum_key_file", "checksum_key_env",
    "layout", "name",
)  # fmt: skip


def parse_tier(option: str, value: object, *, module_path: str | None = None) -> Tier:
    """A new tier from text such as ``"fs(/nvme/kv, capacity=500GiB)"``, or from the equivalent object.

    As an object: ``{"type": "fs", "root": "/nvme/kv", "capacity": "500GiB"}``. Others' tiers are found by entry
    point (group ``tierkv.tiers``), as ``my_package.my_module:MyTier(bucket=kv)``, or by ``"module_path"`` in an object;
    they are made from the settings as they are written. Does no I/O.

    Args:
        option: name of the setting, for messages.
        value: what the user wrote.
        module_path: a module in which a name that is not known is looked up.

    Raises:
        ConfigError: anything wrong, in one sentence, with the nearest valid name.
    """
    tier: Tier = _vocabulary(module_path).make(option, read_stage(option, value, _EXAMPLE))
    return tier


def third_party_tier(option: str, name: str, settings: Mapping[str, Any], *, module_path: str | None = None) -> Tier:
    """A tier that is not ours: ``name`` is a name of ``module_path``, an entry point's, or ``module:Class``.

    Raises:
        ConfigError: there is none of the name, it cannot be loaded, or cannot be made from ``settings``.
    """
    module, colon, attribute = name.rpartition(":")
    stage = Stage(
        attribute if colon else name, named=dict(settings), module_path=(module or None) if colon else module_path
    )
    tier: Tier = _vocabulary(None, ours=False).make(option, stage)
    return tier


def third_party_names() -> list[str]:
    """The tiers that installed distributions offer."""
    return sorted(point.name for point in entry_points(group=GROUP))


def _vocabulary(module_path: str | None, *, ours: bool = True) -> Vocabulary:
    others = (Parameter(name, _as_is, required=False) for name in _FS_SETTINGS)
    fs = Kind(_fs, (Parameter("root", _as_is), *others), example=_EXAMPLE)
    memory = Kind(MemoryTier, (Parameter("n_slots", _as_is, required=False), Parameter("name", _as_is, required=False)))
    return Vocabulary(
        noun="a tier",
        group=GROUP,
        kinds={"fs": fs, "memory": memory} if ours else {},
        example=_EXAMPLE,
        check=_check_tier,
        module_path=module_path,
    )


def _as_is(_option: str, value: Any) -> object:
    return value  # the tier checks its own settings


def _fs(root: Any, **settings: Any) -> Tier:
    try:
        from tierkv.tiers.fs import FSTier  # noqa: PLC0415 (needs the fs extra, and nobody else does)
    except ImportError as error:
        allowed = f"a tier whose packages are installed: {error}"
        raise bad_setting("tier", "fs", allowed) from error
    return FSTier(root, **settings)


def _check_tier(option: str, tier: object) -> None:
    """Raise ConfigError unless ``tier`` is a tier, rather than, say, the class of one."""
    missing = [name for name in _METHODS if not callable(getattr(tier, name, None))]
    if not isinstance(tier, type) and not missing and isinstance(getattr(tier, "name", None), str):
        return
    lacks = (
        "this is a class; call it" if isinstance(tier, type) else f"this one has no {', '.join(missing or ['name'])}"
    )
    raise bad_setting(option, tier, f"a tier ({lacks})")
