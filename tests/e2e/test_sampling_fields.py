"""Fields of the two completion endpoints that choose the tokens and end the reply."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.json_requests import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    HI,
    complete,
    events,
    post,
    refused,
    tokens_of,
)
from tests.e2e.server_process import ServerProcess


class TestWhichTokens:
    def test_logit_bias(self, server):
        plain = complete(server)
        banned = plain["token_ids"][0]
        assert banned not in complete(server, logit_bias={str(banned): -100})["token_ids"]
        forced = complete(server, logit_bias={"300": 100})
        assert forced["token_ids"] == [300] * 12

    def test_allowed_token_ids(self, server):
        choice = complete(server, temperature=1, seed=1, allowed_token_ids=[300, 301, 302])
        assert set(choice["token_ids"]) <= {300, 301, 302}
        assert refused(server, COMPLETIONS, prompt="a", allowed_token_ids=[])["param"] == (
            "allowed_token_ids"
        )
        far = refused(server, COMPLETIONS, prompt="a", allowed_token_ids=[10**6])
        assert far["param"] == "allowed_token_ids"

    def test_bad_words_of_one_and_of_several_tokens(self, server):
        plain = complete(server)
        text = plain["text"]
        word = text.split()[1]
        without = complete(server, bad_words=[word])
        assert word not in without["text"].split()
        pair = " ".join(text.split()[1:3])
        assert len(tokens_of(server, " " + pair, add_special_tokens=False)) > 1
        without = complete(server, bad_words=[pair])
        assert pair not in without["text"]
        # The request forbids the pair only: its first word still occurs.
        assert word in without["text"].split()
        assert refused(server, COMPLETIONS, prompt="a", bad_words=[" "])["param"] == "bad_words"

    def test_bad_words_in_chat_and_streamed(self, server):
        body = {"messages": HI, **GREEDY}
        whole = post(server, CHAT, **body)["choices"][0]["message"]["content"]
        word = whole.split()[2]
        chunks = events(server, CHAT, **body, bad_words=[word])
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        assert text.split()[:2] == whole.split()[:2]
        assert word not in text.split()

    def test_seed_and_temperature(self, server):
        one, same, other = (
            complete(server, temperature=1.5, seed=seed)["token_ids"] for seed in (5, 5, 6)
        )
        assert one == same != other
        assert complete(server)["token_ids"] == complete(server, seed=6)["token_ids"]

    @pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
    def test_filters_that_leave_the_likeliest(self, server, fields):
        plain = complete(server)
        assert (
            complete(server, temperature=1.5, seed=5, **fields)["token_ids"] == (plain["token_ids"])
        )

    @pytest.mark.parametrize(
        "fields",
        [
            {"repetition_penalty": 10.0},
            {"presence_penalty": 2.0},
            {"frequency_penalty": 2.0},
        ],
        ids=str,
    )
    def test_a_penalty_first_replaces_a_token_by_a_rarer_one(self, server, fields):
        """The answers are equal before this token, so a penalty for earlier tokens replaced it."""
        prompt = tokens_of(server, "Once upon")
        few = {"allowed_token_ids": [token for token in range(300, 340) if token not in prompt]}
        plain = complete(server, prompt, max_tokens=80, **few)["token_ids"]
        penalised = complete(server, prompt, max_tokens=80, **few, **fields)["token_ids"]
        pairs = enumerate(zip(plain, penalised, strict=True))
        at, usual, instead = next((at, *pair) for at, pair in pairs if pair[0] != pair[1])
        before = plain[:at]
        assert before.count(instead) < before.count(usual)


class TestWhereItEnds:
    def test_max_tokens_and_its_newer_name(self, server):
        for name in ("max_tokens", "max_completion_tokens"):
            body = {"messages": HI, "temperature": 0, "ignore_eos": True, name: 3}
            reply = post(server, CHAT, **body)
            assert reply["usage"]["completion_tokens"] == 3
            assert reply["choices"][0]["finish_reason"] == "length"

    def test_min_tokens_and_ignore_eos(self, server):
        end = server_end(server)
        wants_end = {"logit_bias": {str(end): 100}, "ignore_eos": False}
        assert complete(server, **wants_end)["token_ids"] == [end]
        later = complete(server, **wants_end, min_tokens=4)
        assert len(later["token_ids"]) == 5
        assert later["finish_reason"] == "stop"
        never = complete(server, logit_bias={str(end): 100}, ignore_eos=True)
        assert never["token_ids"] == [end] * 12

    def test_stop_and_stop_token_ids_and_include(self, server):
        plain = complete(server)
        third = plain["token_ids"][2]
        choice = complete(server, stop_token_ids=[third])
        end = plain["token_ids"].index(third) + 1
        assert choice["token_ids"] == plain["token_ids"][:end]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", third)
        shown = complete(server, stop_token_ids=[third], include_stop_str_in_output=True)
        assert len(shown["text"]) > len(choice["text"])
        word = plain["text"].split()[2]
        cut = complete(server, stop=[word])
        assert cut["text"] == plain["text"][: plain["text"].index(word)]
        assert cut["stop_reason"] == word
        kept = complete(server, stop=[word], include_stop_str_in_output=True)
        assert kept["text"] == cut["text"] + word


def server_end(server: ServerProcess) -> int:
    """The model's end-of-sequence token."""
    return post(server, CHAT, messages=HI, temperature=0, max_tokens=200, return_token_ids=True)[
        "choices"
    ][0]["token_ids"][-1]


