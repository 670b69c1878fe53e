"""Tokenizers, specs and videos that the tests of videos in requests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken

from ostinato.models.vision.image_spec import ImageSpec
from ostinato.models.vision.video_spec import VideoSpec
from tests.api.media.image_apps import data_url, image_spec, png
from tests.runtime.text import tokenizer_builders
from tests.runtime.video.video_files import encode

VIDEO = "<|video_pad|>"
START, END = "<|vision_start|>", "<|vision_end|>"
SHOWN = f"{START}{VIDEO}{END}"
_ADDED = ("<|image_pad|>", VIDEO, START, END)
# Reads texts and parts, as the template of Qwen2.5-VL does.
TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}[<|image_pad|>]"
    f"{{% elif p.type == 'video' %}}{SHOWN}"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
)


def save_video_model(directory: Path, template: str = TEMPLATE) -> dict[str, int]:
    """Write a tokenizer with the tokens of images and videos, and a template.

    Returns the ids of these tokens.
    """
    tokenizer = type(tokenizer_builders.byte_level_bpe()).from_str(
        tokenizer_builders.byte_level_bpe().to_str()
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _ADDED])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    ids: dict[str, int] = {}
    for text in _ADDED:
        token_id = tokenizer.token_to_id(text)
        assert token_id is not None
        ids[text] = token_id
    return ids


def video_spec(ids: dict[str, int], **fields: Any) -> ImageSpec:
    """One embedding for 4 x 4 pixels; a frame has 4 to 64 embeddings."""
    values: dict[str, Any] = {
        "placeholder_id": ids[VIDEO],
        "placeholder": VIDEO,
        "marked_placeholder": SHOWN,
        "start_id": ids[START],
        "end_id": ids[END],
        "min_pixels": 64,
        "max_pixels": 1024,
    }
    video = VideoSpec(**{**values, **fields})
    return image_spec(ids["<|image_pad|>"], video=video)


def film(
    num_frames: int, width: int = 16, height: int = 16, *, fps: int = 10, seed: int = 0
) -> bytes:
    """An mp4 file, each of whose frames has one grey."""
    frames = np.empty((num_frames, height, width, 3), np.uint8)
    frames[:] = ((60 + 37 * seed + 11 * np.arange(num_frames)) % 256)[:, None, None, None]
    return encode(frames, "mp4-mpeg4", fps=fps)


def film_url(data: bytes) -> str:
    return data_url(data, "video/mp4")


def frames_url(num_frames: int, width: int = 16, height: int = 16, *, seed: int = 0) -> str:
    """A data: URL of JPEG files, as vLLM's client library sends them."""
    frames = [
        data_url(png(width, height, 31 * seed + 20 * index, "JPEG"), "video/jpeg")
        for index in range(num_frames)
    ]
    return ",".join([frames[0], *(one.partition(",")[2] for one in frames[1:])])


def video_part(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}, **fields}
