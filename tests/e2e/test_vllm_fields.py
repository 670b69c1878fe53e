"""Fields that vLLM adds to the OpenAI API, on a real server process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.json_requests import CHAT, COMPLETIONS, HI, post, refused
from tests.e2e.server_process import HTTP, ServerProcess
from tests.waiting import repeat_if_late, wait_until

GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
# The reply repeats one token.
ONE_TOKEN = {**GREEDY, "logit_bias": {"300": 100}}


def lines(server: ServerProcess, path: str, **body: object) -> Iterator[dict[str, Any]]:
    """The chunks of a stream, as they arrive."""
    body["stream"] = True
    with HTTP.stream("POST", server.url + path, json=body, timeout=300) as response:
        texts = (line[6:] for line in response.iter_lines() if line)
        for text in texts:
            if text == "[DONE]":
                return
            yield json.loads(text)
    pytest.fail("the stream ended without [DONE]")


def repetition(largest: int, count: int, smallest: int = 0) -> dict[str, int]:
    return {"max_pattern_size": largest, "min_pattern_size": smallest, "min_count": count}


class TestRepetitionDetection:
    @pytest.mark.parametrize(("detection", "length"), [((5, 4), 4), ((5, 4, 3), 12)], ids=str)
    def test_completions_and_chat_end(self, server, detection, length):
        fields = {**ONE_TOKEN, "repetition_detection": repetition(*detection)}
        for path, prompt in ((COMPLETIONS, {"prompt": "Once"}), (CHAT, {"messages": HI})):
            reply = post(server, path, **prompt, **fields)
            (choice,) = reply["choices"]
            assert choice["token_ids"] == [300] * length
            assert choice["finish_reason"] == "repetition"
            assert choice["stop_reason"] == "repetition_detected"
            assert reply["usage"]["completion_tokens"] == length

    def test_the_text_is_that_of_the_answer_without_it_up_to_there(self, server):
        plain = post(server, COMPLETIONS, prompt="Once upon", **{**GREEDY, "max_tokens": 160})
        (whole,) = plain["choices"]
        tokens = whole["token_ids"]
        end = next(  # the model repeats itself without a bias
            end
            for end in range(len(tokens))
            for size in range(2, 33)
            if end >= 2 * size and tokens[end - size : end] == tokens[end - 2 * size : end - size]
        )
        fields = {**GREEDY, "max_tokens": 160, "repetition_detection": repetition(32, 2, 2)}
        chunks = [
            chunk["choices"][0]
            for chunk in lines(server, COMPLETIONS, prompt="Once upon", **fields)
        ]
        assert [token for chunk in chunks for token in chunk["token_ids"]] == tokens[:end]
        text = "".join(chunk["text"] for chunk in chunks)
        assert text
        assert whole["text"].startswith(text)
        assert chunks[-1]["finish_reason"] == "repetition"

    def test_every_completion_for_itself(self, server):
        fields = {
            "max_tokens": 60,
            "temperature": 2,
            "seed": 2,
            "allowed_token_ids": list(range(300, 306)),
            "frequency_penalty": 2,
            "return_token_ids": True,
            "n": 4,
        }
        plain = post(server, COMPLETIONS, prompt="Once", **fields)["choices"]
        found = post(
            server,
            COMPLETIONS,
            prompt="Once",
            **fields,
            repetition_detection=repetition(1, 2),
        )["choices"]
        ends = []
        for one, other in zip(plain, found, strict=True):
            tokens = one["token_ids"]
            ends.append(next(end for end in range(2, 61) if tokens[end - 2] == tokens[end - 1]))
            assert other["token_ids"] == tokens[: ends[-1]]
            assert other["finish_reason"] == "repetition"
        assert len(set(ends)) > 1

    def test_after_an_engine_that_died(self, server):
        fields = {**ONE_TOKEN, "max_tokens": 480, "repetition_detection": repetition(1, 250)}
        before = server.num_restarts()

        def attempt() -> list[dict[str, Any]] | None:
            chunks = lines(server, COMPLETIONS, prompt="Once", **fields)
            first = next(chunks)
            if not server.kill_busy_engine():
                return None
            return [chunk["choices"][0] for chunk in (first, *chunks)]

        chunks = repeat_if_late(attempt)
        wait_until(lambda: server.num_restarts() == before + 1)
        assert [token for chunk in chunks for token in chunk["token_ids"]] == [300] * 250
        assert chunks[-1]["finish_reason"] == "repetition"

    @pytest.mark.parametrize(
        ("value", "param"),
        [
            ({"max_pattern_size": 4}, "repetition_detection"),
            ({"max_pattern_size": 4, "min_count": 1}, "repetition_detection"),
            (repetition(2, 2, 3), "repetition_detection"),
            (repetition(-1, 2), "repetition_detection.max_pattern_size"),
            (repetition(2000, 2), "repetition_detection.max_pattern_size"),
            (repetition(2, 1 << 40), "repetition_detection.min_count"),
            ({"max_size": 4}, "repetition_detection.max_size"),
            (True, "repetition_detection"),
        ],
        ids=str,
    )
    def test_refusals(self, server, value, param):
        for path, prompt in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})):
            error = refused(server, path, **prompt, repetition_detection=value)
            assert error["param"] == param
            assert "repetition_detection" in error["message"]

    def test_not_with_beams_and_off_is_off(self, server):
        body = {"prompt": "a", "use_beam_search": True, "n": 2, "max_tokens": 2}
        error = refused(server, COMPLETIONS, **body, repetition_detection=repetition(2, 2))
        assert error["param"] == "repetition_detection"
        off = post(server, COMPLETIONS, prompt="a", **ONE_TOKEN, repetition_detection={})
        assert off["choices"][0]["finish_reason"] == "length"


class TestStreamInterval:
    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    @pytest.mark.parametrize(("interval", "sizes"), [(7, [1, 7, 7, 7, 2]), (100, [1, 23])], ids=str)
    def test_sizes_of_chunks_and_the_same_answer(self, server, path, interval, sizes):
        body: dict[str, Any] = {"prompt": "Once upon", "logprobs": 1}
        if path == CHAT:
            body = {"messages": HI, "logprobs": True, "top_logprobs": 1}
        options = {"include_usage": True, "continuous_usage_stats": True}
        body |= {**GREEDY, "max_tokens": 24, "stream_options": options}
        plain = list(lines(server, path, **body))
        wide = list(lines(server, path, **body, stream_interval=interval))
        assert [len(one) for one in token_lists(wide)] == sizes
        assert [len(one) for one in token_lists(plain)] == [1] * 24
        assert tokens_of(wide) == tokens_of(plain)
        assert text_of(wide) == text_of(plain)
        assert logprobs_of(wide) == logprobs_of(plain)
        assert wide[-2]["choices"][0]["finish_reason"] == "length"
        assert wide[-1]["usage"]["completion_tokens"] == 24
        # The usage of a chunk counts the tokens that the stream has sent.
        counts = [one["usage"]["completion_tokens"] for one in wide if len(token_lists([one]))]
        assert counts == [sum(sizes[: end + 1]) for end in range(len(sizes))]

    def test_each_completion_has_its_own_chunks(self, server):
        body = {"prompt": ["Once", "What"], "n": 2, "seed": 4, "max_tokens": 9}
        body |= {"ignore_eos": True, "return_token_ids": True}
        whole = post(server, COMPLETIONS, **body)["choices"]
        chunks = list(lines(server, COMPLETIONS, **body, stream_interval=4))
        for choice in whole:
            mine = [one for one in chunks if one["choices"][0]["index"] == choice["index"]]
            assert [len(one) for one in token_lists(mine)] == [1, 4, 4]
            assert tokens_of(mine) == choice["token_ids"]
            assert text_of(mine) == choice["text"]

    def test_refusals(self, server):
        for value in (0, -1, True, "2", 1 << 40):
            error = refused(server, COMPLETIONS, prompt="a", stream=True, stream_interval=value)
            assert error["param"] == "stream_interval"
        error = refused(server, CHAT, messages=HI, stream_interval=2)
        assert error["param"] == "stream_interval"
        assert "stream=true" in error["message"]
        post(server, CHAT, messages=HI, max_tokens=1, stream_interval=1)


class TestContinuousUsage:
    OPTIONS = {"include_usage": True, "continuous_usage_stats": True}

    def test_each_chunk_counts_its_own_completion(self, server):
        body = {"n": 2, "seed": 3, "max_tokens": 5, "ignore_eos": True}
        prompts = ["Once", "What is a list of things?"]
        lengths = [post(server, "/tokenize", prompt=one)["count"] for one in prompts]
        for echo in (False, True):
            *chunks, last = lines(
                server, COMPLETIONS, prompt=prompts, **body, echo=echo, stream_options=self.OPTIONS
            )
            counts = [[0] * echo + [1, 2, 3, 4, 5]] * 4
            assert self.counts(chunks, [lengths[0]] * 2 + [lengths[1]] * 2) == counts
            assert last["usage"]["completion_tokens"] == 20
            assert last["usage"]["prompt_tokens"] == sum(lengths)

    def test_the_chunk_with_the_role_counts_the_prompt_alone(self, server):
        body = {"messages": HI, "n": 2, "seed": 3, "max_tokens": 5, "ignore_eos": True}
        length = post(server, "/tokenize", messages=HI)["count"]
        *chunks, last = lines(server, CHAT, **body, stream_options=self.OPTIONS)
        assert self.counts(chunks, [length] * 2) == [[0, 1, 2, 3, 4, 5]] * 2
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 10)

    def test_it_is_silent_without_include_usage(self, server):
        options = {"continuous_usage_stats": True}
        for path, prompt in ((COMPLETIONS, {"prompt": "Once"}), (CHAT, {"messages": HI})):
            chunks = list(lines(server, path, **prompt, max_tokens=3, stream_options=options))
            assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)

    def counts(self, chunks: list[dict[str, Any]], lengths: list[int]) -> list[list[int]]:
        """The `completion_tokens` in the chunks of each completion. Checks the prompt's count."""
        found: list[list[int]] = [[] for _ in lengths]
        for chunk in chunks:
            (choice,), usage = chunk["choices"], chunk["usage"]
            assert usage["prompt_tokens"] == lengths[choice["index"]]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            found[choice["index"]].append(usage["completion_tokens"])
        return found


