"""What each field of the two completion endpoints does, seen from outside of a real server process."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from tests.e2e.server_process import HTTP, ServerProcess

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "What is a list?"}]
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def post(server: ServerProcess, path: str, **body: object) -> dict[str, Any]:
    response = HTTP.post(server.url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def refused(server: ServerProcess, path: str, **body: object) -> dict[str, Any]:
    response = HTTP.post(server.url + path, json=body, timeout=60)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def events(server: ServerProcess, path: str, **body: object) -> list[dict[str, Any]]:
    with HTTP.stream(
        "POST", server.url + path, json={**body, "stream": True}, timeout=60
    ) as response:
        lines = [line[6:] for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def complete(server: ServerProcess, prompt: object = "Once upon", **fields: object) -> dict:
    """The one choice of a greedy completion, with its token ids."""
    body = {"prompt": prompt, **GREEDY, "return_token_ids": True, **fields}
    (choice,) = post(server, COMPLETIONS, **body)["choices"]
    return choice


def tokens_of(server: ServerProcess, text: str, **fields: object) -> list[int]:
    return post(server, "/tokenize", prompt=text, **fields)["tokens"]


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
        # Only the pair is forbidden: its first word still comes.
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
    def test_penalties_make_tokens_differ(self, server, fields):
        few = {"max_tokens": 80, "allowed_token_ids": list(range(300, 340))}
        plain = complete(server, **few)["token_ids"]
        penalised = complete(server, **few, **fields)["token_ids"]
        assert len(set(penalised)) > len(set(plain))


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


class TestTheBestOf:
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

    def test_a_beam_search_is_one_made_by_hand(self, server):
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
    def test_what_does_not_go_together(self, server, fields, param):
        for path, body in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "a"})):
            assert refused(server, path, **body, **fields)["param"] == param


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
            # The likeliest after this much of the prompt is what a greedy request gives there.
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


class TestThePrompt:
    def test_truncate_prompt_tokens(self, server):
        prompt = list(range(300, 340))
        kept = complete(server, prompt, truncate_prompt_tokens=5)
        assert kept["prompt_token_ids"] == prompt[-5:]
        assert kept["token_ids"] == complete(server, prompt[-5:])["token_ids"]
        right = complete(server, prompt, truncate_prompt_tokens=5, truncation_side="right")
        assert right["prompt_token_ids"] == prompt[:5]
        long = [300] * 2000
        assert refused(server, COMPLETIONS, prompt=long)["code"] == "context_length_exceeded"
        fits = complete(server, long, truncate_prompt_tokens=-1, max_tokens=12)
        assert len(fits["prompt_token_ids"]) == 512 - 12
        echoed = complete(server, "one two three", truncate_prompt_tokens=1, echo=True)
        assert echoed["text"].startswith(" three")
        error = refused(server, COMPLETIONS, prompt="a", truncate_prompt_tokens=0)
        assert error["param"] == "truncate_prompt_tokens"

    def test_add_generation_prompt_and_continue_final_message(self, server):
        def prompt(**fields: object) -> str:
            ids = post(server, "/tokenize", messages=HI, **fields)["tokens"]
            return post(server, "/detokenize", tokens=ids)["prompt"]

        assert prompt().endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert prompt(add_generation_prompt=False).endswith("What is a list?<|im_end|>\n")
        assert prompt(continue_final_message=True).endswith("What is a list?")
        reply = post(
            server, CHAT, messages=HI, **GREEDY, continue_final_message=True, return_token_ids=True
        )
        ids = post(server, "/tokenize", messages=HI, continue_final_message=True)["tokens"]
        assert reply["prompt_token_ids"] == ids

    def test_return_token_ids(self, server):
        body: dict[str, Any] = {"messages": HI, **GREEDY, "n": 2, "temperature": 1.2, "seed": 4}
        body["skip_special_tokens"] = False
        reply = post(server, CHAT, **body, return_token_ids=True)
        assert reply["prompt_token_ids"] == post(server, "/tokenize", messages=HI)["tokens"]
        for choice in reply["choices"]:
            text = post(server, "/detokenize", tokens=choice["token_ids"])["prompt"]
            assert text == choice["message"]["content"]
        first, *rest = events(server, CHAT, **body, return_token_ids=True)
        assert first["prompt_token_ids"] == reply["prompt_token_ids"]
        assert all("prompt_token_ids" not in chunk for chunk in rest)
        for choice in reply["choices"]:
            ids = [
                token
                for chunk in rest
                for part in chunk["choices"]
                if part["index"] == choice["index"]
                for token in part.get("token_ids", [])
            ]
            assert ids == choice["token_ids"]
        plain = post(server, CHAT, **body)
        assert "prompt_token_ids" not in plain
        assert "token_ids" not in plain["choices"][0]

    def test_skip_special_tokens(self, server):
        (end,) = tokens_of(server, "<|im_end|>", add_special_tokens=False)
        biased = {"logit_bias": {str(end): 100}, "max_tokens": 2}
        assert complete(server, **biased)["text"] == ""
        shown = complete(server, **biased, skip_special_tokens=False)
        assert shown["text"] == "<|im_end|>" * 2

    def test_cache_salt(self, server):
        prompt = "A prompt that is long enough to fill some blocks of the cache, and then more. "
        cached = [
            post(server, COMPLETIONS, prompt=prompt * 3, max_tokens=1, cache_salt=salt)["usage"][
                "prompt_tokens_details"
            ]["cached_tokens"]
            for salt in ("a", "a", "b")
        ]
        assert cached[0] == cached[2] == 0
        assert cached[1] >= 16

    def test_request_id(self, server):
        assert post(server, COMPLETIONS, prompt="a", max_tokens=1, request_id="mine")["id"] == (
            "cmpl-mine"
        )
        assert " done " in server.log_of("cmpl-mine")


class TestChatTemplate:
    def test_of_the_request(self, server):
        template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}{{ style }}"
        fields = {
            "messages": HI,
            "chat_template": template,
            "chat_template_kwargs": {"style": "In one word:"},
        }
        tokens = post(server, "/tokenize", **fields)["tokens"]
        text = post(server, "/detokenize", tokens=tokens)["prompt"]
        assert text == "[user] What is a list? In one word:"
        reply = post(server, CHAT, **fields, **GREEDY, return_token_ids=True)
        assert reply["prompt_token_ids"] == tokens
        assert reply["choices"][0]["token_ids"] == complete(server, tokens)["token_ids"]

    @pytest.mark.parametrize(
        ("template", "words"),
        [
            ("{% for", "not valid Jinja"),
            ("{{ raise_exception('no such thing') }}", "no such thing"),
            ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
            ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "refuses these messages"),
            ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
             "takes more than 2 s"),
            ("{{ 'a' * 4000000000 }}", "takes more than 512 MiB of memory"),
            ("{{ 'a' * 40000000 }}", "has 40000000 characters"),
        ],
        ids=["syntax", "raise", "class", "escape", "loop", "memory", "text"],
    )  # fmt: skip
    def test_a_bad_one_fails_alone(self, server, template, words):
        running: list[dict[str, Any]] = []
        other = threading.Thread(target=lambda: running.append(complete(server)))
        other.start()
        error = refused(server, CHAT, messages=HI, chat_template=template)
        assert words in error["message"]
        assert error["param"] in ("chat_template", "messages")
        other.join()
        assert len(running) == 1


def test_priority_runs_the_lower_number_first():
    with ServerProcess("scheduler.policy=priority", "scheduler.max_num_seqs=1") as server:
        done: list[int] = []

        def ask(priority: int, max_tokens: int) -> None:
            body = {"prompt": "a", "max_tokens": max_tokens, "ignore_eos": True}
            post(server, COMPLETIONS, **body, priority=priority)
            done.append(priority)

        threads = [threading.Thread(target=ask, args=(9, 60)) for _ in range(8)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        while server.metrics()["ostinato_requests_waiting"] < 4:
            assert time.monotonic() < deadline, done
        ask(1, 2)  # the last to come, and not the last to be answered
        assert len(done) < 9
        for thread in threads:
            thread.join()
        assert len(done) == 9
