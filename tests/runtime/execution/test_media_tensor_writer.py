"""The step tensors of prompts with images or sounds, in chunks and with decodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.graphs.buffers import StaticBuffers
from ostinato.models.step_tensors import GridTensors, MediaTensors
from ostinato.runtime.execution.batch_builder import BatchBuilder
from ostinato.runtime.execution.encoding.image_encoder import ImageEncoder
from ostinato.runtime.execution.encoding.input_encoder import InputEncoder
from ostinato.runtime.execution.encoding.media_tensor_writer import MediaTensorWriter
from ostinato.runtime.execution.encoding.rank_encoder import RankEncoder
from ostinato.runtime.execution.encoding.sound_encoder import SoundEncoder
from ostinato.runtime.execution.executor import AdvanceEncodings, BeginEncoding
from ostinato.runtime.images.grid_positions import grid_positions
from ostinato.runtime.types.audio import PromptSound
from ostinato.runtime.types.images import PromptImage
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import AdmittedSequence, ScheduledSequence, SchedulerOutput
from tests.runtime.toy_sounds import SOUND_SPEC, ToySoundTower, toy_sound, toy_sound_embeddings
from tests.runtime.toy_sounds import WIDTH as SOUND_WIDTH
from tests.runtime.toy_tower import (
    SPEC,
    WIDTH,
    ToyTower,
    toy_embeddings,
    toy_image,
    toy_pair,
    with_ends,
)

NUM_ROWS, BLOCK = 256, 4


@st.composite
def prompts(draw: st.DrawFn) -> Request:
    """A prompt of texts, images and videos, in any order."""
    images: list[PromptImage] = []
    token_ids: list[int] = []
    for _ in range(draw(st.integers(0, 2))):
        token_ids += [1] * draw(st.integers(0, 3))
        height, width = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        offsets = sorted(draw(st.lists(st.integers(1, 40), max_size=2)))
        is_video = draw(st.booleans())
        for offset in [0, *offsets] if is_video else [0]:
            seed, begin = draw(st.integers(0, 1)), len(token_ids)
            images.append(
                toy_pair(seed, height, width, begin, time_offset=offset, first=not offset)
                if is_video
                else toy_image(seed, height, width, begin)
            )
            token_ids += [SPEC.placeholder_id] * images[-1].num_tokens
    token_ids += [2] * draw(st.integers(1, 3))
    return Request(
        request_id="r", prompt_token_ids=token_ids, sampling=SamplingParams(), images=images
    )


@st.composite
def prompts_with_ends(draw: st.DrawFn) -> Request:
    """A prompt of texts, and of images whose rows end with tokens."""
    images: list[PromptImage] = []
    token_ids: list[int] = []
    for _ in range(draw(st.integers(0, 3))):
        token_ids += [1] * draw(st.integers(0, 3))
        seed, height, width = (draw(st.integers(*limits)) for limits in ((0, 1), (1, 3), (1, 3)))
        images.append(with_ends(toy_image(seed, height, width, len(token_ids))))
        token_ids += ([SPEC.placeholder_id] * width + [3]) * height
    token_ids += [2] * draw(st.integers(1, 3))
    return Request(
        request_id="r", prompt_token_ids=token_ids, sampling=SamplingParams(), images=images
    )


@st.composite
def prompts_with_sounds(draw: st.DrawFn) -> Request:
    """A prompt of texts and sounds. Those of two windows have no text between them."""
    sounds: list[PromptSound] = []
    token_ids: list[int] = []
    for _ in range(draw(st.integers(0, 3))):
        token_ids += [1] * draw(st.integers(0, 3))
        seed, num_tokens = draw(st.integers(0, 1)), draw(st.integers(1, 7))
        sounds.append(toy_sound(seed, num_tokens, len(token_ids), is_odd=draw(st.booleans())))
        token_ids += [SOUND_SPEC.placeholder_id] * num_tokens
    token_ids += [2] * draw(st.integers(1, 3))
    return Request(
        request_id="r", prompt_token_ids=token_ids, sampling=SamplingParams(), sounds=sounds
    )


def encode_all(requests: list[Request], encoder: InputEncoder) -> RankEncoder:
    """A rank with the embeddings of all images and sounds."""
    rank = RankEncoder(encoder)
    media = {one.digest: one for request in requests for one in request.media}
    row = 1
    for digest, one in media.items():
        rows = list(range(row, row + one.num_rows))
        row += one.num_rows
        rank.begin(BeginEncoding(digest, rows, one.shape, one.data, []))
    rank.advance(AdvanceEncodings(60.0, []))
    return rank


def run_steps(
    requests: list[Request],
    chunks: list[int],
    buffers: StaticBuffers,
    writer: MediaTensorWriter,
    check: Callable[[int, ScheduledSequence, Request], None],
) -> None:
    """Write 20 steps in which all requests take part; `check` gets the first index of each."""
    builder = BatchBuilder(buffers)
    for row, request in enumerate(requests):
        builder.admit(row, request, [])
        writer.admit(row, request, [])
    starts = [0] * len(requests)
    is_first = True
    for number in range(20):
        scheduled: list[ScheduledSequence] = []
        for row, request in enumerate(requests):
            start, length = starts[row], len(request.prompt_token_ids)
            count = min(chunks[(number + row) % len(chunks)], max(length - start, 1))
            known = request.prompt_token_ids[start : start + count]
            ids = list(range(1 + 32 * row, 33 + 32 * row)) if is_first else []
            scheduled.append(ScheduledSequence(row, start, count, known, ids, int(not known)))
        is_first = False
        admitted: list[AdmittedSequence] = []
        output = SchedulerOutput(scheduled, admitted, sum(one.num_new_tokens for one in scheduled))
        builder.build(output)
        writer.write(output)
        begin = 0
        for entry, request in zip(scheduled, requests, strict=True):
            check(begin, entry, request)
            begin += entry.num_new_tokens
            starts[entry.row] += entry.num_new_tokens


def make_buffers(table: type[MediaTensors[np.ndarray]]) -> StaticBuffers:
    return StaticBuffers(
        max_num_tokens=32,
        max_num_seqs=4,
        max_blocks_per_seq=32,
        block_size=BLOCK,
        device=torch.device("cpu"),
        table=table,
    )


CHUNKS = st.lists(st.integers(1, 6), min_size=1)


@given(st.lists(prompts(), min_size=1, max_size=3), CHUNKS)
def test_every_token_has_the_row_and_the_position_of_its_prompt(requests, chunks):
    table = torch.zeros(1 + NUM_ROWS, WIDTH)
    rank = encode_all(requests, ImageEncoder(ToyTower(), [table], SPEC))
    buffers = make_buffers(GridTensors)
    host = buffers.host
    assert isinstance(host, GridTensors)

    def check(begin: int, entry: ScheduledSequence, request: Request) -> None:
        length = len(request.prompt_token_ids)
        positions, delta = grid_positions(length, request.images, SPEC)
        for offset in range(entry.num_new_tokens):
            place = entry.start + offset
            row = host.media_rows[begin + offset, 0]
            image = next((one for one in request.images if one.begin <= place < one.end), None)
            if image is None:
                assert row == 0
            else:
                pixel = place - image.begin
                assert torch.equal(table[row], toy_embeddings(image)[pixel])
                assert row == rank.rows_of(image.digest)[pixel]
            expected = positions[place].tolist() if place < length else [place + delta] * 3
            assert host.rope_positions[begin + offset].tolist() == expected

    run_steps(requests, chunks, buffers, MediaTensorWriter(buffers, rank, SPEC), check)


@given(st.lists(prompts_with_ends(), min_size=1, max_size=3), CHUNKS)
def test_a_token_that_ends_a_row_has_its_own_embedding(requests, chunks):
    """Placeholder tokens have the rows of their embeddings, in order; all other tokens have 0."""
    table = torch.zeros(1 + NUM_ROWS, WIDTH)
    rank = encode_all(requests, ImageEncoder(ToyTower(), [table], SPEC))
    buffers = make_buffers(MediaTensors)
    host = buffers.host
    assert isinstance(host, MediaTensors)
    expected: dict[int, list[torch.Tensor | None]] = {}
    for request in requests:
        embeddings = iter([one for image in request.images for one in toy_embeddings(image)])
        expected[id(request)] = [
            next(embeddings) if token == SPEC.placeholder_id else None
            for token in request.prompt_token_ids
        ]
        assert next(embeddings, None) is None

    def check(begin: int, entry: ScheduledSequence, request: Request) -> None:
        for offset in range(entry.num_new_tokens):
            row, place = host.media_rows[begin + offset, 0], entry.start + offset
            wanted = expected[id(request)][place : place + 1] or [None]
            if wanted[0] is None:
                assert row == 0
            else:
                assert torch.equal(table[row], wanted[0])

    run_steps(requests, chunks, buffers, MediaTensorWriter(buffers, rank, None), check)


@given(st.lists(prompts_with_sounds(), min_size=1, max_size=3), CHUNKS)
def test_every_token_of_a_sound_has_the_row_of_its_embedding(requests, chunks):
    table = torch.zeros(1 + NUM_ROWS, SOUND_WIDTH)
    rank = encode_all(requests, SoundEncoder(ToySoundTower(), table, SOUND_SPEC))
    buffers = make_buffers(MediaTensors)
    host = buffers.host
    assert isinstance(host, MediaTensors)

    def check(begin: int, entry: ScheduledSequence, request: Request) -> None:
        for offset in range(entry.num_new_tokens):
            place = entry.start + offset
            row = host.media_rows[begin + offset, 0]
            sound = next((one for one in request.sounds if one.begin <= place < one.end), None)
            if sound is None:
                assert row == 0
            else:
                expected = toy_sound_embeddings(sound)[place - sound.begin]
                assert torch.equal(table[row], expected)

    run_steps(requests, chunks, buffers, MediaTensorWriter(buffers, rank, None), check)
