"""The soak test in seconds, and what it sends."""

from __future__ import annotations

from collections import Counter

from ostinato.benchmarks.soak.__main__ import run_soak
from ostinato.benchmarks.soak.clients import Faults
from ostinato.benchmarks.soak.traffic import OPTIONS, Traffic
from ostinato.runtime.types.params import SamplingParams

# The API says `logprobs` in two ways, and `max_tokens` is always set.
OTHER_FIELDS = {"max_tokens", "logprobs"}


def test_a_client_sends_the_same_again() -> None:
    def requests(seed: int, client: int) -> list[object]:
        traffic = Traffic(seed, client, range(500), 256)
        return [traffic.next() for _ in range(50)]

    assert requests(1, 2) == requests(1, 2)
    assert requests(1, 2) != requests(2, 2)
    assert requests(1, 2) != requests(1, 3)


def test_every_sampling_parameter_is_sent() -> None:
    searches = {"best_of", "early_stopping", "length_penalty", "use_beam_search"}  # not in the soak
    reasoning = {"thinking"}  # of models that reason
    fields = set(SamplingParams.__struct_fields__) - searches - reasoning
    assert fields - OTHER_FIELDS - OPTIONS.keys() == set()
    traffic = Traffic(0, 0, range(500), 256)
    sent: Counter[str] = Counter()
    for _ in range(1000):
        sent.update(traffic.next().body.keys())
    assert {name for name in (*OPTIONS, *OTHER_FIELDS) if sent[name] < 20} == set()


def test_prompts_leave_room_for_the_answer() -> None:
    traffic = Traffic(3, 0, range(500), 256)
    lengths, totals = [], []
    for _ in range(500):
        body = traffic.next().body
        prompt = body.get("prompt")
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            lengths.append(len(prompt))
            totals.append(len(prompt) + body["max_tokens"])
    assert min(lengths) <= 3
    assert max(lengths) >= 100
    assert max(totals) <= 256


def test_a_soak_of_seconds() -> None:
    """Compiled and captured, as it is served; `server_process.py` keeps to eager mode."""
    record = run_soak(
        5.0,
        seed=7,
        num_clients=4,
        overrides=["device.threads=1"],
        faults=Faults(num_bad_clients=12),
    )
    assert record["checks"] == {
        "nothing compiled late": True,
        "no block leaked": True,
        "no 5xx": True,
        "no file descriptor leaked": True,
        "memory stands still": True,
        "good answers in time": True,
        "every answer as expected": True,
        "no error in the log, exit code 0": True,
    }, {key: record[key] for key in ("late_compiles", "statuses", "wrong", "errors")}
    assert record["statuses"]["200"] > 0
    assert len(record["faults"]) >= 6
    assert record["engine"]["steps_total kind=captured"] > 0
    assert record["engine"]["steps_total kind=compiled"] > 0
    assert record["memory_mib"][0].keys() == {"at", "api", "engine"}
