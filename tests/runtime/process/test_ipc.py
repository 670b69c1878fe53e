"""Messages to the engine: a grammar that equals the last one sent is left out of the message."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ostinato.runtime.process.ipc import (
    AbortRequests,
    AddRequest,
    ClientMessage,
    LoadAdapter,
    client_decoder,
    encoder,
    with_repetition,
    without_repetition,
)
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request

LONG = "start: " + "x" * 1000


def add(request_id: str, grammar: str) -> AddRequest:
    return AddRequest(
        Request(
            request_id=request_id,
            prompt_token_ids=[1],
            sampling=SamplingParams(),
            grammar=grammar,
        )
    )


MESSAGES = st.one_of(
    st.just(AbortRequests(["a"])),
    st.just(LoadAdapter(3, 1, "/adapters/sql", "0f")),
    st.sampled_from(["", LONG, LONG + "y"]).map(lambda grammar: add("a", grammar)),
)


@given(st.lists(MESSAGES))
def test_a_grammar_is_sent_once_in_a_row(sent):
    sending = receiving = last = ""
    for message in sent:
        short, sending = without_repetition(message, sending)
        data = encoder().encode(short)
        received: ClientMessage = client_decoder.decode(data)
        received, receiving = with_repetition(received, receiving)
        assert msgspec.to_builtins(received) == msgspec.to_builtins(message)
        if isinstance(message, AddRequest) and message.request.grammar:
            assert (len(data) > 1000) == (message.request.grammar != last)
            last = message.request.grammar
