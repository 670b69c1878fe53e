"""Shows images and videos to a chat template: as parts of a message, or as placeholder texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ostinato.models.vision.image_spec import ImageSpec

__all__ = (
    "IMAGE_PART",
    "VIDEO_PART",
    "shows_images",
    "shows_videos",
    "text_part",
    "with_media_shown",
)

IMAGE_PART: Mapping[str, str] = {"type": "image"}
VIDEO_PART: Mapping[str, str] = {"type": "video"}
_IMAGE = re.compile(r"""['"]image['"]""")
_VIDEO = re.compile(r"""['"]video['"]""")
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


def shows_videos(source: str) -> bool:
    """Whether a chat template reads parts of the type `video`.

    Args:
        source: the template.
    """
    return _VIDEO.search(source) is not None


def with_media_shown(
    messages: Sequence[Mapping[str, Any]], source: str, spec: ImageSpec
) -> list[dict[str, Any]]:
    """The messages in the form that a chat template reads.

    A template that reads parts of the type `image` or `video` gets parts in the order of the
    message: `text_part`, and `IMAGE_PART` and `VIDEO_PART` if it reads them. Such a template may
    read no plain texts. Then each text becomes one part. Another template gets one text, in which
    the parts are joined by newlines. Where a template does not read an image or a video, its
    `marked_placeholder` stands for it as text.

    Args:
        messages: the conversation. The content of a message is a text or a list of parts.
        source: the template.
        spec: how the model takes images and videos.
    """
    has_images, has_videos = shows_images(source), shows_videos(source)
    reads_texts = _ASKS_FOR_TEXT.search(source) is not None
    texts: dict[str, str] = {}  # type of a part that the template does not read -> its text
    if not has_images:
        texts["image"] = spec.marked_placeholder
    if not has_videos and spec.video is not None:
        texts["video"] = spec.video.marked_placeholder
    shown: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and (has_images or has_videos) and not reads_texts:
            content = [text_part(content)]
        elif isinstance(content, list):
            parts = [_shown_part(part, texts) for part in cast("list[Mapping[str, Any]]", content)]
            content = parts
            if not has_images and not has_videos:
                content = "\n".join(part["text"] for part in parts)
        shown.append({**message, "content": content} if "content" in message else dict(message))
    return shown


def _shown_part(part: Mapping[str, Any], texts: Mapping[str, str]) -> Mapping[str, Any]:
    text = texts.get(part["type"])
    return part if text is None else text_part(text)
