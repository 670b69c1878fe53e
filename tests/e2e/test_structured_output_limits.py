"""Limits of a constraint, the processes that compile it, and constraints that cost much."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest

from ostinato.runtime.grammar.compiler import MAX_BYTES
from ostinato.runtime.grammar.json_schemas import MAX_OPTIONAL_OF_SOME, MAX_OPTIONAL_PROPERTIES
from ostinato.runtime.types.structured_outputs import MAX_CHOICES
from tests.e2e.server_process import HTTP, ServerProcess
from tests.e2e.structured_requests import HI, complete, refused
from tests.waiting import PATIENCE_S

END_IDS = (0, 2)  # the demo model's ids that end an answer
PREPARATION = "ostinato.api.server.preparation_main"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A link to this environment's Python. A test removes the link: no process can start then."""
    directory = tmp_path_factory.mktemp("environment")
    (directory / "bin").mkdir()
    link = directory / "bin" / "python"
    link.symlink_to(Path(sys.executable).resolve())
    (directory / "lib").symlink_to(Path(sys.prefix) / "lib")
    settings = Path(sys.prefix) / "pyvenv.cfg"
    if settings.exists():
        (directory / "pyvenv.cfg").symlink_to(settings)
    return link


@pytest.fixture(scope="module")
def server(python: Path) -> Iterator[ServerProcess]:
    # The server's processes inherit a memory limit. It is above the limits that they set for
    # themselves.
    limited = ("sh", "-c", f'ulimit -v {16 << 20}; shift; exec "$0" "$@"', str(python))
    with ServerProcess(prefix=limited) as process:
        yield process


def optional(count: int, **more: Any) -> dict[str, Any]:
    """The schema of an object with `count` optional properties and one required property."""
    names = [f"property {index}" for index in range(count)]
    return {
        "type": "object",
        "properties": {**{name: {"type": "null"} for name in names}, "last": {"const": 1}},
        "required": ["last"],
        "additionalProperties": False,
        **more,
    }


class TestLimits:
    """Limits in docs/structured-output.md: a constraint at a limit, and one beyond it."""

    def test_choices(self, server):
        words = [f"w{index:05}" for index in range(MAX_CHOICES)]
        assert complete(server, structured_outputs={"choice": words})["text"] in words
        error = refused(server, structured_outputs={"choice": [*words, "one more"]})
        assert f"1 to {MAX_CHOICES} texts" in error["message"]

    def test_a_choice_that_begins_another_one(self, server):
        """Both choices are possible: the end token after the first one decides."""
        fields = {"structured_outputs": {"choice": ["yes", "yes, but"]}, "temperature": 0}
        for bias, text in ((100, "yes"), (-100, "yes, but")):
            ends = {str(token_id): bias for token_id in END_IDS}
            choice = complete(server, **fields, logit_bias=ends)
            assert (choice["text"], choice["finish_reason"]) == (text, "stop")

    @pytest.mark.parametrize("kind", [{}, {"type": "string"}, {"type": ["string", "null"]}])
    def test_an_enum_of_50000(self, server, kind):
        words = [f"the value {index}" for index in range(50_000)]
        choice = complete(server, structured_outputs={"json": {**kind, "enum": words}})
        assert json.loads(choice["text"]) in words

    def test_the_size_of_a_constraint(self, server):
        body = {"choice": ["yes", ""]}
        rest = "n" * (MAX_BYTES - len(json.dumps(body, separators=(",", ":"))))
        choice = complete(server, structured_outputs={"choice": ["yes", rest]}, max_tokens=1)
        assert choice["text"][0] in "yn"
        error = refused(server, structured_outputs={"choice": ["yes", rest + "n"]})
        assert f"has {MAX_BYTES + 1} bytes, but at most {MAX_BYTES}" in error["message"]
        assert error["code"] == "constraint_too_complex"

    @pytest.mark.parametrize(
        ("most", "more"),
        [(MAX_OPTIONAL_PROPERTIES, {}), (MAX_OPTIONAL_OF_SOME, {"minProperties": 2})],
    )
    def test_optional_properties(self, server, most, more):
        schema = optional(most, **more)
        choice = complete(server, structured_outputs={"json": schema}, max_tokens=300)
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["text"]), schema)
        error = refused(server, structured_outputs={"json": optional(most + 1, **more)})
        assert f"at most {most} are possible" in error["message"]


def grammar_processes(server: ServerProcess) -> list[psutil.Process]:
    return processes(server, "ostinato.runtime.grammar.process")


def processes(server: ServerProcess, module: str) -> list[psutil.Process]:
    found = []
    for one in psutil.Process(server.pid).children():
        with contextlib.suppress(psutil.Error):  # a killed process that is not reaped yet
            if module in one.cmdline():
                found.append(one)
    return found


