"""Which images and audio a model takes, and what is refused by name."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.models.audio.audio_spec import AudioSpec
from ostinato.models.vision.video_spec import EXTRA_POSITIONS
from ostinato.runtime.engine.accepted_inputs import AcceptedInputs
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.audio import PromptAudio, PromptSound
from ostinato.runtime.types.images import PromptImage
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from tests.runtime.toy_sounds import SOUND_SPEC, toy_sound
from tests.runtime.toy_tower import toy_image, toy_pair, with_ends

SOUNDS = AcceptedInputs(12, sounds=SOUND_SPEC)
AUDIO = AudioSpec(
    sampling_rate=16,
    num_bins=3,
    fft_size=4,
    hop_size=1,
    window_s=2,
    start_id=1,
    end_id=0,
    no_timestamps_id=2,
    first_timestamp_id=3,
)


def request(*media: PromptImage | PromptSound, audio: PromptAudio | None = None) -> Request:
    return Request(
        request_id="a#0",
        prompt_token_ids=[1],
        sampling=SamplingParams(),
        images=[one for one in media if isinstance(one, PromptImage)],
        sounds=[one for one in media if isinstance(one, PromptSound)],
        audio=audio,
    )


def refusal(inputs: AcceptedInputs, one: Request) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        inputs.check(one)
    return caught.value


@pytest.mark.parametrize("num_rows", [0, 5])
def test_images_that_never_fit_are_refused(num_rows: int) -> None:
    error = refusal(AcceptedInputs(num_rows), request(toy_image(1, 3, 2)))
    assert ("takes none" if num_rows == 0 else "at most 5 fit") in str(error)
    assert error.param == "messages"


def test_tokens_that_end_rows_need_no_room() -> None:
    image = with_ends(toy_image(1, 3, 2))
    assert (image.num_tokens, image.num_rows) == (9, 6)
    AcceptedInputs(6).check(request(image))
    error = refusal(AcceptedInputs(5), request(image))
    assert "have 6 embeddings together, and at most 5 fit (images.cache_tokens)" in str(error)


def test_videos_with_more_positions_than_the_model_has_are_refused() -> None:
    inputs = AcceptedInputs(12)
    for extra, is_refused in ((EXTRA_POSITIONS, False), (EXTRA_POSITIONS + 1, True)):
        offset = extra + 2 * 6 - 1  # the last pair of a video of two pairs with 6 tokens each
        later = toy_pair(2, 3, 2, 6, time_offset=offset, first=False)
        video = request(toy_pair(1, 3, 2), later)
        if is_refused:
            error = refusal(inputs, video)
            assert f"take {extra} more" in str(error)
            assert error.code == "video_too_long"
        else:
            inputs.check(video)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8), st.booleans()), max_size=4))
def test_sounds_fit_if_their_different_windows_have_no_more_tokens_than_rows(
    parts: Sequence[tuple[int, int, bool]],
) -> None:
    sounds = [
        toy_sound(seed, num_tokens, is_odd=is_odd and num_tokens < 8)
        for seed, num_tokens, is_odd in parts
    ]
    distinct = {(sound.features, sound.num_tokens) for sound in sounds}
    total = sum(num_tokens for _, num_tokens in distinct)
    if total <= SOUNDS.num_rows:
        SOUNDS.check(request(*sounds))
    else:
        error = refusal(SOUNDS, request(*sounds))
        assert f"{total} tokens together, and at most 12 fit (audio.cache_tokens)" in str(error)
        assert (error.param, error.code) == ("messages", "too_many_embeddings")


@given(num_bins=st.integers(0, 5), num_frames=st.integers(0, 40), num_tokens=st.integers(0, 10))
def test_only_windows_of_the_sizes_that_a_tower_takes_are_accepted(
    num_bins: int, num_frames: int, num_tokens: int
) -> None:
    """The right ones are listed."""
    right = {
        (sound.num_bins, sound.num_frames, sound.num_tokens)
        for count in range(1, 9)
        for is_odd in (False, True)
        if (count, is_odd) != (8, True)
        for sound in [toy_sound(1, count, is_odd=is_odd)]
    }
    sound = msgspec.structs.replace(
        toy_sound(1, 1), num_bins=num_bins, num_frames=num_frames, num_tokens=num_tokens
    )
    if (num_bins, num_frames, num_tokens) in right:
        SOUNDS.check(request(sound))
    else:
        error = refusal(SOUNDS, request(sound))
        assert (error.param, error.code) == ("messages", "invalid_value")


def test_what_a_model_does_not_take_is_refused_by_name() -> None:
    sound, image = toy_sound(1, 2), toy_image(1, 2, 2)
    audio = PromptAudio(digest=b"d", num_bins=3, num_frames=32)
    text, images = AcceptedInputs(), AcceptedInputs(12)
    whisper = AcceptedInputs(4, audio=AUDIO)
    cases = [
        (text, request(sound), "request a has audio in its messages, and this model takes none"),
        (images, request(sound), "has audio in its messages, and this model takes none"),
        (whisper, request(sound), "has no audio file.*send a file to /v1/audio/transcriptions"),
        (whisper, request(sound, audio=audio), "has audio in its messages.*takes none"),
        (whisper, request(image, audio=audio), "has images, and this model takes none"),
        (SOUNDS, request(image), "has images, and this model takes none"),
        (SOUNDS, request(image, sound), "has images, and this model takes none"),
        (SOUNDS, request(audio=audio), "has an audio file, and this model takes none"),
    ]
    for inputs, one, text_of_error in cases:
        with pytest.raises(InvalidRequestError, match=text_of_error):
            inputs.check(one)
    for inputs, one in ((text, request()), (images, request(image)), (SOUNDS, request(sound))):
        inputs.check(one)
    whisper.check(request(audio=audio))
