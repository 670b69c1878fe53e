"""Messages between ranks: streams cut at any byte, and what other ranks get of a request."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ostinato.runtime.ranks.messages import (
    Arrived,
    Frames,
    LeaderMessage,
    Step,
    encode_frame,
    for_other_ranks,
    rank_decoder,
)
from ostinato.runtime.types.audio import PromptAudio
from ostinato.runtime.types.params import PoolingParams, SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import AdmittedSequence, ScheduledSequence, SchedulerOutput
from tests.runtime.toy_sounds import toy_sound


@given(
    st.lists(st.lists(st.integers(0, 1 << 40), max_size=40), max_size=5),
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
)
def test_messages_survive_any_cut_of_the_stream(numbers: list[list[int]], sizes: list[int]) -> None:
    messages = [Arrived(f"meeting {i}", some) for i, some in enumerate(numbers)]
    stream = b"".join(map(encode_frame, messages))
    frames, found, begin, turn = Frames(), [], 0, 0
    while begin < len(stream):
        end = begin + sizes[turn % len(sizes)]
        found += frames.add(stream[begin:end])
        begin, turn = end, turn + 1
    assert [rank_decoder.decode(frame) for frame in found] == messages


def test_a_step_arrives_as_it_was_sent_without_what_only_sampling_needs() -> None:
    requests = [
        Request(
            request_id="plain",
            prompt_token_ids=[1, 2, 3],
            sampling=SamplingParams(temperature=0.5, stop=("x",)),
            grammar="start: /secret/",
        ),
        Request(
            request_id="scored",
            prompt_token_ids=[4, 5],
            sampling=SamplingParams(prompt_logprobs=2),
        ),
        Request(
            request_id="pooled",
            prompt_token_ids=[6],
            sampling=SamplingParams(),
            pooling=PoolingParams(),
            audio=PromptAudio(digest=b"d", num_bins=1, num_frames=1),
        ),
        Request(
            request_id="heard",
            prompt_token_ids=[7, 7, 8],
            sampling=SamplingParams(),
            sounds=[toy_sound(1, 2).without_data()],
        ),
    ]
    output = SchedulerOutput(
        scheduled=[ScheduledSequence(row, 0, 3, [1, 2, 3], [row + 1], 1) for row in range(4)],
        admitted=[AdmittedSequence(row, request, [9]) for row, request in enumerate(requests)],
        num_tokens=12,
        block_copies=[(1, 2)],
    )
    data = encode_frame(Step(for_other_ranks(output), [8]))
    assert b"secret" not in data
    assert b"plain" not in data
    step = msgspec.msgpack.decode(data[4:], type=LeaderMessage)
    assert isinstance(step, Step)
    assert step.last_tokens == [8]
    assert step.output.scheduled == output.scheduled
    assert step.output.block_copies == [(1, 2)]
    plain, scored, pooled, heard = step.output.admitted
    assert [one.row for one in step.output.admitted] == [0, 1, 2, 3]
    assert plain.request.prompt_token_ids == []
    assert scored.request.prompt_token_ids == [4, 5]
    assert scored.request.sampling.prompt_logprobs == 2
    assert pooled.request.pooling == PoolingParams()
    assert pooled.request.audio == requests[2].audio
    assert heard.request.prompt_token_ids == [7, 7, 8]
    assert heard.request.sounds == requests[3].sounds
