"""vLLM's arguments of media: which settings they set, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato.conf.arguments.engine_arguments import argument_settings
from ostinato.conf.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ({"limit_mm_per_prompt": '{"image": 4}'}, {"images.max_per_request": 4}),
        ({"limit_mm_per_prompt": {"image": 4, "video": 0}}, {"images.max_per_request": 4}),
        (
            {"limit_mm_per_prompt": {"image": {"count": 2, "width": 9}}},
            {"images.max_per_request": 2},
        ),
        ({"limit_mm_per_prompt": "image=3,video=0"}, {"images.max_per_request": 3}),
        ({"limit_mm_per_prompt": {"audio": 0}}, {}),
        ({"language_model_only": True}, {"images.max_per_request": 0}),
        ({"language_model_only": False}, {}),
        ({"mm_processor_kwargs": '{"max_pixels": 1000}'}, {"images.max_resized_pixels": 1000}),
        ({"mm_processor_kwargs": {}}, {}),
        ({"allowed_media_domains": ["a.test", "b.test"]}, {"images.domains": ["a.test", "b.test"]}),
        ({"allowed_media_domains": '["a.test"]'}, {"images.domains": ["a.test"]}),
        ({"mm_processor_cache_gb": 0, "interleave_mm_strings": False}, {}),
    ],
)
def test_settings(arguments: dict[str, Any], settings: dict[str, Any]) -> None:
    assert argument_settings(arguments) == settings


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"limit_mm_per_prompt": {"video": 1}}, "video is not supported, only image"),
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
