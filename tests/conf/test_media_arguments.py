"""vLLM's arguments of media: which settings they set, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato.conf.arguments.engine_arguments import argument_settings
from ostinato.conf.compose import load_config
from ostinato.conf.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ({"limit_mm_per_prompt": '{"image": 4}'}, {"images.max_per_request": 4}),
        (
            {"limit_mm_per_prompt": {"image": 4, "video": 0}},
            {"images.max_per_request": 4, "video.max_per_request": 0},
        ),
        ({"limit_mm_per_prompt": {"video": {"count": 3}}}, {"video.max_per_request": 3}),
        (
            {"limit_mm_per_prompt": {"image": {"count": 2, "width": 9}}},
            {"images.max_per_request": 2},
        ),
        (
            {"limit_mm_per_prompt": "image=3,video=2"},
            {"images.max_per_request": 3, "video.max_per_request": 2},
        ),
        (
            {"limit_mm_per_prompt": {"image": 0, "video": 0}},
            {"images.max_per_request": 0, "video.max_per_request": 0},
        ),
        ({"limit_mm_per_prompt": {"audio": 0}}, {"audio.max_per_request": 0}),
        ({"limit_mm_per_prompt": "audio=3"}, {"audio.max_per_request": 3}),
        ({"limit_mm_per_prompt": {"smell": 0}}, {}),
        (
            {"language_model_only": True},
            {
                "images.max_per_request": 0,
                "video.max_per_request": 0,
                "audio.max_per_request": 0,
            },
        ),
        ({"language_model_only": False}, {}),
        ({"mm_processor_kwargs": '{"max_pixels": 1000}'}, {"images.max_resized_pixels": 1000}),
        ({"mm_processor_kwargs": {}}, {}),
        (
            {"media_io_kwargs": '{"video": {"num_frames": 40, "fps": 2.5}}'},
            {"video.max_frames": 40, "video.fps": 2.5},
        ),
        ({"media_io_kwargs": {"video": {"fps": "1"}, "image": {}}}, {"video.fps": 1}),
        ({"media_io_kwargs": {"video": {"num_frames": -1}}}, {"video.max_frames": 768}),
        ({"media_io_kwargs": "{}"}, {}),
        ({"video_pruning_rate": 0}, {}),
        ({"allowed_media_domains": ["a.test", "b.test"]}, {"images.domains": ["a.test", "b.test"]}),
        ({"allowed_media_domains": '["a.test"]'}, {"images.domains": ["a.test"]}),
        ({"mm_processor_cache_gb": 0, "interleave_mm_strings": False}, {}),
    ],
)
def test_settings(arguments: dict[str, Any], settings: dict[str, Any]) -> None:
    found = argument_settings(arguments)
    assert found == settings
    config = load_config(values=found)  # the values are legal
    for key, value in settings.items():
        section, name = key.split(".")
        assert getattr(getattr(config, section), name) == value


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"limit_mm_per_prompt": {"smell": 1}}, "smell is not supported, only image, video and a"),
        ({"limit_mm_per_prompt": {"video": "many"}}, "the limit of video must be a whole number"),
        (
            {"limit_mm_per_prompt": {"image": 0, "video": 2}},
            "give image 1 or more, or give video 0",
        ),
        ({"limit_mm_per_prompt": "video=1,image=0"}, "tower is not loaded, so there are no videos"),
        ({"media_io_kwargs": {"video": {"num_frames": 0}}}, "num_frames of video must be a numb"),
        ({"media_io_kwargs": {"video": {"fps": 0}}}, "fps of video must be a number above 0"),
        ({"media_io_kwargs": {"video": {"fps": "nan"}}}, "fps of video must be a number above 0"),
        ({"media_io_kwargs": {"video": {"backend": "x"}}}, "the key 'backend' of video is not"),
        ({"media_io_kwargs": {"video": 3}}, "it must be JSON such as"),
        ({"media_io_kwargs": {"image": {"mode": "RGB"}}}, "image is read in one way"),
        ({"video_pruning_rate": 0.5}, "lower video.max_frames"),
        ({"limit_mm_per_prompt": {"image": -1}}, "the limit of image must be a whole number"),
        ({"limit_mm_per_prompt": "3"}, "it must be JSON such as"),
        ({"limit_mm_per_prompt": "{"}, "it must be JSON such as"),
        ({"language_model_only": "maybe"}, "it must be true or false"),
        ({"mm_processor_kwargs": {"min_pixels": 3}}, "the key 'min_pixels' is not supported"),
        ({"mm_processor_kwargs": {"max_pixels": 0}}, "max_pixels must be a whole number, 1 or"),
        ({"mm_processor_kwargs": "[1]"}, "it must be JSON such as"),
        ({"allowed_local_media_path": "/data"}, "files of this machine are not read"),
        ({"mm_processor_cache_gb": 4}, "images.cache_tokens"),
        ({"mm_encoder_tp_mode": "data"}, "fixed; leave it out"),
    ],
)
def test_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        argument_settings(arguments)
