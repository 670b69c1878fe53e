"""Responses in the background: a client polls, cancels or resumes them.

They outlive the engine process.
"""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.e2e.json_requests import MODEL
from tests.waiting import repeat_if_late, wait_until


class TestBackground:
    def until(self, client: openai.OpenAI, response_id: str, *statuses: str) -> Any:
        while (answer := client.responses.retrieve(response_id)).status not in statuses:
            assert answer.status in ("queued", "in_progress")
        return answer

    def test_polling(self, client):
        fields: dict[str, Any] = {"model": MODEL, "input": "What is a list?", "temperature": 0}
        fields["max_output_tokens"] = 24
        plain = client.responses.create(**fields)
        answer = client.responses.create(**fields, background=True)
        assert (answer.status, answer.background, answer.output) == ("queued", True, [])
        whole = self.until(client, answer.id, "completed", "incomplete")
        assert (whole.output_text, whole.status) == (plain.output_text, plain.status)
        assert whole.usage.output_tokens == plain.usage.output_tokens

    def test_cancel(self, server, client):
        text: Any = {"format": {"type": "json_schema", "name": "a", "schema": self.LONG}}
        with server.held_engine():  # otherwise the reply may end before it is cancelled
            answer = client.responses.create(
                model=MODEL, input="a", background=True, text=text, max_output_tokens=450
            )
            cancelled = client.responses.cancel(answer.id)
        assert cancelled.status == "cancelled"
        assert client.responses.retrieve(answer.id).status == "cancelled"
        assert client.responses.cancel(answer.id).status == "cancelled"
        wait_until(lambda: server.metrics()["ostinato_requests_running"] == 0)
        done = client.responses.create(model=MODEL, input="a", max_output_tokens=2)
        with pytest.raises(openai.BadRequestError, match="background=true"):
            client.responses.cancel(done.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.cancel("resp_none")

    LONG = {"type": "array", "items": {"const": "la"}, "minItems": 400}

    def test_a_stream_that_is_taken_up_again(self, client):
        fields: dict[str, Any] = {"model": MODEL, "input": "What is a list?", "temperature": 0}
        fields["max_output_tokens"] = 40
        stream = client.responses.create(**fields, background=True, stream=True)
        first = []
        for event in stream:
            first.append(event)
            if event.type == "response.output_text.delta":
                break
        stream.close()  # the server goes on with the reply
        response_id = first[0].response.id
        after = first[-1].sequence_number
        rest = list(client.responses.retrieve(response_id, stream=True, starting_after=after))
        numbers = [event.sequence_number for event in (*first, *rest)]
        assert numbers == list(range(len(numbers)))
        assert first[1].type == "response.queued"
        deltas = [one for one in (*first, *rest) if one.type == "response.output_text.delta"]
        text = "".join(one.delta for one in deltas)
        assert rest[-1].response.output_text == text
        assert client.responses.create(**fields).output_text == text

    def test_input_tokens(self, client):
        counted = client.responses.input_tokens.count(model=MODEL, input="What is a list?")
        answer = client.responses.create(model=MODEL, input="What is a list?", max_output_tokens=1)
        assert counted.input_tokens == answer.usage.input_tokens


@pytest.mark.slow
def test_a_reply_in_the_background_outlives_the_engine_process(server, client):
    text: Any = {"format": {"type": "json_schema", "name": "a", "schema": TestBackground.LONG}}
    fields: dict[str, Any] = {"model": MODEL, "input": "a", "text": text, "temperature": 0}
    fields["max_output_tokens"] = 440
    before = server.num_restarts()
    plain = client.responses.create(**fields)

    def attempt() -> str | None:
        answer = client.responses.create(**fields, background=True)
        wait_until(lambda: client.responses.retrieve(answer.id).output_text)
        return answer.id if server.kill_busy_engine() else None

    response_id = repeat_if_late(attempt)
    wait_until(lambda: client.responses.retrieve(response_id).status != "in_progress")
    done = client.responses.retrieve(response_id)
    assert (done.status, done.output_text) == (plain.status, plain.output_text)
    wait_until(lambda: server.num_restarts() == before + 1)
