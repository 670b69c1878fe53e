"""What the fork of a request may do at first, and how much memory it may take."""

from __future__ import annotations

from ostinato.api.preparation.preparation import Arrival, Grant, PreparationSettings
from ostinato.models.vision.video_spec import FRAMES_OF_PAIR
from ostinato.runtime.audio.audio_inputs import max_audio_memory
from ostinato.runtime.audio.sound_inputs import max_sound_memory
from ostinato.runtime.forks.fork_server import JobLimits
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.video.video_inputs import max_video_memory

__all__ = ("LARGE_BYTES", "first_grant", "fork_limits")

LARGE_BYTES = 256 << 10
"""A body above this size, with the conversation before it, gets a fork of its own."""

_NICENESS = 10  # the niceness of forks that prepare one request
# This begins a key or a type of every part with an image (image, image_url), unless the client has
# escaped its letters.
_IMAGE_KEY = b'"image'
# One of these is the type of every part with audio.
_AUDIO_TYPES = (b'"input_audio', b'"audio_url')
# The memory for a body: its values, its text in several encodings, and its tokens.
_LEAST_MEMORY = 512 << 20
_MEMORY_PER_BYTE = 160
# A body with media has at most so many bytes of text. A fork has so many copies of the rest.
_TEXT_BYTES = 8 << 20
_COPIES_OF_BODY = 8
# The memory for one pixel of an image as it is sent: decoded, converted and rotated, 4 bytes each.
_MEMORY_PER_PIXEL = 16
# The memory for one pixel of a prepared image: several copies of 3 bytes.
_MEMORY_PER_PREPARED_PIXEL = 16
# A fork has so many copies of a form at once, and so many of what is decoded from it: its samples
# and its spectrograms.
_COPIES_OF_FORM = 6
_COPIES_OF_DECODED = 2


def first_grant(data: bytes | bytearray, size: int, arrival: Arrival, model: ServedModel) -> Grant:
    """What the first fork for a request may do. A fork that needs more says so.

    A request with images or audio mostly gets a fork for them at once. A request with videos does
    not: its turns are the slowest, so a fork must have found a video first.

    Args:
        data: the body. Only its beginning is searched.
        size: bytes of the body and of the conversation before it.
        arrival: says whether the body is a form.
        model: the served model.
    """
    if arrival.content_type:
        return Grant.audio
    if model.images is not None and data.find(_IMAGE_KEY, 0, LARGE_BYTES) >= 0:
        return Grant.images
    if model.sounds is not None and any(
        data.find(one, 0, LARGE_BYTES) >= 0 for one in _AUDIO_TYPES
    ):
        return Grant.audio
    return Grant.template if size > LARGE_BYTES else Grant.text


def fork_limits(
    granted: Grant,
    size: int,
    arrival: Arrival,
    model: ServedModel,
    settings: PreparationSettings,
) -> JobLimits:
    """The limits of the fork of a request.

    Args:
        granted: what the fork may do.
        size: bytes of the body and of the conversation before it.
        arrival: has the media that were fetched, and says whether the body is a form.
        model: the served model.
        settings: the settings of the server.
    """
    if granted <= Grant.template:
        memory = _LEAST_MEMORY + _MEMORY_PER_BYTE * size
    elif arrival.content_type:
        memory = _form_memory(size, model, settings)
    else:
        text = _MEMORY_PER_BYTE * min(size, _TEXT_BYTES) + _COPIES_OF_BODY * size
        fetched = 3 * sum(map(len, arrival.fetched.values()))
        media = (
            _sound_memory(model, settings)
            if granted is Grant.audio
            else _media_memory(model, settings, has_videos=granted is Grant.videos)
        )
        memory = _LEAST_MEMORY + text + fetched + media
    if granted is Grant.text:
        return JobLimits(memory, is_shared=True)
    return JobLimits(memory, niceness=_NICENESS)


def _sound_memory(model: ServedModel, settings: PreparationSettings) -> int:
    """Bytes of memory for decoding and preparing the sounds of a request."""
    spec, num_rows = model.sounds, model.media_cache_tokens
    return 0 if spec is None else max_sound_memory(spec, settings.audio, num_rows)


def _form_memory(size: int, model: ServedModel, settings: PreparationSettings) -> int:
    """Bytes of memory for a form with audio."""
    decoded = 0 if model.audio is None else max_audio_memory(model.audio, settings.audio)
    return _LEAST_MEMORY + _COPIES_OF_FORM * size + _COPIES_OF_DECODED * decoded


def _media_memory(model: ServedModel, settings: PreparationSettings, *, has_videos: bool) -> int:
    """Bytes of memory for decoding and preparing the images and videos of a request."""
    spec = model.images
    if spec is None:
        return 0
    prepared = model.media_cache_tokens + spec.max_tokens  # one image is prepared before a 400
    pixels = prepared * spec.unit**2
    decoding = _MEMORY_PER_PIXEL * settings.images.max_pixels
    if has_videos:
        pixels *= FRAMES_OF_PAIR
        decoding = max(decoding, max_video_memory(settings.images, settings.video))
    return decoding + _MEMORY_PER_PREPARED_PIXEL * pixels
