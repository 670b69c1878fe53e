"""Messages to the engine: parts that equal the ones sent last are left out of the message."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ostinato.runtime.process.ipc import (
    AbortRequests,
    AddRequest,
    ClientMessage,
    LastParts,
    LoadAdapter,
    attach_data,
    client_decoder,
    detach_data,
    encoder,
    with_repetition,
    without_repetition,
)
from ostinato.runtime.types.audio import PromptAudio, PromptSound, audio_digest
from ostinato.runtime.types.images import PromptImage
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from tests.runtime.toy_sounds import toy_sound
from tests.runtime.toy_tower import toy_image, toy_pair

LONG = "start: " + "x" * 1000


def add(
    request_id: str, grammar: str, media: Sequence[PromptImage | PromptSound] = ()
) -> AddRequest:
    return AddRequest(
        Request(
            request_id=request_id,
            prompt_token_ids=[1],
            sampling=SamplingParams(),
            grammar=grammar,
            images=[one for one in media if isinstance(one, PromptImage)],
            sounds=[one for one in media if isinstance(one, PromptSound)],
        )
    )


VIDEO = [toy_pair(1, 16, 16), toy_pair(2, 16, 16, 256, time_offset=3, first=False)]
STILL = [VIDEO[0], toy_pair(1, 16, 16, 256, time_offset=3, first=False), VIDEO[1]]
IMAGES = [[], [toy_image(1, 16, 16)], [toy_image(1, 16, 16), toy_image(2, 16, 16)], VIDEO, STILL]
SOUNDS = [
    [toy_sound(1, 8)],
    [toy_sound(1, 8), toy_sound(2, 8, 8), toy_sound(1, 8, 16)],
    [toy_sound(1, 8, 1)],
]

MESSAGES = st.one_of(
    st.just(AbortRequests(["a"])),
    st.just(LoadAdapter(3, 1, "/adapters/sql", "0f")),
    st.builds(
        add,
        st.just("a"),
        st.sampled_from(["", LONG, LONG + "y"]),
        st.sampled_from([*IMAGES, *SOUNDS]),
    ),
)


@given(st.lists(MESSAGES))
def test_a_grammar_images_and_sounds_are_sent_once_in_a_row(sent):
    sending = receiving = LastParts()
    last_grammar, last_media = "", []
    for message in sent:
        short, sending = without_repetition(message, sending)
        bare, parts = detach_data(short)
        data = encoder().encode(bare)
        received: ClientMessage = attach_data(client_decoder.decode(data), parts)
        received, receiving = with_repetition(received, receiving)
        assert msgspec.to_builtins(received) == msgspec.to_builtins(message)
        if isinstance(message, AddRequest):
            grammar, media = message.request.grammar, message.request.media
            assert (LONG.encode() in data) == (grammar not in ("", last_grammar))
            assert not any(one.data in data for one in media)
            sent_data = [] if media == last_media else [one.data for one in media]
            assert parts == list(dict.fromkeys(sent_data))
            last_grammar, last_media = grammar or last_grammar, media


def test_audio_is_a_part_of_its_own():
    features = bytes(range(4 * 6 % 256)) * 2
    audio = PromptAudio(
        digest=audio_digest(3, 4, features), num_bins=3, num_frames=4, features=features
    )
    message = add("a", "")
    message = AddRequest(msgspec.structs.replace(message.request, audio=audio))
    bare, parts = detach_data(message)
    assert parts == [features]
    encoded = encoder().encode(bare)
    assert features not in encoded
    received = attach_data(client_decoder.decode(encoded), parts)
    assert msgspec.to_builtins(received) == msgspec.to_builtins(message)
