"""Times in messages of an engine on another machine, whose clock began at another moment."""

from __future__ import annotations

from pathlib import Path

import zmq

from ostinato.runtime.process.engine_loop import _Connection
from ostinato.runtime.process.ipc import AddRequest, EngineOutputs, encoder, engine_decoder
from ostinato.runtime.types.outputs import SequenceOutput, TimelineEvent
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request


def test_times_are_those_of_the_receivers_clock(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    with zmq.Context() as context, context.socket(zmq.PAIR) as client:
        client.bind(address)
        connection = _Connection(address, clock_offset_s=1000.0)
        request = Request(
            request_id="a", prompt_token_ids=[1], sampling=SamplingParams(), arrival_time=1500.0
        )
        client.send(encoder().encode(AddRequest(request)))
        (received,) = list(connection.receive(20.0))[:1]
        assert isinstance(received, AddRequest)
        assert received.request.arrival_time == 500.0
        events = [TimelineEvent("scheduled", 501.0, 2.0)]
        first = SequenceOutput("a", [7], scheduled_time=501.0, events=events)
        connection.send(EngineOutputs([first, SequenceOutput("a", [8])], None))
        assert client.poll(20_000)
        sent = engine_decoder.decode(client.recv())
        assert isinstance(sent, EngineOutputs)
        assert sent.outputs[0].scheduled_time == 1501.0
        assert sent.outputs[0].events == [TimelineEvent("scheduled", 1501.0, 2.0)]
        assert sent.outputs[1].scheduled_time == 0.0, "a time that is not set must stay 0"
        connection.close()