class TestPrompts:
    def test_chat_shows_what_the_template_gave(self, server):
        fields = {"max_tokens": 2, "return_prompt_text": True, "return_token_ids": True}
        messages = [{"role": "user", "content": "Wie heißt du? 🦆"}]
        reply = post(server, CHAT, messages=messages, **fields)
        text = reply["prompt_text"]
        assert "Wie heißt du? 🦆" in text
        assert text != "Wie heißt du? 🦆"
        body = {"prompt": text, "add_special_tokens": False}
        assert post(server, "/tokenize", **body)["tokens"] == reply["prompt_token_ids"]
        chunks = list(lines(server, CHAT, messages=messages, **fields, n=2))
        assert [chunk.get("prompt_text") for chunk in chunks] == [text] + [None] * (len(chunks) - 1)
        assert "prompt_text" not in post(server, CHAT, messages=messages, max_tokens=1)

    def test_offsets_are_where_the_tokens_stand(self, server):
        fields = {"max_tokens": 1, "return_prompt_text": True, "return_token_offsets": True}
        fields |= {"return_token_ids": True}
        prompts = ["Once upon a time, größer.", "What is a list?"]
        reply = post(server, COMPLETIONS, prompt=prompts, **fields, n=2)
        assert [one["prompt_text"] for one in reply["choices"]] == [
            prompt for prompt in prompts for _ in range(2)
        ]
        chat = post(server, CHAT, messages=HI, **fields)
        for one in (*reply["choices"][::2], chat):
            check_offsets(server, one, one["prompt_text"])
        chunks = list(lines(server, COMPLETIONS, prompt=prompts, **fields))
        firsts = [one["choices"][0] for one in chunks if one["choices"][0].get("prompt_text")]
        assert len(firsts) == 2
        for one in firsts:
            same = reply["choices"][2 * one["index"]]
            assert one["prompt_token_offsets"] == same["prompt_token_offsets"]
            assert one["prompt_text"] == same["prompt_text"]

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_a_prompt_that_is_cut(self, server, side):
        fields = {"max_tokens": 1, "return_prompt_text": True, "return_token_offsets": True}
        cut = {"truncate_prompt_tokens": 3, "truncation_side": side, "return_token_ids": True}
        text = "What is a list of things?"
        (whole,) = post(server, COMPLETIONS, prompt=text, **fields)["choices"]
        (kept,) = post(server, COMPLETIONS, prompt=text, **fields, **cut)["choices"]
        offsets = whole["prompt_token_offsets"]
        assert len(offsets) > 4
        expected = offsets[-3:] if side == "left" else offsets[:3]
        assert kept["prompt_token_offsets"] == expected
        assert len(kept["prompt_token_ids"]) == 3
        assert kept["prompt_text"] == text

    def test_a_prompt_of_token_ids_and_refusals(self, server):
        ids = post(server, "/tokenize", prompt="Once upon")["tokens"]
        fields = {"max_tokens": 1, "return_prompt_text": True, "return_token_offsets": True}
        (choice,) = post(server, COMPLETIONS, prompt=ids, **fields)["choices"]
        assert choice["prompt_text"] == post(server, "/detokenize", tokens=ids)["prompt"]
        assert choice["prompt_token_offsets"] is None
        for name in ("return_prompt_text", "return_token_offsets"):
            assert refused(server, CHAT, messages=HI, **{name: "yes"})["param"] == name
            assert refused(server, COMPLETIONS, prompt="a", **{name: 1})["param"] == name


