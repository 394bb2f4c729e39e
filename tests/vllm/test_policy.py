"""Our orders as vLLM's ``CachePolicy``: against vLLM's own, call by call, and behind vLLM's own manager."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.arc import ARCCachePolicy
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

import tierkv.vllm
from tests.vllm.policy_twins import Twins, key_of
from tierkv.errors import ConfigError
from tierkv.vllm.policy import policy_class

N_CALLS = 100_000


def ours(text: str, capacity: int) -> Any:
    return policy_class(text)(cache_capacity=capacity)


# -- call by call -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_keys", [0, 60])
def test_lru_is_vllms_lru(n_keys):
    """100,000 random calls of vLLM's LRU and ours, keys that come back or not: every victim is the same."""
    twins = Twins(LRUCachePolicy(cache_capacity=24), ours("LRU", 24), 24, n_keys=n_keys, seed=1)
    twins.run(N_CALLS)
    assert min(twins.n_evicted, twins.n_refused) > 500


def test_arc_is_vllms_arc_while_nothing_comes_back():
    """100,000 random calls of vLLM's ARC and ours where no evicted key returns: every victim is the same."""
    twins = Twins(ARCCachePolicy(cache_capacity=24), ours("ARC", 24), 24, n_keys=0, seed=2)
    twins.run(N_CALLS)
    assert min(twins.n_evicted, twins.n_refused) > 500


PLACES = frozenset({"returns", "ghosts", "ties", "refusals"})


class CorrectedARC(ARCCachePolicy):
    """vLLM's ARC with four places changed to what the paper says; each can be left as vLLM has it.

    - returns: what left and comes back was used twice. vLLM begins with it anew, among what was used once.
    - ghosts: the recent list and its ghosts are no longer than the cache, both lists and all ghosts no longer than two.
      vLLM bounds each list of ghosts by the cache.
    - ties: recent chunks leave while there are more of them than their target says, as many only if somebody wants a
      frequent one back. vLLM takes them at a tie, and cuts fractions off the target.
    - refusals: a store that finds no room changes nothing. vLLM learns from it.
    """

    corrected = PLACES

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.asked: list[Any] = []
        self.returned: set[Any] = set()
        self.tie_is_over = False

    def on_store_miss(self, keys, req_context):
        self.asked = list(keys)
        if "refusals" not in self.corrected:
            self.learn()

    def learn(self) -> None:
        if not self.asked:
            return
        self.returned.clear()
        self.tie_is_over = False
        for key in reversed(self.asked):
            was_frequent = key in self.b2
            if self._adapt_to_ghost_hit(key):
                self.returned.add(key)
                self.tie_is_over = was_frequent
                if "refusals" in self.corrected:
                    self.forget(key)
        self.asked = []

    def forget(self, key):
        self.b1.pop(key, None)
        self.b2.pop(key, None)

    def insert(self, key, chunk):
        self.learn()
        self.forget(key)
        frequent = key in self.returned and "returns" in self.corrected
        (self.t2 if frequent else self.t1)[key] = chunk
        if "ghosts" in self.corrected:
            trim(self.b1, self.cache_capacity - len(self.t1))
            trim(self.b2, 2 * self.cache_capacity - len(self.t1) - len(self.t2) - len(self.b1))

    def evict(self, n, protected):
        assert n == 1
        idle = {key for part in (self.t1, self.t2) for key, chunk in part.items() if chunk.ref_cnt == 0} - protected
        if not idle:
            return None
        self.learn()
        n_over = len(self.t1) - self.target_t1_size
        over = n_over > 0 or (n_over == 0 and self.tie_is_over)
        if "ties" not in self.corrected:
            over = len(self.t1) >= int(self.target_t1_size)
        parts = ((self.t1, self.b1), (self.t2, self.b2)) if over else ((self.t2, self.b2), (self.t1, self.b1))
        part, ghosts, key = next((p, g, key) for p, g in parts for key in p if key in idle)
        ghosts[key] = None
        if "ghosts" not in self.corrected:
            trim(self.b1, self.cache_capacity)
            trim(self.b2, self.cache_capacity)
        return [(key, part.pop(key))]


