"""Orders and admission rules as text and as objects: what is understood, and one sentence for all that is not."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest

from tierkv import _config_text
from tierkv.admission import All, DropPartialTail, MaxSize, SecondTouch, TinyLFU, WriteBudget, parse_admission
from tierkv.admission import Any as AnyRule
from tierkv.errors import ConfigError
from tierkv.policies import ARC, FIFO, LFU, LRU, MQ, S3FIFO, SIEVE, TTL, LeafFirst, Quota, TwoQ
from tierkv.policies.parse import parse_policy
from tierkv.testing import ManualClock
from tierkv.types import Chunk, ChunkKey

N_LINES = 1_000


def layers(order: Any) -> list[type]:
    found = []
    while order is not None:
        found.append(type(order))
        order = getattr(order, "_order", None)
    return found


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("lru", [LRU]),
        (" FIFO ", [FIFO]),
        ("lfu", [LFU]),
        ("arc", [ARC]),
        ("arc()", [ARC]),
        ("arc(4_096)".replace("_", ""), [ARC]),
        ("S3-FIFO", [S3FIFO]),
        ("s3_fifo(capacity_chunks=10)", [S3FIFO]),
        ("sieve", [SIEVE]),
        ("2q", [TwoQ]),
        ("two_q", [TwoQ]),
        ("ttl(3600) > leaf_first > mq", [TTL, LeafFirst, MQ]),
        ("TTL(ttl_s=0.5,)>leaf-first>mq", [TTL, LeafFirst, MQ]),
        ('quota(alice=10GiB, "team b"="5 GiB") > ttl(60) > arc', [Quota, TTL, ARC]),
        ({"type": "mq"}, [MQ]),
        ({"type": "ttl", "ttl_s": 3600, "order": {"type": "leaf_first", "order": "mq"}}, [TTL, LeafFirst, MQ]),
        ({"type": "ttl", "ttl_s": 3600, "order": "leaf_first > mq"}, [TTL, LeafFirst, MQ]),
        ({"type": "quota", "quotas": {"alice": "10GiB", "bob": 5}, "order": "lru"}, [Quota, LRU]),
        ({"type": "arc", "capacity_chunks": 12}, [ARC]),
        ("tierkv.policies:LFU", [LFU]),
        ("ttl(5) > tierkv.policies.mq:MQ(7)", [TTL, MQ]),
        ({"type": "LeafFirst", "module_path": "tierkv.policies", "order": "lru"}, [LeafFirst, LRU]),
    ],
)
def test_orders_as_they_are_written(value: object, expected: list[type]) -> None:
    """Text and objects mean the same; case, hyphens and spaces do not matter."""
    assert layers(parse_policy("eviction_policy", value)) == expected


def test_arguments_arrive() -> None:
    """Positions and names reach the order; time is the caller's clock."""
    clock = ManualClock()
    ttl = parse_policy("p", "ttl(10) > lru", clock=clock)
    assert isinstance(ttl, TTL)
    chunk = Chunk(ChunkKey(b"a"))
    ttl.on_insert([chunk])
    clock.now_s = 10.0
    assert ttl.expired(chunk)
    quota = parse_policy("p", "quota(a=1KiB, 'b c'=5) > lru")
    assert isinstance(quota, Quota)
    assert quota._quotas == {"a": 1_024, "b c": 5}
    mq = parse_policy("p", "mq(77)")
    assert isinstance(mq, MQ)
    assert mq._life == 77


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("second_touch", SecondTouch),
        ("SecondTouch(500)", SecondTouch),
        ("tinylfu(3, window=1000)", TinyLFU),
        ("max_size(8MiB)", MaxSize),
        ("write_budget(300GB/day)", WriteBudget),
        ('write_budget(rate="1.5 TB / week", burst=10GB)', WriteBudget),
        ("drop_partial_tail", DropPartialTail),
        ("all(second_touch, max_size(8MiB), write_budget(300GB/day))", All),
        ("any(all(second_touch, drop_partial_tail), max_size(64KiB))", AnyRule),
        ({"type": "all", "rules": ["second_touch", {"type": "max_size", "limit": "8MiB"}]}, All),
        ("tierkv.admission:SecondTouch(10)", SecondTouch),
    ],
)
def test_rules_as_they_are_written(value: object, expected: type) -> None:
    """The same for admission; rules are arguments of rules."""
    assert type(parse_admission("admission", value)) is expected


def test_rules_that_are_arguments_are_built() -> None:
    """Each rule inside all(...) has its own arguments, and the caller's clock."""
    clock = ManualClock()
    rule = parse_admission("a", "all(max_size(limit=100), write_budget(10B/s, burst=10))", clock=clock)
    small, large = Chunk(ChunkKey(b"s"), nbytes=10), Chunk(ChunkKey(b"l"), nbytes=101)
    assert [rule.admits(large), rule.admits(small), rule.admits(small)] == [False, True, False]
    clock.now_s = 1.0
    assert rule.admits(small)


