"""The step tensor of models with audio: each token names the window of its sequence."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.graphs.buffers import StaticBuffers
from ostinato.models.step_tensors import AudioTensors
from ostinato.runtime.execution.encoding.audio_tensor_writer import AudioTensorWriter
from ostinato.runtime.execution.encoding.rank_encoder import RankEncoder
from ostinato.runtime.execution.executor import BeginEncoding
from ostinato.runtime.types.audio import PromptAudio
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import ScheduledSequence, SchedulerOutput

NUM_ROWS, MOST_TOKENS = 6, 5


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("admit"), st.integers(0, NUM_ROWS - 1), st.integers(0, 4)),
            st.tuples(
                st.just("step"),
                st.permutations(range(NUM_ROWS)),
                st.lists(st.integers(1, MOST_TOKENS), min_size=1, max_size=NUM_ROWS),
            ),
        ),
        max_size=12,
    )
)
def test_every_token_names_the_window_of_its_sequence(actions: list[tuple]) -> None:
    buffers = StaticBuffers(
        max_num_tokens=NUM_ROWS * MOST_TOKENS,
        max_num_seqs=NUM_ROWS,
        max_blocks_per_seq=1,
        block_size=64,
        device=torch.device("cpu"),
        table=AudioTensors,
    )
    encoder = RankEncoder(None)
    for number in range(1, 5):
        encoder.begin(BeginEncoding(bytes([number]), [10 * number], (1, 1), b"", []))
    writer = AudioTensorWriter(buffers, encoder, 4)
    windows = [0] * NUM_ROWS
    for action, first, second in actions:
        if action == "admit":
            audio = PromptAudio(digest=bytes([second]), num_bins=1, num_frames=1)
            sampling = SamplingParams()
            request = Request(request_id="r", prompt_token_ids=[1], sampling=sampling)
            if second:  # requests that measure the engine have no audio
                request = Request(
                    request_id="r", prompt_token_ids=[1], sampling=sampling, audio=audio
                )
            writer.admit(first, request, [])
            windows[first] = 10 * second if second else 1 + first % 4
            continue
        rows = first[: len(second)]
        scheduled = [
            ScheduledSequence(row, 0, count, [1] * count, [], 0)
            for row, count in zip(rows, second, strict=True)
        ]
        writer.write(SchedulerOutput(scheduled=scheduled, admitted=[], num_tokens=sum(second)))
        host = buffers.host
        assert isinstance(host, AudioTensors)
        expected = [
            windows[row] for row, count in zip(rows, second, strict=True) for _ in range(count)
        ]
        assert host.audio_windows[: sum(second), 0].tolist() == expected
