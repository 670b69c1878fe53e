"""Checks of generation requests, and the engine requests that are made from a prompt."""

from __future__ import annotations

import pytest

from ostinato.runtime.client.pooling import make_pooling_request
from ostinato.runtime.client.requests import RequestShare, make_requests, resolve
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.adapters import ServedAdapter
from ostinato.runtime.types.engine_info import ServedModel, ServedTask
from ostinato.runtime.types.params import PoolingParams, SamplingParams

POOLS = ServedModel(
    name="m",
    max_model_len=20,
    vocab_size=100,
    eos_token_ids=(2,),
    tokenizer="",
    tasks=(ServedTask.embed,),
    embedding_size=4,
)
MODEL = ServedModel(name="m", max_model_len=20, vocab_size=100, eos_token_ids=(2,), tokenizer="")


@pytest.mark.parametrize(
    ("prompt", "sampling", "param", "code", "text"),
    [
        ([], SamplingParams(), "prompt", None, "0 tokens"),
        (list(range(20)), SamplingParams(), "prompt", "context_length_exceeded", "20 tokens"),
        ([1, 100], SamplingParams(), "prompt", None, "[0, 100)"),
        ([-1], SamplingParams(), "prompt", None, "token id -1"),
        (
            [1] * 10,
            SamplingParams(max_tokens=11),
            "max_tokens",
            "context_length_exceeded",
            "at most 10",
        ),
        ([1], SamplingParams(logit_bias={100: 1.0}), "logit_bias", None, "100"),
        ([1], SamplingParams(stop_token_ids=(500,)), "stop_token_ids", None, "500"),
    ],
)
def test_refusals_name_the_parameter(
    prompt: list[int], sampling: SamplingParams, param: str, code: str | None, text: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        resolve(prompt, sampling, MODEL)
    assert caught.value.param == param
    assert caught.value.code == code
    assert text in str(caught.value)


def test_max_tokens_defaults_to_the_rest_of_the_context() -> None:
    _, sampling = resolve([1] * 5, SamplingParams(max_tokens=None), MODEL)
    assert sampling.max_tokens == 15


def test_n_completions_are_n_requests_with_seeds_of_their_own() -> None:
    requests = make_requests("r", [1, 2], SamplingParams(n=3, seed=7), MODEL, priority=4)
    assert [request.request_id for request in requests] == ["r:0", "r:1", "r:2"]
    seeds = [request.sampling.seed for request in requests]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    assert all(request.sampling.n == 1 and request.priority == 4 for request in requests)
    assert [request.place for request in requests] == [0, 1, 2]
    later = make_requests("r", [1, 2], SamplingParams(n=3), MODEL, share=RequestShare(place=6))
    assert [request.place for request in later] == [6, 7, 8]
    again = make_requests("r", [1, 2], SamplingParams(n=3, seed=7), MODEL)
    assert [request.sampling.seed for request in again] == seeds


def test_parameters_are_checked_once_for_all_completions_of_a_prompt(monkeypatch) -> None:
    sampling = SamplingParams(n=128, max_tokens=None, allowed_token_ids=tuple(range(100)))
    checks = []
    monkeypatch.setattr(SamplingParams, "_convert", lambda self: checks.append(self))
    _, resolved = resolve([1, 2], sampling, MODEL)
    requests = make_requests("r", [1, 2], resolved, MODEL)
    assert len(requests) == 128
    assert {id(one.sampling.allowed_token_ids) for one in requests} == {
        id(sampling.allowed_token_ids)
    }
    assert checks == []


def test_a_default_of_max_tokens_below_min_tokens_is_refused() -> None:
    sampling = SamplingParams(max_tokens=None, min_tokens=16)
    with pytest.raises(ValueError, match="min_tokens must be at most max_tokens=15, got 16"):
        resolve([1] * 5, sampling, MODEL)


def test_requests_name_the_slot_and_the_digest_of_their_adapter() -> None:
    adapter = ServedAdapter(name="x", path="/x", digest="abc", slot=2)
    requests = make_requests("r", [1, 2], SamplingParams(n=3), MODEL, adapter=adapter)
    requests.append(make_pooling_request("r", [1], PoolingParams(), POOLS, adapter=adapter))
    assert [(one.adapter_slot, one.cache_keys) for one in requests] == [(2, ("abc",))] * 4
    for plain in (
        make_requests("r", [1], SamplingParams(), MODEL)[0],
        make_pooling_request("r", [1], PoolingParams(), POOLS),
    ):
        assert (plain.adapter_slot, plain.cache_keys) == (-1, ())


def test_a_request_without_a_seed_gets_one_to_be_replayed_with() -> None:
    one, other = (make_requests("r", [1], SamplingParams(), MODEL)[0] for _ in range(2))
    assert one.sampling.seed is not None
    assert one.sampling.seed != other.sampling.seed
    assert one.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"temperature": 2.1}, "temperature must be in [0, 2], got 2.1"),
        ({"top_p": 0.0}, "top_p must be in (0, 1], got 0.0"),
        ({"n": 0}, "n must be in [1, 128], got 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens=4, got 5"),
        ({"stop": ("",)}, "stop must be at most 16 strings of 1 to 4096 characters"),
        ({"logprobs": 21}, "logprobs must be null or in [0, 20], got 21"),
        ({"presence_penalty": -2.5}, "presence_penalty must be in [-2, 2], got -2.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be in (0, 10], got 0.0"),
        (
            {"stop_token_ids": tuple(range(1025))},
            "stop_token_ids must be at most 1024 token ids, got 1025",
        ),
        (
            {"logit_bias": dict.fromkeys(range(1025), 1.0)},
            "logit_bias must be biases of at most 1024 tokens, got 1025",
        ),
        ({"top_k": -2}, "top_k must be -1, 0 (both off) or in [1, 2147483647], got -2"),
    ],
)
def test_sampling_ranges(values: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**values)  # type: ignore[arg-type]
    assert text in str(caught.value)