def trim(ghosts: Any, n: int) -> None:
    while len(ghosts) > max(n, 0):
        ghosts.popitem(last=False)


def test_arc_is_vllms_arc_but_for_four_places():
    """100,000 random calls in which evicted keys come back: with four places corrected, vLLM's ARC is ours."""
    twins = Twins(CorrectedARC(cache_capacity=24), ours("ARC", 24), 24, n_keys=60, seed=3)
    twins.run(N_CALLS)
    assert min(twins.n_evicted, twins.n_refused, twins.n_returned) > 500


@pytest.mark.parametrize("place", sorted(PLACES))
def test_each_of_the_four_places_counts(place):
    """Leave one of them as vLLM has it, and some victim differs: none of the four is idle talk."""
    partly = type("Partly", (CorrectedARC,), {"corrected": PLACES - {place}})
    with pytest.raises(AssertionError, match=r"evict\(1\)"):
        Twins(partly(cache_capacity=24), ours("ARC", 24), 24, n_keys=60, seed=3).run(N_CALLS)


def test_none_corrected_is_vllms_arc():
    """With none of the four places corrected the class above is vLLM's ARC: it describes the difference, all of it."""
    same = type("Same", (CorrectedARC,), {"corrected": frozenset()})
    Twins(ARCCachePolicy(cache_capacity=24), same(cache_capacity=24), 24, n_keys=60, seed=4).run(N_CALLS // 5)


# -- where vLLM's is wrong --------------------------------------------------------------------------------------------


class Manager:
    """vLLM's own manager with a policy of either kind, and requests whose chunks follow one another."""

    def __init__(self, text: str, n_chunks: int) -> None:
        module = None if text in {"lru", "arc"} else "tierkv.vllm"
        self.manager = CPUOffloadingManager(n_chunks, text, module)
        self.policy: Any = self.manager._policy
        self._n = 0

    def request(self, *prompts: Sequence[Any]) -> ReqContext:
        self._n += 1
        context = ReqContext(req_id=f"r{self._n}")
        for prompt in prompts:
            for i, key in enumerate(prompt, 1):
                context.set_offload_key_position(key, 16 * i)
        self.manager.on_new_request(context)
        return context

    def offer(self, keys: Sequence[Any], context: ReqContext) -> Any:
        return self.manager.prepare_store(list(keys), context)

    def store(self, keys: Sequence[Any], context: ReqContext) -> list[Any]:
        """Store and complete; the keys that had to leave."""
        output = self.offer(keys, context)
        assert output is not None
        self.manager.complete_store(output.keys_to_store, context)
        return output.evicted_keys

    def hits(self, keys: Sequence[Any], context: ReqContext) -> int:
        found = [self.manager.lookup(key, context) is LookupResult.HIT for key in keys]
        return [*found, False].index(False)

    def resident(self, keys: Sequence[Any]) -> list[Any]:
        return [key for key in keys if self.policy.get(key) is not None]


def chain(name: int, n: int) -> list[Any]:
    return [key_of(name * 1_000 + i) for i in range(n)]


TAILS_FIRST = [
    "LRU",
    "leaf_first > mq",
    "leaf_first > arc",
    "leaf_first > s3fifo",
    "leaf_first > sieve",
    "leaf_first > fifo",
]


@pytest.mark.parametrize("text", TAILS_FIRST)
def test_a_running_request_loses_its_tail_and_not_its_head(text):
    """A2, https://github.com/novitalabs/pegaflow/issues/396: stored in two pieces, still running, one chunk must go."""
    made = Manager(text, 4)
    prompt, other = chain(1, 4), chain(2, 1)
    running, newcomer = made.request(prompt), made.request(other)
    made.store(prompt[:2], running)
    made.store(prompt[2:], running)
    assert made.store(other, newcomer) == [prompt[3]]
    assert made.hits(prompt, running) == 3


@pytest.mark.parametrize("text", ["lru", "arc"])
def test_vllms_own_orders_take_the_head(text):
    """A2, https://github.com/novitalabs/pegaflow/issues/396: vLLM's take chunk 0, and the other three serve nobody."""
    made = Manager(text, 4)
    prompt, other = chain(1, 4), chain(2, 1)
    running, newcomer = made.request(prompt), made.request(other)
    made.store(prompt[:2], running)
    made.store(prompt[2:], running)
    assert made.store(other, newcomer) == [prompt[0]]
    assert made.hits(prompt, running) == 0


@pytest.mark.parametrize("text", TAILS_FIRST)
def test_a_shared_head_outlives_every_tail(text):
    """Two running requests share a head; whatever else is stored meanwhile, the resident part has no hole."""
    made = Manager(text, 8)
    a, b = chain(1, 5), [*chain(1, 2), *chain(2, 3)]
    running = [made.request(a), made.request(b)]
    made.store(a, running[0])
    made.store(b, running[1])
    for i in range(6):
        made.store(chain(10 + i, 1), made.request(chain(10 + i, 1)))
        for prompt in (a, b):
            assert made.resident(prompt) == prompt[: len(made.resident(prompt))]


@pytest.mark.parametrize("text", ["arc", "ARC"])
def test_idle_recent_chunks_make_room_where_the_frequent_are_in_use(text):
    """A1, https://github.com/vllm-project/vllm/pull/55461: two idle recent chunks go although the target favours them.

    All frequent ones are in use and two are wanted. vLLM's own is right in this since 0.32, and so is ours.
    """
    made = Manager(text, 4)
    frequent, recent, new = chain(1, 2), chain(2, 3), chain(3, 2)
    for key in (*frequent, *recent[:2]):
        made.store([key], made.request([key]))
    for key in frequent:
        reuse(made, key)
    assert made.store([recent[2]], made.request([recent[2]])) == [recent[0]]
    set_target(made, 4.0)
    made.manager.prepare_load(frequent, made.request(frequent))
    assert sorted(made.store(new, made.request(new))) == sorted(recent[1:])
    assert made.resident(frequent) == frequent


def set_target(made: Manager, target: float) -> None:
    """Favour recent chunks, as ghost hits would."""
    if isinstance(made.policy, ARCCachePolicy):
        made.policy.target_t1_size = target
    else:
        made.policy._order._target = target


def reuse(made: Manager, key: Any) -> None:
    context = made.request([key])
    made.manager.prepare_load([key], context)
    made.manager.complete_load([key], context)
    made.manager.on_request_finished(context)


def test_a_refused_store_teaches_nothing():
    """A1, https://github.com/vllm-project/vllm/pull/55461: without room nothing changes, the target neither.

    vLLM's own ARC learns from the refused store; ours does not.
    """
    targets = {}
    for text in ("arc", "ARC"):
        made, ghost = with_ghost(text)
        made.manager.prepare_load(made.resident(chain(1, 4)), made.request(chain(1, 4)))
        assert made.offer([ghost], made.request([ghost])) is None
        targets[text] = made.policy.target_t1_size if text == "arc" else made.policy._order._target
    assert targets == {"arc": 1.0, "ARC": 0.0}


def test_a_store_refused_by_the_policy_itself_teaches_nothing():
    """The same where the manager cannot know it: an idle chunk is there, but the store offers it again."""
    made, ghost = with_ghost("ARC")
    *busy, idle = made.resident(chain(1, 4))
    made.manager.prepare_load(busy, made.request(busy))
    assert made.offer([idle, ghost], made.request([idle, ghost])) is None
    assert made.policy._order._target == 0
    assert made.store([ghost], made.request([ghost])) == [idle]
    assert made.policy._order._target == 1, "it was a ghost, and with room it counts as one"


def with_ghost(text: str) -> tuple[Manager, Any]:
    """Three chunks of which one was used twice, and one that has left lately."""
    made = Manager(text, 3)
    a, b, c, d = chain(1, 4)
    for key in (a, b, c):
        made.store([key], made.request([key]))
    reuse(made, b)
    assert made.store([d], made.request([d])) == [a]
    return made, a


def test_tails_leave_first_across_groups():
    """A request's two groups are stored one after the other; both lose their tails before either loses its head."""
    made = Manager("ARC", 4)
    groups = [[make_offload_key(bytes([group, i] * 16), group) for i in range(2)] for group in range(2)]
    context = made.request(*groups)
    made.store([*groups[0], *groups[1]], context)
    assert set(made.store(chain(1, 2), made.request(chain(1, 2)))) == {groups[0][1], groups[1][1]}


def test_a_use_is_told_tail_first():
    """What a request reused is as recent as its end, and its tail is older than its head."""
    made = Manager("ARC", 4)
    prompt = chain(1, 4)
    made.store(prompt, made.request(prompt))
    context = made.request(prompt)
    made.manager.prepare_load(prompt, context)
    made.manager.complete_load(prompt, context)
    made.manager.on_request_finished(context)
    assert made.store(chain(2, 2), made.request(chain(2, 2))) == [prompt[3], prompt[2]]


def test_touch_of_a_missing_chunk_is_remembered_for_its_store():
    """0.30 tells of a store's misses by ``touch``: an order with ghosts hears of them, once there is room."""
    policy, context = ours("ARC", 2), ReqContext(req_id="r")

    def store(number: int) -> None:
        policy.insert(key_of(number), ChunkStatus(0))
        policy.get(key_of(number)).ref_cnt = 0
        policy.mark_evictable(key_of(number))

    store(1)
    store(2)
    policy.touch([key_of(1)], context)
    assert [key for key, _ in policy.evict(1, set())] == [key_of(2)]
    store(3)
    policy.touch([key_of(2)], context)
    assert policy._order._target == 0
    assert policy.evict(1, {key_of(2)}) is not None
    assert policy._order._target == 1


@pytest.mark.parametrize("n_slots", [6, 12])
def test_lru_behind_vllms_manager_differs_only_where_vllms_leaves_a_hole(n_slots):
    """Requests that share prefixes, a third of them still running: the first victims that differ leave a hole.

    It is vLLM's that takes a head whose tail stays (A2, https://github.com/novitalabs/pegaflow/issues/396); ours never.
    """
    rng = random.Random(5)
    n_same = n_holes = 0
    for _ in range(300):
        theirs, mine = Manager("lru", n_slots), Manager("LRU", n_slots)
        while True:
            prompt, finishes = prompt_of(rng), rng.random() < 0.7
            victims = [serve(made, prompt, finishes=finishes) for made in (theirs, mine)]
            assert not leaves_a_hole(mine)
            if set(victims[0]) != set(victims[1]):
                break
            n_same += bool(victims[0])
        assert leaves_a_hole(theirs), (victims, prompt)
        n_holes += 1
    assert n_same > 500
    assert n_holes == 300


def prompt_of(rng: random.Random) -> list[Any]:
    """A path from the root of a tree with three branches at each node; a key is a node."""
    node, keys = 1, []
    for _ in range(rng.randint(1, 4)):
        node = 4 * node + rng.randint(1, 3)
        keys.append(key_of(node))
    return keys


def serve(made: Manager, prompt: Sequence[Any], *, finishes: bool) -> list[Any]:
    """One request: load what is there, store the rest, and end or go on running; the keys that had to leave."""
    context = made.request(prompt)
    n = made.hits(prompt, context)
    made.manager.prepare_load(prompt[:n], context)
    made.manager.complete_load(prompt[:n], context)
    victims = made.store(prompt[n:], context) if n < len(prompt) else []
    if finishes:
        made.manager.on_request_finished(context)
    return victims


def leaves_a_hole(made: Manager) -> bool:
    """Whether a resident node's parent is not resident."""
    resident = (made.policy.chunks if isinstance(made.policy, LRUCachePolicy) else made.policy._chunks).keys()
    nodes = {int.from_bytes(key[:32], "big") for key in resident}
    return any(node // 4 != 1 and node // 4 not in nodes for node in nodes)


# -- what may be written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "LRU",
        "ARC",
        "leaf_first > mq",
        "S3-FIFO",
        "two_q",
        "LeafFirst > arc(capacity_chunks=8)",
        "tierkv.policies:SIEVE",
    ],
)
def test_any_order_is_a_name_of_the_module(text):
    """VLLM's own way to look a policy up finds every text of an order, and its manager works with it."""
    cls = CachePolicyFactory.get_cache_policy_cls(text, "tierkv.vllm")
    assert cls is CachePolicyFactory.get_cache_policy_cls(text, "tierkv.vllm")
    made = Manager(text, 4)
    for i in range(12):
        prompt = chain(i, 2)
        made.store(prompt, made.request(prompt))
    assert len(made.policy._chunks) == 4


