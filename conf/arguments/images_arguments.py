"""Converts vLLM's arguments of media to the settings of the section `images`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from ostinato.conf.arguments.json_values import json_object

__all__ = ("MEDIA_REFUSED", "MEDIA_SETTINGS")

_MAX_PER_REQUEST = "images.max_per_request"
_MAX_RESIZED_PIXELS = "images.max_resized_pixels"
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
    "media_io_kwargs": (("{}",), "images are read in one way; leave it out"),
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
    "video_pruning_rate": ((0, 0.0), "video is not supported; leave it out"),
}
_LIMIT_FORM = 'it must be JSON such as {"image": 4}'


def _image_limit(value: object) -> Mapping[str, object]:
    """`limit_mm_per_prompt`: the most images of a request. Limits of other media must be 0.

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
        if medium == "image":
            settings[_MAX_PER_REQUEST] = int(text)
        elif int(text):
            raise ValueError(f"{medium} is not supported, only image; leave it out or give 0")
    return settings


def _limits(value: object) -> Mapping[str, object]:
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        pairs = [item.partition("=") for item in value.split(",")]
        if not all(equals for _, equals, _ in pairs):
            raise ValueError(_LIMIT_FORM)
        return {name.strip(): limit for name, _, limit in pairs}
    return json_object(value, _LIMIT_FORM)


def _images_unless_disabled(value: object) -> Mapping[str, object]:
    """`language_model_only`: with true, requests with images are refused."""
    word = str(value).strip().lower()
    if word not in ("true", "false"):
        raise ValueError("it must be true or false")
    return {_MAX_PER_REQUEST: 0} if word == "true" else {}


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


# Arguments with a setting -> its key, the function that reads the value, whether it is a flag.
MEDIA_SETTINGS: dict[str, tuple[str, Callable[[object], Mapping[str, object]], bool]] = {
    "limit_mm_per_prompt": (_MAX_PER_REQUEST, _image_limit, False),
    "language_model_only": (_MAX_PER_REQUEST, _images_unless_disabled, True),
    "mm_processor_kwargs": (_MAX_RESIZED_PIXELS, _processor_settings, False),
}
