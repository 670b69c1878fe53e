"""Fields of the two completion endpoints that show log probabilities and repeat the prompt."""

from __future__ import annotations

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
from tests.e2e.server_process import HTTP


class TestLogprobs:
    def test_top_logprobs_have_a_limit(self, server):
        body = {"messages": HI, **GREEDY, "logprobs": True}
        content = post(server, CHAT, **body, top_logprobs=20)["choices"][0]["logprobs"]["content"]
        assert [len(entry["top_logprobs"]) for entry in content] == [20] * 12
        content = post(server, CHAT, **body)["choices"][0]["logprobs"]["content"]
        assert [entry["top_logprobs"] for entry in content] == [[]] * 12
        error = refused(server, CHAT, **body, top_logprobs=21)
        assert error["message"] == "top_logprobs must be null or in [0, 20], got 21"
        error = refused(server, COMPLETIONS, prompt="a", logprobs=21)
        assert error["param"] == "logprobs"

    def test_prompt_logprobs_of_a_completion(self, server):
        prompt = tokens_of(server, "The quick brown fox jumps")
        choice = complete(server, prompt, prompt_logprobs=2)
        first, *scores = choice["prompt_logprobs"]
        assert first is None
        assert len(scores) == len(prompt) - 1
        for index, entry in enumerate(scores, 1):
            assert 2 <= len(entry) <= 3
            assert str(prompt[index]) in entry
            # A greedy request with the tokens before this one gives the likeliest token.
            (likeliest,) = [int(key) for key, one in entry.items() if one["rank"] == 1]
            assert complete(server, prompt[:index], max_tokens=1)["token_ids"] == [likeliest]

    def test_prompt_logprobs_of_a_chat(self, server):
        reply = post(server, CHAT, messages=HI, **GREEDY, prompt_logprobs=0, return_token_ids=True)
        assert reply["prompt_logprobs"][0] is None
        names = [next(iter(entry)) for entry in reply["prompt_logprobs"][1:]]
        assert names == [str(token) for token in reply["prompt_token_ids"][1:]]
        error = refused(server, CHAT, messages=HI, prompt_logprobs=0, stream=True)
        assert error["param"] == "prompt_logprobs"
        assert refused(server, CHAT, messages=HI, prompt_logprobs=21)["param"] == "prompt_logprobs"

    def test_a_cached_prompt_gives_the_same(self, server):
        prompt = "It is said that a long prompt is cached in blocks of tokens. " * 6
        first, second = (complete(server, prompt, prompt_logprobs=1) for _ in range(2))
        assert first == second

    def test_token_ids_for_names(self, server):
        plain = complete(server, logprobs=1)
        named = complete(server, logprobs=1, return_tokens_as_token_ids=True)
        assert named["text"] == plain["text"]
        ids = [f"token_id:{token}" for token in plain["token_ids"]]
        assert named["logprobs"]["tokens"] == ids
        assert [list(top) for top in named["logprobs"]["top_logprobs"]] == [[one] for one in ids]
        assert named["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
        content = post(
            server, CHAT, messages=HI, **GREEDY, logprobs=True, return_tokens_as_token_ids=True
        )["choices"][0]["logprobs"]["content"]
        assert all(entry["token"].startswith("token_id:") for entry in content)

    @pytest.mark.parametrize("several", [{"n": 3}, {"n": 2, "best_of": 4}], ids=str)
    def test_every_choice_has_those_of_its_prompt(self, server, several):
        prompts = [tokens_of(server, text) for text in ("Once upon a time", "The quick brown fox")]
        asked = {"prompt_logprobs": 2, "logprobs": 1, "echo": True}
        alone = [complete(server, prompt, **asked) for prompt in prompts]
        drawn = {"temperature": 1, "seed": 3, "max_tokens": 4, "ignore_eos": True}
        reply = post(server, COMPLETIONS, prompt=prompts, **asked, **drawn, **several)
        assert len(reply["choices"]) == 2 * several["n"]
        for place, choice in enumerate(reply["choices"]):
            expected = alone[place // several["n"]]
            length = len(expected["prompt_logprobs"])
            assert choice["prompt_logprobs"] == expected["prompt_logprobs"]
            for name, values in choice["logprobs"].items():
                assert values[:length] == expected["logprobs"][name][:length]
                assert len(values) == length + 4

    def test_chunks_begin_with_those_of_the_prompt(self, server):
        body = {"prompt": "Once upon a time", "echo": True, "logprobs": 1, "n": 3, "temperature": 1}
        body |= {"seed": 3, "max_tokens": 4, "ignore_eos": True}
        whole = post(server, COMPLETIONS, **body)["choices"]
        streamed = [[] for _ in whole]
        for event in events(server, COMPLETIONS, **body):
            for choice in event["choices"]:
                if choice["logprobs"] is not None:
                    streamed[choice["index"]] += choice["logprobs"]["token_logprobs"]
        assert streamed == [choice["logprobs"]["token_logprobs"] for choice in whole]

    def test_an_answer_of_megabytes(self, server):
        """The server encodes the answer while it sends it."""
        body = {"prompt": [300 + index % 900 for index in range(400)], "prompt_logprobs": 20}
        body |= {"n": 12, "max_tokens": 1, "temperature": 1}
        response = HTTP.post(server.url + COMPLETIONS, json=body)
        assert len(response.content) > 1 << 22
        assert "content-length" not in response.headers
        scores = [choice["prompt_logprobs"] for choice in response.json()["choices"]]
        assert (
            scores == [complete(server, body["prompt"], prompt_logprobs=20)["prompt_logprobs"]] * 12
        )


class TestEcho:
    def test_text_begins_with_the_prompt(self, server):
        plain = complete(server)
        echoed = complete(server, echo=True)
        assert echoed["text"] == "Once upon" + plain["text"]
        assert echoed["token_ids"] == plain["token_ids"]
        ids = tokens_of(server, "Once upon")
        assert complete(server, ids, echo=True)["text"] == echoed["text"]

    def test_logprobs_begin_with_the_prompts(self, server):
        prompt = tokens_of(server, "Once upon a time")
        plain = complete(server, prompt, logprobs=2)
        echoed = complete(server, prompt, logprobs=2, prompt_logprobs=0, echo=True)
        logprobs = echoed["logprobs"]
        assert len(logprobs["tokens"]) == len(prompt) + 12
        assert "".join(logprobs["tokens"]) == echoed["text"]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        scored = [
            entry[str(token)]["logprob"]
            for token, entry in zip(prompt[1:], echoed["prompt_logprobs"][1:], strict=True)
        ]
        assert logprobs["token_logprobs"][1 : len(prompt)] == scored
        assert logprobs["token_logprobs"][len(prompt) :] == plain["logprobs"]["token_logprobs"]
        offsets = logprobs["text_offset"]
        assert [
            echoed["text"][begin:][: len(name)]
            for begin, name in zip(offsets, logprobs["tokens"], strict=True)
        ] == logprobs["tokens"]

    def test_nothing_but_the_prompt(self, server):
        body = {"prompt": "Once upon a time", "echo": True, "max_tokens": 0, "logprobs": 0}
        reply = post(server, COMPLETIONS, **body)
        (choice,) = reply["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Once upon a time", "length")
        assert reply["usage"]["completion_tokens"] == 0
        assert len(choice["logprobs"]["tokens"]) == reply["usage"]["prompt_tokens"]
        assert refused(server, COMPLETIONS, prompt="a", max_tokens=0)["param"] == "max_tokens"
        chunks = events(server, COMPLETIONS, **body)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Once upon a time"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"

    def test_a_stream_is_the_same(self, server):
        body = {
            "prompt": ["Once upon", "A list"],
            **GREEDY,
            "n": 2,
            "echo": True,
            "logprobs": 1,
            "return_token_ids": True,
        }
        whole = post(server, COMPLETIONS, **body)["choices"]
        chunks = events(server, COMPLETIONS, **body)
        assert len(whole) == 4
        for choice in whole:
            parts = [
                chunk["choices"][0]
                for chunk in chunks
                if chunk["choices"][0]["index"] == choice["index"]
            ]
            assert "".join(part["text"] for part in parts) == choice["text"]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                joined = [
                    one for part in parts if part["logprobs"] for one in part["logprobs"][name]
                ]
                assert joined == choice["logprobs"][name]
            ids = [one for part in parts for one in part.get("token_ids", [])]
            assert ids == choice["token_ids"]
            assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
            assert all("prompt_token_ids" not in part for part in parts[1:])

    def test_in_chat_the_last_message_comes_first(self, server):
        begun = [*HI, {"role": "assistant", "content": "A list is"}]
        body = {"messages": begun, **GREEDY, "continue_final_message": True}
        plain = post(server, CHAT, **body)["choices"][0]["message"]["content"]
        echoed = post(server, CHAT, **body, echo=True)["choices"][0]["message"]["content"]
        assert echoed == "A list is" + plain
        chunks = events(server, CHAT, **body, echo=True)
        parts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
        assert "".join(parts) == echoed
        error = refused(server, CHAT, messages=HI, echo=True)
        assert error["param"] == "echo"
        assert "the last message" in error["message"]