def test_vllms_own_names_stay_vllms():
    """``lru`` and ``arc`` are in vLLM's registry, which it asks first; ``LRU`` and ``ARC`` are ours."""
    for name, cls in (("lru", LRUCachePolicy), ("arc", ARCCachePolicy)):
        assert CachePolicyFactory.get_cache_policy_cls(name, "tierkv.vllm") is cls
        assert issubclass(
            CachePolicyFactory.get_cache_policy_cls(name.upper(), "tierkv.vllm"), tierkv.vllm.TierKVCachePolicy
        )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("leaf_frist > mq", "'leaf_frist'.*nearest valid value: leaf_first"),
        ("mq > lru", "mq > lru.*it wraps nothing"),
        ("ttl(3600) > lru", "without expiry.*TierKVOffloadingSpec"),
        ("leaf_first > ttl(60) > mq", "without expiry"),
        ("quota(a=1GiB) > lru", "without quotas"),
        ("leaf_first >", "a name is missing"),
        ("TierKVOfloadingSpec", "nearest valid option: TierKVOffloadingSpec"),
    ],
)
def test_a_wrong_text_is_one_sentence(text, says):
    """The engine ends at start, in one sentence, whether the text is no order or one that vLLM cannot serve."""
    with pytest.raises(ConfigError, match=says) as caught:
        CPUOffloadingManager(4, text, "tierkv.vllm")
    assert "\n" not in str(caught.value)


