"""The load client against servers that answer, and against servers that fail or stall."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from typing import Any

import msgspec
import psutil
import pytest

from ostinato.benchmarks.load.job import JobRequest, LoadJob, LoadReport, RequestTimes
from ostinato.benchmarks.load.load_client import _Answer, run_job
from ostinato.benchmarks.load.run import run_client
from ostinato.benchmarks.load.serving_metrics import client_warnings
from tests.benchmarks.load.answering import Answering, answer, break_off, stall, status
from tests.waiting import repeat_if_late


def requests(count: int, **fields: Any) -> list[JobRequest]:
    return [JobRequest(prompt=[7, index], max_tokens=3, **fields) for index in range(count)]


def run(url: str, sent: list[JobRequest], **fields: Any) -> LoadReport:
    return run_job(LoadJob(url=url, model="m", requests=sent, **fields), lambda progress: None)


def statuses(report: LoadReport) -> list[str]:
    return [one.status for one in report.requests]


def test_tokens_and_times_of_good_answers():
    with Answering(answer()) as server:
        report = run(server.url, requests(4), concurrency=2, body={"temperature": 0.0})
    assert statuses(report) == ["ok"] * 4
    for one in report.requests:
        assert (one.num_prompt_tokens, one.num_output_tokens) == (3, 3)
        assert one.intended_s <= one.sent_s <= one.chunk_s[0] <= one.chunk_s[-1] <= one.end_s
        assert one.finish_reason == "length"
    body = server.bodies[0]
    assert body["prompt"] == [7, 0]
    assert body["stream_options"] == {"include_usage": True}
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 3, 0.0)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("cut", [1, 2, 3, 4, 9])
def test_an_event_counts_when_its_last_byte_arrives(line_end: bytes, cut: int):
    """Each event arrives in two parts. The second part has `cut` bytes."""
    times = RequestTimes(status="")
    answer = _Answer(times, lambda: 0.0)
    for number in range(3):
        event = b'data: {"choices": [{"text": "%d"}]}' % number + 2 * line_end
        answer.feed(event[:-cut])
        assert len(times.chunk_s) == number
        answer.feed(event[-cut:])
        assert len(times.chunk_s) == number + 1
    answer.feed(b"data: [DONE]" + 2 * line_end)
    assert ("".join(answer.text), answer.ended) == ("012", True)


def test_a_closed_loop_holds_its_number():
    with Answering(answer(pause_s=0.05)) as server:
        report = run(server.url, requests(9), concurrency=3)
    changes = sorted((t, d) for r in report.requests for t, d in ((r.sent_s, 1), (r.end_s, -1)))
    under_way = [sum(d for _, d in changes[: n + 1]) for n in range(len(changes))]
    assert max(under_way) == 3


def test_waiting_at_the_client_counts_from_the_intended_time():
    """Ten requests are due at once, and one is sent at a time: the last one waits for nine."""
    with Answering(answer(pause_s=0.05)) as server:
        report = run(server.url, requests(10, at_s=0.0), max_concurrency=1)
    last = max(report.requests, key=lambda one: one.end_s)
    assert last.intended_s == 0
    assert last.chunk_s[0] - last.intended_s > 0.45
    assert last.sent_s > 0.4
    assert last.chunk_s[0] - last.sent_s < last.chunk_s[0] - last.intended_s


def test_an_open_loop_does_not_wait_for_answers():
    sent = [JobRequest(prompt=[1], max_tokens=1, at_s=0.1 * n) for n in range(5)]
    with Answering(answer(pause_s=5.0)) as server:
        report = run(server.url, sent)
    assert [one.intended_s for one in report.requests] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    # All were under way at once: no request waited for the answer to another, which takes 5 s.
    assert max(one.sent_s for one in report.requests) < min(one.end_s for one in report.requests)


def test_a_turn_carries_the_answer_before_it():
    sent = [
        JobRequest(prompt=[5], max_tokens=2),
        JobRequest(prompt=[6], max_tokens=2, after=0),
        JobRequest(prompt=[9], max_tokens=1, after=1),
    ]
    with Answering(answer()) as server:
        report = run(server.url, sent, concurrency=1, return_token_ids=True)
        assert statuses(report) == ["ok"] * 3
        assert [body["prompt"] for body in server.bodies] == [
            [5],
            [5, 0, 1, 6],
            [5, 0, 1, 6, 0, 1, 9],
        ]
        server.bodies.clear()
        # This answer has no token ids. So the client puts as many ids of the prompt in their place.
        run(server.url, [JobRequest(prompt=[5, 4], max_tokens=3), sent[1]], concurrency=1)
        assert server.bodies[1]["prompt"] == [5, 4, 5, 4, 5, 6]
        server.bodies.clear()
        texts = [
            JobRequest(prompt="a", max_tokens=2),
            JobRequest(prompt="b", max_tokens=1, after=0),
        ]
        run(server.url, texts, concurrency=1, chat=True)
        assert server.bodies[1]["messages"] == [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "xx"},
            {"role": "user", "content": "b"},
        ]


def test_the_duration_of_a_closed_loop_ends_the_sending():
    with Answering(answer(pause_s=0.2)) as server:
        report = run(server.url, requests(500), concurrency=1, stop_after_s=0.5)
    assert 1 <= len(report.requests) < 20
    assert set(statuses(report)) == {"ok"}


def test_an_address_that_refuses():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        report = run(url, requests(50, at_s=0.0), give_up_after=5)
    found = statuses(report)
    assert found.count("refused") >= 5
    assert set(found) <= {"refused", "not sent"}


@pytest.mark.parametrize(
    ("handler", "expected", "words"),
    [
        (status(500, body=b"kaputt"), "http 500", "kaputt"),
        (status(404), "http 404", "no"),
        (status(307, "Location: http://example.invalid/\r\n"), "redirected", "example.invalid"),
        (
            status(200, "Content-Type: text/html\r\n", b"<html>"),
            "broken",
            "before the answer was complete",
        ),
        (status(200, body=b"data: {]\n\n"), "broken", "malformed"),
        (status(200, body=b'data: {"error": {"message": "late"}}\n\n'), "error", "late"),
        (break_off, "broken", "before the answer was complete"),
        (stall, "stalled", "no byte for 0.3 s"),
    ],
)
def test_failed_answers_are_counted_and_the_run_ends(handler: Any, expected: str, words: str):
    # Elsewhere a pause of this process would count as a stall.
    limits = {"stall_timeout_s": 0.3} if expected == "stalled" else {}
    with Answering(handler) as server:
        report = run(server.url, requests(3), concurrency=3, **limits)
    assert statuses(report) == [expected] * 3
    assert words in (report.requests[0].error or "")


def test_failures_after_a_success_do_not_end_the_run():
    count = 0

    async def first_only(body: dict[str, Any], writer: Any) -> None:
        nonlocal count
        count += 1
        await (answer() if count == 1 else status(500))(body, writer)

    with Answering(first_only) as server:
        report = run(server.url, requests(8), concurrency=1, give_up_after=2)
    assert statuses(report) == ["ok"] + ["http 500"] * 7


def test_the_client_is_a_process_of_its_own():
    progress: list[object] = []
    job_fields: dict[str, Any] = {"concurrency": 2, "num_warmups": 1}
    with Answering(answer(pause_s=0.3)) as server:
        job = LoadJob(url=server.url, model="m", requests=requests(6), **job_fields)
        report = run_client(job, progress.append)
        assert server.bodies[0]["prompt"] == [0, 7]  # the warm-up has the first prompt backwards
    assert statuses(report) == ["ok"] * 6
    assert progress
    assert report.loop_lag_ms.keys() == {"p50", "p99", "max"}
    assert 0 <= report.cpu_share < 1.5


def test_what_a_frozen_client_did_not_send_in_time_counts_as_latency():
    """The client is stopped for a second, in which it should send 25 requests."""
    sent = [JobRequest(prompt=[1, n], max_tokens=2, at_s=0.3 + 0.04 * n) for n in range(60)]

    def attempt() -> tuple[LoadReport, list[float]] | None:
        """The report, and the waits of the requests that were due in the pause."""
        pause: list[float] = []  # its begin and end, in unix seconds

        def freeze(progress: object) -> None:
            if not pause:
                children = psutil.Process().children()
                [client] = [
                    c for c in children if "ostinato.benchmarks.load.load_client" in c.cmdline()
                ]
                client.suspend()
                pause.append(time.time())
                time.sleep(1.0)
                pause.append(time.time())
                client.resume()

        with Answering(answer()) as server:
            report = run_client(LoadJob(url=server.url, model="m", requests=sent), freeze)
        begin, end = (at - report.began_at for at in pause)
        due = [one for one in report.requests if begin + 0.05 < one.intended_s < end]
        # The first progress may come so late that most requests were sent before.
        if len(due) < 20:
            return None
        for one in due:
            assert one.chunk_s[0] >= end
        return report, [one.chunk_s[0] - one.intended_s for one in due]

    report, waits = repeat_if_late(attempt)
    assert statuses(report) == ["ok"] * 60
    assert [one.intended_s for one in report.requests] == pytest.approx(
        [0.3 + 0.04 * n for n in range(60)]
    )
    # All requests that were due in the pause are late, not only one of them.
    assert max(waits) > 0.8
    assert sum(wait > 0.3 for wait in waits) > 10
    assert any("requests were sent up to" in warning for warning in client_warnings(report))


def test_a_client_ends_when_its_parent_stops_reading():
    requests = [JobRequest(prompt=[1], max_tokens=2, at_s=0.1 * n) for n in range(36_000)]
    with Answering(answer()) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "ostinato.benchmarks.load.load_client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(
            msgspec.json.encode(LoadJob(url=server.url, model="m", requests=requests))
        )
        process.stdin.close()
        assert process.stdout.readline()  # it is at work
        process.stdout.close()
        assert process.wait(120) == 1


def test_without_usage_prompts_count_as_they_were_sent():
    async def no_usage(body: dict[str, Any], writer: Any) -> None:
        choice = {"text": "x", "finish_reason": "length"}
        data = b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n"
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + data + b"data: [DONE]\n\n")

    with Answering(no_usage) as server:
        report = run(server.url, requests(2), concurrency=1)
    assert [(one.num_prompt_tokens, one.num_output_tokens) for one in report.requests] == [
        (2, 1)
    ] * 2