class TestChosenTokens:
    NAMES = {"return_tokens_as_token_ids": True, "return_token_ids": True}

    def test_completions_report_them_at_every_position(self, server):
        fields = {**GREEDY, **self.NAMES, "max_tokens": 5}
        plain = self.logprobs(server, COMPLETIONS, prompt="Once upon", **fields, logprobs=20)
        # Each chosen token is among the 20 likeliest at some position. Only at such positions does
        # the plain reply show its log probability.
        chosen = [int(name[9:]) for top in plain["top_logprobs"] for name in list(top)[2:9:3]]
        asked = {"logprobs": 1, "logprob_token_ids": chosen}
        found = self.logprobs(server, COMPLETIONS, prompt="Once upon", **fields, **asked)
        assert found["token_logprobs"] == plain["token_logprobs"]
        num_known = 0
        for name, top, likeliest in zip(
            found["tokens"], found["top_logprobs"], plain["top_logprobs"], strict=True
        ):
            assert set(top) == {f"token_id:{token_id}" for token_id in chosen} | {name}
            known = top.keys() & likeliest.keys()
            assert {one: top[one] for one in known} == pytest.approx(
                {one: likeliest[one] for one in known}, abs=1e-4
            )
            assert all(top[one] < min(likeliest.values()) + 1e-4 for one in top.keys() - known)
            num_known += len(known)
        assert 15 < num_known < 5 * len(chosen)

    def test_chat_in_order_and_in_a_stream(self, server):
        fields = {**GREEDY, **self.NAMES, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
        chosen = [500, 7, 300]
        body = {"messages": HI, **fields, "logprob_token_ids": chosen}
        content = self.logprobs(server, CHAT, **body)["content"]
        assert len(content) == 4
        for entry in content:
            names = [one["token"] for one in entry["top_logprobs"]]
            assert names == ["token_id:500", "token_id:7", "token_id:300"]
        assert logprobs_of(list(lines(server, CHAT, **body))) == content
        # The request names the sampled token. The entry itself and its `top_logprobs` show the same
        # log probability.
        itself = int(content[0]["token"][9:])
        body["logprob_token_ids"] = [itself]
        first = self.logprobs(server, CHAT, **body)["content"][0]
        assert first["top_logprobs"][0]["logprob"] == pytest.approx(first["logprob"], abs=1e-5)
        none = self.logprobs(server, CHAT, messages=HI, **fields, logprob_token_ids=[])
        assert len(none["content"][0]["top_logprobs"]) == 2

    def test_side_by_side_and_the_most(self, server):
        fields = {**self.NAMES, "max_tokens": 3, "logprobs": 0, "n": 2, "seed": 3}
        chosen = list(range(400, 528))
        reply = post(server, COMPLETIONS, prompt="a", **fields, logprob_token_ids=chosen)
        for choice in reply["choices"]:
            for name, top in zip(
                choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True
            ):
                assert set(top) == {f"token_id:{token_id}" for token_id in chosen} | {name}

    @pytest.mark.parametrize(
        "fields",
        [
            {"logprob_token_ids": [1]},
            {"logprobs": 1, "logprob_token_ids": [10**6]},
            {"logprobs": 1, "logprob_token_ids": [-1]},
            {"logprobs": 1, "logprob_token_ids": [5] * 129},
            {"logprobs": 1, "logprob_token_ids": [5], "echo": True},
            {"logprobs": 1, "logprob_token_ids": [5], "use_beam_search": True},
            {"logprobs": 1, "logprob_token_ids": 5},
        ],
        ids=str,
    )
    def test_refusals(self, server, fields):
        error = refused(server, COMPLETIONS, prompt="a", max_tokens=1, **fields)
        assert error["param"] == "logprob_token_ids"
        assert "logprob_token_ids" in error["message"]
        if "echo" not in fields and "logprobs" not in fields:
            error = refused(server, CHAT, messages=HI, **fields)
            assert error["param"] == "logprob_token_ids"

    def logprobs(self, server: ServerProcess, path: str, **body: object) -> dict[str, Any]:
        return post(server, path, **body)["choices"][0]["logprobs"]


def check_offsets(server: ServerProcess, shown: dict[str, Any], text: str) -> None:
    """Check that offsets give the characters of tokens, from the beginning to the end of the text.

    Up to four tokens are not compared: special tokens, and tokens with a part of a character.
    """
    ids, offsets = shown["prompt_token_ids"], shown["prompt_token_offsets"]
    assert len(ids) == len(offsets)
    covered = [pair for pair in offsets if pair != [0, 0]]
    assert covered[0][0] == 0
    assert covered[-1][1] == len(text)
    num_whole = 0
    for token_id, (begin, end) in zip(ids, offsets, strict=True):
        piece = post(server, "/detokenize", tokens=[token_id])["prompt"]
        if end > begin and "\N{REPLACEMENT CHARACTER}" not in piece:
            assert piece.strip() == text[begin:end].strip()
            num_whole += 1
    assert num_whole >= len(ids) - 4


def token_lists(chunks: list[dict[str, Any]]) -> list[list[int]]:
    lists = (choice.get("token_ids") for chunk in chunks for choice in chunk["choices"])
    return [token_ids for token_ids in lists if token_ids]


def tokens_of(chunks: list[dict[str, Any]]) -> list[int]:
    return [token_id for token_ids in token_lists(chunks) for token_id in token_ids]


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        for choice in choices
    )


def logprobs_of(chunks: list[dict[str, Any]]) -> list[Any]:
    found = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    return [
        entry
        for one in found
        if one
        for entry in one.get("content")
        or zip(
            one["tokens"],
            one["token_logprobs"],
            one["top_logprobs"],
            one["text_offset"],
            strict=True,
        )
    ]