class TestProcess:
    def test_it_is_replaced_when_it_is_killed(self, server):
        complete(server, structured_outputs={"choice": ["first"]})
        (process, *_) = grammar_processes(server)
        os.kill(process.pid, signal.SIGKILL)
        assert complete(server, structured_outputs={"choice": ["second"]})["text"] == "second"

    def test_killed_in_the_middle(self, server):
        """A suspended process keeps its job. When it is killed, the next process gets the job."""
        complete(server, structured_outputs={"choice": ["warm"]})
        for process in grammar_processes(server):
            process.suspend()
        stopped = {process.pid for process in grammar_processes(server)}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(complete, server, structured_outputs={"choice": ["held"]})
            assert complete(server, max_tokens=5)["text"]  # other requests are answered
            assert not waiting.done()
            for pid in stopped:
                os.kill(pid, signal.SIGKILL)
            assert waiting.result(PATIENCE_S)["text"] == "held"
        assert not stopped & {process.pid for process in grammar_processes(server)}

    def test_a_client_that_leaves_in_the_queue(self, server):
        """Both processes are suspended with a job each, so a third request waits for its turn."""

        def suspend() -> None:
            for process in grammar_processes(server):
                process.suspend()

        def held(choice: str, request_id: str) -> http.client.HTTPConnection:
            body = {"prompt": "A", "structured_outputs": {"choice": [choice]}}
            connection = server.send("/v1/completions", body, request_id)
            # When this is answered, the request before it waits for a process.
            complete(server, max_tokens=5)
            return connection

        def text(connection: http.client.HTTPConnection) -> str:
            with closing(connection):
                return json.loads(connection.getresponse().read())["choices"][0]["text"]

        complete(server, structured_outputs={"choice": ["warm"]})
        suspend()
        answers = [held("hold 0", "first")]
        complete(server, structured_outputs={"choice": ["warm as well"]})  # uses the other process
        suspend()
        answers.append(held("hold 1", "second"))
        held("gone", "left").close()
        line = "left disconnected phase=grammar endpoint=/v1/completions"
        assert server.log_of("left ") == line
        for process in grammar_processes(server):
            process.resume()
        assert [text(one) for one in answers] == ["hold 0", "hold 1"]

    def test_none_can_be_started(self, server, python):
        """The server cannot start a process, so it answers 503, not 400."""
        complete(server, structured_outputs={"choice": ["known"]})
        target = python.readlink()
        python.unlink()
        for process in (*grammar_processes(server), *processes(server, PREPARATION)):
            for one in (*process.children(recursive=True), process):  # otherwise the forks stay
                one.kill()
        bodies = [
            {"prompt": "A", "user": "u" * 10_000},  # large enough for a process of its own
            {"messages": HI, "chat_template": "Hi"},
            {"prompt": "A", "structured_outputs": {"choice": ["a new one"]}},
            {"prompt": "A", "structured_outputs": {"choice": ["streamed"]}, "stream": True},
            {"messages": HI, "structured_outputs": {"json": {"const": "new"}}},
        ]
        for body in bodies:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            answer = HTTP.post(f"{server.url}{path}", json=body | {"max_tokens": 2})
            assert answer.status_code == 503, answer.text
            assert int(answer.headers["retry-after"]) > 0
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "helper_process")
            assert "cannot be started (No such file" in error["message"]
        # A constraint that was compiled before is still served.
        assert complete(server, structured_outputs={"choice": ["known"]})["text"] == "known"
        python.symlink_to(target)
        assert complete(server, structured_outputs={"choice": ["a new one"]})["text"]
        assert complete(server, user="u" * 10_000)["text"]

    def test_the_system_leaves_no_memory_for_one(self, server):
        """The system limits a process's memory, as `ulimit -v` does. The server answers 503."""
        template = {"messages": HI, "chat_template": "{{ 'a' * 300000000 }}", "max_tokens": 2}
        url = f"{server.url}/v1/chat/completions"
        answer = HTTP.post(url, json=template)
        assert answer.status_code == 400  # longer than the context
        (process,) = processes(server, PREPARATION)
        limit = process.memory_info().vms + (200 << 20)
        process.rlimit(psutil.RLIMIT_AS, (limit, limit))
        answer = HTTP.post(url, json=template)
        assert answer.status_code == 503, answer.text
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "helper_process")
        assert "MiB that the limit of the system leaves it" in error["message"]
        assert complete(server, user="u" * 10_000)["text"]  # this one needs little memory
        process.kill()


def test_others_go_on_while_hostile_constraints_come(server):
    """The server refuses constraints that cost too much, and a concurrent stream ends as usual."""
    hostile = (
        [{"regex": "(.*a){200}.{200}b" + "x" * number} for number in range(3)]
        + [
            {
                "json": {
                    "type": "object",
                    "properties": {
                        f"p{index}": {"type": "string", "pattern": f"^(a|b)*c{{1,{500 + number}}}$"}
                        for index in range(2000)
                    },
                }
            }
            for number in range(2)
        ]
        + [{"grammar": "start: " + "(" * depth + '"a"' + ")" * depth} for depth in (200, 20_000)]
    )
    body = {"prompt": "A cat", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with (
        ThreadPoolExecutor(4) as pool,
        HTTP.stream("POST", f"{server.url}/v1/completions", json=body) as stream,
    ):
        codes = list(
            pool.map(
                lambda constraint: (
                    HTTP.post(
                        f"{server.url}/v1/completions",
                        json={"prompt": "A", "max_tokens": 4, "structured_outputs": constraint},
                    ).status_code
                ),
                hostile,
            )
        )
        *_, last = [line for line in stream.iter_lines() if line.startswith("data: {")]
    assert set(codes) <= {200, 400}
    assert 400 in codes
    assert json.loads(last[6:])["choices"][0]["finish_reason"] == "length"
