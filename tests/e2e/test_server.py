"""A real server process: the openai SDK, curl, disconnects, metrics, signals, a crash."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing

import openai
import psutil
import pytest

from tests.e2e.server_process import HTTP, ServerProcess
from tests.waiting import repeat_if_late, wait_until

MODEL = "ostinato-demo"
QUESTION = [{"role": "user", "content": "What is a block table?"}]
LONG = {"max_tokens": 400, "ignore_eos": True}  # a request that runs for seconds


@pytest.fixture(scope="module")
def sdk(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


class TestSdk:
    def test_models(self, sdk):
        assert [model.id for model in sdk.models.list()] == [MODEL]
        assert sdk.models.retrieve(MODEL).id == MODEL

    def test_chat(self, sdk):
        reply = sdk.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, max_tokens=24
        )
        (choice,) = reply.choices
        assert choice.message.role == "assistant"
        assert choice.message.content
        assert choice.finish_reason in ("stop", "length")
        assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
        assert 1 <= reply.usage.completion_tokens <= 24

    def test_a_stream_is_the_same_text(self, sdk):
        arguments = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
        whole = sdk.chat.completions.create(**arguments)
        *chunks, last = sdk.chat.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        assert last.choices == []
        assert last.usage.completion_tokens == whole.usage.completion_tokens

    def test_many_at_once(self, server, sdk):
        async def scenario() -> list[str]:
            async with openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key="none", max_retries=0
            ) as client:

                async def one(number: int) -> str:
                    stream = await client.completions.create(
                        model=MODEL,
                        prompt=f"Count to {number}:",
                        temperature=0,
                        max_tokens=12,
                        stream=True,
                        extra_body={"ignore_eos": True},
                    )
                    return "".join([chunk.choices[0].text async for chunk in stream])

                return await asyncio.gather(*map(one, range(8)))

        texts = asyncio.run(scenario())
        alone = sdk.completions.create(
            model=MODEL,
            prompt="Count to 5:",
            temperature=0,
            max_tokens=12,
            extra_body={"ignore_eos": True},
        )
        assert texts[5] == alone.choices[0].text

    def test_logprobs_of_chat(self, sdk):
        reply = sdk.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            max_tokens=5,
            logprobs=True,
            top_logprobs=3,
        )
        (choice,) = reply.choices
        assert len(choice.logprobs.content) == reply.usage.completion_tokens
        joined = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
        assert joined.decode().startswith(choice.message.content)
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 3
            # Greedy: the sampled token is the likeliest.
            assert entry.token == entry.top_logprobs[0].token
            assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)
            assert entry.logprob <= 0

    def test_logprobs_of_completions(self, sdk):
        reply = sdk.completions.create(
            model=MODEL, prompt="A list is", temperature=0, max_tokens=5, logprobs=2
        )
        logprobs = reply.choices[0].logprobs
        assert len(logprobs.tokens) == reply.usage.completion_tokens
        assert logprobs.text_offset[0] == 0
        assert all(len(top) == 2 for top in logprobs.top_logprobs)

    def test_n_with_a_seed(self, sdk):
        arguments = {
            "model": MODEL,
            "messages": QUESTION,
            "n": 3,
            "seed": 11,
            "temperature": 1.5,
            "max_tokens": 12,
        }
        first, second = (sdk.chat.completions.create(**arguments) for _ in range(2))
        texts = [choice.message.content for choice in first.choices]
        assert texts == [choice.message.content for choice in second.choices]
        assert len(set(texts)) > 1
        assert [choice.index for choice in first.choices] == [0, 1, 2]

    def test_stop(self, sdk):
        arguments = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
        whole = sdk.chat.completions.create(**arguments).choices[0].message.content
        word = whole.split()[2]
        reply = sdk.chat.completions.create(**arguments, stop=[word])
        assert reply.choices[0].message.content == whole[: whole.index(word)]
        assert reply.choices[0].finish_reason == "stop"
        assert reply.choices[0].stop_reason == word

    def test_length(self, sdk):
        reply = sdk.completions.create(
            model=MODEL, prompt="Once", max_tokens=3, extra_body={"ignore_eos": True}
        )
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage.completion_tokens == 3

    def test_several_prompts_and_token_ids(self, server, sdk):
        arguments = {"model": MODEL, "temperature": 0, "max_tokens": 6}
        texts = sdk.completions.create(prompt=["Once", "A list"], **arguments)
        token_ids = HTTP.post(f"{server.url}/tokenize", json={"prompt": "A list"}).json()["tokens"]
        same = sdk.completions.create(prompt=token_ids, **arguments)
        assert [choice.index for choice in texts.choices] == [0, 1]
        assert same.choices[0].text == texts.choices[1].text

    def test_a_cached_prompt_is_counted(self, sdk):
        prompt = "The quick brown fox jumps over the lazy dog, and once more. " * 4
        arguments = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 4}
        cold = sdk.completions.create(**arguments)
        warm = sdk.completions.create(**arguments)
        salted = sdk.completions.create(**arguments, extra_body={"cache_salt": "other"})
        assert warm.choices[0].text == cold.choices[0].text == salted.choices[0].text
        assert cold.usage.prompt_tokens_details.cached_tokens == 0
        assert warm.usage.prompt_tokens_details.cached_tokens >= 16
        assert salted.usage.prompt_tokens_details.cached_tokens == 0

    def test_an_error_is_the_sdks_error(self, sdk):
        with pytest.raises(openai.BadRequestError) as refused:
            sdk.chat.completions.create(model=MODEL, messages=QUESTION, temperature=3)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as missing:
            sdk.chat.completions.create(model="gpt-9", messages=QUESTION)
        assert missing.value.code == "model_not_found"


class TestCurl:
    def test_the_hint_that_the_server_prints(self, server):
        first = next(i for i, line in enumerate(server.output) if line.lstrip().startswith("curl"))
        command = "".join(server.output[first : first + 2])
        done = subprocess.run(
            ["bash", "-c", command.replace("curl", "curl -sS --max-time 240", 1)],
            capture_output=True,
            text=True,
            check=True,
            timeout=250,
        )
        assert json.loads(done.stdout)["choices"][0]["message"]["content"]

    def test_a_stream_on_the_wire(self, server):
        body = {"prompt": "Once", "max_tokens": 3, "stream": True, "ignore_eos": True}
        done = subprocess.run(
            [
                *("curl", "-sSN", "--max-time", "240", f"{server.url}/v1/completions"),
                *("-H", "Content-Type: application/json", "-d", json.dumps(body)),
            ],
            capture_output=True,
            check=True,
            timeout=250,
        )
        *events, end = done.stdout.split(b"\n\n")
        assert end == b""
        assert events[-1] == b"data: [DONE]"
        assert all(event.startswith(b'data: {"id":"cmpl-') for event in events[:-1])


class TestDisconnect:
    @pytest.mark.parametrize("stream", [True, False])
    def test_ends_the_request(self, server, stream):
        body = {"prompt": "Once", **LONG, "n": 32, "stream": stream}
        numbers = itertools.count()

        def attempt() -> str | None:
            """Leave after the first bytes. Returns None if the request has ended before."""
            request_id = f"gone-{next(numbers)}"
            url = f"{server.url}/v1/completions"
            own = body | {"request_id": request_id}
            with ExitStack() as held, HTTP.stream("POST", url, json=own) as response:
                lines = response.iter_lines()
                next(lines)
                held.enter_context(server.held_engine())
                return request_id if server.load() else None

        if stream:
            request_id = repeat_if_late(attempt)
        else:
            request_id = "gone"
            own = body | {"request_id": request_id}
            with server.held_engine(), server.sent("/v1/completions", own, request_id):
                pass
        line = server.log_of(f"cmpl-{request_id}")
        assert " disconnected " in line
        assert int(line.partition("output=")[2].split()[0]) < 32 * LONG["max_tokens"]
        wait_until(lambda: server.metrics()["ostinato_requests_running"] == 0)
        assert server.metrics()["ostinato_requests_waiting"] == 0


class TestFigures:
    def test_metrics_after_work(self, server, sdk):
        sdk.completions.create(model=MODEL, prompt="Once", max_tokens=3)
        metrics = server.metrics()
        assert metrics["ostinato_generation_tokens_total"] >= 1
        assert metrics["ostinato_time_to_first_token_seconds_count"] >= 1
        assert metrics["ostinato_kv_cache_blocks"] > 0
        late = [
            value
            for name, value in metrics.items()
            if name.startswith("ostinato_late_compiles_total{")
        ]
        assert late == [0] * 7
        assert metrics['ostinato_steps_total{kind="eager"}'] >= 1

    def test_running_is_seen_while_it_runs(self, server):
        body = {"prompt": "Once", **LONG, "stream": True}

        def is_seen() -> bool:
            with HTTP.stream("POST", f"{server.url}/v1/completions", json=body) as response:
                return any(
                    server.metrics()["ostinato_requests_running"] >= 1
                    for _ in response.iter_lines()
                )

        wait_until(is_seen)  # a quick machine may end a request before /metrics shows it
        wait_until(lambda: server.metrics()["ostinato_requests_running"] == 0)

    def test_health(self, server):
        assert HTTP.get(f"{server.url}/health").json() == {"status": "ok"}
        assert HTTP.get(f"{server.url}/ready").json() == {"status": "ready"}

    def test_the_api_process_imports_no_torch(self, server):
        libraries = {mapping.path for mapping in psutil.Process(server.pid).memory_maps()}
        assert not [path for path in libraries if "/torch/" in path]


def test_the_start_names_pages_that_answer(server):
    for name in ("page", "endpoints", "metrics"):
        url = server.wait_for_line(f"  {name}  ").split()[1]
        assert HTTP.get(url).status_code == 200


def test_port_in_use_is_one_line_before_anything_loads(server):
    port = server.url.rpartition(":")[2]
    done = subprocess.run(
        [sys.executable, "-m", "ostinato", "serve", f"server.port={port}"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"server.port={port} on 127.0.0.1 is in use" in line
    assert done.stdout == ""


class TestTheWayDown:
    """Each test starts its own server and ends it."""

    def test_sigterm_finishes_what_runs_and_exits_0(self):
        with ServerProcess("server.drain_timeout_s=200") as server:
            engine = server.engine
            body = {"prompt": "Once", "max_tokens": 150, "ignore_eos": True, "stream": True}
            with ExitStack() as held:
                held.enter_context(server.held_engine())
                with server.sent("/v1/completions", body, "first") as connection:
                    server.signal(signal.SIGTERM)
                    server.wait_for_line("unfinished sequences: 1;")
                    refused = HTTP.post(f"{server.url}/v1/completions", json={"prompt": "x"})
                    held.close()
                    events = connection.getresponse().read().decode().split("\n\n")
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "shutting_down"
            assert events[-2:] == ["data: [DONE]", ""]
            assert json.loads(events[-3][6:])["choices"][0]["finish_reason"] == "length"
            assert server.wait() == 0
            assert not engine.is_running()

    def test_sigterm_finishes_what_is_being_prepared(self):
        """The body of the first request waits for a process when the signal comes."""
        with ServerProcess("server.drain_timeout_s=200") as server:
            body = {"prompt": "word " * 1200, "max_tokens": 5, "truncate_prompt_tokens": 8}
            with ExitStack() as held:
                held.enter_context(server.held_preparation())
                with closing(server.send("/v1/completions", body, "first")) as connection:
                    # The server reads the next request after the first.
                    later = {"prompt": "Once", "max_tokens": 2}
                    assert HTTP.post(f"{server.url}/v1/completions", json=later).status_code == 200
                    server.signal(signal.SIGTERM)
                    server.wait_for_line("unfinished requests: 1,")
                    held.close()
                    response = connection.getresponse()
                    answer = json.loads(response.read())
            assert response.status == 200
            assert answer["usage"] == {**answer["usage"], "completion_tokens": 5}
            assert server.wait() == 0

    def test_a_signal_while_it_starts(self, tmp_path):
        # Without a bundle the start compiles, so it takes seconds.
        server = ServerProcess(f"graphs.bundle_dir={tmp_path}")
        try:
            url = server.wait_for_line("answers 503 until").split()[2]
            server.wait_for_line("imports")
            with server.held_engine():
                response = HTTP.get(f"{url}/ready")
                assert (response.status_code, response.json()["status"]) == (503, "starting")
                server.signal(signal.SIGTERM)
            assert server.wait() == 0
        finally:
            server.__exit__()

    def test_a_second_signal_cuts_off(self):
        with ServerProcess() as server:
            body = {"prompt": "Once", **LONG, "n": 32, "stream": True}

            def attempt() -> str | None:
                with HTTP.stream("POST", f"{server.url}/v1/completions", json=body) as response:
                    lines = response.iter_lines()
                    next(lines)
                    with server.held_engine():
                        if not server.load():
                            return None
                        server.signal(signal.SIGINT)
                        server.wait_for_line("unfinished sequences: ")
                        server.signal(signal.SIGINT)
                        return [line for line in lines if line][-1]

            last = repeat_if_late(attempt)
            assert "error" in json.loads(last[6:])
            assert server.wait() == 128 + signal.SIGINT

    def test_an_engine_that_stays_down_is_an_error_not_a_hang(self):
        with ServerProcess("server.max_restarts=0") as server:
            url = f"{server.url}/v1/chat/completions"
            body = {"messages": QUESTION, **LONG, "n": 64, "stream": True}

            def attempt() -> list[str] | None:
                with HTTP.stream("POST", url, json=body) as response:
                    lines = response.iter_lines()
                    next(lines)
                    if not server.kill_busy_engine():
                        return None
                    return [line for line in lines if line]

            events = repeat_if_late(attempt)
            assert json.loads(events[-1][6:])["error"]["code"] == "engine_dead"
            health = HTTP.get(f"{server.url}/health")
            assert health.status_code == 503
            assert health.json()["reason"].startswith("the engine does not run")
            later = HTTP.post(f"{server.url}/v1/completions", json={"prompt": "x"})
            assert later.status_code == 503
            assert later.json()["error"]["code"] == "engine_dead"
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