class TestBestOfAndBeamSearch:
    def test_several_candidates(self, server):
        body = {"prompt": "Once upon", "max_tokens": 6, "temperature": 1.5, "seed": 3}
        all_of_them = post(server, COMPLETIONS, **body, n=5, logprobs=0)["choices"]

        def mean(choice: dict[str, Any]) -> float:
            values = choice["logprobs"]["token_logprobs"]
            return sum(values) / len(values)

        ranked = [one["text"] for one in sorted(all_of_them, key=mean, reverse=True)]
        reply = post(server, COMPLETIONS, **body, n=2, best_of=5)
        assert [choice["text"] for choice in reply["choices"]] == ranked[:2]
        assert [choice["index"] for choice in reply["choices"]] == [0, 1]
        assert all(choice["logprobs"] is None for choice in reply["choices"])
        # All candidates were generated, so all are counted.
        count = sum(len(one["logprobs"]["tokens"]) for one in all_of_them)
        assert reply["usage"]["completion_tokens"] == count
        assert refused(server, COMPLETIONS, **body, n=3, best_of=2)["param"] == "best_of"

    def test_a_beam_search_equals_one_made_of_single_requests(self, server):
        prompt = tokens_of(server, "Once upon")
        beams: list[tuple[float, list[int]]] = [(0.0, [])]
        for _ in range(6):
            longer = []
            for score, tokens in beams:
                one = complete(
                    server,
                    prompt + tokens,
                    max_tokens=1,
                    logprobs=20,
                    return_tokens_as_token_ids=True,
                )
                for name, logprob in one["logprobs"]["top_logprobs"][0].items():
                    token = int(name.removeprefix("token_id:"))
                    longer.append((score + logprob, [*tokens, token]))
            beams = sorted(longer, key=lambda beam: -beam[0])[:3]
        fields = {"max_tokens": 6, "use_beam_search": True, "n": 3, "ignore_eos": True}
        reply = post(server, COMPLETIONS, prompt=prompt, **fields, return_token_ids=True)
        assert [one["token_ids"] for one in reply["choices"]] == [tokens for _, tokens in beams]
        greedy = complete(server)
        assert complete(server, use_beam_search=True)["token_ids"] == greedy["token_ids"]

    def test_beams_in_chat_streamed_or_not(self, server):
        body = {
            "messages": HI,
            "max_tokens": 16,
            "n": 3,
            "use_beam_search": True,
            "length_penalty": 0.5,
            "early_stopping": True,
            "return_token_ids": True,
        }
        reply = post(server, CHAT, **body)
        texts = [choice["message"]["content"] for choice in reply["choices"]]
        assert len(set(texts)) == 3
        streamed = ["", "", ""]
        for chunk in events(server, CHAT, **body):
            for part in chunk["choices"]:
                streamed[part["index"]] += part["delta"].get("content") or ""
        assert streamed == texts
        lengths = [len(choice["token_ids"]) for choice in reply["choices"]]
        assert reply["usage"]["completion_tokens"] == sum(lengths)

    def test_length_penalty_and_early_stopping(self, server):
        def length(**fields: object) -> int:
            body = {"messages": HI, "max_tokens": 40, "use_beam_search": True, "best_of": 4}
            choice = post(server, CHAT, **body, **fields, return_token_ids=True)["choices"][0]
            return len(choice["token_ids"])

        assert length(length_penalty=-3.0) < length(length_penalty=3.0, early_stopping="never")

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"length_penalty": 2.0}, "length_penalty"),
            ({"early_stopping": True}, "early_stopping"),
            ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
            ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
            ({"use_beam_search": True, "stop": "a"}, "stop"),
            ({"use_beam_search": True, "early_stopping": "often"}, "early_stopping"),
            ({"best_of": 1000}, "best_of"),
        ],
        ids=str,
    )
    def test_fields_that_exclude_each_other(self, server, fields, param):
        for path, body in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "a"})):
            assert refused(server, path, **body, **fields)["param"] == param
