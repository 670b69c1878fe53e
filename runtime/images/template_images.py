"""Shows images to a chat template: as parts of a message, or as text of the placeholder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ostinato.models.vision.image_spec import ImageSpec

__all__ = ("IMAGE_PART", "shows_images", "text_part", "with_images_shown")

IMAGE_PART: Mapping[str, str] = {"type": "image"}
_IMAGE = re.compile(r"""['"]image['"]""")
_ASKS_FOR_TEXT = re.compile(r"\bis\s+(?:not\s+)?string\b")


def text_part(text: str) -> dict[str, str]:
    """A text as a part of a message."""
    return {"type": "text", "text": text}


def shows_images(source: str) -> bool:
    """Whether a chat template reads parts of the type `image`.

    Args:
        source: the template.
    """
    return _IMAGE.search(source) is not None


def with_images_shown(
    messages: Sequence[Mapping[str, Any]], source: str, spec: ImageSpec
) -> list[dict[str, Any]]:
    """The messages in the form that a chat template reads.

    A template that reads parts of the type `image` gets `IMAGE_PART` and `text_part` in the order
    of the message. Such a template may read no plain texts. Then each text becomes one part.
    Another template gets one text, in which `spec.marked_placeholder` stands for an image. The
    parts are joined by newlines.

    Args:
        messages: the conversation. The content of a message is a text or a list of parts.
        source: the template.
        spec: how the model takes images.
    """
    has_parts = shows_images(source)
    reads_texts = _ASKS_FOR_TEXT.search(source) is not None
    shown: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and has_parts and not reads_texts:
            content = [text_part(content)]
        elif isinstance(content, list) and not has_parts:
            parts = cast("list[Mapping[str, Any]]", content)
            content = "\n".join(part.get("text", spec.marked_placeholder) for part in parts)
        shown.append({**message, "content": content} if "content" in message else dict(message))
    return shown