def test_a_wrong_name_is_an_attribute_error_too():
    """A module says no in the way that Python expects: ``hasattr`` is False, and dunder names cost nothing."""
    assert not hasattr(tierkv.vllm, "no_such_order")
    assert not hasattr(tierkv.vllm, "__wrapped__")
    assert hasattr(tierkv.vllm, "leaf_first > lru")


def test_pinned_chunks_cost_no_scan():
    """2,000 cold chunks in use: to name a victim asks about none of them."""

    class Watched:
        n_asked = 0

        @property
        def ref_cnt(self):
            Watched.n_asked += 1
            return 1

    policy = ours("LRU", 2_001)
    for i in range(2_000):
        policy.insert(key_of(i), Watched())
    policy.insert(key_of(2_000), ChunkStatus(0))
    policy.get(key_of(2_000)).ref_cnt = 0
    policy.mark_evictable(key_of(2_000))
    Watched.n_asked = 0
    assert [key for key, _ in policy.evict(1, set())] == [key_of(2_000)]
    assert Watched.n_asked == 0


def test_reset_forgets_what_was_learned():
    """``clear`` leaves an empty policy, without ghosts and without what waited to be told."""
    made = Manager("ARC", 2)
    for i in range(6):
        made.store(chain(i, 1), made.request(chain(i, 1)))
    made.offer(chain(9, 1), made.request(chain(9, 1)))
    made.manager.reset_cache()
    assert len(made.policy._order) == 0
    for i in range(3):
        made.store(chain(i, 1), made.request(chain(i, 1)))
    assert made.resident(chain(1, 1) + chain(2, 1)) == chain(1, 1) + chain(2, 1)
    assert made.policy._order._target == 0
