"""Tokenizers, templates, images and servers that the tests of images share."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import PIL.Image
from tokenizers import AddedToken

from ostinato.models.vision.image_spec import ImageSizing, ImageSpec
from ostinato.runtime.types.engine_info import ServedModel
from tests.runtime.text import tokenizer_builders

PLACEHOLDER = "<|image_pad|>"
# Reads texts and parts, as the template of Qwen2-VL does.
PARTS_TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}[<|image_pad|>]{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
# Reads parts only, and shows all images first, as the template of LLaVA 1.5 does.
IMAGES_FIRST_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: "
    "{% for p in m.content | selectattr('type', 'equalto', 'image') %}<|image_pad|>\n{% endfor %}"
    "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }} {% endfor %}"
    "{% endfor %}"
)
TEXT_TEMPLATE = "{% for m in messages %}<|begin|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"


def save_model(directory: Path, template: str) -> int:
    """Write a tokenizer with a placeholder token, and a template. Returns the token's id."""
    tokenizer = type(tokenizer_builders.byte_level_bpe()).from_str(
        tokenizer_builders.byte_level_bpe().to_str()
    )
    tokenizer.add_special_tokens([AddedToken(PLACEHOLDER, special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    token_id = tokenizer.token_to_id(PLACEHOLDER)
    assert token_id is not None
    return token_id


def image_spec(placeholder_id: int, **fields: Any) -> ImageSpec:
    """Dynamic sizing: one embedding for 4 x 4 pixels, at most 64 embeddings."""
    values: dict[str, Any] = {
        "sizing": ImageSizing.dynamic,
        "placeholder_id": placeholder_id,
        "placeholder": PLACEHOLDER,
        "marked_placeholder": f"[{PLACEHOLDER}]",
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "patch_size": 2,
        "merge_size": 2,
        "min_pixels": 16,
        "max_pixels": 1024,
    }
    return ImageSpec(**{**values, **fields})


def served(directory: Path, spec: ImageSpec | None, **fields: Any) -> ServedModel:
    values: dict[str, Any] = {
        "name": "vision",
        "max_model_len": 512,
        "vocab_size": 1000,
        "eos_token_ids": (0,),
        "tokenizer": str(directory),
        "images": spec,
        "media_cache_tokens": 256,
    }
    return ServedModel(**{**values, **fields})


def png(width: int, height: int, colour: int = 0, kind: str = "PNG") -> bytes:
    """An encoded image of one colour."""
    target = io.BytesIO()
    PIL.Image.new("RGB", (width, height), (colour % 256, 7, 9)).save(target, kind)
    return target.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), **fields}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


class Source:
    """The model and its tokenizer, as the preparation reads them."""

    def __init__(self, model: ServedModel, tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer
