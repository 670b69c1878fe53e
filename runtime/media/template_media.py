"""Shows media to a chat template: as parts of a message, or as placeholder texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ostinato.models.audio.sound_spec import SoundSpec
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.runtime.media_files.media_kinds import MediaKind

__all__ = ("MEDIA_PARTS", "text_part", "with_media_shown")

MEDIA_PARTS: Mapping[MediaKind, Mapping[str, str]] = {
    MediaKind.image: {"type": "image"},
    MediaKind.video: {"type": "video"},
    # Some templates look at the type, and some look for one of the keys.
    MediaKind.sound: {"type": "audio", "audio": "", "audio_url": ""},
}
"""The parts that templates read."""

_READS = {
    "image": re.compile(r"""['"]image['"]"""),
    "video": re.compile(r"""['"]video['"]"""),
    "audio": re.compile(r"""['"]audio(?:_url)?['"]"""),
}
_ASKS_FOR_TEXT = re.compile(r"\bis\s+(?:not\s+)?string\b")


def text_part(text: str) -> dict[str, str]:
    """A text as a part of a message."""
    return {"type": "text", "text": text}


def with_media_shown(
    messages: Sequence[Mapping[str, Any]], source: str, spec: ImageSpec | SoundSpec
) -> list[dict[str, Any]]:
    """The messages in the form that a chat template reads.

    A template that reads parts of the type `image`, `video` or `audio` gets parts in the order of
    the message: `text_part`, and those of `MEDIA_PARTS` that it reads. Such a template may read no
    plain texts. Then each text becomes one part. Another template gets one text, in which the parts
    are joined by newlines. Where a template does not read a medium, its `marked_placeholder` stands
    for it as text.

    Args:
        messages: the conversation. The content of a message is a text or a list of parts.
        source: the template.
        spec: how the model takes images and videos, or sounds.
    """
    read = {kind for kind, pattern in _READS.items() if pattern.search(source)}
    reads_texts = _ASKS_FOR_TEXT.search(source) is not None
    # Type of a part that the template does not read -> its text.
    texts = {kind: text for kind, text in _marked(spec).items() if kind not in read}
    shown: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and read and not reads_texts:
            content = [text_part(content)]
        elif isinstance(content, list):
            parts = [_shown_part(part, texts) for part in cast("list[Mapping[str, Any]]", content)]
            content = parts if read else "\n".join(part["text"] for part in parts)
        shown.append({**message, "content": content} if "content" in message else dict(message))
    return shown


def _marked(spec: ImageSpec | SoundSpec) -> dict[str, str]:
    """Type of a part that the model takes -> what stands for it as text."""
    if isinstance(spec, SoundSpec):
        return {"audio": spec.marked_placeholder}
    texts = {"image": spec.marked_placeholder}
    if spec.video is not None:
        texts["video"] = spec.video.marked_placeholder
    return texts


def _shown_part(part: Mapping[str, Any], texts: Mapping[str, str]) -> Mapping[str, Any]:
    text = texts.get(part["type"])
    return part if text is None else text_part(text)