@pytest.mark.parametrize(
    ("parse", "value", "said"),
    [
        (parse_policy, "lfru", "nearest valid value: lru"),
        (parse_policy, "leaf_frst > lru", "nearest valid value: leaf_first"),
        (parse_policy, "lru > ttl(5)", "lru last"),
        (parse_policy, "ttl(5)", "followed by what it wraps"),
        (parse_policy, "ttl > lru", "ttl.ttl_s"),
        (parse_policy, "ttl(-1) > lru", "nearest valid value: 0.001"),
        (parse_policy, "ttl(ttl=5) > lru", "nearest valid option: ttl_s"),
        (parse_policy, "ttl(5, 6) > lru", "at most 1 argument ("),
        (parse_policy, "ttl(5, ttl_s=6) > lru", "given once"),
        (parse_policy, "arc(0)", "nearest valid value: 1"),
        (parse_policy, "lru(5)", "no arguments"),
        (parse_policy, "lru(n=5)", "takes no arguments"),
        (parse_policy, "quota(a=many) > lru", "quota of 'a' is 'many'"),
        (parse_policy, "quota(5) > lru", "a size for each tenant"),
        (parse_policy, "ttl(5 > lru", "','"),
        (parse_policy, "ttl(5) lru", "'lru' makes no sense"),
        (parse_policy, "ttl('5) > lru", "unclosed quotes"),
        (parse_policy, "", "a name is missing"),
        (parse_policy, 7, "text, or an object"),
        (parse_policy, {"type": 7}, "type"),
        (parse_policy, {"typ": "lru"}, "type"),
        (parse_policy, {"type": "lru", 5: 6}, "names of text"),
        (parse_policy, {"type": "lru", "module_path": 5}, "module_path"),
        (parse_policy, "no_such_module:X", "cannot be loaded"),
        (parse_policy, "os:getcwdd", "nearest valid value: getcwd"),
        (parse_policy, "os:getcwd", "has no on_insert"),
        (parse_policy, "tierkv.policies:TTL(5)", "cannot be made"),
        (parse_policy, "math:pi", "that makes an eviction order"),
        (parse_admission, "secnd_touch", "nearest valid value: second_touch"),
        (parse_admission, "second_touch > max_size(5)", "wraps nothing"),
        (parse_admission, "write_budget(300GB)", "for example: 300GB/day"),
        (parse_admission, "write_budget(300GB/decade)", "year"),
        (parse_admission, "all()", "at least one rule"),
        (parse_admission, "all(5)", "text, or an object"),
        (parse_admission, "all(second_touch, nobody)", "is 'nobody', but must be an admission rule (all, any, "),
        (parse_policy, "tierkv.policies:LRUU", "nearest valid value: LRU"),
        (parse_admission, "os:getcwd", "admits"),
    ],
)
def test_mistakes_say_what_is_meant(parse: Callable[[str, object], object], value: object, said: str) -> None:
    """A wrong setting is one sentence that names the option and what is right."""
    with pytest.raises(ConfigError) as caught:
        parse("the_option", value)
    assert said in str(caught.value)
    assert "the_option" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        ("nobody", "an eviction order (2q, arc, fifo, leaf_first, lfu, lru, mq, quota, s3fifo, sieve, ttl, two_q"),
        ("tierkv.policies:Nope", "a name of the module 'tierkv.policies'"),
        ("arc(half)", "a whole number from 1 to "),
        ("ttl(long) > lru", "a number of seconds from 0.001 to "),
        ("ttl(5 > lru", "written with ',' or ')' after each argument of ttl"),
    ],
)
def test_what_is_near_nothing_has_no_nearest(value: str, allowed: str) -> None:
    """It says what is allowed, and does not send anybody to a value that happens to be first."""
    with pytest.raises(ConfigError) as caught:
        parse_policy("the_option", value)
    assert allowed in str(caught.value)
    assert "nearest" not in str(caught.value)


# -- others' orders -------------------------------------------------------------------------------------------------


class Backwards:
    """A third party's wrapper: the inner order the other way round."""

    def __init__(self, order: Any, n: int = 1, *, label: str = "") -> None:
        self._order, self.n, self.label = order, n, label

    def __getattr__(self, name: str) -> Any:
        return getattr(self._order, name)

    def victims(self) -> Any:
        return reversed(list(self._order.victims()))


@pytest.fixture
def entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints(
        [
            EntryPoint("backwards", f"{__name__}:Backwards", "tierkv.policies"),
            EntryPoint("broken", "no_such_module:X", "tierkv.policies"),
        ]
    )
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Backwards.__module__])
    monkeypatch.setattr(_config_text, "entry_points", lambda *, group: points.select(group=group))


