"""What the first fork of a request may do, and the limits of each fork."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ostinato.api.preparation.fork_limits import LARGE_BYTES, first_grant, fork_limits
from ostinato.api.preparation.preparation import Arrival, Grant, PreparationSettings
from ostinato.models.vision.video_spec import VideoSpec
from ostinato.runtime.types.engine_info import ServedModel
from tests.api.media.image_apps import image_spec, served
from tests.api.media.sound_apps import served_sounds, sound_spec

TEXT = served(Path(), None)
VIDEO = VideoSpec(
    placeholder_id=2,
    placeholder="<v>",
    marked_placeholder="[<v>]",
    start_id=3,
    end_id=4,
    min_pixels=64,
    max_pixels=1024,
)
MODEL = msgspec.structs.replace(TEXT, images=image_spec(1, video=VIDEO), media_cache_tokens=256)
SETTINGS = PreparationSettings()
ARRIVAL = Arrival()
MIB = 1 << 20


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"tools": [{"video_id": 1}]}', Grant.text),
        (b'{"type": "video_url", "video_url": "data:"}', Grant.text),
        (b'{"type": "video_url", "video_url": "data:"}' + b" " * LARGE_BYTES, Grant.template),
        (b'{"type": "input_image", "image_url": "data:"}', Grant.images),
        (b'{"type": "image", "text": "video still"}' + b" " * LARGE_BYTES, Grant.images),
        (b" " * LARGE_BYTES + b'{"type": "image"}', Grant.template),
        (b"{}", Grant.text),
    ],
    ids=str,
)
def test_the_first_fork(data: bytes, expected: Grant):
    assert first_grant(data, len(data), ARRIVAL, MODEL) is expected
    of_text = Grant.template if len(data) > LARGE_BYTES else Grant.text
    assert first_grant(data, len(data), ARRIVAL, TEXT) is of_text


def test_a_conversation_before_the_body_and_a_form():
    assert first_grant(b"{}", LARGE_BYTES + 1, ARRIVAL, MODEL) is Grant.template
    form = Arrival(content_type="multipart/form-data; boundary=a")
    assert first_grant(b'"image"', 7, form, MODEL) is Grant.audio


def memory(granted: Grant, size: int, arrival: Arrival = ARRIVAL) -> int:
    return fork_limits(granted, size, arrival, MODEL, SETTINGS).memory_bytes


@pytest.mark.parametrize("granted", [Grant.images, Grant.videos])
def test_the_memory_for_media(granted: Grant):
    """A large body has a large image or video, not much text."""
    least = memory(granted, 0)
    assert memory(granted, 1000) - least == 168 * 1000
    assert memory(granted, 8 * MIB) - least == 168 * 8 * MIB
    assert memory(granted, 84 * MIB) - least == (160 * 8 + 8 * 84) * MIB
    fetched = Arrival(fetched={"a": bytes(MIB), "b": bytes(MIB)})
    assert memory(granted, 1000, fetched) - memory(granted, 1000) == 6 * MIB


def test_videos_take_more_memory_than_images_and_texts():
    for size in (0, 1000, MIB):
        values = [memory(granted, size) for granted in (Grant.text, Grant.images, Grant.videos)]
        assert sorted(set(values)) == values
    assert memory(Grant.videos, 84 * MIB) < memory(Grant.template, 84 * MIB) / 2


@pytest.mark.parametrize("granted", Grant)
def test_only_forks_for_text_prepare_further_requests(granted: Grant):
    limits = fork_limits(granted, 100, ARRIVAL, MODEL, SETTINGS)
    assert limits.is_shared is (granted is Grant.text)
    assert (limits.niceness == 0) is limits.is_shared


LISTENER = served_sounds(Path(), sound_spec(2), media_cache_tokens=100)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"type": "input_audio", "input_audio": {}}', Grant.audio),
        (b'{"type": "audio_url", "audio_url": "data:"}' + b" " * LARGE_BYTES, Grant.audio),
        (b" " * LARGE_BYTES + b'{"type": "input_audio"}', Grant.template),
        (b'{"type": "image_url", "image_url": "data:"}', Grant.text),
        (b'{"content": "audio_url"}', Grant.audio),
        (b'{"content": "an audio_url"}', Grant.text),
        (b"{}", Grant.text),
    ],
    ids=str,
)
def test_the_first_fork_of_a_model_that_takes_sounds(data: bytes, expected: Grant):
    assert first_grant(data, len(data), ARRIVAL, LISTENER) is expected
    of_text = Grant.template if len(data) > LARGE_BYTES else Grant.text
    assert first_grant(data, len(data), ARRIVAL, TEXT) is of_text


def test_the_memory_for_sounds():
    def memory_of(model: ServedModel, size: int, arrival: Arrival = ARRIVAL) -> int:
        return fork_limits(Grant.audio, size, arrival, model, SETTINGS).memory_bytes

    least = memory_of(LISTENER, 0)
    assert memory_of(LISTENER, 1000) - least == 168 * 1000
    assert memory_of(LISTENER, 84 * MIB) - least == (160 * 8 + 8 * 84) * MIB
    fetched = Arrival(fetched={"a": bytes(MIB), "b": bytes(MIB)})
    assert memory_of(LISTENER, 1000, fetched) - memory_of(LISTENER, 1000) == 6 * MIB
    # An embedding has four frames of 16 bins.
    more = msgspec.structs.replace(LISTENER, media_cache_tokens=1100)
    assert memory_of(more, 0) - least == 3 * 4 * 16 * 4 * 1000
