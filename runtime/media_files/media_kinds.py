"""`MediaKind`: what stands in a prompt besides text."""

from __future__ import annotations

from enum import StrEnum

__all__ = ("MediaKind",)


class MediaKind(StrEnum):
    """The kinds of media. The values are their names in errors."""

    image = "image"
    video = "video"
    sound = "sound"
