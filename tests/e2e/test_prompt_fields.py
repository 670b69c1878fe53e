"""Fields of the two completion endpoints: prompt, chat template, request id and priority."""

from __future__ import annotations

import threading
from contextlib import ExitStack
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
from tests.waiting import wait_until


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
            ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "not valid Jinja"),
            ("{{ raise_exception('no such thing') }}", "no such thing"),
            ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
            ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
            ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "refuses these messages"),
            ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
             "takes more than 2 s"),
            ("{{ 'a' * 4000000000 }}", "takes more than 512 MiB of memory"),
            ("{{ 'a' * 40000000 }}", "has 40000000 characters"),
        ],
        ids=[
            *("syntax", "nested", "raise", "class", "recursion", "escape", "loop"),
            *("memory", "text"),
        ],
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
        body = {"prompt": "a", "max_tokens": 20, "ignore_eos": True}
        with ExitStack() as stack:
            with server.held_engine():
                for number in range(8):
                    stack.enter_context(
                        server.sent(COMPLETIONS, {**body, "priority": 9}, f"low-{number}")
                    )
                stack.enter_context(server.sent(COMPLETIONS, {**body, "priority": 1}, "high"))

            def ended() -> list[str]:
                return [line for line in server.output if " done " in line]

            wait_until(lambda: len(ended()) == 9)
        # "high" was sent last. At most one request began before the engine had read "high".
        assert any("cmpl-high " in line for line in ended()[:2]), ended()
