"""`MediaKind`: what stands in a prompt besides text, and the size of its files."""

from __future__ import annotations

from enum import StrEnum

from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.conf.sections.images_schema import ImagesConfig
from ostinato.conf.sections.video_schema import VideoConfig

__all__ = ("MediaKind", "most_bytes")


class MediaKind(StrEnum):
    """The kinds of media. The values are their names in errors."""

    image = "image"
    video = "video"
    sound = "sound"

    @property
    def invalid_code(self) -> str:
        """The code of errors about its content. That of a sound is the one of all audio."""
        return "invalid_audio" if self is MediaKind.sound else f"invalid_{self.value}"

    def counted(self, number: int) -> str:
        """Such as `1 sound` and `2 sounds`."""
        return f"{number} {self.value}{'' if number == 1 else 's'}"


def most_bytes(config: ImagesConfig | VideoConfig | AudioConfig) -> int:
    """The most bytes of one encoded file."""
    return int(config.max_mib * (1 << 20))
