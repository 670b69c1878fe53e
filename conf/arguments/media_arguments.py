"""Converts vLLM's arguments of media to the settings of `images`, `video` and `audio`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from ostinato.conf.arguments.json_values import json_object

__all__ = ("MEDIA_REFUSED", "MEDIA_SETTINGS")

_MAX_PER_REQUEST = "images.max_per_request"
_MAX_RESIZED_PIXELS = "images.max_resized_pixels"
_MAX_VIDEOS = "video.max_per_request"
_MAX_SOUNDS = "audio.max_per_request"
_MAX_FRAMES = "video.max_frames"
_FPS = "video.fps"
_NO_PREPARED_CACHE = (
    "prepared images are not kept; images.cache_tokens is the room for their embeddings"
)
# Arguments without a setting -> the values that are accepted, and why others are refused.
MEDIA_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "allowed_local_media_path": (
        ("",),
        "files of this machine are not read for requests; send images as data: URLs, or as images"
        " of Pillow with LLM",
    ),
    "mm_processor_cache_gb": ((0, 0.0), _NO_PREPARED_CACHE),
    "mm_processor_cache_type": ((), _NO_PREPARED_CACHE),
    "mm_shm_cache_max_object_size_mb": ((), _NO_PREPARED_CACHE),
    "mm_encoder_tp_mode": ((), "how the ranks run the vision tower is fixed; leave it out"),
    "mm_encoder_attn_backend": ((), "the vision tower has one form of attention; leave it out"),
    "interleave_mm_strings": (
        (False,),
        "images stand where the message has them; leave it out",
    ),
    "enable_mm_embeds": ((False,), "embeddings of images are not accepted; send images"),
    "skip_mm_profiling": (
        (False,),
        "the memory of the vision tower is planned, not measured; leave it out",
    ),
    "video_pruning_rate": (
        (0, 0.0),
        "all embeddings of a video are used; lower video.max_frames or video.max_resized_pixels",
    ),
}
_LIMIT_FORM = 'it must be JSON such as {"image": 4}'
_FRAMES_FORM = 'it must be JSON such as {"video": {"num_frames": 32, "fps": 2}}'
_ALL = 768  # the largest value of `video.max_frames`
_FRAMES = {"num_frames": _MAX_FRAMES, "fps": _FPS}
_MOST = {"image": _MAX_PER_REQUEST, "video": _MAX_VIDEOS, "audio": _MAX_SOUNDS}


def _most_of_each(value: object) -> Mapping[str, object]:
    """`limit_mm_per_prompt`: the most images, videos and sounds of a request.

    The older form `image=4` is read too.
    """
    settings: dict[str, object] = {}
    for medium, limit in _limits(value).items():
        count = limit
        if isinstance(limit, Mapping):  # also has the sizes with which vLLM measures memory
            count = cast(Mapping[str, object], limit).get("count")
        text = str(count).strip()
        if not (text.isascii() and text.isdecimal()):
            raise ValueError(f"the limit of {medium} must be a whole number, got {limit!r}")
        if medium in _MOST:
            settings[_MOST[medium]] = int(text)
        elif int(text):
            raise ValueError(
                f"{medium} is not supported, only image, video and audio; leave it out or give 0"
            )
    if settings.get(_MAX_PER_REQUEST) == 0 and settings.get(_MAX_VIDEOS):
        raise ValueError(
            "with 0 for image, the vision tower is not loaded, so there are no videos either; give"
            " image 1 or more, or give video 0"
        )
    return settings


def _limits(value: object) -> Mapping[str, object]:
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        pairs = [item.partition("=") for item in value.split(",")]
        if not all(equals for _, equals, _ in pairs):
            raise ValueError(_LIMIT_FORM)
        return {name.strip(): limit for name, _, limit in pairs}
    return json_object(value, _LIMIT_FORM)


def _media_unless_disabled(value: object) -> Mapping[str, object]:
    """`language_model_only`: with true, requests with media are refused."""
    word = str(value).strip().lower()
    if word not in ("true", "false"):
        raise ValueError("it must be true or false")
    return dict.fromkeys(_MOST.values(), 0) if word == "true" else {}


def _processor_settings(value: object) -> Mapping[str, object]:
    """`mm_processor_kwargs`: the key `max_pixels`."""
    fields = json_object(value, 'it must be JSON such as {"max_pixels": 1000000}')
    settings: dict[str, object] = {}
    for key, given in fields.items():
        if key != "max_pixels":
            raise ValueError(
                f"the key {key!r} is not supported, only max_pixels: other sizes are those of the"
                " checkpoint's preprocessor_config.json; leave it out"
            )
        text = str(given).strip()
        if not (text.isascii() and text.isdecimal() and int(text)):
            raise ValueError(f"max_pixels must be a whole number, 1 or more, got {given!r}")
        settings[_MAX_RESIZED_PIXELS] = int(text)
    return settings


def _frames(value: object) -> Mapping[str, object]:
    """`media_io_kwargs`: the most frames of a video, and the frames of a second.

    The number -1 means all frames. Here it means as many as a setting can allow.
    """
    media = json_object(value, _FRAMES_FORM)
    settings: dict[str, object] = {}
    for medium, given in media.items():
        fields = json_object(given, _FRAMES_FORM)
        if medium != "video" and fields:
            raise ValueError(f"{medium} is read in one way; only video has settings; leave it out")
        for key, number in fields.items():
            if key not in _FRAMES:
                raise ValueError(
                    f"the key {key!r} of video is not supported, only num_frames and fps; leave it"
                    " out"
                )
            is_all = key == "num_frames" and str(number).strip() == "-1"
            settings[_FRAMES[key]] = _ALL if is_all else _above_zero(f"{key} of video", number)
    return settings


def _above_zero(name: str, value: object) -> int | float:
    try:
        number = float(str(value))
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"{name} must be a number above 0, got {value!r}")
    return int(number) if number.is_integer() else number


# Arguments with a setting -> its key, the function that reads the value, whether it is a flag.
MEDIA_SETTINGS: dict[str, tuple[str, Callable[[object], Mapping[str, object]], bool]] = {
    "limit_mm_per_prompt": (_MAX_PER_REQUEST, _most_of_each, False),
    "language_model_only": (_MAX_PER_REQUEST, _media_unless_disabled, True),
    "media_io_kwargs": (_MAX_FRAMES, _frames, False),
    "mm_processor_kwargs": (_MAX_RESIZED_PIXELS, _processor_settings, False),
}