@pytest.mark.usefixtures("entry_point")
def test_entry_points_are_found() -> None:
    """A distribution's order is a name like any other, takes arguments and wraps; its faults are a sentence."""
    order: Any = parse_policy("p", "ttl(5) > backwards(3, label=x) > fifo")
    assert layers(order) == [TTL, Backwards, FIFO]
    assert (order._order.n, order._order.label) == (3, "x")
    order.on_insert([Chunk(ChunkKey(b"a"))])
    order.on_insert([Chunk(ChunkKey(b"b"))])
    assert list(order.victims()) == [b"b", b"a"]
    with pytest.raises(ConfigError, match="nearest valid value: backwards"):
        parse_policy("p", "backward > fifo")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        parse_policy("p", "broken")
    with pytest.raises(ConfigError, match="cannot be made"):
        parse_policy("p", "backwards")


def test_a_module_is_looked_at_for_unknown_names() -> None:
    """With a module path, a name that we do not know is the module's; ours stay ours."""
    assert layers(parse_policy("p", "leaf_first > TwoQ", module_path="tierkv.policies")) == [LeafFirst, TwoQ]
    with pytest.raises(ConfigError, match="nearest valid value"):
        parse_policy("p", "TwoW", module_path="tierkv.policies")


# -- nonsense -------------------------------------------------------------------------------------------------------

WORDS = [
    "lru", "ttl", "ttl(3600)", "leaf_first", "mq", "arc", "quota", "quota(a=1GiB)", "second_touch", "all", "any", "(",
    ")", ",", "=", ">", "'", '"', "-1", "1e999", "nan", "inf", "0", "9" * 400, "1GiB", "300GB/day", "max_size", "lru(",
    "write_budget", "\n", "\0", "\ud800", "é", "  ", "::", "a:b", "os:path", "true", "null", "{}", "%s", "{0}", "\\",
    "/", ".", "..", "tinylfu(2", "s3fifo", "order", "type", "module_path", "rules", "ttl_s", "capacity_chunks",
]  # fmt: skip
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    2**70,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "lru",
    "1GiB",
    [],
    {},
    [[]],
    ["lru"],
    {"a": 1},
]
KEYS = ["type", "order", "ttl_s", "quotas", "rules", "limit", "module_path", "window", "rate", "capacity_chunks", "zz"]


def text(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.6:
        return rng.choice(["", " "]).join(rng.choice(WORDS) for _ in range(rng.randrange(12)))
    if kind < 0.8:  # a right one with a wound
        good = list('quota(a=1GiB, "b"=2) > ttl(3600) > leaf_first > mq(5)')
        for _ in range(rng.randint(1, 3)):
            good[rng.randrange(len(good))] = rng.choice(["", "(", ")", ">", ",", "=", '"', "x", "\n", "0"])
        return "".join(good)
    if kind < 0.9:
        return "".join(chr(rng.choice([rng.randrange(128), rng.randrange(0x110000)])) for _ in range(rng.randrange(30)))
    return rng.choice(["(", "ttl(", "all(", "leaf_first >", "a=", '"', "{"]) * rng.choice([10, 40, 1_000, 3_000])


def thing(rng: random.Random, depth: int = 0) -> Any:
    """What JSON can be, mostly nearly right."""
    if depth > 6 or rng.random() < 0.4:
        return rng.choice([rng.choice(VALUES), text(rng)])
    if rng.random() < 0.2:
        return [thing(rng, depth + 1) for _ in range(rng.randrange(4))]
    made = {rng.choice(KEYS): thing(rng, depth + 1) for _ in range(rng.randrange(4))}
    if rng.random() < 0.8:
        made["type"] = rng.choice(["ttl", "leaf_first", "quota", "lru", "all", "max_size", "second_touch", "mq"])
    return made


@pytest.mark.parametrize("parse", [parse_policy, parse_admission])
def test_a_thousand_lines_of_nonsense(parse: Callable[[str, object], object]) -> None:
    """Whatever is written, it is an order or a rule, or one ConfigError of one line: never a traceback."""
    rng = random.Random(20_261_129)
    n_right = 0
    for line in range(N_LINES):
        value = text(rng) if line % 2 else thing(rng)
        try:
            assert parse("option", value) is not None
            n_right += 1
        except ConfigError as error:
            said = str(error)
            assert said
            assert len(said.splitlines()) == 1, repr(value)
            assert "option" in said
    assert n_right < N_LINES / 2, "most of it is nonsense"


def test_depth_is_limited() -> None:
    """A configuration that contains itself, or is nested without end, is a sentence too."""
    circle: dict[str, Any] = {"type": "leaf_first"}
    circle["order"] = circle
    deep: Any = "lru"
    for _ in range(5_000):
        deep = {"type": "leaf_first", "order": deep}
    for value in (circle, deep, "leaf_first > " * 200 + "lru", "all(" * 400 + ")" * 400):
        with pytest.raises(ConfigError, match=r"deep|long"):
            parse_policy("p", value)
