"""Which replica a router chooses, by loads, known prefixes and which replicas take requests."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.runtime.replicas.router import ROUTERS, LeastLoad, PrefixAware, make_router

BLOCK = 4
SHARED = list(range(100, 100 + 3 * BLOCK))


@pytest.mark.parametrize("name", ROUTERS)
@settings(max_examples=30)
@given(data=st.data())
def test_requests_go_to_replicas_that_take_them_and_loads_stay_close(
    name: str, data: st.DataObject
) -> None:
    """Arrivals, ends and replicas that stop and start, against a plain count of requests."""
    count = data.draw(st.integers(1, 5), "replicas")
    router = make_router(name, count, BLOCK)
    loads = [0] * count
    for _ in range(data.draw(st.integers(1, 40), "events")):
        among = data.draw(st.none() | st.sets(st.integers(0, count - 1), min_size=1), "among")
        match data.draw(st.sampled_from(["request", "request", "end", "restart"])):
            case "request":
                prompt = data.draw(st.sampled_from([SHARED, SHARED[:BLOCK], [1, 2], []]), "prompt")
                salt = data.draw(st.sampled_from(["", "mine"]), "salt")
                chosen = router.choose(prompt, salt, among)
                allowed = range(count) if among is None else among
                assert chosen in allowed
                least = min(loads[replica] for replica in allowed)
                if name == "least_load":
                    assert loads[chosen] == least
                elif name == "prefix_aware":
                    assert loads[chosen] <= 2 * least + 4
                loads[chosen] += 1
                router.note(chosen, loads[chosen])
            case "end":
                replica = data.draw(st.integers(0, count - 1), "of")
                loads[replica] = max(0, loads[replica] - 1)
                router.note(replica, loads[replica])
            case _:
                router.forget(data.draw(st.integers(0, count - 1), "restarted"))


def test_round_robin_takes_the_replicas_in_turn() -> None:
    router = make_router("round_robin", 3, BLOCK)
    assert [router.choose([]) for _ in range(4)] == [0, 1, 2, 0]
    assert [router.choose([], among={0, 2}) for _ in range(3)] == [2, 0, 2]


def test_least_load_takes_equals_in_turn() -> None:
    router = LeastLoad(3)
    chosen = []
    for _ in range(6):
        chosen.append(router.choose([]))
        router.note(chosen[-1], chosen.count(chosen[-1]))
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_a_known_prefix_goes_where_it_went_before() -> None:
    router = PrefixAware(2, BLOCK)
    first = router.choose(SHARED)
    router.note(first, 1)
    assert router.choose([*SHARED, 7, 8]) == first
    assert router.choose([*SHARED[:BLOCK], 5, 5, 5, 5]) == first
    assert router.choose(SHARED, salt="another tenant") == 1 - first
    assert router.choose(SHARED, cache_keys=["an adapter"]) == 1 - first
    assert router.choose(SHARED, among={1 - first}) == 1 - first


def test_a_replica_that_was_started_again_has_no_known_prefix() -> None:
    router = PrefixAware(2, BLOCK)
    first = router.choose(SHARED)
    router.note(first, 1)
    router.forget(first)
    assert router.choose(SHARED) == 1 - first


def test_long_prompts_are_compared_by_their_beginning() -> None:
    router = PrefixAware(2, 1)
    first = router.choose([3] * 5000)
    router.note(first, 1)
    assert router.choose([3] * 4000 + [4] * 1000) == first


def test_prefixes_are_shared_out_over_the_replicas() -> None:
    router = PrefixAware(4, BLOCK)
    homes = Counter()
    for number in range(40):
        prompt = [1000 + number % 8] * (2 * BLOCK)
        chosen = router.choose(prompt)
        homes[(number % 8, chosen)] += 1
        router.note(chosen, sum(times for (_, home), times in homes.items() if home == chosen))
    assert sorted(homes.values()) == [5] * 8
    assert Counter(home for _, home in homes) == dict.fromkeys(range(4), 2)
